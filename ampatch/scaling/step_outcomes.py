"""What became of an adopted optimizer's steps, and what its user is told of that.

Owns the counts of skipped steps, the verdicts that the host has not read yet, and the texts about one skipped step.
Must never decide whether a step is skipped.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ampatch import distributed
from ampatch.errors import warn
from ampatch.scaling import overflows
from ampatch.scaling.kept_buffers import BuffersBefore
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.overflows import Overflow, OverflowHandler, SkippedSteps
from ampatch.scaling.scale_use import ScaleUse, StepCheck
from ampatch.scaling.step_gate import end_skipped
from ampatch.tracing import is_capturing

logger = logging.getLogger("ampatch")

OVERFLOWED = operator.attrgetter("overflowed")


class StepOutcomes:
    """The outcomes of one optimizer's steps.

    Args:
        gradients: the optimizer's gradients.
        handler: what else happens after a skipped step.
        announces: whether to log skipped steps.

    Attributes:
        skips: the steps whose verdicts the host has read.
        unread: the verdicts of other steps, and the buffers before these; in the order of the steps.
        is_near_floor: True if a scale was at its floor, so that the next overflow has to raise, and to name parameters,
            while their gradients are there.
    """

    def __init__(self, gradients: OptimizerGradients, handler: OverflowHandler, announces: bool) -> None:
        self.skips = SkippedSteps()
        self.unread: deque[tuple[Sequence[ScaleUse], BuffersBefore | None]] = deque()
        self.is_near_floor = False
        self._gradients, self._handler, self._announces = gradients, handler, announces
        self._updated = gradients.updated
        self._warned_of_loss = False

    def read(self, wait: bool = True) -> SkippedSteps:
        """Reads the verdicts of earlier steps, in their order; returns the counts.

        Args:
            wait: whether to sync with the device; otherwise stops at the first verdict that has not arrived.
        """
        if not self.unread or is_capturing():  # a capturing stream must not be queried
            return self.skips
        while self.unread and (wait or all(scale_use.has_arrived for scale_use in self.unread[0][0])):
            uses, buffers = self.unread.popleft()
            overflowed = list(filter(OVERFLOWED, uses))
            if not overflowed:
                self.note_ran(uses)
                continue
            if buffers is not None:
                buffers.restore()
            if len(overflowed) > 1 and isinstance(overflowed[-1], StepCheck):
                overflowed.pop()  # blocks have found it already
            self._count(overflowed)
            self.is_near_floor = any(scale_use.ended_at_floor for scale_use in overflowed)
            self._announce(overflowed)
            self._warn_of_loss(overflowed)
            self._explain(overflowed, None)
        return self.skips

    def note_read(self, judged: Sequence[ScaleUse]) -> None:
        """Updates the record of steps before one whose verdict the host has read."""
        self.read(wait=bool(judged))
        if self.unread:
            self.unread.append(([], None))  # behind earlier steps, in their order
        if self.is_near_floor and judged:
            self.is_near_floor = any(scale_use.ended_at_floor for scale_use in judged)

    def note_ran(self, judged: Sequence[ScaleUse]) -> None:
        """Notes that a step runs, by verdicts that the host has read."""
        self.skips.note_ran()
        self._warn_of_loss(judged, ran=True)

    def end_skipped(self, overflowed: Sequence[ScaleUse]) -> Overflow | None:
        """Ends a step that is skipped, while its gradients are there.

        Returns:
            What the handler is to get once everything is in order again; None if it reports nothing.

        Raises:
            LossScaleError: a scale was at its floor.
        """
        self._count(overflowed)
        self._warn_of_loss(overflowed)
        overflow = end_skipped(
            self._updated.optimizer(),
            [(scale_use.change, scale_use.floor) for scale_use in overflowed],
            lambda: self._overflow_of(overflowed),
            self._handler,
            lambda: self._announce(overflowed),
        )
        self._explain(overflowed, lambda: self._traced(overflowed).get("trace"))
        return overflow

    def _count(self, overflowed: Iterable[ScaleUse]) -> None:
        """Counts a skipped step, and its overflow in each scaler, once however many blocks it was in."""
        self.skips.note_skipped()
        for last in _last_of_each_loss(overflowed):
            concerned = [each.done for each in (last, *last.blocks)]  # of which another optimizer's step may have one
            if not any(done.counted for done in concerned):
                last.scaler.overflows += 1
                for done in concerned:
                    done.counted = True

    def _announce(self, overflowed: Iterable[ScaleUse]) -> None:
        if self._announces:
            for last in _last_of_each_loss(overflowed):
                if not last.done.announced:
                    last.done.announced, change = True, last.change
                    logger.warning(overflows.LINE, change.loss_id, change.verb, change.after)

    def _explain(self, overflowed: Sequence[ScaleUse], trace: Callable[[], object] | None) -> None:
        if self._handler.explains and self._announces:
            is_certain = any(not use.scaler.dynamic or use.loss_that_is_not_finite is not None for use in overflowed)
            self._handler.explain(self.skips, is_certain, trace)

    def _overflow_of(self, overflowed: Sequence[ScaleUse]) -> Overflow:
        """Returns the skipped step as a value, while its gradients are there; syncs with the device."""
        found = self._updated.non_finite()
        names = {each.name for each in found}
        is_anothers = any(use.done.named for use in overflowed)
        found += tuple(each for use in overflowed for each in use.non_finite if each.name not in names)
        if found:
            for use in overflowed:
                use.done.named = True
        return Overflow(
            type(self._updated.optimizer()).__name__,
            tuple(last.change for last in _last_of_each_loss(overflowed)),
            found,
            next((loss for use in overflowed if (loss := use.loss_that_is_not_finite) is not None), None),
            "" if found else overflows.OF_ANOTHER_OPTIMIZER if is_anothers else self._remark(),
            **self._traced(overflowed),
        )

    def _traced(self, overflowed: Sequence[ScaleUse]) -> dict[str, Any]:
        scales = (float(block.scale) for use in overflowed for block in use.blocks)
        return self._handler.traced(self._updated.model_parameters(), max(scales, default=1.0))

    def _remark(self) -> str:
        """Returns why a skipped step has no gradient that is inf or NaN."""
        others = (each for each in self._gradients.others() if each is not self._gradients)
        if any(each.updated.non_finite() for each in others):
            return overflows.OF_ANOTHER_OPTIMIZER
        return overflows.OF_ANOTHER_RANK if distributed.has_other_ranks() else overflows.CHANGED_SINCE

    def _warn_of_loss(self, uses: Sequence[ScaleUse], *, ran: bool = False) -> None:
        """Warns once if a loss is inf or NaN, so that no scale would avoid the overflow.

        Args:
            uses: the uses of scales that led to a step.
            ran: whether the step ran, as the gradients are finite.
        """
        if self._warned_of_loss:
            return
        losses = [(loss, each) for each in uses if (loss := each.loss_that_is_not_finite) is not None]
        if ran:  # without what has overflowed, and was cleared since
            losses = [(loss, each) for loss, each in losses if not any(map(OVERFLOWED, each.blocks))]
        if not losses:
            return
        self._warned_of_loss = True
        loss, scale_use = losses[0]
        told = f"the loss of a {'step' if ran else 'skipped step'} is {loss}"
        range_ = "the range of its types"
        if scale_use.scaler.dynamic:
            told += "" if ran else " before it is scaled, so that no loss scale can help"
            range_ = "float16's range: half_dtype=torch.bfloat16 has that of float32"
        if any(map(OVERFLOWED, self._gradients.verdicts.dropped)):
            warn(
                f"{told}. An earlier block before the same step has overflowed, and its gradients were used or cleared "
                "without a step. If an optimizer writes to the weights in two halves, as SAM does, the first half has "
                "written inf or NaN: ask amp.gradients_are_finite(optimizer) before it."
            )
        elif ran:
            warn(
                f"{told}, and the step has run, since its gradients are finite. Look at how the loss is computed, for "
                f"values that leave {range_}. amp.float_function makes a function compute in float32."
            )
        else:
            warn(
                f"{told}. Look for inputs that are not finite, weights that are not (a learning rate that is too "
                f"high), or values in the forward that leave {range_}."
            )


def _last_of_each_loss(overflowed: Iterable[ScaleUse]) -> Iterable[ScaleUse]:
    return {scale_use.scaler_id: scale_use for scale_use in overflowed}.values()
