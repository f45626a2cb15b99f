"""The current device, streams and events where the only GPU is the CPU: what is asked for has happened already.

Owns which number the current device of each thread has. Knows nothing of torch's own classes.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from ampatch.errors import UsageError


class _Thread(threading.local):
    """What a thread has selected, as it does on a GPU."""

    def __init__(self) -> None:
        self.device = 0
        self.stream: Stream | None = None


_thread = _Thread()


def device_count() -> int:
    """One; under torchrun as many as there are processes on this machine, so that each of them finds its own."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def current_device() -> int:
    """Returns the number that this thread has set, which is 0 at first."""
    return _thread.device


def index_of(device: Any = None) -> int:
    """Returns the number of a device; the current one for what has none, tensors' own ``cpu`` included."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None or index < 0 else int(index)


def set_device(device: Any) -> None:
    """Any number will do: they all are the CPU."""
    _thread.device = index_of(device)


class DeviceGuard:
    """``with torch.cuda.device(1)``: another current device in a block.

    Args:
        device: a number, a device, its name, or None for the current one.
    """

    def __init__(self, device: Any = None) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx, _thread.device = _thread.device, self.idx

    def __exit__(self, *exception: object) -> None:
        _thread.device = self.prev_idx


class DeviceOf(DeviceGuard):
    """``with torch.cuda.device_of(tensor)``: the current device, since every tensor is there."""

    def __init__(self, obj: object) -> None:
        del obj
        super().__init__(None)


class Stream:
    """A queue that is always empty.

    Args:
        device: whose stream it is; kept, as `device`.
        priority: kept, as `priority`.
    """

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.priority = priority
        self._before: list[Stream | None] = []

    def query(self) -> bool:
        """Returns whether all work is done: it is."""
        return True

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def wait_stream(self, stream: object) -> None:
        """Does nothing: there is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Does nothing: there is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one if none is given."""
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
    """Returns the stream that is current where no other was set."""
    del device
    return _default


def current_stream(device: Any = None) -> Stream:
    """Returns the stream that this thread has set."""
    del device
    return _thread.stream or _default


def set_stream(stream: Stream | None) -> None:
    """Makes a stream the current one; None changes nothing."""
    if stream is not None:
        _thread.stream = stream


class StreamContext:
    """``with torch.cuda.stream(stream)``: another current stream in a block; None changes nothing.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class Event:
    """A moment of the CPU's clock.

    Args:
        enable_timing: taken and not needed, as are the others.
        blocking: likewise.
        interprocess: likewise.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        del enable_timing, blocking, interprocess
        self._recorded: float | None = None

    def record(self, stream: object = None) -> None:
        """Notes the time: whatever the stream was given before is done."""
        del stream
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        """Returns whether it has happened, or was never recorded: so it is with torch's."""
        return True

    def wait(self, stream: object = None) -> None:
        """Does nothing: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this one to another.

        Raises:
            UsageError: one of them was not recorded.
        """
        if self._recorded is None or end_event._recorded is None:
            raise UsageError("elapsed_time needs two events that were recorded: call event.record() on both first.")
        return (end_event._recorded - self._recorded) * 1000.0
