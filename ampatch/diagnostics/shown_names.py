"""Names of functions, modules and files, and numbers of things, as tables and sentences show them: short.

Owns these spellings. Must never be used for a name that a program reads back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LEFT_OUT = ("torch.nn.functional.", "torch.Tensor.", "torch.ops.", "torch.")


def shown_function(path: str) -> str:
    """Returns the path of a torch function without the namespaces that everybody knows."""
    prefix = next((prefix for prefix in _LEFT_OUT if path.startswith(prefix)), "")
    return path.removeprefix(prefix)


def shown_module(name: str | None, otherwise: str = "") -> str:
    """Returns the name of a module, in words for the outermost one.

    Args:
        name: its name in the model; "" for the model itself, None outside of one.
        otherwise: the text for None.
    """
    return otherwise if name is None else name or "(the model)"


def shown_path(file: str) -> str:
    """Returns a path as short as it can be: relative to the current folder, or to one that Python imports from.

    The code of a cell in a notebook is "In[3]", by the number of its run.
    """
    cell = _cell(file)
    if cell is not None:
        return cell
    path, cwd = Path(file), Path.cwd()
    if path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    folders = (folder for folder in map(Path, sys.path) if folder.is_absolute() and path.is_relative_to(folder))
    return min((str(path.relative_to(folder)) for folder in folders), key=len, default=file)


def shown_place(file: str | None, line: int | None) -> str:
    """Returns a line of a file; "" for no file."""
    return "" if file is None else f"{shown_path(file)}:{line}"


def shown_call(path: str, operator: str) -> str:
    """Returns a torch function, with the name of the operator that ran in it if it has another one."""
    name = shown_function(path)
    return name if operator in ("", *path.split(".")) else f"{name} ({operator})"


def short_place(file: str | None, line: int | None) -> str:
    """Returns a line of a file without its folders; "" for no file."""
    return "" if file is None else f"{Path(shown_path(file)).name}:{line}"


def module_and_line(row: Any) -> str:
    """Returns the cell of a table for a call that has a module, a file and a line: the line is below the module."""
    return "\n".join(filter(None, (shown_module(row.module), short_place(row.file, row.line))))


def few(names: Sequence[str], most: int) -> str:
    """Returns the first of several names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, one: str, plural: str = "s") -> str:
    """Returns a number of things in words, such as "1 call" or "1,024 calls".

    Args:
        number: the number.
        one: the name of one thing.
        plural: what the name of several ends with.
    """
    return f"{number:,} {one}{'' if number == 1 else plural}"


def _cell(file: str) -> str | None:
    """Returns the name of the notebook's cell whose code IPython compiled as this file; None for all other files."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    # ("Cell", "In[3]"); None for a file that is no cell.
    found = None if named is None else named(file)
    return None if found is None else str(found[1])
