"""The scripts in examples/ as Markdown for the page of examples. Must only read them; it never imports or runs one."""

from __future__ import annotations

import ast
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def sections() -> str:
    """Returns one section for each script, in the order of their names: its first sentence, then its code."""
    return "\n\n".join(_section(script) for script in sorted(EXAMPLES.glob("*.py")))


def _section(script: Path) -> str:
    code = script.read_text(encoding="utf-8")
    summary = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
    return f"## {script.name}\n\n{summary}\n\n````python\n{code}````"
