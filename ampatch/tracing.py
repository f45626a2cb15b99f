"""Checks whether this thread is traced, is captured, or runs below an operator, and whether tensors are batched.

Must only read torch's state; `compilers` prepares torch's compilers for patches.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from ampatch.torch_private import modes


class ObservingMode(modes.TorchDispatchMode):
    """A dispatch mode that only watches: below it, amp casts and keeps casts as without it."""

    supports_higher_order_operators = True  # such as torch.cond

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# Dispatch modes that record no graph: those of selective checkpointing (for running a region, and for recomputing it),
# and those that only watch.
_WITHOUT_GRAPH = (*modes.SELECTIVE_CHECKPOINT_MODES, ObservingMode)


def is_traced() -> bool:
    """Returns True under ``torch.jit.trace`` and under a dispatch mode, except those that record no graph."""
    if modes.get_tracing_state() is not None:
        return True
    if not modes.len_dispatch_stack():
        return False
    return not all(isinstance(mode, _WITHOUT_GRAPH) for mode in modes.dispatch_modes())


def is_recording() -> bool:
    """Returns True if operators are traced, faked or transformed in this thread, so that amp must not write tensors."""
    return (
        torch.compiler.is_compiling()
        or modes.get_tracing_state() is not None
        or modes.peek_interpreter_stack() is not None
        or modes.get_dispatch_mode(modes.FAKE) is not None
        or modes.get_dispatch_mode(modes.PROXY) is not None
    )


def is_batched(tensor: Tensor) -> bool:
    """Returns True if a tensor stands for several that a transform computes at once: its values cannot be kept."""
    return modes.is_legacy_batchedtensor(tensor) or modes.is_functorch_wrapped_tensor(tensor)


def is_under_mode() -> bool:
    """Returns True under a dispatch mode that may record operators or change them."""
    if not modes.len_dispatch_stack():
        return False
    return not all(isinstance(mode, ObservingMode) for mode in modes.dispatch_modes())


def is_below_operators(frame: types.FrameType) -> bool:
    """Returns True if a frame belongs to the implementation of an operator for tracers.

    Its calls are not user code: if they were cast, the operator's result would have the wrong type.
    """
    return str(frame.f_globals.get("__name__", "")).startswith(modes.BELOW_OPERATORS)


def is_capturing() -> bool:
    """Returns True if a CUDA graph captures this thread's operators, so that no value can be read from the device."""
    # A worker forked from a process that uses a GPU counts as uninitialized; the second check would fail there.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
