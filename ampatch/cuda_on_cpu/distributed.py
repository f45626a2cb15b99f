"""Several GPUs and several ranks: parallel models on the one CPU, and gloo in place of NCCL.

Owns how a model is distributed and how ranks communicate while the CPU stands in. Must not know device names.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ampatch.cuda_on_cpu.replacements import Function, Replacements
from ampatch.cuda_on_cpu.torch_cuda import always
from ampatch.sync_batch_norm import synchronised
from ampatch.torch_private.distributed import AVAILABLE_DEVICE_TYPE, SYNC_BATCH_NORM_CHECK
from ampatch.torch_private.modules import BatchNorm


def install(replacements: Replacements) -> None:
    """Replaces the functions that distribute work over GPUs and ranks."""
    data_parallel = sys.modules["torch.nn.parallel.data_parallel"]  # torch.nn.parallel.data_parallel is a function
    # DataParallel then finds no device, and calls the model itself, with the whole batch.
    replacements.ledger.set(data_parallel, AVAILABLE_DEVICE_TYPE, always(None))
    replacements.function(data_parallel, "data_parallel", _called_once)
    if dist.is_available():
        wrapper = nn.parallel.DistributedDataParallel
        replacements.method(wrapper, "__init__", _without_gpus)
        # The original only raises if a SyncBatchNorm layer is not on a GPU.
        replacements.method(*SYNC_BATCH_NORM_CHECK, always(None))
        replacements.method(nn.SyncBatchNorm, "forward", _synchronised)
        replacements.function(dist, "init_process_group", _first_backend_gloo)
        replacements.function(dist, "new_group", _third_backend_gloo)


def _called_once(
    _original: Function,
    module: nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return module(*inputs, **module_kwargs or {})


def _without_gpus(original: Function, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    # The first two of the positional arguments name devices as well.
    others = {name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")}
    original(self, module, None, None, *args[2:], **others)


# Process groups


def _first_backend_gloo(original: Function, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    return original(_gloo(backend, kwargs), *args, **kwargs)


def _third_backend_gloo(
    original: Function, ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    return original(ranks, timeout, _gloo(backend, kwargs), *args, **kwargs)


def _gloo(backend: str | None, others: dict[str, Any]) -> str | None:
    """Returns gloo for a backend with NCCL, such as ``"cpu:gloo,cuda:nccl"``; drops options that only NCCL takes."""
    others.pop("device_id", None)
    if backend is None or "nccl" not in backend.lower():
        return backend
    others.pop("pg_options", None)
    return "gloo"


def _synchronised(_original: Function, self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    if self.training and dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
        return synchronised(self, input)
    return BatchNorm.forward(self, input)
