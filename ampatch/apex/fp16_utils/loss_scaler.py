"""Loss scales as plain numbers on the host, as ``apex.fp16_utils.loss_scaler`` had them.

Their attributes are Apex's, which projects read and checkpoints hold. Must not look at gradients unless asked to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampatch.native import kernels


class LossScaler:
    """A static loss scale, which never looks for overflow.

    Args:
        scale: what losses are multiplied by.

    Attributes:
        cur_scale: the same.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:  # noqa: ARG002 - asked of either kind of scaler
        """False, without a look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leaves the scale as it is."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Multiplies the gradients of a module's inputs by the scale; a backward hook of modules."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs backward from the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off on overflow and grows after a run of clean steps.

    The scheme is that of "Mixed Precision Training" (Micikevicius et al., 2018).

    Args:
        init_scale: where it starts.
        scale_factor: by which it grows and backs off.
        scale_window: clean steps before it grows.
        min_scale: the floor.
        max_scale: the ceiling.

    Attributes:
        cur_scale: what losses are multiplied by.
        cur_iter: how often it was updated.
        last_overflow_iter: at which update it met overflow last; -1: at none.
    """

    # For pickled ones of Apex, which have none of their own.
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
        """Returns whether a gradient of these parameters is not finite; waits for the device."""
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        if not grads:
            return False
        one = torch.ones((), dtype=torch.float32, device=grads[0].device)
        found_inf, sum_of_squares = torch.zeros_like(one), torch.zeros_like(one, dtype=torch.float64)
        kernels.found_inf_norm(grads, one, found_inf, sum_of_squares)
        return bool(found_inf)

    def update_scale(self, overflow: bool) -> None:
        """Backs off after an overflow, and grows when the window is full."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = min(self.cur_scale * self.scale_factor, self.max_scale)
        self.cur_iter += 1
