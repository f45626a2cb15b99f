"""How torch finds devices and starts CUDA, and where it keeps the default device. Must only name it."""

from __future__ import annotations

import torch
from torch.utils import _device as device

#: Mode behind ``with torch.device(...)`` and `torch.set_default_device`, and the functions that it gives a device to.
#: The second caches its result, which must hold the originals: call it before any is replaced.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_device.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch lists the functions that make tensors publicly.
DeviceContext = device.DeviceContext
device_constructors = device._device_constructors

#: Name in ``torch.cuda.memory`` of the function that records allocations.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/memory.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch exports it; its tutorials already name it.
RECORD_MEMORY_HISTORY = "_record_memory_history"

#: Extension module of torch, where it keeps the originals of its functions, and the names in it of the functions that
#: find the accelerator: None if there is none; the CPU in that case.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/DeviceAccelerator.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.accelerator`` asks ``torch.cuda.is_available`` before it goes on in C++.
EXTENSION = torch._C
GET_ACCELERATOR_OR_NONE = "_accelerator_getAccelerator"
GET_ACCELERATOR = "_get_accelerator"

#: True if a CUDA graph captures this thread's operators.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/cuda/Graph.cpp
#: Seen in: torch 2.10 to 2.13
#: Until: never; the public ``torch.cuda.is_current_stream_capturing`` costs C++ a Python frame in each call.
is_current_stream_capturing = torch._C._cuda_isCurrentStreamCapturing

#: Entries with which `torch.load` decides where a storage goes; `torch.serialization.register_package` adds to them.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py
#: Seen in: torch 2.10 to 2.13
#: Until: an entry can be removed again.
package_registry = torch.serialization._package_registry


def current_device() -> torch.device | None:
    """Returns the device that `torch.set_default_device` has set; None if it was not called.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_device.py
    Seen in: torch 2.10 to 2.13
    Until: `torch.get_default_device` tells "not set" from "cpu".
    """
    return device.CURRENT_DEVICE
