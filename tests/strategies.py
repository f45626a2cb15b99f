"""What Hypothesis draws from, for the tests of every module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import strategies as st

LISTS = ("whitelist", "blacklist", "promote", "banned")
HALF_NAMES = ("float16", "bfloat16")

#: Functions, each under all of its names: listed with and without aliases, for one half type only, with options and
#: with a condition; banned; and in no list.
FUNCTIONS = (
    ("torch.conv2d", "torch.nn.functional.conv2d"),
    ("torch.lstm", "torch._VF.lstm"),
    ("torch.bilinear", "torch.nn.functional.bilinear"),
    ("torch.mm",),
    ("torch.Tensor.mm",),
    ("torch.exp",),
    ("torch.sum",),
    ("torch.nn.functional.interpolate",),
    ("torch.nn.functional.binary_cross_entropy",),
    ("torch.lerp",),
    ("torch.relu",),
    ("torch.Tensor.sigmoid",),
)


@dataclass(frozen=True)
class Move:
    """That an overlay puts a function into a list (or, as "unlisted", into none) for some half types.

    Attributes:
        names: all names of the function.
        spelling: the one that the overlay has.
        list_name: where it goes.
        half_names: the half types for which it does.
    """

    names: tuple[str, ...]
    spelling: str
    list_name: str
    half_names: tuple[str, ...]


@st.composite
def moves(draw: st.DrawFn) -> tuple[Move, ...]:
    """What one overlay does: no function goes to two lists in the same half type."""
    found = []
    for names in draw(st.lists(st.sampled_from(FUNCTIONS), max_size=5, unique=True)):
        targets = draw(st.dictionaries(st.sampled_from(HALF_NAMES), st.sampled_from((*LISTS, "unlisted")), min_size=1))
        for target in dict.fromkeys(targets.values()):
            half_names = tuple(half for half in HALF_NAMES if targets.get(half) == target)
            found.append(Move(names, draw(st.sampled_from(names)), target, half_names))
    return tuple(found)


def overlay(moved: Iterable[Move]) -> dict[str, dict[str, list[object]]]:
    """Moves as `amp.initialize(cast_lists=...)` takes them."""
    mapping: dict[str, dict[str, list[object]]] = {}
    for move in moved:
        namespace, _, name = move.spelling.rpartition(".")
        entry = {"name": name, "dtypes": list(move.half_names)} if len(move.half_names) == 1 else name
        mapping.setdefault(move.list_name, {}).setdefault(namespace, []).append(entry)
    return mapping
