"""Stochastic gradient descent under Apex's name and arguments, updated by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.sgd import sgd

from ampatch.apex.optimizers._float32_optimizer import Float32Optimizer, Group, decay_first
from ampatch.errors import OptionError
from ampatch.grouping import grouped
from ampatch.native.host_copy import for_fused_step


class FusedSGD(Float32Optimizer):
    """SGD with momentum (Sutskever et al., 2013), in torch's form: ``buffer = momentum * buffer + grad``.

    After an overflow (``found_inf``) it skips the step itself, unless ``wd_after_momentum`` is set.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; can be left out if every group has its own.
        momentum: decay of the buffer; 0 for no buffer.
        dampening: reduction of the gradient's weight in the buffer to ``1 - dampening``, except for the first gradient.
        weight_decay: factor of the weight decay.
        nesterov: True for Nesterov's momentum.
        wd_after_momentum: True to keep weight decay out of the buffer:
            ``param -= lr * (buffer + weight_decay * param)``.
        materialize_master_grads: ignored, since ampatch's masters always have their gradients.
        set_grad_none: True if ``zero_grad()`` sets gradients to None.

    Raises:
        OptionError: an argument is out of its range, a group has no learning rate, or ``nesterov`` is combined with
            dampening or with no momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptionError(
                f"found nesterov=True with momentum={momentum} and dampening={dampening}; expected a momentum above 0 "
                "and no dampening. Type FusedSGD(params, lr, momentum=0.9, nesterov=True)."
            )
        self.wd_after_momentum, self.materialize_master_grads = wd_after_momentum, materialize_master_grads
        # Leave out None: it would become the learning rate of groups that have none.
        options: dict[str, Any] = {} if lr is None else {"lr": lr}
        options |= {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, set_grad_none, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group.

        Args:
            param_group: dict with parameters, under "params", and options; missing options are the optimizer's.

        Raises:
            OptionError: neither the group nor the optimizer has a learning rate.
        """
        if isinstance(param_group, dict) and param_group.get("lr") is None and "lr" not in self.defaults:
            name, number = type(self).__name__, len(self.param_groups)
            raise OptionError(
                f"{name} found no lr for group {number} of its parameters. Type {name}(params, lr=0.1), or give each "
                'group its own: {"params": params, "lr": 0.1}.'
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._has_own_step and not self.wd_after_momentum

    def _update(self, batches: list[tuple[Group, list[Tensor]]]) -> None:
        for group, parameters in batches:
            # The kernel treats a buffer's first step differently.
            by_step = grouped((self.state[each].get("momentum_buffer") is None, each) for each in parameters)
            for is_first, some in by_step.items():
                # After an overflow it would leave new buffers uninitialized.
                if not (is_first and group["momentum"] and self._overflowed()):
                    self._update_some(group, some, is_first)

    def _update_some(self, group: Group, parameters: list[Tensor], is_first: bool) -> None:
        with self._in_float32(parameters) as (values, grads):
            buffers: list[Tensor | None] = [None for _ in values]
            if group["momentum"] and not is_first:
                buffers = list(self._moments(parameters, values, "momentum_buffer"))
            if self.wd_after_momentum:
                decay_first(values, group)
            sgd(
                values,
                grads,
                buffers,
                fused=True,
                grad_scale=for_fused_step(getattr(self, "grad_scale", None), parameters),
                found_inf=for_fused_step(getattr(self, "found_inf", None), parameters),
                weight_decay=0.0 if self.wd_after_momentum else group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
            )
        if group["momentum"]:
            for parameter, buffer in zip(parameters, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer
