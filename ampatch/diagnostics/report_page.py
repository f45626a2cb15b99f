"""The page of a report: one HTML file that needs no other, for a browser without a network.

Owns the order of the sections and the sentences between drawings and tables. Its templates escape all text. Must never
read anything but the report's data, nor refer to an address.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ampatch.diagnostics import module_tree, report_drawings, report_numbers, report_tables
from ampatch.diagnostics.module_tree import Module
from ampatch.diagnostics.report_numbers import count, exact, percent, real, seconds, size
from ampatch.diagnostics.report_steps import spelled

#: Rows of the tree of modules that are open at first.
_OPEN_ROWS = 24


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline number.

    Attributes:
        label: what it counts.
        text: the number.
        title: the exact number with its unit.
        note: what belongs to it.
    """

    label: str
    text: str
    title: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of the tree of modules.

    Attributes:
        module: the module, with the sums over its submodules.
        depth: number of modules around it.
        is_open: whether its submodules are shown at first.
        closes: number of modules that end behind this line.
    """

    module: Module
    depth: int
    is_open: bool
    closes: int


def page(data: Mapping[str, Any]) -> str:
    """Returns the HTML of a report.

    Args:
        data: what `Report.to_dict` returns.
    """
    roots = module_tree.tree(data["modules"])
    script = _file("report.js")
    losses = list(dict.fromkeys(step["loss_id"] for step in data["steps"]))
    text = (
        _environment()
        .get_template("report.html")
        .render(
            data=data,
            tables=report_tables,
            drawings=report_drawings,
            style=_file("report.css"),
            script=script,
            # No other script runs, whatever a report contains.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            lead=list(_lead(data)),
            tiles=list(_tiles(data, roots)),
            roots=roots,
            tree=list(_tree(roots)),
            activations=module_tree.total(root.activation_bytes for root in roots),
            weights=module_tree.total(root.weight_bytes for root in roots),
            scale_told=_scale_told(data["steps"]),
            scale_changes=len({(step["loss_id"], step["scale"]) for step in data["steps"]}) > len(losses),
            losses=losses,
            best_told=None if data["underflow"] is None else _best_told(data),
            sources={(row["file"], row["line"]): row["source"] for row in [*data["lines"], *data["misaligned"]]},
        )
    )
    # A path may have bytes that are no text; no file in UTF-8 can hold them as they are.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("ampatch.diagnostics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        name: getattr(report_numbers, name) for name in ("count", "digits", "exact", "percent", "seconds")
    }
    found.filters |= {"size": size, "shares": module_tree.shares, "style_of": module_tree.style_of}
    found.filters |= {"place": report_tables.place, "types": _types}
    return found


def _file(name: str) -> str:
    return (files("ampatch.diagnostics") / "templates" / name).read_text(encoding="utf-8")


def _lead(data: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sentences at the top."""
    settings, steps = data["settings"], data["steps"]
    if settings is None:
        yield "amp was not set up."
    else:
        half = settings.get("half_dtype")
        yield f"Opt level {settings.get('opt_level')}{f' in {half}' if half else ''}."
    skipped = sum(bool(step["skipped"]) for step in steps)
    took = f"{count(len(steps))} step{'' if len(steps) == 1 else 's'} in {seconds(data['cost']['seconds'])}"
    yield (
        f"{took}, {count(skipped) if skipped else 'none'} of them skipped."
        if steps
        else f"No step in {seconds(data['cost']['seconds'])}."
    )


def _tiles(data: Mapping[str, Any], roots: Sequence[Module]) -> Iterator[Tile]:
    totals, steps, underflow = data["totals"], data["steps"], data["underflow"]
    whole = data["cost"]["seconds"]
    yield Tile("Tensors cast", count(totals["casts"]), exact(totals["casts"]), f"in {count(totals['calls'])} calls")
    share = f", {percent(totals['cast_seconds'] / whole)} of the time" if whole else ""
    yield Tile(
        "Written by casts",
        size(totals["cast_bytes"]),
        f"{totals['cast_bytes']} bytes",
        f"in {seconds(totals['cast_seconds'])}{share}",
    )
    yield Tile(
        "Cache hits",
        count(totals["cache_hits"]),
        exact(totals["cache_hits"]),
        f"saved casts of {size(totals['cache_hit_bytes'])}",
    )
    skipped, last = sum(bool(step["skipped"]) for step in steps), steps[-1] if steps else None
    ends = (
        "no step was seen" if last is None else f"of {count(len(steps))}; loss scale {count(last['scale'])} at the end"
    )
    yield Tile("Skipped steps", count(skipped), exact(skipped), ends)
    saved = sum(root.saved_bytes for root in roots)
    yield Tile(
        "Memory saved" if saved >= 0 else "Memory added",
        size(abs(saved)),
        f"{abs(saved)} bytes",
        "in activations and weights, against float32" if roots else "no module was seen",
    )
    if underflow is not None:
        yield Tile(
            "Gradients lost",
            percent(underflow["lost"]),
            exact(underflow["lost"]),
            f"below {underflow['half']}'s normal range at a scale of {count(underflow['scale'])}",
        )


def _tree(roots: Sequence[Module]) -> Iterator[TreeRow]:
    """Yields the lines of the tree; its outer levels are open, as long as few lines show."""
    rows = list(module_tree.walk(roots))
    by_depth = Counter(depth for _, depth in rows)
    opens, shown = 0, by_depth[0]
    while shown + by_depth[opens + 1] <= _OPEN_ROWS and opens + 1 in by_depth:
        opens += 1
        shown += by_depth[opens]
    for index, (module, depth) in enumerate(rows):
        after = rows[index + 1][1] if index + 1 < len(rows) else 0
        yield TreeRow(module, depth, depth < max(opens, 1), max(0, depth - after))


def _scale_told(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on the loss scale."""
    if not steps:
        return "No step was seen."
    scales = [
        number for number in (real(step["scale"]) for step in steps) if number is not None and math.isfinite(number)
    ]
    overflows = sum(bool(step["overflow"]) for step in steps)
    number = f"{count(overflows)} of {count(len(steps))} steps overflowed" if overflows else "no step overflowed"
    if not scales:
        return f"No scale is a finite number; {number}."
    if min(scales) == max(scales):
        return f"The loss scale was {count(scales[0])} in all {count(len(steps))} steps; {number}."
    return f"The loss scale went from {count(scales[0])} to {count(scales[-1])}; {number}."


def _best_told(data: Mapping[str, Any]) -> str:
    """Returns a sentence on the scale that loses least."""
    underflow, best = data["underflow"], data["underflow"]["best_scale"]
    if best == underflow["scale"]:
        return "No other scale loses less and leaves room for sums of gradients."
    return f"With room for sums of gradients, a scale of {spelled(best)} loses least."


def _types(counts: Mapping[str, int]) -> str:
    """Returns the types of tensors that went in or came out, and nothing of their numbers."""
    return ", ".join(module_tree.ordered(counts)) or report_numbers.DASH
