"""Adagrad under Apex's name and arguments, with torch's update on its multi-tensor kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from ampatch.apex.optimizers._float32_optimizer import Float32Optimizer, Group, decay_first


class FusedAdagrad(Float32Optimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011), in its diagonal form.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        eps: term added to the root of the sum of squares.
        weight_decay: factor of the weight decay.
        set_grad_none: True if ``zero_grad()`` sets gradients to None.
        adagrad_w_mode: True to decouple weight decay, as in AdamW; False to add it to the gradient.

    Raises:
        OptionError: an argument is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        super().__init__(params, set_grad_none, lr=lr, eps=eps, weight_decay=weight_decay)

    def _update_batch(self, group: Group, parameters: list[Tensor], values: list[Tensor], grads: list[Tensor]) -> None:
        if self.adagrad_w_mode:
            decay_first(values, group)
        adagrad(
            values,
            grads,
            self._moments(parameters, values, "sum"),
            [torch.zeros((), device="cpu") for _ in values],  # steps, which matter only if lr_decay is not 0
            has_sparse_grad=False,
            foreach=True,
            has_complex=False,
            lr=group["lr"],
            weight_decay=0.0 if self.adagrad_w_mode else group["weight_decay"],
            lr_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
