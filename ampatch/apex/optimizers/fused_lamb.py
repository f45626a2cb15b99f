"""LAMB under Apex's name and arguments, on torch's multi-tensor kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampatch.apex.optimizers._float32_optimizer import Float32Optimizer, Group, Tensors
from ampatch.native import kernels
from ampatch.native.host_copy import on_device
from ampatch.torch_private import foreach


class FusedLAMB(Float32Optimizer):
    """LAMB (You et al., 2020): Adam's update of each tensor, rescaled to the norm of the tensor itself.

    Before the update, all gradients of the optimizer are clipped by their common norm, as in the paper's training of
    BERT.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: True to divide the moments by ``1 - beta ** step``.
        betas: decay of the first and the second moment.
        eps: term added to the root of the second moment.
        weight_decay: factor of the weight decay.
        amsgrad: not supported, as in Apex.
        adam_w_mode: True to add weight decay to the update, as in the paper; False to add it to the gradient.
        grad_averaging: True to weight the gradient by ``1 - beta1`` in the first moment; False for weight 1.
        set_grad_none: True if ``zero_grad()`` sets gradients to None.
        max_grad_norm: upper bound of the norm of all gradients together; 0 or None for no clipping.
        use_nvlamb: True to rescale updates to the norms of their tensors in groups without weight decay too.

    Raises:
        OptionError: an argument is out of its range, or not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self.adam_w_mode, self.use_nvlamb = adam_w_mode, use_nvlamb
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
            max_grad_norm=max_grad_norm,
        )

    def _divisors(self, batches: list[tuple[Group, list[Tensor]]]) -> dict[int, Tensor]:
        divisor = self._divisor([parameter for _, parameters in batches for parameter in parameters])
        return {} if divisor is None else {id(group): divisor for group, _ in batches}

    def _divisor(self, parameters: list[Tensor]) -> Tensor | None:
        """Returns the divisor that clips the gradients to ``max_grad_norm``, after a scaler's; None for neither."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        # The norm covers the gradients of all groups, so a group's own ``max_grad_norm`` is ignored, as in Apex.
        max_norm = self.defaults["max_grad_norm"]
        if not parameters or not max_norm:
            return scale
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        _, sum_of_squares = kernels.flag_and_squares(grads, parameters[0].device)
        ratio = sum_of_squares.sqrt() / max_norm
        return torch.clamp(ratio, min=1) if scale is None else torch.maximum(ratio, on_device(scale, ratio.device))

    def _update_batch(self, group: Group, parameters: list[Tensor], values: list[Tensor], grads: Tensors) -> None:
        (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
        exp_avgs = self._moments(parameters, values, "exp_avg")
        exp_avg_sqs = self._moments(parameters, values, "exp_avg_sq")
        steps = self._count_steps(parameters)
        if weight_decay and not self.adam_w_mode:
            grads = foreach.add(grads, values, alpha=weight_decay)

        foreach.mul_(exp_avgs, beta1)
        foreach.add_(exp_avgs, grads, alpha=1 - beta1 if group["grad_averaging"] else 1)
        foreach.mul_(exp_avg_sqs, beta2)
        foreach.addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)

        updates: Tensors = exp_avgs
        roots = foreach.sqrt(exp_avg_sqs)
        if group["bias_correction"]:
            updates = foreach.div(updates, [1 - beta1**step for step in steps])
            foreach.div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
        foreach.add_(roots, group["eps"])
        updates = foreach.div(updates, roots)
        if weight_decay and self.adam_w_mode:
            foreach.add_(updates, values, alpha=weight_decay)
        if weight_decay or self.use_nvlamb:
            foreach.mul_(updates, _trust_ratios(values, updates))
        foreach.add_(values, updates, alpha=-float(group["lr"]))


def _trust_ratios(values: Tensors, updates: Tensors) -> Tensors:
    """Returns the factors that rescale updates to the norms of their tensors; 1 if either norm is 0."""
    norms, norms_of_updates = (torch.stack(foreach.norm(each)) for each in (values, updates))
    is_ratio = (norms != 0) & (norms_of_updates != 0)
    return torch.where(is_ratio, norms / norms_of_updates, 1.0).unbind()
