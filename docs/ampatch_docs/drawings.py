"""Draws SVG from text: the files in docs/drawings become pictures in docs/images. ``make drawings`` runs it.

Boxes stand on a grid, at a row and a column; arrows follow from the places of their boxes.
Colours follow the page: the site's theme, or the reader's system where the picture stands alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1]

#: In pixels. A cell holds a box with space for arrows around it.
_CELL_WIDTH, _BOX_WIDTH, _BOX_HEIGHT, _ROW_GAP, _LINE, _MARGIN = 168, 144, 74, 36, 17, 12

_LIGHT = "--ink: #1c2330; --line: #6b7684; --plain: #f3f4f6; --float32: #d6e6fb; --half: #ffe3bd; --stop: #fbd9d9;"
_DARK = "--ink: #e6e9ee; --line: #8b95a3; --plain: #23272e; --float32: #1f3a5c; --half: #5a3d14; --stop: #5c2626;"
_STYLE = f"""
.drawing {{ {_LIGHT} max-width: 100%; height: auto; font: 13px system-ui, sans-serif; }}
@media (prefers-color-scheme: dark) {{ .drawing {{ {_DARK} }} }}
[data-theme="light"] .drawing {{ {_LIGHT} }}
[data-theme="dark"] .drawing {{ {_DARK} }}
.drawing text {{ fill: var(--ink); text-anchor: middle; }}
.drawing .name {{ font-weight: 600; }}
.drawing rect {{ stroke: var(--line); fill: var(--plain); }}
.drawing .float32 {{ fill: var(--float32); }}
.drawing .half {{ fill: var(--half); }}
.drawing .stop {{ fill: var(--stop); }}
.drawing path {{ stroke: var(--line); stroke-width: 1.5; fill: none; }}
.drawing .head {{ fill: var(--line); stroke: none; }}
.drawing .faint {{ fill: var(--half); fill-opacity: 0.35; stroke-dasharray: 3; }}
.drawing .end {{ text-anchor: end; }}
.drawing .legend {{ text-anchor: start; }}
"""
#: The kinds of boxes that the legend explains.
_LEGEND = {"float32": "float32", "half": "float16 or bfloat16"}


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a drawing, in pixels.

    Attributes:
        row: its row, from 0 on.
        x, y: its left upper corner.
        width: its width.
        kind: "plain", "float32", "half" or "stop".
        text: its name.
        note: lines below the name.
    """

    row: int
    x: int
    y: int
    width: int
    kind: str
    text: str
    note: tuple[str, ...]

    @property
    def centre(self) -> int:
        """Returns the x coordinate of its middle."""
        return self.x + self.width // 2


def box(text: str, at: tuple[int, int], span: int = 1, kind: str = "plain", note: str = "") -> Box:
    """Returns a box at a row and a column, as it stands in a file; `span` is its width in columns."""
    row, column = at
    x = _MARGIN + column * _CELL_WIDTH + (_CELL_WIDTH - _BOX_WIDTH) // 2
    width = _BOX_WIDTH + (span - 1) * _CELL_WIDTH
    y = _MARGIN + row * (_BOX_HEIGHT + _ROW_GAP)
    return Box(row, x, y, width, kind, text, tuple(note.split("\n")) if note else ())


def drawn(description: Mapping[str, Any]) -> str:
    """Returns a drawing as SVG.

    Args:
        description: a file's content: ``title``; ``boxes``, each by a name with the arguments of `box`; ``arrows``,
            pairs of those names.

    Raises:
        KeyError: an arrow names a box that is not there.
    """
    boxes = {name: box(**given) for name, given in description["boxes"].items()}
    kinds = [kind for kind in _LEGEND if any(each.kind == kind for each in boxes.values())]
    width = max(each.x + each.width for each in boxes.values()) + _MARGIN
    bottom = max(each.y for each in boxes.values()) + _BOX_HEIGHT
    height = bottom + _MARGIN + (24 if kinds else 0)
    parts = [
        *opening(description["title"], width, height),
        *(_arrow(boxes[start], boxes[end]) for start, end in description["arrows"]),
        *(_box(each) for each in boxes.values()),
        *_legend(kinds, bottom + _MARGIN + 14),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def opening(title: str, width: int, height: int) -> list[str]:
    """Returns the lines that open a picture of a width and height in pixels, with its title and its style."""
    told = escape(title)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" aria-label="{told}" {size}>',
        f"<title>{told}</title>",
        f"<style>{_STYLE}</style>",
    ]


def _box(each: Box) -> str:
    first = each.y + _BOX_HEIGHT // 2 - (len(each.note) * _LINE) // 2 + 5
    lines = [f'<text class="name" x="{each.centre}" y="{first}">{escape(each.text, quote=False)}</text>']
    for number, line in enumerate(each.note, 1):
        lines.append(f'<text x="{each.centre}" y="{first + number * _LINE}">{escape(line, quote=False)}</text>')
    rectangle = (
        f'<rect class="{each.kind}" x="{each.x}" y="{each.y}" width="{each.width}" height="{_BOX_HEIGHT}" rx="6"/>'
    )
    return "\n".join([rectangle, *lines])


def _arrow(start: Box, end: Box) -> str:
    """Returns an arrow: level within a row, else from edge to edge, with a bend halfway if it must move sideways."""
    if start.row == end.row:
        y = start.y + _BOX_HEIGHT // 2
        step = 1 if start.x < end.x else -1
        x0, x1 = (start.x + start.width, end.x) if step > 0 else (start.x, end.x + end.width)
        head = f"M{x1} {y}l{-9 * step} -5v10z"
        return f'<path d="M{x0} {y}H{x1 - 8 * step}"/><path class="head" d="{head}"/>'
    step = 1 if start.row < end.row else -1
    y0, y1 = (start.y + _BOX_HEIGHT, end.y) if step > 0 else (start.y, end.y + _BOX_HEIGHT)
    narrow, wide = sorted((start, end), key=lambda each: each.width)
    if wide.x <= narrow.centre <= wide.x + wide.width:  # straight
        path, x = f"M{narrow.centre} {y0}V{y1 - 8 * step}", narrow.centre
    else:
        path, x = f"M{start.centre} {y0}V{(y0 + y1) // 2}H{end.centre}V{y1 - 8 * step}", end.centre
    return f'<path d="{path}"/><path class="head" d="M{x} {y1}l-5 {-9 * step}h10z"/>'


def _legend(kinds: list[str], y: int) -> Iterator[str]:
    for place, kind in enumerate(kinds):
        x = _MARGIN + (_CELL_WIDTH - _BOX_WIDTH) // 2 + place * _CELL_WIDTH
        yield f'<rect class="{kind}" x="{x}" y="{y - 11}" width="14" height="14" rx="3"/>'
        yield f'<text class="legend" x="{x + 22}" y="{y}">{_LEGEND[kind]}</text>'


def histogram(counted: Mapping[str, Any]) -> str:
    """Returns a histogram of gradients by exponent as SVG, over the ranges of the half types.

    Args:
        counted: ``title``; ``scale``, the loss scale; ``exponents``, pairs of an exponent of 2 and a number of
            elements.
    """
    scale = round(math.log2(counted["scale"]))
    first, last, step, left, height = -44, 18, 10, 170, 170
    base = _MARGIN + height
    ranges = [
        ("float16", [("half", -14, 15), ("faint", -24, -14)]),
        (
            f"float16, scale {counted['scale']:,}",
            [("half", -14 - scale, 15 - scale), ("faint", -24 - scale, -14 - scale)],
        ),
        ("bfloat16", [("half", first, last)]),
    ]
    width, bottom = left + (last - first) * step + _MARGIN, base + 44 + 30 * len(ranges)
    parts = opening(counted["title"], width, bottom + _MARGIN)
    greatest = max(count for _, count in counted["exponents"])
    for exponent, count in counted["exponents"]:
        tall = max(1, round(height * count / greatest))
        x = left + (exponent - first) * step
        parts.append(f'<rect class="float32" x="{x}" y="{base - tall}" width="{step}" height="{tall}"/>')
    parts.append(f'<path d="M{left} {base}H{left + (last - first) * step}"/>')
    for exponent in range(-40, last, 10):
        x = left + (exponent - first) * step
        parts.append(f'<text x="{x}" y="{base + 18}">2<tspan dy="-5" font-size="10">{exponent}</tspan></text>')
    for row, (name, spans) in enumerate(ranges):
        y = base + 36 + 30 * row
        parts.append(f'<text class="end" x="{left - 10}" y="{y + 14}">{name}</text>')
        for kind, low, high in spans:
            x0, x1 = (left + (max(first, edge) - first) * step for edge in (low, high))
            parts.append(f'<rect class="{kind}" x="{x0}" y="{y}" width="{x1 - x0}" height="18" rx="3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def matrix(title: str, names: Sequence[str], marks: Mapping[tuple[str, str], int]) -> str:
    """Returns a table of marks as SVG, with the same names for rows and columns.

    Args:
        title: what the marks mean.
        names: names in order.
        marks: how often the name of a row has that of a column to do with; pairs that are not there have no mark.
    """
    cell, left, top = 19, 180, 130
    places = {name: number * cell for number, name in enumerate(names)}
    size = len(names) * cell
    parts = opening(title, left + size + 60, top + size + _MARGIN)
    for name, place in places.items():
        parts.append(f'<text class="end" x="{left - 8}" y="{top + place + 14}">{escape(name)}</text>')
        turned = f'transform="rotate(-55 {left + place + 12} {top - 6})"'
        parts.append(f'<text class="legend" x="{left + place + 12}" y="{top - 6}" {turned}>{escape(name)}</text>')
        parts.append(f'<path d="M{left} {top + place}h{size}M{left + place} {top}v{size}" stroke-opacity="0.3"/>')
        at = f'x="{left + place + 2}" y="{top + place + 2}"'
        parts.append(f'<rect class="plain" {at} width="{cell - 4}" height="{cell - 4}" rx="2"/>')
    for (row, column), count in marks.items():
        at = f'x="{left + places[column] + 2}" y="{top + places[row] + 2}"'
        told = f"<title>{escape(row)} imports {escape(column)}: {count}</title>"
        parts.append(f'<rect class="half" {at} width="{cell - 4}" height="{cell - 4}" rx="2">{told}</rect>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def pictures() -> dict[Path, str]:
    """Returns the pictures that the files in docs/drawings describe, as SVG, by the paths of their files."""
    found = {}
    for file in sorted((DOCS / "drawings").glob("*.yaml")):
        picture = DOCS / "images" / f"{file.stem}.svg"
        found[picture] = drawn(yaml.safe_load(file.read_text(encoding="utf-8")))
    counted = json.loads((DOCS / "drawings" / "gradients.json").read_text(encoding="utf-8"))
    return {**found, DOCS / "images" / "gradients.svg": histogram(counted)}


def main() -> None:
    """Writes all pictures."""
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
