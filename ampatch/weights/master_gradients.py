"""The gradients of half parameters and of their float32 masters: which of the two copies counts, and when.

The backward pass writes half gradients to the model's parameters, where DDP reduces them. The end of a block adds them
to the masters' gradients in float32. The half parameter then shows the master's gradient, rounded, so that users can
read and edit it. Torch does not count every write to a tensor, so values decide, not version counters. An edited
element is copied to the master's gradient. All other elements of the master's gradient keep their bits. All of this
runs on the device, without a sync.

Owns the gradients of the pairs between two blocks. Must know neither scales nor whether a step is skipped.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ampatch.errors import warn
from ampatch.grouping import grouped
from ampatch.native import calls, kernels
from ampatch.native.host_copy import HostCopy, stacked
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.kept_values import Kept

# For `map` over all pairs: a line of Python for each pair takes several times as long.
_GRAD = operator.attrgetter("grad")
_MASTER = operator.attrgetter("master")
_VERSION = operator.attrgetter("_version")


_BOTH_CHANGED = (
    "gradients of half parameters were changed after the gradients of their float32 masters, as by clipping those. "
    "The half parameters showed the masters' earlier gradients. The half parameters' gradients count. Change only one "
    "of the two: gradients of the model's parameters, or of amp.master_params(optimizer)."
)
_EDITED_WHILE_SCALED = (
    "gradients that a block of amp.scale_loss had left scaled were changed before the next block. Gradients of earlier "
    "blocks stay as they were. Change gradients after a block that unscales them; or leave all blocks but the last "
    "scaled, with delay_unscale=True or under no_sync."
)


class _Gradient(enum.Enum):
    """Meaning of a half parameter's gradient."""

    NEW = "from a later backward pass, or None; not yet added to the master's gradient"
    SHOWN = "the master's gradient, in half"
    BASE = "zeros that the backward pass adds to; the master keeps the sum of earlier blocks"


@dataclass(slots=True, eq=False)
class Pair:
    """A half parameter of the model, and the float32 parameter that the optimizer updates.

    Attributes:
        parameter: the model's parameter.
        kept: the conversion's record of the parameter's float32 values, which are the master.
        master: the parameter that the optimizer updates.
        gradient: meaning of the half parameter's gradient.
        left: half gradient that amp last left in the parameter, or None.
        left_version: version counter of ``left`` at that moment.
    """

    parameter: nn.Parameter
    kept: Kept
    master: nn.Parameter
    gradient: _Gradient = _Gradient.NEW
    left: Tensor | None = None
    left_version: int = 0

    def record(self, gradient: _Gradient) -> None:
        """Records the half parameter's present gradient, and its meaning."""
        grad = self.parameter.grad
        self.gradient, self.left, self.left_version = gradient, grad, 0 if grad is None else grad._version

    def clear(self) -> None:
        """Sets the half parameter's gradient to None."""
        self.parameter.grad = None
        self.gradient, self.left, self.left_version = _Gradient.NEW, None, 0

    @property
    def was_written(self) -> bool:
        """True if torch has counted a write to the half gradient, or it is another tensor now."""
        grad = self.parameter.grad
        return grad is not self.left or (grad is not None and grad._version != self.left_version)

    @property
    def was_cleared(self) -> bool:
        """True if the user set the half gradient to None, even if a backward pass has made a new one since."""
        left = self.left
        if left is None:
            return False
        grad = self.parameter.grad
        if grad is None or grad is left or self.gradient is _Gradient.SHOWN:
            return grad is None
        # A new tensor does not prove clearing. Torch may put a sum into a new tensor: after it added to the old one,
        # for sparse gradients, and for gradients with a graph.
        return left._version == self.left_version and left.layout is torch.strided and not grad.requires_grad


@dataclass(slots=True, eq=False)
class _Shown:
    """Dense half gradients on one device that show the gradients of their masters.

    Attributes:
        pairs: the parameters and masters.
        grads: the half gradients.
        fulls: the masters' gradients.
        fingerprints: fingerprints of the half gradients when amp wrote them.
        versions: version counters of the masters' gradients at that moment.
    """

    pairs: list[Pair]
    grads: list[Tensor]
    fulls: list[Tensor]
    fingerprints: Tensor
    versions: list[int]

    @classmethod
    def of(cls, pairs: list[Pair]) -> _Shown:
        """Returns a record of the gradients that pairs show now."""
        grads, fulls = _half_gradients(pairs), _full_gradients(pairs)
        return cls(pairs, grads, fulls, kernels.fingerprints(grads), list(map(_VERSION, fulls)))

    def copy_edits(self) -> Tensor | None:
        """Copies edited elements of the half gradients to the masters' gradients.

        Returns:
            A bool tensor of 1 element: True if the user wrote to both gradients of some pair. None if torch has
            counted no write to a master's gradient.
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
        # A replaced master's gradient counts as written.
        versions = [
            self.versions[index] if full is self.fulls[index] else -1 for full, index in zip(fulls, kept, strict=True)
        ]
        fingerprints = torch.stack([self.fingerprints[index] for index in kept])
        return _Shown(pairs, _half_gradients(pairs), fulls, fingerprints, versions)


class ShownGradients:
    """Which half gradients show the gradients of their masters, and what the user has changed of either since.

    Args:
        pairs: pairs by id of the half parameter; a dict that its owner updates.
        halves: half parameters of these pairs, under any keys; also updated by its owner.
    """

    def __init__(self, pairs: Mapping[int, Pair], halves: Mapping[int, nn.Parameter]) -> None:
        self._pairs, self._halves = pairs, halves
        self._shown: list[_Shown] = []
        # Numbers of all half gradients and masters' gradients, if kernels can compare all of them. Pairs keep the
        # gradients alive.
        self._left: list[int] = []
        # Messages, each with numbers on their way to the host; amp warns if one of the numbers is not 0.
        self._to_tell: list[tuple[HostCopy, str]] = []

    def note(self) -> None:
        """Records fingerprints of all shown half gradients, and the ids of all gradients."""
        shown = _of(self._pairs, _Gradient.SHOWN)
        pairs = [pair for pair in shown if _is_plain(pair.left) and pair.parameter.numel()]
        self._shown = list(map(_Shown.of, by_device(pairs)))
        self._left = self._identities() if len(pairs) == len(shown) else []

    def note_usual(self, pairs: list[Pair], grads: list[Tensor], fulls: list[Tensor]) -> None:
        """Does what `note` does, for all pairs: with gradients that kernels take as they are, on one device."""
        if all(map(Tensor.numel, grads)):
            self._shown = [_Shown(pairs, grads, fulls, kernels.fingerprints(grads), list(map(_VERSION, fulls)))]
            self._left = self._identities()
        else:
            self.note()

    def add(self, pairs: Iterable[Pair]) -> None:
        """Records fingerprints of the half gradients of new pairs."""
        self._left = []
        self._shown += map(_Shown.of, by_device(pairs))

    def forget(self) -> None:
        """Forgets all gradients."""
        self._shown, self._left = [], []

    def note_masters(self) -> None:
        """Records that amp itself has written to the masters' gradients, so that this does not count as an edit."""
        for shown in self._shown:
            shown.versions = list(map(_VERSION, shown.fulls))

    def note_moved(self, pairs: Iterable[Pair]) -> None:
        """Records half gradients that other code than the user's has replaced by equal ones."""
        for pair in pairs:
            if pair.parameter.grad is not None and pair.parameter.grad is not pair.left:
                pair.record(pair.gradient)
                self._left = []

    def moving(self, ids: Collection[int]) -> Callable[[], None]:
        """Returns a function that records the half gradients that were replaced by equal ones since.

        Args:
            ids: ids of half parameters whose gradients other code than the user's is about to replace.
        """
        pairs = [pair for pair in self._pairs.values() if pair.left is not None and id(pair.parameter) in ids]
        return functools.partial(self.note_moved, [pair for pair in pairs if pair.parameter.grad is pair.left])

    def are_all(self) -> bool:
        """Returns True if all gradients, half and masters', are the tensors that were recorded, so that none is new."""
        return bool(self._left) and self._identities() == self._left

    def copy_edits(self) -> None:
        """Copies edited elements of shown half gradients to the masters' gradients; warns later if both were edited."""
        for shown in self._shown:
            both = shown.copy_edits()
            if both is not None:
                self.tell_if(both, _BOTH_CHANGED)

    def tell_if(self, flags: Tensor, message: str) -> None:
        """Has `warn_if_arrived` warn if one of some numbers on a device is not 0."""
        if not is_capturing():
            self._to_tell.append((HostCopy(flags), message))

    def warn_if_arrived(self) -> None:
        """Warns of what has arrived from the device since, without a sync."""
        if not self._to_tell or is_capturing():
            return
        arrived = [each for each in self._to_tell if each[0].has_arrived]
        # Each is asked once: one that arrives between two questions would be in neither list.
        self._to_tell = [each for each in self._to_tell if each not in arrived]
        for message in dict.fromkeys(message for copied, message in arrived if any(copied.values)):
            warn(message)

    def copy_replaced(self) -> None:
        """Applies replacements of shown half gradients, and of their masters' gradients, by other tensors or None."""
        self._left = []  # tensors with these ids may be freed from here on
        dense = self._replaced()
        self._shown = [part for shown in self._shown if (part := shown.part()) is not None]
        self.copy_edits()
        for pairs in by_device(dense):
            numbers = torch.zeros(len(pairs), dtype=torch.float64, device=pairs[0].master.device)
            grads, fulls = _half_gradients(pairs), _full_gradients(pairs)
            kernels.copy_edits(grads, fulls, numbers, numbers + 1, of_gradients=True)
            for pair in pairs:
                pair.record(_Gradient.SHOWN)
        if dense:
            self.note()

    def _replaced(self) -> list[Pair]:
        """Returns pairs with another dense half gradient, to be copied by element; applies all other replacements."""
        dense: list[Pair] = []
        for pair in _of(self._pairs, _Gradient.SHOWN):
            grad, full = pair.parameter.grad, pair.master.grad
            if grad is None:
                continue
            if full is None and not pair.was_written:
                pair.clear()  # the master's was set to None
            elif _is_plain(grad) and _is_plain(full):
                if grad is not pair.left and grad.numel():
                    dense.append(pair)
            elif pair.was_written:  # kernels cannot compare elements, so the whole gradient is new
                pair.master.grad, pair.gradient = None, _Gradient.NEW
        return dense

    def _identities(self) -> list[int]:
        """Returns a number for each half gradient, then for each master's gradient, which is its own while it lives."""
        parameters = [*self._halves.values(), *map(_MASTER, self._pairs.values())]
        compiled = calls.compiled()
        found = None if compiled is None else compiled.identities_of_gradients(parameters)
        return list(map(id, map(_GRAD, parameters))) if found is None else found


class MasterGradients:
    """The gradients of one optimizer's pairs.

    Args:
        pairs: pairs by id of the half parameter; a dict that its owner updates.
        halves: half parameters of these pairs, under any keys; also updated by its owner.

    Attributes:
        shown: which half gradients show the masters' gradients.
    """

    def __init__(self, pairs: Mapping[int, Pair], halves: Mapping[int, nn.Parameter]) -> None:
        self._pairs, self._halves = pairs, halves
        self._is_clear = True  # no pair has recorded a gradient
        self.shown = ShownGradients(pairs, halves)
        # Pairs whose masters have sums of blocks before a delayed one, with the fingerprint of the half gradient that
        # the delayed block left.
        self._scaled: list[tuple[Pair, Tensor]] = []

    def are_clear(self) -> bool:
        """Returns True if no half parameter has a gradient and none is recorded; ignores the masters' gradients."""
        return self._is_clear and optimizer_state.have_no_gradients(self._halves.values())

    def shows(self, parameter: Tensor) -> bool:
        """Returns True if a parameter's gradient shows its master's gradient, which is unscaled."""
        pair = self._pairs.get(id(parameter))
        return pair is not None and pair.gradient is _Gradient.SHOWN

    def take_initial(self, pairs: Iterable[Pair]) -> None:
        """Shows the gradients that masters of new pairs have from before `initialize`."""
        shown = [pair for pair in pairs if pair.master.grad is not None]
        if shown:
            for pair in shown:
                pair.parameter.grad = _gradient_of(pair.master).to(pair.parameter.dtype)
            _show(shown)
            self._is_clear = False
            self.shown.add(pair for pair in shown if _is_plain(pair.left) and pair.parameter.numel())

    # At the end of a block

    def unscale_to_masters(self, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Adds new half gradients to the masters' gradients, and writes the sums, rounded, to the half gradients.

        Args:
            inv_scale: factor for the half gradients, a 0-dimensional float32 tensor; None: 1.
            found_inf: 0-dimensional float32 tensor, set to 1 if a half gradient is not finite; None: not checked.
        """
        usual: list[Tensor] | None = None  # the half gradients, in nearly every step: it needs no look at each pair
        if self._is_clear and optimizer_state.have_no_gradients(map(_MASTER, self._pairs.values())):
            usual = optimizer_state.usual_gradients_of(self._halves.values())
        pairs = list(self._pairs.values()) if usual else _with_new(self._pairs)
        if not pairs:
            return
        self._is_clear = False
        device = pairs[0].master.device
        factor = torch.ones((), dtype=torch.float32, device=device) if inv_scale is None else inv_scale
        found_inf = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf
        if usual:
            fulls = kernels.float32_like(usual)
            kernels.unscale_copy(usual, fulls, factor, found_inf, write_back=True)
            for pair, grad, full in zip(pairs, usual, fulls, strict=True):
                pair.master.grad = full
                pair.gradient, pair.left, pair.left_version = _Gradient.SHOWN, grad, grad._version
            self.shown.note_usual(pairs, usual, fulls)
        else:
            _unscale_each(pairs, inv_scale, factor, found_inf)
            self.shown.note()

    def has_sums(self) -> bool:
        """Returns True if any master has a gradient: before `unscale_to_masters`, a sum of earlier blocks."""
        return any(pair.master.grad is not None for pair in self._pairs.values())

    def new(self) -> list[Tensor]:
        """Returns the half gradients that `unscale_to_masters` would add to the masters' gradients."""
        return [_gradient_of(pair.parameter) for pair in _with_new(self._pairs)]

    # Between blocks

    def copy_edits(self, *, takes_new: bool = True) -> list[nn.Parameter]:
        """Applies changes that the user made to half gradients or masters' gradients since amp last wrote them.

        The user may have cleared, edited or replaced gradients, or run a backward pass outside of a block.

        Args:
            takes_new: True to add gradients of backward passes outside of blocks to the masters' gradients.

        Returns:
            The half parameters with gradients of backward passes outside of blocks, if these were added.

        Warns:
            AmpWarning: the user set gradients of masters, and a backward pass outside of blocks made half gradients.
        """
        if self.are_clear():
            return []
        is_all_shown = self.shown.are_all()
        if is_all_shown:
            self.shown.copy_edits()
        else:
            self.note_cleared()
            self.shown.copy_replaced()
        self.shown.warn_if_arrived()
        if is_all_shown:
            return []
        if optimizer_state.have_no_gradients(self._halves.values()) and not _of(self._pairs, _Gradient.BASE):
            self.shown.forget()
            self._is_clear = True
        if not takes_new:
            return []
        new = _with_new(self._pairs)
        by_hand = [pair for pair in new if pair.gradient is _Gradient.NEW and pair.master.grad is not None]
        for pair in by_hand:
            pair.record(_Gradient.SHOWN)
        self.unscale_to_masters()
        if by_hand:
            warn(
                "gradients were set on float32 masters by hand, while the model's half parameters have gradients of a "
                "backward outside of amp.scale_loss. The masters' gradients count; amp drops those of the half "
                "parameters. To use those instead, set no gradients on masters, and put every backward into a block of "
                "amp.scale_loss."
            )
            self.copy_to_half()
        return [pair.parameter for pair in new]

    def were_written(self) -> bool:
        """Returns True if torch has counted a write to any half gradient, or one is another tensor now."""
        return any(pair.was_written for pair in self._pairs.values())

    def note_cleared(self) -> None:
        """Drops masters' gradients whose half gradients the user has set to None.

        Warns:
            AmpWarning: half parameters have other gradients now, so amp cannot tell clearing from replacing.
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
                "amp.scale_loss, or after it with delay_unscale=True. Gradients that earlier blocks had left in their "
                "float32 masters are dropped, as if they had been cleared. To add to them write p.grad += grad, in "
                "place; to clear them, model.zero_grad()."
            )

    def note_moved_to_buckets(self, ids: Collection[int]) -> None:
        """Records half gradients that a backward pass of DDP may have replaced, also where it has added nothing.

        Args:
            ids: ids of half parameters that DDP reduced.
        """
        if not self._is_clear:
            self.shown.note_moved(pair for pair in _of(self._pairs, _Gradient.BASE) if id(pair.parameter) in ids)

    def drop_sums(self, ids: Collection[int]) -> None:
        """Drops the masters' sums of earlier blocks for half parameters that the user has just cleared.

        Args:
            ids: ids of these parameters. Sums of parameters whose gradient is not BASE stay.
        """
        if self._is_clear:
            return
        for pair in _of(self._pairs, _Gradient.BASE):
            if id(pair.parameter) in ids:
                pair.master.grad = None
                pair.record(_Gradient.NEW if pair.parameter.grad is None else _Gradient.BASE)

    def copy_to_half(self) -> None:
        """Writes the masters' gradients, rounded, to the half gradients again, after the masters' were changed."""
        for pair in self._pairs.values():
            if pair.master.grad is None:
                pair.clear()
        shown = _of(self._pairs, _Gradient.SHOWN)
        _show([pair for pair in shown if not _gradient_of(pair.parameter).requires_grad])
        self.shown.note()

    # In a block

    def clear_for_backward(self) -> None:
        """Zeroes shown half gradients before a backward pass; the masters keep the sums.

        Zeros are used instead of None so that amp can see if the user clears gradients inside of the block.
        """
        shown = _of(self._pairs, _Gradient.SHOWN)
        for pair in shown:
            grad = _gradient_of(pair.parameter)
            if pair.master.grad is None or grad.layout is not torch.strided or grad.requires_grad:
                pair.parameter.grad = None
            else:
                optimizer_state.writable_gradient(pair.parameter).zero_()
        for pair in shown:  # in a second loop: gradients that are views of one storage share a version counter
            pair.record(_Gradient.BASE)
        self.shown.forget()

    def leave_to_reduction(self, ids: Collection[int], scale: Tensor) -> list[nn.Parameter]:
        """Does what `copy_edits` and `clear_for_backward` do, but leaves to DDP, scaled, what it has not reduced.

        DDP reduces existing half gradients together with new ones.

        Args:
            ids: ids of half parameters whose gradients of earlier blocks it has not reduced; they leave the masters.
            scale: 0-dimensional float32 tensor.

        Returns:
            The half parameters with gradients of backward passes outside of blocks, which are scaled now, too.
        """
        self.copy_edits(takes_new=False)
        shown = _of(self._pairs, _Gradient.SHOWN)
        returned = [pair for pair in shown if pair.master.grad is not None and id(pair.parameter) in ids]
        for pair in returned:
            grad, full = _gradient_of(pair.parameter), _gradient_of(pair.master)
            scaled = (full * scale).to(grad.dtype)
            if _is_plain(grad) and _is_plain(full):
                grad.copy_(scaled)
            else:
                pair.parameter.grad = scaled
            pair.master.grad = None
        for pair in returned:  # in a second loop: gradients that are views of one storage share a version counter
            pair.record(_Gradient.BASE)
        self.clear_for_backward()
        new = [pair for pair in _with_new(self._pairs) if pair.gradient is _Gradient.NEW]
        kernels.multiply_(optimizer_state.gradients_of(pair.parameter for pair in new), scale)
        for pair in new:
            pair.record(_Gradient.BASE)
        return [pair.parameter for pair in new]

    def note_zeroed(self) -> None:
        """Zeroes masters' gradients if the user has zeroed the half gradients that a delayed block left.

        If the user has edited those in another way, amp warns later, once the result has arrived from the device.
        """
        scaled, self._scaled = self._scaled, []
        edited: list[Tensor] = []
        for pair, before in scaled:
            grad, full = pair.parameter.grad, pair.master.grad
            if _is_plain(grad) and _is_plain(full):
                # Compared by value, as torch does not count every write; on the device, without a sync.
                values = kernels.values_of(grad)
                changed, left = kernels.fingerprints([values])[0] != before, values.any()
                full.masked_fill_(changed & ~left, 0)
                edited.append(changed & left)
        if edited:
            self.shown.tell_if(stacked(edited), _EDITED_WHILE_SCALED)

    def note_left_scaled(self) -> None:
        """Records gradients that stay scaled for a later block, so that amp can see if the user clears them."""
        self.note_cleared()
        self._is_clear = not self._pairs
        for pair in self._pairs.values():
            if pair.gradient is not _Gradient.SHOWN:
                pair.record(_Gradient.BASE)
        base = _of(self._pairs, _Gradient.BASE)
        with_sums = [pair for pair in base if _is_plain(pair.left) and _is_plain(pair.master.grad)]
        self._scaled = []
        for pairs in by_device(pair for pair in with_sums if pair.parameter.numel()):
            self._scaled += zip(pairs, kernels.fingerprints(_half_gradients(pairs)).unbind(), strict=True)

    # For good

    def give_back(self, scale: Tensor | None) -> None:
        """Moves all gradients to the masters, from which `Conversion.restore` gives them back to the parameters.

        Args:
            scale: loss scale of the new half gradients; the masters' sums are multiplied by it first. None: unscaled.
        """
        self.copy_edits(takes_new=False)
        if scale is not None:
            grads = (pair.master.grad for pair in self._pairs.values())
            kernels.multiply_([grad for grad in grads if grad is not None], scale)
        self.unscale_to_masters()
        for pair in self._pairs.values():
            pair.clear()
        self.shown.forget()

    def clear(self) -> None:
        """Sets the gradients of masters and half parameters to None."""
        for pair in self._pairs.values():  # as `Pair.clear` does: a call for each would take as long again
            pair.master.grad = pair.parameter.grad = None
            pair.gradient, pair.left, pair.left_version = _Gradient.NEW, None, 0
        self.shown.forget()
        self._is_clear = True


def _of(pairs: Mapping[int, Pair], gradient: _Gradient) -> list[Pair]:
    """Returns the pairs whose half gradient has a meaning."""
    return [pair for pair in pairs.values() if pair.gradient is gradient]


def _with_new(pairs: Mapping[int, Pair]) -> list[Pair]:
    """Returns the pairs whose half gradient is not yet in the master's gradient."""
    shown = _Gradient.SHOWN
    return [pair for pair in pairs.values() if pair.gradient is not shown and pair.parameter.grad is not None]


def _show(pairs: list[Pair]) -> None:
    """Writes the masters' gradients, rounded, to the half gradients that are there."""
    dense: list[Pair] = []
    for pair in pairs:
        if _is_plain(pair.parameter.grad) and _is_plain(pair.master.grad):
            optimizer_state.writable_gradient(pair.parameter)
            dense.append(pair)
        else:
            pair.parameter.grad = _gradient_of(pair.master).to(pair.parameter.dtype)
    kernels.copy_to_half_grads(_full_gradients(dense), _half_gradients(dense))
    for pair in pairs:
        pair.record(_Gradient.SHOWN)


def _unscale_each(pairs: list[Pair], inv_scale: Tensor | None, factor: Tensor, found_inf: Tensor) -> None:
    """Does what `MasterGradients.unscale_to_masters` does, for gradients of any kind."""
    first: list[Tensor] = []
    without: list[nn.Parameter] = []  # masters that have no gradient yet
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
        full_grads = kernels.float32_like(first)
        kernels.unscale_copy(first, full_grads, factor, found_inf, write_back=True)
        for master, full in zip(without, full_grads, strict=True):
            master.grad = full
    if later:
        kernels.unscale_add(later, later_full, factor, found_inf, write_back=True)
    for pair in pairs:
        pair.record(_Gradient.SHOWN)


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_plain(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Returns True if kernels can compare a gradient by element: it is there, dense, and without a graph."""
    return grad is not None and grad.layout is torch.strided and not grad.requires_grad


def _half_gradients(pairs: Iterable[Pair]) -> list[Tensor]:
    return _values([pair.parameter.grad for pair in pairs])


def _full_gradients(pairs: Iterable[Pair]) -> list[Tensor]:
    return _values([pair.master.grad for pair in pairs])


def _values(grads: list[Any]) -> list[Tensor]:
    return grads if set(map(type, grads)) == {Tensor} else list(map(kernels.values_of, grads))


def by_device(pairs: Iterable[Pair]) -> Iterable[list[Pair]]:
    """Groups pairs by device."""
    return grouped([(pair.master.device, pair) for pair in pairs]).values()


def _take(pair: Pair, inv_scale: Tensor | None, found_inf: Tensor) -> None:
    """Does what `MasterGradients.unscale_to_masters` does, for a sparse gradient or one with a graph of its own."""
    grad, full = _gradient_of(pair.parameter), pair.master.grad
    unscaled = grad.detach().to(torch.float32, copy=True)
    if inv_scale is not None:
        kernels.unscale_([unscaled], inv_scale, found_inf)
    if full is None:
        pair.master.grad = unscaled
    else:  # torch implements dense + sparse, not sparse + dense
        pair.master.grad = full + unscaled if unscaled.layout is not torch.strided else unscaled + full
    if grad.layout is not torch.strided or _gradient_of(pair.master).layout is not torch.strided:
        pair.parameter.grad = _gradient_of(pair.master).to(grad.dtype)
    elif inv_scale is not None:
        kernels.unscale_([grad], inv_scale, found_inf)  # in place, so that the user can still differentiate it
