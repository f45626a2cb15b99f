"""Few cases of many settings: a plugin for pytest, loaded by `conftest.py`.

A test may be parametrised over the product of several settings. What breaks one combination alone is rare: nearly every
fault shows at one value, or where two of them meet. `@pytest.mark.covering(2)` keeps as few cases as have every two
values meet, `covering(1)` as few as have every value, and marks the others slow. Whether the compiled libraries are
there is a setting too: those that are kept run with them and without, and of the others about half with them and half
without. Must never drop a case.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import pytest

_BY_TURNS = pytest.mark.with_libraries, pytest.mark.without_libraries


def covered(cases: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Returns which cases to keep, greedily: each covers the most combinations that none before it does.

    Args:
        cases: the values of each, one a setting.
        strength: how many values of different settings make a combination; 1 or 2, or more.
    """

    def combinations(case: Sequence[Hashable]) -> Iterator[tuple[tuple[int, Hashable], ...]]:
        settings = range(len(case))
        for chosen in itertools.combinations(settings, min(strength, len(case))):
            yield tuple((setting, case[setting]) for setting in chosen)

    of_each = [set(combinations(case)) for case in cases]
    missing = set().union(*of_each)
    kept = []
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(of_each[number] & missing), -number))
        missing -= of_each[best]
        kept.append(best)
    return sorted(kept)


def _told_apart(value: object) -> Hashable:
    """Returns what stands for a value, where 1, 1.0 and True are three."""
    try:
        hash(value)
    except TypeError:  # a list, or a tuple with one in it
        return id(value)
    return type(value), repr(value) if isinstance(value, tuple) else value


@pytest.hookimpl(tryfirst=True)  # before tests marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow what a test's `covering` leaves out, and with what it runs. On each device, cases are kept apart."""
    tests: dict[tuple[object, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") is not None:
            tests[item.nodeid.partition("[")[0], "gpu" in item.keywords].append(item)
    for same in tests.values():
        marker = same[0].get_closest_marker("covering")
        assert marker is not None
        cases = [[_told_apart(value) for value in item.callspec.params.values()] for item in same]
        kept = set(covered(cases, *marker.args))
        for number, item in enumerate(same):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
                # By a checksum, since every second one may have the same value of the last setting.
                item.add_marker(_BY_TURNS[hashlib.sha256(item.nodeid.encode()).digest()[0] % 2])
