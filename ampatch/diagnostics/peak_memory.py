"""Measures the peak memory of a piece of work, on the CPU or on a GPU.

Adds up the allocations that torch's allocators report to its profiler. torch keeps no count for the CPU. The operating
system's count for a process never falls, and includes all libraries. A TorchDispatchMode would see tensors too, but not
the memory that an operation allocates inside, and amp's cache of cast weights is off under one. Must never change the
work that it measures.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from torch.autograd.profiler import profile, record_function

_MEASURED = "ampatch.diagnostics.peak_memory"
_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"


def peak_allocated(prepare: Callable[[], Callable[[], object]]) -> int:
    """Returns the largest number of bytes that are allocated at any moment of a piece of work.

    Counts only memory that is allocated after ``prepare`` has begun.

    Args:
        prepare: function that sets up the work and returns it.
    """
    # Otherwise this measurement would free, and subtract, memory that an earlier one left in reference cycles.
    gc.collect()
    with _silent_kineto(), profile(profile_memory=True) as profiler:
        work = prepare()
        with record_function(_MEASURED):
            work()
    events = profiler.kineto_results.events()
    (measured,) = (event for event in events if event.name() == _MEASURED)
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    held: list[int] = list(accumulate((change.nbytes() for change in changes), initial=0))
    began = sum(change.start_ns() < measured.start_ns() for change in changes)
    ended = sum(change.start_ns() <= measured.end_ns() for change in changes)
    return max(held[began : ended + 1])


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """Stops kineto from printing when it starts and stops; it reads the log level before its first line only."""
    before = os.environ.get(_KINETO_LOG_LEVEL)
    os.environ[_KINETO_LOG_LEVEL] = "99" if before is None else before
    try:
        yield
    finally:
        if before is None:
            del os.environ[_KINETO_LOG_LEVEL]
