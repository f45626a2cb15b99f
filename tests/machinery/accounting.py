"""What a run of the tests has cost, and what it left out: a plugin for pytest, loaded by `conftest.py`.

Counts processor time and not the clock's, since the machines that run this are shared: that of the process, of those
that it started and waited for, of the `workers` and of `fresh` programs. Must never change what a test does, and fails
one only where a limit was given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import fresh
import pytest
import torch
import workers

_TIME = "processor_time"  # an attribute of reports, which pytest-xdist hands on

# What `_slowness` takes on a machine on which the limit holds as it stands, in seconds.
_USUAL = 2.0


def _processor_time() -> float:
    return sum(os.times()[:4]) + workers.processor_time() + fresh.processor_time()


def _slowness() -> float:
    """Returns how many times as long as usual this machine takes, at this moment, for work like the tests'; at least 1.

    That is importing torch in a new process: what runs beside it on the same cores and caches slows both alike.
    """
    began = _processor_time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (_processor_time() - began) / _USUAL)


class Accounting:
    """One run's accounts: in the process that prints them, and in each that runs tests.

    Args:
        limit: seconds that a test may take that is not marked slow, more on a slow machine; None: as many as it likes.

    Attributes:
        left_out: how many tests were not run, by why.
    """

    def __init__(self, limit: float | None) -> None:
        self.left_out: Counter[str] = Counter()
        self._limit = limit
        self._last = 0.0
        self._taken: Counter[str] = Counter()

    def pytest_runtest_logstart(self) -> None:
        """Begins a test."""
        self._last = _processor_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Notes on each report how long that phase took; fails the last one if the test took too long."""
        report = yield
        now = _processor_time()
        taken, self._last = now - self._last, now
        setattr(report, _TIME, taken)
        if report.when == "teardown" and report.passed and "slow" not in item.keywords and self._limit is not None:
            whole = self._taken[item.nodeid] + taken
            if whole > self._limit and whole > (allowed := self._limit * _slowness()):
                report.outcome = "failed"
                report.longrepr = (
                    f"it took {whole:.1f} s of processor time, and {allowed:.1f} are allowed here. Make it "
                    "shorter, or mark it slow."
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the phases of a test."""
        self._taken[report.nodeid] += getattr(report, _TIME, 0.0)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Counts what the command line left out."""
        self.left_out["slow"] += sum("slow" in item.keywords for item in items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out what needs a GPU, where torch sees none; `--collect-only` lists it all the same."""
        if not torch.cuda.is_available() and not config.option.collectonly:
            on_gpu = [item for item in items if "gpu" in item.keywords]
            self.left_out["gpu"] += len(on_gpu)
            items[:] = [item for item in items if "gpu" not in item.keywords]

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes over what a process left out; all of them leave out the same."""
        self.left_out |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hands on what this process left out."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = dict(self.left_out)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the tests that took longest, and what was not run and how it is."""
        terminalreporter.section("processor time")
        for test, seconds in self._taken.most_common(10):
            if seconds >= 0.1:
                terminalreporter.line(f"{seconds:7.1f} s  {test}")
        whole = sum(self._taken.values())
        terminalreporter.line(f"{whole:7.1f} s  all {len(self._taken)} tests, without starting and collecting")
        if self.left_out["gpu"]:
            terminalreporter.line(
                f"Not run: {self.left_out['gpu']} tests that need a GPU, and torch sees none here. The same command "
                "runs them where there is one."
            )
        if self.left_out["slow"]:
            terminalreporter.line(
                f"Not run: {self.left_out['slow']} tests that are slow. `make slow beyond-ci` runs all of them, "
                "`pytest -m slow FILE` those of a file."
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the limit, which is for `make test`: a test that runs alone may have to build the extension first."""
    parser.addoption(
        "--processor-limit", type=float, metavar="SECONDS", help="fail where a test not marked slow takes longer"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Opens the accounts."""
    config.pluginmanager.register(Accounting(config.getoption("--processor-limit")))
