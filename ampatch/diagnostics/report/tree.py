"""The modules of a report as a tree: each with what it and its submodules ran and hold.

Owns the sums. Must never leave out a module of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Types in the order in which bars show them: half ones first. All others follow, by name.
_ORDER = ("float16", "bfloat16", "float32", "float64")
_SUMMED = ("operators", "activation_bytes", "weight_bytes")


@dataclass(slots=True)
class Module:
    """A module of a report, with its submodules.

    Attributes:
        row: its entry in the report.
        number: position in the report, from 0.
        children: its submodules.
        operators: operators by type, those of submodules included.
        activation_bytes: bytes of activations by type, those of submodules included.
        weight_bytes: bytes of weights by type, those of submodules included.
        saved_bytes: bytes that half types saved, in submodules too.
    """

    row: Mapping[str, Any]
    number: int
    children: list[Module] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    activation_bytes: dict[str, int] = field(default_factory=dict)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one type has of a sum.

    Attributes:
        type: name of the type.
        value: its part of the sum.
        share: the same as a share, 0 to 1.
    """

    type: str
    value: int
    share: float


def tree(rows: Sequence[Mapping[str, Any]]) -> list[Module]:
    """Returns the outermost modules, those with most activations first; numbered ones in the order of their numbers."""
    modules = [Module(row, number) for number, row in enumerate(rows)]
    by_name = {module.row["name"]: module for module in modules}
    roots: list[Module] = []
    for module in modules:
        parent = by_name.get(module.row["parent"])
        (roots if parent is None else parent.children).append(module)
    for module, _ in reversed(list(walk(roots))):
        for name in _SUMMED:
            setattr(module, name, total([module.row[name], *(getattr(each, name) for each in module.children)]))
        module.saved_bytes = module.row["saved_bytes"] + sum(each.saved_bytes for each in module.children)
        module.children.sort(key=_rank)
    return sorted(roots, key=_rank)


def _rank(module: Module) -> tuple[int, int, int]:
    own = module.row["name"].rpartition(".")[2]
    number = int(own) if own.isdecimal() else -1
    return number, -sum(module.activation_bytes.values()), module.number


def walk(roots: Iterable[Module]) -> Iterator[tuple[Module, int]]:
    """Yields all modules with their depths, each before its submodules."""
    waiting = [(root, 0) for root in roots][::-1]
    while waiting:
        module, depth = waiting.pop()
        yield module, depth
        waiting += [(child, depth + 1) for child in module.children][::-1]


def total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sum of numbers by type."""
    summed = Counter[str]()
    for part in parts:
        summed.update(part)
    return dict(summed)


def shares(by_type: Mapping[str, int]) -> list[Share]:
    """Returns the shares of types in their sum, in the order in which bars show them; none of types without any."""
    whole = sum(by_type.values())
    return [Share(name, by_type[name], by_type[name] / whole) for name in ordered(by_type) if by_type[name]]


def ordered(types: Iterable[str]) -> list[str]:
    """Returns types in the order in which bars show them."""
    return sorted(types, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def style_of(name: str) -> str:
    """Returns the class that gives a type its colour on the page."""
    return name if name in _ORDER else "other"
