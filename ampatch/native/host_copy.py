"""Moves numbers between devices, and copies them to the host.

Owns every copy that does not block. No other module starts one, because the host must not read a copy before it has
arrived. Must not know what the numbers mean.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampatch.grouping import grouped

_Number = TypeVar("_Number", bound=Tensor | None)

_IS_ON_CPU = operator.attrgetter("is_cpu")


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """Returns a number on a device; the tensor itself if it is there already.

    Waits only for a copy to the CPU, because code there reads the memory at once. Work on other devices runs after
    the copy.

    Args:
        number: tensor of any shape and dtype.
        device: where it is needed.
    """
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def stacked(numbers: Iterable[Tensor]) -> Tensor:
    """Returns 0-dimensional tensors as one tensor on the device of the first; see `on_device`.

    Args:
        numbers: one or more, on any devices.
    """
    first, *others = numbers
    return torch.stack([first, *(on_device(each, first.device) for each in others)])


def read(numbers: Iterable[Tensor]) -> list[list[Any]]:
    """Returns 1-dimensional tensors of one shape and dtype as lists, in their order; reads each device once."""
    values: dict[int, list[Any]] = {}
    for on_one in grouped((each.device, (place, each)) for place, each in enumerate(numbers)).values():
        places, tensors = zip(*on_one, strict=True)
        values.update(zip(places, torch.stack(tensors).tolist(), strict=True))
    return [values[place] for place in sorted(values)]


def for_fused_step(number: _Number, parameters: Iterable[Tensor]) -> _Number:
    """Returns a number that torch's fused optimizers can read: on the CPU if they update a parameter there.

    They copy it to each device without waiting (torch 2.13), so a kernel on the CPU would read it before it arrives.

    Args:
        number: tensor such as an overflow flag or a scale; None is returned as it is.
        parameters: parameters that the step updates.
    """
    if number is None or number.is_cpu or not any(map(_IS_ON_CPU, parameters)):
        return number
    return on_device(number, torch.device("cpu"))  # type: ignore[return-value]


class HostCopy:
    """Copies numbers to the host without waiting for the device.

    Args:
        numbers: one or more numbers; at least 1-dimensional.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None
        if numbers.device.type == "cpu":
            self._numbers = numbers
        else:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._event = torch.Event(numbers.device)
            # Without a stream, it would record one of the current device, which may be another device.
            self._event.record(torch.accelerator.current_stream(numbers.device))

    @property
    def has_arrived(self) -> bool:
        """True if the numbers can be read without waiting."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    @functools.cached_property
    def values(self) -> tuple[float, ...]:
        """Numbers that were copied; the first read waits for those that have not arrived."""
        if self._event is not None and not self.has_arrived:
            self._event.synchronize()
        return tuple(self._numbers.tolist())
