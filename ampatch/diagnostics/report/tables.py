"""The tables of a report's page: which numbers stand in which columns, in readable units and exactly.

Owns the columns. Must never drop rows in silence: a table that has not all of them says so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ampatch.diagnostics.compare.result import ComparedRow, owner_of, telling_rows
from ampatch.diagnostics.report import drawings as report_drawings
from ampatch.diagnostics.report.numbers import DASH, TIMES, count, digits, exact, percent, seconds, size
from ampatch.diagnostics.report.steps import share_lost
from ampatch.diagnostics.shown_names import few, shown_function, shown_module

#: Rows that are shown at first; the others unfold.
FIRST = 10
#: Steps up to which the table has all of them.
ALL_STEPS = 200
_MOST_STEPS = 1000
_MOST_CALLS = 300
_MOST_PARAMETERS = 2000
_STRIPS = 100
_WORDS = 3  # functions or types that are named below a cell


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it shows.
        title: the exact number with its unit, or the full path.
        kind: "number", "code" for a line of source, else "".
        below: cells whose texts stand below in small print.
        share: length of the bar behind a number, 0 to 1.
        mark: a word that stands out.
        strip: a drawing in place of the text, as `drawings.exponent_strip` returns it.
    """

    text: str
    title: str = ""
    kind: str = ""
    below: tuple[Cell, ...] = ()
    share: float | None = None
    mark: str = ""
    strip: tuple[int, dict[str, list[str]]] | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page.

    Attributes:
        name: its id.
        caption: what it shows.
        heads: titles of the columns.
        rows: its cells.
        note: a sentence below it; says which rows are not in it.
        first: number of rows that are shown at first.
    """

    name: str
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    first: int = FIRST

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column has numbers."""
        return tuple(all(row[index].kind == "number" for row in self.rows) for index in range(len(self.heads)))


_NUMBERS = ("Casts", "Written", "Time", "Cache hits", "Cache saved", "Calls")


def lines(data: Mapping[str, Any]) -> Table:
    """Returns the user's source lines with their casts."""
    rows, greatest = data["lines"], _greatest(data["lines"])
    cells = tuple((_source(row, row["function"]), *_numbers(row, greatest), _called(row["functions"])) for row in rows)
    return Table("lines", "By source line", ("Line", *_NUMBERS, "Functions called"), cells)


def functions(data: Mapping[str, Any]) -> Table:
    """Returns torch's functions with their rules, casts and types."""
    rows, greatest = data["functions"], _greatest(data["functions"])
    cells = tuple(
        (
            _function(row["name"], *_types(row["types"])),
            Cell(row["rule"] or DASH),
            *_numbers(row, greatest),
            _count(row["undone"]),
        )
        for row in rows
    )
    return Table("functions", "By function", ("Function", "Rule", *_NUMBERS, "Undone"), cells)


def misaligned(data: Mapping[str, Any]) -> Table:
    """Returns products in half with sizes that are no multiples of 8."""
    cells = tuple(
        (
            _source(row),
            _function(row["function"], Cell(shown_module(row["module"], DASH))),
            Cell(row["dtype"]),
            _sizes(row["size"]),
            _sizes(row["pads"]),
            _count(row["calls"]),
        )
        for row in data["misaligned"]
    )
    heads = ("Line", "Function and module", "Type", f"m {TIMES} k {TIMES} n", "Padded to", "Calls")
    return Table("misaligned", "Products with sizes that are no multiples of 8", heads, cells)


def steps(data: Mapping[str, Any]) -> Table:
    """Returns the steps: all of them if they are few, else the overflows and the changes of the scale."""
    shown = rows = data["steps"]
    if len(rows) > ALL_STEPS:
        pairs = itertools.pairwise(rows)
        shown = [rows[0], *(row for before, row in pairs if _tells(row, before) or row is rows[-1])]
    note = ""
    if len(shown) < len(rows):
        kept = f"{count(len(shown))} of {count(len(rows))} steps"
        note = f"{kept}: those with an overflow or another scale, and the ends."
    if len(shown) > _MOST_STEPS:
        shown = shown[:_MOST_STEPS]
        note = f"The first {count(_MOST_STEPS)} of the steps with an overflow or another scale. The drawing has all."
    cells = tuple(
        (
            _count(row["step"]),
            Cell(DASH) if row["loss_id"] is None else _count(row["loss_id"]),
            _count(row["scale"]),
            _digits(row["gradient_norm"]),
            Cell(_outcome(row), mark="overflow" if row["overflow"] else ""),
        )
        for row in shown
    )
    return Table("steps", "Steps", ("Step", "loss_id", "Scale", "Gradient norm", "Outcome"), cells, note)


def scales(data: Mapping[str, Any]) -> Table:
    """Returns what the half type loses at the present scale, and at others."""
    underflow = data["underflow"]
    marks = {underflow["best_scale"]: "loses least", underflow["scale"]: "present scale"}
    if underflow["best_scale"] == underflow["scale"]:
        marks[underflow["scale"]] = "present scale, loses least"
    cells = tuple(
        (
            _count(row["scale"]),
            *(_percent(row[name], row[name]) for name in ("zero", "subnormal", "overflow")),
            Cell(marks.get(row["scale"], ""), mark="here" if row["scale"] in marks else ""),
        )
        for row in underflow["scales"]
    )
    heads = ("Scale", "Rounded to zero", "Subnormal", "Overflow", "")
    return Table("scales", "Shares that are lost at each scale", heads, cells, first=len(cells))


def parameters(data: Mapping[str, Any]) -> Table:
    """Returns the parameters whose gradients the half type loses most of."""
    underflow = data["underflow"]
    found = sorted(underflow["parameters"], key=lambda row: -share_lost(row))
    cells = tuple(
        (
            Cell(row["name"]),
            _exponents(row["exponents"], underflow if index < _STRIPS else None),
            *(_percent(row[name], row[name]) for name in ("rounded_to_zero", "subnormal")),
            _count(row["elements"]),
            Cell(count(row["zeros"]), f"{row['zeros']} elements, a share of {row['zero']}", kind="number"),
        )
        for index, row in enumerate(found[:_MOST_PARAMETERS])
    )
    heads = ("Parameter", "Exponents", "Rounded to zero", "Subnormal", "Elements", "Zeros")
    note = "" if len(found) <= len(cells) else f"The worst {count(len(cells))} of {count(len(found))} parameters."
    return Table("parameters", "Parameters that lose most", heads, cells, note)


def comparison(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the tables of a comparison."""
    rows = [_compared(row) for row in found["rows"]]
    first, worst = (None if found[name] is None else _compared(found[name]) for name in ("first", "worst"))
    if rows and all(row.phase == "report" for row in rows):
        yield _of_numbers(rows)
        return
    telling = telling_rows(rows, first, worst)
    shown = sorted(telling[:_MOST_CALLS], key=lambda row: row.number)
    note = f"{count(len(telling))} of {count(len(rows))} calls are above the noise."
    if len(shown) < len(telling):
        note += f" The {count(len(shown))} that tell most are shown."
    calls = tuple(_of_call(row, "first" if row == first else "worst" if row == worst else "") for row in shown)
    heads = ("#", "Line", "Function", "Module", "Types", "Error", "Own error", "Noise", "")
    yield Table("compared-calls", "Calls above the noise", heads, calls, note)
    spells: tuple[tuple[str, Callable[[str], str]], ...] = (("Function", shown_function), ("Module", shown_module))
    for head, spell in spells:
        name = f"{head.lower()}s"
        groups = tuple(
            (
                Cell(DASH if row["name"] is None else spell(row["name"]), row["name"] or ""),
                *(_count(row[key]) for key in ("calls", "unmatched", "above")),
                *(_digits(row[key]) for key in ("error", "own_error")),
            )
            for row in found[name]
        )
        columns = (head, "Calls", "In one step only", "Above the noise", "Error", "Own error")
        yield Table(f"compared-{name}", f"By {head.lower()}", columns, groups)
    gradients = tuple(
        (Cell(row["parameter"]), _digits(row["error"]), Cell("no correct digit in a" if row["cancelled"] else ""))
        for row in found["gradients"]
    )
    yield Table("compared-gradients", "By gradient", ("Parameter", "Error", ""), gradients)


def place(row: Mapping[str, Any]) -> str:
    """Returns a line as "file:number", the file without its folders; empty if there is none."""
    return "" if row["file"] is None else f"{PurePath(row['file']).name}:{row['line']}"


def _of_numbers(rows: Sequence[ComparedRow]) -> Table:
    differing = sorted((row for row in rows if row.error), key=lambda row: -(row.error or 0.0))
    cells = tuple(
        (Cell(row.quantity), Cell(owner_of(row)), _digits(row.value_a), _digits(row.value_b), _percent(row.error))
        for row in differing[:_MOST_CALLS]
    )
    note = f"{count(len(differing))} of {count(len(rows))} numbers differ."
    if len(cells) < len(differing):
        note += f" The {count(len(cells))} that differ most are shown."
    return Table("compared-numbers", "What differs most", ("Number", "Of", "a", "b", "Difference"), cells, note)


def _of_call(row: ComparedRow, mark: str) -> tuple[Cell, ...]:
    operator = "" if row.operator in ("", *row.function.split(".")) else row.operator
    flushed = () if not row.is_flushed else (Cell(f"{percent(row.flushed)} flushed to zero", exact(row.flushed)),)
    told = f"{row.error}; of one element {row.max_error}; of the inputs {row.input_error}; flushed {row.flushed}"
    types = row.type_b if row.type_a == row.type_b else f"{row.type_a or 'none'}, {row.type_b or 'none'}"
    return (
        _count(row.number),
        _source(dataclasses.asdict(row)),
        _function(row.function, Cell(f"{row.phase} {operator}".strip()), *flushed),
        Cell(shown_module(row.module, DASH)),
        Cell(types, f"a: {row.type_a}, b: {row.type_b}"),
        Cell(digits(row.error), told, "number"),
        *(_digits(each) for each in (row.own_error, row.noise)),
        Cell(mark, mark="here" if mark else ""),
    )


def _compared(row: Mapping[str, Any]) -> ComparedRow:
    """Returns a row of a comparison whose inf and NaN are numbers again."""
    fields: dict[str, Any] = {
        key: float(value) if isinstance(value, str) and key.endswith(_FLOATS) else value for key, value in row.items()
    }
    return ComparedRow(**fields)


#: Ends of the names of the numbers in `ComparedRow`.
_FLOATS = ("error", "flushed", "noise", "value_a", "value_b")


def _function(name: str | None, *below: Cell) -> Cell:
    return Cell(shown_function(name or DASH), name or "", below=below)


def _source(row: Mapping[str, Any], function: str = "") -> Cell:
    if row["file"] is None:
        return Cell(DASH)
    inside = f" in {function}" if function else ""
    below = Cell(f"{place(row)}{inside}", f"{row['file']}:{row['line']}")
    return Cell((row["source"] or "").strip() or place(row), kind="code", below=(below,))


def _numbers(row: Mapping[str, Any], greatest: float) -> tuple[Cell, ...]:
    return (
        _count(row["casts"]),
        _size(row["cast_bytes"], row["cast_bytes"] / (greatest or 1)),
        Cell(seconds(row["cast_seconds"]), f"{row['cast_seconds']} seconds", "number"),
        _count(row["cache_hits"]),
        _size(row["cache_hit_bytes"]),
        _count(row["calls"]),
    )


def _size(number: float, share: float | None = None) -> Cell:
    """Returns a number of bytes; with a share, it has a bar of that length behind it."""
    return Cell(size(number), f"{number} bytes", "number", share=share)


def _greatest(rows: Iterable[Mapping[str, Any]]) -> float:
    return max((row["cast_bytes"] for row in rows), default=0)


def _called(calls: Mapping[str, int]) -> Cell:
    most = sorted(calls.items(), key=lambda pair: -pair[1])
    text = few([shown_function(name) for name, _ in most], _WORDS)
    return Cell(text or DASH, "; ".join(f"{name}: {number} calls" for name, number in most))


def _types(rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    told = [
        Cell(f"{_listed(row['in'])} → {_listed(row['out'])}", f"{row['calls']} calls")
        for row in sorted(rows, key=lambda row: -row["calls"])
    ]
    others = told[_WORDS:]
    more = [Cell(f"{len(others)} more", "; ".join(f"{each.text}: {each.title}" for each in others))] if others else []
    return [*told[:_WORDS], *more]


def _listed(types: Sequence[str]) -> str:
    """Returns types of tensors as text: equal ones that follow one another once, with their number."""
    found = ((name, len(list(run))) for name, run in itertools.groupby(types))
    return ", ".join(name if number == 1 else f"{number} {name}" for name, number in found) or "none"


def _exponents(rows: Sequence[Mapping[str, int]], underflow: Mapping[str, Any] | None) -> Cell:
    title = " ".join(f"{row['exponent']}:{row['elements']}" for row in rows)
    if underflow is None or not rows:
        return Cell(DASH, title)
    return Cell("", title, strip=report_drawings.exponent_strip(rows, underflow))


def _tells(row: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return bool(row["overflow"] or row["skipped"] or row["scale"] != before["scale"])


def _outcome(row: Mapping[str, Any]) -> str:
    if row["overflow"]:
        return "overflow, skipped" if row["skipped"] else "overflow, not skipped"
    return "skipped" if row["skipped"] else "stepped"


def _sizes(numbers: Sequence[int]) -> Cell:
    told = list(map(str, numbers))
    return Cell(f" {TIMES} ".join(told), ", ".join(told), "number")


def _count(value: Any) -> Cell:
    """Returns a whole number."""
    return Cell(count(value), exact(value), "number")


def _digits(value: Any) -> Cell:
    return Cell(digits(value), exact(value), "number")


def _percent(value: Any, share: float | None = None) -> Cell:
    """Returns a share in percent; with `share`, it has a bar of that length behind it."""
    return Cell(percent(value), exact(value), "number", share=share)
