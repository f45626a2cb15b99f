"""Loss scalers that keep the scale as a number on the host, as in ``apex.fp16_utils.loss_scaler``.

Their attributes are Apex's, which projects read and checkpoints hold. Must not read gradients except in `has_overflow`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ampatch.native import kernels


class LossScaler:
    """A static loss scale, which never checks for overflow.

    Args:
        scale: factor of losses.

    Attributes:
        cur_scale: factor of losses.
        min_scale: lower limit of the scale.
    """

    min_scale: float = 0.0

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """Factor of losses."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns False, without a check."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leaves the scale as it is."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Multiplies the gradients of a module's inputs by the scale; scripts register it as a backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss, multiplied by the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off after an overflow, and grows after a number of steps without overflow.

    The scheme is that of "Mixed Precision Training" (Micikevicius et al., 2018).

    Args:
        init_scale: initial scale.
        scale_factor: factor by which the scale grows, and by which it is divided after an overflow.
        scale_window: number of steps without overflow before the scale grows.
        min_scale: lower limit of the scale.
        max_scale: upper limit of the scale.

    Attributes:
        cur_scale: factor of losses.
        cur_iter: number of updates so far.
        last_overflow_iter: number of the last update with an overflow; -1 if there was none.
    """

    # For objects pickled by Apex, which lack these attributes.
    min_scale: float = 1
    max_scale: float = math.inf

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        *,
        min_scale: float = 1,
        max_scale: float = math.inf,
    ) -> None:
        super().__init__(min(init_scale, max_scale))
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.max_scale = max_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns True if a gradient of these parameters is not finite; syncs with the device."""
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        if not grads:
            return False
        found_inf, _ = kernels.flag_and_squares(grads, grads[0].device)
        return bool(found_inf)

    def update_scale(self, overflow: bool) -> None:
        """Lowers the scale after an overflow, and raises it when the window is full."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = min(self.cur_scale * self.scale_factor, self.max_scale)
        self.cur_iter += 1
