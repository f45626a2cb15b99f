"""Trainings of a search: runs each with its seed and its cast lists, and judges the metric beside the noise.

Owns the check that a run used the options that it was given, and restores the state of the process after it. Must not
choose which functions to try.
"""

from __future__ import annotations

import contextlib
import gc
import math
import numbers
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _device

from ampatch.cast_lists.lists import CastLists
from ampatch.diagnostics.preflight_subject import RandomState, noting_warnings
from ampatch.diagnostics.tuning_budget import Budget, Progress
from ampatch.diagnostics.tuning_functions import Observed, TrainingRecorder, blacklist
from ampatch.diagnostics.tuning_journal import Journal, Run
from ampatch.diagnostics.tuning_report import CANNOT_TELL, FAILS, PASSES, TunedTrial
from ampatch.diagnostics.tuning_search import Kept
from ampatch.distributed import has_other_ranks
from ampatch.errors import (
    AmpError,
    BannedFunctionError,
    GradientOverflowError,
    LossScaleError,
    OptionError,
    UsageError,
)
from ampatch.opt_levels import dtype_name
from ampatch.runtime import close_session, forget_replaced, runtime
from ampatch.session import Session

#: Standard errors of the mean difference that count as noise.
MARGIN = 2.0
#: A first seed that is worse by the tolerance and this many standard deviations of float32's seeds decides alone.
_CERTAIN = 3.0

#: Exceptions that say nothing about half: the machine's, or a wrong call of amp.
_NOT_OF_HALF = (OSError, MemoryError, torch.OutOfMemoryError, ImportError)
_OF_HALF = (LossScaleError, GradientOverflowError, BannedFunctionError)


#: What a training may change in torch and amp: how to read each setting, and how to write it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: _device.CURRENT_DEVICE, torch.set_default_device),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    *(
        (partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name))
        for name in ("deterministic", "benchmark", "allow_tf32")
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    (lambda: runtime.disabled, partial(setattr, runtime, "disabled")),
)


class ProcessState:
    """The random numbers and the settings of torch and amp at the time it was made."""

    def __init__(self) -> None:
        self._random = RandomState()
        self._settings = [(read, write, read()) for read, write in _SETTINGS]

    def restore(self) -> None:
        """Restores all of it; writes what has changed only, as some settings take long."""
        for read, write, value in self._settings:
            if read() != value:
                write(value)
        self._random.restore()


@dataclass(frozen=True, slots=True)
class Training:
    """What the user wants to train.

    Attributes:
        train: trains a new model with options for ``amp.initialize``, and returns it.
        evaluate: returns the metric of such a model.
        opt_level: "O1" or "O4".
        half_name: the half type; None leaves it to ``amp.initialize``.
        overlays: the user's cast lists, in their order.
        lists: these laid over the shipped ones.
        higher_is_better: whether a greater metric is better.
    """

    train: Callable[[dict[str, Any]], Any]
    evaluate: Callable[[Any], Any]
    opt_level: str
    half_name: str | None
    overlays: tuple[Any, ...]
    lists: CastLists
    higher_is_better: bool

    def options(self, kept: Kept | None) -> dict[str, Any]:
        """Returns the options of one run, made anew: the user's function may change them."""
        if kept is None:
            return {"opt_level": "O0"}
        overlays: list[Any] = [*self.overlays, *([blacklist(kept)] if kept else [])]
        return {
            "opt_level": self.opt_level,
            **({} if self.half_name is None else {"half_dtype": self.half_name}),
            **({"cast_lists": overlays} if overlays else {}),
        }

    def lists_for(self, kept: Kept) -> CastLists:
        """Returns the lists of one run."""
        return self.lists.overlaid(blacklist(kept)) if kept else self.lists


class Trials:
    """Runs trainings, each once, and judges them.

    Args:
        training: what to train.
        seeds: the seeds of each trial.
        journal: the runs that have finished.
        budget: the budget; checked before each run.
        progress: told about each run.
        state: the state of the process in which each run begins.

    Attributes:
        warned: what amp warned of in the runs, by the functions in float32; None for O0.
        tolerance: how much worse the metric may be; set once float32's mean is known.
    """

    def __init__(
        self,
        training: Training,
        seeds: Sequence[int],
        journal: Journal,
        budget: Budget,
        progress: Progress,
        state: ProcessState,
    ) -> None:
        self.training, self.seeds, self.journal, self.budget = training, tuple(seeds), journal, budget
        self.warned: dict[Kept | None, list[str]] = {}
        self.tolerance = math.nan
        self.half_dtype = ""
        self.judged: dict[Kept, TunedTrial] = {}
        self._progress, self._state = progress, state
        self._baseline: dict[int, float] = {}
        self._deviation = 0.0
        self._times: dict[bool, float] = {}
        self._last: weakref.ref[Any] | None = None

    def baseline(self) -> TunedTrial:
        """Runs all seeds in float32.

        Raises:
            OptionError: a metric is not finite.
        """
        for seed in self.seeds:
            run = self._run(None, seed, "float32")
            if run.failed:
                raise OptionError(
                    f"the metric is {run.metric} in float32 with seed {seed}, so that there is nothing to compare "
                    "with. Expected a finite number: mend the training or evaluate first."
                )
            self._baseline[seed] = run.metric
        metrics = list(self._baseline.values())
        self._deviation = statistics.stdev(metrics) if len(metrics) > 1 else 0.0
        return TunedTrial((), tuple(self._baseline.items()), statistics.fmean(metrics), 0.0, self._deviation, PASSES)

    def trial(self, kept: Kept, what: str, *, is_first: bool = False) -> TunedTrial:
        """Runs the seeds with some functions in float32, and judges the metrics.

        Stops after the first seeds if these leave no doubt that the trial fails, unless it is the first trial of all.

        Args:
            kept: the functions in float32.
            what: the trial in words.
            is_first: whether this is the first trial, which runs all seeds.
        """
        known = self.judged.get(kept)
        if known is not None:
            return known
        runs: list[Run] = []
        for seed in self.seeds:
            runs.append(self._run(kept, seed, what, watched=is_first and not runs))
            if runs[-1].failed or (not is_first and self._is_hopeless(runs)):
                break
        self.half_dtype = self.half_dtype or runs[0].half_dtype
        self.judged[kept] = self._judge(kept, runs)
        return self.judged[kept]

    def watched(self, kept: Kept, what: str) -> Observed | None:
        """Runs the first seed again, watched, unless it was; returns what it called."""
        return self._run(kept, self.seeds[0], what, watched=True).observed

    def _worse(self, run: Run) -> float:
        """Returns by how much a run is worse than float32 with the same seed."""
        difference = self._baseline[run.seed] - run.metric
        return difference if self.training.higher_is_better else -difference

    def _is_hopeless(self, runs: Sequence[Run]) -> bool:
        noise = _CERTAIN * math.sqrt(2) * self._deviation
        return len(self.seeds) > 1 and min(map(self._worse, runs)) > self.tolerance + noise

    def _judge(self, kept: Kept, runs: Sequence[Run]) -> TunedTrial:
        metrics = tuple((run.seed, run.metric) for run in runs)
        paths = tuple(sorted(kept))
        failed = next((run for run in runs if run.failed), None)
        if failed is not None:
            return TunedTrial(paths, metrics, math.nan, math.inf, 0.0, FAILS, failed.error)
        differences = [self._worse(run) for run in runs]
        worse = statistics.fmean(differences)
        noise = MARGIN * statistics.stdev(differences) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
        is_short = len(runs) < len(self.seeds)
        # The rounding of the means themselves is no difference.
        bound = self.tolerance * (1 + 1e-9)
        verdict = PASSES if worse + noise <= bound else FAILS if is_short or worse - noise > bound else CANNOT_TELL
        return TunedTrial(paths, metrics, statistics.fmean(run.metric for run in runs), worse, noise, verdict)

    def _run(self, kept: Kept | None, seed: int, what: str, watched: bool = False) -> Run:
        known = self.journal.find(kept, seed, watched)
        if known is not None:
            self._times.setdefault(known.observed is not None, known.seconds)
            return known
        run = self._counted(kept, seed, what, watched)
        plain = self.journal.find(kept, seed, False)
        if plain is None and run.observed is not None and run.observed.is_disturbed and not run.failed:
            plain = self._counted(kept, seed, what, False)
        if plain is not None:
            run = replace(plain, observed=run.observed)
        self.journal.add(run)
        return run

    def _counted(self, kept: Kept | None, seed: int, what: str, watched: bool) -> Run:
        """Runs once if the budget allows, and reports it."""
        self.budget.check(self._times.get(watched, self._times.get(False, 0.0)))
        run = self._ran(kept, seed, watched)
        self.budget.spent.append(run.seconds)
        self._times[watched] = max(run.seconds, self._times.get(watched, 0.0))
        outcome = run.error.partition("\n")[0] or f"{run.metric:.6g}"
        self._progress.finished(f"{what}, seed {seed}", outcome)
        return run

    def _ran(self, kept: Kept | None, seed: int, watched: bool) -> Run:
        """Trains and evaluates once."""
        if has_other_ranks():
            raise UsageError(
                "amp.tune runs in a group of several ranks. Each would choose by metrics and times of its own, and "
                "wait for the others for ever. Call it in one process."
            )
        recorder = TrainingRecorder(self.training.lists_for(kept)) if watched and kept is not None else None
        sessions: list[Session] = []
        self._state.restore()
        _seed_all(seed)
        metric, error = math.nan, ""
        began = time.monotonic()
        runtime.before_close.append(sessions.append)
        try:
            with noting_warnings(self.warned.setdefault(kept, [])):
                try:
                    metric = self._metric(kept, seed, sessions, recorder)
                except Exception as raised:
                    is_complaint = isinstance(raised, AmpError) and not isinstance(raised, _OF_HALF)  # of arguments
                    if kept is None or is_complaint or isinstance(raised, _NOT_OF_HALF):
                        raised.add_note(_NOTE_FLOAT32 if kept is None else _NOTE)
                        raise
                    error = f"{type(raised).__name__}: {raised}"
                finally:
                    _close()
        finally:
            runtime.before_close.remove(sessions.append)
            if torch.cuda.is_initialized():
                gc.collect()  # a model in a reference cycle would keep its memory into the next run
        half = "" if kept is None or not sessions else dtype_name(sessions[0].settings.properties.half_dtype)
        observed = None if recorder is None else recorder.observed()
        return Run(kept, seed, metric, time.monotonic() - began, error, half, observed)

    def _metric(
        self, kept: Kept | None, seed: int, sessions: list[Session], recorder: TrainingRecorder | None
    ) -> float:
        with recorder or contextlib.nullcontext():
            model = self.training.train(self.training.options(kept))
            self._check_options_used([*sessions, *([] if runtime.live is None else [runtime.live])], kept)
            self._check_trained(model, seed)
            if recorder is not None:
                recorder.counts_flops = False
            return _number(self.training.evaluate(model))

    def _check_trained(self, model: Any, seed: int) -> None:
        """Raises if train has set the seed, or returns no new model."""
        if torch.initial_seed() != seed and len(self.seeds) > 1:
            raise OptionError(
                f"train set torch's seed itself, to {torch.initial_seed()}; amp.tune had set it to {seed}, and "
                "measures the noise by several seeds. Leave torch.manual_seed out of train, or type "
                "torch.manual_seed(torch.initial_seed())."
            )
        if model is None:
            raise OptionError("train returned None; expected the trained model. Type `return model` at its end.")
        if isinstance(model, nn.Module):
            if self._last is not None and self._last() is model:
                raise OptionError(
                    "train returned the same model as in the run before, so that each run would go on where the last "
                    "one ended. Make a new model, and a new optimizer, inside train."
                )
            self._last = weakref.ref(model)

    def _check_options_used(self, opened: Sequence[Session], kept: Kept | None) -> None:
        """Raises if train did not give its options to ``amp.initialize``."""
        expected = None if kept is None else self.training.lists_for(kept)
        level = "O0" if expected is None else self.training.opt_level
        typed = "Type amp.initialize(model, optimizer, **amp_options) in train(amp_options)."
        if not opened:
            raise OptionError(f"train did not call amp.initialize, so that no cast list has an effect. {typed}")
        for session in opened:
            properties = session.settings.properties
            if properties.opt_level != level:
                raise OptionError(
                    f"train called amp.initialize with opt_level={properties.opt_level!r}; expected {level!r}, as its "
                    f"argument has it. {typed}"
                )
            if expected is not None and session.settings.lists != expected:
                raise OptionError(
                    "train called amp.initialize with other cast lists than those in its argument. Give lists of your "
                    f"own as amp.tune(..., cast_lists=...). {typed}"
                )
            given = self.training.half_name
            half = dtype_name(properties.half_dtype)
            if expected is not None and given is not None and half != given:
                raise OptionError(
                    f"train called amp.initialize with half_dtype={half!r}; expected {given!r}, as its argument has "
                    f"it. {typed}"
                )


_NOTE_FLOAT32 = "ampatch: train or evaluate raised this in float32 (opt_level='O0'), before any cast list was tried."
_NOTE = "ampatch: amp.tune stopped here. With journal='tune.json' a later call goes on after the last finished run."


def is_users(error: BaseException) -> bool:
    """Returns True if the user's code, and not `tune` itself, raised an exception that came out of it."""
    return not {_NOTE_FLOAT32, _NOTE}.isdisjoint(getattr(error, "__notes__", ()))


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.item())
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or hasattr(value, "__float__")):
        raise OptionError(f"evaluate returned {type(value).__name__!r}; expected one number, the metric.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"evaluate returned {value!r}; expected one number, the metric.") from error


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _close() -> None:
    """Takes down what a run has set up, as ``amp.deinitialize`` does."""
    runtime.disabled = False
    forget_replaced()
    if runtime.live is not None:
        close_session(runtime.live)


@contextlib.contextmanager
def restoring() -> Iterator[ProcessState]:
    """Gives the state of the process, and restores it at the end.

    Raises:
        UsageError: amp is set up.
    """
    if runtime.live is not None:
        raise UsageError(
            "amp.tune sets amp up for each of its runs, and amp is set up already. Type amp.deinitialize() first."
        )
    state = ProcessState()
    try:
        yield state
    finally:
        state.restore()
