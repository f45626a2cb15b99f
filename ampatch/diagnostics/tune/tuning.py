"""`amp.tune`: finds the smallest cast list with which a training keeps its metric, by trainings.

Owns the order of the trials, and judges each metric beside its noise. Must never return a list that no training has
shown to pass.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from ampatch.casting import cast_observers
from ampatch.diagnostics.shown_names import few
from ampatch.diagnostics.trial_steps.subject import check_not_set_up
from ampatch.diagnostics.tune.functions import Observed
from ampatch.diagnostics.tune.result import CANNOT_TELL, FAILS, PASSES, TunedTrial, Tuning
from ampatch.diagnostics.tune.runs import BudgetEndedError, Run, Runs
from ampatch.diagnostics.tune.search import Kept, minimal, restored
from ampatch.diagnostics.tune.trainings import Training
from ampatch.errors import OptionError, UsageError

_NOTHING: Kept = frozenset()
#: Standard errors of the mean difference that count as noise.
_MARGIN = 2.0
#: A first seed that is worse by the tolerance and this many standard deviations of float32's seeds decides alone.
_CERTAIN = 3.0


def tune(
    training: Training,
    *,
    tolerance: float | str,
    higher_is_better: bool,
    budget: object,
    journal: str | PathLike[str] | None,
    progress: bool,
) -> Tuning:
    """Runs what `amp.tune` describes. The arguments are its own, except for what to train.

    Raises:
        UsageError: amp is set up, or a report is open.
        OptionError: an argument has a value that is not allowed; one of the user's functions does not do what
            `amp.tune` requires; or the journal is of another search.
    """
    _in_unit(tolerance, 1.0)
    if cast_observers.observer is not None:
        raise UsageError("amp.tune watches its runs itself. Call it outside of the block of amp.report().")
    check_not_set_up("amp.tune")
    runs = Runs(journal, training.about(), budget, progress)
    try:
        return _Search(training, runs, tolerance, higher_is_better).run()
    finally:
        training.state.restore()


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
        training: what to train.
        runs: the runs that have finished.
        tolerance: how much worse the metric may be, as the user gave it.
        higher_is_better: whether a greater metric is better.
    """

    def __init__(self, training: Training, runs: Runs, tolerance: float | str, higher_is_better: bool) -> None:
        self._training, self._runs, self._given_tolerance = training, runs, tolerance
        self._higher_is_better = higher_is_better
        self._tolerance = math.nan  # in the metric's own unit, once float32's mean is known
        self._baseline = TunedTrial((), (), math.nan, 0.0, 0.0, CANNOT_TELL)
        self._judged: dict[Kept, TunedTrial] = {}
        self._observed = Observed({}, {})  # what the lists as they are call in half, with functions seen later
        self._notes: list[str] = []

    def run(self) -> Tuning:
        """Searches until the end, or until the budget ends."""
        try:
            kept, complete = self._searched(), True
        except BudgetEndedError:
            kept, complete = self._best(), False
        return self._result(kept, complete)

    def _searched(self) -> Kept | None:
        """Returns the functions to keep in float32; None if no list passes."""
        self._expect(2)
        self._run_baseline()
        self._tolerance = _in_unit(self._given_tolerance, self._baseline.mean)
        self._note_noise()
        first = self._trial(_NOTHING, "the lists as they are")
        self._look(_NOTHING)
        if not (self._observed.rules or self._observed.half_flops) and first.worse < math.inf:
            raise OptionError(
                "no function that train called got half tensors, so that there is nothing to tune. Call "
                "amp.initialize before the training, and leave amp.disable_casts out."
            )
        if first.verdict != FAILS:
            return _NOTHING if first.passes else None
        everything = self._everything()
        if everything is None:
            return None
        self._expect(2 * len(everything).bit_length() + 2)
        found = minimal(self._passes, self._in_order(everything))
        others = frozenset(self._observed.rules) - everything
        # What is on no whitelist has next to no FLOPs: in float32 it costs less.
        if any(self._observed.flops[path] for path in found) and self._passes(others):
            minimal(self._passes, self._in_order(others))
        best = self._best() or _NOTHING  # all that are whitelisted, at the worst
        return restored(self._passes, best, self._in_order(best)[::-1])

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
            self._look(kept)
        return None

    def _look(self, kept: Kept) -> None:
        """Watches a training, and adds the functions that it calls; all else counts with the lists as they are only."""
        observed = self._run(kept, self._training.seeds[0], "watched again", watched=True).observed
        if observed is not None:
            self._observed = self._observed.with_functions(observed) if kept else observed

    def _in_order(self, kept: Kept) -> list[str]:
        """Returns functions in the order of their FLOPs in half, the fewest first."""
        return sorted(kept, key=lambda path: (self._observed.flops[path], path))

    def _passes(self, kept: Kept) -> bool:
        return self._trial(kept, f"{few(sorted(kept), 3)} in float32").passes

    def _best(self) -> Kept | None:
        """Returns the list that passes with the greatest share of the FLOPs in half, and then the fewest functions."""
        passing = (kept for kept, trial in self._judged.items() if trial.passes)
        return max(passing, key=lambda kept: (self._observed.share(kept) or 0.0, -len(kept)), default=None)

    def _expect(self, trials: int) -> None:
        self._runs.expected = trials * len(self._training.seeds)

    def _note_noise(self) -> None:
        baseline, tolerance = self._baseline, self._tolerance
        if len(baseline.metrics) == 1:
            self._notes.append("One seed: the noise of the metric is unknown. Type seeds=3 for three.")
        elif len({metric for _, metric in baseline.metrics}) == 1:
            self._notes.append(
                "In float32 the metric is the same for all seeds: it shows no noise, so that the seeds are no repeats."
            )
        elif baseline.noise > tolerance:
            self._notes.append(
                f"In float32 alone the metric has a standard deviation of {baseline.noise:.2g} over the seeds, above "
                f"the tolerance of {tolerance:.2g}."
            )

    def _result(self, kept: Kept | None, complete: bool) -> Tuning:
        training, judged, about = self._training, self._judged, self._training.about()
        first = self._runs.find(_NOTHING, training.seeds[0], watched=False)
        # The verdict on no list at all is that of the trial after which the search gave up.
        verdicts = [trial.verdict for trial in judged.values()] or [CANNOT_TELL]
        moved = kept or _NOTHING
        share, is_measured = None if kept is None else self._observed.share(moved), kept == _NOTHING
        if moved and complete:
            with contextlib.suppress(BudgetEndedError):
                observed = self._run(moved, training.seeds[0], "watched for its FLOPs", watched=True).observed
                share, is_measured = (share, False) if observed is None else (observed.share(), True)
        # Not of the sets between, which the user never sees.
        warned = [text for each in (None, _NOTHING, kept) for text in training.warned.get(each, ())]
        return Tuning(
            PASSES if kept is not None else verdicts[-1 if complete else 0],
            complete,
            tuple(sorted(moved)),
            training.options["opt_level"],
            "" if first is None else first.half_dtype,
            self._higher_is_better,
            self._tolerance,
            training.seeds,
            self._baseline,
            tuple(replace(trial, share=self._observed.share(each)) for each, trial in judged.items()),
            tuple((path, judged[moved - {path}]) for path in sorted(moved) if moved - {path} in judged),
            share,
            is_measured,
            training.lists.files,
            len(self._runs.seconds),
            self._runs.resumed,
            sum(self._runs.seconds, 0.0),
            tuple(dict.fromkeys([*self._notes, *self._observed.notes, *warned])),
            {"date": time.strftime("%Y-%m-%d"), **{name: about[name] for name in ("ampatch", "torch", "device")}},
        )

    # Trials

    def _run_baseline(self) -> None:
        """Runs all seeds in float32.

        Raises:
            OptionError: a metric is not finite.
        """
        runs: list[Run] = []
        for seed in self._training.seeds:
            runs.append(self._run(None, seed, "float32"))
            if runs[-1].failed:
                raise OptionError(
                    f"the metric is {runs[-1].metric} in float32 with seed {seed}, so that there is nothing to compare "
                    "with. Expected a finite number: mend the training or evaluate first."
                )
        self._baseline = _trial_of(_NOTHING, runs, 0.0, _deviation([run.metric for run in runs]), PASSES)

    def _trial(self, kept: Kept, what: str) -> TunedTrial:
        """Runs the seeds with some functions in float32, and judges the metrics.

        Stops after the first seeds if these leave no doubt that the trial fails. The trial of the lists as they are
        runs all seeds, and its first run is watched.

        Args:
            kept: the functions in float32.
            what: the trial in words.
        """
        if kept not in self._judged:
            runs: list[Run] = []
            for seed in self._training.seeds:
                runs.append(self._run(kept, seed, what, watched=not (kept or runs)))
                if runs[-1].failed or (kept and self._is_hopeless(runs)):
                    break
            self._judged[kept] = self._judge(kept, runs)
        return self._judged[kept]

    def _is_hopeless(self, runs: Sequence[Run]) -> bool:
        noise = _CERTAIN * math.sqrt(2) * self._baseline.noise
        return len(self._training.seeds) > 1 and min(map(self._worse, runs)) > self._tolerance + noise

    def _worse(self, run: Run) -> float:
        """Returns by how much a run is worse than float32 with the same seed."""
        difference = dict(self._baseline.metrics)[run.seed] - run.metric
        return difference if self._higher_is_better else -difference

    def _judge(self, kept: Kept, runs: Sequence[Run]) -> TunedTrial:
        if runs[-1].failed:
            return _trial_of(kept, runs, math.inf, 0.0, FAILS)
        differences = [self._worse(run) for run in runs]
        worse = statistics.fmean(differences)
        noise = _MARGIN * _deviation(differences) / math.sqrt(len(runs))
        is_short = len(runs) < len(self._training.seeds)
        # The rounding of the means themselves is no difference.
        bound = self._tolerance * (1 + 1e-9)
        verdict = PASSES if worse + noise <= bound else FAILS if is_short or worse - noise > bound else CANNOT_TELL
        return _trial_of(kept, runs, worse, noise, verdict)

    def _run(self, kept: Kept | None, seed: int, what: str, watched: bool = False) -> Run:
        """Returns the run that has finished, or runs once; what watching disturbs runs again without it."""
        run = self._runs.find(kept, seed, watched)
        if run is None:
            run = self._ran(kept, seed, what, watched)
            plain = self._runs.find(kept, seed, watched=False)
            if plain is None and run.observed is not None and run.observed.is_disturbed and not run.failed:
                plain = self._ran(kept, seed, what, watched=False)
            run = run if plain is None else replace(plain, observed=run.observed)
            self._runs.add(run)
        return run

    def _ran(self, kept: Kept | None, seed: int, what: str, watched: bool) -> Run:
        """Runs once if the budget allows, and reports it."""
        self._runs.check_budget(watched)
        run = self._training.run(kept, seed, watched=watched)
        self._runs.count(run, f"{what}, seed {seed}")
        return run


def _trial_of(kept: Kept, runs: Sequence[Run], worse: float, noise: float, verdict: str) -> TunedTrial:
    metrics = tuple((run.seed, run.metric) for run in runs)
    mean = math.nan if runs[-1].failed else statistics.fmean(run.metric for run in runs)
    return TunedTrial(tuple(sorted(kept)), metrics, mean, worse, noise, verdict, runs[-1].error)


def _deviation(numbers: Sequence[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


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
