"""What must be known of tracing: whether this thread records, captures, or runs below an operator.

Only asks; `compilers` is what tells torch's compilers of patches.
"""

from __future__ import annotations

import types

import torch

# Code of torch that runs below an operator while a tracer is at work, as C++ kernels do when none is. What it calls is
# not the user's, and casting it would give the operator a result of the wrong type.
_BELOW_OPERATORS = (
    "torch._decomp",
    "torch._inductor",
    "torch._meta_registrations",
    "torch._prims",
    "torch._refs",
    "torch._subclasses",
)


def is_recording() -> bool:
    """Returns whether what runs is taken down, faked or transformed, so that nothing may be written beside it."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
    )


def is_below_operators(frame: types.FrameType) -> bool:
    """Returns whether a frame belongs to the implementation of an operator for tracers."""
    return str(frame.f_globals.get("__name__", "")).startswith(_BELOW_OPERATORS)


def is_capturing() -> bool:
    """Returns whether what this thread does is recorded into a CUDA graph, and nothing can be read back."""
    # A worker forked from a process that uses a GPU counts as one that does not, and could not answer.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
