"""`amp.compare` of two steps: runs both on copies of the model, and says where b parts from a.

Owns the order of the runs, and the verdict. Must never touch the user's model, nor leave a session.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ampatch.diagnostics.compare.calls import Call, Precision, calls_of, distance, first_of, matched, rows_of
from ampatch.diagnostics.compare.result import ComparedRow, Comparison, GradientError, where
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.diagnostics.trial_steps.steps import Setup, Step, draws_itself, opened_copy, until_finite
from ampatch.diagnostics.trial_steps.subject import Subject, noting, noting_warnings, undisturbed
from ampatch.opt_levels import dtype_name

_MEMORY = "ampatch: amp.compare keeps all tensors of both steps. Give it a smaller batch."
_OTHER_THREADS = "forward passes in other threads were not compared"
_DREW_ITSELF = (
    "an attention kernel drew its own dropout, which is another one in another type: errors from there on show the "
    "masks. Set its dropout to 0"
)
_ROUNDS_TO_FORMATS = "{} has functions in {}. The noise is that of half types, and leaves this rounding out"


def compare(subject: Subject, a: Setup, b: Setup) -> Comparison:
    """Runs what `amp.compare` describes.

    Args:
        subject: the user's model and its step.
        a: the step to compare with, by its arguments of ``amp.initialize``.
        b: the step to judge.

    Raises:
        UsageError: amp is set up.
        OptionError: the step cannot be run.
    """
    notes: list[str] = []
    with undisturbed("amp.compare", subject), noting(_MEMORY, (torch.OutOfMemoryError,)), noting_warnings(notes):
        scale = _loss_scale(subject, (a, b))
        of_a, of_b = (_recorded(subject, setup, scale) for setup in (a, b))
        precision = Precision.of(of_a.calls, of_b.calls)
        pairs = matched(of_a.calls, of_b.calls)
        rows = tuple(rows_of(pairs, precision))
    for letter, setup in (("a", a), ("b", b)):
        formats = setup.settings().lists.number_formats()
        if formats:
            notes.append(_ROUNDS_TO_FORMATS.format(letter, "; ".join(formats)))
    if any(draws_itself([call.op for call in recorded.calls]) for recorded in (of_a, of_b)):
        notes.append(_DREW_ITSELF)
    if of_a.missed_threads or of_b.missed_threads:
        notes.append(_OTHER_THREADS)
    # The greatest numbers of operators in half one behind the other.
    noise = precision.noise(sum(max((call.depth for call in each.calls), default=0) for each in (of_a, of_b)))
    error = of_a.step.gradient_error(of_b.step)
    first = first_of(pairs, rows)
    telling = [row for row in rows if row.error and not row.cancelled]
    return Comparison(
        f"{type(subject.model).__name__}: {a.name} (a) and {b.name} (b)",
        a.name,
        b.name,
        _verdict(of_a, of_b, error, noise, first, rows),
        rows,
        first,
        max(telling, key=lambda row: row.error or 0.0, default=None),
        of_a.step.loss,
        of_b.step.loss,
        scale,
        error,
        noise,
        _gradients(of_a.step, of_b.step, precision),
        tuple(notes),
    )


def _loss_scale(subject: Subject, setups: Sequence[Setup]) -> float:
    """Returns the greatest scale at which all steps with a dynamic scale are finite; 1 if none is dynamic.

    Both steps use this one scale, so that their scaled gradients can be compared. A step that is finite at no scale is
    ignored if the other step is finite at one.
    """
    settled: dict[bool, list[float]] = {True: [], False: []}
    for setup in setups:
        if setup.properties.loss_scale == "dynamic":
            with _named(setup), opened_copy(subject, setup) as opened:
                step, scale, _ = until_finite(opened)
                settled[step.is_finite].append(scale)
    return min(settled[True] or settled[False], default=1.0)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step that ran.

    Attributes:
        setup: its arguments of ``amp.initialize``.
        calls: its operators.
        step: its loss and gradients.
        missed_threads: True if forward passes in other threads were not watched.
    """

    setup: Setup
    calls: list[Call]
    step: Step
    missed_threads: bool


def _recorded(subject: Subject, setup: Setup, scale: float) -> _Recorded:
    setup = replace(setup, parts=(*setup.parts, ("loss_scale", scale)))
    with _named(setup), opened_copy(subject, setup) as opened:
        examiner = setup.examiner(opened.model)
        watch = Watch(keep=lambda _: True, keep_results=True)
        step, _ = opened.watched_step(watch)
        return _Recorded(setup, calls_of(watch, examiner), step, watch.missed_threads)


def _named(setup: Setup) -> contextlib.AbstractContextManager[None]:
    return noting(f"ampatch: A step of amp.compare raised this, at {setup.name}.")


def _gradients(a: Step, b: Step, precision: Precision) -> tuple[GradientError, ...]:
    found = []
    for name in {**a.gradients, **b.gradients}:
        one, other = (step.gradients.get(name) for step in (a, b))
        error = math.inf if one is None or other is None else distance(one, other).error
        found.append(GradientError(name, error, int(precision.is_cancelled(error))))
    return tuple(sorted(found, key=lambda each: (each.cancelled, -each.error, each.parameter)))


def _verdict(
    a: _Recorded, b: _Recorded, error: float, noise: float, first: ComparedRow | None, rows: Sequence[ComparedRow]
) -> str:
    """Returns the verdict in one or two sentences."""
    begins = "" if first is None else f" It begins in {where(first)}."
    if a.step.is_finite != b.step.is_finite:
        broken, sound = (a, b) if b.step.is_finite else (b, a)
        return f"{broken.setup.name} has inf or NaN in loss or gradients, and {sound.setup.name} has none.{begins}"
    if not a.step.is_finite:
        return f"Loss or gradients of both steps have inf or NaN, so that no precision is to blame.{begins}"
    if error == 0 and not any(row.error for row in rows):
        return f"{a.setup.name} and {b.setup.name} give the same numbers in every call that both have."
    halves = (dtype_name(each.setup.half_dtype) for each in (a, b) if each.setup.opt_level != "O0")
    kind = " and ".join(dict.fromkeys(halves)) or "float32"
    compared = (
        f"its gradients differ from those of {a.setup.name} by {error:.2g} of their norm, and rounding explains "
        f"{noise:.2g}."
    )
    if error > noise:
        return f"{b.setup.name} is beyond the noise of {kind}: {compared}{begins}"
    starting = sum(row.starts for row in rows) or 1
    calls = "one call is" if starting == 1 else f"{starting} calls are"
    yet = "" if first is None else f" Yet {calls} above the noise, first {where(first)}."
    return f"{b.setup.name} is within the noise of {kind}: {compared}{yet}"
