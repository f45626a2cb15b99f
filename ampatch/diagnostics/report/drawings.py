"""The drawings of a report's page, as SVG text: the loss scale, norms, exponents, and the map of modules.

Positions across are in percent and those down in pixels, so that a drawing fits any width and its text keeps its size.
Colours come from the page's style sheet, by class. Must never leave out an overflow, and escapes all text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from operator import itemgetter
from typing import Any

import torch

from ampatch.diagnostics.report.exponents import Range
from ampatch.diagnostics.report.numbers import count, digits, exact, percent, power_of_2, size
from ampatch.diagnostics.report.tree import Module, shares, style_of
from ampatch.grouping import grouped

#: Points of a line; of more, the least and the greatest of each stretch are drawn.
_POINTS = 600
#: Overflows that get a point of their own, with a text; of more only lines are drawn.
_MARKS = 200
_HEIGHT = 180  # of a plot, in pixels
_HEIGHT_WITH_AXIS = _HEIGHT + 24
_ROW = 30  # of the map, in pixels
_LEVELS = 7  # of the map
_NARROWEST = 0.001  # module on the map, as a share of its width
#: Widths of the map in pixels, on a laptop and on a phone: a name is shown where it fits.
_LAPTOP, _PHONE = 1056, 324
_LETTER = 7.2  # of a name, in pixels
#: Narrower ones have no gap to their neighbours.
_APART = 0.006
#: Exponents around the counted ones in which an edge of the type's range is still drawn.
_NEAR = 14
#: A point of a line; None where the line breaks.
_Point = tuple[float, float | None]
_Row = Mapping[str, Any]


def loss_scale(steps: Sequence[_Row]) -> str:
    """Returns the loss scale over the steps, with all overflows; one line for each loss."""
    lines = grouped((step["loss_id"], (step["step"], _log(step["scale"]))) for step in steps)
    values = [value for line in lines.values() for _, value in line if value is not None]
    if not values:
        return ""
    low, high = math.floor(min(values)) - 0.5, math.ceil(max(values)) + 0.5
    ticks = range(math.ceil(low), math.floor(high) + 1, max(1, math.ceil((high - low) / 5)))
    overflows = sum(bool(step["overflow"]) for step in steps)
    told = f"From step {steps[0]['step']} to {steps[-1]['step']}, {count(overflows)} of them with an overflow."
    plot = _Plot(steps, (low, high))
    body = [
        *plot.axes((tick, power_of_2(tick)) for tick in ticks),
        *(plot.path(_stairs(line), index) for index, line in enumerate(lines.values())),
        *(plot.points() if overflows <= _MARKS else ()),
    ]
    return _drawing("scale", "Loss scale by step", told, _HEIGHT_WITH_AXIS, body)


def gradient_norm(steps: Sequence[_Row]) -> str:
    """Returns the norm of the gradients over the steps; empty if none was seen."""
    line: list[_Point] = [(step["step"], _log(step["gradient_norm"], math.log10)) for step in steps]
    values = [value for _, value in line if value is not None]
    if not values:
        return ""
    low, high = min(values), max(values)
    margin = max(0.1, 0.08 * (high - low))
    plot = _Plot(steps, (low - margin, high + margin))
    body = [*plot.axes((math.log10(tick), f"{tick:g}") for tick in _ticks(low, high)), plot.path(thinned(line))]
    told = f"Between {digits(10**low)} and {digits(10**high)}; steps without a finite norm are left out."
    return _drawing("norm", "Norm of the unscaled gradients by step", told, _HEIGHT_WITH_AXIS, body)


def exponents(underflow: Mapping[str, Any]) -> str:
    """Returns the histogram of the gradients' exponents at the present scale, against the half type's range."""
    half, rows = _range(underflow), underflow["exponents"]
    if not rows:
        return ""
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
    body, right = [], across(low)
    for name, end in ends.items():
        left, right = right, across(end)
        if right <= left and name not in by_zone:
            continue
        at, anchor, inwards = {
            "overflow": (right, "end", -6),
            "normal": ((left + right) / 2, "middle", 0),  # away from its neighbour, whose zone may be narrow
        }.get(name, (left, "start", 6))
        text = f'x="{at:.2f}%" dx="{inwards}" text-anchor="{anchor}"'
        body.append(
            f'<rect class="zone zone-{name}" x="{left:.2f}%" y="0" width="{right - left:.2f}%" height="{_HEIGHT}"/>'
            f'<text class="zone-name" {text} y="15">{name}</text>'
            f'<text class="zone-share" {text} y="32">{percent(sum(by_zone.get(name, ())) / whole)}</text>'
        )
    for row in rows:
        scaled = row["exponent"] + shift
        tall = max(1.5, (_HEIGHT - 44) * row["elements"] / highest)  # below the names of the zones
        kind = half.zone(scaled)
        body.append(
            f'<rect class="bar bar-{kind}" x="{across(scaled) + 0.12:.2f}%" y="{_HEIGHT - tall:.1f}" '
            f'width="{100 / (high - low) - 0.24:.2f}%" height="{tall:.1f}">'
            f"<title>{power_of_2(row['exponent'])}, scaled {power_of_2(scaled)} ({kind}): {row['elements']} elements, "
            f"{percent(row['elements'] / whole)} (exponent {row['exponent']})</title></rect>"
        )
    every = 8 if high - low > 30 else 4
    ticks = range(math.ceil(low / every) * every, math.floor(high) + 1, every)
    body += [_tick(across(tick), power_of_2(tick)) for tick in ticks if 2 < across(tick) < 98]
    told = (
        f"Elements by the power of 2 that {underflow['half']} has to hold at a scale of {count(underflow['scale'])}: "
        f"{percent(underflow['lost'])} are lost, or held with fewer bits."
    )
    return _drawing("exponents", "Exponents of the scaled gradients", told, _HEIGHT_WITH_AXIS, body)


def exponent_strip(rows: Sequence[Mapping[str, int]], underflow: Mapping[str, Any]) -> str:
    """Returns the exponents of one parameter as a small drawing, over the same exponents as the large one."""
    everything = underflow["exponents"]
    if not rows or not everything:
        return ""
    half, shift = _range(underflow), math.log2(underflow["scale"])
    low, high = everything[0]["exponent"], everything[-1]["exponent"] + 1
    highest = max(row["elements"] for row in rows)

    def bar(row: Mapping[str, int]) -> tuple[str, str]:
        tall = max(1, round(16 * row["elements"] / highest))
        kind = "normal" if half.zone(row["exponent"] + shift) == "normal" else "lost"
        return kind, f"M{row['exponent'] - low} 16v-{tall}h1v{tall}z"

    bars = grouped(map(bar, rows))
    paths = "".join(f'<path class="bar-{kind}" d="{"".join(path)}"/>' for kind, path in bars.items())
    return (
        f'<svg class="strip" viewBox="0 0 {high - low} 16" preserveAspectRatio="none" aria-hidden="true">{paths}</svg>'
    )


def module_map(roots: Sequence[Module]) -> str:
    """Returns the map of modules: each as wide as its activations, or as its operators if there are none.

    Submodules are below their module. A module has the colour of the type that most of its bytes are in, and a strip
    with the shares of all types.
    """
    weighs = "activation_bytes" if any(root.activation_bytes for root in roots) else "operators"
    whole = sum(_weight(root, weighs) for root in roots)
    if not whole:
        return ""

    def cells(modules: Iterable[Module], start: int, level: int) -> Iterator[tuple[int, str]]:
        """Yields the cells of modules side by side and of their submodules, each with its level."""
        for outer in modules:
            module = outer
            while len(module.children) == 1 and not sum(module.row[weighs].values()):  # it only holds another one
                module = module.children[0]
            weight = _weight(module, weighs)
            if weight >= _NARROWEST * whole:
                yield level, _cell(module, outer, start / whole, weight / whole, level, weighs)
                if level + 1 < _LEVELS:
                    yield from cells(module.children, start, level + 1)
            start += weight

    drawn = list(cells(roots, 0, 0))
    deepest = max((level for level, _ in drawn), default=0)
    measure = "the bytes of its activations" if weighs == "activation_bytes" else "the number of its operators"
    told = f"Each module is as wide as {measure}; submodules are below it. The list below has all modules."
    return _drawing("map", "Modules by type", told, (deepest + 1) * _ROW, (cell for _, cell in drawn), "map")


def thinned(line: Sequence[_Point], limit: int = _POINTS) -> list[_Point]:
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


class _Plot:
    """A plot of lines over steps.

    Args:
        steps: the steps of the report.
        up: the least and the greatest value.
    """

    def __init__(self, steps: Sequence[_Row], up: tuple[float, float]) -> None:
        self._overflows = [step for step in steps if step["overflow"]]
        first, last = steps[0]["step"], steps[-1]["step"]
        self._across: tuple[float, float] = (first, last) if last > first else (first - 0.5, last + 0.5)
        self._up = up

    def x(self, step: float) -> float:
        first, last = self._across
        return 100 * (step - first) / (last - first)

    def y(self, value: float) -> float:
        low, high = self._up
        return _HEIGHT * (1 - (value - low) / (high - low))

    def axes(self, ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
        """Yields both axes, with a line for each overflow."""
        for value, text in ticks:
            y = f"{self.y(value):.1f}"
            yield f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            yield f'<text class="tick" x="-8" y="{y}" dy="4" text-anchor="end">{text}</text>'
        yield f'<line class="axis" x1="0" x2="100%" y1="{_HEIGHT}" y2="{_HEIGHT}"/>'
        first, last = self._across
        middles = [] if last - first < 4 else [(round((first + last) / 2), "middle")]
        for step, anchor in ((round(first), "start"), *middles, (round(last), "end")):
            yield _tick(self.x(step), f"{'step ' if anchor == 'start' else ''}{count(step)}", anchor)
        # Two overflows in one pixel are one line.
        there = dict.fromkeys(f"{10 * self.x(step['step']):.0f}" for step in self._overflows)
        if there:
            yield _stretched("overflow-line", "".join(f"M{x} 0v{_HEIGHT}" for x in there))

    def path(self, line: Iterable[_Point], number: int = 0) -> str:
        path, is_down = [], False
        for step, value in line:
            if value is not None:
                path.append(f"{'L' if is_down else 'M'}{10 * self.x(step):.1f} {self.y(value):.1f}")
            is_down = value is not None
        return _stretched(f"line line-{number % 3}", "".join(path))

    def points(self) -> Iterator[str]:
        """Yields a point for each overflow, at its scale."""
        for step in self._overflows:
            scale = _log(step["scale"])
            y = 0 if scale is None else self.y(scale)
            yield (
                f'<circle class="overflow" cx="{self.x(step["step"]):.2f}%" cy="{y:.1f}" r="3.5"><title>step '
                f"{step['step']}: overflow at a scale of {exact(step['scale'])}</title></circle>"
            )


def _stretched(kind: str, path: str) -> str:
    """Returns a path over 1000 units across, which are stretched to the width of the drawing."""
    return (
        f'<svg x="0" y="0" width="100%" height="{_HEIGHT}" viewBox="0 0 1000 {_HEIGHT}" '
        f'preserveAspectRatio="none"><path class="{kind}" d="{path}"/></svg>'
    )


def _tick(x: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.2f}%" y="{_HEIGHT + 18}" text-anchor="{anchor}">{text}</text>'


def _drawing(name: str, title: str, told: str, height: int, body: Iterable[str], kind: str = "plot") -> str:
    return (
        f'<svg class="{kind}" role="img" aria-labelledby="{name}-title {name}-desc" width="100%" height="{height}">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(told)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _stairs(line: Sequence[_Point]) -> list[_Point]:
    """Returns the points at which a line of steps turns; of very many, fewer."""
    turns = list(line[:1])
    for (_, before), (step, value) in itertools.pairwise(line):
        if value != before:
            turns += [(step, value)] if None in (before, value) else [(step, before), (step, value)]
    if line and turns[-1] != line[-1]:
        turns.append(line[-1])
    return turns if len(turns) <= 4 * _POINTS else thinned(turns, 2 * _POINTS)


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


def _cell(module: Module, outer: Module, start: float, wide: float, level: int, weighs: str) -> str:
    """Returns a module on the map.

    Args:
        module: the module.
        outer: the outermost of those that only hold this one.
        start: where it begins, as a share of the width.
        wide: its share of the width.
        level: number of cells above it.
        weighs: name of the sums by type that it shows.
    """
    parts = shares(getattr(module, weighs))
    most = max(parts, key=lambda part: part.value).type
    x, strips = 0.0, []
    for part in parts:
        strips.append(
            f'<rect class="t-{style_of(part.type)}" x="{100 * x:.1f}%" y="{_ROW - 7}" '
            f'width="{100 * part.share:.1f}%" height="5"/>'
        )
        x += part.share
    row, parent = module.row, outer.row["parent"]
    own = row["name"] or row["class"]
    label = own.removeprefix(f"{parent}.") if parent else own
    amount = size if weighs == "activation_bytes" else count
    told = ", ".join(f"{part.type} {amount(part.value)}" for part in parts)
    needed, named = _LETTER * len(label) + 10, ""
    if wide * _LAPTOP >= needed:
        fits = "" if wide * _PHONE >= needed else "wide"
        named = f'<text class="{fits}" x="7" y="17">{escape(label)}</text>'
    return (
        f'<svg class="cell{"" if wide >= _APART else " close"}" data-module="{module.number}" '
        f'x="{100 * start:.2f}%" y="{level * _ROW}" width="{100 * wide:.2f}%" height="{_ROW - 2}">'
        f"<title>{escape(row['name'] or 'the model')} ({escape(row['class'])}): {escape(told)}</title>"
        f'<rect class="tint t-{style_of(most)}" width="100%" height="100%"/>{"".join(strips)}{named}</svg>'
    )
