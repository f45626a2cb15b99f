"""The plan of the package as Markdown: its folders and modules in their order of imports, with what each is for.

The order stands in the tree of docs/design/architecture.md; all else is read from the sources. Must not import ampatch.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ampatch_docs import drawings

DOCS = Path(__file__).parents[1]
PACKAGE = DOCS.parent / "ampatch"


@cache
def modules() -> dict[str, ast.Module]:
    """Returns the sources of all modules, by dotted name: a folder's ``__init__.py`` has the name of the folder."""
    return {
        _dotted(path.relative_to(PACKAGE.parent)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def _dotted(path: Path) -> str:
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


@cache
def order() -> tuple[str, ...]:
    """Returns the dotted names in the tree, from the top down; a module imports only from those below it."""
    text = (DOCS / "design" / "architecture.md").read_text(encoding="utf-8")
    tree = re.search(r"^ampatch/\n((?:  .*\n)+)", text, re.MULTILINE)
    assert tree is not None
    found: list[str] = []
    folders: list[str] = []  # around a line
    for line in tree[1].splitlines():
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 - 1 :]
        found.append(_dotted(Path("ampatch", *folders, name)))
        folders.append(name)
    return tuple(found)


def rooms() -> list[str]:
    """Returns the folders and modules that stand directly in the package, in their order."""
    return [name for name in order() if name.count(".") < 2]


def inside(room: str) -> list[str]:
    """Returns the modules of a folder in their order: that of the tree, or else importers before what they import."""
    if "." not in room:
        return []
    listed = [name for name in order() if name.startswith(f"{room}.")]
    if listed:
        around = {name.rpartition(".")[0] for name in listed}
        return [each for name in listed for each in ([name] if name in around else _at(name))]
    return _sorted([name for name in modules() if name.startswith(f"{room}.")])


def _at(name: str) -> list[str]:
    return [*[name] * (name in modules()), *_sorted([each for each in modules() if each.startswith(f"{name}.")])]


def _sorted(names: Iterable[str]) -> list[str]:
    """Returns modules so that importers come first, as far as that is possible; else by name."""
    left, found = sorted(names, reverse=True), dict[str, None]()

    def add(name: str) -> None:
        if name in found or name in being_added:
            return
        being_added.add(name)
        for other in sorted(set(imports(name)) & set(left), reverse=True):
            add(other)
        found[name] = None

    being_added: set[str] = set()
    for name in left:
        add(name)
    return list(reversed(found))


def imports(module: str) -> Iterator[str]:
    """Yields the modules of the package that a module imports, inside functions and for type checkers too."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in modules():
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in modules() else str(node.module)


def room_of(module: str) -> str:
    """Returns the folder or module directly in the package that a module is, or is part of."""
    return module if module.count(".") < 2 else ".".join(module.split(".")[:2])


def folders() -> str:
    """Returns the drawing of all imports, and a table of the folders and modules directly in the package."""
    return f"<div>\n{drawing()}</div>\n\n{_table(rooms())}"


def sections() -> str:
    """Returns one section for each folder, with a table of its modules."""
    parts = [
        f"### `{_file(room)}`\n\n{_about(room)}\n\n{_table(inside(room), room)}" for room in rooms() if inside(room)
    ]
    return "\n\n".join(parts)


def _table(names: Iterable[str], room: str = "ampatch") -> str:
    cells = [(_file(name, room), _about(name).replace("|", r"\|")) for name in names]
    rows = [f"| `{file}` | {about} |" for file, about in cells]
    return "\n".join(["| module | what it is for |", "|---|---|", *rows])


def _file(name: str, room: str = "ampatch") -> str:
    """Returns a module's name as a file in a folder: ``session.py``, ``scaling/`` or ``amp/lists/_edits.py``."""
    if name == "ampatch":
        return "__init__.py"
    parts = name.split(".")
    path = "/".join(parts[room.count(".") + 1 :])
    return f"{path}/" if PACKAGE.joinpath(*parts[1:]).is_dir() else f"{path}.py"


def _about(name: str) -> str:
    """Returns the first sentence of a module's docstring as Markdown."""
    told = " ".join((ast.get_docstring(modules()[name]) or "").partition("\n\n")[0].split())
    sentence = re.match(r".*?[.!?](?=\s|$)", told)
    text = (sentence[0] if sentence else told).replace("``", "`")
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(each if each.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", each) for each in pieces)


def drawing() -> str:
    """Returns the imports between folders as SVG: each row imports the columns that are marked in it."""
    counts = Counter((room_of(name), room_of(other)) for name in modules() for other in imports(name))
    marks = {(_file(one), _file(other)): count for (one, other), count in counts.items() if one != other}
    return drawings.matrix("Which folders and modules import which", [_file(room) for room in rooms()], marks)
