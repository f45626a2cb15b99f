"""Runs the tests that cover each of some mutants, and says which mutants they kill.

::

    export PYTHONPATH=tests/machinery/mutation AMPATCH_KERNELS=torch AMPATCH_CALLS=python
    MUTATION_REACHED=build/reached python -m pytest -p reached -n 2 -m "not slow"
    python tests/machinery/mutation/run.py --reached build/reached --results build/mutants.json

pytest collects once; each mutant then has a process forked from that, in which the code of the function is exchanged.
docs/design/testing.md has the figures.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutants import Mutant, all_mutants, drawn

# A few tests fail in a forked process whatever the code is: each failure is looked at again without the mutant.
_ENOUGH = 4
_NOT_APPLIED = 2


@dataclass
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: its name.
        place: file and line.
        result: "killed", "survived", "timeout" (counts as killed), "uncovered", or "not applied", where the new code
            cannot take the place of the old one.
        by: the test that failed.
        tests: how many were run.
        seconds: how long that took.
    """

    mutant: str
    place: str
    result: str
    by: str = ""
    tests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Covering:
    """One test that enters a function: its id, its processor time, and how many functions it enters in all."""

    test: str
    seconds: float
    breadth: int


def read_coverage(folder: Path) -> dict[str, list[Covering]]:
    """Returns the tests that enter each function, by what the plugin `reached` wrote."""
    found = defaultdict(list)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for function in row["reached"]:
                found[function].append(Covering(row["test"], row["cpu"], len(row["reached"])))
    return found


def in_order(covering: Sequence[Covering], budget: float) -> list[str]:
    """Returns the tests to run within the budget, in turns: a case of each test function, then another one of each.

    The narrowest test functions come first: those that enter the fewest functions.
    """
    cases: dict[str, list[Covering]] = defaultdict(list)
    for test in covering:
        cases[test.test.partition("[")[0]].append(test)
    for same in cases.values():
        random.Random(0).shuffle(same)
    narrowest = sorted(cases.values(), key=lambda same: (min(test.breadth for test in same), same[0].test))
    turns = [
        test
        for turn in range(max(map(len, narrowest), default=0))
        for test in (s[turn] for s in narrowest if turn < len(s))
    ]
    chosen, spent = [], 0.0
    for test in turns:
        if spent + test.seconds <= budget:
            chosen.append(test.test)
            spent += test.seconds
    return chosen


def exchange(mutant: Mutant) -> bool:
    """Gives every function object that has a mutant's code the changed code; returns False where Python refuses."""
    new = {code.co_qualname: code for code in _codes(compile(mutant.source(), str(mutant.path), "exec"))}
    here = str(mutant.path)
    gc.unfreeze()  # conftest.py freezes what was imported, and get_objects leaves that out
    try:
        for function in [found for found in gc.get_objects() if type(found) is FunctionType]:
            old = function.__code__
            name = old.co_qualname
            belongs = name == mutant.function or name.startswith(f"{mutant.function}.<locals>.")
            if belongs and old.co_filename == here and name in new:
                function.__code__ = new[name].replace(co_name=old.co_name)
    except ValueError:  # a change that leaves a variable of an outer function unused
        return False
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class Runner:
    """Takes the place of pytest's own loop over the tests.

    Args:
        mutants: to try.
        covering: the tests of each function.
        budget: seconds of processor time for the tests of one mutant.
        processes: at once.
        results: take the outcomes.
    """

    def __init__(
        self,
        mutants: list[Mutant],
        covering: dict[str, list[Covering]],
        budget: float,
        processes: int,
        results: Results,
    ) -> None:
        self._results = results
        self._mutants = mutants
        self._covering = covering
        self._budget = budget
        self._processes = processes
        self._sound: dict[str, bool] = {}  # whether a test that failed passes without a mutant

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries the mutants, several at once."""
        self._items = {item.nodeid: item for item in session.items}
        waiting = list(reversed(self._mutants))
        running: dict[int, tuple[Mutant, list[str], float, Path]] = {}
        while waiting or running:
            while waiting and len(running) < self._processes:
                mutant = waiting.pop()
                tests = [
                    test
                    for test in in_order(self._covering.get(mutant.function, ()), self._budget)
                    if test in self._items and self._sound.get(test, True)
                ]
                if tests:
                    pid, notes = self._start(mutant, tests)
                    running[pid] = (mutant, tests, time.monotonic(), notes)
                else:
                    self._note(Outcome(mutant.name, _place(mutant), "uncovered"))
            for pid in list(running):
                mutant, tests, began, notes = running[pid]
                late = time.monotonic() - began > 6 * self._budget + 60
                if late:
                    os.killpg(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if done:
                    del running[pid]
                    outcome = self._outcome(mutant, tests, status, notes, late)
                    outcome.seconds = round(time.monotonic() - began, 1)
                    if outcome.result == "again" and len(tests) > outcome.tests:
                        waiting.append(mutant)
                    else:
                        outcome.result = outcome.result.replace("again", "survived")
                        self._note(outcome)
            time.sleep(0.02)
        return True

    def _start(self, mutant: Mutant | None, tests: list[str]) -> tuple[int, Path]:
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                os.setpgid(0, 0)
                with Path(os.devnull).open("w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                    os.dup2(nowhere.fileno(), 2)
                status = self._try(mutant, tests, folder)
            finally:
                os._exit(status)
        return pid, folder

    def _try(self, mutant: Mutant | None, tests: list[str], folder: Path) -> int:
        """Runs in the forked process; returns 0 if all tests passed, 1 if some failed, or `_NOT_APPLIED`."""
        if mutant is not None:
            root = next(parent for parent in mutant.path.parents if parent.name == "ampatch")
            # Processes that a test starts find the mutant by the path.
            shutil.copytree(root, folder / "ampatch", ignore=shutil.ignore_patterns("__pycache__"))
            (folder / "ampatch" / mutant.path.relative_to(root)).write_text(mutant.source(), encoding="utf-8")
            os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            # Some modules are only imported by the functions that need them: without this, after the exchange.
            importlib.import_module(".".join(mutant.path.relative_to(root.parent).with_suffix("").parts))
            if not exchange(mutant):
                return _NOT_APPLIED
        failed: list[str] = []
        for number, test in enumerate(tests):
            following = self._items[tests[number + 1]] if number + 1 < len(tests) else None
            reports = runtestprotocol(self._items[test], nextitem=following, log=False)
            failed += [test] if any(report.failed for report in reports) else []
            (folder / "failed").write_text("\n".join([str(number + 1), *failed]), encoding="utf-8")
            if len(failed) == _ENOUGH:
                break
        return 1 if failed else 0

    def _outcome(self, mutant: Mutant, tests: list[str], status: int, folder: Path, late: bool) -> Outcome:
        notes = folder / "failed"
        number, *failed = notes.read_text(encoding="utf-8").split("\n") if notes.exists() else "0"
        shutil.rmtree(folder, ignore_errors=True)
        code = os.waitstatus_to_exitcode(status)
        outcome = Outcome(mutant.name, _place(mutant), "survived", tests=int(number))
        if late:
            outcome.result = "timeout"
        elif code == _NOT_APPLIED:
            outcome.result = "not applied"
        elif code != 0:  # or the process died, whatever had failed until then
            outcome.by = next((test for test in failed if self._is_sound(test)), "")
            outcome.result = "killed" if outcome.by or code != 1 else "again"
        return outcome

    def _is_sound(self, test: str) -> bool:
        if test not in self._sound:
            pid, folder = self._start(None, [test])
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            shutil.rmtree(folder, ignore_errors=True)
            self._sound[test] = status == 0
            if not self._sound[test]:
                print(f"fails without a mutant, and does not count: {test}", flush=True)
        return self._sound[test]

    def _note(self, outcome: Outcome) -> None:
        self._results.add(outcome)
        took = f"{outcome.tests:5} tests{outcome.seconds:7.1f} s"
        print(f"{outcome.result:12}{outcome.mutant:60}{took}  {outcome.by}", flush=True)


class Results:
    """The outcomes in a file, which is written after each, so that a run that was interrupted goes on from there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.outcomes = [Outcome(**row) for row in _rows(file)] if file.exists() else []

    def add(self, outcome: Outcome) -> None:
        """Adds one, and writes all."""
        self.outcomes.append(outcome)
        rows = [asdict(each) for each in self.outcomes]
        self._file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def _place(mutant: Mutant) -> str:
    return f"{mutant.path.name}:{mutant.line}"


def main() -> None:
    """Runs what the command line asks for, and writes the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[3], help="the checkout whose tests are run")
    parser.add_argument("--reached", type=Path, required=True, help="the folder that the plugin wrote")
    parser.add_argument("--results", type=Path, required=True, help="the file of outcomes to write")
    parser.add_argument("--names", type=Path, help="outcomes of an earlier run: the same mutants again")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of processor time for a mutant's tests")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    tree = options.tree.resolve()
    known = all_mutants(tree)
    names = drawn(list(known), options.count, options.seed) if options.names is None else _names(options.names)
    results = Results(options.results)
    done = {outcome.mutant for outcome in results.outcomes}
    for name in names:
        if name not in known and name not in done:
            results.add(Outcome(name, "", "gone"))
    mutants = [known[name] for name in names if name in known and name not in done]
    runner = Runner(mutants, read_coverage(options.reached), options.budget, options.processes, results)
    os.chdir(tree)
    left_out = ("terminal", "cacheprovider", "faulthandler", "xdist")
    plugins = [argument for name in left_out for argument in ("-p", f"no:{name}")]
    # setup.cfg has options for the terminal.
    pytest.main(["-o", "addopts=", "-m", "not slow", *plugins, str(tree / "tests")], plugins=[runner])
    print(dict(Counter(outcome.result for outcome in results.outcomes)))


def _names(file: Path) -> list[str]:
    return [row["mutant"] for row in _rows(file)]


if __name__ == "__main__":
    main()
