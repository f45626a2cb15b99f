"""`amp.replay`: runs a skipped step again, from its file, with its own settings and at other opt levels.

Owns the order of the runs. Must never touch the user's models, nor leave a session: copies run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import Any

import torch
import yaml
from torch import nn

from ampatch import checkpoint_policy, saved_policy
from ampatch.cast_lists.lists import shipped
from ampatch.diagnostics.overflow import step_file
from ampatch.diagnostics.overflow.forwards import stand_in
from ampatch.diagnostics.overflow.trace import OverflowTrace
from ampatch.diagnostics.overflow.tracer import OverflowTracer
from ampatch.diagnostics.replay.result import Replay, ReplayedLevel
from ampatch.diagnostics.trial_steps.levels import Level, name_of
from ampatch.diagnostics.trial_steps.steps import Setup, opened
from ampatch.diagnostics.trial_steps.subject import copied, text_of, undisturbed
from ampatch.settings import Settings

_LOST = (
    "gradients that came into the outputs were inf or NaN; in all rows but the first, backward passes began with the "
    "loss scale, divided by the number of elements, in each element of the output"
)

#: Tried without being asked for: the levels that `amp.initialize` offers, each with its half types.
LEVELS = ("O1", "O2", ("O3", torch.float16))


def replay(
    path: str | PathLike[str], models: Sequence[nn.Module], levels: Sequence[Level], *, compiled: bool
) -> Replay:
    """Runs what `amp.replay` describes.

    Raises:
        UsageError: amp is set up.
        OptionError: the file holds no step, or the models are not those of the step.
    """
    saved = step_file.read(path)
    overlay = [yaml.safe_load(text) for _, text in saved["policy"]["overlays"]]
    own = Settings.of_plain_data(saved["settings"], shipped().overlaid(overlay))
    run = _Run(saved, models, fspath(path))
    with undisturbed("amp.replay"):
        name = f"{name_of(own.properties.opt_level, own.properties.half_dtype)}, as saved"
        trace, first = run.at(own, name, is_recorded=True)
        others = (("O0", torch.float16), *levels)
        rows = [first, *(run.at(Setup(*each, overlay=overlay).settings(), name_of(*each))[1] for each in others)]
        if compiled:
            rows.append(run.compiled(own, f"{name}, compiled"))
    is_same, compared = _compared(trace.to_dict(), saved["trace"])
    return Replay(fspath(path), trace, is_same, compared, tuple(rows), tuple(run.notes))


class _Run:
    """Runs a saved step on copies of the models.

    Args:
        saved: the step.
        models: the user's models.
        name: that of the file.

    Attributes:
        notes: what may differ from the step as it was.
    """

    def __init__(self, saved: dict[str, Any], models: Sequence[nn.Module], name: str) -> None:
        self._saved = saved
        self._models = [copied(model) for model in models]
        step_file.put_into(self._models, saved["models"], name)
        self.notes: dict[str, None] = {}
        if any(device for each in saved["forwards"] for device, _ in each["random"]) and not torch.cuda.is_available():
            self.notes["random numbers of a GPU are others here, such as those of dropout"] = None

    def at(self, settings: Settings, name: str, *, is_recorded: bool = False) -> tuple[OverflowTrace, ReplayedLevel]:
        """Runs the step with some settings, watched; returns the trace, and the row of the table."""
        try:
            with self._opened(settings, is_recorded) as (tracer, noted):
                trace, is_finite = tracer.by_second_run(noted, self._saved["loss_scale"])
        except Exception as error:
            if is_recorded:
                raise
            return OverflowTrace(), ReplayedLevel(name, None, text_of(error))
        if trace.direction != "unknown":
            return trace, ReplayedLevel(name, False, trace.headline, trace)
        return trace, ReplayedLevel(name, is_finite, "" if is_finite else "; ".join(trace.notes))

    def compiled(self, settings: Settings, name: str) -> ReplayedLevel:
        """Runs the step with some settings in compiled models; returns the row of the table."""
        try:
            with self._opened(settings, True, compiles=True) as (_, noted):
                given: dict[str, Any] = {"replaces": stand_in(self._saved["loss_scale"]), "prepare": nn.Module.compile}
                finite = [each.run_again(None, **given).is_finite for each in noted]
        except Exception as error:  # noqa: BLE001 - a model or a compiler may raise anything
            return ReplayedLevel(name, None, text_of(error))
        return ReplayedLevel(name, all(finite))

    @contextlib.contextmanager
    def _opened(self, settings: Settings, is_recorded: bool, compiles: bool = False) -> Iterator[Any]:
        models = [copied(model) for model in self._models]
        stance = torch.compiler.set_stance("default") if compiles else contextlib.nullcontext()
        with opened(models, settings) as (session, _), stance:
            by_call = compiles or not is_recorded
            noted = step_file.loaded(self._saved, models, as_saved=is_recorded, by_call=by_call)
            if is_recorded:
                self.notes |= dict.fromkeys([_LOST] * any(each.has_lost_gradients for each in noted))
                told = saved_policy.differences(self._saved["policy"], checkpoint_policy.effective(session))
                self.notes |= dict.fromkeys(f"the policy differs from that of the run: {each}" for each in told)
            yield OverflowTracer(session), noted


def _compared(trace: dict[str, Any], saved: dict[str, Any]) -> tuple[bool, str]:
    """Returns whether a trace names the place that the saved one names, and what to say of that."""
    if saved["direction"] == "unknown":
        return False, "the saved trace names no place"
    if trace["direction"] == "unknown":
        return False, "no place, so that the model's code or its settings may differ from those of the run"
    is_same = all(trace[name] == saved[name] for name in ("direction", "function", "operator", "module"))
    # The line may be that of the call of the model, which is another here.
    is_same = is_same and trace["line"] in (saved["line"], None)
    return is_same, "the place of the saved trace" if is_same else "another place than the saved trace names"
