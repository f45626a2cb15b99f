"""The buffers of models as they were before the forward passes of a step, for steps that are skipped.

A forward pass in which values overflow leaves inf and NaN in running statistics, and an average never loses them. Owns
the copies of buffers. Must not know why a step is skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from ampatch.grouping import grouped
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.weights.untracked_writes import has_memory, is_shared, is_since, moment_of

# Larger buffers, mostly tables and masks, are kept only once a forward pass has written to them.
_LARGE = 2**20

_Buffers = dict[str, Tensor | None]


class _Kept:
    """One buffer, and a copy of it.

    Args:
        buffers: the buffers of its module.
        name: its name there.
        is_counted: False if kernels write to it without counting, as those of norms do.
    """

    __slots__ = ("_after_forward", "_buffers", "_name", "_when_copied", "copied", "is_counted", "original")

    def __init__(self, buffers: _Buffers, name: str, is_counted: bool) -> None:
        self._buffers, self._name, self.is_counted = buffers, name, is_counted
        self.original: Tensor | None = None  # what was copied
        self.copied: Tensor | None = None
        # The tensor and its version counter when it was copied, and after the last forward pass.
        self._when_copied = self._after_forward = moment_of(None)

    @property
    def key(self) -> tuple[int, str]:
        """Its module's buffers, and its name there."""
        return id(self._buffers), self._name

    def now(self) -> Tensor | None:
        """Returns the buffer; None if it is none, or of a kind that is not kept."""
        found = self._buffers.get(self._name)
        return found if found is not None and has_memory(found) and not found.is_inference() else None

    def is_to_copy(self, now: Tensor | None, of_user: bool) -> bool:
        """Returns True if the copy may be out of date; for what user code has written only, if ``of_user`` is true."""
        if of_user:
            return not is_since(self._after_forward, now)
        return not self.is_counted or not is_since(self._when_copied, now)

    def note_copied(self, now: Tensor | None) -> None:
        """Records what is copied now."""
        self.original, self._when_copied = now, moment_of(now)

    def note_forward(self) -> None:
        """Records the buffer after a forward pass."""
        self._after_forward = moment_of(self.now())

    def put_back(self, copied: Tensor) -> None:
        """Puts a clone of a copy into the module, since user code may use the tensor that is there."""
        self._buffers[self._name] = copied.clone()


_Saved = tuple[_Kept, Tensor, Tensor]  # a buffer, the tensor that it was, and a copy of that


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
    def keep(self, *, overwrites: bool = True, of_user: bool = False) -> None:
        """Copies the buffers that have changed since the last copies.

        Args:
            overwrites: whether the last copies may be written to. A step needs them until the host knows whether it
                ran.
            of_user: True leaves out what forward passes have written since: only what user code has written counts.
        """
        model = self._model()
        if self.is_incomplete and model is not None and not of_user:
            known = {each.key: each for each in self._kept}
            new = [
                _Kept(module._buffers, name, not isinstance(module, _NormBase))
                for module in model.modules()
                if isinstance(module._buffers, dict)  # TorchScript's are none
                for name in module._buffers
            ]
            self._kept = [known.get(each.key, each) for each in new]
        pairs: list[tuple[Tensor, Tensor]] = []
        for each in self._kept:
            now = each.now()
            if not each.is_to_copy(now, of_user):
                continue
            is_known = each.original is not None
            each.note_copied(now)
            if now is None or not (is_known or now.numel() <= _LARGE):
                each.copied = None
                continue
            if each.copied is None or not overwrites or each.copied.shape != now.shape:
                each.copied = torch.empty_like(now)
            pairs.append((each.copied, now))
        _copy(pairs)
        self.is_old, self.is_incomplete = self.is_old and of_user, self.is_incomplete and of_user

    def note_forward(self) -> None:
        """Notes the buffers after a forward pass, so that what user code writes until the next one can be told."""
        for each in self._kept:
            each.note_forward()

    def copies(self) -> list[_Saved]:
        """Returns the buffers that are kept."""
        return [
            (each, each.original, each.copied)
            for each in self._kept
            if each.original is not None and each.copied is not None
        ]


class KeptBuffers:
    """The buffers of all models of a session.

    Args:
        ledger: records the hooks by which modules tell of new parts and buffers.
    """

    def __init__(self, ledger: PatchLedger) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, ModelBuffers] = weakref.WeakKeyDictionary()
        self._needed: weakref.WeakSet[BuffersBefore] = weakref.WeakSet()  # copies that a step may still need

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
        buffers = self._of.get(model)
        if buffers is not None and buffers.is_needed and torch.is_grad_enabled():
            buffers.keep(overwrites=not self._needed, of_user=not buffers.is_old)

    def after_forward(self, model: nn.Module) -> None:
        """Notes the end of a forward pass of a model."""
        buffers = self._of.get(model)
        if buffers is not None and not buffers.is_old:
            buffers.note_forward()

    def before_step(
        self, is_own: Callable[[nn.Module], bool], is_anothers: Callable[[nn.Module], bool]
    ) -> BuffersBefore:
        """Returns the buffers as they were before the forward passes of a step, and notes that it has begun.

        Args:
            is_own: returns True for a model that the optimizer updates.
            is_anothers: returns True for a model with gradients that another optimizer is about to step with.
        """
        models = [(model, buffers, is_own(model)) for model, buffers in list(self._of.items())]
        before = BuffersBefore([(buffers, own) for _, buffers, own in models if not buffers.is_old])
        self._needed.add(before)
        for model, buffers, own in models:
            buffers.is_old = buffers.is_old or own or not is_anothers(model)
        return before


class BuffersBefore:
    """The buffers of all models as they were before one step.

    Args:
        models: the buffers of each model, and whether the step's optimizer updates the model.
    """

    def __init__(self, models: list[tuple[ModelBuffers, bool]]) -> None:
        self._models = [(buffers.copies(), is_own) for buffers, is_own in models]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers their earlier values; of models that other optimizers update, only if one is not finite."""
        for copies, is_own in self._models:
            if is_own or not _are_finite(each.now() for each, *_ in copies):
                self._restore(copies)

    def replace_by(self, earlier: BuffersBefore) -> None:
        """Takes the copies of an earlier time, if the step before it was skipped after all."""
        known = {each: copied for copies, _ in earlier._models for each, _, copied in copies}
        self._models = [
            ([(each, original, known.get(each, copied)) for each, original, copied in copies], is_own)
            for copies, is_own in self._models
        ]

    def _restore(self, copies: list[_Saved]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for each, original, copied in copies:
            if each.now() is not original or original.shape != copied.shape or is_shared(original):
                each.put_back(copied)
            else:
                pairs.append((original, copied))
            each.copied = copied
        _copy(pairs)


def _are_finite(buffers: Iterable[Tensor | None]) -> bool:
    """Returns True if no buffer has inf or NaN; syncs with the device."""
    there = [each for each in buffers if each is not None and each.is_floating_point()]
    return not there or not bool(kernels.flag_and_squares(there, there[0].device)[0])


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensor of each pair to the first."""
    for some in grouped(((target.dtype, target.device), (target, source)) for target, source in pairs).values():
        targets, sources = zip(*some, strict=True)
        torch._foreach_copy_(targets, sources)
