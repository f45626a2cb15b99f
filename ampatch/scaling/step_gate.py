"""The gate before a step that may be skipped, shared by blocks, `GradScaler` and Apex's classes.

Owns how a step is left when a closure overflows, how it is undone, torch's protocol for steps that skip by themselves,
and what follows a skipped step. Must not know where a verdict comes from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ampatch.errors import LossScaleError
from ampatch.native.host_copy import for_fused_step
from ampatch.scaling.overflows import ADVICE, Overflow, OverflowHandler, ScaleChange, findings
from ampatch.torch_private.optimizers import STEP_CALLED
from ampatch.weights import optimizer_state
from ampatch.weights.optimizer_state import Snapshot


class _ClosureOverflowedError(BaseException):
    """Leaves an optimizer's step after an overflow in its closure; a BaseException, since steps may catch Exception."""


class ClosureGate:
    """One step with a closure: if an evaluation overflows, parameters and state are what they were before the step.

    Args:
        optimizer: the optimizer.
        may_go_back: whether an evaluation may overflow, so that the optimizer is copied before the step. It is not
            copied if its class evaluates once, before it changes anything.
        exclusively: returns a context in which the optimizer's parameters are what its step updates.

    Attributes:
        evaluations: number of evaluations of the closure.
        overflowed: what `leave` got; None as long as no evaluation has overflowed.
    """

    def __init__(
        self,
        optimizer: Any,
        may_go_back: bool,
        exclusively: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.evaluations = 0
        self.overflowed: Any = None
        self._result: Any = None
        self._exclusively = exclusively
        self._before: Snapshot | None = None
        if may_go_back and not optimizer_state.evaluates_first(optimizer):
            with exclusively():
                self._before = Snapshot(optimizer)

    @property
    def can_restore(self) -> bool:
        """True if the optimizer has been copied."""
        return self._before is not None

    def leave(self, overflowed: Any, result: Any) -> NoReturn:
        """Leaves the step, within an evaluation of the closure or after it.

        Args:
            overflowed: what the caller of `run` needs to know.
            result: the closure's result, which `run` returns.
        """
        self.overflowed, self._result = overflowed, result
        raise _ClosureOverflowedError

    def run(self, step: Callable[[], Any]) -> Any:
        """Calls a step; undoes it if an evaluation has overflowed, even if the optimizer has gone on after that.

        Returns:
            The step's result; after an overflow that of the closure.
        """
        result = None
        with contextlib.suppress(_ClosureOverflowedError):
            result = step()
        if self.overflowed is None:
            return result
        if self._before is not None:
            with self._exclusively():
                self._before.restore()
        return self._result


@contextlib.contextmanager
def skipping_by_itself(
    optimizer: Any, parameters: Iterable[Tensor], divisor: Tensor | None, found_inf: Tensor | None
) -> Iterator[Any]:
    """Context for a step that unscales and skips in its own kernel, by torch's protocol between it and ``GradScaler``.

    Args:
        optimizer: the optimizer.
        parameters: the parameters that it updates.
        divisor: what the gradients are still to be divided by; None if they are unscaled.
        found_inf: 0-dimensional float32, not 0 if the step is to be skipped; None if it is not.

    Yields:
        ``found_inf``, on the CPU if a parameter is there.
    """
    parameters = list(parameters)
    optimizer.grad_scale = for_fused_step(divisor, parameters)
    optimizer.found_inf = for_fused_step(found_inf, parameters)
    try:
        yield optimizer.found_inf
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def end_skipped(
    optimizer: Any,
    changes: Sequence[tuple[ScaleChange, float]],
    describe: Callable[[], Overflow],
    handler: OverflowHandler,
    log: Callable[[], object],
) -> Overflow | None:
    """Ends a step that is skipped, while its gradients are there.

    Args:
        optimizer: the optimizer.
        changes: the reactions of the scales, each with the least scale; with 0 if there is none.
        describe: returns the skipped step as a value.
        handler: what happens after it.
        log: writes the log line.

    Returns:
        What the handler is to get once everything is in order again; None if it reports nothing.

    Raises:
        LossScaleError: a scale was at its floor.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        setattr(optimizer, STEP_CALLED, True)  # LR schedulers warn if they come before a first step
    check_floor(changes, describe)
    if handler.logs_line:
        log()
    return describe() if handler.reports else None


def check_floor(changes: Sequence[tuple[ScaleChange, float]], describe: Callable[[], Overflow]) -> None:
    """Raises `LossScaleError` if gradients overflowed at the least scale; see `end_skipped`."""
    for change, floor in changes:
        if change.before <= floor:
            overflow = describe()
            raise LossScaleError(
                f"loss scaler {change.loss_id} is at its floor of {floor:g} and the gradients still overflow, so no "
                f"scale can help. {ADVICE}\n{findings(overflow)}",
                overflow,
            )
