"""Tests which cases of a test with many settings run in `make test` and in `make slow`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from covering import covered
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

pytest_plugins = ["pytester"]

MARKERS = "markers=slow\nbeyond_ci\nslow_on_cpu\ngpu\ncovering\nwith_libraries\nwithout_libraries"
OPTIONS = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Runs the test file of the test with some options."""
    return lambda *options: pytester.runpytest_inprocess(*OPTIONS, *options)


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def combinations(cases: list[tuple[int, ...]], strength: int) -> set[object]:
    return {
        tuple((place, case[place]) for place in places)
        for case in cases
        for places in itertools.combinations(range(len(case)), min(strength, len(case)))
    }


@given(sizes, st.integers(1, 3), st.data())
def test_every_combination_that_occurs_is_kept(sizes, strength, data):
    product = list(itertools.product(*map(range, sizes)))
    cases = [case for case in product if data.draw(st.booleans())] or product  # some products have holes
    numbers = covered(cases, strength)
    assert combinations([cases[number] for number in numbers], strength) == combinations(cases, strength)
    more = covered(cases, strength + 1, numbers)
    assert set(numbers) <= set(more)
    assert combinations([cases[number] for number in more], strength + 1) == combinations(cases, strength + 1)


def test_pairs_take_as_many_cases_as_the_two_largest_settings_make():
    cases = list(itertools.product(range(4), range(3), range(2), range(2)))
    assert len(covered(cases, 2)) == 12
    assert len(covered(cases, 1)) == 4
    assert len(covered(cases, 4)) == len(cases)


def test_cases_beyond_every_value_are_slow_and_devices_are_covered_apart(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        @pytest.mark.parametrize("values", [[1], [2]], ids=str)
        @pytest.mark.parametrize("flag", [1, True])
        @pytest.mark.covering(1)
        def test_some(flag, values, device): ...
    """)
    for device in ("gpu", "not gpu"):
        run("-m", device).assert_outcomes(passed=4, deselected=4)
        kept = run("-m", f"not slow and {device}")
        kept.assert_outcomes(passed=2, deselected=6)


def test_every_value_is_kept_without_the_mark_and_on_a_gpu_every_case(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        @pytest.mark.parametrize("level", ["O1", "O2", pytest.param("O3", marks=pytest.mark.slow)])
        @pytest.mark.parametrize("half", ["float16", "bfloat16"])
        def test_some(half, level, device): ...

        def test_alone(): ...

        @pytest.mark.slow_on_cpu
        @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        def test_slow(device): ...
    """)
    kept = run("-m", "not slow and not gpu", "-v")
    kept.assert_outcomes(passed=3, deselected=12)
    kept.stdout.no_fnmatch_line("*O3*")
    run("-m", "not slow and gpu").assert_outcomes(passed=5, deselected=10)


def test_slow_test_keeps_cases_with_every_value_only(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.slow
        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.parametrize("half", ["float16", "bfloat16"])
        def test_some(half, number): ...

        @pytest.mark.slow
        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.parametrize("half", ["float16", "bfloat16"])
        @pytest.mark.covering(2)
        def test_pairs(half, number): ...
    """)
    run("-k", "some").assert_outcomes(passed=4, deselected=8)
    run("-k", "pairs").assert_outcomes(passed=8, deselected=4)


def test_each_test_keeps_one_half_type_and_some_keep_the_other(pytester, run):
    pytester.makepyfile("""
        import pytest, torch

        types = [torch.float16, torch.bfloat16]
        half = pytest.mark.parametrize("half", types, ids=str)
        name = pytest.mark.parametrize("name", ["O2-float16", "O2-bfloat16"])
        options = [{"opt_level": "O2", "half_dtype": each} for each in types]
        options = pytest.mark.parametrize("options", options, ids=["float16", "bfloat16"])
        level = pytest.mark.parametrize("level", ["O1", "O2"])

        for number in range(12):
            exec(f"@half\\n@level\\ndef test_type_{number}(half, level): ...")
            exec(f"@options\\n@level\\ndef test_options_{number}(options, level): ...")
            exec(f"@name\\n@level\\ndef test_name_{number}(name, level): ...")
    """)
    for kind in ("type", "name", "options"):
        kept = run("-k", f"test_{kind}_", "-m", "not slow", "-v")
        kept.assert_outcomes(passed=24, deselected=120)  # each level once
        of_bfloat16 = kept.stdout.str().count("bfloat16")
        assert 4 < of_bfloat16 < 20
        assert of_bfloat16 % 2 == 0
        run("-k", f"test_{kind}_").assert_outcomes(passed=48, deselected=96)


def test_about_half_of_the_other_cases_run_with_the_libraries(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("flag", ["kept", "one", "two"])
        @pytest.mark.parametrize("number", range(100))
        @pytest.mark.covering(1)
        def test_some(number, flag): ...
    """)
    ran = 0
    for library in ("with_libraries", "without_libraries"):
        for flag in ("one", "two"):
            found = run("-m", f"slow and {library}", "-k", flag).parseoutcomes()
            assert 25 < found["passed"] < 75
            ran += found["passed"]
    assert ran == 198  # all but those that are kept to have these two values


def test_about_half_of_the_cases_are_repeated_without_the_libraries_and_at_least_one(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("number", range(100))
        def test_many(number): ...

        for number in range(20):
            exec(f"@pytest.mark.parametrize('flag', [0, 1])\\ndef test_two_{number}(flag): ...")

        def test_alone(): ...
    """)
    repeated = "not (slow or with_libraries)"
    assert 25 < run("-m", repeated, "-k", "many").parseoutcomes()["passed"] < 75
    assert 20 <= run("-m", repeated, "-k", "two").parseoutcomes()["passed"] < 40
    for number in range(20):
        assert run("-m", repeated, "-k", f"two_{number}[").parseoutcomes()["passed"] in (1, 2)
    run("-m", repeated, "-k", "alone").assert_outcomes(passed=1, deselected=140)


def test_ci_runs_one_case_of_a_test_that_is_slow_as_a_whole(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.slow
        @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
        def test_some(level, device): ...

        @pytest.mark.slow
        def test_alone(): ...
    """)
    for left_out, kept, others in (("beyond_ci", 5, 2), ("gpu or beyond_ci", 2, 5)):
        ended = run("-m", f"slow and not ({left_out})")
        ended.assert_outcomes(passed=kept, deselected=others)
