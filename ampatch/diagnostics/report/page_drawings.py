"""The drawings of a report's page: the loss scale, norms, exponents, and the map of modules.

Owns what is where; `templates/drawings.html` writes it as SVG. Positions across are in percent and those down in
pixels, so that a drawing fits any width and its text keeps its size. Must never leave out an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ampatch.diagnostics.report.exponents import Range
from ampatch.diagnostics.report.numbers import count, digits, percent, power_of_2
from ampatch.diagnostics.report.tree import Module
from ampatch.grouping import grouped

#: Points of a line; of more, the least and the greatest of each stretch are drawn.
POINTS = 600
#: Overflows that get a point of their own, with a text; of more only lines are drawn.
_MARKS = 200
HEIGHT = 180  # of a plot, in pixels
_LEVELS = 7  # of the map
_NARROWEST = 0.001  # module on the map, as a share of its width
#: Exponents around the counted ones in which an edge of the type's range is still drawn.
_NEAR = 14
#: A point of a line; None where the line breaks.
_Point = tuple[float, float | None]
_Row = Mapping[str, Any]


def loss_scale(steps: Sequence[_Row]) -> dict[str, Any] | None:
    """Returns the loss scale over the steps, with all overflows; one line for each loss."""
    lines = grouped((step["loss_id"], (step["step"], _log(step["scale"]))) for step in steps)
    values = [value for line in lines.values() for _, value in line if value is not None]
    if not values:
        return None
    low, high = math.floor(min(values)) - 0.5, math.ceil(max(values)) + 0.5
    ticks = range(math.ceil(low), math.floor(high) + 1, max(1, math.ceil((high - low) / 5)))
    overflows = sum(bool(step["overflow"]) for step in steps)
    told = f"From step {steps[0]['step']} to {steps[-1]['step']}, {count(overflows)} of them with an overflow."
    named = [(tick, power_of_2(tick)) for tick in ticks]
    most = _MARKS if overflows <= _MARKS else 0
    return _plot(told, steps, [*map(thinned, lines.values())], (low, high), named, most, is_stairs=True)


def gradient_norm(steps: Sequence[_Row]) -> dict[str, Any] | None:
    """Returns the norm of the gradients over the steps; None if none was seen."""
    line: list[_Point] = [(step["step"], _log(step["gradient_norm"], math.log10)) for step in steps]
    values = [value for _, value in line if value is not None]
    if not values:
        return None
    low, high = min(values), max(values)
    margin = max(0.1, 0.08 * (high - low))
    told = f"Between {digits(10**low)} and {digits(10**high)}; steps without a finite norm are left out."
    named = [(math.log10(tick), f"{tick:g}") for tick in _ticks(low, high)]
    return _plot(told, steps, [thinned(line)], (low - margin, high + margin), named)


def exponents(underflow: _Row) -> dict[str, Any] | None:
    """Returns the histogram of the gradients' exponents at the present scale, against the half type's range.

    Returns:
        What it shows as a sentence; and the zones of the range, the bars and the names on the axis, each with its
        position. None without gradients.
    """
    half, rows = _range(underflow), underflow["exponents"]
    if not rows:
        return None
    shift = math.log2(underflow["scale"])
    low: float = rows[0]["exponent"] + shift - 2
    high: float = rows[-1]["exponent"] + shift + 3
    low = min(low, half.zero - 3) if low < half.zero + _NEAR else low
    high = max(high, half.greatest + 4) if high > half.greatest - _NEAR else high
    whole, highest = sum(row["elements"] for row in rows), max(row["elements"] for row in rows)

    def across(exponent: float) -> float:
        return 100 * (min(max(exponent, low), high) - low) / (high - low)

    ends = {"zero": half.zero, "subnormal": half.normal, "normal": half.greatest + 1, "overflow": high}
    by_zone = grouped((half.zone(row["exponent"] + shift), row["elements"]) for row in rows)
    zones, right = [], across(low)
    for name, end in ends.items():
        left, right = right, across(end)
        if right > left or name in by_zone:
            zones.append((name, left, right - left, sum(by_zone.get(name, ())) / whole))
    bars = []
    for row in rows:
        scaled = row["exponent"] + shift
        tall = max(1.5, (HEIGHT - 44) * row["elements"] / highest)  # below the names of the zones
        bars.append((half.zone(scaled), across(scaled), tall, power_of_2(row["exponent"]), power_of_2(scaled), row))
    every = 8 if high - low > 30 else 4
    ticks = range(math.ceil(low / every) * every, math.floor(high) + 1, every)
    told = (
        f"Elements by the power of 2 that {underflow['half']} has to hold at a scale of {count(underflow['scale'])}: "
        f"{percent(underflow['lost'])} are lost, or held with fewer bits."
    )
    named = [(across(tick), power_of_2(tick)) for tick in ticks if 2 < across(tick) < 98]
    return {"told": told, "zones": zones, "bars": bars, "wide": 100 / (high - low), "ticks": named, "elements": whole}


def exponent_strip(rows: Sequence[Mapping[str, int]], underflow: _Row) -> tuple[int, dict[str, list[str]]]:
    """Returns the exponents of one parameter as a small drawing, over the same exponents as the large one.

    Returns:
        Its width, and paths 16 high by the kind of the bars in them.
    """
    everything = underflow["exponents"]
    half, shift = _range(underflow), math.log2(underflow["scale"])
    low, high = everything[0]["exponent"], everything[-1]["exponent"] + 1
    highest = max(row["elements"] for row in rows)

    def bar(row: Mapping[str, int]) -> tuple[str, str]:
        tall = max(1, round(16 * row["elements"] / highest))
        kind = "normal" if half.zone(row["exponent"] + shift) == "normal" else "lost"
        return kind, f"M{row['exponent'] - low} 16v-{tall}h1v{tall}z"

    return high - low, grouped(map(bar, rows))


class MapCell(NamedTuple):
    """A module on the map: its name there, the number of cells above it, and shares of the width."""

    module: Module
    name: str
    level: int
    start: float
    wide: float


def module_map(roots: Sequence[Module]) -> dict[str, Any] | None:
    """Returns the map of modules: each as wide as its activations, or as its operators if there are none.

    Submodules are below their module.

    Returns:
        What it shows as a sentence, the attribute of modules that it shows, and its cells. None if no module ran any
        operator.
    """
    weighs = "activation_bytes" if any(root.activation_bytes for root in roots) else "operators"
    whole = sum(_weight(root, weighs) for root in roots)
    if not whole:
        return None

    def cells(modules: Iterable[Module], start: int, level: int) -> Iterator[MapCell]:
        """Yields the cells of modules side by side and of their submodules."""
        for outer in modules:
            module, parent = outer, outer.row["parent"]
            while len(module.children) == 1 and not sum(module.row[weighs].values()):  # it only holds another one
                module = module.children[0]
            weight = _weight(module, weighs)
            if weight >= _NARROWEST * whole:
                name = (module.row["name"] or module.row["class"]).removeprefix(f"{parent}." if parent else "")
                yield MapCell(module, name, level, start / whole, weight / whole)
                if level + 1 < _LEVELS:
                    yield from cells(module.children, start, level + 1)
            start += weight

    measure = "the bytes of its activations" if weighs == "activation_bytes" else "the number of its operators"
    told = f"Each module is as wide as {measure}; submodules are below it. The list below has all modules."
    return {"told": told, "weighs": weighs, "cells": list(cells(roots, 0, 0))}


def thinned(line: Sequence[_Point], limit: int = POINTS) -> list[_Point]:
    """Returns at most about twice `limit` points of a line: of each stretch the least, the greatest, and breaks."""
    if len(line) <= limit:
        return list(line)
    kept: list[_Point] = []
    for index in range(limit):
        stretch = line[len(line) * index // limit : len(line) * (index + 1) // limit]
        there = [(at, value) for at, value in stretch if value is not None]
        if there:
            kept += sorted({min(there, key=itemgetter(1)), max(there, key=itemgetter(1))})
        elif kept and kept[-1][1] is not None:
            kept.append(stretch[0])
    return kept


def _plot(
    told: str,
    steps: Sequence[_Row],
    lines: Iterable[Sequence[_Point]],
    up: tuple[float, float],
    values: Iterable[tuple[float, str]],
    most_points: int = 0,
    is_stairs: bool = False,
) -> dict[str, Any]:
    """Returns a plot of lines over steps.

    Args:
        told: what it shows, as a sentence.
        steps: the steps of the report.
        lines: the lines.
        up: the least and the greatest value.
        values: those on the axis, with their names.
        most_points: number of overflows that get a point of their own.
        is_stairs: whether a value stays until the next step.

    Returns:
        The sentence; the heights and names of the values on the vertical axis; the positions, names and text anchors
        of the steps on the horizontal one; a path with a stroke for each overflow, and a path for each line, all 1000
        wide; and the positions of overflows, with their steps.
    """
    first: float = steps[0]["step"]
    last: float = steps[-1]["step"]
    if first == last:
        first, last = first - 0.5, last + 0.5

    def x(step: float) -> float:
        return 100 * (step - first) / (last - first)

    def y(value: float | None) -> float:
        return 0 if value is None else HEIGHT * (1 - (value - up[0]) / (up[1] - up[0]))

    def path(line: Iterable[_Point]) -> str:
        path, is_begun = "", False
        for step, value in line:
            if value is not None:
                command, between = ("M", " ") if not is_begun else ("H", "V") if is_stairs else ("L", " ")
                path += f"{command}{10 * x(step):.1f}{between}{y(value):.1f}"
            is_begun = value is not None
        return path

    middles = [] if last - first < 4 else [(round((first + last) / 2), "", "middle")]
    named = [(round(first), "step ", "start"), *middles, (round(last), "", "end")]
    overflows = [step for step in steps if step["overflow"]]
    # Two overflows in one pixel are one line.
    there = dict.fromkeys(f"{10 * x(step['step']):.0f}" for step in overflows)
    return {
        "told": told,
        "heights": [(y(value), name) for value, name in values],
        "steps": [(x(step), f"{what}{count(step)}", anchor) for step, what, anchor in named],
        "overflows": "".join(f"M{at} 0v{HEIGHT}" for at in there),
        "lines": [path(line) for line in lines],
        "points": [(x(step["step"]), y(_log(step["scale"])), step) for step in overflows[:most_points]],
    }


def _log(value: Any, log: Callable[[float], float] = math.log2) -> float | None:
    """Returns the logarithm of a number of a report; None if it has none that can be drawn."""
    number = 0.0 if value is None else float(value)
    return log(number) if 0 < number < math.inf else None


def _ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between two powers of 10."""
    if high - low > 1.5:
        every = math.ceil((high - low) / 5)
        return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]
    rounds = [round_ * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for round_ in (1, 2, 5)]
    return [number for number in rounds if low <= math.log10(number) <= high] or [10 ** ((low + high) / 2)]


def _range(underflow: Mapping[str, Any]) -> Range:
    return Range.of(getattr(torch, underflow["half"]))


def _weight(module: Module, weighs: str) -> int:
    return sum(getattr(module, weighs).values())
