"""The runs of a search: keeps those that have finished in a journal, holds the budget, and prints a line for each.

The journal is a JSON file, so that a search that was stopped resumes. Owns its format, and the check that it belongs to
the same search. The file is whole at every moment. Must not run a training.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from ampatch.diagnostics import json_files
from ampatch.diagnostics.report.numbers import seconds_in_text
from ampatch.diagnostics.tune.functions import Observed
from ampatch.diagnostics.tune.search import Kept
from ampatch.errors import OptionError

FORMAT = "ampatch tune journal"
VERSION = 3

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]|(?:sec|second|min|minute|hour|day|run)s?)\s*")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # by the first letter of the unit


class BudgetEndedError(Exception):
    """Raised inside a search if the next run would not fit the budget. Never leaves `amp.tune`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training that has finished. The journal has these fields.

    Attributes:
        float32: functions that ran in float32; None for a training without amp's casts (O0).
        seed: its seed.
        metric: what the user's ``evaluate`` returned; NaN if the training raised.
        seconds: its time.
        error: the exception, if it raised one.
        half_dtype: the half type of its session; "" at O0.
        observed: what it called; None if it was not watched.
    """

    float32: Kept | None
    seed: int
    metric: float
    seconds: float
    error: str = ""
    half_dtype: str = ""
    observed: Observed | None = None

    @property
    def failed(self) -> bool:
        """True if the training raised, or its metric is not finite."""
        return not math.isfinite(self.metric)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Returns a run of a journal."""
        kept = None if data["float32"] is None else frozenset(data["float32"])
        observed = None if data["observed"] is None else Observed(**data["observed"])
        return cls(**{**data, "float32": kept, "metric": float(data["metric"]), "observed": observed})


class Runs:
    """The runs of a search.

    Args:
        journal: the file of those that have finished; None keeps them in memory only.
        about: what all runs of the file have in common, as text by its name in words.
        budget: how long this call may search, as the user gave it; runs from the journal cost nothing.
        is_shown: False prints nothing.

    Attributes:
        resumed: number of runs that the journal had.
        seconds: the time of each run of this call.
        expected: how many more runs the search is likely to need.

    Raises:
        OptionError: the file is no journal, cannot be written, or is of another search; or the budget is none.
    """

    def __init__(
        self, journal: str | PathLike[str] | None, about: dict[str, str], budget: object, is_shown: bool
    ) -> None:
        self._most, seconds = _limits(budget)
        self._ends = time.monotonic() + seconds
        self._about = about
        self._path = None
        self._finished: dict[tuple[Kept | None, int], Run] = {}
        if journal is not None:
            self._path = json_files.checked_path(journal, (".json",), "Type journal='tune.json'.")
            self._finished = {(run.float32, run.seed): run for run in _read(self._path, about)}
        self.resumed = len(self._finished)
        self.seconds: list[float] = []
        self.expected = 0
        self._is_shown = is_shown and sys.stderr is not None

    def find(self, kept: Kept | None, seed: int, watched: bool) -> Run | None:
        """Returns a run that has finished; None if there is none, or none that was watched if that is asked for."""
        run = self._finished.get((kept, seed))
        return None if run is None or (watched and run.observed is None and not run.failed) else run

    def add(self, run: Run) -> None:
        """Adds a run, and writes the journal."""
        self._finished[run.float32, run.seed] = run
        if self._path is not None:
            runs = [json_files.plain(asdict(each)) for each in self._finished.values()]
            data = {"format": FORMAT, "version": VERSION, "about": self._about, "runs": runs}
            # Of these values, sets alone have no form in JSON.
            text = json.dumps(data, indent=1, allow_nan=False, default=sorted)
            json_files.write_text(text + "\n", self._path)

    def check_budget(self, watched: bool) -> None:
        """Raises if another run does not fit: one that takes as long as the longest so far. Watched ones take longer.

        Raises:
            BudgetEndedError: all runs are spent, or the run would end after the time.
        """
        likely = max((run.seconds for run in self._finished.values() if watched or run.observed is None), default=0.0)
        if len(self.seconds) >= self._most or likely >= self._seconds_left:
            raise BudgetEndedError

    def count(self, run: Run, what: str) -> None:
        """Counts a run of this call, and prints a line for it with the time left."""
        self.seconds.append(run.seconds)
        self.expected = max(0, self.expected - 1)
        if not self._is_shown:
            return
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
