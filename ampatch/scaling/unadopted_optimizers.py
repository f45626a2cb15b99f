"""Steps of optimizers that amp has not adopted, and steps that bypass amp because they were bound before it.

Torch's optimizers call global hooks at every step, by whatever name it is called. Must not change weights or gradients:
it raises, warns, and drops casts that the step makes invalid.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampatch.errors import UsageError, warn
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.patching.weight_cache import WeightCache
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.missing_scale import NO_SCALE, SCALED_BACKWARD, is_judged
from ampatch.scaling.optimizer_step import AdoptedOptimizer
from ampatch.scaling.users_optimizer import OWN_HOOK
from ampatch.switch import Switch
from ampatch.weights.optimizer_state import parameters_of

_IN_HALVES = (
    "this {0} is inside of the {1} that amp has, and steps outside of its step(), as in the second half of SAM: amp "
    "cannot skip that after an overflow. Hand the {0} itself to amp.initialize and amp.scale_loss, and ask "
    "amp.gradients_are_finite(optimizer) before the first half."
)


@dataclass(eq=False)
class UnadoptedOptimizers:
    """The optimizers that step while amp is on, and that it has not adopted.

    Args:
        adopted: the adopted optimizers, by id.
        switch: whether casts are on.
        cache: the casts of weights.
        ids_of_models: returns the ids of the models' parameters and of masters; None: those of all models count.
        is_left_scaled: returns True for a leaf whose gradient a block leaves scaled.
        leave: called with each half weight that such an optimizer updates, and that therefore stays as it is.
        is_scaled: whether losses are scaled.
        has_masters: whether half weights have masters.
    """

    adopted: Mapping[int, AdoptedOptimizer]
    switch: Switch
    cache: WeightCache
    ids_of_models: Callable[[], Collection[int] | None]
    leave: Callable[[Tensor], None]
    is_left_scaled: Callable[[Tensor], bool]
    is_scaled: bool
    has_masters: bool

    def __post_init__(self) -> None:
        self._uses_by_hand = LossScaler.uses_by_hand
        self._passed: dict[int, weakref.ref[Any]] = {}  # optimizers that need no further check, by id

    def exempt(self, optimizer: Any) -> None:
        """Notes that an optimizer needs no warning."""
        self._passed[id(optimizer)] = weakref.ref(optimizer)

    def after_step(self, optimizer: Any, *_: object) -> None:
        """Drops the casts of weights after a step; an adopted optimizer does so itself."""
        if self.switch.active and id(optimizer) not in self.adopted:
            self.cache.end_iteration_of(functools.partial(parameters_of, optimizer))

    def before_step(self, optimizer: Any, *_: object) -> None:
        """Checks one of torch's optimizers that is about to step.

        Raises:
            UsageError: amp has adopted the optimizer, and this step bypasses amp.

        Warns:
            AmpWarning: it updates weights of an adopted model, and was never passed to ``amp.initialize``.
        """
        if not self.switch.active or any(each.is_at_work for each in list(self.adopted.values())):
            return  # amp is off, or this is a part of an adopted optimizer's step
        if id(optimizer) in self.adopted:
            raise UsageError(
                f"this step of the {type(optimizer).__name__} goes past amp, and an overflow would reach the weights: "
                "it was bound, or compiled, before amp.initialize, or a method of the class calls super().step(). Call "
                "optimizer.step(), in such a method self.step(); or type step = optimizer.step, or compile it, after "
                "amp.initialize."
            )
        passed = self._passed.get(id(optimizer))
        is_passed = passed is not None and passed() is optimizer
        if not is_passed and _held_by(optimizer).isdisjoint(self.adopted):  # otherwise amp has the step that follows
            self._check(optimizer)

    def watch_inherited_step(self, kind: Any, ledger: PatchLedger) -> None:
        """Has `before_step` called where a method of an optimizer's class calls ``super().step()``.

        Torch does so once the base class has an object: it then wraps the step that it finds there, for good.
        """
        optimizers = [each for each in kind.__mro__[1:] if issubclass(each, Optimizer)]
        base: Any = next((each for each in optimizers if "step" in vars(each)), None)
        if base is None or base.step is not getattr(kind.step, "__wrapped__", kind):
            return
        original, reference = base.step, weakref.ref(self)

        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            unadopted = reference()
            if unadopted is not None:
                unadopted.before_step(optimizer)
            return original(optimizer, *args, **kwargs)

        def take_out() -> None:
            if base.step is step:
                base.step = original

        base.step = step
        ledger.on_undo(take_out)

    def _check(self, optimizer: Any) -> None:
        ids = self.ids_of_models()
        updated = [
            each for each in parameters_of(optimizer) if each.grad is not None and (ids is None or id(each) in ids)
        ]
        name = type(optimizer).__name__
        needs_scale = not is_judged(optimizer, self._uses_by_hand)
        if not updated:
            left = next(filter(self.is_left_scaled, parameters_of(optimizer)), None)
            if left is not None and needs_scale:
                self.exempt(optimizer)
                warn(
                    f"this {name} was never handed to amp.initialize, and steps on a tensor of shape "
                    f"{tuple(left.shape)} whose gradient amp.scale_loss has left multiplied by the loss scale. Type: "
                    "model, optimizer = amp.initialize(model, optimizer, ...) with every optimizer in it, and hand "
                    "each to amp.scale_loss; or divide the gradient by amp.get_loss_scale() before the step."
                )
            return
        self.exempt(optimizer)
        if self.has_masters and any(each.dtype in HALVES for each in updated):
            for each in parameters_of(optimizer):
                self.leave(each)
            warn(
                f"this {name} updates half weights of a model that amp has, and was never handed to amp.initialize: "
                "there are no float32 masters, and small updates are lost. Type: model, optimizer = "
                "amp.initialize(model, optimizer, ...) with every optimizer in it."
            )
        if self.is_scaled and needs_scale:
            adopted = (each.optimizer for each in list(self.adopted.values()))
            outer = next((type(each).__name__ for each in adopted if id(optimizer) in _held_by(each)), None)
            step = f"this {name} was never handed to amp.initialize, and steps with gradients"
            warn(NO_SCALE.format(step, SCALED_BACKWARD) if outer is None else _IN_HALVES.format(name, outer))


def _held_by(optimizer: Any) -> set[int]:
    """Returns the ids of what an optimizer has as attributes: the optimizer inside it is among them."""
    return set(map(id, getattr(optimizer, "__dict__", {}).values()))


for _hook in (UnadoptedOptimizers.before_step, UnadoptedOptimizers.after_step):
    setattr(_hook, OWN_HOOK, True)
