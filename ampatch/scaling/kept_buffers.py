"""The buffers of models as they were before the forward passes of a step, for steps that are skipped.

A forward pass in which values overflow leaves inf and NaN in running statistics, and an average never loses them. Owns
the copies of buffers. Must not know why a step is skipped.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ampatch.grouping import grouped
from ampatch.weights.untracked_writes import has_memory

# Larger buffers, mostly tables and masks, are kept only once a forward pass has written to them.
_LARGE = 2**20


class ModelBuffers:
    """The buffers of one model, and copies of them.

    Args:
        model: the model; its modules are searched once.

    Attributes:
        is_old: True if a step has ended since the copies were made.
        copies: of each buffer; None if it is not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        # Kernels of these write to statistics without counting.
        norms = {id(module._buffers) for module in model.modules() if isinstance(module, _NormBase)}
        self._is_of_norm = [id(buffers) in norms for buffers, _ in self._places]
        self._found: list[Tensor | None] = []
        self._versions: list[int] = []
        self.copies: list[Tensor | None] = []
        self.is_old = True

    def _search(self) -> bool:
        """Finds the model's buffers; returns True if they are the tensors that they were."""
        found = [buffers.get(name) for buffers, name in self._places]
        before, self._found = self._found, [each if type(each) is Tensor else None for each in found]
        return len(before) == len(self._found) and all(map(operator.is_, before, self._found))

    def _changed(self) -> list[int]:
        """Returns the places of the buffers that may have changed since the copies were made."""
        return [
            place
            for place, (version, is_of_norm) in enumerate(zip(self._now(), self._is_of_norm, strict=True))
            if is_of_norm or version != self._versions[place]
        ]

    def _now(self) -> list[int]:
        return [-1 if each is None or each.is_inference() else each._version for each in self._found]

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the buffers that have changed since the last copies."""
        self.is_old = False
        if self._search():
            places, self.copies = self._changed(), list(self.copies)  # a step before may have the earlier list
        else:
            self.copies = [None] * len(self._found)
            places = [place for place, each in enumerate(self._found) if each is not None and each.numel() <= _LARGE]
        pairs = []
        for place in places:
            buffer, copied = self._found[place], self.copies[place]
            if buffer is None or not has_memory(buffer):
                continue
            # On other devices a step before may still need the copy: the host has not read yet whether it ran.
            if copied is None or not copied.is_cpu or copied.shape != buffer.shape:
                copied = self.copies[place] = torch.empty_like(buffer)
            pairs.append((copied, buffer))
        _copy(pairs)
        self._versions = self._now()

    @torch.no_grad()
    def restore(self, copies: list[Tensor | None], *, only_non_finite: bool = False) -> None:
        """Gives the buffers their earlier values.

        Args:
            copies: the ``copies`` of that time.
            only_non_finite: leaves out buffers without inf and NaN; syncs with the device.
        """
        is_same = self._search() and copies is self.copies
        places = self._changed() if is_same else range(min(len(copies), len(self._found)))
        there = [(self._found[place], copies[place]) for place in places]
        pairs = [
            (buffer, copied)
            for buffer, copied in there
            if buffer is not None and copied is not None and has_memory(buffer) and buffer.shape == copied.shape
        ]
        if only_non_finite:
            pairs = [(buffer, copied) for buffer, copied in pairs if not bool(buffer.isfinite().all())]
        _copy(pairs)
        if not only_non_finite:
            self.copies, self._versions = copies, self._now()


class KeptBuffers:
    """The buffers of all models of a session."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, ModelBuffers] = weakref.WeakKeyDictionary()

    def before_forward(self, model: nn.Module) -> None:
        """Keeps the buffers of a model before its first forward pass since a step."""
        buffers = self._of.get(model)
        if buffers is None:
            buffers = self._of[model] = ModelBuffers(model)
        if buffers.is_old:
            buffers.keep()

    def before_step(self, is_own: Callable[[nn.Module], bool]) -> BuffersBefore:
        """Returns the buffers as they were before the forward passes of a step, and notes that it has begun.

        Args:
            is_own: returns True for the models that the optimizer updates.
        """
        kept = [(buffers, buffers.copies, is_own(model)) for model, buffers in list(self._of.items())]
        for buffers, _, own in kept:
            buffers.is_old = buffers.is_old or own
        return BuffersBefore(kept)


class BuffersBefore:
    """The buffers of all models as they were before one step.

    Args:
        kept: the buffers of each model, their copies, and whether the step's optimizer updates the model.
    """

    def __init__(self, kept: list[tuple[ModelBuffers, list[Tensor | None], bool]]) -> None:
        self._kept = kept

    def restore(self) -> None:
        """Gives the buffers their earlier values; those of models that other optimizers update only if not finite."""
        for buffers, copies, own in self._kept:
            buffers.restore(copies, only_non_finite=not own)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensor of each pair to the first."""
    for some in grouped(((target.dtype, target.device), (target, source)) for target, source in pairs).values():
        targets, sources = zip(*some, strict=True)
        torch._foreach_copy_(targets, sources)
