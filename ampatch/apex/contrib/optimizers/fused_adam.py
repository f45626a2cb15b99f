"""`FusedAdam` with the arguments of early 2019, and with a step that takes gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampatch.apex import optimizers
from ampatch.errors import OptionError


class FusedAdam(optimizers.FusedAdam):
    """AdamW with the constructor that Apex's FusedAdam had in early 2019.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: True to divide the moments by ``1 - beta ** step``.
        betas: decay of the first and the second moment.
        eps: term added to the root of the second moment.
        eps_inside_sqrt: must be False.
        weight_decay: factor of the weight decay, which is decoupled.
        max_grad_norm: upper bound of the norm of each group's gradients; 0 for no clipping.
        amsgrad: not supported, as in Apex.
        use_mt: ignored, because several tensors are always updated at once.
        amp_scale_adjustment: must be 1.

    Raises:
        OptionError: an argument is out of its range, or not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            max_grad_norm=max_grad_norm,
            eps_inside_sqrt=eps_inside_sqrt,
            use_mt=use_mt,
            amp_scale_adjustment=amp_scale_adjustment,
        )

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Any] | None = None,
        output_params: Iterable[Any] | None = None,
        scale: float = 1.0,
        grad_norms: Iterable[Any] | None = None,
    ) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: function that evaluates the model again and returns the loss.
            grads: gradients of any floating dtype: a list for each group, or one list for the only group. For None,
                the parameter's own gradient counts.
            output_params: tensors that get the new values, rounded to their dtypes; in the same form as ``grads``.
            scale: divisor of the gradients; for half parameters, the quotients are half.
            grad_norms: norm of each group's gradients before the division; None to compute it. Only groups with
                ``max_grad_norm`` need it.

        Returns:
            Result of the closure; None without one.

        Raises:
            OptionError: the lists do not fit the groups.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given, outputs = self._by_group("grads", grads), self._by_group("output_params", output_params)
        norms = [None] * len(self.param_groups) if grad_norms is None else list(grad_norms)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = [parameter.grad for parameter in parameters]
        try:
            for group, of_group, norm in zip(self.param_groups, given, norms, strict=True):
                _set_gradients(group["params"], of_group, scale * _excess(norm, scale, group))
            self._update([batch for group in self.param_groups for batch in self._batches(group)])
        finally:
            for parameter, grad in zip(parameters, own, strict=True):
                parameter.grad = grad
        for parameter, output in zip(parameters, itertools.chain.from_iterable(outputs), strict=True):
            if output is not None:
                output.copy_(parameter)
        return loss

    def _by_group(self, name: str, given: Iterable[Any] | None) -> list[list[Tensor | None]]:
        """Returns a list of tensors for each group, from all forms that ``step`` takes."""
        lengths = [len(group["params"]) for group in self.param_groups]
        if given is None:
            return [[None] * length for length in lengths]
        lists = list(given)
        if not all(isinstance(each, (list, tuple)) for each in lists):
            lists = [lists]
        found = [len(each) for each in lists]
        if found != lengths:
            raise OptionError(
                f"FusedAdam found {name} with {found} tensors by group; expected {lengths}: one for each parameter."
            )
        return lists


def _set_gradients(parameters: list[Tensor], given: list[Tensor | None], divisor: float) -> None:
    """Sets parameters' gradients to the given ones, divided; for None, divides their own."""
    for parameter, grad in zip(parameters, given, strict=True):
        if grad is not None:
            parameter.grad = grad.to(parameter.dtype)
        if parameter.grad is not None and divisor != 1:
            parameter.grad = parameter.grad / divisor


def _excess(norm: float | Tensor | None, scale: float, group: dict[str, Any]) -> float:
    """Returns the factor by which a group's unscaled norm exceeds ``max_grad_norm``; 1 if it does not."""
    limit = group.get("max_grad_norm")
    return max(1.0, (float(norm) / scale + 1e-6) / limit) if limit and norm is not None else 1.0
