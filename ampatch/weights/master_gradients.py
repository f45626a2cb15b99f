"""The gradients of half parameters and of their float32 masters: which of the two copies counts, and when.

Backward leaves half gradients in the model's parameters, where DDP reduces them. The end of a block adds them to the
masters' gradients in float32. The half parameter then shows the master's gradient, rounded, so that users can read and
edit it. Torch does not count every write to a tensor, so the values decide, and not the version counters. An element
that nobody has edited leaves the master its bits. An edited element becomes the master's. The host reads none of this.

Owns the gradients of the pairs between two blocks. Must know neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.errors import warn
from ampatch.native import kernels
from ampatch.native.host_copy import HostCopy
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.conversion import ConvertedTensor

# Asked of all pairs by `map`, since a line of Python for each takes several times as long.
_GRAD = operator.attrgetter("grad")
_MASTER = operator.attrgetter("master")
_VERSION = operator.attrgetter("_version")


_BOTH_CHANGED = (
    "gradients of half parameters were changed after those of their float32 masters had been, by clipping them for "
    "one, and show what these were before. What the half parameters have counts. Change one of the two only: those of "
    "the model's parameters, or of amp.master_params(optimizer)."
)
_EDITED_WHILE_SCALED = (
    "gradients that a block of amp.scale_loss had left scaled were changed before the next block. What earlier blocks "
    "had left stays as it was. Change gradients behind a block that unscales them; or leave all blocks but the last "
    "scaled, with delay_unscale=True or under no_sync."
)


class _Gradient(enum.Enum):
    """What a half parameter's gradient is."""

    NEW = "from a backward since, or None; the master does not have it yet"
    SHOWN = "the master's gradient, in half"
    BASE = "zeros that backward adds to; the master keeps the sum of earlier blocks"


@dataclass(slots=True, eq=False)
class Pair:
    """A half parameter of the model, and the float32 parameter that the optimizer updates.

    Attributes:
        parameter: the model's.
        converted: the conversion's record of it.
        master: the optimizer's.
        kept: a gradient of the master that the half parameter does not show; a new one is added to it.
        gradient: what the half parameter's gradient is.
        left: the half gradient that amp left there, or None.
        left_version: its version then.
    """

    parameter: nn.Parameter
    converted: ConvertedTensor
    master: nn.Parameter
    kept: Tensor | None = None
    gradient: _Gradient = _Gradient.NEW
    left: Tensor | None = None
    left_version: int = 0

    def leave(self, gradient: _Gradient) -> None:
        """Records the gradient that the half parameter has now."""
        grad = self.parameter.grad
        self.gradient, self.left, self.left_version = gradient, grad, 0 if grad is None else grad._version

    def clear(self) -> None:
        """Sets the half parameter's gradient to None."""
        self.parameter.grad = None
        self.gradient, self.left, self.left_version = _Gradient.NEW, None, 0

    @property
    def was_written(self) -> bool:
        """Returns whether torch has counted a write to the half gradient, or another tensor is there."""
        grad = self.parameter.grad
        return grad is not self.left or (grad is not None and grad._version != self.left_version)

    @property
    def was_cleared(self) -> bool:
        """Returns whether the user set the half gradient to None, even if there is a new one since."""
        left = self.left
        if left is None:
            return False
        grad = self.parameter.grad
        if grad is None or grad is left or self.gradient is _Gradient.SHOWN:
            return grad is None
        # A new tensor may hold the sum as well: after an addition to the old one, for sparse gradients, and for
        # gradients with a graph.
        return left._version == self.left_version and left.layout is torch.strided and not grad.requires_grad


@dataclass(slots=True, eq=False)
class _Shown:
    """Dense half gradients of one device that show those of their masters.

    Attributes:
        pairs: the parameters and masters.
        grads: the half gradients.
        fulls: the masters' gradients.
        fingerprints: of the half gradients, when amp wrote them.
        versions: of the masters' gradients, then.
    """

    pairs: list[Pair]
    grads: list[Tensor]
    fulls: list[Tensor]
    fingerprints: Tensor
    versions: list[int]

    @classmethod
    def of(cls, pairs: list[Pair]) -> _Shown:
        """Takes note of what pairs show now."""
        grads, fulls = _half_gradients(pairs), _full_gradients(pairs)
        return cls(pairs, grads, fulls, kernels.fingerprints(grads), list(map(_VERSION, fulls)))

    def copy_edits(self) -> Tensor | None:
        """Copies edited elements of the half gradients into the masters' gradients.

        Returns:
            A tensor of 1 element: whether the user wrote to both gradients of some pair. None if torch has counted no
            write to a master's gradient.
        """
        now = kernels.fingerprints(self.grads)
        versions = list(map(_VERSION, self.fulls))
        both = None
        if versions != self.versions:  # as after clipping the masters' gradients
            changed = (self.fingerprints != now).unbind()
            pieces = zip(changed, versions, self.versions, strict=True)
            both = torch.stack([is_changed for is_changed, version, before in pieces if version != before]).any()[None]
        kernels.copy_edits(self.grads, self.fulls, self.fingerprints, now, of_gradients=True)
        self.fingerprints, self.versions = now, list(map(_VERSION, self.fulls))
        return both

    def part(self) -> _Shown | None:
        """Returns the pairs whose gradients are still these tensors; None if there are none."""
        kept = [
            index
            for index, pair in enumerate(self.pairs)
            if pair.gradient is _Gradient.SHOWN and pair.parameter.grad is pair.left and pair.master.grad is not None
        ]
        if not kept:
            return None
        pairs = [self.pairs[index] for index in kept]
        fulls = _full_gradients(pairs)
        # Another tensor in the master's gradient is a write to it.
        versions = [
            self.versions[index] if full is self.fulls[index] else -1 for full, index in zip(fulls, kept, strict=True)
        ]
        fingerprints = torch.stack([self.fingerprints[index] for index in kept])
        return _Shown(pairs, _half_gradients(pairs), fulls, fingerprints, versions)


class MasterGradients:
    """The gradients of one optimizer's pairs.

    Args:
        pairs: by id of the half parameter; its owner changes it.
        halves: these parameters, by anything; likewise.
    """

    def __init__(self, pairs: dict[int, Pair], halves: dict[int, nn.Parameter]) -> None:
        self._pairs = pairs
        self._halves = halves
        self._is_clear = True  # no pair knows of a gradient
        self._shown: list[_Shown] = []
        # The pairs whose masters have sums of blocks before a delayed one, with the fingerprint of what that left.
        self._scaled: list[tuple[Pair, Tensor]] = []
        # Ids of the gradients on both sides, which pairs hold, if kernels follow all of them.
        self._left: list[int] = []
        # Warnings, with numbers on their way to the host: whether one of them is not 0.
        self._to_tell: list[tuple[HostCopy, str]] = []

    def are_clear(self) -> bool:
        """Returns whether the half parameters have no gradient, and none is known of; does not look at the masters'."""
        return self._is_clear and self.have_no_gradients()

    def have_no_gradients(self) -> bool:
        """Returns whether there is no gradient in the half parameters."""
        return optimizer_state.have_no_gradients(self._halves.values())

    def shows(self, parameter: Tensor) -> bool:
        """Returns whether a parameter's gradient shows that of its master, and so is not scaled."""
        pair = self._pairs.get(id(parameter))
        return pair is not None and pair.gradient is _Gradient.SHOWN

    # At the end of a block

    def unscale_to_masters(self, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Adds what backward left in half parameters to the masters' gradients, and shows these in half.

        Args:
            inv_scale: what it is to be multiplied by, 0-dimensional float32; None: 1.
            found_inf: 0-dimensional float32, set to 1 if any of it is not finite; None: that is not asked.
        """
        pairs = self._with_new()
        if not pairs:
            return
        self._is_clear = False
        device = pairs[0].master.device
        factor = torch.ones((), dtype=torch.float32, device=device) if inv_scale is None else inv_scale
        found_inf = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf
        first: list[Tensor] = []
        without: list[nn.Parameter] = []  # masters that these are the first gradients of
        later: list[Tensor] = []
        later_full: list[Tensor] = []
        strided = torch.strided
        for pair in pairs:
            grad, full = _gradient_of(pair.parameter), pair.master.grad
            if grad.requires_grad or grad.layout is not strided or not (full is None or full.layout is strided):
                _take(pair, inv_scale, found_inf)
                continue
            if not grad.is_contiguous():
                grad = optimizer_state.writable_gradient(pair.parameter)
            if full is None:
                first.append(grad)
                without.append(pair.master)
            else:
                later.append(grad)
                later_full.append(full)
        if first:
            full_grads = [torch.empty_like(grad, dtype=torch.float32) for grad in first]
            kernels.unscale_copy(first, full_grads, factor, found_inf, write_back=True)
            for master, full in zip(without, full_grads, strict=True):
                master.grad = full
        if later:
            kernels.unscale_add(later, later_full, factor, found_inf, write_back=True)
        for pair in pairs:
            pair.leave(_Gradient.SHOWN)
        self._note_shown()

    def has_sums(self) -> bool:
        """Returns whether masters have gradients: those of earlier blocks, where what a block left is not taken yet."""
        return any(pair.master.grad is not None for pair in self._pairs.values())

    def new(self) -> list[Tensor]:
        """Returns what backward left in half parameters, and `unscale_to_masters` would take."""
        return [_gradient_of(pair.parameter) for pair in self._with_new()]

    def _with_new(self) -> list[Pair]:
        """Returns the pairs in which there is something that the master is to get."""
        shown = _Gradient.SHOWN
        return [pair for pair in self._pairs.values() if pair.gradient is not shown and pair.parameter.grad is not None]

    # Between blocks

    def copy_edits(self, *, takes_new: bool = True) -> None:
        """Takes over what became of gradients since they were shown: cleared, changed, replaced, or new.

        Args:
            takes_new: whether masters get what backward has left outside of blocks.

        Warns:
            AmpWarning: somebody has set gradients of masters whose half parameters have one by backward.
        """
        if self.are_clear():
            return
        is_all_shown = self._copy_edits_of_shown()
        self._tell()
        if is_all_shown or not takes_new:
            return
        by_hand = [
            pair
            for pair in self._with_new()
            if pair.gradient is _Gradient.NEW and pair.master.grad is not None and pair.master.grad is not pair.kept
        ]
        for pair in by_hand:
            pair.leave(_Gradient.SHOWN)
        self.unscale_to_masters()
        if by_hand:
            warn(
                "gradients were set on float32 masters by hand, while the model's half parameters have gradients of a "
                "backward outside of amp.scale_loss. The masters' count. To have the others count, leave the masters' "
                "to amp, and put every backward into a block of amp.scale_loss."
            )
            self.copy_to_half()

    def note_masters(self) -> None:
        """Takes note of masters' gradients that amp itself has written to."""
        for shown in self._shown:
            shown.versions = list(map(_VERSION, shown.fulls))

    def _tell(self) -> None:
        if not self._to_tell or is_capturing():
            return
        arrived = [each for each in self._to_tell if each[0].has_arrived]
        self._to_tell = [each for each in self._to_tell if not each[0].has_arrived]
        for message in dict.fromkeys(message for copied, message in arrived if any(copied.values)):
            warn(message)

    def were_written(self) -> bool:
        """Returns whether torch has counted a write to what half parameters show, or something else is there."""
        return any(pair.was_written for pair in self._pairs.values())

    def _copy_edits_of_shown(self) -> bool:
        """Has masters follow what became of the gradients that showed theirs.

        Returns:
            Whether all gradients are those very tensors, so that there is nothing else.
        """
        is_all_shown = self._are_as_left()
        replaced: list[Pair] = []
        if not is_all_shown:
            self._left = []  # ids of tensors that may die now
            self.note_cleared()
            replaced = self._copy_replaced()
            self._shown = [part for shown in self._shown if (part := shown.part()) is not None]
        for shown in self._shown:
            both = shown.copy_edits()
            if both is not None and not is_capturing():
                self._to_tell.append((HostCopy(both), _BOTH_CHANGED))
        for pairs in by_device(replaced):
            numbers = torch.zeros(len(pairs), dtype=torch.float64, device=pairs[0].master.device)
            kernels.copy_edits(_half_gradients(pairs), _full_gradients(pairs), numbers, numbers + 1, of_gradients=True)
            for pair in pairs:
                pair.leave(_Gradient.SHOWN)
        if replaced:
            self._note_shown()
        return is_all_shown

    def _copy_replaced(self) -> list[Pair]:
        """Follows what was put in the place of gradients, shown ones or their masters'.

        Returns:
            The pairs that have another dense half gradient, for the master's to follow element by element.
        """
        dense: list[Pair] = []
        for pair in self._pairs.values():
            grad, full = pair.parameter.grad, pair.master.grad
            if grad is None or pair.gradient is not _Gradient.SHOWN:
                continue
            if full is None and not pair.was_written:
                pair.clear()  # the master's was set to None
            elif _is_plain(grad) and _is_plain(full):
                if grad is not pair.left and grad.numel():
                    dense.append(pair)
            elif pair.was_written:  # all of the gradient is a new one
                pair.master.grad, pair.gradient = None, _Gradient.NEW
        return dense

    def note_cleared(self) -> None:
        """Drops the masters' gradients where somebody has set those of the half parameters to None.

        Warns:
            AmpWarning: other gradients are there now, and whether they were to be added to the masters' nobody can say.
        """
        if self._is_clear:
            return
        replaced = False
        for pair in self._pairs.values():
            if pair.was_cleared:
                is_sum_dropped = pair.gradient is _Gradient.BASE and pair.master.grad is not None
                replaced = replaced or (is_sum_dropped and pair.parameter.grad is not None)
                pair.master.grad = None
                pair.gradient, pair.left = _Gradient.NEW, None
        if replaced:
            warn(
                "gradients of half parameters were replaced by other tensors after a backward inside of "
                "amp.scale_loss, or after it with delay_unscale=True. What earlier blocks had left for their float32 "
                "masters is dropped, as if they had been cleared. To add to them write p.grad += grad, in place; to "
                "clear them, model.zero_grad()."
            )

    def drop_sums(self, ids: set[int]) -> None:
        """Drops what masters keep of earlier blocks, for half parameters that have zeros for backward now.

        Args:
            ids: of these parameters.
        """
        if self._is_clear:
            return
        for pair in self._pairs.values():
            if pair.gradient is _Gradient.BASE and id(pair.parameter) in ids:
                pair.master.grad = None
                pair.leave(_Gradient.BASE)

    def copy_to_half(self) -> None:
        """Shows the masters' gradients in the half parameters once more, after they were changed."""
        dense: list[Pair] = []
        for pair in self._pairs.values():
            if pair.master.grad is None:
                pair.clear()
            elif pair.gradient is _Gradient.SHOWN and not _gradient_of(pair.parameter).requires_grad:
                if _is_plain(pair.parameter.grad) and _is_plain(pair.master.grad):
                    optimizer_state.writable_gradient(pair.parameter)
                    dense.append(pair)
                else:
                    pair.parameter.grad = pair.master.grad.to(pair.parameter.dtype)
                    pair.leave(_Gradient.SHOWN)
        kernels.copy_to_half_grads(_full_gradients(dense), _half_gradients(dense))
        for pair in dense:
            pair.leave(_Gradient.SHOWN)
        self._note_shown()

    def _note_shown(self) -> None:
        """Takes the fingerprints of what is shown."""
        pairs = [
            pair
            for pair in self._pairs.values()
            if pair.gradient is _Gradient.SHOWN and _is_plain(pair.left) and pair.parameter.numel()
        ]
        self._shown = list(map(_Shown.of, by_device(pairs)))
        is_all = len(pairs) == sum(pair.gradient is _Gradient.SHOWN for pair in self._pairs.values())
        self._left = self._identities() if is_all else []

    def _forget_shown(self) -> None:
        self._shown, self._left = [], []

    def _identities(self) -> list[int]:
        """Returns which gradients are there, on both sides."""
        halves, masters = self._halves.values(), map(_MASTER, self._pairs.values())
        return [*map(id, map(_GRAD, halves)), *map(id, map(_GRAD, masters))]

    def _are_as_left(self) -> bool:
        """Returns whether the very tensors are there that were shown, as in most steps, and nothing else."""
        return bool(self._left) and self._identities() == self._left

    # In a block

    def clear_for_backward(self) -> None:
        """Has what is shown make way for what backward will leave: zeros, so that clearing them can be seen."""
        shown = [pair for pair in self._pairs.values() if pair.gradient is _Gradient.SHOWN]
        for pair in shown:
            grad = _gradient_of(pair.parameter)
            if pair.master.grad is None or grad.layout is not torch.strided or grad.requires_grad:
                pair.parameter.grad = None
            else:
                optimizer_state.writable_gradient(pair.parameter).zero_()
        for pair in shown:  # only now, as gradients that are pieces of one storage count their writes together
            pair.leave(_Gradient.BASE)
        self._forget_shown()

    def scale_added(self, scale: Tensor) -> None:
        """Multiplies what backward has left outside of blocks, for more to be added to it.

        Args:
            scale: 0-dimensional float32.
        """
        new = [pair for pair in self._with_new() if pair.gradient is _Gradient.NEW]
        kernels.multiply_(optimizer_state.gradients_of(pair.parameter for pair in new), scale)
        for pair in new:
            pair.leave(_Gradient.BASE)

    def note_zeroed(self) -> None:
        """Zeroes the masters' gradients where the user has zeroed what a delayed block left in the half parameters.

        Warns later, once the device has told: the user has changed that in another way.
        """
        scaled, self._scaled = self._scaled, []
        edited: list[Tensor] = []
        for pair, before in scaled:
            grad, full = pair.parameter.grad, pair.master.grad
            if _is_plain(grad) and _is_plain(full):
                assert grad is not None
                assert full is not None
                # By the value, as torch does not count every write; on the device.
                values = kernels.values_of(grad)
                changed, left = kernels.fingerprints([values])[0] != before, values.any()
                full.masked_fill_(changed & ~left, 0)
                edited.append(changed & left)
        if edited and not is_capturing():
            self._to_tell.append((HostCopy(torch.stack(edited)), _EDITED_WHILE_SCALED))

    def note_left_scaled(self) -> None:
        """Takes note of gradients that stay scaled for a later block, to see whether they are cleared until then."""
        self.note_cleared()
        self._is_clear = not self._pairs
        for pair in self._pairs.values():
            if pair.gradient is not _Gradient.SHOWN:
                pair.leave(_Gradient.BASE)
        with_sums = [
            pair
            for pair in self._pairs.values()
            if pair.gradient is _Gradient.BASE and _is_plain(pair.left) and _is_plain(pair.master.grad)
        ]
        self._scaled = []
        for pairs in by_device(pair for pair in with_sums if pair.parameter.numel()):
            self._scaled += zip(pairs, kernels.fingerprints(_half_gradients(pairs)).unbind(), strict=True)

    # For good

    def give_back(self, scale: Tensor | None) -> None:
        """Has masters hold all there is of gradients, at a scale if there is one, for the parameters to take back."""
        self._copy_edits_of_shown()
        if scale is not None:
            kernels.multiply_(
                [pair.master.grad for pair in self._pairs.values() if pair.master.grad is not None], scale
            )
        self.unscale_to_masters()
        for pair in self._pairs.values():
            pair.clear()
        self._forget_shown()

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """Has half parameters follow what clears masters' gradients in the block, and masters what clears theirs."""
        if self.are_clear():
            yield
            return
        before = [(pair, pair.master.grad) for pair in self._pairs.values()]
        versions = [0 if full is None else full._version for _, full in before]
        yield
        self._copy_edits_of_shown()
        for (pair, was), version in zip(before, versions, strict=True):
            full = pair.master.grad
            if full is None or full is not was or full._version != version:
                pair.clear()
                pair.kept = full  # if it was set to zeros
        self._shown = [part for shown in self._shown if (part := shown.part()) is not None]  # which hold gradients
        self._left.clear()
        self._is_clear = self.have_no_gradients()

    def clear(self) -> None:
        """Sets the gradients of masters and half parameters to None."""
        for pair in self._pairs.values():
            pair.master.grad = pair.kept = None
            pair.clear()
        self._forget_shown()
        self._is_clear = True


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_plain(grad: Tensor | None) -> bool:
    """Returns whether a gradient, of a half parameter or a master, is one that kernels follow element by element."""
    return grad is not None and grad.layout is torch.strided and not grad.requires_grad


def _half_gradients(pairs: Iterable[Pair]) -> list[Tensor]:
    return _values([pair.parameter.grad for pair in pairs])


def _full_gradients(pairs: Iterable[Pair]) -> list[Tensor]:
    return _values([pair.master.grad for pair in pairs])


def _values(grads: list[Any]) -> list[Tensor]:
    return grads if set(map(type, grads)) == {Tensor} else list(map(kernels.values_of, grads))


def by_device(pairs: Iterable[Pair]) -> Iterable[list[Pair]]:
    """Groups pairs by the device that they are on."""
    groups: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.master.device, []).append(pair)
    return groups.values()


def _take(pair: Pair, inv_scale: Tensor | None, found_inf: Tensor) -> None:
    """`MasterGradients.take` of a sparse gradient, or of one with a graph of its own."""
    grad, full = _gradient_of(pair.parameter), pair.master.grad
    unscaled = grad.detach().to(torch.float32, copy=True)
    if inv_scale is not None:
        kernels.unscale_([unscaled], inv_scale, found_inf)
    if full is None:
        pair.master.grad = unscaled
    else:  # torch adds a sparse one to a dense one, and not the other way round
        pair.master.grad = full + unscaled if unscaled.layout is not torch.strided else unscaled + full
    if grad.layout is not torch.strided or _gradient_of(pair.master).layout is not torch.strided:
        pair.parameter.grad = _gradient_of(pair.master).to(grad.dtype)
    elif inv_scale is not None:
        kernels.unscale_([grad], inv_scale, found_inf)  # it stays the user's to differentiate
