"""The buffers of models as they were before the forward passes of a step, for steps that are skipped.

A forward pass in which values overflow leaves inf and NaN in running statistics, and an average never loses them. Owns
the copies of buffers. Must not know why a step is skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from ampatch.grouping import grouped
from ampatch.ledger import PatchLedger
from ampatch.native.host_copy import read
from ampatch.torch_private import foreach
from ampatch.torch_private.modules import NormBase
from ampatch.tracing import is_capturing, is_recording
from ampatch.weights.untracked_writes import Moment, has_memory, is_shared, is_since, moment_of

# Larger buffers are mostly tables and masks, which no forward pass writes to.
_LARGE = 2**20

# Larger buffers are copied only if torch has counted a write to them.
_MEDIUM = 2**14


@dataclass(slots=True, eq=False)
class _Kept:
    """One buffer, and a copy of it.

    Attributes:
        buffers: the buffers of its module.
        name: its name there.
        is_statistic: True for those of torch's norms.
        moment: the buffer and its version counter after the last forward pass, or when it was copied since. A write
            that torch has counted after that is the user's.
        writes: number of times that user code is known to have written to it.
        copied: the copy; None if there is none.
    """

    buffers: dict[str, Tensor | None]
    name: str
    is_statistic: bool
    moment: Moment = (None, -1)
    writes: int = 0
    copied: Tensor | None = None

    def now(self) -> Tensor | None:
        """Returns the buffer; None if it is none, or of a kind that is not kept."""
        found = self.buffers.get(self.name)
        if found is None or not has_memory(found) or found.is_inference() or found.numel() > _LARGE:
            return None
        return found if self.is_statistic or found.is_floating_point() else None

    def is_untouched(self) -> bool:
        """Returns True if user code has not written to it since `moment`, nor replaced it."""
        return is_since(self.moment, self.buffers.get(self.name))

    def is_to_copy(self, now: Tensor, is_old: bool) -> bool:
        """Returns True if the copy may be out of date."""
        if self.copied is None:
            return True
        if not self.is_untouched():
            return is_old or self.is_statistic
        return is_old and (self.is_statistic or now.numel() <= _MEDIUM)


_Saved = tuple[int, Tensor]  # the number of the user's writes when a buffer was copied, and the copy


class ModelBuffers:
    """The buffers of one model, and copies of them.

    Args:
        model: the model; held weakly.

    Attributes:
        is_old: True if the copies are not of the time before the next step's forward passes.
        is_incomplete: True if the model may have other modules or buffers since.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._kept: list[_Kept] = []
        self.is_old = self.is_incomplete = True

    @property
    def is_needed(self) -> bool:
        """True if the model has buffers, or may have some."""
        return self.is_incomplete or bool(self._kept)

    @torch.no_grad()
    def keep(self, *, overwrites: bool = True) -> None:
        """Copies the buffers; within a step only the statistics that user code has written since.

        Args:
            overwrites: whether the last copies may be written to. A step needs them until the host knows whether it
                ran.
        """
        model = self._model()
        if self.is_incomplete and model is not None:
            known = {(id(each.buffers), each.name): each for each in self._kept}
            self._kept = [
                known.get((id(module._buffers), name)) or _Kept(module._buffers, name, isinstance(module, NormBase))
                for module in model.modules()
                if isinstance(module._buffers, dict)  # TorchScript's are none
                for name in module._buffers
            ]
        pairs: list[tuple[Tensor, Tensor]] = []
        for each in self._kept:
            now = each.now()
            if now is None:
                each.copied = None
            elif each.is_to_copy(now, self.is_old):
                if each.copied is None or not overwrites or each.copied.shape != now.shape:
                    each.copied = torch.empty_like(now)
                each.writes += not each.is_untouched()
                each.moment = moment_of(now)
                pairs.append((each.copied, now))
        for some in grouped(((copied.dtype, copied.device), (copied, now)) for copied, now in pairs).values():
            targets, sources = zip(*some, strict=True)
            foreach.copy_(targets, sources)
        self.is_old = self.is_incomplete = False

    def note_forward(self) -> None:
        """Notes the statistics after a forward pass, so that what user code writes until the next one can be told."""
        for each in self._kept:
            if each.is_statistic:
                each.moment = moment_of(each.buffers.get(each.name))

    def copies(self) -> dict[_Kept, _Saved]:
        """Returns the buffers that are kept."""
        return {each: (each.writes, each.copied) for each in self._kept if each.copied is not None}


class KeptBuffers:
    """The buffers of all models of a session."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, ModelBuffers] = weakref.WeakKeyDictionary()
        self._needed: weakref.WeakSet[BuffersBefore] = weakref.WeakSet()  # copies that a step may still need

    def install(self, ledger: PatchLedger) -> None:
        """Has modules tell of new parts and buffers."""

        def note(*_: object) -> None:
            for buffers in list(self._of.values()):
                buffers.is_incomplete = True

        ledger.on_undo(register_module_module_registration_hook(note).remove)
        ledger.on_undo(register_module_buffer_registration_hook(note).remove)

    def are_there(self) -> bool:
        """Returns True if any model has buffers."""
        return any(each.is_needed for each in self._of.values())

    def add(self, model: nn.Module) -> None:
        """Keeps the buffers of a model from now on."""
        self._of.setdefault(model, ModelBuffers(model)).keep()

    def before_forward(self, model: nn.Module) -> None:
        """Keeps the buffers of a model before its first forward pass since a step, and what user code has written."""
        buffers = self._needed_of(model)
        if buffers is not None and torch.is_grad_enabled():
            buffers.keep(overwrites=not self._needed)

    def before_part(self) -> None:
        """Keeps the buffers of all models before a part of one is called alone."""
        for model in list(self._of):
            self.before_forward(model)

    def after_forward(self, model: nn.Module) -> None:
        """Notes the end of a forward pass of a model."""
        buffers = self._needed_of(model)
        if buffers is not None:
            buffers.note_forward()

    def _needed_of(self, model: nn.Module) -> ModelBuffers | None:
        """Returns the buffers of a model; None if it has none, or where they must not be read."""
        buffers = self._of.get(model)
        if buffers is None or not buffers.is_needed or is_recording() or is_capturing():
            return None
        return buffers

    def before_step(
        self, is_own: Callable[[nn.Module], bool], is_anothers: Callable[[nn.Module], bool]
    ) -> BuffersBefore:
        """Returns the buffers as they were before the forward passes of a step, and notes that it has begun.

        Args:
            is_own: returns True for a model that the optimizer updates.
            is_anothers: returns True for a model with gradients that another optimizer is about to step with.
        """
        models = [(model, buffers, is_anothers(model)) for model, buffers in list(self._of.items())]
        before = BuffersBefore([(buffers, not (buffers.is_old or anothers)) for _, buffers, anothers in models])
        self._needed.add(before)
        for model, buffers, anothers in models:
            buffers.is_old = buffers.is_old or not anothers or is_own(model)
        return before


class BuffersBefore:
    """The buffers of all models as they were before one step.

    Args:
        models: the buffers of each model, and whether all of its forward passes since the copies were for this step.
    """

    def __init__(self, models: Sequence[tuple[ModelBuffers, bool]]) -> None:
        self._saved = {
            each: (*saved, exactly) for buffers, exactly in models for each, saved in buffers.copies().items()
        }

    def complete(self, within: BuffersBefore) -> None:
        """Takes what a closure's forward passes were noted to begin with, for models that had none before the step."""
        self._saved |= {
            each: saved for each, saved in within._saved.items() if saved[2] and not self._saved.get(each, saved)[2]
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Gives norms their earlier statistics, and other buffers their earlier values if they are not finite now.

        What user code has written or replaced since stays, unless it is not finite. So do statistics of forward passes
        whose gradients another optimizer is about to use.
        """
        found = [
            (each, copied, now, exactly and each.is_statistic and each.writes == writes and each.is_untouched())
            for each, (writes, copied, exactly) in self._saved.items()
            if (now := each.now()) is not None and now.shape == copied.shape and now.device == copied.device
        ]
        flags = read(
            torch.stack([_is_finite(copied), _is_finite(now), now.ne(copied).any()]) for _, copied, now, _ in found
        )
        for (each, copied, now, exactly), (can_restore, is_finite, differs) in zip(found, flags, strict=True):
            if can_restore and differs and (exactly or not is_finite):
                _put_back(each, copied, now)


def _is_finite(tensor: Tensor) -> Tensor:
    return tensor.isfinite().all()


def _put_back(each: _Kept, copied: Tensor, now: Tensor) -> None:
    if is_shared(now) and not each.is_statistic:  # user code may use the tensor
        each.buffers[each.name] = copied.clone()
    else:
        now.copy_(copied)
    each.moment, each.copied = moment_of(each.buffers[each.name]), copied
    each.writes += 1  # copies of later steps, which the host has not judged yet, have what this step wrote
