"""`amp.tune`: finds the smallest cast list with which a training keeps its metric, by trainings.

Owns the order of the trials, and judges each metric beside its noise. Must never return a list that no training has
shown to pass.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ampatch.casting import cast_observers
from ampatch.diagnostics.shown_names import few
from ampatch.diagnostics.trial_steps.subject import check_not_set_up
from ampatch.diagnostics.tune.functions import Observed
from ampatch.diagnostics.tune.result import CANNOT_TELL, FAILS, PASSES, TunedTrial, Tuning
from ampatch.diagnostics.tune.runs import BudgetEndedError, Runs
from ampatch.diagnostics.tune.search import Kept, minimal, restored
from ampatch.diagnostics.tune.trainings import Run
from ampatch.errors import OptionError, UsageError

_NOTHING: Kept = frozenset()
_MACHINE = ("ampatch", "torch", "device")
#: Standard errors of the mean difference that count as noise.
_MARGIN = 2.0
#: A first seed that is worse by the tolerance and this many standard deviations of float32's seeds decides alone.
_CERTAIN = 3.0


def tune(runs: Runs, tolerance: float | str, higher_is_better: bool) -> Tuning:
    """Runs what `amp.tune` describes, whose arguments these are.

    Raises:
        UsageError: amp is set up, or a report is open.
        OptionError: the tolerance has a value that is not allowed, or one of the user's functions does not do what
            `amp.tune` requires.
    """
    _in_unit(tolerance, 1.0)
    if cast_observers.observer is not None:
        raise UsageError("amp.tune watches its runs itself. Call it outside of the block of amp.report().")
    check_not_set_up("amp.tune")
    try:
        return _Search(runs, tolerance, higher_is_better).run()
    finally:
        runs.training.state.restore()


def _in_unit(tolerance: object, mean: float) -> float:
    """Returns a tolerance in the metric's own unit.

    Args:
        tolerance: the user's: such a number, or a share of float32's mean ("1%").
        mean: the mean metric in float32.

    Raises:
        OptionError: the tolerance is neither, or a share of 0.
    """
    text = str(tolerance).strip()
    is_relative = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise OptionError(
            f"tolerance is {tolerance!r}; expected how much worse the metric may be: a positive number in its own unit "
            "(0.005), or a share of float32's metric ('1%')."
        )
    if is_relative and not mean:
        raise OptionError(
            f"tolerance is {number:g}% of float32's metric, which is 0. Give a number in the metric's own unit."
        )
    return number / 100 * abs(mean) if is_relative else number


class _Search:
    """One search.

    Args:
        runs: the trainings, and those that have finished.
        tolerance: how much worse the metric may be, as the user gave it.
        higher_is_better: whether a greater metric is better.
    """

    def __init__(self, runs: Runs, tolerance: float | str, higher_is_better: bool) -> None:
        self._runs, self._training, self._given_tolerance = runs, runs.training, tolerance
        self._higher_is_better = higher_is_better
        self._tolerance = math.nan  # in the metric's own unit, once float32's mean is known
        self._baseline = TunedTrial((), (), math.nan, 0.0, 0.0, CANNOT_TELL)
        self._judged: dict[Kept, TunedTrial] = {}
        self._observed = Observed({}, {})  # what the lists as they are call in half, with functions seen later

    def run(self) -> Tuning:
        """Searches until the end, or until the budget ends; the result is the best list so far."""
        complete, measured = False, None
        with contextlib.suppress(BudgetEndedError):
            self._search()
            complete = True
            best = self._best()
            measured = None if best is None else self._watched(best, "watched for its FLOPs")
        training, judged, best = self._training, self._judged, self._best()
        # The verdict on no list at all is that of the trial after which the search gave up.
        verdicts = [trial.verdict for trial in judged.values()] or [CANNOT_TELL]
        moved = best or _NOTHING
        share = None if best is None else judged[best].share
        if measured is not None:
            share = measured.share()
        # Not of the sets between, which the user never sees.
        warned = [text for kept in (None, _NOTHING, best) for text in training.warned.get(kept, ())]
        return Tuning(
            verdicts[-1 if complete else 0] if best is None else PASSES,
            complete,
            tuple(sorted(moved)),
            training.options["opt_level"],
            self._runs.half_dtype,
            self._higher_is_better,
            self._tolerance,
            training.seeds,
            self._baseline,
            tuple(judged.values()),
            tuple((path, judged[moved - {path}]) for path in sorted(moved) if moved - {path} in judged),
            share,
            measured is not None,
            training.lists.files,
            len(self._runs.seconds),
            self._runs.resumed,
            sum(self._runs.seconds, 0.0),
            tuple(dict.fromkeys([*_about_noise(self._baseline, self._tolerance), *self._observed.notes, *warned])),
            {"date": time.strftime("%Y-%m-%d"), **{name: self._runs.about[name] for name in _MACHINE}},
        )

    def _search(self) -> None:
        """Judges one list after another, until the best is known, or until it is known that none passes."""
        seeds = len(self._training.seeds)
        self._runs.expected = 2 * seeds
        self._run_baseline()
        first = self._trial(_NOTHING, "the lists as they are")
        if not (self._observed.rules or self._observed.half_flops) and first.worse < math.inf:
            raise OptionError(
                "no function that train called got half tensors, so that there is nothing to tune. Call "
                "amp.initialize before the training, and leave amp.disable_casts out."
            )
        everything = self._everything() if first.verdict == FAILS else None
        if everything is None:
            return
        self._runs.expected = (2 * len(everything).bit_length() + 2) * seeds
        found = minimal(self._passes, self._in_order(everything))
        others = frozenset(self._observed.rules) - everything
        # What is on no whitelist has next to no FLOPs: in float32 it costs less.
        if any(self._observed.flops[path] for path in found) and self._passes(others):
            minimal(self._passes, self._in_order(others))
        best = self._best() or _NOTHING  # all that are whitelisted, at the worst
        restored(self._passes, best, self._in_order(best)[::-1])

    def _everything(self) -> Kept | None:
        """Returns all whitelisted functions if the training passes with them in float32; None if it does not."""
        known: dict[str, str | None] | None = None
        # Whitelisted functions inside of another one show only once that is in float32, and trainings that raise show
        # their functions until then.
        while self._observed.rules != known:
            known = self._observed.rules
            kept = frozenset(path for path, rule in known.items() if rule == "whitelist")
            if self._trial(kept, "all whitelisted functions in float32").passes:
                return kept
            observed = self._watched(kept, "watched again")
            if observed is not None:
                self._observed = self._observed.with_functions(observed)
        return None

    def _in_order(self, kept: Kept) -> list[str]:
        """Returns functions in the order of their FLOPs in half, the fewest first."""
        return sorted(kept, key=lambda path: (self._observed.flops[path], path))

    def _passes(self, kept: Kept) -> bool:
        return self._trial(kept, f"{few(sorted(kept), 3)} in float32").passes

    def _best(self) -> Kept | None:
        """Returns the list that passes with the greatest share of the FLOPs in half, and then the fewest functions."""
        passing = {kept: trial.share or 0.0 for kept, trial in self._judged.items() if trial.passes}
        return max(passing, key=lambda kept: (passing[kept], -len(kept)), default=None)

    def _watched(self, kept: Kept, what: str) -> Observed | None:
        """Returns what the training calls with some functions in float32; None if it fails."""
        return self._runs.run(kept, self._training.seeds[0], what, watched=True).observed

    # Trials

    def _run_baseline(self) -> None:
        """Runs all seeds in float32.

        Raises:
            OptionError: a metric is not finite, or the tolerance is a share of 0.
        """
        runs: list[Run] = []
        for seed in self._training.seeds:
            runs.append(self._runs.run(None, seed, "float32"))
            if runs[-1].failed:
                raise OptionError(
                    f"the metric is {runs[-1].metric} in float32 with seed {seed}, so that there is nothing to compare "
                    "with. Expected a finite number: mend the training or evaluate first."
                )
        metrics = [run.metric for run in runs]
        self._baseline = TunedTrial((), _by_seed(runs), statistics.fmean(metrics), 0.0, _deviation(metrics), PASSES)
        self._tolerance = _in_unit(self._given_tolerance, self._baseline.mean)

    def _trial(self, kept: Kept, what: str) -> TunedTrial:
        """Runs the seeds with some functions in float32, and judges the metrics.

        Stops after the first seed if that leaves no doubt that the trial fails. The trial of the lists as they are runs
        all seeds, and its first run is watched.

        Args:
            kept: the functions in float32.
            what: the trial in words.
        """
        if kept not in self._judged:
            certain = self._tolerance + _CERTAIN * math.sqrt(2) * self._baseline.noise
            runs: list[Run] = []
            for seed in self._training.seeds:
                runs.append(self._runs.run(kept, seed, what, watched=not (kept or runs)))
                if runs[-1].failed or (kept and self._worse(runs[0]) > certain):
                    break
            if not kept:
                self._observed = runs[0].observed or self._observed
            self._judged[kept] = self._judge(kept, runs)
        return self._judged[kept]

    def _worse(self, run: Run) -> float:
        """Returns by how much a run is worse than float32 with the same seed."""
        difference = dict(self._baseline.metrics)[run.seed] - run.metric
        return difference if self._higher_is_better else -difference

    def _judge(self, kept: Kept, runs: Sequence[Run]) -> TunedTrial:
        mean, worse, noise, verdict = math.nan, math.inf, 0.0, FAILS
        if not runs[-1].failed:
            differences = [self._worse(run) for run in runs]
            mean, worse = statistics.fmean(run.metric for run in runs), statistics.fmean(differences)
            noise = _MARGIN * _deviation(differences) / math.sqrt(len(runs))
            # The rounding of the means themselves is no difference.
            bound = self._tolerance * (1 + 1e-9)
            verdict = PASSES if worse + noise <= bound else FAILS if worse - noise > bound else CANNOT_TELL
        error, share = runs[-1].error, self._observed.share(kept)
        return TunedTrial(tuple(sorted(kept)), _by_seed(runs), mean, worse, noise, verdict, error, share)


def _by_seed(runs: Sequence[Run]) -> tuple[tuple[int, float], ...]:
    return tuple((run.seed, run.metric) for run in runs)


def _deviation(numbers: Sequence[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def _about_noise(baseline: TunedTrial, tolerance: float) -> Iterator[str]:
    """Yields a sentence if the metrics in float32 show no noise, or more than the tolerance."""
    if len(baseline.metrics) == 1:
        yield "One seed: the noise of the metric is unknown. Type seeds=3 for three."
    elif len({metric for _, metric in baseline.metrics}) == 1:
        yield "In float32 the metric is the same for all seeds: it shows no noise, so that the seeds are no repeats."
    elif baseline.noise > tolerance:
        yield (
            f"In float32 alone the metric has a standard deviation of {baseline.noise:.2g} over the seeds, above "
            f"the tolerance of {tolerance:.2g}."
        )


def checked_seeds(seeds: Any) -> tuple[int, ...]:
    """Returns the seeds that a user's argument stands for: a number of seeds, which are 0, 1, ...; or the seeds.

    Raises:
        OptionError: it is neither.
    """
    given = range(seeds) if type(seeds) is int else seeds
    is_right = isinstance(given, (list, tuple, range)) and all(
        type(each) is int and 0 <= each < 2**32 for each in given
    )
    if not is_right or not given or len(set(given)) != len(given):
        raise OptionError(
            f"seeds is {seeds!r}; expected a number of seeds, such as 3, or different seeds from 0 to 2**32 - 1, such "
            "as (0, 1, 2)."
        )
    return tuple(given)
