"""LAMB with float32 masters of half parameters, under Apex's name and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampatch.apex.optimizers._float32_optimizer import Group, UnsupportedOptionError
from ampatch.apex.optimizers.fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that can keep float32 masters of half parameters, as ``master`` in their state.

    The first step makes the masters. From then on training updates the masters, so the next step overwrites weights
    that you load into the model later. A ``torch.amp.GradScaler`` lets ``step`` unscale the gradients and skip after an
    overflow, and so accepts half parameters.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        step: must be 0; ``load_state_dict`` sets the number of earlier steps.
        bias_correction: as for `FusedLAMB`, like all arguments up to ``use_nvlamb``.
        betas: decay of the first and the second moment.
        eps: term added to the root of the second moment.
        weight_decay: factor of the weight decay.
        amsgrad: not supported, as in Apex.
        adam_w_mode: True to add weight decay to the update; False to add it to the gradient.
        grad_averaging: True to weight the gradient by ``1 - beta1`` in the first moment; False for weight 1.
        max_grad_norm: upper bound of the norm of all gradients together; 0 or None for no clipping.
        use_nvlamb: True to rescale updates in groups without weight decay too.
        reduced_precision_dtype: dtype of the parameters that get masters; None for no masters.

    Raises:
        OptionError: an argument is out of its range, or not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if step:
            raise UnsupportedOptionError(
                f"found step={step}; expected 0. Leave it out: optimizer.load_state_dict(state_dict) sets the number "
                "of earlier steps."
            )
        self.reduced_precision_dtype = reduced_precision_dtype
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )

    _step_supports_amp_scaling = FusedLAMB._has_own_step

    def _update(self, batches: list[tuple[Group, list[Tensor]]]) -> None:
        if not self._overflowed():
            super()._update(batches)

    def _values(self, parameters: list[Tensor]) -> list[Tensor]:
        return [
            self._master(parameter, value) if parameter.dtype is self.reduced_precision_dtype else value
            for parameter, value in zip(parameters, super()._values(parameters), strict=True)
        ]

    def _master(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Returns the master of a parameter; it begins as ``value``, the parameter in float32."""
        (master,) = self._moments([parameter], [value], "master", first=torch.clone)
        return master
