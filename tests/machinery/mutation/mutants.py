"""Mutants: a function of the core with one operator changed.

A mutant is named by its function, the operator and a number (`LossScaler.update:compare:2`), not by file or line, so
that it is the same one after its function has moved. Functions that share a name have no mutants.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Beside the core, and tested by running them: commands, the demo, what stands in for Apex, compilers of C++.
_OUTSIDE = {
    "__main__",
    "apex",
    "cli",
    "commands",
    "cuda_on_cpu",
    "demo",
    "doctor",
    "extension_build",
    "list_reports",
    "run",
    "startup",
    "sync_batch_norm",
}

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change to one function.

    Attributes:
        name: function, operator and number.
        function: the qualified name of the outermost function.
        path: of the file that has it.
        line: of the change.
    """

    name: str
    function: str
    path: Path
    line: int

    def source(self) -> str:
        """Returns the whole file, changed."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        for function, node in _functions(tree):
            for name, _, change in _changes_of(function, node):
                if name == self.name:
                    change()
                    return ast.unparse(ast.fix_missing_locations(tree))
        raise LookupError(f"{self.path} has no {self.name}")


def is_core(module: str) -> bool:
    """Returns whether a module, by its dotted name, is part of the core."""
    parts = module.split(".")
    return parts[0] == "ampatch" and len(parts) > 1 and parts[1] not in _OUTSIDE


def instrument(source: str) -> str:
    """Returns a module's source in which every function says `_entered_(its name)` when it begins."""
    tree = ast.parse(source)
    for name, function in _functions(tree):
        note = ast.parse(f"_entered_({name!r})").body[0]
        at = 1 if ast.get_docstring(function, clean=False) is not None else 0
        function.body.insert(at, ast.copy_location(note, function.body[0]))
    return ast.unparse(ast.fix_missing_locations(tree))


def all_mutants(root: Path) -> dict[str, Mutant]:
    """Returns every mutant of the core of the checkout at a path, by name."""
    found: dict[str, Mutant] = {}
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((root / "ampatch").rglob("*.py"))
        if is_core(".".join(path.relative_to(root).with_suffix("").parts))
    }
    named = Counter(name for tree in trees.values() for name, _ in _functions(tree))
    for path, tree in trees.items():
        for function, node in _functions(tree):
            if named[function] == 1:
                changes = _changes_of(function, node)
                found |= {name: Mutant(name, function, path, changed.lineno) for name, changed, _ in changes}
    return found


def drawn(names: list[str], count: int, seed: int) -> list[str]:
    """Returns some of the names, at most one a function, the same ones whatever else there is."""
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest()):
        chosen.setdefault(name.partition(":")[0], name)
    return list(chosen.values())[:count]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields functions at the top and methods, by qualified name; nested functions belong to their outermost."""

    def within(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")

    return within(tree.body, "")


def _changes_of(name: str, function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | ast.stmt, Callable[[], None]]]:
    """Yields the name of each mutant of a function, what is changed in it, and what changes that in place."""
    numbers: Counter[str] = Counter()
    for statement in function.body:
        for node in ast.walk(statement):
            for operator, change in _changes(node):
                numbers[operator] += 1
                yield f"{name}:{operator}:{numbers[operator]}", node, change


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the operators that apply to a node, each with what applies it by setting the node's fields."""
    match node:
        case ast.Compare(ops=[only]) if type(only) in _COMPARE:
            yield "compare", lambda: setattr(node, "ops", [_COMPARE[type(only)]()])
        case ast.BoolOp():
            yield "boolean", lambda: setattr(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC:
            yield "arithmetic", lambda: setattr(node, "op", _ARITHMETIC[type(node.op)]())
        case ast.If() | ast.IfExp() | ast.While():
            yield "condition", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant(value=bool()):
            yield "constant", lambda: setattr(node, "value", not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", lambda: setattr(node, "value", node.value + 1)
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "return", lambda: setattr(node, "value", ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield "statement", lambda: setattr(node, "value", ast.Constant(None))
        case _:
            return
