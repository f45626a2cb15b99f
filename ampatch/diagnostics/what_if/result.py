"""What `amp.what_if` returns, as frozen values, with their text and the cast lists that follow.

Owns the wording, the tables and the YAML. Must never run a model, nor round a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import yaml

from ampatch.cast_lists.paths import prefixes
from ampatch.cast_lists.rules import MULTIPLYING
from ampatch.diagnostics import json_files
from ampatch.diagnostics.shown_names import counted, module_and_line, shown_module, shown_place
from ampatch.diagnostics.tables import Column, number, printed, table
from ampatch.diagnostics.what_if.given import format_of
from ampatch.errors import OptionError
from ampatch.grouping import grouped

#: The noise of a call up to which `WhatIf.lists` gives it the format. float8_e4m3 with a scale has about 0.05.
BOUND = 0.1

#: The shares in `Lost`, in words.
_SHARES = {
    "underflow": "become zero",
    "overflow": "are beyond the largest number",
    "imprecise": "lose more than 10%",
}


@dataclass(frozen=True, slots=True)
class Lost:
    """What a format loses in one direction: of the arguments of calls, or of the gradients of their results.

    Attributes:
        values: number of values that are finite and not zero. The other numbers are shares of these.
        underflow: share that becomes zero.
        overflow: share that is beyond the largest number, and saturates or becomes inf.
        imprecise: share that loses more than a digit otherwise: its relative error is above 10%.
        noise: the error that follows, relative, in 2-norms: of results if arguments are rounded, and of the gradients
            of arguments if gradients are rounded too. Of several tensors and calls the root of the sum of squares.
    """

    values: int
    underflow: float
    overflow: float
    imprecise: float
    noise: float


@dataclass(frozen=True, slots=True)
class FormatNoise:
    """What a format would do to a function where a module calls it, to a function, or to a module.

    Attributes:
        format: the format, as cast lists have it.
        function: name of the function, which stands for all of its spellings; "" for all listed ones of a module.
        module: name of the innermost module that calls it; for a whole module, of that; None outside of one, and for a
            function wherever it is called.
        file: file of the user's code that calls it; None if that is in no file, as for the layers of a Sequential.
        line: number of the line in it.
        calls: number of calls.
        noise: the number by which rows are ranked: an estimate of the relative error of the step. It is the root of the
            sum of squares of the noise in both directions. The square of a gradient's noise counts by the root of the
            share of the model's numbers that learn from it.
        forward: what the arguments lose.
        backward: what the gradients lose.
    """

    format: str
    function: str
    module: str | None
    file: str | None
    line: int | None
    calls: int
    noise: float
    forward: Lost
    backward: Lost

    @property
    def noise_of_call(self) -> float:
        """The noise of one call in both directions, on average, wherever in the model it is."""
        return math.hypot(self.forward.noise, self.backward.noise) / math.sqrt(self.calls)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What `amp.what_if` found out. It prints as tables.

    Attributes:
        model: class of the model.
        loss: loss of the float32 step.
        formats: the formats, as cast lists have them.
        calls: a row for each format, function, module and line, those with most noise first.
        functions: a row for each format and function, in the same order.
        modules: a row for each format and module, in the same order; with the calls of modules inside of it, as under
            ``modules`` in cast lists.
        notes: what was not judged, as sentences.
    """

    model: str
    loss: float
    formats: tuple[str, ...]
    calls: tuple[FormatNoise, ...]
    functions: tuple[FormatNoise, ...]
    modules: tuple[FormatNoise, ...]
    notes: tuple[str, ...] = ()

    def lists(self, format: str | Mapping[str, str], bound: float = BOUND) -> dict[str, Any]:
        """Returns the cast lists that follow: what `amp.initialize` takes as ``cast_lists``.

        A function of which no call has more noise than the bound gets the format. Of others, modules get it in which
        no call of that function has more.

        Args:
            format: one of the formats, as it was given.
            bound: the greatest noise of a call.

        Raises:
            OptionError: the format was not judged, or ``bound`` is no number of at least 0.
        """
        loaded: dict[str, Any] = yaml.safe_load(self.overlay(format, bound)) or {}
        return loaded

    def overlay(self, format: str | Mapping[str, str], bound: float = BOUND) -> str:
        """Returns the cast lists as YAML; comments say what stays as it is, and why. See `lists`.

        Args:
            format: one of the formats, as it was given.
            bound: the greatest noise of a call.

        Raises:
            OptionError: the format was not judged, or ``bound`` is no number of at least 0.
        """
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound >= 0:
            raise OptionError(f"bound is {bound!r}; expected a number of at least 0, such as {BOUND}.")
        rows = [row for row in self.calls if row.format == self._judged(format)]
        return "\n".join(_overlay(rows, bound)) + "\n"

    def save(self, path: str | PathLike[str], format: str | Mapping[str, str], bound: float = BOUND) -> None:
        """Writes `overlay` to a file, which is replaced if it exists.

        Args:
            path: of the file; its name ends with ".yaml" or ".yml".
            format: one of the formats, as it was given.
            bound: the greatest noise of a call.

        Raises:
            OptionError: the format was not judged; or the path has another ending, or cannot be written.
        """
        text = self.overlay(format, bound)
        json_files.write_text(text, json_files.checked_list(path))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON: text, numbers, None, lists and dicts. inf and NaN are texts."""
        return json_files.plain(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return printed(self._parts())

    def _judged(self, format: str | Mapping[str, str]) -> str:
        name = str(format_of(format))
        if name not in self.formats:
            raise OptionError(f"{name} was not judged; the formats judged are: {', '.join(self.formats)}.")
        return name

    def _parts(self) -> Iterator[Any]:
        yield f"What if {self.model} ran in {', '.join(self.formats)}? From a float32 step with loss {self.loss:.5g}."
        yield ""
        yield from table("Functions, most noise first", [_FORMAT, _FUNCTION, *_NUMBERS], self.functions)
        yield from table("Modules", [_FORMAT, _MODULE, *_NUMBERS], self.modules)
        yield from table("Calls", [_FORMAT, _FUNCTION, _PLACE, *_NUMBERS], self.calls)
        yield "Noise: an estimate of the relative error that the step would have."
        yield "0: become zero. max: are beyond the largest number. 10%: lose more than that otherwise."
        yield "Type result.overlay(format) for the cast lists that follow."
        yield from (f"Note: {note}" for note in self.notes)


def _share(direction: str, name: str) -> Column:
    head = {"underflow": "0", "overflow": "max", "imprecise": "10%"}[name]
    title = {"forward": "args", "backward": "grads"}[direction]
    if name == "underflow":
        head = f"{title}: {head}"
    return number(head, lambda row: getattr(getattr(row, direction), name) or None, ".1%", rank=1)


_FORMAT = Column("format", lambda row: row.format)
_FUNCTION = Column("function", lambda row: row.function)
_MODULE = Column("module", lambda row: shown_module(row.module))
_PLACE = Column("module and line", module_and_line)
_NUMBERS = (
    number("calls", lambda row: row.calls, rank=2),
    number("noise", lambda row: row.noise, ".3f"),
    *(_share(direction, name) for direction in ("forward", "backward") for name in _SHARES),
)


# Cast lists


def _overlay(rows: list[FormatNoise], bound: float) -> Iterator[str]:
    """Yields the lines of the cast lists that follow from the calls in one format."""
    entries: list[str] = []
    of_modules: dict[str, list[str]] = {}
    yield f"# By amp.what_if: the noise of a call is at most {bound:g}."
    for function, calls in grouped((row.function, row) for row in rows).items():
        if format_of(yaml.safe_load(calls[0].format)).products == "device" and function not in MULTIPLYING:
            yield f"# {function} stays as it is: no device multiplies in it."
            continue
        entry = f"- {{name: {function}, format: {calls[0].format}}}"
        bad = [row for row in calls if not row.noise_of_call <= bound]
        if not bad:
            entries += [f"    # Noise of a call: {_most(calls)}.", f"    {entry}"]
            continue
        yield from (f"# {function} stays as it is{_where(row)}: {_why(row)}." for row in bad)
        for module, good in _modules_without(bad, calls).items():
            of_modules.setdefault(module, []).extend([f"      # Noise of a call: {_most(good)}.", f"      {entry}"])
    yield from ["whitelist:", '  "*":', *entries] if entries else []
    yield from ["modules:"] if of_modules else []
    for module, lines in of_modules.items():
        yield from [f'  "{module}":', "    whitelist:", *lines]


def _modules_without(bad: list[FormatNoise], calls: list[FormatNoise]) -> dict[str, list[FormatNoise]]:
    """Returns the outermost modules in which none of the bad calls is, with the calls in each."""
    taken = {name for row in bad for name in prefixes(row.module)}
    found: dict[str, list[FormatNoise]] = {}
    for row in calls:
        name = next((name for name in prefixes(row.module) if name not in taken), None)
        if name is not None:
            found.setdefault(name, []).append(row)
    return found


def _most(calls: list[FormatNoise]) -> str:
    return (
        f"{max(row.noise_of_call for row in calls):.2g} at most, of {counted(sum(row.calls for row in calls), 'call')}"
    )


def _where(row: FormatNoise) -> str:
    module = "" if row.module is None else f" in {shown_module(row.module)}"
    return module + (f" ({shown_place(row.file, row.line)})" if row.file else "")


def _why(row: FormatNoise) -> str:
    """Returns the noise of a call, and the share that explains most of it."""
    lost = [
        (getattr(getattr(row, direction), name), f"{what} {does}")
        for direction, what in (("forward", "arguments"), ("backward", "gradients"))
        for name, does in _SHARES.items()
    ]
    share, words = max(lost)
    return f"noise {row.noise_of_call:.2g}" + (f", {share:.0%} of the {words}" if share else "")
