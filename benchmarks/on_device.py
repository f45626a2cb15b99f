"""Counts what a piece of work asks of a GPU: kernel launches, waits of the host, and memory.

On the CPU it counts what comes closest, so that every benchmark can be tried without a GPU. Such counts say nothing
about one. Must never time anything.
"""

from __future__ import annotations

import bisect
import os
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Work = Callable[[], object]

# The calls of CUDA in which the host waits for one stream or event. torch.cuda.synchronize waits for the whole device
# instead, and is not counted: the profiler calls it as well.
_WAITS = frozenset({"cudaStreamSynchronize", "cudaEventSynchronize"})
_WORK = "benchmarks.on_device: work "
_ON_HOST = torch.autograd.DeviceType.CPU


class Counts(NamedTuple):
    """Counts of a piece of work.

    Attributes:
        kernels: kernels launched, by name, without copies and fills; on the CPU, calls of torch's operators.
        waits: times that the host waited for the GPU; on the CPU, numbers read from tensors.
        allocations: tensors' memory asked of torch's allocator; on the CPU, calls that make an empty tensor.
    """

    kernels: Counter[str]
    waits: int
    allocations: int

    @property
    def launches(self) -> int:
        return self.kernels.total()


def counts(works: Sequence[Work], device: str) -> list[Counts]:
    """Runs each piece of work under torch's profiler, all under one since a profiler takes long to start."""
    found = [Counts(Counter(), 0, 0) for _ in works]
    with torch.profiler.profile() as profile:  # with all activities, which also works without CUPTI
        for index, work in enumerate(works):
            with torch.profiler.record_function(f"{_WORK}{index}"):
                finish(device)
                before = _allocated(device)
                work()
                finish(device)
                found[index] = found[index]._replace(allocations=_allocated(device) - before)
    # Not `profile.events()`, which takes seconds to sort many events out.
    events = [(each.start_ns(), each.name(), each) for each in profile.profiler.kineto_results.events()]
    starts = {name: start for start, name, each in events if each.device_type() == _ON_HOST}
    begun = [starts[f"{_WORK}{index}"] for index in range(len(works))]
    for start, name, each in events:
        # Each piece of work begins and ends with a wait, so that its kernels run within its range.
        index = bisect.bisect(begun, start) - 1
        if index >= 0 and not each.is_user_annotation():
            found[index] = _with(found[index], name, is_on_host=each.device_type() == _ON_HOST, device=device)
    return found


def _with(found: Counts, name: str, *, is_on_host: bool, device: str) -> Counts:
    """Returns counts with one more event of the profiler."""
    if device == "cpu":
        is_kernel, is_wait = name.startswith("aten::"), name == "aten::_local_scalar_dense"
        found = found._replace(allocations=found.allocations + name.startswith("aten::empty"))
    else:
        is_kernel, is_wait = not is_on_host and not name.startswith(("Memcpy", "Memset")), name in _WAITS
    if is_kernel:
        found.kernels[name] += 1
    return found._replace(waits=found.waits + is_wait)


def _allocated(device: str) -> int:
    """Returns how often this process has asked torch's allocator for memory on the GPU."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if device == "cuda" else 0


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


def share_processors() -> None:
    """Keeps this process on the last two processors: compared processes need the same ones, as some are slower.

    Threads that the process starts later stay there as well. CUDA runs backward passes in one of them.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-2:])


def finish(device: str) -> None:
    """Waits until the device has done all of its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def name_of(device: str) -> str:
    """Returns a device's name for the title of a report."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.backends.cpu.get_cpu_capability()} CPU"
