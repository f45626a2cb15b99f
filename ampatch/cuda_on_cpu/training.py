"""Parts of a training loop that torch handles by device: autocast, pinned batches and profilers.

Must not know tensors' devices or process groups: `devices` and `distributed` own these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ampatch.cuda_on_cpu.replacements import Function, Replacements

# Torch's own, which the replacements below ask.
_default_dtype = torch.get_autocast_dtype
_is_enabled = torch.is_autocast_enabled


def install(replacements: Replacements) -> None:
    """Makes autocast, ``DataLoader`` and profilers work on the CPU."""
    replacements.method(torch.amp.autocast_mode.autocast, "__init__", _autocast)
    replacements.function(torch, "is_autocast_enabled", _is_autocast_enabled)
    replacements.function(torch, "get_autocast_dtype", _get_autocast_dtype)
    replacements.function(torch, "get_autocast_gpu_dtype", lambda _original: torch.get_autocast_dtype("cuda"))
    replacements.function(torch.amp.autocast_mode, "_cast", _cast)
    replacements.method(DataLoader, "__init__", _without_pinned_memory)
    replacements.method(torch.autograd.profiler.profile, "__init__", _without_kernels)
    replacements.method(torch.autograd.profiler.emit_nvtx, "__init__", _switched_off)


def _autocast(
    original: Function, self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
) -> None:
    if device_type == "cuda":
        # A GPU's default dtype, which differs from the CPU's.
        device_type, dtype = "cpu", _default_dtype("cuda") if dtype is None else dtype
    original(self, device_type, dtype, *args, **kwargs)


def _is_autocast_enabled(original: Function, device_type: str = "cuda") -> Any:
    return original("cpu" if device_type == "cuda" else device_type)


def _get_autocast_dtype(original: Function, device_type: str) -> Any:
    return original("cpu" if device_type == "cuda" and _is_enabled("cpu") else device_type)


def _cast(original: Function, value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Stands in for the cast in ``custom_fwd``, which casts only inputs on one type of device."""
    return original(value, "cpu" if device_type == "cuda" else device_type, dtype)


def _without_pinned_memory(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    # Set afterwards, since callers pass pin_memory by position or by name. torch would warn that there is no GPU.
    self.pin_memory, self.pin_memory_device = False, ""


def _without_kernels(original: Function, self: Any, enabled: bool = True, **kwargs: Any) -> None:
    """Profiles the CPU only: for CUDA kernels, torch would complain at each operator."""
    kwargs.pop("use_cuda", None)
    if kwargs.get("use_device") == "cuda":
        kwargs["use_device"] = None
    original(self, enabled, **kwargs)


def _switched_off(original: Function, self: Any, enabled: bool = True, record_shapes: bool = False) -> None:
    original(self, enabled=False)
