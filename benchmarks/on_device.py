"""Counts what a piece of work asks of a GPU: kernel launches, waits of the host, and memory.

On the CPU it counts what comes closest, so that every benchmark can be tried without a GPU. Such counts say nothing
about one. Must never time anything.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import NamedTuple

import torch

Work = Callable[[], object]

# The calls of CUDA in which the host waits for one stream or event. torch.cuda.synchronize waits for the whole device
# instead, and is not counted: the profiler calls it as well.
_WAITS = frozenset({"cudaStreamSynchronize", "cudaEventSynchronize"})


class Counts(NamedTuple):
    """Counts of a piece of work.

    Attributes:
        launches: kernels launched, without copies and fills; on the CPU, calls of torch's operators.
        waits: times that the host waited for the GPU; on the CPU, numbers read from tensors.
    """

    launches: int
    waits: int


def counts(work: Work, device: str) -> Counts:
    """Runs some work under torch's profiler, and returns its counts."""
    finish(device)
    with torch.profiler.profile() as profile:  # with all activities, which also works without CUPTI
        work()
        finish(device)
    events = profile.events()
    if device == "cpu":
        names = [event.name for event in events]
        return Counts(sum(name.startswith("aten::") for name in names), names.count("aten::_local_scalar_dense"))
    on_gpu = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counts(
        sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu),
        sum(event.name in _WAITS for event in events),
    )


def peak(work: Work, device: str) -> int:
    """Runs some work, and returns the most bytes of this process on the device during it.

    Counts all that the process holds there. On the CPU it is the most memory that the process ever held.
    """
    if device == "cpu":
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    # Requested bytes, since allocated bytes are rounded up.
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


def finish(device: str) -> None:
    """Waits until the device has done all of its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def name_of(device: str) -> str:
    """Returns a device's name for the title of a report."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.backends.cpu.get_cpu_capability()} CPU"
