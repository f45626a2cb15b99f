"""Insides of ``nn.Module`` and of torch's layers. Must only name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm, instancenorm, module
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

#: Base classes of batch norms: with `nn.SyncBatchNorm`, and with instance norms too; and that of instance norms.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/batchnorm.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports them.
BatchNorm = batchnorm._BatchNorm
NormBase = batchnorm._NormBase
InstanceNorm = instancenorm._InstanceNorm

#: Checks that `nn.SyncBatchNorm` makes of a batch; they raise ValueError.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/batchnorm.py
#: Seen in: torch 2.10 to 2.13
#: Until: `nn.SyncBatchNorm` runs on the CPU.
SYNC_BATCH_NORM_CHECKS: tuple[Callable[..., None], ...] = (
    nn.SyncBatchNorm._check_input_dim,
    nn.SyncBatchNorm._check_non_zero_input_channels,
)

#: Attributes of a module: what runs its hooks and its forward, and what `nn.Module.compile` sets to run in its place.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public way to call a module without what others have put around its call.
CALL = "_call_impl"
COMPILED_CALL = "_compiled_call_impl"

#: Tables of a module's hooks around its forward: those before it and after it, also those before and after its
#: backward pass, also those of its state dict.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch lists hooks publicly.
FORWARD_HOOKS = "_forward_hooks"
HOOKS_AROUND_FORWARD = ("_forward_pre_hooks", FORWARD_HOOKS)
HOOKS_AROUND_PASSES = (*HOOKS_AROUND_FORWARD, "_backward_pre_hooks", "_backward_hooks")
STATE_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")

#: Global forward hooks that get keyword arguments, by id; removing a hook leaves its id there.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
#: Seen in: torch 2.10 to 2.13
#: Until: the handle of such a hook removes the id, as those of modules' own hooks do.
global_forward_hooks_with_kwargs = module._global_forward_hooks_with_kwargs

#: Code of the method that converts a module's tensors, to find its frame on the stack.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a hook for conversions of modules.
APPLY_CODE = nn.Module._apply.__code__

#: Where the method stands that `nn.DataParallel` copies modules with.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops `nn.DataParallel`.
REPLICATE = (nn.Module, "_replicate_for_data_parallel")

#: Attribute of a recurrent layer: its weights, in the order of the function that it calls.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/rnn.py
#: Seen in: torch 2.10 to 2.13
#: Until: `nn.RNNBase` has a public list of its weights.
FLAT_WEIGHTS = "_flat_weights"

#: Attribute of ``torch.backends.mha``: whether attention in eval mode may run as one operator.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/backends/mha/__init__.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; the patch ledger restores attributes, and torch has a public function only to set this one.
FASTPATH = "_is_fastpath_enabled"

#: Where torch lists the methods that a lazy module's parameter allows.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parameter.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; `ampatch run --cpu` replaces some of the methods.
ALLOWED_METHODS: tuple[Any, str] = (UninitializedTensorMixin, "_allowed_methods")

#: Attribute of the module that `torch.compile` returns: the module that it was given.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public way from a compiled module to its original.
COMPILED_ORIGINAL = "_orig_mod"
