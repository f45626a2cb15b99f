"""`amp.tune`: finds the smallest cast list with which a training keeps its metric, by trainings.

Owns the order of the trials. Must never return a list that no training has shown to pass.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from ampatch.cast_lists.lists import MAPPING, CastLists
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule
from ampatch.casting import cast_observers
from ampatch.diagnostics.tuning_budget import Budget, BudgetEndedError, Progress
from ampatch.diagnostics.tuning_functions import Observed, SeenFunction
from ampatch.diagnostics.tuning_journal import Journal, fingerprint
from ampatch.diagnostics.tuning_report import CANNOT_TELL, FAILS, PASSES, TunedTrial, Tuning
from ampatch.diagnostics.tuning_search import Kept, accumulated, minimal, restored
from ampatch.diagnostics.tuning_trials import Training, Trials, restoring
from ampatch.errors import OptionError, UsageError
from ampatch.grouping import grouped
from ampatch.patching.function_patches import Registration
from ampatch.runtime import runtime
from ampatch.version import __version__

_NOTHING: Kept = frozenset()
#: How often the search looks for more functions, with those that it knows in float32. Whitelisted functions inside of
#: another one show only once that is in float32, and trainings that raise show their functions until then.
_LOOKS = 5


def tune(
    training: Training,
    *,
    tolerance: Tolerance,
    budget: Budget,
    seeds: Sequence[int],
    journal: str | PathLike[str] | None,
    progress: bool,
) -> Tuning:
    """Runs what `amp.tune` describes.

    Args:
        training: what to train.
        tolerance: how much worse the metric may be.
        budget: how long to search.
        seeds: the seeds of each trial.
        journal: file of the runs that have finished; None: none.
        progress: whether to print a line for each run.

    Raises:
        UsageError: amp is set up, or a report is open.
        OptionError: one of the user's functions does not do what `amp.tune` requires, or the journal is of another
            search.
    """
    if cast_observers.observer is not None:
        raise UsageError("amp.tune watches its runs itself. Call it outside of the block of amp.report().")
    with restoring() as state:
        shown = Progress(budget, progress)
        file = Journal(journal, _about(training))
        try:
            trials = Trials(training, seeds, file, budget, shown, state)
            return _Search(trials, shown, tolerance).run()
        finally:
            shown.close()


class Tolerance:
    """How much worse the metric may be.

    Args:
        number: in the metric's own unit, or as a share of float32's mean.
        is_relative: whether it is a share.
    """

    def __init__(self, number: float, is_relative: bool) -> None:
        self._number, self._is_relative = number, is_relative

    @classmethod
    def of(cls, given: object) -> Tolerance:
        """Returns the tolerance that a user's argument stands for.

        Raises:
            OptionError: it is none.
        """
        number, is_relative = given, False
        if isinstance(given, str):
            is_relative = given.strip().endswith("%")
            try:
                number = float(given.strip().removesuffix("%")) / (100 if is_relative else 1)
            except ValueError:
                number = None
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not 0 < number < float("inf"):  # type: ignore[operator]
            raise OptionError(
                f"tolerance is {given!r}; expected how much worse the metric may be: a positive number in its own unit "
                "(0.005), or a share of float32's metric ('1%')."
            )
        return cls(float(number), is_relative)  # type: ignore[arg-type]

    def around(self, mean: float) -> float:
        """Returns the tolerance in the metric's own unit.

        Args:
            mean: the mean metric in float32.

        Raises:
            OptionError: it is a share of 0.
        """
        if self._is_relative and not mean:
            raise OptionError(
                f"tolerance is {100 * self._number:g}% of float32's metric, which is 0. Give a number in the metric's "
                "own unit."
            )
        return self._number * abs(mean) if self._is_relative else self._number


class _Search:
    """One search.

    Args:
        trials: runs and judges the trainings.
        progress: told how many runs are left.
        tolerance: how much worse the metric may be.
    """

    def __init__(self, trials: Trials, progress: Progress, tolerance: Tolerance) -> None:
        self._trials, self._progress, self._tolerance = trials, progress, tolerance
        self._seeds = len(trials.seeds)
        self._observed = Observed((), 0, 0)
        self._functions: dict[str, SeenFunction] = {}
        self._notes: list[str] = []
        self._baseline: TunedTrial | None = None

    def run(self) -> Tuning:
        """Searches until the end, or until the budget ends."""
        try:
            kept, complete = self._searched(), True
        except BudgetEndedError:
            kept, complete = self._best(), False
        return self._result(kept, complete)

    def _searched(self) -> Kept | None:
        """Returns the functions to keep in float32; None if no list passes."""
        trials = self._trials
        self._expect(12)
        self._baseline = trials.baseline()
        trials.tolerance = self._tolerance.around(self._baseline.mean)
        self._note_noise(self._baseline)
        self._expect(11)
        first = trials.trial(_NOTHING, "the lists as they are", is_first=True)
        self._look(_NOTHING)
        if first.verdict != FAILS:
            return _NOTHING if first.passes else None
        everything = self._everything()
        if everything is None:
            return None
        groups = self._groups()
        self._expect(2 * len(groups) + 8)
        kept = accumulated(groups, self._effect, self._passes, everything)
        light_first = [path for path in self._functions if path in kept]
        self._expect(2 * len(light_first))
        kept = minimal(self._passes, light_first)
        while True:
            heavy_first = [path for path in reversed(self._functions) if path in kept]
            self._expect(len(heavy_first) + 1)
            kept = restored(self._passes, kept, heavy_first)
            best = self._best()
            if best is None or best == kept or self._value(best) <= self._value(kept):
                return kept
            kept = best

    def _everything(self) -> Kept | None:
        """Returns all whitelisted functions if the training passes with them in float32; None if it does not."""
        for _ in range(_LOOKS):
            kept = frozenset(path for path, each in self._functions.items() if each.rule == "whitelist")
            if not kept:
                return None
            trial = self._trials.trial(kept, "all whitelisted functions in float32")
            if trial.passes:
                return kept
            known = set(self._functions)
            if not self._look(kept) or known >= set(self._functions):
                return None
        return None

    def _look(self, kept: Kept) -> bool:
        """Watches a training, and adds the functions that it calls; returns False if it could not be watched."""
        observed = self._trials.watched(kept, "watched again")
        if observed is None:
            return False
        if not kept:
            self._observed = observed
            first = self._trials.judged[_NOTHING]
            if not observed.functions and not observed.half_flops and not first.error:
                raise OptionError(
                    "no function that train called got half tensors, so that there is nothing to tune. Call "
                    "amp.initialize before the training, and leave amp.disable_casts out."
                )
            self._notes += observed.notes
        found = {each.path: each for each in observed.functions}
        merged = {**found, **self._functions}
        self._functions = dict(sorted(merged.items(), key=lambda item: (item[1].half_flops, item[0])))
        self._observed = replace(self._observed, functions=tuple(self._functions.values()))
        return True

    def _groups(self) -> dict[str, Kept]:
        """Returns the functions in groups: first those with the fewest FLOPs, of these the smallest."""
        groups = grouped((each.group, each) for each in self._functions.values())
        flops = {name: sum(each.half_flops for each in group) for name, group in groups.items()}
        order = sorted(groups, key=lambda name: (flops[name], len(groups[name]), name))
        return {name: frozenset(each.path for each in groups[name]) for name in order}

    def _effect(self, kept: Kept) -> float:
        return -self._trial(kept).worse  # worse is inf if the training failed

    def _passes(self, kept: Kept) -> bool:
        return self._trial(kept).passes

    def _trial(self, kept: Kept) -> TunedTrial:
        groups = {name for name, group in self._groups().items() if group <= kept}
        rest = [path for path in sorted(kept) if self._functions[path].group not in groups]
        return self._trials.trial(kept, f"{', '.join([*sorted(groups), *rest])} in float32")

    def _value(self, kept: Kept) -> tuple[float, int]:
        """Returns what makes a list better: first the share of the FLOPs in half, then few functions."""
        return self._observed.share_without(kept) or 0.0, -len(kept)

    def _best(self) -> Kept | None:
        passing = [kept for kept, trial in self._trials.judged.items() if trial.passes]
        return max(passing, key=self._value, default=None)

    def _expect(self, trials: int) -> None:
        self._progress.expect(trials * self._seeds)

    def _note_noise(self, baseline: TunedTrial) -> None:
        metrics = {metric for _, metric in baseline.metrics}
        if self._seeds == 1:
            self._notes.append("One seed: the noise of the metric is unknown. Type seeds=3 for three.")
        elif len(metrics) == 1:
            self._notes.append(
                "In float32 the metric is the same for all seeds: it shows no noise, so that the seeds are no repeats."
            )
        elif baseline.noise > self._trials.tolerance:
            self._notes.append(
                f"In float32 alone the metric has a standard deviation of {baseline.noise:.2g} over the seeds, above "
                f"the tolerance of {self._trials.tolerance:.2g}."
            )

    def _result(self, kept: Kept | None, complete: bool) -> Tuning:
        trials, share, is_measured = self._trials, None, False
        first = trials.judged.get(_NOTHING)
        verdict = PASSES if kept is not None else CANNOT_TELL if first is None else first.verdict
        if kept is None and complete and list(trials.judged.values())[-1].verdict == CANNOT_TELL:
            verdict = CANNOT_TELL  # of all whitelisted functions in float32
        needed: list[tuple[str, TunedTrial]] = []
        if kept is not None:
            share, is_measured = self._observed.share_without(kept), not kept
            if kept and complete:
                with contextlib.suppress(BudgetEndedError):
                    observed = trials.watched(kept, "watched for its FLOPs")
                    share, is_measured = (share, False) if observed is None else (observed.share, True)
            if any(path.startswith("__main__.") for path in kept):
                self._notes.append(
                    "__main__ in the list is the script that called amp.tune: elsewhere type its module's name instead."
                )
            needed = [(path, trials.judged[kept - {path}]) for path in sorted(kept) if kept - {path} in trials.judged]
        # Not of the sets between, which the user never sees.
        warned = [text for each in (None, _NOTHING, kept) for text in trials.warned.get(each, ())]
        return Tuning(
            verdict,
            complete,
            () if kept is None else tuple(sorted(kept)),
            trials.training.opt_level,
            trials.half_dtype,
            trials.training.higher_is_better,
            trials.tolerance,
            trials.seeds,
            self._baseline or TunedTrial((), (), float("nan"), 0.0, 0.0, CANNOT_TELL),
            tuple(replace(trial, share=self._observed.share_without(each)) for each, trial in trials.judged.items()),
            tuple(needed),
            share,
            is_measured,
            tuple(str(each) if isinstance(each, (str, PathLike)) else MAPPING for each in trials.training.overlays),
            len(trials.budget.spent),
            trials.journal.resumed,
            sum(trials.budget.spent, 0.0),
            tuple(dict.fromkeys([*self._notes, *warned])),
            {
                "date": datetime.datetime.now().astimezone().date().isoformat(),
                "ampatch": __version__,
                "torch": torch.__version__,
                "device": _device(),
            },
        )


def _about(training: Training) -> dict[str, str]:
    """Returns what the runs of a journal have in common."""
    return {
        "ampatch": __version__,
        "torch": torch.__version__,
        "the device": _device(),
        "opt_level": training.opt_level,
        "half_dtype": training.half_name or "the default",
        "the cast lists": _digest(training.lists),
        "registered functions": ", ".join(sorted(_registered_name(each) for each in runtime.registered)),
        "train": fingerprint(training.train),
        "evaluate": fingerprint(training.evaluate),
    }


def _registered_name(registration: Registration) -> str:
    owner = getattr(registration.owner, "__name__", repr(registration.owner))
    return f"{owner}.{registration.name} ({registration.treatment.value})"


def _digest(lists: CastLists) -> str:
    rules = sorted(_as_text(path, half, rule) for (path, half), rule in lists.told().items())
    for entry in lists.modules:  # their order counts
        changes = [_as_text(path, half, rule) for (path, half), rule in entry.changes or ()]
        rules.append(f"{entry.name} {entry.is_float32} {changes}")
    return hashlib.sha256("\n".join(rules).encode()).hexdigest()[:12]


def _as_text(path: Path, half: torch.dtype, rule: Rule | None) -> str:
    decided = None if rule is None else (rule.treatment.value, rule.when, rule.via_dtype, sorted(rule.needs_float32))
    return f"{path} {half} {decided}"


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def checked_seeds(seeds: object) -> tuple[int, ...]:
    """Returns the seeds that a user's argument stands for.

    Args:
        seeds: a number of seeds, which are 0, 1, ...; or the seeds themselves.

    Raises:
        OptionError: it is neither.
    """
    expected = "expected a number of seeds, such as 3, or different seeds from 0 to 2**32 - 1, such as (0, 1, 2)"
    given: tuple[Any, ...] = ()
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        given = tuple(range(seeds))
    elif isinstance(seeds, (list, tuple, range)):
        given = tuple(seeds)
    is_right = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**32 for each in given)
    if not given or not is_right or len(set(given)) != len(given):
        raise OptionError(f"seeds is {seeds!r}; {expected}.")
    return given


def checked_function(name: str, given: Any, does: str) -> Callable[..., Any]:
    """Returns a function of the user's.

    Raises:
        OptionError: it cannot be called.
    """
    if not callable(given):
        raise OptionError(f"{name} is {type(given).__name__!r}; expected a function that {does}.")
    return given  # type: ignore[no-any-return]
