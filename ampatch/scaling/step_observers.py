"""Shows blocks and steps to observers: `amp.report` is one while it is open.

Owns the list of observers of the process, since a report may begin before a session and outlive it. While the list is
empty, a step takes no longer. Observers must never write to the tensors that they are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ampatch.ledger import PatchLedger
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.scale_use import ScaleUse
from ampatch.torch_private.optimizers import MAYBE_OPT_STEP, SCALE


class StepObserver:
    """Watches blocks and steps; a class that watches overrides what it wants to see."""

    def unscaling(self, scale_use: ScaleUse, gradients: Sequence[OptimizerGradients]) -> None:
        """Sees gradients that are about to be unscaled.

        Args:
            scale_use: the use of a scale that they are multiplied by.
            gradients: by optimizer.
        """

    def stepped(self, gradients: OptimizerGradients, judged: Sequence[ScaleUse], skipped: bool | None) -> None:
        """Hears that an optimizer's step has ended, whether it returned or raised.

        Args:
            gradients: the optimizer's.
            judged: the verdicts that decided about it.
            skipped: whether it was skipped; None if the optimizer's own kernel decides, by these verdicts.
        """

    def scaler_stepping(self, scale: Tensor, optimizer: Any, verdicts: Sequence[Tensor], divisor: Any) -> None:
        """Sees the gradients of a GradScaler's step before it runs or is skipped.

        Args:
            scale: the loss scale.
            optimizer: the optimizer.
            verdicts: each not 0 after an overflow.
            divisor: what the gradients are still to be divided by; None if they are unscaled.
        """

    def scaler_stepped(self, optimizer: Any) -> None:
        """Hears that this step has ended, whether it ran, raised or was skipped."""


#: Those that watch now.
observers: list[StepObserver] = []
_ledger = PatchLedger()  # empty if nobody watches


def add(observer: StepObserver) -> None:
    """Shows blocks and steps to an observer from now on, those of torch's GradScaler as well."""
    if not observers:
        step = getattr(*MAYBE_OPT_STEP)

        def observed(scaler: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            with scaler_step(getattr(scaler, SCALE), optimizer, list(state["found_inf_per_device"].values())):
                return step(scaler, optimizer, state, *args, **kwargs)

        _ledger.set(*MAYBE_OPT_STEP, observed)
    observers.append(observer)


def remove(observer: StepObserver) -> None:
    """Ends what `add` began."""
    observers.remove(observer)
    if not observers:
        _ledger.undo()


@contextmanager
def scaler_step(scale: Tensor, optimizer: Any, verdicts: Sequence[Tensor], divisor: Any = None) -> Iterator[None]:
    """Tells all observers that a GradScaler's step begins and ends; see `StepObserver.scaler_stepping`."""
    told = list(observers)
    for observer in told:
        observer.scaler_stepping(scale, optimizer, verdicts, divisor)
    try:
        yield
    finally:
        for observer in told:
            observer.scaler_stepped(optimizer)
