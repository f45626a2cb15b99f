"""What training loops use around a model and torch decides by the device: autocast, pinned batches, profilers.

Knows nothing of tensors' devices and of processes: those have modules of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ampatch.cuda_on_cpu.replacements import Function, Replacements


def install(replacements: Replacements) -> None:
    """Has each of them do its work on the CPU."""
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
            # What is the default for a GPU, which is not what it is for a CPU.
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
    """Returns what custom_fwd casts its inputs with: those of a device."""

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, "cpu" if device_type == "cuda" else device_type, dtype)

    return cast


def _without_pinned_memory(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # After it was taken, by position or by name. torch would warn that there is no GPU to copy to.
        self.pin_memory, self.pin_memory_device = False, ""

    return init


def _without_kernels(original: Function) -> Function:
    """Returns a profiler of the CPU alone; asked for a GPU's kernels as well, torch's complains at each operator."""

    def init(self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **kwargs: Any) -> None:  # noqa: ARG001
        original(self, enabled, use_device=None if use_device == "cuda" else use_device, **kwargs)

    return init


def _switched_off(original: Function) -> Function:
    return lambda self, enabled=True, record_shapes=False: original(self, enabled=False)  # noqa: ARG005
