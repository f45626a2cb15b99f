"""Which cases of a test with many settings are kept, for `make test` and for `make slow`."""

from __future__ import annotations

import itertools

import pytest
from covering import covered
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

pytest_plugins = ["pytester"]

MARKERS = "markers=slow\nbeyond_ci\nslow_on_cpu\ngpu\ncovering\nwith_libraries\nwithout_libraries"

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
    numbers = covered(cases, strength)
    assert combinations([cases[number] for number in numbers], strength) == combinations(cases, strength)
    more = covered(cases, strength + 1, numbers)
    assert set(numbers) <= set(more)
    assert combinations([cases[number] for number in more], strength + 1) == combinations(cases, strength + 1)


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


def test_without_the_mark_every_value_is_kept_bar_what_is_slow_and_on_a_gpu_every_case(
    pytester: pytest.Pytester,
) -> None:
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
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    kept = pytester.runpytest_inprocess(*options, "-m", "not slow and not gpu", "-v")
    kept.assert_outcomes(passed=3, deselected=12)
    kept.stdout.no_fnmatch_line("*O3*")
    pytester.runpytest_inprocess(*options, "-m", "not slow and gpu").assert_outcomes(passed=5, deselected=10)


def test_of_a_slow_test_every_value_is_kept_and_no_more(pytester: pytest.Pytester) -> None:
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
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    pytester.runpytest_inprocess(*options, "-k", "some").assert_outcomes(passed=4, deselected=8)
    pytester.runpytest_inprocess(*options, "-k", "pairs").assert_outcomes(passed=8, deselected=4)


def test_of_the_half_types_a_test_has_one_and_the_next_may_have_the_other(pytester: pytest.Pytester) -> None:
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
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    for kind in ("type", "name", "options"):
        kept = pytester.runpytest_inprocess(*options, "-k", f"test_{kind}_", "-m", "not slow", "-v")
        kept.assert_outcomes(passed=24, deselected=120)  # each level once
        of_bfloat16 = kept.stdout.str().count("bfloat16")
        assert 4 < of_bfloat16 < 20
        assert of_bfloat16 % 2 == 0
        pytester.runpytest_inprocess(*options, "-k", f"test_{kind}_").assert_outcomes(passed=48, deselected=96)


def test_more_values_than_two_need_not_meet(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        settings = [pytest.mark.parametrize(name, range(4)) for name in ("one", "two", "three", "four")]

        @settings[0]
        @settings[1]
        @settings[2]
        def test_some(one, two, three): ...

        @settings[0]
        @settings[1]
        @settings[2]
        @settings[3]
        @pytest.mark.covering(2)
        def test_more(one, two, three, four): ...
    """)
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    for test, quick, slow in (("test_some", 4, 16), ("test_more", 16, 64)):
        for selected, least in ((["-m", "not slow"], quick), ([], slow)):
            found = pytester.runpytest_inprocess(*options, "-k", test, *selected).parseoutcomes()["passed"]
            assert least <= found < 1.7 * least


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


def test_ci_runs_one_case_of_a_test_that_is_slow_as_a_whole(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.slow
        @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
        def test_some(level, device): ...

        @pytest.mark.slow
        def test_alone(): ...
    """)
    options = "-p", "covering", "-p", "no:cacheprovider", "-o", MARKERS
    for left_out, kept, others in (("beyond_ci", 5, 2), ("gpu or beyond_ci", 2, 5)):
        run = pytester.runpytest_inprocess(*options, "-m", f"slow and not ({left_out})")
        run.assert_outcomes(passed=kept, deselected=others)
