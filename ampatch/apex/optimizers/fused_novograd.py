"""NovoGrad under Apex's name and arguments, on torch's multi-tensor kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampatch.apex.optimizers._float32_optimizer import Float32Optimizer, Group, Tensors, UnsupportedOptionError
from ampatch.torch_private import foreach


class FusedNovoGrad(Float32Optimizer):
    """NovoGrad (Ginsburg et al., 2019): divides each gradient by a moving average of its norm over the whole tensor.

    The paper uses about ``betas=(0.95, 0.98)``, with ``bias_correction=False``, ``reg_inside_moment=True`` and
    ``grad_averaging=False``. The defaults are Apex's. They include bias correction of an average that does not begin at
    zero, which makes the first steps shorter: the very first about thirty times.

    The state keeps the moving average of norms as ``exp_avg_norm``: the root of the paper's second moment.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: True to divide the first moment by ``1 - beta1 ** step``, and the norm by the root of
            ``1 - beta2 ** step``.
        betas: decay of the first moment, and of the squared norm.
        eps: term added to the norm.
        weight_decay: factor of the weight decay.
        amsgrad: not supported, as in Apex.
        reg_inside_moment: True to divide gradients and add weight decay before the first moment, as in the paper; False
            to do both after it.
        grad_averaging: True to weight the gradient by ``1 - beta1`` in the first moment; False for weight 1.
        norm_type: 2, or 0 for the maximum magnitude, which is averaged without squaring.
        init_zero: True to begin the average of norms at zero; False to begin at the first norm.
        set_grad_none: True if ``zero_grad()`` sets gradients to None.

    Raises:
        OptionError: an argument is out of its range, or not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise UnsupportedOptionError(f"found norm_type={norm_type}; expected 2, or 0 for the greatest magnitude.")
        self.reg_inside_moment = reg_inside_moment
        super().__init__(
            params,
            set_grad_none,
            amsgrad,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )

    def _update_batch(self, group: Group, parameters: list[Tensor], values: list[Tensor], grads: Tensors) -> None:
        (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
        exp_avgs = self._moments(parameters, values, "exp_avg")
        steps = self._count_steps(parameters)
        norms = self._average_norms(group, parameters, grads)
        if group["bias_correction"]:
            norms = foreach.div(norms, [(1 - beta2**step) ** 0.5 for step in steps])
        norms = foreach.add(norms, group["eps"])

        if self.reg_inside_moment:
            grads = _regularised(grads, norms, values, weight_decay)
        foreach.mul_(exp_avgs, beta1)
        foreach.add_(exp_avgs, grads, alpha=1 - beta1 if group["grad_averaging"] else 1)

        updates: Tensors = exp_avgs
        if group["bias_correction"]:
            updates = foreach.div(updates, [1 - beta1**step for step in steps])
        if not self.reg_inside_moment:
            updates = _regularised(updates, norms, values, weight_decay)
        foreach.add_(values, updates, alpha=-float(group["lr"]))

    def _average_norms(self, group: Group, parameters: list[Tensor], grads: Tensors) -> Tensors:
        """Updates and returns the moving average of each gradient's norm."""
        beta2 = group["betas"][1]
        is_euclidean = group["norm_type"] == 2
        norms = foreach.norm(grads, 2 if is_euclidean else math.inf)
        first = torch.zeros_like if group["init_zero"] else torch.clone
        averages = self._moments(parameters, norms, "exp_avg_norm", first)
        if is_euclidean:
            norms = foreach.mul(norms, norms)
            foreach.mul_(averages, averages)
        foreach.mul_(averages, beta2)
        foreach.add_(averages, norms, alpha=1 - beta2)
        if is_euclidean:
            foreach.sqrt_(averages)
        return averages

    def _translate_group(self, group: Group, states: list[dict[str, Any]]) -> None:
        super()._translate_group(group, states)
        # Apex keeps norms by group: one tensor for float16 parameters, and another for all others.
        of_halves, of_others = group.pop("exp_avg_sq", ((), ()))
        left = {True: iter(of_halves), False: iter(of_others)}
        for state in states:
            if "exp_avg_norm" not in state:
                norm = next(left[state["exp_avg"].dtype is torch.float16], None)
                if norm is not None:
                    state["exp_avg_norm"] = norm if isinstance(norm, Tensor) else torch.tensor(norm, device="cpu")


def _regularised(tensors: Tensors, norms: Tensors, values: list[Tensor], weight_decay: float) -> Tensors:
    """Returns new tensors: the old ones divided by their norms, plus weight decay."""
    divided = foreach.div(tensors, norms)
    if weight_decay:
        foreach.add_(divided, values, alpha=weight_decay)
    return divided
