"""The tables of a report's page: which rows they have.

Owns the choice of rows; the templates write the columns. Must never drop rows in silence: a table that has not all of
them says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampatch.diagnostics.compare.result import ComparedRow, are_numbers, telling_rows
from ampatch.diagnostics.report.numbers import count
from ampatch.diagnostics.report.steps import share_lost

#: Steps up to which the table has all of them.
ALL_STEPS = 200
_MOST_STEPS = 1000
_MOST_CALLS = 300
_MOST_PARAMETERS = 2000
_TYPES = 3  # that are told of a function


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table, and a sentence that says which are not among them."""

    shown: Sequence[Any]
    note: str = ""


def steps(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns the steps: all of them if they are few, else the overflows and the changes of the scale."""
    shown = rows
    if len(rows) > ALL_STEPS:
        pairs = itertools.pairwise(rows)
        shown = [rows[0], *(row for before, row in pairs if _tells(row, before) or row is rows[-1])]
    if len(shown) > _MOST_STEPS:
        first = f"The first {count(_MOST_STEPS)} of the steps with an overflow or another scale."
        return Rows(shown[:_MOST_STEPS], f"{first} The drawing has all.")
    if len(shown) == len(rows):
        return Rows(shown)
    kept = f"{count(len(shown))} of {count(len(rows))} steps"
    return Rows(shown, f"{kept}: those with an overflow or another scale, and the ends.")


def parameters(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns the parameters whose gradients the half type loses most of."""
    shown = sorted(rows, key=lambda row: -share_lost(row))[:_MOST_PARAMETERS]
    return Rows(
        shown, "" if len(rows) <= len(shown) else f"The worst {count(len(shown))} of {count(len(rows))} parameters."
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """The calls or the numbers of a comparison.

    Attributes:
        are_numbers: True for the numbers of two saved reports.
        table: those that tell most.
        marks: the call where the second step parts from the first one, and the one with the greatest error.
    """

    are_numbers: bool
    table: Rows
    marks: Mapping[ComparedRow | None, str]


def comparison(found: Mapping[str, Any]) -> Compared:
    """Returns the rows of a comparison."""
    rows = [_compared(row) for row in found["rows"]]
    first, worst = (None if found[name] is None else _compared(found[name]) for name in ("first", "worst"))
    shown, telling = telling_rows(rows, first, worst, _MOST_CALLS)
    told, best = "calls are above the noise", "that tell most"
    if are_numbers(rows):
        told, best = "numbers differ", "that differ most"
    note = f"{count(telling)} of {count(len(rows))} {told}."
    if len(shown) < telling:
        note += f" The {count(len(shown))} {best} are shown."
    return Compared(are_numbers(rows), Rows(shown, note), {worst: "worst", first: "first"})


def _compared(row: Mapping[str, Any]) -> ComparedRow:
    """Returns a row of a comparison whose inf and NaN are numbers again."""
    fields: dict[str, Any] = {key: float(value) if value in _NOT_FINITE else value for key, value in row.items()}
    return ComparedRow(**fields)


_NOT_FINITE = ("inf", "-inf", "nan")


def types(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns the types of tensors in most calls of a function and in their results, each with the calls in words."""
    told = [
        (f"{_listed(row['in'])} → {_listed(row['out'])}", f"{row['calls']} calls")
        for row in sorted(rows, key=lambda row: -row["calls"])
    ]
    others = told[_TYPES:]
    return [*told[:_TYPES], *([(f"{len(others)} more", "; ".join(map(": ".join, others)))] if others else [])]


def _listed(types: Sequence[str]) -> str:
    """Returns types of tensors as text: equal ones that follow one another once, with their number."""
    found = ((name, len(list(run))) for name, run in itertools.groupby(types))
    return ", ".join(name if number == 1 else f"{number} {name}" for name, number in found) or "none"


def _tells(row: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return bool(row["overflow"] or row["skipped"] or row["scale"] != before["scale"])
