"""Checks whether this thread is traced, is captured into a CUDA graph, or runs below an operator.

Must only read torch's state; `compilers` prepares torch's compilers for patches.
"""

from __future__ import annotations

import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Packages of torch that run below an operator under a tracer, as C++ kernels do without one. Their calls are not user
# code, and casting them would give the operator a result of the wrong type.
_BELOW_OPERATORS = (
    "torch._decomp",
    "torch._inductor",
    "torch._meta_registrations",
    "torch._prims",
    "torch._refs",
    "torch._subclasses",
)


class ObservingMode(TorchDispatchMode):
    """A dispatch mode that only watches: below it, amp casts and keeps casts as without it."""

    supports_higher_order_operators = True  # such as torch.cond


# Dispatch modes that record no graph: those of selective checkpointing (for running a region, and for recomputing it),
# and those that only watch.
_WITHOUT_GRAPH = (_CachingTorchDispatchMode, _CachedTorchDispatchMode, ObservingMode)


def is_traced() -> bool:
    """Returns True under ``torch.jit.trace`` and under a dispatch mode, except those that record no graph."""
    if torch._C._get_tracing_state() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not all(isinstance(mode, _WITHOUT_GRAPH) for mode in _get_current_dispatch_mode_stack())


def is_recording() -> bool:
    """Returns True if operators are traced, faked or transformed in this thread, so that amp must not write tensors."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
    )


def is_under_mode() -> bool:
    """Returns True under a dispatch mode that may record operators or change them."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not all(isinstance(mode, ObservingMode) for mode in _get_current_dispatch_mode_stack())


def is_below_operators(frame: types.FrameType) -> bool:
    """Returns True if a frame belongs to the implementation of an operator for tracers."""
    return str(frame.f_globals.get("__name__", "")).startswith(_BELOW_OPERATORS)


def is_capturing() -> bool:
    """Returns True if a CUDA graph captures this thread's operators, so that no value can be read from the device."""
    # A worker forked from a process that uses a GPU counts as uninitialized; the second check would fail there.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
