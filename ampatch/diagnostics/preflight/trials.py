"""Tries a step at one opt level beside the float32 step: is it sound, and what does it cost.

Owns the verdict on one run. Must never search for a change.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ampatch.diagnostics.peak_memory import peak_allocated
from ampatch.diagnostics.preflight import result
from ampatch.diagnostics.preflight.result import LevelVerdict
from ampatch.diagnostics.trial_steps.steps import OpenedCopy, Setup, Step, opened_copy, relative, state_of, until_finite
from ampatch.diagnostics.trial_steps.subject import Arguments, Subject, noting_warnings, text_of
from ampatch.half_types import needs_scale
from ampatch.opt_levels import dtype_name

_ROUNDS = 3  # of measuring times


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
    def passes(self) -> bool:
        """True if the verdict is "passes"."""
        return self.level.verdict == result.PASSES


def tried(subject: Subject, reference: Step, setup: Setup) -> Trial:
    """Runs a step with a setup; with a dynamic scale again, while only the backward pass overflows.

    Args:
        subject: the model and its step.
        reference: the float32 step.
        setup: the arguments of ``amp.initialize``.
    """
    level = LevelVerdict(setup.opt_level, dtype_name(setup.half_dtype), result.FAILS)
    notes: list[str] = []
    opened: OpenedCopy | None = None
    try:
        with noting_warnings(notes), opened_copy(subject, setup) as opened:
            step, scale, trace = until_finite(opened)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may raise anything, and that is a verdict
        level = replace(level, error=text_of(error), notes=tuple(notes))
        return Trial(setup, level, "" if opened is None else _innermost(error, opened.model), opened is None)
    flushed = reference.flushed(scale) if needs_scale(setup.half_dtype) else None
    seen = replace(level, loss_scale=scale, loss=step.loss, underflow=flushed, trace=trace, notes=tuple(notes))
    module = "" if trace is None else trace.module or ""
    if not step.is_finite:
        return Trial(setup, replace(seen, verdict=result.OVERFLOWS), module)
    lost = reference.gradient_error(step)
    # With masters, a frozen half weight becomes float32 once it is written to: only its first change is in half.
    state = dict(subject.model.named_buffers()) if setup.properties.master_weights else state_of(subject.model)
    written, name = reference.state_error(step, state)
    is_accurate = lost <= result.GRADIENT_BOUND and written <= result.STATE_BOUND
    level = replace(
        seen,
        verdict=result.PASSES if is_accurate else result.INACCURATE,
        loss_error=relative(abs(step.loss - reference.loss), abs(reference.loss)),
        gradient_error=lost,
        state_error=written,
        state=name,
    )
    return Trial(setup, level, name.rpartition(".")[0] if written > result.STATE_BOUND else module)


def _innermost(error: BaseException, model: nn.Module) -> str:
    """Returns the name of the innermost module whose code raised."""
    names = {id(module): name for name, module in model.named_modules()}
    running = [names.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(running)), "")


def measured(subject: Subject, measures: bool, verdict: LevelVerdict, setup: Setup) -> LevelVerdict:
    """Returns a verdict with time and memory of a step: forward pass, loss, backward pass, and the step of SGD.

    The time is the median of three, each after a step to warm up.
    """
    if not measures:
        return verdict
    try:
        with noting_warnings([]):  # those of amp are in the verdict's notes
            times = [_milliseconds(subject, setup) for _ in range(_ROUNDS)]
            with contextlib.ExitStack() as stack:
                # With the weights of the copy, and without the user's own model.
                peak = peak_allocated(lambda: _warmed_up(stack.enter_context(opened_copy(subject, setup))))
    except Exception as error:  # noqa: BLE001 - a report without a number is better than none
        return replace(verdict, notes=(*verdict.notes, f"not measured: {text_of(error)}"))
    return replace(verdict, milliseconds=statistics.median(times), peak_bytes=peak)


def _milliseconds(subject: Subject, setup: Setup) -> float:
    """Returns the time of a step, after one to warm up."""
    gpus = {each.device for each in subject.model.parameters() if each.is_cuda}

    def now() -> float:
        for device in gpus:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with opened_copy(subject, setup) as opened:
        step = _warmed_up(opened)
        begun = now()
        step()
        return 1e3 * (now() - begun)


def _warmed_up(opened: OpenedCopy) -> Callable[[], None]:
    """Runs a training step of a copy, and returns a function that runs another one, on the same random numbers."""

    def step(arguments: Arguments) -> None:
        opened.step(arguments)
        opened.optimizer.step()

    step(opened.subject.begin_step())
    opened.optimizer.zero_grad(set_to_none=True)
    return functools.partial(step, opened.subject.begin_step())
