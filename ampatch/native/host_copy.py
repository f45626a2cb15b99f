"""Copies numbers from a device to the host; the caller waits only when it reads them.

Must not know what the numbers mean.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class HostCopy:
    """Copies numbers to the host without waiting for the device.

    Args:
        on_device: one or more numbers; at least 1-dimensional.
    """

    def __init__(self, on_device: Tensor) -> None:
        self._event: torch.Event | None = None
        if on_device.device.type == "cpu":
            self._numbers = on_device
        else:
            pinned = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._numbers = pinned.copy_(on_device, non_blocking=True)
            self._event = torch.Event(on_device.device)
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """True if the numbers can be read without waiting."""
        return self._event is None or self._event.query()

    @functools.cached_property
    def values(self) -> tuple[float, ...]:
        """Numbers that were copied; the first read waits for their arrival."""
        if self._event is not None:
            self._event.synchronize()
        return tuple(self._numbers.tolist())
