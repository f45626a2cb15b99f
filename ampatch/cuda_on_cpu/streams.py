"""The current device, streams and events while the CPU stands in: work is done as soon as a script requests it.

Owns each thread's current device number and stream. Waiting is torch's own, of its streams and events for the CPU: it
does nothing.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from ampatch.errors import UsageError


class _Thread(threading.local):
    """Current device and stream of a thread; on a GPU they are per thread too."""

    device = 0
    stream: Stream | None = None


_thread = _Thread()


def device_count() -> int:
    """Returns 1, or under torchrun the number of ranks on this machine, so that each rank finds its own device."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def current_device() -> int:
    """Returns the device number that this thread has set; 0 by default."""
    return _thread.device


def index_of(device: Any = None) -> int:
    """Returns the number of a device; the current number if the device has none, as tensors' own ``cpu``."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None or index < 0 else int(index)


def set_device(device: Any) -> None:
    """Sets this thread's current device; any number is valid, since all devices are the CPU."""
    _thread.device = index_of(device)


class DeviceGuard:
    """``with torch.cuda.device(1)``: changes the current device for a ``with`` block.

    Args:
        device: number, ``torch.device``, name, or None for the current device.
    """

    def __init__(self, device: Any = None) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx, _thread.device = _thread.device, self.idx

    def __exit__(self, *exception: object) -> None:
        _thread.device = self.prev_idx


class DeviceOf(DeviceGuard):
    """``with torch.cuda.device_of(tensor)``: keeps the current device, since every tensor is on it."""

    def __init__(self, obj: object) -> None:
        super().__init__(None)


class Stream(torch.cpu.Stream):
    """A queue that is always empty.

    Args:
        device: device of the stream; kept as the attribute ``device``.
        priority: number without effect; kept as the attribute ``priority``.
    """

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.priority = priority
        self._before: list[Stream | None] = []

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Does nothing: no work is pending."""

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override] # as torch.cuda.Stream has it
        """Records and returns the event, or a new event if none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append(_thread.stream)
        _thread.stream = self
        return self

    def __exit__(self, *exception: object) -> None:
        _thread.stream = self._before.pop()


_default = Stream(0)


def default_stream(device: Any = None) -> Stream:
    """Returns the stream that is current if the thread has set no other."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Returns the stream that this thread has set, else the default stream."""
    return _thread.stream or _default


def set_stream(stream: Stream | None) -> None:
    """Makes a stream this thread's current stream; None changes nothing."""
    if stream is not None:
        _thread.stream = stream


class StreamContext:
    """``with torch.cuda.stream(stream)``: changes the current stream for a ``with`` block; None changes nothing.

    Args:
        stream: new current stream, or None.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class Event(torch.cpu.Event):
    """A point in time on the CPU's clock.

    Args:
        enable_timing: ignored; every event records the time.
        blocking: ignored.
        interprocess: ignored.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self._recorded: float | None = None

    def record(self, stream: object = None) -> None:
        """Records the current time; all earlier work on the stream is done by then."""
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the time from this event to another, in milliseconds.

        Raises:
            UsageError: one of the two events was not recorded.
        """
        if self._recorded is None or end_event._recorded is None:
            raise UsageError("elapsed_time needs two events that were recorded: call event.record() on both first.")
        return (end_event._recorded - self._recorded) * 1000.0
