"""A scaler with ``torch.amp.GradScaler``'s interface that a user gives a trainer in place of amp's own scale.

Owns when it unscales and updates within a training step. Must not know a trainer, nor what its backward passes reach.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampatch import GradScaler
from ampatch.errors import OptionError, UsageError
from ampatch.weights.optimizer_state import has_gradients, parameters_of

#: Options of ``amp.initialize`` for the scale that the scaler replaces.
_OF_SCALE = (
    *("loss_scale", "init_scale", "scale_factor", "growth_factor", "backoff_factor", "scale_window", "hysteresis"),
    *("min_loss_scale", "max_loss_scale", "scaler", "on_overflow", "check_finite"),
)


def without_scale(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of ``amp.initialize`` with which amp itself scales nothing.

    Raises:
        OptionError: they have one for amp's scale.
    """
    given = [name for name in _OF_SCALE if name in options]
    if given:
        raise OptionError(
            f"a scaler replaces amp's own scale and decides which steps are skipped, so that {' and '.join(given)} "
            "would have no effect. Leave one of the two out; ampatch.GradScaler takes on_overflow itself."
        )
    return {**options, "loss_scale": 1.0}


class GivenScaler:
    """The scaler of one trainer.

    Args:
        scaler: the user's scaler.
        optimizers: optimizers whose gradients it unscales.

    Attributes:
        is_unscaled: True if it has unscaled gradients, and its iteration has not ended.
        has_stepped: True if an optimizer has stepped in this iteration.
        has_skipped: True if a step was skipped; its user resets it.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[Any]) -> None:
        self._scaler, self._optimizers = scaler, optimizers
        self.is_unscaled = self.has_stepped = self.has_skipped = False

    def scale_for(self, leaf: Tensor) -> Tensor:
        """Returns the scale of the next backward pass, on the device of a leaf."""
        scale: Tensor = self._scaler.scale(torch.ones((), device=leaf.device))
        return scale

    def begin_backward(self) -> None:
        """Ends the iteration before, if it has stepped, or if its gradients were cleared without a step.

        Raises:
            UsageError: gradients that the scaler has unscaled are still there.
        """
        if self.is_unscaled and not self.has_stepped and any(map(_has_gradients, self._optimizers)):
            raise UsageError(
                f"a second backward pass adds to gradients that this {type(self._scaler).__name__} has unscaled, but "
                "it can unscale only once per step. Step, or clear the gradients, in between; or leave the scaler out: "
                "amp's own scale lets gradients accumulate."
            )
        self.end_iteration()

    def backward(self, original: Callable[..., None], tensors: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Runs ``torch.autograd.backward`` with the loss scaled, and unscales the gradients of the optimizers."""
        original(self._scaler.scale(tensors), *args, **kwargs)
        for optimizer in filter(_has_gradients, self._optimizers):
            self._scaler.unscale_(optimizer)
            self.is_unscaled = True

    def step_of(self, optimizer: Any) -> Callable[..., Any]:
        """Returns a ``step`` for an optimizer that calls the scaler's ``step``."""
        original = optimizer.step
        inside = False
        has_run = False

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside, has_run
            if inside:  # called by the scaler
                has_run = True
                return original(*args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            inside, has_run = True, False
            try:
                return self._step(optimizer, original, closure)
            finally:
                inside = False
                self.has_skipped |= not has_run

        return step

    def _step(self, optimizer: Any, original: Callable[..., Any], closure: Any) -> Any:
        scaler = self._scaler
        if closure is None:
            if not _has_gradients(optimizer):
                return optimizer.step()
            result = scaler.step(optimizer)
            self.has_stepped = True
            return result
        self.end_iteration()  # another optimizer's step has run its closure

        def evaluate() -> Any:
            self.is_unscaled = False
            return closure()

        if isinstance(scaler, GradScaler) or not scaler.is_enabled():
            result = scaler.step(optimizer, evaluate)
        else:
            parameter = inspect.signature(original).parameters.get("closure")
            if parameter is not None and parameter.default is parameter.empty:
                raise UsageError(
                    f"{type(optimizer).__name__} evaluates its closure several times in a step, and "
                    f"{type(scaler).__module__}.{type(scaler).__name__} takes no closures. Use ampatch.GradScaler, or "
                    "leave the scaler out."
                )
            result = evaluate()
            scaler.step(optimizer)
        self.has_stepped = True
        return result

    def end_iteration(self) -> None:
        """Updates the scaler, and notes whether its scale has backed off; a no-op if it has unscaled nothing."""
        if not (self.is_unscaled or self.has_stepped):
            return
        before = self._scaler.get_scale()
        self._scaler.update()
        self.has_skipped |= self._scaler.get_scale() < before
        self.has_stepped = self.is_unscaled = False


def _has_gradients(optimizer: Any) -> bool:
    return has_gradients(parameters_of(optimizer))
