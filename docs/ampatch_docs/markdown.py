"""Prepares pages for the site: fills in text that is made from the code, and leads links out of docs/ to pages.

The files themselves stay as they are, so that they read well in the repository too. Must only rewrite text that Sphinx
has read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ampatch_docs import command_line, errors, examples, list_tables, modules

if TYPE_CHECKING:
    from sphinx.application import Sphinx

#: What a comment such as ``<!-- generated: examples -->`` stands for on the site.
GENERATED: dict[str, Callable[[], str]] = {
    "command-line": command_line.sections,
    "error-classes": errors.classes,
    "errors": errors.text,
    "examples": examples.sections,
    "folders": modules.folders,
    "modules": modules.sections,
    "lists": list_tables.sections,
    "reviewed": list_tables.reviewed,
}

# For the test that runs the code of the pages: see docs/design/documentation.md.
_FOR_THE_TEST = re.compile(r"^ *<!-- (?:skip|clear-namespace|invisible-code-block)\b.*?-->\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)

#: Targets of links, each with what stands for it on the site. Sphinx checks that the page has the heading.
_TARGETS = (
    (re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)"), r"](/examples.md#\1py)"),
    (re.compile(r"\]\((?:\.\./)+examples/?\)"), "](/examples.md)"),
)


# A drawing on a line of its own. On the site its SVG is part of the page, so that it follows the page's colours.
_DRAWING = re.compile(r"^!\[[^\]]*\]\((?:\.\./)?images/(\w+)\.svg\)$", re.MULTILINE)
DOCS = Path(__file__).parents[1]


def _drawn(link: re.Match[str]) -> str:
    svg = (DOCS / "images" / f"{link[1]}.svg").read_text(encoding="utf-8")
    return f"<div>\n{svg}</div>" if 'class="drawing"' in svg else link[0]


def for_the_site(text: str) -> str:
    """Returns a page's Markdown as the site has it.

    Raises:
        KeyError: if a comment names no text of `GENERATED`.
    """
    text = _FOR_THE_TEST.sub("", text)
    for pattern, replacement in _TARGETS:
        text = pattern.sub(replacement, text)
    text = _DRAWING.sub(_drawn, text)
    return _COMMENT.sub(lambda comment: GENERATED[comment[1]](), text)


def _prepare(app: Sphinx, _name: str, source: list[str]) -> None:
    if _COMMENT.search(source[0]) or _DRAWING.search(source[0]):
        app.env.note_reread()  # the page changes with the code and the drawings that it is made from
    source[0] = for_the_site(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx: has every page prepared before it is parsed."""
    app.connect("source-read", _prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
