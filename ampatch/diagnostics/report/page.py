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
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ampatch.diagnostics.report import drawings as report_drawings
from ampatch.diagnostics.report import tables
from ampatch.diagnostics.report import tree as module_tree
from ampatch.diagnostics.report.numbers import DASH, count, digits, exact, percent, seconds, size
from ampatch.diagnostics.report.steps import spelled
from ampatch.diagnostics.report.tables import Cell, count_cell, percent_cell, size_cell
from ampatch.diagnostics.report.tree import Module

#: Rows of the tree of modules that are open at first.
_OPEN_ROWS = 24


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
            tables=tables,
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
        loader=PackageLoader("ampatch.diagnostics.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (count, digits, exact, percent, seconds, size, module_tree.shares, module_tree.style_of, tables.place)
    found.filters |= {each.__name__: each for each in filters} | {"types": _types}
    return found


def _file(name: str) -> str:
    return (files("ampatch.diagnostics.report") / "templates" / name).read_text(encoding="utf-8")


def _lead(data: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sentences at the top."""
    settings, steps, took = data["settings"], data["steps"], seconds(data["cost"]["seconds"])
    if settings is None:
        yield "amp was not set up."
    else:
        half = settings.get("half_dtype")
        yield f"Opt level {settings.get('opt_level')}{f' in {half}' if half else ''}."
    skipped = sum(bool(step["skipped"]) for step in steps)
    several = "" if len(steps) == 1 else "s"
    told = f"{count(len(steps))} step{several} in {took}, {count(skipped) if skipped else 'none'} of them skipped."
    yield told if steps else f"No step in {took}."


def _tiles(data: Mapping[str, Any], roots: Sequence[Module]) -> Iterator[tuple[str, Cell, str]]:
    """Yields the headline numbers: what each counts, the number, and what belongs to it."""
    totals, steps, underflow = data["totals"], data["steps"], data["underflow"]
    whole = data["cost"]["seconds"]
    yield "Tensors cast", count_cell(totals["casts"]), f"in {count(totals['calls'])} calls"
    share = f", {percent(totals['cast_seconds'] / whole)} of the time" if whole else ""
    yield "Written by casts", size_cell(totals["cast_bytes"]), f"in at most {seconds(totals['cast_seconds'])}{share}"
    yield "Cache hits", count_cell(totals["cache_hits"]), f"saved casts of {size(totals['cache_hit_bytes'])}"
    ends = "no step was seen"
    if steps:
        ends = f"of {count(len(steps))}; loss scale {count(steps[-1]['scale'])} at the end"
    yield "Skipped steps", count_cell(sum(bool(step["skipped"]) for step in steps)), ends
    saved = sum(root.saved_bytes for root in roots)
    note = "in activations and weights, against float32" if roots else "no module was seen"
    yield f"Memory {'saved' if saved >= 0 else 'added'}", size_cell(abs(saved)), note
    if underflow is not None:
        note = f"below {underflow['half']}'s normal range at a scale of {count(underflow['scale'])}"
        yield "Gradients lost", percent_cell(underflow["lost"]), note


def _tree(roots: Sequence[Module]) -> Iterator[tuple[Module, int, bool, int]]:
    """Yields the lines of the tree; its outer levels are open, as long as few lines show.

    Yields a module, the number of modules around it, whether it is open at first, and the number of modules that end
    behind its line.
    """
    rows = list(module_tree.walk(roots))
    by_depth = Counter(depth for _, depth in rows)
    opens, shown = 0, by_depth[0]
    while shown + by_depth[opens + 1] <= _OPEN_ROWS and opens + 1 in by_depth:
        opens += 1
        shown += by_depth[opens]
    for index, (module, depth) in enumerate(rows):
        after = rows[index + 1][1] if index + 1 < len(rows) else 0
        yield module, depth, depth < max(opens, 1), max(0, depth - after)


def _scale_told(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on the loss scale."""
    if not steps:
        return "No step was seen."
    scales = [scale for scale in (float(step["scale"]) for step in steps) if math.isfinite(scale)]
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
    return ", ".join(module_tree.ordered(counts)) or DASH
