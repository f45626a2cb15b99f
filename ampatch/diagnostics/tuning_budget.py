"""The budget of a search, and its progress with the time left on standard error.

Must not run a training.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

from ampatch.diagnostics.report_numbers import in_terminal
from ampatch.diagnostics.report_numbers import seconds as in_words
from ampatch.errors import OptionError

_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_FORMAT = "tuning |{bar}| {elapsed} passed, about {postfix} left"
_EXPECTED = "expected a time with its unit ('2h', '90 min', '45 s') or a number of runs ('20 runs')"


class BudgetEndedError(Exception):
    """Raised inside a search if the next run would not fit the budget. Never leaves `amp.tune`."""


class Budget:
    """How long a search may take. It counts what this call runs; runs from a journal cost nothing.

    Args:
        runs: the most runs.
        seconds: the most seconds.

    Attributes:
        spent: seconds of each run so far.
    """

    def __init__(self, runs: float = math.inf, seconds: float = math.inf) -> None:
        self._runs, self._seconds = runs, seconds
        self._began = time.monotonic()
        self.spent: list[float] = []

    @classmethod
    def of(cls, given: object) -> Budget:
        """Returns the budget that a user's argument stands for.

        Raises:
            OptionError: it is none, such as a number without a unit.
        """
        if given is None:
            return cls()
        if isinstance(given, timedelta):
            return cls(seconds=_positive(given.total_seconds(), given))
        if not isinstance(given, str):
            hint = f" Type budget='{given} runs' or budget='{given} min'." if isinstance(given, (int, float)) else ""
            raise OptionError(f"budget is {given!r}; {_EXPECTED}.{hint}")
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", given.lower())
        number, unit = (float(found[1]), found[2]) if found else (0.0, "")
        if unit in ("run", "runs") and number == int(number):
            return cls(runs=int(_positive(number, given)))
        if unit not in _UNITS:
            raise OptionError(f"budget is {given!r}; {_EXPECTED}.")
        return cls(seconds=_positive(number * _UNITS[unit], given))

    def check(self, expected: float) -> None:
        """Raises if another run does not fit.

        Args:
            expected: seconds that the run is expected to take.

        Raises:
            BudgetEndedError: all runs are spent, or the run would end after the time.
        """
        left = self.seconds_left
        if self.runs_left <= 0 or left <= 0 or expected > left:
            raise BudgetEndedError

    @property
    def seconds_left(self) -> float:
        """Seconds until the budget ends."""
        return self._began + self._seconds - time.monotonic()

    @property
    def runs_left(self) -> float:
        """Runs until the budget ends."""
        return self._runs - len(self.spent)


def _positive(number: float, given: object) -> float:
    if number <= 0:
        raise OptionError(f"budget is {given!r}; {_EXPECTED}, above 0.")
    return number


class Progress:
    """Prints a line for each run, and on a terminal draws a bar with the time left.

    Args:
        budget: bounds the time left.
        is_shown: False prints nothing.
    """

    def __init__(self, budget: Budget, is_shown: bool) -> None:
        self._budget, self._is_shown = budget, is_shown and sys.stderr is not None
        self._expected = 0
        self._bar: Any = None

    def expect(self, runs: int) -> None:
        """Sets how many more runs the search is likely to need."""
        self._expected = runs

    def finished(self, what: str, outcome: str) -> None:
        """Tells of the run that the budget has counted last."""
        self._expected = max(0, self._expected - 1)
        if not self._is_shown:
            return
        left = self.left
        told = f"; about {in_terminal(in_words(left))} left" if left else ""
        spent = self._budget.spent
        line = f"run {len(spent)}: {what}: {outcome} in {in_terminal(in_words(spent[-1]))}{told}"
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(bar_format=_FORMAT, disable=not sys.stderr.isatty(), file=sys.stderr)
        with tqdm.external_write_mode(file=sys.stderr):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        self._bar.total = len(spent) + self._expected
        self._bar.set_postfix_str(in_terminal(in_words(left)), refresh=False)
        self._bar.update(1)

    @property
    def left(self) -> float:
        """Seconds that the search still takes; an estimate."""
        runs = min(self._expected, self._budget.runs_left)
        # The median: a run that is watched takes longer than others.
        left = runs * statistics.median_high(self._budget.spent) if self._budget.spent else 0.0
        return max(0.0, min(left, self._budget.seconds_left))

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
