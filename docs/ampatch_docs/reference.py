"""Adapts docstrings and signatures to Sphinx, for the pages of the reference.

Docstrings are written for readers of the code: Google's sections, names in single backticks, types in signatures only.
Must only rewrite what Sphinx shows; it never changes a function or a class.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

from ampatch import amp

if TYPE_CHECKING:
    from sphinx.application import Sphinx

#: Sections whose text napoleon would read as a type as far as its first colon. The signature has the type.
_FIELDS = {"Returns:": ":returns:", "Yields:": ":yields:"}

# Names as users write them.
_NAME = re.compile(r"(`{1,2})amp\.(\w+)\1(?!`)")
_LITERAL = re.compile(r"(``.*?``|`.*?`)")
# A bar opens a substitution in reStructuredText; here it is a norm.
_BAR = re.compile(r"\|")


def docstring_lines(lines: list[str]) -> list[str]:
    """Returns a docstring's lines as reStructuredText: results as fields, links, and bars outside of code escaped."""
    return [_without_bars(_NAME.sub(_link, line)) for line in _with_fields(lines)]


def _with_fields(lines: list[str]) -> Iterator[str]:
    inside = None  # the field whose lines follow
    for line in lines:
        if line in _FIELDS:
            inside = _FIELDS[line]
        elif inside and line.startswith("    "):
            yield f"{inside} {line.strip()}" if inside != " " else line
            inside = " "
        else:
            inside = None
            yield line


def _link(name: re.Match[str]) -> str:
    return f":py:obj:`amp.{name[2]} <ampatch.amp.{name[2]}>`" if name[2] in amp.__all__ else name[0]


def _without_bars(line: str) -> str:
    parts = _LITERAL.split(line)
    return "".join(part if place % 2 else _BAR.sub(r"\|", part) for place, part in enumerate(parts))


def readable_types(text: str | None) -> str | None:
    """Returns a signature or an annotation without the paths of modules that a user does not import.

    Type variables lose their underscore: ``ampatch.public.setting_up._Models`` becomes ``Models``.
    """
    return text and re.sub(r"\b(?:[a-z_]\w*\.)*_?([A-Z]\w*)", r"\1", text)


def forget_overloads(module: str) -> None:
    """Makes Sphinx show one signature for each function of a module; its overloads are for type checkers."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    analyzer.overloads.clear()


def _docstring(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = docstring_lines(lines)


def _signature(
    _app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    return readable_types(signature), readable_types(result)


def _dashes(_app: Sphinx, doctree: nodes.document) -> None:
    """Replaces Sphinx's two dashes between a parameter and its meaning; those of options such as --help stay."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- "):
            text.parent.replace(text, nodes.Text(f": {text.removeprefix(' -- ')}"))


def import_timm_adapter() -> None:
    """Imports the adapter for timm, with an empty module in timm's place if it is not installed.

    The environment of the tests does not have timm. The docstrings need nothing of it, and other packages must not see
    the empty module.
    """
    if find_spec("timm") is None:
        timm, utilities = ModuleType("timm"), ModuleType("timm.utils")
        timm.__version__ = "1.0"  # type: ignore[attr-defined]
        utilities.dispatch_clip_grad = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": timm, "timm.utils": utilities})
        try:
            importlib.import_module("ampatch.integrations.timm")
        finally:
            del sys.modules["timm"], sys.modules["timm.utils"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx: takes part in reading docstrings, before napoleon, and signatures."""
    import_timm_adapter()
    for name in ("setting_up", "casts"):
        forget_overloads(f"ampatch.public.{name}")
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-read", _dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
