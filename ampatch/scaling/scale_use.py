"""A scale that gradients were brought to once, and what came of it: whether they overflowed.

The values stay on the device until somebody asks; `send` has them copied to the host without anybody waiting. Knows
gradients by their verdict only.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ampatch.native.host_copy import HostCopy
from ampatch.scaling.loss_scaler import LossScaler, scaled

logger = logging.getLogger("ampatch")

#: The types of devices whose numbers are read without anybody waiting.
AT_HAND = frozenset({"cpu"})


class ScaleUse:
    """One use of a loss scale.

    Args:
        scaler: the scale of a loss.
        scaler_id: its number, for messages.

    Attributes:
        is_open: whether gradients may still be added at this scale in the block that began it.
        is_postponed: whether the gradients that it left are reduced over processes with those of a later backward.
        is_judged_later: whether it is left to a later one, or to somebody else, to say what to do about an overflow.
        is_confirmed: whether an overflow counts for good, whatever becomes of the gradients.
        is_of_others: whether it is remembered for an optimizer that had no gradients.
        is_one: whether the scale is static and 1, so that the gradients are what they are without one.
        scale: the scale as it was: 0-dimensional float32, on the device.
        found_inf: 0-dimensional float32, not 0 if a gradient was not finite; None until that is known, and under a
            static scale.
    """

    is_open = False
    is_postponed = False
    is_judged_later = False
    is_confirmed = False
    is_of_others = False
    found_inf: Tensor | None = None
    _overflowed: bool | None = None
    _sent: HostCopy | None = None

    def __init__(self, scaler: LossScaler, scaler_id: int) -> None:
        self.scaler = scaler
        self.scaler_id = scaler_id
        self.is_one = scaler.is_one
        self.scale = scaler.snapshot()
        self._age = scaler.age
        self._announced: list[bool] = []  # one that its copies have too
        self._losses: list[Tensor] = []

    def apply(self, loss: Any) -> Any:
        """Returns losses in float32, multiplied by the scale of this use; see `scaled`."""
        return scaled(loss, None if self.is_one else self.scale)

    def note_losses(self, losses: Iterable[Tensor]) -> None:
        """Remembers the values of the scaled losses, to report one that is not finite when a step is skipped."""
        if self.scaler.dynamic:
            # Copies without graph: a loss may be a view of a large tensor.
            values = (each.detach() for each in losses if not is_functorch_wrapped_tensor(each))
            self._losses = [each.sum() if each.dim() else each for each in values]

    def go_on_from(self, earlier: ScaleUse) -> None:
        """Stays at the scale of an earlier use, although it may have moved since."""
        self.scale, self._age = earlier.scale, earlier._age

    def only_where(self, still: Tensor) -> ScaleUse:
        """Returns this use, whose overflow counts only if what overflowed is still there.

        Args:
            still: 0-dimensional float32, 1 if it is, else 0.
        """
        assert self.found_inf is not None
        revised = self.confirmed()
        revised.found_inf = self.found_inf * still
        revised._overflowed = revised._sent = None
        return revised

    def confirmed(self, of_others: bool = False) -> ScaleUse:
        """Returns this use, whose overflow counts for good.

        Args:
            of_others: whether it was about other optimizers' gradients.
        """
        copied = copy.copy(self)
        copied.is_confirmed, copied.is_of_others = True, of_others
        return copied

    def is_same_scale(self, other: ScaleUse) -> bool:
        """Returns whether gradients of both may be added up; waits for the device only if the scale may have moved."""
        if self.scaler is not other.scaler:
            return False
        return self._age == other._age or bool(self.scale == other.scale)

    def send(self) -> None:
        """Starts to copy what `overflowed` and `announce` need to the host."""
        assert self.found_inf is not None
        device = self.found_inf.device
        losses = (each if each.device == device else each.to(device) for each in self._losses)
        values = torch.stack([self.found_inf, self.scale, self.scaler.snapshot(), *losses])
        self._sent = HostCopy(values)

    @property
    def has_arrived(self) -> bool:
        """Whether what was sent can be read without waiting."""
        return self._sent is not None and self._sent.has_arrived

    @property
    def is_at_hand(self) -> bool:
        """Whether it is known whether a gradient was not finite, or nobody has to wait to read it."""
        found_inf = self.found_inf
        return self._overflowed is not None or found_inf is None or found_inf.device.type in AT_HAND

    @property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite; waits for the device."""
        if self._overflowed is None:
            if self._sent is not None:
                self._overflowed = self._values[0] != 0
            else:
                self._overflowed = self.found_inf is not None and bool(self.found_inf)
        return self._overflowed

    @property
    def began_at_floor(self) -> bool:
        """Whether the scale could not have backed off further; waits for the device."""
        return self._values[1] <= self.scaler.policy.floor

    @property
    def ended_at_floor(self) -> bool:
        """Whether the scale was at its floor when it was sent; waits for the device."""
        return self._values[2] <= self.scaler.policy.floor

    @property
    def loss_that_is_not_finite(self) -> float | None:
        """Returns a scaled loss, or the sum of its elements, that is inf or NaN; None if all are finite.

        Waits for the device.
        """
        return next((loss for loss in self._values[3:] if not math.isfinite(loss)), None)

    def announce(self) -> None:
        """Logs the skipped step, once however many optimizers skip for it."""
        if not self._announced:
            self._announced.append(True)
            _, before, now, *_ = self._values
            change = "reducing loss scale to" if now < before else "keeping loss scale at"
            logger.warning("Gradient overflow. Skipping step, loss scaler %d %s %s", self.scaler_id, change, now)

    @property
    def _values(self) -> tuple[float, ...]:
        if self._sent is None:
            self.send()
        assert self._sent is not None
        return self._sent.values
