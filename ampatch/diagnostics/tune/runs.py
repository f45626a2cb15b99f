"""The runs of a search: each runs once if the budget allows, has a printed line, and stays in a journal.

The journal is a JSON file, so that a search that was stopped resumes. Owns its format, and the check that it belongs to
the same search. The file is whole at every moment. Must not choose what to run.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from os import PathLike
from pathlib import Path

from ampatch.diagnostics import json_files
from ampatch.diagnostics.report.numbers import seconds_in_text
from ampatch.diagnostics.tune.search import Kept
from ampatch.diagnostics.tune.trainings import Run, Training
from ampatch.errors import OptionError

FORMAT = "ampatch tune journal"
VERSION = 3

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]|(?:sec|second|min|minute|hour|day|run)s?)\s*")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # by the first letter of the unit


class BudgetEndedError(Exception):
    """Raised inside a search if the next run would not fit the budget. Never leaves `amp.tune`."""


class Runs:
    """The runs of a search.

    Args:
        training: what to train.
        journal: the file of those that have finished; None keeps them in memory only.
        budget: how long this call may search, as the user gave it; runs from the journal cost nothing.
        is_shown: False prints nothing.

    Attributes:
        training: what to train.
        about: what all runs of the file have in common, as text by its name in words.
        resumed: number of runs that the journal had.
        seconds: the time of each run of this call.
        expected: how many more runs the search is likely to need; negative if it needs more than it said.

    Raises:
        OptionError: the file is no journal, cannot be written, or is of another search; or the budget is none.
    """

    def __init__(self, training: Training, journal: str | PathLike[str] | None, budget: object, is_shown: bool) -> None:
        self._most, seconds = _limits(budget)
        self._ends = time.monotonic() + seconds
        self.training, self.about = training, training.about()
        self._path = None
        self._finished: dict[tuple[Kept | None, int], Run] = {}
        if journal is not None:
            self._path = json_files.checked_path(journal, (".json",), "Type journal='tune.json'.")
            self._finished = {(run.float32, run.seed): run for run in _read(self._path, self.about)}
        self.resumed = len(self._finished)
        self.seconds: list[float] = []
        self.expected = 0
        self._is_shown = is_shown and sys.stderr is not None

    @property
    def half_dtype(self) -> str:
        """The half type of the sessions; "" if all runs were in float32."""
        return next((run.half_dtype for run in self._finished.values() if run.half_dtype), "")

    def run(self, kept: Kept | None, seed: int, what: str, *, watched: bool = False) -> Run:
        """Returns the run that has finished, or runs once; what watching disturbs runs again without it.

        Args:
            kept: the functions in float32; None for a training without amp's casts (O0).
            seed: the seed.
            what: the trial in words.
            watched: whether the run is to have observed what it called; one that fails is not repeated for that.

        Raises:
            BudgetEndedError: another run does not fit.
        """
        known = self._finished.get((kept, seed))
        if known is not None and (known.failed or known.observed is not None or not watched):
            return known
        made = self._ran(kept, seed, what, watched)
        if known is None and made.observed is not None and made.observed.is_disturbed and not made.failed:
            known = self._ran(kept, seed, what, watched=False)
        run = made if known is None else replace(known, observed=made.observed)
        self._finished[kept, seed] = run
        if self._path is not None:
            runs = [asdict(each) for each in self._finished.values()]
            data = {"format": FORMAT, "version": VERSION, "about": self.about, "runs": runs}
            json_files.write(json_files.plain(data), self._path)
        return run

    def _ran(self, kept: Kept | None, seed: int, what: str, watched: bool) -> Run:
        """Runs once if the budget allows, and prints a line for it with the time left.

        A run fits if one that takes as long as the longest so far does. Watched ones take longer than others.
        """
        known = (run.seconds for run in self._finished.values() if watched or run.observed is None)
        if len(self.seconds) >= self._most or max(known, default=0.0) >= self._seconds_left:
            raise BudgetEndedError
        run = self.training.run(kept, seed, watched=watched)
        self.seconds.append(run.seconds)
        self.expected -= 1
        if self._is_shown:
            self._show(run, f"{what}, seed {seed}")
        return run

    def _show(self, run: Run, what: str) -> None:
        from tqdm import tqdm

        # The median: a run that is watched takes longer than others.
        left = min(self.expected, self._most - len(self.seconds)) * statistics.median_high(self.seconds)
        left = max(0.0, min(left, self._seconds_left))
        outcome = run.error.partition("\n")[0] or f"{run.metric:.6g}"
        told = f"; about {seconds_in_text(left)} left" if left else ""
        took = seconds_in_text(run.seconds)
        # Above the bars of the training itself.
        tqdm.write(f"run {len(self.seconds)}: {what}: {outcome} in {took}{told}", file=sys.stderr)

    @property
    def _seconds_left(self) -> float:
        return self._ends - time.monotonic()


def _limits(given: object) -> tuple[float, float]:
    """Returns the most runs and the most seconds of a budget.

    Raises:
        OptionError: it is none, such as a number without a unit.
    """
    if given is None:
        return math.inf, math.inf
    text = f"{given.total_seconds()} s" if isinstance(given, timedelta) else str(given)
    found = _BUDGET.fullmatch(text.lower())
    number, unit = (0.0, "") if found is None else (float(found[1]), found[2])
    counts_runs = unit.startswith("run")
    if number <= 0 or (counts_runs and not number.is_integer()):
        raise OptionError(
            f"budget is {given!r}; expected a time with its unit ('2h', '90 min', '45 s') or a number of runs "
            "('20 runs'), above 0."
        )
    return (number, math.inf) if counts_runs else (math.inf, number * _SECONDS[unit[0]])


def _read(path: Path, about: Mapping[str, str]) -> list[Run]:
    """Returns the runs of a journal; none if the file does not exist."""
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError("another format, or another version of it")
        runs, there = [Run.from_dict(each) for each in data["runs"]], dict(data["about"])
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"{str(path)!r} is no journal of this version of ampatch ({type(error).__name__}: {error}). Delete the "
            "file, or give another name."
        ) from error
    differing = [
        f"{name} ({there.get(name, 'unknown')} there, {value} here)"
        for name, value in about.items()
        if there.get(name) != value
    ]
    if differing:
        raise OptionError(
            f"the journal {str(path)!r} is of another search: it differs in {'; '.join(differing)}. Its runs would "
            "be compared with others. Delete the file, or give another name."
        )
    return runs
