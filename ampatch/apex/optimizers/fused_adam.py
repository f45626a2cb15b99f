"""Adam and AdamW under Apex's name and arguments, updated by torch's fused kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ampatch.apex import amp_C
from ampatch.apex.optimizers._float32_optimizer import Float32Optimizer, Group, UnsupportedOptionError
from ampatch.native import kernels
from ampatch.native.host_copy import for_fused_step


class FusedAdam(Float32Optimizer):
    """Adam (Kingma and Ba, 2015), or AdamW with its decoupled weight decay (Loshchilov and Hutter, 2019).

    After an overflow (``found_inf``) it skips the step itself, as torch's fused optimizers do. Therefore neither
    ampatch nor ``torch.amp.GradScaler`` syncs with the device to decide whether to skip, unless a group has
    ``max_grad_norm``.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: True to divide the moments by ``1 - beta ** step``; False also stops the counting of steps.
        betas: decay of the first and the second moment.
        eps: term added to the root of the second moment.
        adam_w_mode: True to decouple weight decay (AdamW); False to add it to the gradient (L2 regularization).
        weight_decay: factor of the weight decay.
        amsgrad: not supported, as in Apex.
        set_grad_none: True if ``zero_grad()`` sets gradients to None.
        capturable: True to keep the learning rate in a tensor on the device, where CUDA graphs read it at each replay.
        master_weights: not supported, because ampatch keeps float32 masters at O2 and O5.
        max_grad_norm: upper bound of the norm of each group's gradients, which ``step`` clips; 0 or None for no
            clipping. Only the FusedAdam of early 2019 had this argument and the following ones.
        eps_inside_sqrt: must be False: ``eps`` is added to the root.
        use_mt: ignored, because several tensors are always updated at once.
        amp_scale_adjustment: must be 1: gradients are unscaled when `ampatch.amp.scale_loss` ends.

    Attributes:
        multi_tensor_adam: `ampatch.apex.amp_C.multi_tensor_adam`, which steps of subclasses call. A scaler unscales and
            skips for these.

    Raises:
        OptionError: an argument is out of its range, or not supported.
    """

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
        eps_inside_sqrt: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if eps_inside_sqrt:
            raise UnsupportedOptionError(
                "found eps_inside_sqrt=True; FusedAdam adds eps to the root, as torch.optim.Adam does. Leave it out; "
                "for a similar effect, type eps=math.sqrt(eps)."
            )
        if amp_scale_adjustment != 1:
            raise UnsupportedOptionError(
                f"found amp_scale_adjustment={amp_scale_adjustment}; expected 1. Leave it out: amp.scale_loss(loss, "
                "optimizer) unscales the gradients."
            )
        if master_weights:
            raise UnsupportedOptionError(
                "found master_weights=True; expected False: amp keeps the float32 masters of half parameters. Type "
                'amp.initialize(model, optimizer, opt_level="O2"), or "O5" for bfloat16.'
            )
        self.adam_w_mode, self.capturable, self.master_weights = adam_w_mode, capturable, master_weights
        super().__init__(
            params,
            set_grad_none,
            amsgrad,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            **({"max_grad_norm": max_grad_norm} if max_grad_norm else {}),
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._has_own_step and not any(group.get("max_grad_norm") for group in self.param_groups)

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """Flag that steps of subclasses pass to ``multi_tensor_adam``."""
        return torch.zeros(1, dtype=torch.int32, device=self.param_groups[0]["params"][0].device)

    def _divisors(self, batches: list[tuple[Group, list[Tensor]]]) -> dict[int, Tensor]:
        clipped = {id(group): group for group, _ in batches if group.get("max_grad_norm")}
        return {key: _divisor(group) for key, group in clipped.items()}

    def _update_batch(self, group: Group, parameters: list[Tensor], values: list[Tensor], grads: list[Tensor]) -> None:
        adam(
            values,
            grads,
            self._moments(parameters, values, "exp_avg"),
            self._moments(parameters, values, "exp_avg_sq"),
            [],
            self._steps(parameters, group["bias_correction"]),
            fused=True,
            grad_scale=for_fused_step(getattr(self, "grad_scale", None), parameters),
            found_inf=for_fused_step(getattr(self, "found_inf", None), parameters),
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=self._learning_rate(group, parameters[0].device),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _steps(self, parameters: list[Tensor], bias_correction: bool) -> list[Tensor]:
        """Returns the number of earlier steps of each parameter, as a tensor that the kernel increments."""
        steps = []
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            steps.append(state["step"])
        # With an infinite number of steps both corrections are 1; the kernel uses the steps for nothing else.
        return steps if bias_correction else [torch.full_like(step, math.inf) for step in steps]

    def _learning_rate(self, group: Group, device: torch.device) -> float | Tensor:
        if self.capturable and not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
        return group["lr"]  # type: ignore[no-any-return]

    def _loaded(self, name: str, value: Any, parameter: Tensor) -> Any:
        if name == "step":
            return torch.as_tensor(value, dtype=torch.float32, device=parameter.device).clone()
        return super()._loaded(name, value, parameter)


def _divisor(group: Group) -> Tensor:
    """Returns the divisor that clips a group's gradients to ``max_grad_norm``.

    The norm is float32, because the norm of many half gradients exceeds float16.
    """
    grads = [each.grad for each in group["params"] if each.grad is not None]
    _, sum_of_squares = kernels.flag_and_squares(grads, grads[0].device)
    return torch.clamp((sum_of_squares.sqrt() + 1e-6) / group["max_grad_norm"], min=1)
