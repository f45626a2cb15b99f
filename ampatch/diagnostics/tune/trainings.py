"""One training of a search: runs the user's functions with a seed and cast lists, from the same state each time.

Owns the check that the training used the options that it was given, and restores the state of the process. Must not
choose which functions to try, nor judge a metric.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from ampatch.cast_lists.lists import CastLists
from ampatch.diagnostics.process_state import ProcessState, seed_all
from ampatch.diagnostics.trial_steps.subject import noting_warnings
from ampatch.diagnostics.tune.functions import Observed, TrainingRecorder
from ampatch.diagnostics.tune.result import blacklist
from ampatch.diagnostics.tune.search import Kept
from ampatch.distributed import has_other_ranks
from ampatch.errors import CastListError, KernelError, OptionError, UsageError
from ampatch.opt_levels import dtype_name
from ampatch.runtime import runtime, turn_off
from ampatch.session import Session
from ampatch.version import __version__

#: Exceptions that say nothing about half: wrong calls of amp, and those of the machine.
_NOT_OF_HALF = (
    *(OptionError, UsageError, CastListError, KernelError),
    *(OSError, MemoryError, torch.OutOfMemoryError, ImportError),
)

_NOTE_FLOAT32 = "ampatch: train or evaluate raised this in float32 (opt_level='O0'), before any cast list was tried."
_NOTE = "ampatch: amp.tune stopped here. With journal='tune.json' a later call goes on after the last finished run."


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


@dataclass(slots=True)
class Training:
    """What the user wants to train.

    Attributes:
        train: trains a new model with options for ``amp.initialize``, and returns it.
        evaluate: returns the metric of such a model.
        options: these options, without cast lists.
        overlays: the user's cast lists, in their order.
        lists: these laid over the shipped ones.
        seeds: the seeds of each trial.
        state: the state of the process in which each run begins.
        warned: what amp warned of in the runs, by the functions in float32; None for O0.
    """

    train: Callable[[dict[str, Any]], Any]
    evaluate: Callable[[Any], Any]
    options: dict[str, str]
    overlays: tuple[Any, ...]
    lists: CastLists
    seeds: tuple[int, ...]
    state: ProcessState = field(default_factory=ProcessState)
    warned: dict[Kept | None, list[str]] = field(default_factory=dict)
    _last: weakref.ref[nn.Module] | None = None

    def about(self) -> dict[str, str]:
        """Returns what the runs of a journal have in common, by its name in words."""
        lists = [yaml.safe_load(text) for text in self.lists.texts]  # comments and spaces do not count
        registered = sorted(f"{each.path} ({each.treatment.value})" for each in runtime.registered)
        return {
            "ampatch": __version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "opt_level": self.options["opt_level"],
            "half_dtype": self.options.get("half_dtype", "the default"),
            "the cast lists": _digest(repr(lists)),
            "registered functions": ", ".join(registered),
            "train": fingerprint(self.train),
            "evaluate": fingerprint(self.evaluate),
        }

    def run(self, kept: Kept | None, seed: int, *, watched: bool) -> Run:
        """Trains and evaluates once.

        Args:
            kept: the functions in float32; None for a training without amp's casts (O0).
            seed: the seed.
            watched: whether to record what the training calls.
        """
        if has_other_ranks():
            raise UsageError(
                "amp.tune runs in a group of several ranks. Each would choose by metrics and times of its own, and "
                "wait for the others for ever. Call it in one process."
            )
        recorder, sessions = TrainingRecorder(self._lists_for(kept)), list[Session]()
        self.state.restore()
        seed_all(seed)
        metric, error = math.nan, ""
        began = time.monotonic()
        with noting_warnings(self.warned.setdefault(kept, [])), contextlib.ExitStack() as stack:
            runtime.before_close.append(sessions.append)
            stack.callback(runtime.before_close.remove, sessions.append)
            stack.callback(turn_off)
            try:
                with recorder if watched else contextlib.nullcontext():
                    model = self.train(self._options_for(kept))
                    self._check_options_used([*sessions, *filter(None, [runtime.live])], kept)
                    self._check_trained(model, seed)
                    recorder.counts_flops = False
                    metric = _number(self.evaluate(model))
            except Exception as raised:
                if kept is None or isinstance(raised, _NOT_OF_HALF):
                    raised.add_note(_NOTE_FLOAT32 if kept is None else _NOTE)
                    raise
                error = f"{type(raised).__name__}: {raised}"
        if torch.cuda.is_initialized():
            gc.collect()  # a model in a reference cycle would keep its memory into the next run
        half = "" if kept is None or not sessions else dtype_name(sessions[0].settings.properties.half_dtype)
        observed = recorder.observed() if watched else None
        return Run(kept, seed, metric, time.monotonic() - began, error, half, observed)

    def _options_for(self, kept: Kept | None) -> dict[str, Any]:
        """Returns the options of one run, made anew: the user's function may change them."""
        if kept is None:
            return {"opt_level": "O0"}
        overlays: list[Any] = [*self.overlays, *([blacklist(kept)] if kept else [])]
        return {**self.options, **({"cast_lists": overlays} if overlays else {})}

    def _lists_for(self, kept: Kept | None) -> CastLists:
        return self.lists.overlaid(blacklist(kept)) if kept else self.lists

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
        typed = "Type amp.initialize(model, optimizer, **amp_options) in train(amp_options)."
        if not opened:
            raise OptionError(f"train did not call amp.initialize, so that no cast list has an effect. {typed}")
        given = {"opt_level": "O0"} if kept is None else {**self.options, "cast_lists": self._lists_for(kept)}
        for settings in (session.settings for session in opened):
            level, half = settings.properties.opt_level, dtype_name(settings.properties.half_dtype)
            used = {"opt_level": level, "half_dtype": half, "cast_lists": settings.lists}
            differing = [name for name, value in given.items() if used[name] != value]
            if differing:
                raise OptionError(
                    f"train called amp.initialize with other {' and '.join(differing)} than its argument has. {typed} "
                    "Give cast lists of your own as amp.tune(..., cast_lists=...)."
                )


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):  # such as that of a comparison with a goal
            raise TypeError("a bool is no metric")
        return math.fsum([value.detach() if isinstance(value, Tensor) else value])  # float() would take text
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"evaluate returned {value!r}; expected one number, the metric.") from error


def fingerprint(function: Any) -> str:
    """Returns a short text that changes with a function's name and source; functions that it calls do not count."""
    while isinstance(function, partial):
        function = function.func
    code = function if inspect.isroutine(function) else type(function)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # such as one typed at a prompt
        source = ""
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', '')} {_digest(source)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
