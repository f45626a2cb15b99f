"""`amp.preflight`: which opt levels one step of a model passes, and what to change for the others.

Owns the order of the runs, and the search for the smallest change with which the model passes a level. Must never
report a change as verified unless a run has shown that the model passes with it. Must not change the user's model or
the state of the process: copies run, and the process gets its state back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ampatch.cast_lists.paths import prefixes
from ampatch.cast_lists.spellings import entry_for
from ampatch.diagnostics.overflow.trace import OverflowTrace
from ampatch.diagnostics.preflight.float32 import Operators, underflows
from ampatch.diagnostics.preflight.result import FAILS, INACCURATE, MANY_FLUSHED, PASSES, LevelVerdict, Preflight
from ampatch.diagnostics.preflight.trials import Trial, measured, tried
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.diagnostics.trial_steps.levels import Level
from ampatch.diagnostics.trial_steps.steps import Part, Setup, Step, examined, opened_copy
from ampatch.diagnostics.trial_steps.subject import Subject, noting, undisturbed
from ampatch.half_types import HALF_DTYPES, needs_scale

_FLOAT32 = "ampatch: The model or loss_fn raised this in float32 (O0), before any opt level was tried."
_MEMORY = "ampatch: Preflight keeps all tensors of a float32 step. Give it a smaller batch."

_O0 = Setup("O0", torch.float16)

#: Parts that are added to a change before the search gives up.
_LIMIT = 8


def preflight(subject: Subject, levels: Sequence[Level], tolerance: float, measure: bool) -> Preflight:
    """Runs what `amp.preflight` describes.

    Args:
        subject: the user's model and its step.
        levels: opt levels, each with its half type.
        tolerance: the error above which an operator is imprecise.
        measure: whether to measure time and memory.

    Raises:
        UsageError: amp is set up.
        OptionError: the step cannot be judged.
    """
    with undisturbed("amp.preflight", subject), noting(_MEMORY, (torch.OutOfMemoryError,)):
        name = type(subject.model).__name__
        reference, operators, trace = _in_float32(subject, tolerance)
        if operators is None:
            return Preflight(name, reference.loss, False, trace, tolerance=tolerance)
        run = functools.partial(tried, subject, reference)
        with_figures = functools.partial(measured, subject, measure)
        float32 = with_figures(LevelVerdict("O0", "float32", PASSES), _O0)
        verdicts = [_verdict(Setup(*level), operators, run, with_figures) for level in levels]
        rows, noise_unknown = underflows(subject, reference, operators.draws_itself, _settled_scale(verdicts))
        return Preflight(
            name,
            reference.loss,
            True,
            levels=tuple(verdicts),
            out_of_range=operators.out_of_range,
            imprecise=operators.imprecise,
            uncompared=operators.uncompared,
            underflows=rows,
            unlisted=operators.unlisted,
            tolerance=tolerance,
            float32_milliseconds=float32.milliseconds,
            float32_peak_bytes=float32.peak_bytes,
            noise_unknown=noise_unknown,
        )


def _in_float32(subject: Subject, tolerance: float) -> tuple[Step, Operators | None, OverflowTrace | None]:
    """Watches a float32 step: returns it with its operators or, if it is not finite, with the trace."""
    watch = Watch(keep=lambda _: True)
    with opened_copy(subject, _O0) as opened, noting(_FLOAT32):
        step, loss = opened.watched_step(watch)
    examiner = _O0.examiner(opened.model)
    if not step.is_finite:
        return step, None, examined(watch, examiner, 1.0)
    operators = Operators(watch, examiner, loss, tolerance)
    with torch.no_grad():
        for tensor in (*opened.model.parameters(), *opened.model.buffers()):
            tensor.data = tensor.new_empty(0)  # the operators still name the modules, and need no weights
    return step, operators, None


def _verdict(
    setup: Setup,
    operators: Operators,
    run: Callable[[Setup], Trial],
    with_figures: Callable[[LevelVerdict, Setup], LevelVerdict],
) -> LevelVerdict:
    """Returns the verdict for a level; it is measured with its change unless it raises."""
    first = run(setup)
    best, runs = _mended(first, operators, run)
    change = None if best is first else best.setup.as_call()
    verdict, scale = replace(first.level, change=change, tried=runs), best.level.loss_scale
    return verdict if scale is None else with_figures(verdict, replace(best.setup, init_scale=scale))


def _mended(first: Trial, operators: Operators, run: Callable[[Setup], Trial]) -> tuple[Trial, int]:
    """Searches a change: adds parts until the model passes, then drops those that are not needed.

    Args:
        first: the run without a change.
        operators: what is known of the float32 step.
        run: runs a step with a setup.

    Returns:
        The last run with the change, which passes; the first run if it needs none, or if no change was found. And the
        number of runs.
    """
    runs, current, seen = 0, first, set(first.setup.parts)
    while not current.passes:
        part = next((each for each in _candidates(current, operators) if each not in seen), None)
        if part is None or runs == _LIMIT:
            return first, runs
        seen.add(part)
        others = [each for each in current.setup.parts if not each[0] == part[0] == "loss_scale"]
        trial = run(replace(current.setup, parts=(*others, part)))  # a change has one loss scale
        runs += 1
        if trial.level.verdict != FAILS or (current.level.verdict == FAILS and not trial.is_refused):
            current = trial
    for part in current.setup.parts[:-1]:  # the last one is what made it pass
        fewer = run(replace(current.setup, parts=tuple(each for each in current.setup.parts if each != part)))
        runs += 1
        if fewer.passes:
            current = fewer
    return current, runs


def _candidates(trial: Trial, operators: Operators) -> Iterator[Part]:
    """Yields parts of a change, the likeliest first."""
    level, properties = trial.level, trial.setup.properties
    if properties.loss_scale != "dynamic":
        if level.trace is not None and level.trace.max_loss_scale is not None:
            yield "loss_scale", level.trace.max_loss_scale
        if level.verdict == INACCURATE and (level.underflow or 0.0) >= MANY_FLUSHED:
            yield "loss_scale", "dynamic"
    yield from _functions(level, operators) if properties.patch_torch_functions else _modules(trial, operators)


def _functions(level: LevelVerdict, operators: Operators) -> Iterator[Part]:
    if level.verdict == FAILS:
        endings = {"autograd.Function": ".apply"}
        unlisted = [each.function + endings.get(each.kind, "") for each in operators.unlisted]
        paths = operators.banned + unlisted
    else:
        traced = [] if level.trace is None else [level.trace.function]
        paths = traced + [function for function, _ in operators.suspects]
    for entry in map(entry_for, paths):
        namespace, _ = entry
        if namespace and not namespace.startswith("torch.ops.aten"):  # an operator without a function
            yield "blacklist", entry


def _modules(trial: Trial, operators: Operators) -> Iterator[Part]:
    """Yields the modules around the place, from the innermost; then those of suspects, and those around these."""
    around = [] if trial.level.verdict == FAILS else [prefixes(module)[::-1] for _, module in operators.suspects]
    names = prefixes(trial.module)[::-1]
    names += [name for each in around for name in each[:1]] + [name for each in around for name in each[1:]]
    yield from (("keep_fp32", name) for name in names)


def _settled_scale(verdicts: Sequence[LevelVerdict]) -> float:
    """Returns the loss scale of the first level that needs one and passes with it; 1 if there is none."""
    scaled = (each for each in verdicts if needs_scale(HALF_DTYPES.get(each.half_dtype)))
    scales = (each.loss_scale for each in scaled if each.verdict == PASSES)
    return next((scale for scale in scales if scale is not None and scale != 1), 1.0)
