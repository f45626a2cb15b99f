"""The page of a report: one HTML file that needs no other, for a browser without a network.

Owns what its templates are given; these own the order of the sections, and escape all text. Must never
read anything but the report's data, nor refer to an address.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ampatch.diagnostics.compare.result import owner_of
from ampatch.diagnostics.report import page_drawings, page_tables
from ampatch.diagnostics.report import tree as module_tree
from ampatch.diagnostics.report.numbers import count, digits, exact, percent, seconds, size
from ampatch.diagnostics.report.steps import course_of_scale, spelled
from ampatch.diagnostics.report.tree import Module
from ampatch.diagnostics.shown_names import few, short_place, shown_function, shown_module

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
    return (
        _environment()
        .get_template("report.html")
        .render(
            data=data,
            tables=page_tables,
            drawings=page_drawings,
            style=_file("report.css"),
            script=script,
            # No other script runs, whatever a report contains.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            roots=roots,
            tree=list(_tree(roots)),
            activations=module_tree.total(root.activation_bytes for root in roots),
            weights=module_tree.total(root.weight_bytes for root in roots),
            scale_told=_scale_told(data["steps"]),
            scale_changes=len({(step["loss_id"], step["scale"]) for step in data["steps"]}) > len(losses),
            losses=losses,
            sources={(row["file"], row["line"]): row["source"] for row in [*data["lines"], *data["misaligned"]]},
        )
    )


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("ampatch.diagnostics.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_tables = (few, owner_of, short_place, shown_function, shown_module, page_tables.types)
    of_tree = (module_tree.ordered, module_tree.shares, module_tree.style_of)
    filters = (count, digits, exact, percent, seconds, size, spelled, *of_tables, *of_tree)
    found.filters |= {each.__name__: each for each in filters}
    return found


def _file(name: str) -> str:
    return (files("ampatch.diagnostics.report") / "templates" / name).read_text(encoding="utf-8")


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
    overflows = sum(bool(step["overflow"]) for step in steps)
    number = f"{count(overflows)} of {count(len(steps))} steps overflowed" if overflows else "no step overflowed"
    return f"{course_of_scale(steps, count)}; {number}."
