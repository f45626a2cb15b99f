"""Few cases of many settings: a plugin for pytest, loaded by `conftest.py`.

A test may be parametrised over the product of several settings. What breaks one combination alone is rare: nearly every
fault shows at one value, or where two of them meet. So `make test` runs as few cases as have every value, and `make
slow` those that are missing for every two values to meet. With `@pytest.mark.covering(2)` it is every two values, and
then every three. Whatever is beyond that runs nowhere. Of a test that is slow as a whole, as few cases run as have
every value, or with the mark every two; and CI runs one of these cases. The two half types are one value in `make
test`, where about half of the tests run in either: the code tells them apart in a few lines only.

Whether the compiled libraries are there is a setting too. `make test` runs its cases with them. CI repeats about half
of the cases of each test without them, and at least one; `make beyond-ci` repeats the others. Of the cases that `make
slow` adds, about half run with them and half without. Cases that need a GPU are all kept, unless the test has the mark.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import is_dataclass

import pytest
import torch

# In the text of a type, a name, a mapping of options, or a dataclass.
_HALF_TYPE = re.compile(r"\bb?float16\b")
_BY_TURNS = pytest.mark.with_libraries, pytest.mark.without_libraries


def covered(cases: Sequence[Sequence[Hashable]], strength: int, kept: Sequence[int] = ()) -> list[int]:
    """Returns which cases to keep, greedily: each covers the most combinations that none before it does.

    Args:
        cases: the values of each, one a setting.
        strength: how many values of different settings make a combination; 1 or 2, or more.
        kept: cases that are kept in any event.
    """

    def combinations(case: Sequence[Hashable]) -> Iterator[tuple[tuple[int, Hashable], ...]]:
        settings = range(len(case))
        for chosen in itertools.combinations(settings, min(strength, len(case))):
            yield tuple((setting, case[setting]) for setting in chosen)

    of_each = [set(combinations(case)) for case in cases]
    chosen = list(kept)
    missing = set().union(*of_each).difference(*(of_each[number] for number in kept))
    # What a case adds only ever shrinks: the first whose number is up to date adds most.
    most = [(-len(of_each[number]), number) for number in range(len(cases))]
    heapq.heapify(most)
    while missing:
        adds, number = most[0]
        now = -len(of_each[number] & missing)
        if now != adds:
            heapq.heapreplace(most, (now, number))
            continue
        heapq.heappop(most)
        missing -= of_each[number]
        chosen.append(number)
    return sorted(chosen)


def _told_apart(value: object) -> Hashable:
    """Returns what stands for a value, where 1, 1.0 and True are three."""
    try:
        hash(value)
    except TypeError:  # a list, or a tuple with one in it
        return id(value)
    return type(value), repr(value) if isinstance(value, tuple) else value


@pytest.hookimpl(tryfirst=True)  # before tests marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow what `make test` does without, and drops what is beyond that. On each device, cases are kept apart."""
    tests: dict[tuple[str, bool, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        on_gpu, marker = "gpu" in item.keywords, item.get_closest_marker("covering")
        if "slow_on_cpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.slow)
        if hasattr(item, "callspec") and (marker is not None or not on_gpu):
            tests[_name(item).partition("[")[0], on_gpu, "slow" in item.keywords].append(item)
    beyond = set()
    for (_, on_gpu, is_slow), same in tests.items():
        marker = same[0].get_closest_marker("covering")
        strength = 1 if marker is None else marker.args[0]
        cases = [[_told_apart(value) for value in item.callspec.params.values()] for item in same]
        if is_slow:
            kept = covered(cases, strength)
            beyond |= {same[number] for number in set(range(len(same))).difference(kept)}
            if not on_gpu:
                del kept[_checksum(_name(same[0]).partition("[")[0]) % len(kept)]
                for number in kept:
                    same[number].add_marker(pytest.mark.beyond_ci)
            continue
        kept = covered(cases, strength) if on_gpu or strength > 1 else _of_one_half_type(same)
        for number in [] if on_gpu else _not_repeated(same, kept):
            same[number].add_marker(pytest.mark.with_libraries)
        beyond |= {same[number] for number in set(range(len(same))).difference(covered(cases, strength + 1, kept))}
        for number in set(range(len(same))).difference(kept):
            item = same[number]
            item.add_marker(pytest.mark.slow)
            # By a checksum, since every second one may have the same value of the last setting.
            item.add_marker(_BY_TURNS[_checksum(_name(item)) % 2])
    items[:] = [item for item in items if item not in beyond]


def _name(item: pytest.Item) -> str:
    """Returns the id of a test without its folder, so that the same cases are kept wherever its file stands."""
    return f"tests/{item.path.name}::{item.nodeid.partition('::')[2]}"


def _not_repeated(same: Sequence[pytest.Item], kept: Sequence[int]) -> list[int]:
    """Returns the cases that CI does not repeat without the compiled libraries: about half, by a checksum."""
    odd = [number for number in kept if _checksum(_name(same[number])) % 2]
    return odd[1:] if len(odd) == len(kept) else odd


def _of_one_half_type(same: Sequence[pytest.Item]) -> list[int]:
    """Returns the cases of a test that have every value, of either half type one: which, differs from test to test."""
    other = ("float16", "bfloat16")[_checksum(_name(same[0]).partition("[")[0]) % 2]
    cases = [list(item.callspec.params.values()) for item in same]
    order = sorted(range(len(same)), key=lambda number: any(other in _half_types(value) for value in cases[number]))
    values = [[_but_for_half_types(value) for value in cases[number]] for number in order]
    return [order[number] for number in covered(values, 1)]


def _text(value: object) -> str:
    return repr(value) if isinstance(value, str | dict | torch.dtype) or is_dataclass(value) else ""


def _half_types(value: object) -> list[str]:
    return _HALF_TYPE.findall(_text(value))


def _but_for_half_types(value: object) -> Hashable:
    return _HALF_TYPE.sub("half", _text(value)) if _half_types(value) else _told_apart(value)


def _checksum(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0]
