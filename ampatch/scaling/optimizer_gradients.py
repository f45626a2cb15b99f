"""The gradients of one adopted optimizer: whether they are scaled, and the overflow verdicts for its next step.

Must never call the optimizer's step, nor decide whether it is skipped.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ampatch.distributed import Ranks
from ampatch.errors import UsageError
from ampatch.half_types import HALVES
from ampatch.native import kernels
from ampatch.native.host_copy import on_device
from ampatch.scaling import overflows
from ampatch.scaling.overflows import NonFiniteGradient
from ampatch.scaling.scale_use import ScaleUse, drop, drop_where
from ampatch.scaling.widened_gradients import WidenedGradient
from ampatch.weights import optimizer_state
from ampatch.weights.master_weights import MasterWeights

logger = logging.getLogger("ampatch")

#: What to do if DDP has not reduced the gradients of the last block yet.
NOT_REDUCED = (
    "the backward in the last amp.scale_loss was under no_sync, or did not go through the wrapper (such as "
    "DistributedDataParallel), which is to reduce them together with those of a later one. Run the last forward and "
    "backward of a step through the wrapper, outside of no_sync. If you have reduced the gradients yourself, call "
    "amp.unscale_(optimizer)."
)

_MOST_DROPPED = 4

# After this many blocks without a step, their verdicts are merged, so that they cannot pile up.
_MANY_PENDING = 1000


class HasGradients(Protocol):
    """An adopted optimizer, as far as other optimizers need to know it."""

    @property
    def gradients(self) -> OptimizerGradients:
        """Its gradients."""


class UpdatedTensors:
    """The tensors that an optimizer updates, and their gradients, whether these are scaled or not.

    Args:
        optimizer: the user's optimizer; only a weak reference is kept.
        masters: its float32 masters; empty at levels without masters.
        ranks: the ranks that may share its gradients.

    Attributes:
        optimizer: returns the optimizer; None once it is deleted.
        masters: as given.
        ranks: as given.
    """

    def __init__(self, optimizer: Any, masters: MasterWeights, ranks: Ranks) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.masters, self.ranks = masters, ranks
        self._count = 0  # of the parameters, for which the answers hold
        self._answers: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def parameters(self) -> Iterator[Tensor]:
        """Returns the tensors that the optimizer updates: masters in place of half parameters."""
        return iter(self.masters.masters_of(self.model_parameters()))

    def model_parameters(self) -> Iterator[Tensor]:
        """Returns the parameters in the optimizer's groups, which are the model's."""
        optimizer = self.optimizer()
        return iter(()) if optimizer is None else optimizer_state.parameters_of(optimizer)

    def have_gradients(self) -> bool:
        """Returns True if a model's parameter has a gradient, or FSDP2 keeps one that it has not reduced."""
        own = self.model_parameters
        return optimizer_state.has_gradients(own()) or self.ranks.fsdp.hold_back(own())

    def with_half_gradients(self) -> list[Tensor]:
        """Returns the parameters whose gradients are half and dense."""
        return [
            parameter
            for parameter in self.parameters()
            if (grad := parameter.grad) is not None and grad.dtype in HALVES and not grad.is_sparse
        ]

    def are_in(self, model: nn.Module) -> bool:
        """Returns True if the optimizer updates a parameter of a model."""
        own = list(map(id, self.model_parameters()))
        if len(own) != self._count:
            self._answers.clear()
            self._count = len(own)
        if model not in self._answers:
            self._answers[model] = not set(own).isdisjoint(map(id, model.parameters()))
        return self._answers[model]

    def found_inf(self, device: torch.device) -> Tensor:
        """Returns 1 if a gradient that the optimizer reads is inf or NaN, on any rank that shares it, else 0.

        Returns:
            0-dimensional float32, on the given device.
        """
        found_inf, _ = kernels.flag_and_squares(optimizer_state.gradients_of(self.parameters()), device)
        self.ranks.reduce_overflow_(found_inf, self.model_parameters())
        return found_inf

    def non_finite(self) -> tuple[NonFiniteGradient, ...]:
        """Returns the gradients that the optimizer would read and that are inf or NaN; syncs with the device."""
        name_of, parameter_of = self.masters.name_of, self.masters.parameter_of
        return overflows.non_finite_gradients(self.parameters(), lambda each: name_of(parameter_of(each)))


class GradientMark:
    """One of an optimizer's gradients at one moment, held weakly, to tell whether user code writes to it later.

    Args:
        updated: the tensors that the optimizer updates.

    Attributes:
        grad: returns the gradient; None if it is gone, or if there was none.
    """

    __slots__ = ("_version", "grad")

    def __init__(self, updated: UpdatedTensors) -> None:
        found = next((each.grad for each in updated.model_parameters() if each.grad is not None), None)
        self.grad: Callable[[], Tensor | None] = _no_gradient if found is None else TensorWeakRef(found)
        self._version = 0 if found is None else found._version

    def is_still(self, earlier: GradientMark | None) -> bool:
        """Returns True if there is a gradient, the same as earlier, and torch has counted no write to it since."""
        grad = self.grad()
        return grad is not None and earlier is not None and earlier.grad() is grad and earlier._version == self._version


def _no_gradient() -> None:
    """Returns None."""


class Verdicts:
    """The overflow verdicts on an optimizer's gradients since its last step.

    Args:
        updated: the tensors that the optimizer updates.
        adopted: all optimizers of the session, by id.
        counts_non_finite: whether gradients that overflowed are counted before a later block zeroes them.

    Attributes:
        pending: the uses of scales by blocks since the last step, with their verdicts, oldest first.
        dropped: uses since the last step whose gradients were cleared, so that no step has them.
    """

    def __init__(self, updated: UpdatedTensors, adopted: Mapping[int, HasGradients], counts_non_finite: bool) -> None:
        self.pending: list[ScaleUse] = []
        self.dropped: deque[ScaleUse] = deque(maxlen=_MOST_DROPPED)
        self._updated, self._adopted, self._counts_non_finite = updated, adopted, counts_non_finite
        self._left: GradientMark | None = None  # as amp has left them, if it may have zeroed them

    def add(self, scale_use: ScaleUse) -> None:
        """Remembers a use of a scale whose overflow skips the next step."""
        if self.pending:
            self._left = GradientMark(self._updated)
        # An optimizer without gradients can only skip for another's, and cannot see whether those are cleared.
        self.pending.append(scale_use if self._updated.have_gradients() else scale_use.confirmed(of_others=True))
        if len(self.pending) >= _MANY_PENDING:
            last = {(each.scaler, each.main is None): each for each in self.pending}
            overflowed = {(each.scaler, each.main is None): each for each in self.pending if each.overflowed}
            self.pending = list((last | overflowed).values())

    def zero_overflowed(self) -> None:
        """Zeroes the gradients after an overflow; each verdict counts from now on only if they were not zero before."""
        of_gradients = (each for each in self.pending if each.found_inf is not None and not each.is_of_others)
        judged = [each for each in of_gradients if not each.is_judged_elsewhere]
        if not judged:
            return
        grads = optimizer_state.gradients_of(self._updated.parameters())
        still = self.still_exist(judged[-1], grads)
        # All of them, since nothing is left of any block if the gradients are zero.
        are_own = self.are_as_left()
        unless_zero = [each for each in judged if not (each.is_confirmed and are_own)]
        drop_where(1 - still, unless_zero)
        revised = {each: each.only_where(still) for each in unless_zero}
        self.pending = [revised.get(each, each) for each in self.pending]
        last = revised.get(judged[-1], judged[-1])
        assert last.found_inf is not None
        if self._counts_non_finite and last.overflowed:
            last.non_finite = self._updated.non_finite()
        kernels.zero_after_overflow_(grads, last.found_inf)
        self._updated.masters.gradients.shown.note_masters()
        self._left = GradientMark(self._updated)

    def are_as_left(self) -> bool:
        """Returns True if amp itself may have zeroed the gradients after an overflow, and user code has not since."""
        return self._left is not None and GradientMark(self._updated).is_still(self._left)

    def still_exist(self, scale_use: ScaleUse, grads: Sequence[Tensor]) -> Tensor:
        """Returns 1 if any rank still has a gradient other than zero after a block that overflowed, else 0.

        A finite gradient counts too, because clipping by value turns inf into a finite number.

        Args:
            scale_use: the block's use of a scale.
            grads: the gradients that the optimizer reads.

        Returns:
            0-dimensional float32, 1 or 0.
        """
        assert scale_use.found_inf is not None
        # The factor is large, so that the squares of small gradients do not underflow.
        found, sum_of_squares = kernels.flag_and_squares(grads, scale_use.found_inf.device, factor=2.0**64)
        found.masked_fill_(sum_of_squares != 0, 1)
        self._updated.ranks.reduce_overflow_(found, self._updated.model_parameters())
        return found

    def forget_if_cleared(self) -> None:
        """Forgets the verdicts of blocks if all gradients are gone."""
        updated = self._updated
        is_cleared = optimizer_state.have_no_gradients(updated.parameters()) and not updated.have_gradients()
        if is_cleared and not updated.ranks.are_sharded(updated.parameters()):
            self.forget([scale_use for scale_use in self.pending if scale_use.is_of_others])

    def forget(self, kept: Sequence[ScaleUse] = ()) -> None:
        """Forgets verdicts on gradients that no step will have; scales still react to overflows among them.

        Args:
            kept: those that still count.
        """
        gone, self.pending = [each for each in self.pending if each not in kept], list(kept)
        self.dropped += [each for each in gone if each.main is None][-1:]
        drop(gone, [use for each in list(self._adopted.values()) for use in each.gradients.verdicts.pending])


class OptimizerGradients:
    """The gradients of one optimizer.

    Args:
        optimizer: the user's optimizer; only a weak reference is kept.
        masters: its float32 masters; empty at levels without masters.
        ranks: the ranks that may share its gradients.
        adopted: all optimizers of the session, by id.
        counts_non_finite: whether gradients that overflowed are counted before a later block zeroes them.

    Attributes:
        masters: as given.
        ranks: as given.
        updated: the tensors that the optimizer updates.
        verdicts: the verdicts for the next step.
        scaled_by: the use of a scale that the gradients are multiplied by now; None if they are unscaled.
        warned_of_clipping: the use of a scale for which the user was told that scaled gradients were clipped.
        thread: the thread of the last block that was handed the optimizer; a weak reference.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: MasterWeights,
        ranks: Ranks,
        adopted: Mapping[int, HasGradients],
        counts_non_finite: bool = False,
    ) -> None:
        self.masters = masters
        self.ranks = ranks
        self.updated = UpdatedTensors(optimizer, masters, ranks)
        self.verdicts = Verdicts(self.updated, adopted, counts_non_finite)
        self.scaled_by: ScaleUse | None = None
        self.warned_of_clipping: ScaleUse | None = None
        self.thread: weakref.ref[threading.Thread] | None = None
        self._adopted = adopted
        self._widened: list[WidenedGradient] = []
        self._left_scaled: Sequence[Mapping[str, Any]] = ()  # the optimizer's groups, which outlive it here
        self._mixed_where: Tensor | None = None  # see `mark_mixed`

    def others(self) -> list[OptimizerGradients]:
        """Returns the gradients of all optimizers of the session, these included."""
        return [each.gradients for each in list(self._adopted.values())]

    def are_clear(self) -> bool:
        """Returns True if no gradient, no verdict and no scaled gradient of another optimizer is left from before."""
        for each in self.others():
            if each.scaled_by is not None:
                return False
        wanted = self.masters.wanted
        return (
            not self.verdicts.pending
            and (not wanted or self.masters.gradients.are_clear())
            and optimizer_state.have_no_gradients(self.updated.parameters(), may_be_half=not wanted)
        )

    def drop(self) -> None:
        """Sets all gradients to None."""
        self.ranks.fsdp.drop_held_back(self.updated.model_parameters())
        for parameter in self.updated.parameters():
            parameter.grad = None
        self.masters.gradients.clear()
        self.note_unscaled()

    def synchronise(self, weights_too: bool = False) -> None:
        """Gives every trained half parameter a master, and copies to the masters the gradients that the user changed.

        Args:
            weights_too: whether to copy changed weights as well.
        """
        self.masters.make_missing()
        if weights_too:
            self.masters.synchronise()
        if self.scaled_by is None and not self.masters.are_in_place:
            added = self.masters.gradients.copy_edits()
            if added:
                self.ranks.note_unreduced(added)

    # Whether they are scaled

    def are_unscaled(self) -> bool:
        """Returns True if no gradient is scaled."""
        return self.scaled_by is None or self.scaled_by.is_one or not self.updated.have_gradients()

    def make_float32(self, but: Collection[int]) -> None:
        """Makes half gradients float32 for as long as they are scaled, since scaled half gradients could overflow.

        Args:
            but: ids of parameters to leave out.
        """
        half = (each for each in self.updated.with_half_gradients() if id(each) not in but)
        # One by one, so that those are narrowed again that were widened before an error.
        self._widened.extend(WidenedGradient(each, torch.float32, fixes_type=True) for each in half)

    def note_scaled(self) -> None:
        """Remembers the parameters, which keep scaled gradients after the block, in case the optimizer is deleted."""
        self.masters.gradients.note_left_scaled()
        self._left_scaled = () if (optimizer := self.updated.optimizer()) is None else optimizer.param_groups

    def note_unscaled(self) -> None:
        """Notes that the gradients are unscaled or gone; those that `make_float32` changed are half again."""
        self.scaled_by = None
        self._left_scaled = ()
        for each in self._widened:
            each.narrow()
        self._widened.clear()

    def check_unscaled(self, what: str) -> None:
        """Raises `UsageError` if there are gradients, and they are scaled.

        Args:
            what: the beginning of the message.
        """
        self.check_not_mixed()
        if self.scaled_by is None:
            return
        if self.updated.have_gradients():
            if self.scaled_by.is_open:
                why = "it stands inside the amp.scale_loss block. Move it behind the block."
            elif self.scaled_by.is_postponed:
                why = NOT_REDUCED
            else:
                why = (
                    "the last amp.scale_loss had delay_unscale=True. Leave it out in the last block before the "
                    "step, or call amp.clip_grad_norm_(optimizer, max_norm) after it; or, to drop the gradients, type "
                    "optimizer.zero_grad(), which has to set them to None."
                )
            raise UsageError(f"{what} still scaled: {why}")
        if not self.scaled_by.is_open:
            self.note_unscaled()

    @property
    def is_of_this_thread(self) -> bool:
        """True if no other thread that still runs trains with the optimizer."""
        thread = None if self.thread is None else self.thread()
        return thread is None or thread is threading.current_thread() or not thread.is_alive()

    @property
    def is_in_block(self) -> bool:
        """True if a block for this optimizer is open."""
        return self.scaled_by is not None and self.scaled_by.is_open

    def mark_mixed(self, use: ScaleUse, where: Tensor | None = None) -> None:
        """Notes that scaled gradients were added to these, so that nothing may use the sums.

        Args:
            use: the use of a scale that they are multiplied by.
            where: 0-dimensional bool tensor: false if the gradients were zero before, and are unscaled now; None: true.
        """
        use.is_mixed = True
        self.scaled_by, self._mixed_where = use, where
        self.note_scaled()

    def check_not_mixed(self) -> None:
        """Raises `UsageError` if a block for other optimizers has added scaled gradients to these unscaled ones."""
        if self.scaled_by is None or not self.scaled_by.is_mixed:
            return
        grads = optimizer_state.gradients_of(self.updated.model_parameters())
        is_cleared = not any(bool(kernels.values_of(each).any()) for each in grads)
        if is_cleared or (self._mixed_where is not None and not bool(self._mixed_where)):
            self.note_unscaled()
            return
        raise UsageError(
            f"the gradients of this {type(self.updated.optimizer()).__name__} are sums of unscaled ones and scaled "
            "ones: a block of amp.scale_loss for other optimizers has added to them, as its backward pass reaches "
            "parameters of this optimizer, too. Type amp.scale_loss(loss, [optimizer, other]) there; or clear these "
            "gradients before they are used: optimizer.zero_grad()."
        )

    def note_dropped_while_scaled(self) -> None:
        """Notes it if the user has dropped gradients that a block had left scaled."""
        if self.scaled_by is not None and not self.updated.have_gradients():
            self.masters.gradients.note_cleared()
            self.note_unscaled()

    def check_shared(self, what: str, also: Collection[OptimizerGradients] = ()) -> None:
        """Raises `UsageError` if another optimizer has left the gradient of a shared parameter scaled.

        If that optimizer's gradients were cleared, they count as unscaled.

        Args:
            what: the beginning of the message: what is about to happen to these gradients.
            also: gradients to which it happens too, which may therefore be scaled.
        """
        for other in self.others():
            if other.scaled_by is None or other.scaled_by.is_one or other is self or other in also:
                continue
            if not other.scaled_by.is_open and not other.updated.have_gradients():
                other.note_unscaled()
                continue
            theirs = set(map(id, other.updated.model_parameters()))
            own = (each for each in self.updated.model_parameters() if each.grad is not None)
            shared = next((each for each in own if id(each) in theirs), None)
            if shared is not None:
                raise UsageError(
                    f"{what} the gradient of {self.masters.name_of(shared)}, which another optimizer has as well, and "
                    "which is still scaled by a block of amp.scale_loss for that one. Hand both optimizers to "
                    "amp.scale_loss."
                )

    def are_finite(self) -> Tensor:
        """Returns whether all gradients are finite, and no block since the last step has overflowed.

        Returns:
            0-dimensional bool tensor on the device of the gradients, the same on all ranks that share them.
        """
        self.check_not_mixed()
        self.synchronise()
        self.verdicts.forget_if_cleared()
        updated = self.updated.parameters if self.scaled_by is None else self.updated.model_parameters
        grads = optimizer_state.gradients_of(updated())
        device = grads[0].device if grads else torch.device("cpu")
        flag, squares = kernels.flag_and_squares(grads, device, factor=2.0**64)
        are_own = self.verdicts.are_as_left()
        for each in self.verdicts.pending:
            if each.found_inf is not None:  # of gradients that the user has not set to zero since
                counts = (squares != 0) | (each.is_confirmed and are_own)
                flag = torch.maximum(flag, on_device(each.found_inf, device) * counts)
        self.ranks.reduce_overflow_(flag, self.updated.model_parameters())
        return flag == 0

    def forget_cleared_verdict(self) -> None:
        """Forgets the last block's overflow if its gradients are gone; otherwise zeroes them after an overflow.

        The next block is judged by its own gradients.
        """
        if not self.is_in_block:
            self.check_not_mixed()
            self.note_dropped_while_scaled()
        if self.scaled_by is not None:
            return
        self.synchronise()
        self.verdicts.forget_if_cleared()
        self.verdicts.zero_overflowed()

    # The end of a session, and of an optimizer

    def release(self) -> bool:
        """Gives the masters' values back to the half parameters, and drops gradients that would stay scaled.

        Returns:
            True if gradients were dropped.
        """
        self.masters.swap_out()
        self.masters.values.copy_edits()
        scaled_by = self.scaled_by
        is_open = scaled_by is not None and scaled_by.is_open
        lost = scaled_by is not None and not is_open and not scaled_by.is_one and self.updated.have_gradients()
        if lost:
            self.drop()
        elif scaled_by is None:
            self.masters.gradients.copy_edits()
        elif not is_open:
            self.note_unscaled()
        self.masters.gradients.give_back(scaled_by.scale if is_open and scaled_by is not None else None)
        return lost and scaled_by is not None and not scaled_by.is_mixed

    def optimizer_died(self) -> None:
        """Drops the gradients that a deleted optimizer left scaled, since another would take them for unscaled ones."""
        left = [each for group in self._left_scaled for each in group["params"] if each.grad is not None]
        self._left_scaled = ()
        if left and self.scaled_by is not None and not self.scaled_by.is_one:
            for parameter in left:
                parameter.grad = None
            logger.warning("An optimizer was deleted whose gradients were still scaled: they are None now.")
        self._widened.clear()
