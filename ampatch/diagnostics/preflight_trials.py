"""Tries whether a step of a model stands a set-up of amp, beside the same step in float32.

Owns the verdict on one run. Must never search for a change: `preflight_mending` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ampatch.diagnostics import causes
from ampatch.diagnostics.examiner import Examiner, origins_of_gradients
from ampatch.diagnostics.overflow_trace import OverflowTrace
from ampatch.diagnostics.preflight_report import FAILS, INACCURATE, OVERFLOWS, STANDS, LevelVerdict
from ampatch.diagnostics.preflight_steps import (
    OpenedCopy,
    RandomInFloat32,
    Setup,
    Step,
    noting_warnings,
    opened_copy,
    text_of,
)
from ampatch.diagnostics.preflight_subject import RandomState, Subject
from ampatch.diagnostics.watch import Watch
from ampatch.diagnostics.watched import WatchedOp, has_half
from ampatch.errors import LossScaleError

#: The greatest gradient error of a level that stands: the two gradients then differ by 12 degrees at most. In bfloat16
#: sound models have errors of some hundredths, small ones with ReLU up to 0.1; sums that cancel give 0.3 and more.
GRADIENT_BOUND = 0.2

#: The least dynamic scale that is tried. A gradient that overflows even with it is beyond 1e7 in float32.
LEAST_SCALE = 2.0**-8


@dataclass(frozen=True, slots=True)
class Trial:
    """One or more steps with one setup, until one is finite.

    Attributes:
        setup: the arguments of ``amp.initialize``.
        level: how the last step went.
        around: names of the modules around that place, or around the place that raised; the innermost first.
        is_refused: True if amp refused the setup, before any step.
    """

    setup: Setup
    level: LevelVerdict
    around: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def stands(self) -> bool:
        """True if the verdict is "stands"."""
        return self.level.verdict == STANDS


def tried(subject: Subject, reference: Step, state: RandomState, setup: Setup) -> Trial:
    """Runs a step with a setup; with a dynamic scale again, while only the backward pass overflows.

    Args:
        subject: the model and its step.
        reference: the float32 step.
        state: random numbers of every step.
        setup: the arguments of ``amp.initialize``.
    """
    notes: list[str] = []
    opened: OpenedCopy | None = None
    try:
        with noting_warnings(notes), opened_copy(subject, setup) as opened:
            step, scale, trace = until_finite(subject, opened, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may raise anything, and that is a verdict
        around = () if opened is None else _around(error, opened.model)
        level = LevelVerdict(setup.opt_level, setup.half_name, FAILS, error=text_of(error), notes=tuple(notes))
        return Trial(setup, level, around, is_refused=opened is None)
    level = LevelVerdict(setup.opt_level, setup.half_name, OVERFLOWS, scale, step.loss, trace=trace, notes=tuple(notes))
    if step.is_finite:
        lost = reference.gradient_error(step)
        verdict = STANDS if lost <= GRADIENT_BOUND else INACCURATE
        level = replace(level, verdict=verdict, loss_error=reference.loss_error(step), gradient_error=lost)
    return Trial(setup, level, () if trace is None or trace.module is None else enclosing(trace.module))


def until_finite(subject: Subject, opened: OpenedCopy, state: RandomState) -> tuple[Step, float, OverflowTrace | None]:
    """Returns the last step, its scale, and the trace that most scales have in common."""
    dynamic = opened.setup.properties.loss_scale == "dynamic"
    buffers = [(buffer, buffer.clone()) for buffer in opened.model.buffers()]
    examiner = opened.setup.examiner(opened.model)
    traces: list[OverflowTrace] = []
    while True:
        scale, arguments = opened.scale, subject.arguments()
        state.restore()
        with Watch(keep=has_half) as watch, RandomInFloat32():
            loss = opened.step_of(subject, arguments)
        step = opened.outcome(loss)
        trace = None if step.is_finite else examined(watch, examiner, scale)
        traces += [] if trace is None else [trace]
        only_backward = math.isfinite(step.loss) and (trace is None or trace.direction == "backward")
        if step.is_finite or not (dynamic and only_backward and scale > LEAST_SCALE):
            return step, scale, _commonest(traces)
        try:
            opened.optimizer.step()  # which is skipped
        except LossScaleError:
            return step, scale, _commonest(traces)
        opened.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _commonest(traces: Sequence[OverflowTrace]) -> OverflowTrace | None:
    """Returns the first of the traces that name the same place most often; None if there are none."""
    places = [(trace.direction, trace.function, trace.module, trace.line) for trace in traces]
    return max(traces, key=lambda trace: places.count(places[traces.index(trace)]), default=None)


def examined(watch: Watch, examiner: Examiner, loss_scale: float) -> OverflowTrace | None:
    """Returns where the first inf or NaN of a watched step arose; None if no operator produced one."""
    found: list[WatchedOp | None] = list(origins_of_gradients(watch).values())
    if not found:  # the gradients are finite, and the loss is not
        found += causes.origins(watch.ops).values()
    return examiner.describe(found, watch.missed_threads, loss_scale) if found else None


def enclosing(name: str) -> tuple[str, ...]:
    """Returns the name of a module and of those around it, from the innermost; the model itself has none."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))


def _around(error: BaseException, model: nn.Module) -> tuple[str, ...]:
    """Returns the name of the innermost module whose code raised, and of those around it."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost, trace = "", error.__traceback__
    while trace is not None:
        innermost, trace = names.get(id(trace.tb_frame.f_locals.get("self")), "") or innermost, trace.tb_next
    return enclosing(innermost)
