"""That imports run one way: in the order of the tree in docs/design/architecture.md, from the top down."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ampatch"


def rooms() -> list[str]:
    """Returns what stands in the tree, from the top down: `ampatch.amp`, `ampatch.native`, `ampatch.native.kernels`."""
    document = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    tree = re.search(r"^ampatch/\n((?:  .*\n)+)", document, re.MULTILINE)
    assert tree is not None
    found: list[str] = []
    folders: list[str] = []  # around a line
    for line in tree[1].splitlines():
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 - 1 :]
        found.append(dotted(Path("ampatch", *folders, name)))
        folders.append(name)
    return found


def dotted(path: Path) -> str:
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


def room_of(module: str, order: list[str]) -> str:
    """The room that a module belongs to: the longest that it is, or is part of."""
    return max((room for room in order if f"{module}.".startswith(f"{room}.")), key=len)


MODULES = {dotted(path.relative_to(ROOT)): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """The modules of the package that a module imports anywhere in it, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "ampatch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ampatch":
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else node.module


def test_every_module_stands_in_the_tree_once_and_nothing_else_does() -> None:
    order = rooms()
    detailed = {room.rpartition(".")[0] for room in order if room.count(".") >= 2}
    found = {module if module.rpartition(".")[0] in detailed else room_of(module, order) for module in MODULES}
    assert sorted(order) == sorted(found | detailed)


def test_every_module_imports_only_from_those_below_it() -> None:
    order = rooms()
    upwards = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(module)
        if order.index(room_of(other, order)) < order.index(room_of(module, order))
    ]
    assert upwards == []


def test_an_import_that_runs_upwards_would_be_seen() -> None:
    order = rooms()
    assert (
        order.index("ampatch.scaling") < order.index("ampatch.scaling.optimizer_step") < order.index("ampatch.errors")
    )
    assert "ampatch.errors" in set(imports("ampatch.cast_lists.paths"))
    assert room_of("ampatch.demo.training", order) == "ampatch.demo"


def test_files_that_contributors_are_sent_to_are_there() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:ampatch|csrc|docs|lists|tests)/[\w/.-]+)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_of_the_diagnostics_only_what_they_return_is_imported_before_they_are_used(fresh):
    code = "import sys, ampatch.apex.amp; print(*(name for name in sys.modules if 'ampatch.diagnostics.' in name))"
    names = {name.removeprefix("ampatch.diagnostics.") for name in fresh.run(code).stdout.split()}
    folders = {name.partition(".")[0] for name in names if "." in name}
    assert names - folders == {
        *("compare.result", "explain.result", "overflow.trace", "preflight.result", "replay.result", "tune.result"),
        *("what_if.given", "what_if.result", "report.numbers", "report.report", "trial_steps.levels"),
        *("json_files", "shown_names", "tables"),
    }


# Limits. No class has more methods. A module with more imports is listed with their number, which must not grow.

MOST_METHODS, MOST_IMPORTS = 20, 15
MODULES_WITH_MANY_IMPORTS = {
    "ampatch.integrations.trainer_session": 17,
    "ampatch.interfaces.grad_scaler": 16,
    "ampatch.parts.casts": 26,
    "ampatch.patching.function_patches": 18,
    "ampatch.scaling.optimizer_step": 19,
    "ampatch.session": 25,
}
#: Which use everything, and are used by nothing.
ABOVE_THE_CORE = ("ampatch.amp", "ampatch.public", "ampatch.cli", "ampatch.demo", "ampatch.diagnostics")


def methods() -> dict[str, int]:
    """The number of methods of each class that has too many."""
    counts = {
        f"{module}.{node.name}": sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    return {name: count for name, count in counts.items() if count > MOST_METHODS}


def imported() -> dict[str, int]:
    """The number of modules that each module of the core imports, if it is too high."""
    core = (module for module in MODULES if not f"{module}.".startswith(tuple(f"{each}." for each in ABOVE_THE_CORE)))
    counts = {module: len(set(imports(module))) for module in core}
    return {name: count for name, count in counts.items() if count > MOST_IMPORTS}


@pytest.mark.parametrize(
    ("found", "known"), [(methods, {}), (imported, MODULES_WITH_MANY_IMPORTS)], ids=["methods", "imports"]
)
def test_what_is_too_large_is_known_and_does_not_grow(found, known) -> None:
    assert {name: count for name, count in found().items() if count > known.get(name, 0)} == {}


@pytest.mark.slow
def test_the_page_has_the_crossings_of_a_step_of_today() -> None:
    """`benchmarks/crossings.py`, with calls in Python and torch's kernels."""
    chosen = {"AMPATCH_CALLS": "python", "AMPATCH_KERNELS": "torch"}
    command = [sys.executable, str(ROOT / "benchmarks" / "crossings.py")]
    run = subprocess.run(command, env={**os.environ, **chosen}, capture_output=True, text=True, check=True)
    counted = re.findall(r"^(O\d)  (model\(x\)|block and step) +(\d+) modules, +(\d+) calls", run.stdout, re.MULTILINE)
    wording = {"model(x)": "`model(x)`", "block and step": "the block and `optimizer.step()`"}
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    assert len(counted) == 4
    assert [
        row for level, what, *row in counted if f"| {wording[what]} at {level} | {' | '.join(row)} |" not in page
    ] == []
