"""Tests what a run prints of itself: the slowest tests, those that took too long, and those that did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

pytest_plugins = ["pytester"]

TESTS = """
    import time
    import pytest

    def test_quick(): ...

    def test_busy():
        until = time.process_time() + 0.2
        while time.process_time() < until: ...

    @pytest.mark.slow
    def test_busy_and_slow():
        test_busy()

    @pytest.mark.gpu
    def test_on_a_gpu(): ...

    def test_rows(subtests):
        for row in range(2):
            with subtests.test(str(row)):
                test_busy()
"""
OPTIONS = "-p", "accounting", "-p", "no:cacheprovider", "-o", "markers=slow\ngpu"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("accounting._slowness", lambda: 1.0)
    pytester.makepyfile(TESTS)
    return pytester


def test_run_fails_and_names_a_test_beyond_the_limit(suite):
    ended = suite.runpytest_inprocess(*OPTIONS, "--processor-limit", "0.1", "-k", "not rows")
    ended.assert_outcomes(passed=3, errors=1, deselected=1)
    assert ended.ret == pytest.ExitCode.TESTS_FAILED
    ended.stdout.re_match_lines([r"it took 0\.\d s of processor time, and 0\.1 are allowed here\. .*mark it slow\."])
    ended.stdout.re_match_lines([r"ERROR \S+::test_busy( .*)?"])


@pytest.mark.slow
def test_phases_and_subtests_of_a_test_are_added_up(suite):
    ended = suite.runpytest_inprocess(*OPTIONS, "--processor-limit", "0.35", "-k", "test_busy or test_rows")
    ended.assert_outcomes(passed=3, errors=1, deselected=2)
    ended.stdout.re_match_lines([r"it took 0\.[4-9] s .*"])


@pytest.mark.slow
def test_limit_is_higher_on_a_slow_machine(suite, monkeypatch):
    monkeypatch.setattr("accounting._slowness", lambda: 10.0)
    ended = suite.runpytest_inprocess(*OPTIONS, "--processor-limit", "0.1", "-k", "not test_rows")
    assert ended.ret == pytest.ExitCode.OK


def test_slowest_tests_are_printed_and_none_fails_without_a_limit(suite):
    ended = suite.runpytest_inprocess(*OPTIONS)
    assert ended.ret == pytest.ExitCode.OK
    ended.stdout.re_match_lines(
        [r" +0\.[4-9] s +\S+::test_rows", r" +0\.[2-9] s +\S+::test_busy", r" +\d\.\d s  all 4 tests, .*"]
    )


def test_gpu_tests_can_be_listed_without_a_gpu(suite):
    ended = suite.runpytest_inprocess(*OPTIONS, "--collect-only", "-q", "-m", "gpu")
    assert ended.ret == pytest.ExitCode.OK
    ended.stdout.fnmatch_lines(["*::test_on_a_gpu"])


@pytest.mark.slow
def test_tests_left_out_by_two_processes_count_once(suite, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = suite.runpytest_subprocess(*OPTIONS, "-m", "not slow", "-n", "2")
    ended.assert_outcomes(passed=3)
    ended.stdout.re_match_lines(
        [r"Not run: 1 tests that need a GPU.*", r"Not run: 1 tests that are slow\. `make slow beyond-ci`.*"]
    )
