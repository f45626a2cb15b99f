"""`amp.preflight`: which opt levels one step of a model stands, and what to type for those that it does not.

Owns the order of the runs. Must never change the user's model or the state of the process: copies run, and the process
gets its state back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampatch.diagnostics.preflight_measuring import Measured, measured
from ampatch.diagnostics.preflight_mending import Mended, banned_functions, mended
from ampatch.diagnostics.preflight_operators import Operators, autograd_functions
from ampatch.diagnostics.preflight_report import FAILS, STANDS, LevelVerdict, Preflight, level_and_halves
from ampatch.diagnostics.preflight_steps import Setup, Step
from ampatch.diagnostics.preflight_subject import RandomState, Subject, noting, undisturbed
from ampatch.diagnostics.preflight_trials import GRADIENT_BOUND, examined, tried
from ampatch.diagnostics.preflight_underflows import noise_of, rows_of
from ampatch.diagnostics.watch import Watch
from ampatch.errors import OptionError
from ampatch.runtime import runtime

Level = tuple[str, torch.dtype]

_FORWARD, _LOSS, _BACKWARD = (
    f"ampatch: {stage} raised this in float32, with amp off, before any opt level was tried."
    for stage in ("The forward pass", "loss_fn", "The backward pass")
)
_MEMORY = "ampatch: Preflight keeps all tensors of a float32 step. Give it a smaller batch."


def preflight(
    model: nn.Module, inputs: object, loss_fn: Any, levels: Sequence[Level], tolerance: float, measure: bool
) -> Preflight:
    """Runs what `amp.preflight` describes.

    Args:
        model: the user's model.
        inputs: a tensor, positional arguments, or keyword arguments.
        loss_fn: returns the loss for the model's output.
        levels: opt levels, each with its half type.
        tolerance: the error above which an operator is imprecise.
        measure: whether to measure time and memory.

    Raises:
        UsageError: amp is set up.
        OptionError: the model or its step cannot be judged.
    """
    subject = Subject.of(model, inputs, loss_fn)
    with undisturbed("amp.preflight") as state, noting(_MEMORY, (torch.OutOfMemoryError,)):
        return _Flight(subject, state, tolerance).run(levels, measure)


def checked_levels(levels: object) -> list[Level]:
    """Returns opt levels with their half types, each once.

    Args:
        levels: a level, such as "O1"; a pair of a level and a half type; or a list or tuple of these.

    Raises:
        OptionError: one of them is neither, or there is none.
    """
    if isinstance(levels, str) or not isinstance(levels, (list, tuple)):
        levels = [levels]
    found: dict[Level, None] = {}
    for each in levels:
        pair = each if isinstance(each, (list, tuple)) else (each,)
        if len(pair) not in (1, 2):
            raise OptionError(f"levels has {each!r}; expected a level ('O1'), or a pair ('O1', torch.float16).")
        level, halves = level_and_halves(*pair)
        found.update(dict.fromkeys((level, half) for half in halves))
    if not found:
        raise OptionError("levels is empty; expected opt levels, such as ('O1', 'O2').")
    return list(found)


def is_users(error: BaseException) -> bool:
    """Returns True if the user's code, and not `preflight` itself, is to blame for an exception that came out of it."""
    return not {_FORWARD, _LOSS, _BACKWARD, _MEMORY}.isdisjoint(getattr(error, "__notes__", ()))


class _Flight:
    """One run of preflight.

    Args:
        subject: the model and its step.
        state: the random numbers of every step.
        tolerance: the error above which an operator is imprecise.
    """

    def __init__(self, subject: Subject, state: RandomState, tolerance: float) -> None:
        self._subject = subject
        self._state = state
        self._tolerance = tolerance

    def run(self, levels: Sequence[Level], measure: bool) -> Preflight:
        """Tries the levels, searches changes for those that do not stand, and measures."""
        name = type(self._subject.model).__name__
        reference, operators, trace, called = self._in_float32()
        if operators is None:
            return Preflight(name, reference.loss, False, trace, tolerance=self._tolerance)
        noise, noise_unknown = noise_of(self._subject, reference, self._state, operators.draws_itself)
        banned = banned_functions(called)
        outcomes = [self._verdict(Setup(*level), reference, operators, banned) for level in levels]
        setups = [Setup("O0", torch.float16), *(best for _, best in outcomes)]
        found = measured(self._subject, setups, self._state) if measure else [Measured() for _ in setups]
        verdicts = [
            replace(
                verdict,
                milliseconds=numbers.milliseconds,
                peak_bytes=numbers.peak_bytes,
                notes=(*verdict.notes, *numbers.notes),
            )
            for (verdict, _), numbers in zip(outcomes, found[1:], strict=True)
        ]
        return Preflight(
            name,
            reference.loss,
            True,
            None,
            tuple(verdicts),
            operators.out_of_range,
            operators.imprecise,
            operators.uncompared,
            rows_of(reference, _settled_scale(verdicts), noise),
            operators.unlisted,
            self._tolerance,
            GRADIENT_BOUND,
            found[0].milliseconds,
            found[0].peak_bytes,
            noise_unknown,
        )

    def _in_float32(self) -> tuple[Step, Operators | None, Any, list[str]]:
        """Watches a float32 step.

        Returns:
            The step; its operators, None if it is not finite; then the trace; and the functions that it called.
        """
        subject, watch = self._subject, Watch(keep=lambda _: True)
        model = subject.copied()
        examiner = Setup("O0", torch.float16).examiner(model)
        args, kwargs = subject.arguments()
        self._state.restore()
        with watch:
            with noting(_FORWARD):
                output = model(*args, **kwargs)
            with noting(_LOSS):
                loss = subject.loss_for(output)
            functions = autograd_functions(loss)
            with noting(_BACKWARD):
                loss.backward()
        step = Step.of(model, loss)
        if not step.is_finite:
            return step, None, examined(watch, examiner, 1.0), []
        operators = Operators(watch, examiner, functions, runtime.registered, self._tolerance)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.new_empty(0)  # the operators still name the modules, and need no weights
        return step, operators, None, [op.function_name for op in watch.ops if not op.is_backward]

    def _verdict(
        self, setup: Setup, reference: Step, operators: Operators, banned: Sequence[str]
    ) -> tuple[LevelVerdict, Setup | None]:
        """Returns the verdict for a level, and the setup with which it is to be measured; None if it raises."""
        run = functools.partial(tried, self._subject, reference, self._state)
        trial = run(setup)
        flushed, scale = None, trial.level.loss_scale
        if setup.half_dtype is torch.float16 and scale is not None:
            flushed = reference.flushed(scale)
        search = Mended(None, 0) if trial.stands else mended(trial, operators, flushed, run, banned)
        change = None if search.trial is None else search.trial.setup.as_call()
        verdict = replace(trial.level, underflow=flushed, change=change, tried=search.runs)
        best = search.trial or trial
        if best.level.verdict == FAILS:
            return verdict, None
        scale = best.level.loss_scale if best.stands else None
        return verdict, best.setup if scale is None else replace(best.setup, init_scale=scale)


def _settled_scale(verdicts: Sequence[LevelVerdict]) -> float:
    """Returns the loss scale of the first float16 level that stands with one; 1 if there is none."""
    scales = (each.loss_scale for each in verdicts if each.verdict == STANDS and each.half_dtype == "float16")
    return next((scale for scale in scales if scale is not None and scale != 1), 1.0)
