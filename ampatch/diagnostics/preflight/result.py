"""What `amp.preflight` returns, as frozen values, and their text.

Owns the wording and the tables of the report. Must never run a model, nor judge a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ampatch.diagnostics.json_files import plain
from ampatch.diagnostics.overflow.trace import NamedOp, OverflowTrace
from ampatch.diagnostics.shown_names import counted, module_and_line, shown_call, shown_module, shown_place
from ampatch.diagnostics.tables import Column, Whole, item, number, printed, table
from ampatch.diagnostics.trial_steps.levels import Level, as_o1_to_o3, call_of, levels_of, name_of
from ampatch.errors import OptionError
from ampatch.half_types import HALF_DTYPES

PASSES, OVERFLOWS, INACCURATE, FAILS = "passes", "overflows", "inaccurate", "fails"

#: The greatest gradient error of a level that passes: the two gradients then differ by 12 degrees at most. In bfloat16
#: sound models have errors of some hundredths, small ones with ReLU up to 0.1; sums that cancel give 0.3 and more.
GRADIENT_BOUND = 0.2
#: The greatest error of a change that the step makes to a buffer or a frozen weight. A counter that stalls has 1;
#: running statistics have some hundredths.
STATE_BOUND = 0.5
#: A share of flushed gradient values that makes another loss scale the first thing to try, and that is told.
MANY_FLUSHED = 0.01

_LEAST_SHARE = 0.001  # of flushed values that is printed
_NEARLY_ALL = 0.99  # of them that are noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Location(NamedOp):
    """Where an operator of the float32 step was called.

    Attributes:
        direction: "forward" or "backward".
        at_o1: type in which O1 runs the function by the shipped lists: "half", "float32", or "the type of its inputs".
            O2 and O3 run it in half.
    """

    direction: str
    at_o1: str


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """An operator whose results leave float16's range in the float32 step.

    Attributes:
        location: where it was called.
        largest: greatest absolute value of its results.
        calls: number of its calls that did.
    """

    location: Location
    largest: float
    calls: int


@dataclass(frozen=True, slots=True)
class Imprecise:
    """An operator that loses more than the tolerance to bfloat16's precision.

    Attributes:
        location: where it was called.
        error: the greatest error of its calls: |result in bfloat16 - result| / |result|, in 2-norms.
        calls: number of calls above the tolerance.
    """

    location: Location
    error: float
    calls: int


@dataclass(frozen=True, slots=True)
class Underflow:
    """A parameter whose gradient has values that float16 would flush to zero.

    Attributes:
        parameter: its name.
        share: share of the nonzero elements whose absolute value is below 2**-24.
        share_scaled: the same for the gradient times `scale`.
        scale: loss scale of the first float16 level that has a dynamic one; 1 if there is none.
        noise: share of the elements below 2**-24 that are rounding noise in float32 too: the gradient of a float64 step
            differs from them by at least its own size. None if there was no such step.
    """

    parameter: str
    share: float
    share_scaled: float
    scale: float
    noise: float | None = None

    @property
    def is_noise(self) -> bool:
        """True if nearly all of these elements are noise, so that flushing them loses nothing that float32 has."""
        return self.noise is not None and self.noise >= _NEARLY_ALL


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A function that no shipped cast list names, and that the user has not registered.

    Attributes:
        kind: "custom operator", "autograd.Function" or "torch function".
        function: its path.
        count: number of its calls; for a torch function, of the operators that it ran.
        module: name of the module that called it first; None outside of one, or if unknown.
        file: file of that call; for an autograd.Function the one that defines it.
        line: number of the line in it.
    """

    kind: str
    function: str
    count: int
    module: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class LevelVerdict:
    """How one step went at an opt level.

    Attributes:
        opt_level: "O1" to "O6", as the user typed it.
        half_dtype: "float16" or "bfloat16".
        verdict: "passes"; "overflows" (inf or NaN that no loss scale avoids); "inaccurate" (the gradient error is above
            `Preflight.gradient_bound`, or the state error above 0.5); or "fails" (it raised).
        loss_scale: scale of the last step; None if none was run.
        loss: the loss of that step.
        loss_error: |loss - float32 loss| / |float32 loss|.
        gradient_error: |gradients - float32 gradients| / |float32 gradients|, 2-norms over all parameters.
        underflow: share of the nonzero gradient values that float16 flushes to zero at this scale; None in bfloat16.
        state_error: |change - float32 change| / |float32 change|, the greatest of all buffers and frozen weights.
        state: the name of that buffer or weight; empty if the step changes none.
        error: text of what was raised.
        trace: where the first inf or NaN arose at most of the scales that overflowed, even if a lower one avoids it.
        change: the call of ``amp.initialize`` that mends the level, verified by a step; None if it passes, or if no
            change was found.
        tried: number of steps in search of the change.
        milliseconds: median time of a step with the change, or as it is without one; None if not measured.
        peak_bytes: peak memory of such a step, on the CPU and GPUs together; None if not measured.
        notes: warnings that amp gave, and why something could not be measured.
    """

    opt_level: str
    half_dtype: str
    verdict: str
    loss_scale: float | None = None
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    underflow: float | None = None
    state_error: float | None = None
    state: str = ""
    error: str = ""
    trace: OverflowTrace | None = None
    change: str | None = None
    tried: int = 0
    milliseconds: float | None = None
    peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The level with its half type, such as "O1 float16"."""
        return f"{self.opt_level} {self.half_dtype}"

    @property
    def call(self) -> str:
        """The call of ``amp.initialize`` for this level: with the change that mends it, if there is one."""
        return self.change or call_of(self.opt_level, self.half_dtype)


@dataclass(frozen=True, slots=True)
class Preflight:
    """What `amp.preflight` found out; prints as a report.

    Attributes:
        model: class of the model.
        loss: loss of the float32 step.
        is_finite: True if this loss and its gradients are finite. If not, no level was tried.
        trace: where the first inf or NaN arose in float32; None if there is none.
        levels: verdicts, in the order in which the levels were tried; empty if float32 is not finite.
        out_of_range: operators that leave float16's range, the largest value first.
        imprecise: operators that lose more than ``tolerance`` to bfloat16's precision, the greatest error first.
        uncompared: number of operators that could not be run in bfloat16, are random, or whose inputs were written to.
        underflows: parameters with gradient values that float16 flushes to zero, the greatest share first, and those
            last whose values are nearly all noise.
        unlisted: functions that no list knows: custom operators and autograd.Functions first.
        tolerance: the bound of ``imprecise``.
        gradient_bound: the gradient error above which a level is inaccurate.
        float32_milliseconds: median time of a float32 step (O0); None if not measured.
        float32_peak_bytes: its peak memory; None if not measured.
        noise_unknown: why no float64 step told noise among the underflows; empty if one did, or none was needed.
    """

    model: str
    loss: float
    is_finite: bool
    trace: OverflowTrace | None = None
    levels: tuple[LevelVerdict, ...] = ()
    out_of_range: tuple[OutOfRange, ...] = ()
    imprecise: tuple[Imprecise, ...] = ()
    uncompared: int = 0
    underflows: tuple[Underflow, ...] = ()
    unlisted: tuple[Unlisted, ...] = ()
    tolerance: float = 0.05
    gradient_bound: float = GRADIENT_BOUND
    float32_milliseconds: float | None = None
    float32_peak_bytes: int | None = None
    noise_unknown: str = ""

    def verdict(self, opt_level: str, half_dtype: torch.dtype | str | None = None) -> LevelVerdict:
        """Returns the verdict for a level that was tried.

        Args:
            opt_level: "O1" to "O6".
            half_dtype: a half type or its name; may be left out for O4, O5, and a level tried with one half type.

        Raises:
            OptionError: the level was not tried, or was tried with both half types and none is given.
        """
        asked = levels_of(opt_level, half_dtype)
        same = [as_o1_to_o3(each) for each in asked]
        found = [each for each in self.levels if _plain(each) in same]
        if len(found) == 1:
            return found[0]
        if found:
            raise OptionError(
                f"{opt_level} was tried in float16 and in bfloat16; type half_dtype='float16', or the other."
            )
        tried = ", ".join(each.name for each in self.levels) or "none, since float32 itself is not finite"
        names = " or ".join(name_of(*each) for each in asked)
        raise OptionError(f"{names} was not tried; the levels tried are: {tried}.")

    def passes(self, opt_level: str, half_dtype: torch.dtype | str | None = None) -> bool:
        """Returns True if the model passes a level as it is, without a change.

        Returns:
            False for every level if float32 itself is not finite.

        Raises:
            OptionError: as `verdict`.
        """
        if not self.is_finite:
            levels_of(opt_level, half_dtype)
            return False
        return self.verdict(opt_level, half_dtype).verdict == PASSES

    def stands(self, opt_level: str, half_dtype: torch.dtype | str | None = None) -> bool:
        """Returns what `passes` returns. Deprecated: the next minor version removes it."""
        warnings.warn("result.stands(...) is deprecated: type result.passes(...).", FutureWarning, stacklevel=2)
        return self.passes(opt_level, half_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON: text, numbers, booleans, None, lists and dicts. inf and NaN are texts."""
        return plain(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return printed(_parts(self))


# Text


def _parts(result: Preflight) -> Iterator[Any]:
    begin = f"Preflight of {result.model}: in float32 the loss is {result.loss:.5g}, and"
    if not result.is_finite:
        yield f"{begin} loss or gradients are not finite. No precision helps, so no opt level was tried."
        yield from () if result.trace is None else [str(result.trace)]
        return
    yield f"{begin} all gradients are finite."
    yield from _levels(result)
    yield "What to type"
    yield from _advice(result)
    yield ""
    largest = number("largest", lambda row: row.largest, ".4g")
    beyond = f"Beyond float16's range of {torch.finfo(torch.float16).max:g}, in float32"
    yield from table(beyond, [*_CALL, largest], result.out_of_range)
    underflows = [row for row in result.underflows if row.share >= _LEAST_SHARE]
    yield from table("Gradients with values that float16 flushes to zero", list(_underflow(underflows)), underflows)
    yield from [_about_noise(result.noise_unknown), ""] if underflows else []
    error = number("error", lambda row: f"{row.error:.0%}" if row.error < 1 else "all")
    skipped = f" (not compared: {result.uncompared})" if result.uncompared else ""
    lost = f"More than {result.tolerance:.0%} lost to bfloat16's precision{skipped}"
    yield from table(lost, [*_CALL, error], result.imprecise)
    unlisted = "Functions in no cast list, which compute in the types that they are given"
    yield from table(unlisted, _UNLISTED, result.unlisted)


def _levels(result: Preflight) -> Iterator[Any]:
    float32 = LevelVerdict(
        "O0", "(float32)", "", milliseconds=result.float32_milliseconds, peak_bytes=result.float32_peak_bytes
    )
    is_measured = result.float32_milliseconds is not None
    columns = [
        Column("level", lambda row: row.opt_level),
        Column("half type", lambda row: row.half_dtype),
        Column("verdict", lambda row: f"{row.verdict}, mended" if row.change else row.verdict),
        number("loss scale", lambda row: row.loss_scale, "g"),
        number("gradient error", lambda row: row.gradient_error, ".2g"),
        number("loss error", lambda row: row.loss_error, ".2g", rank=1),
    ]
    if is_measured:
        columns += [
            number("ms", lambda row: row.milliseconds, ".3g"),
            number("MiB", lambda row: row.peak_bytes and row.peak_bytes / 2**20, ".3g"),
        ]
    yield from table("\nLevels", columns, [float32, *result.levels])
    yield (
        f"A level is inaccurate if its gradient error is above {result.gradient_bound:g}, or if its change of a buffer "
        f"or frozen weight is off by more than {STATE_BOUND:.0%}."
    )
    if any(each.opt_level == "O3" for each in result.levels):
        yield (
            "O3 updates half weights without float32 masters: updates below half a unit in a weight's last place are "
            "lost, and the loss stalls. One step does not show it."
        )
    if is_measured and any(each.change for each in result.levels):
        yield "A mended level was measured with its change."
    yield ""


def _plain(each: LevelVerdict) -> Level:
    return as_o1_to_o3((each.opt_level, HALF_DTYPES[each.half_dtype]))


def _advice(result: Preflight) -> Iterator[Any]:
    passing = [each for each in result.levels if each.verdict == PASSES]
    best = min(passing, key=lambda each: (_plain(each) != ("O1", torch.bfloat16), _plain(each)[0]), default=None)
    instead = "No level that was tried passes without a change." if best is None else f"{best.name} passes instead."
    yield from (Whole(f"  {each.call}") for each in passing)
    for each in result.levels:
        if each.verdict == PASSES:
            continue
        yield ""
        yield item(f"{each.name} {each.verdict}{_reason(each, result.gradient_bound)}", "  ")
        if each.change is not None:
            yield f"  It passes with this change (verified, {counted(each.tried, 'run')}):"
            yield Whole(f"  {each.change}")
            continue
        yield f"  No change was found that mends it ({counted(each.tried, 'run')} tried)."
        if each.trace is not None and not each.trace.cast_lists:
            yield item(f"By hand: {each.trace.remedies[0]}.", "  ")
        yield f"  {instead}"
    yield from (
        item(note, "\n  Note: ") for note in dict.fromkeys(note for each in result.levels for note in each.notes)
    )


def _reason(each: LevelVerdict, bound: float) -> str:
    if each.verdict == FAILS:
        return f": {each.error}"
    if each.verdict == INACCURATE and (each.state_error or 0.0) > STATE_BOUND:
        error = f"the change that the step makes to {each.state} is off by {each.state_error:.0%}"
        return f": {error}. Keep it in float32, and compute it from float32 tensors."
    if each.verdict == INACCURATE:
        flushed = ""
        if each.underflow is not None and each.underflow >= MANY_FLUSHED:
            flushed = f"; float16 flushes {each.underflow:.0%} of the gradient values to zero at this scale"
        return f": the gradient error is {each.gradient_error:.2g}, above {bound:g}{flushed}."
    parts, trace = [f" at a loss scale of {each.loss_scale:g}."], each.trace
    if trace is not None:
        parts.append(trace.headline)
        parts += [] if trace.module is None else [f"Module: {shown_module(trace.module)}."]
        parts += [] if trace.file is None else [f"Line: {shown_place(trace.file, trace.line)}."]
    return " ".join(parts)


def _underflow(rows: Sequence[Underflow]) -> Iterator[Column]:
    """Yields the columns of the table of underflows."""
    yield Column("parameter", lambda row: row.parameter)
    yield number("share", lambda row: row.share, ".1%")
    if rows and rows[0].scale != 1:
        head = f"with a loss scale of {rows[0].scale:g}"
        yield number(head, lambda row: row.share_scaled, ".1%")
    if any(row.noise is not None for row in rows):
        yield number("of it rounding noise", lambda row: row.noise, ".0%")


def _about_noise(unknown: str) -> str:
    if unknown:
        return f"Rounding noise was not told from small gradients by a float64 step: {unknown}"
    return "Rounding noise: the gradient of a float64 step differs by at least its own size. Flushing it does no harm."


#: Of rows with a `Location`.
_CALL = (
    Column("pass", lambda row: row.location.direction),
    Column("function", lambda row: shown_call(row.location.function, row.location.operator)),
    Column("O1 runs it in", lambda row: row.location.at_o1, rank=1),
    Column("module and line", lambda row: module_and_line(row.location)),
    number("calls", lambda row: row.calls, rank=2),
)
_UNLISTED = (
    Column("kind", lambda row: row.kind),
    Column("function", lambda row: row.function),
    Column("module and line", module_and_line),
    number("calls", lambda row: row.count, rank=1),
)
