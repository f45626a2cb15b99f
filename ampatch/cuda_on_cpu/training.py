"""Parts of a training loop that torch handles by device: autocast, pinned batches and profilers.

Must not know tensors' devices or process groups: `devices` and `distributed` own these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ampatch.cuda_on_cpu.replacements import Function, Replacements


def install(replacements: Replacements) -> None:
    """Makes autocast, ``DataLoader`` and profilers work on the CPU."""
    replacements.method(torch.amp.autocast_mode.autocast, "__init__", _autocast)
    replacements.function(torch, "is_autocast_enabled", _is_autocast_enabled)
    replacements.function(torch, "get_autocast_dtype", _get_autocast_dtype)
    replacements.function(torch, "get_autocast_gpu_dtype", _get_autocast_gpu_dtype)
    replacements.function(torch.amp.autocast_mode, "_cast", _cast)
    replacements.method(DataLoader, "__init__", _without_pinned_memory)
    replacements.method(torch.autograd.profiler.profile, "__init__", _without_kernels)
    replacements.method(torch.autograd.profiler.emit_nvtx, "__init__", _switched_off)


def _autocast(original: Function) -> Function:
    default_dtype = torch.get_autocast_dtype

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            # A GPU's default dtype, which differs from the CPU's.
            device_type, dtype = "cpu", default_dtype("cuda") if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    return init


def _is_autocast_enabled(original: Function) -> Function:
    def is_autocast_enabled(device_type: str = "cuda") -> Any:
        return original("cpu" if device_type == "cuda" else device_type)

    return is_autocast_enabled


def _get_autocast_dtype(original: Function) -> Function:
    is_enabled = torch.is_autocast_enabled

    def get_autocast_dtype(device_type: str) -> Any:
        return original("cpu" if device_type == "cuda" and is_enabled("cpu") else device_type)

    return get_autocast_dtype


def _get_autocast_gpu_dtype(_original: Function) -> Function:
    return lambda: torch.get_autocast_dtype("cuda")


def _cast(original: Function) -> Function:
    """Returns a replacement of the cast in ``custom_fwd``, which casts only inputs on one type of device."""

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, "cpu" if device_type == "cuda" else device_type, dtype)

    return cast


def _without_pinned_memory(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Set afterwards, since callers pass pin_memory by position or by name. torch would warn that there is no GPU.
        self.pin_memory, self.pin_memory_device = False, ""

    return init


def _without_kernels(original: Function) -> Function:
    """Returns an ``__init__`` that profiles the CPU only: for CUDA kernels, torch would complain at each operator."""

    def init(self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **kwargs: Any) -> None:
        original(self, enabled, use_device=None if use_device == "cuda" else use_device, **kwargs)

    return init


def _switched_off(original: Function) -> Function:
    return lambda self, enabled=True, record_shapes=False: original(self, enabled=False)
