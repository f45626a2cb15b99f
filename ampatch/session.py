"""The session: all that amp has installed between ``amp.initialize`` and ``amp.deinitialize``, as a list of parts.

Adopts models and optimizers as a whole or not at all, and takes everything down. A concern of its own has no place
here: it belongs to one of `ampatch.parts`. Must not know whether it is the live session: `ampatch.runtime` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from ampatch.casting import write_back
from ampatch.distributed import Ranks
from ampatch.errors import warn
from ampatch.ledger import PatchLedger
from ampatch.parts.adopted import Adopted
from ampatch.parts.casts import Casts
from ampatch.parts.ddp_and_fsdp import Wrappers
from ampatch.parts.gradients import Gradients
from ampatch.parts.losses import Losses
from ampatch.parts.masters import Masters
from ampatch.parts.optimizer_warnings import warn_of_bad_training
from ampatch.parts.part import Part, Shared
from ampatch.parts.state_dicts import StateDicts
from ampatch.parts.weights import Weights
from ampatch.patching import adopted_model, cuda_graphs
from ampatch.patching.adopted_forward import Recorder
from ampatch.patching.adopted_model import Hooks
from ampatch.patching.cast_labels import LabellingCache
from ampatch.patching.function_patches import Registration
from ampatch.patching.weight_cache import WeightCache
from ampatch.scaling.overflows import Tracer
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.settings import LiveSettings, Settings
from ampatch.switch import Switch
from ampatch.torch_private.optimizers import WRAPPED_BY_SCHEDULER


class SessionTracer(Tracer, Recorder, Protocol):
    """A tracer of a session's steps."""

    def install(self, ledger: PatchLedger) -> None:
        """Begins to watch; the ledger records how to undo that."""


class Session:
    """All that amp has installed.

    Args:
        settings: the settings of the session.
        device_types: device types of the tensors to cast; `adopt` adds those of its models.
        hooks: the hooks for models and wrappers.
        registered: the functions that the user has registered.

    Attributes:
        settings: as given.
        device_types: device types of the tensors to cast.
        switch: whether casts are on.
        cache: casts of weights.
        ledger: the record of all patches.
        ranks: the ranks that may share gradients.
        adopted: the adopted models and optimizers.
        weights: the converted weights.
        casts: the casts in torch's functions.
        masters: the float32 masters of half weights.
        losses: loss scales, blocks, and steps that may be skipped.
        gradients: the gradients as user code meets them.
        wrappers: DistributedDataParallel and FSDP around models.
        state_dicts: what is saved and loaded of half weights.
        parts: the parts, each after those that it needs.
    """

    def __init__(
        self, settings: Settings, device_types: Iterable[str], hooks: Hooks, registered: Sequence[Registration]
    ) -> None:
        self.settings, self.ledger, self.ranks, self.adopted = settings, PatchLedger(), Ranks(), Adopted()
        self.switch = Switch(settings.patches_functions)
        cache_type = LabellingCache if settings.profile_casts else WeightCache
        # Functions that need float32 get casts of half weights, which optimizers write to without notice.
        self.cache = cache_type(settings.enable_caching and settings.patches_functions)
        self.device_types = set(device_types)
        shared = Shared(
            settings, hooks, self.device_types, self.switch, self.cache, self.ledger, self.ranks, self.adopted
        )
        self._hooks = hooks
        self.weights = Weights(shared)
        self.casts = Casts(shared, registered)
        self.masters = Masters(shared, self.weights)
        self.losses = Losses(shared, self.weights, self.masters, self.casts, self.adopt)
        self.gradients = Gradients(shared, self.masters, self.losses)
        self.wrappers = Wrappers(shared, self.weights, self.masters, self.losses)
        self.state_dicts = StateDicts(shared, self.weights, self.masters)
        if self.losses.kept_buffers is not None:
            self.casts.regions.before_part = self.losses.kept_buffers.before_part
        self.parts: tuple[Part, ...] = (
            self.weights,
            self.casts,
            self.masters,
            self.losses,
            self.gradients,
            self.wrappers,
        )
        # The wrapper first: its check of join() comes before anything is copied.
        before = (part.before_forward for part in (self.wrappers, *self.parts[:-1]))
        self._before_forward = [answer for answer in before if answer is not None]
        self._after_forward = [part.after_forward for part in self.parts if part.after_forward is not None]

    def install(self) -> None:
        """Patches torch as the settings say, and turns casts on."""
        for part in self.parts:
            part.install()
        self.switch.active = True

    # Adoption

    def adopt(self, models: Collection[nn.Module], optimizers: Collection[OptimizerLike]) -> None:
        """Adopts models and optimizers; after an error none of them is adopted."""
        with self.switch.suspended():
            for part in self.parts:
                part.prepare(optimizers)
            mark = self.ledger.mark()
            undo = [self.adopted.mark(), *(part.mark() for part in self.parts)]
            try:
                for model in models:
                    self._adopt_model(model)
                self.wrappers.find()
                self.losses.begin_scales(optimizers)
                for optimizer in optimizers:
                    self.losses.adopt_optimizer(optimizer)
                warn_of_bad_training(optimizers, self.adopted, self.settings)
            except BaseException:
                self.ledger.undo(since=mark)
                for forget in undo:
                    forget()
                raise
            for part in self.parts:
                part.finish(models, optimizers)

    def _adopt_model(self, model: nn.Module) -> None:
        is_new = model not in self.adopted.weak_models
        if is_new:
            cuda_graphs.check_not_graphed(model)
        self.adopted.weak_models.add(model)
        for part in self.parts:
            part.adopt_model(model, is_new)
        settings = self.settings
        changes_forward = settings.patches_functions or settings.steps_in_float32
        if is_new and (changes_forward or settings.properties.cast_model_type is not None):
            adopted_model.hook_forward(model, self.ledger, self._hooks.before_forward, self._hooks.after_forward)

    def trace_with(self, tracer: SessionTracer) -> None:
        """Has a tracer note the steps until the session is taken down, or `note_forwards` ends that."""
        self.losses.overflows.tracer = tracer
        tracer.install(self.ledger)
        self.note_forwards(tracer)

    def note_forwards(self, recorder: Recorder | None) -> None:
        """Has the outermost forward passes noted; None ends that."""
        self.casts.regions.recorder = recorder

    # Forward passes

    def before_forward(self, model: nn.Module) -> None:
        """Runs before the forward of an adopted model, or of a copy of one."""
        adopted_model.check_device(model, self.device_types)
        if not torch.compiler.is_compiling():
            for answer in self._before_forward:
                answer(model)
            self.cache.enter_forward(model)

    def after_forward(self, model: nn.Module, inputs: object, error: BaseException | None) -> None:
        """Runs after the forward of an adopted model; ``error`` is what it raised."""
        self.cache.exit_forward(model)
        for answer in self._after_forward:
            answer(model)
        if error is not None:
            for part in reversed(self.parts):  # with half weights, casts explain first
                part.explain(model, inputs, error)

    # Facts

    def as_plain_data(self) -> LiveSettings:
        """Returns what `amp.settings` describes; syncs with the device, to read the loss scales."""
        return LiveSettings(
            is_on=True,
            disabled=False,
            **self.settings.as_plain_data(),
            loss_scales=[scaler.state.loss_scale for scaler in self.losses.scalers],
            device_types=sorted(self.device_types),
            num_models=len(self.adopted.models),
            num_optimizers=len(self.adopted.optimizers),
            casts_here=self.settings.patches_functions and not self.switch.is_off(),
        )

    def stats(self) -> dict[str, int | float]:
        """Returns the numbers of ``amp.stats``; reads each device once."""
        with self.switch.suspended():
            return {**self.losses.stats(), **self.casts.stats()}

    # The end

    def take_down(self) -> None:
        """Undoes everything, newest first. Wrappers that user code kept call the originals from now on.

        Warns:
            AmpWarning: another library has patched on top, and its patches stay; or gradients were still scaled.
        """
        self.switch.active = False
        foreign: list[tuple[object, str]] = []

        def undo() -> None:
            foreign.extend(patch for patch in self.ledger.undo() if not _is_wrapped_by_scheduler(*patch))

        with contextlib.ExitStack() as whatever_raises:  # from the last to the first
            whatever_raises.callback(self.cache.clear)
            whatever_raises.callback(write_back.drop_interrupted)
            for part in self.parts:
                whatever_raises.callback(part.restore)
            whatever_raises.callback(undo)
            for part in reversed(self.parts):
                whatever_raises.callback(part.release)
        if foreign:
            names = ", ".join(
                sorted(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name in foreign)
            )
            warn(
                f"another library has replaced functions that amp had patched, and its replacements stay: {names}. To "
                "remove them, undo that library's patches before amp.deinitialize()."
            )


def _is_wrapped_by_scheduler(owner: object, name: str) -> bool:
    """Returns True if an attribute is an optimizer's step that an LR scheduler has wrapped on top of amp's."""
    return hasattr(getattr(owner, name, None), WRAPPED_BY_SCHEDULER)
