"""How much memory a piece of work needs at its peak, on the CPU as on a GPU.

Torch keeps no such count on the CPU, and what the operating system tells of a process never falls again, and has all
libraries in it. So this adds up what torch's allocators report to its profiler. (A TorchDispatchMode would see tensors
come and go too, but not what an operation allocates within itself, and amp's cache of cast weights is off under one.)
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from torch.autograd.profiler import profile, record_function

_MEASURED = "ampatch.demo.memory"
_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"


def peak_allocated(prepare: Callable[[], Callable[[], object]]) -> int:
    """Returns the most bytes that are allocated, and not freed yet, at any moment of a piece of work.

    Only what is allocated from the start of ``prepare`` on counts.

    Args:
        prepare: makes whatever the work needs, and returns the work.
    """
    # What an earlier measurement left in cycles would otherwise be freed, and subtracted, in this one.
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
    """Has the library below the profiler not print when it starts and stops; it asks before its first line only."""
    before = os.environ.get(_KINETO_LOG_LEVEL)
    os.environ[_KINETO_LOG_LEVEL] = "99" if before is None else before
    try:
        yield
    finally:
        if before is None:
            del os.environ[_KINETO_LOG_LEVEL]
