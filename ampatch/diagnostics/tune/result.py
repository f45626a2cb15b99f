"""What `amp.tune` returns, as frozen values, with its text and its cast list.

Owns the wording, the table and the YAML. Must never run a training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from os import PathLike
from typing import Any

import yaml

from ampatch.cast_lists.spellings import spelled
from ampatch.diagnostics import json_files
from ampatch.diagnostics.report.numbers import seconds_in_text
from ampatch.diagnostics.shown_names import counted
from ampatch.diagnostics.tables import Column, Whole, number, printed, table
from ampatch.errors import UsageError
from ampatch.grouping import grouped

#: Verdicts of a trial, and of a search.
PASSES, FAILS, CANNOT_TELL = "passes", "fails", "cannot tell"

#: How a file that `amp.tune` wrote begins.
MARK = "# Found by ampatch tune"


@dataclass(frozen=True, slots=True)
class TunedTrial:
    """A list of functions in float32, with what trainings with it showed.

    Attributes:
        float32: paths of the functions in float32; empty for the lists that the search began with.
        metrics: pairs of a seed and the metric; NaN if the training raised.
        mean: mean of the metrics.
        worse: mean of how much worse a metric is than float32's with the same seed; negative if it is better.
        noise: two standard errors of this mean; 0 with one seed.
        verdict: "passes" if worse + noise is within the tolerance, "fails" if worse - noise is not, else "cannot tell".
        error: the exception, if the training raised one.
        share: share of the FLOPs in half; None if none were counted.
    """

    float32: tuple[str, ...]
    metrics: tuple[tuple[int, float], ...]
    mean: float
    worse: float
    noise: float
    verdict: str
    error: str = ""
    share: float | None = None

    @property
    def passes(self) -> bool:
        """True if the verdict is "passes"."""
        return self.verdict == PASSES

    def in_words(self) -> str:
        """Returns the outcome as part of a sentence."""
        if self.error:
            return self.error.partition("\n")[0]
        if self.mean != self.mean:
            return f"metric {self.metrics[-1][1]} with seed {self.metrics[-1][0]}"
        noise = f" (+/- {self.noise:.2g})" if self.noise else ""
        return f"metric {self.mean:.6g}, worse by {self.worse:.3g}{noise}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The cast list that `amp.tune` found, with its evidence. It prints as a report.

    Attributes:
        verdict: "passes": the lists, with `overlay` laid over them, keep the metric. "fails": no list did. "cannot
            tell": the noise of the metric is too large for the tolerance.
        complete: False if the budget ended before the search did.
        float32: paths of the functions that the overlay moves to float32, with their other spellings; empty if none
            needs to be moved. Each has the path by which the trainings called it.
        opt_level: the opt level.
        half_dtype: the half type.
        higher_is_better: as given.
        tolerance: how much worse the metric may be, in its own unit.
        seeds: the seeds of each trial.
        baseline: the trainings in float32. Its ``noise`` is the standard deviation over the seeds.
        trials: all trials in the order in which they ran; the first is that of the lists that the search began with.
        needed: for each function in `float32`, the trial without it.
        share: share of the FLOPs in half with the overlay; None if none were counted.
        share_is_measured: False if `share` is computed from the first trial's FLOPs.
        cast_lists: the lists that the overlay is laid over, after the shipped ones.
        runs: trainings that this call ran.
        resumed: trainings that it took from the journal.
        seconds: the time of this call's trainings.
        notes: what to know beside the numbers.
        about: versions, the device and the date, by name.
    """

    verdict: str
    complete: bool
    float32: tuple[str, ...]
    opt_level: str
    half_dtype: str
    higher_is_better: bool
    tolerance: float
    seeds: tuple[int, ...]
    baseline: TunedTrial
    trials: tuple[TunedTrial, ...]
    needed: tuple[tuple[str, TunedTrial], ...]
    share: float | None
    share_is_measured: bool
    cast_lists: tuple[str, ...]
    runs: int
    resumed: int
    seconds: float
    notes: tuple[str, ...]
    about: dict[str, str]

    @property
    def first(self) -> TunedTrial | None:
        """The trial of the lists that the search began with; None if the budget ended before it."""
        return self.trials[0] if self.trials else None

    @property
    def chosen(self) -> TunedTrial | None:
        """The trial of `overlay`; None if no list passed."""
        return next((each for each in self.trials if each.passes and each.float32 == self.float32), None)

    @property
    def overlay(self) -> str:
        """The cast list as YAML, with its evidence in comments: for a file that ``cast_lists=`` takes.

        Raises:
            UsageError: no list passed.
        """
        if self.verdict != PASSES:
            raise UsageError(f"there is no overlay to write: {self.conclusion()}")
        return "\n".join([*map(_comment, self._evidence()), *self._entries()]) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Writes `overlay` to a file, which is replaced if it exists.

        Args:
            path: of the file; its name ends with ".yaml" or ".yml".

        Raises:
            OptionError: the path has another ending, or cannot be written.
            UsageError: no list passed; nothing is written.
        """
        text = self.overlay
        json_files.write_text(text, json_files.checked_list(path))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, booleans, None, lists and dicts. inf and NaN are texts."""
        data = asdict(self)
        data["needed"] = [{"function": path, "without": trial} for path, trial in data["needed"]]
        data["overlay"] = self.overlay if self.verdict == PASSES else None
        data["conclusion"] = self.conclusion()
        return json_files.plain(data)  # type: ignore[no-any-return]

    def conclusion(self) -> str:
        """Returns the result in one or two sentences."""
        first, ended = self.first, "" if self.complete else "The budget ended before the search did. "
        if first is None:
            return f"{ended}No half training was judged yet. Give a larger budget; a journal keeps the runs."
        if self.verdict == CANNOT_TELL:
            return f"{ended}amp.tune cannot tell whether the metric stays within the tolerance. {self._more_seeds()}"
        if self.verdict == FAILS and not self.complete:
            return f"{ended}So far no list keeps the metric within the tolerance."
        if self.verdict == FAILS:
            return (
                "No cast list keeps the metric within the tolerance, not even with all whitelisted functions in "
                "float32. The cause is outside of the lists that amp.tune changes: the loss scale, code that casts by "
                "itself, or a function of which a note says that it stays as it is."
            )
        if not self.float32:
            return "The lists keep the metric as they are: no overlay is needed."
        smaller = "" if self.complete else " It may be larger than it needs to be."
        return f"{ended}With {_several(self.float32)} in float32 the metric stays within the tolerance.{smaller}"

    def _more_seeds(self) -> str:
        trial = self.trials[-1]
        room = self.tolerance - trial.worse
        what = f"With {_several(trial.float32)} in float32 it" if trial.float32 else "It"
        known = f"{what} is {trial.in_words()}; the tolerance is {self.tolerance:.3g}."
        if room <= 0 or not trial.noise:
            return f"{known} Give more seeds, a larger tolerance, or a metric with less noise."
        seeds = max(len(self.seeds) + 1, round(len(self.seeds) * (trial.noise / room) ** 2 + 0.5))
        return f"{known} Give about seeds={seeds}, a larger tolerance, or a metric with less noise."

    def __str__(self) -> str:
        return printed(self._parts())

    def _parts(self) -> Iterator[str | Callable[[int], Any]]:
        better = "higher" if self.higher_is_better else "lower"
        yield (
            f"amp.tune at {self.opt_level} in {self.half_dtype or 'half'}: {counted(len(self.seeds), 'seed')}, "
            f"{f'tolerance {self.tolerance:.4g}, ' if self.baseline.metrics else ''}{better} is better"
        )
        yield f"{counted(self.runs, 'run')} in {seconds_in_text(self.seconds)}" + (
            f", and {self.resumed} from the journal" if self.resumed else ""
        )
        yield ""
        yield from table("Trials", _COLUMNS, list(self._rows()), len(self.trials) + 1)
        if len(self.seeds) > 1:
            yield "+/-: two standard errors of how much worse it is. A trial passes if the sum is within the tolerance."
        yield self.conclusion()
        if self.verdict == PASSES:
            yield ""
            yield Whole(self.overlay.rstrip())
        if self.notes:
            yield ""
            yield from (f"- {note}" for note in self.notes)

    def _rows(self) -> Iterator[Sequence[Any]]:
        yield ("nothing in half (O0)", self.baseline.mean if self.baseline.metrics else "-", "", "", "", "")
        for trial in self.trials:
            name = f"{_several(trial.float32)} in float32" if trial.float32 else "the lists as they are"
            if trial.mean == trial.mean:
                noise = trial.noise if len(trial.metrics) > 1 else ""
                yield (name, trial.mean, trial.worse, noise, trial.share, trial.verdict)
            else:
                why = "raised" if trial.error else str(trial.metrics[-1][1])
                yield (name, why, "", "", trial.share, trial.verdict)

    def _evidence(self) -> Iterator[str]:
        about, better = self.about, "higher" if self.higher_is_better else "lower"
        versions = f"ampatch {about['ampatch']}, torch {about['torch']}, {about['device']}"
        yield f"{MARK.removeprefix('# ')} on {about['date']}: {versions}."
        yield f"{self.opt_level} in {self.half_dtype}; seeds {', '.join(map(str, self.seeds))}."
        if self.cast_lists:
            lists = ", ".join([*self.cast_lists, "this file"])
            yield f"To be laid over the lists that the search began with: cast_lists=[{lists}]."
        yield f"Mean metric ({better} is better; tolerance {self.tolerance:.4g}):"
        noise = f", standard deviation {self.baseline.noise:.2g} over the seeds" if len(self.seeds) > 1 else ""
        yield f"  float32 (O0)            {self.baseline.mean:.6g}{noise}"
        first, chosen = self.trials[0], self.chosen
        yield f"  without this file       {_told(first)}"
        if chosen is not None and chosen is not first:
            yield f"  with this file          {_told(chosen)}"
        if self.share is not None:
            measured = "" if self.share_is_measured else " (computed, not measured)"
            before = "" if chosen is first or first.share is None else f", {first.share:.0%} without it"
            yield f"FLOPs in half: {self.share:.0%} with this file{measured}{before}."
        yield from (f"Note: {note}" for note in self.notes)
        if not self.complete:
            yield "The budget ended before the search did: a smaller list may pass too."
        if not self.float32:
            yield "The lists keep the metric as they are, so this file changes nothing."

    def _entries(self) -> Iterator[str]:
        if not self.float32:
            return
        needed = dict(self.needed)
        yield "blacklist:"
        for namespace, names in blacklist(self.float32)["blacklist"].items():
            yield f"  {_scalar(namespace)}:"
            for name in names:
                without = needed.get(f"{namespace}.{name}")
                if without is not None:
                    yield f"    # In half: {_told(without)}"
                yield f"    - {_scalar(name)}"


_COLUMNS = (
    Column("trial", itemgetter(0)),
    number("metric", itemgetter(1), ".6g"),
    number("worse by", itemgetter(2), ".3g"),
    number("+/-", itemgetter(3), ".2g", rank=2),
    number("FLOPs in half", itemgetter(4), ".0%", rank=1),
    Column("verdict", itemgetter(5)),
)


def blacklist(paths: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Returns the cast list that moves functions to float32, each with its spellings, which other code may call."""
    split = (each.rpartition(".") for path in sorted(paths) for each in spelled(path))
    return {"blacklist": grouped((namespace, name) for namespace, _, name in split)}


def _told(trial: TunedTrial) -> str:
    return f"{trial.in_words()}: {trial.verdict}"


def _several(paths: Iterable[str]) -> str:
    *others, last = paths
    return f"{', '.join(others)} and {last}" if others else last


def _comment(line: str) -> str:
    """Returns a line of text as a comment of YAML, whatever characters are in it."""
    return "# " + "".join(each if each.isprintable() else " " for each in line)


def _scalar(text: str) -> str:
    """Returns a text as YAML, in quotes if it needs them."""
    return str(yaml.safe_dump(text, width=float("inf"), allow_unicode=True)).partition("\n")[0]
