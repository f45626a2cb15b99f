"""Runs steps of copies of a model at opt levels: is a step sound, what does it cost.

Owns the verdict on one run. Must never search for a change, touch the user's model, nor leave a session.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ampatch.diagnostics import causes
from ampatch.diagnostics.examiner import Examiner, origins_of_gradients
from ampatch.diagnostics.overflow_trace import OverflowTrace
from ampatch.diagnostics.peak_memory import peak_allocated
from ampatch.diagnostics.preflight_report import FAILS, GRADIENT_BOUND, INACCURATE, OVERFLOWS, STANDS, LevelVerdict
from ampatch.diagnostics.preflight_steps import (
    OpenedCopy,
    RandomInFloat32,
    Setup,
    Step,
    noting_warnings,
    opened_copy,
    text_of,
)
from ampatch.diagnostics.preflight_subject import Arguments, RandomState, Subject
from ampatch.diagnostics.watch import Watch
from ampatch.diagnostics.watched import WatchedOp, has_half
from ampatch.errors import LossScaleError

#: The least dynamic scale that is tried. A gradient that overflows even with it is beyond 1e7 in float32.
LEAST_SCALE = 2.0**-8

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One or more steps with one setup, until one is finite.

    Attributes:
        setup: the arguments of ``amp.initialize``.
        level: how the last step went.
        module: name of the module that overflowed or raised; empty if it is unknown, or the model itself.
        is_refused: True if amp refused the setup, before any step.
    """

    setup: Setup
    level: LevelVerdict
    module: str = ""
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
        level = LevelVerdict(setup.opt_level, setup.half_name, FAILS, error=text_of(error), notes=tuple(notes))
        return Trial(setup, level, "" if opened is None else _innermost(error, opened.model), opened is None)
    flushed = reference.flushed(scale) if setup.half_dtype is torch.float16 else None
    level = LevelVerdict(setup.opt_level, setup.half_name, OVERFLOWS, scale, step.loss, underflow=flushed)
    level = replace(level, trace=trace, notes=tuple(notes))
    if step.is_finite:
        lost = reference.gradient_error(step)
        verdict = STANDS if lost <= GRADIENT_BOUND else INACCURATE
        level = replace(level, verdict=verdict, loss_error=reference.loss_error(step), gradient_error=lost)
    return Trial(setup, level, "" if trace is None else trace.module or "")


def until_finite(subject: Subject, opened: OpenedCopy, state: RandomState) -> tuple[Step, float, OverflowTrace | None]:
    """Returns the last step, its scale, and the trace that most scales have in common."""
    dynamic = opened.setup.properties.loss_scale == "dynamic"
    buffers = [(buffer, buffer.clone()) for buffer in opened.model.buffers()]
    examiner = opened.setup.examiner(opened.model)
    traces: dict[Any, list[OverflowTrace]] = {}
    while True:
        scale, arguments = opened.scale, subject.arguments()
        state.restore()
        with Watch(keep=has_half) as watch, RandomInFloat32():
            loss = opened.step_of(subject, arguments)
        step = opened.outcome(loss)
        trace = None if step.is_finite else examined(watch, examiner, scale)
        if trace is not None:
            traces.setdefault((trace.direction, trace.function, trace.module, trace.line), []).append(trace)
        only_backward = math.isfinite(step.loss) and (trace is None or trace.direction == "backward")
        if step.is_finite or not (dynamic and only_backward and scale > LEAST_SCALE):
            break
        try:
            opened.optimizer.step()  # which is skipped
        except LossScaleError:
            break
        opened.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return step, scale, max(traces.values(), key=len)[0] if traces else None


def examined(watch: Watch, examiner: Examiner, loss_scale: float) -> OverflowTrace | None:
    """Returns where the first inf or NaN of a watched step arose; None if no operator produced one."""
    found: list[WatchedOp | None] = list(origins_of_gradients(watch).values())
    if not found:  # the gradients are finite, and the loss is not
        found += causes.origins(watch.ops).values()
    return examiner.describe(found, watch.missed_threads, loss_scale) if found else None


def _innermost(error: BaseException, model: nn.Module) -> str:
    """Returns the name of the innermost module whose code raised."""
    names = {id(module): name for name, module in model.named_modules()}
    running = [names.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(running)), "")


@dataclass(slots=True)
class Cost:
    """What steps with one setup cost.

    Attributes:
        seconds: the time of each step.
        peak_bytes: peak memory of a step, with the weights; None if unknown.
        notes: why something could not be measured.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def milliseconds(self) -> float | None:
        """The median time of a step."""
        return statistics.median(self.seconds) * 1e3 if self.seconds else None


def measured(subject: Subject, setups: Sequence[Setup | None], state: RandomState) -> list[Cost]:
    """Measures steps: forward pass, loss, backward pass, and the step of SGD.

    Goes through all setups three times, so that noise of the machine hits all alike. Each time a step to warm up comes
    first. A setup that is None gets no numbers.
    """
    costs = [Cost() for _ in setups]
    for last in [False] * _ROUNDS + [True]:
        for setup, cost in zip(setups, costs, strict=True):
            if setup is None or cost.notes:
                continue
            try:
                with noting_warnings([]):  # those of amp are in the verdict's notes
                    if last:
                        cost.peak_bytes = _peak_bytes(subject, setup, state)
                    else:
                        cost.seconds.append(_seconds(subject, setup, state))
            except Exception as error:  # noqa: BLE001 - a report without a number is better than none
                cost.notes.append(f"not measured further: {text_of(error)}")
    return costs


def _seconds(subject: Subject, setup: Setup, state: RandomState) -> float:
    """Returns the time of a step, after one to warm up."""
    gpus = {each.device for each in subject.model.parameters() if each.is_cuda}

    def now() -> float:
        for device in gpus:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with opened_copy(subject, setup) as opened:
        step = _warmed_up(opened, subject, state)
        begun = now()
        step()
        return now() - begun


def _warmed_up(opened: OpenedCopy, subject: Subject, state: RandomState) -> Callable[[], None]:
    """Runs a training step of a copy, and returns a function that runs another one, on the same random numbers."""

    def step(arguments: Arguments) -> None:
        opened.step_of(subject, arguments)
        opened.optimizer.step()

    state.restore()
    step(subject.arguments())
    opened.optimizer.zero_grad(set_to_none=True)
    arguments = subject.arguments()
    state.restore()
    return functools.partial(step, arguments)


def _peak_bytes(subject: Subject, setup: Setup, state: RandomState) -> int:
    """Returns the peak memory of a step, with the weights of the copy, and without the user's own model."""
    gpu = next((each.device for each in subject.model.parameters() if each.is_cuda), None)
    before = 0 if gpu is None else torch.cuda.memory_allocated(gpu)
    with contextlib.ExitStack() as stack:

        def prepare() -> Callable[[], None]:
            return _warmed_up(stack.enter_context(opened_copy(subject, setup)), subject, state)

        if gpu is None:
            return peak_allocated(prepare)
        step = prepare()
        torch.cuda.reset_peak_memory_stats(gpu)
        step()
        return torch.cuda.max_memory_allocated(gpu) - before
