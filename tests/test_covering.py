"""Which cases of a test with many settings are kept for every run, and that none is lost."""

from __future__ import annotations

import itertools

import pytest
from covering import covered
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

pytest_plugins = ["pytester"]

MARKERS = "markers=slow\ngpu\ncovering\nwith_libraries\nwithout_libraries"

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def combinations(cases: list[tuple[int, ...]], strength: int) -> set[object]:
    return {
        tuple((place, case[place]) for place in places)
        for case in cases
        for places in itertools.combinations(range(len(case)), min(strength, len(case)))
    }


@given(sizes, st.integers(1, 3), st.data())
def test_every_combination_that_occurs_is_kept(sizes: list[int], strength: int, data: st.DataObject) -> None:
    product = list(itertools.product(*map(range, sizes)))
    cases = [case for case in product if data.draw(st.booleans())] or product  # some products have holes
    kept = [cases[number] for number in covered(cases, strength)]
    assert combinations(kept, strength) == combinations(cases, strength)


def test_pairs_take_as_many_cases_as_the_two_largest_settings_make() -> None:
    cases = list(itertools.product(range(4), range(3), range(2), range(2)))
    assert len(covered(cases, 2)) == 12
    assert len(covered(cases, 1)) == 4
    assert len(covered(cases, 4)) == len(cases)


def test_the_other_cases_are_slow_and_each_device_has_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        @pytest.mark.parametrize("values", [[1], [2]], ids=str)
        @pytest.mark.parametrize("flag", [1, True])
        @pytest.mark.covering(1)
        def test_some(flag, values, device): ...
    """)
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    for device in ("gpu", "not gpu"):
        pytester.runpytest_inprocess(*options, "-m", device).assert_outcomes(passed=4, deselected=4)
        kept = pytester.runpytest_inprocess(*options, "-m", f"not slow and {device}")
        kept.assert_outcomes(passed=2, deselected=6)


def test_the_other_cases_run_with_the_libraries_or_without_about_half_of_each_value(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("flag", ["kept", "one", "two"])
        @pytest.mark.parametrize("number", range(100))
        @pytest.mark.covering(1)
        def test_some(number, flag): ...
    """)
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    ran = 0
    for library in ("with_libraries", "without_libraries"):
        for flag in ("one", "two"):
            found = pytester.runpytest_inprocess(*options, "-m", f"slow and {library}", "-k", flag).parseoutcomes()
            assert 25 < found["passed"] < 75
            ran += found["passed"]
    assert ran == 198  # all but those that are kept to have these two values
