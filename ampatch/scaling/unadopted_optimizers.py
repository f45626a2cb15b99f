"""Steps that go past amp: those of optimizers that it was not handed, and those bound before it replaced them.

Torch's optimizers announce every step, whatever name it is called by. Owns which of them were looked at. Must not
change anything: it only raises and warns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ampatch.errors import UsageError, warn
from ampatch.opt_levels import HALVES
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.optimizers import NO_SCALE, AdoptedOptimizer
from ampatch.weights.optimizer_state import parameters_of


class UnadoptedOptimizers:
    """The optimizers that step while amp is on, and that it has not adopted.

    Args:
        adopted: those that it has, by id.
        ids_of_models: gives the ids of the models' parameters and of masters; None: those of any model count.
        is_scaled: whether losses are to be scaled.
        has_masters: whether half weights are to have masters.
    """

    def __init__(
        self,
        adopted: Mapping[int, AdoptedOptimizer],
        ids_of_models: Callable[[], Collection[int] | None],
        *,
        is_scaled: bool,
        has_masters: bool,
    ) -> None:
        self._adopted = adopted
        self._ids_of_models = ids_of_models
        self._is_scaled, self._has_masters = is_scaled, has_masters
        self._uses_by_hand = LossScaler.uses_by_hand
        self._passed: dict[int, weakref.ref[Any]] = {}  # by id: those that need not be looked at any more

    def let_pass(self, optimizer: Any) -> None:
        """Takes note that an optimizer needs no warning."""
        self._passed[id(optimizer)] = weakref.ref(optimizer)

    def hear(self, optimizer: Any, *_: object) -> None:
        """Looks at an optimizer of torch's that is about to step.

        Raises:
            UsageError: amp has adopted it, and the step goes past amp.

        Warns:
            AmpWarning: it is to update weights of a model that amp has, and amp knows nothing of it.
        """
        if any(each.is_at_work for each in list(self._adopted.values())):
            return  # it is a part of a step of theirs
        if id(optimizer) in self._adopted:
            raise UsageError(
                f"this step of the {type(optimizer).__name__} was bound, or compiled, before amp.initialize, and goes "
                "past amp, so that an overflow would reach the weights. Call optimizer.step(); or type "
                "step = optimizer.step, or compile it, after amp.initialize."
            )
        passed = self._passed.get(id(optimizer))
        if passed is None or passed() is not optimizer:
            self._look_at(optimizer)

    def _look_at(self, optimizer: Any) -> None:
        ids = self._ids_of_models()
        updated = [
            each for each in parameters_of(optimizer) if each.grad is not None and (ids is None or id(each) in ids)
        ]
        if not updated:
            return
        self.let_pass(optimizer)
        name = type(optimizer).__name__
        if self._has_masters and any(each.dtype in HALVES for each in updated):
            warn(
                f"this {name} updates half weights of a model that amp has, and was never handed to amp.initialize: "
                "there are no float32 masters, and small updates are lost. Type: model, optimizer = "
                "amp.initialize(model, optimizer, ...) with every optimizer in it."
            )
        is_judged = getattr(optimizer, "found_inf", None) is not None or LossScaler.uses_by_hand > self._uses_by_hand
        if self._is_scaled and not is_judged:
            warn(NO_SCALE.format(f"this {name} was never handed to amp.initialize, and steps with gradients"))
