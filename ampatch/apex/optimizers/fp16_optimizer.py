"""The ``FP16_Optimizer`` of early 2019 for Apex's own optimizers, built on that of `ampatch.apex.fp16_utils`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ampatch.apex import fp16_utils
from ampatch.errors import UsageError


class FP16_Optimizer(fp16_utils.FP16_Optimizer):  # noqa: N801 - Apex's name
    """Wraps an optimizer, which then updates float32 masters of its half parameters.

    ::

        model.half()
        optimizer = FP16_Optimizer(FusedAdam(model.parameters(), max_grad_norm=1.0), dynamic_loss_scale=True)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    All gradients stay scaled until ``step``, ``clip_master_grads`` or ``inspect_master_grad_data``, the first of which
    unscales them. An overflow skips the update.

    Args:
        init_optimizer: optimizer of the model's parameters.
        static_loss_scale: factor of losses.
        dynamic_loss_scale: True for a scale that reacts to overflows.
        dynamic_loss_args: settings of the dynamic scale, as for ``apex.fp16_utils.FP16_Optimizer``; None for the
            settings of this class in Apex: ``scale_window=1000`` and ``min_loss_scale=1``.
        verbose: True to log skipped steps.

    Raises:
        OptionError: ``init_optimizer`` is not an optimizer, or a loss scale argument is invalid.
    """

    _checks_static_scale = True

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        dynamic_loss_args = dynamic_loss_args or {"scale_window": 1000, "min_loss_scale": 1.0}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, dynamic_loss_args, verbose)

    cur_scale = fp16_utils.FP16_Optimizer.loss_scale

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """Returns the tensors that the optimizer updates, by group: masters, and parameters that are not half."""
        return [list(map(self._masters.of, group["params"])) for group in self.param_groups]

    def zero_grad(self, set_grads_to_None: bool = True) -> None:  # noqa: N803 - Apex's name
        """Clears the gradients of the masters and of the model's parameters.

        Args:
            set_grads_to_None: True to set gradients to None; False to set them to 0.
        """
        super().zero_grad(set_grads_to_None)

    def backward(self, loss: Tensor, update_master_grads: bool = False, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss, multiplied by the scale.

        Args:
            loss: floating-point tensor of one element.
            update_master_grads: True to unscale the gradients now, and not in ``step``.
            retain_graph: True to keep the graph, as for ``loss.backward``.
        """
        super().backward(loss, update_master_grads, retain_graph)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Unscales the gradients, and clips them as that of ``apex.fp16_utils.FP16_Optimizer`` does."""
        self._unscale()
        return super().clip_master_grads(max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Unscales the gradients, and returns them as that of ``apex.fp16_utils.FP16_Optimizer`` does."""
        self._unscale()
        return super().inspect_master_grad_data()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscales the gradients, and updates the masters and the model's parameters; skips after an overflow.

        Args:
            closure: must be None, as in Apex.

        Returns:
            Result of the inner step; None if it was skipped.

        Raises:
            UsageError: there is a closure.
            LossScaleError: the gradients overflowed with the loss scale at its lower limit.
        """
        if closure is not None:
            raise UsageError(
                "this FP16_Optimizer, that of apex.optimizers, takes no closure, as in Apex. Type "
                "apex.fp16_utils.FP16_Optimizer(optimizer)."
            )
        self._unscale()
        return super().step()

    def _unscale(self) -> None:
        if not self._are_unscaled:
            self.update_master_grads()
