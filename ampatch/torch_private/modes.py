"""What torch keeps for each thread beside the numbers: modes, tracers, transforms and autocast. Must only name it."""

from __future__ import annotations

import torch
import torch.utils._python_dispatch as python_dispatch
from torch import overrides
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

#: Number of dispatch modes, of function modes, and True if a function mode is on, in this thread.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public functions that say which modes are on.
len_dispatch_stack = torch._C._len_torch_dispatch_stack
len_function_stack = torch._C._len_torch_function_stack
is_function_mode_enabled = torch._C._is_torch_function_mode_enabled

#: Base class of modes that see each operator, and a check for subclasses of Tensor that hold other tensors.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports them from a public module.
TorchDispatchMode = python_dispatch.TorchDispatchMode
is_traceable_wrapper_subclass = python_dispatch.is_traceable_wrapper_subclass

#: Dispatch modes of this thread, the innermost last; pushes one; pops the innermost; a block without any.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public way to enter a mode below those of other code.
dispatch_modes = python_dispatch._get_current_dispatch_mode_stack
push_dispatch_mode = python_dispatch._push_mode
pop_dispatch_mode = python_dispatch._pop_mode
without_dispatch_modes = python_dispatch._disable_current_modes

#: Function modes of this thread, the innermost last; pushes one; pops the innermost.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/overrides.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public way to enter a mode below those of other code.
function_modes = overrides._get_current_function_mode_stack
push_function_mode = overrides._push_mode
pop_function_mode = overrides._pop_mode

#: Modes of selective checkpoints, which run a region and recompute it: they record no graph.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public way to tell these modes from tracers.
SELECTIVE_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

#: State of ``torch.jit.trace`` in this thread; None outside of it.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/jit/python/python_tracer.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops ``torch.jit.trace``; ``torch.jit.is_tracing`` costs a Python frame in each call that amp casts.
get_tracing_state = torch._C._get_tracing_state

#: Innermost transform of ``torch.func`` in this thread, or None; True for a tensor inside of one; the tensor within it.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/functorch/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.func`` says publicly which transforms are on.
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
get_unwrapped = torch._C._functorch.get_unwrapped

#: True for a tensor in a batched backward pass, which the older ``vmap`` of ``is_grads_batched=True`` runs.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/functorch/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.autograd.grad`` uses the ``vmap`` of ``torch.func``.
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

#: True if autocast is on for any type of device; a block in which it is off for all of them.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public forms for all types of device at once.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
DisableAutocast = torch._C._DisableAutocast

#: Dispatch keys of autocast by type of device, and a block that leaves a key out or in.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public way to run an operator above autocast from within a dispatch mode.
AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard

#: Packages of torch that run below an operator under a tracer, as C++ kernels do without one.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_decomp/__init__.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; their names follow torch's tree of files.
BELOW_OPERATORS = (
    "torch._decomp",
    "torch._inductor",
    "torch._meta_registrations",
    "torch._prims",
    "torch._refs",
    "torch._subclasses",
)

#: The mode of this thread that has a key, or None; the keys of the modes that fake tensors, and that record operators
#: into a graph of ``torch.fx``.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: torch has public checks for fake tensors and proxies.
get_dispatch_mode = torch._C._get_dispatch_mode
FAKE = torch._C._TorchDispatchModeKey.FAKE
PROXY = torch._C._TorchDispatchModeKey.PROXY
