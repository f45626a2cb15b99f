"""The block of ``amp.scale_loss``: scales the loss and existing gradients on entry, and unscales on exit.

Must keep nothing beyond the block: the `ScaleUse` outlasts it, and adopted optimizers remember that. Casts are off
while the block itself computes, so that no cast list reaches its arithmetic.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ampatch.distributed import Ranks, ReplicasInBlock
from ampatch.errors import UsageError, warn
from ampatch.patching.weight_cache import WeightCache
from ampatch.scaling.bystanders import Bystander, leaves_of, reached
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.optimizer_step import AdoptedOptimizer
from ampatch.scaling.overflows import OverflowHandler
from ampatch.scaling.scale_use import ScaleUse, is_scaled
from ampatch.scaling.scaled_leaves import ScaledLeaves
from ampatch.scaling.unscaling import Unscaling
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.switch import Switch
from ampatch.torch_private.autograd import SAVED_OTHER
from ampatch.weights.master_gradients import MasterGradients

_L = TypeVar("_L")


@dataclass(slots=True)
class Blocks:
    """What all blocks of a session share.

    Attributes:
        ranks: the ranks that may share gradients.
        cache: the casts of weights. It is cleared on entry: the graph holds the casts that the backward pass needs,
            and releases each after its use. It is cleared again on exit, because of forward passes inside the block.
        switch: whether casts are on.
        prepare: returns the scaler for a loss, optimizers and a loss's number, and the adopted optimizers; raises if
            there are none.
        adopted: all optimizers of the session, by id.
        checks_finite: whether steps look for inf and NaN whatever the scale.
        leaves: leaves that see scaled gradients.
        overflows: what happens after a skipped step.
        open: open blocks, outer ones first.
        warned: numbers of the losses for which the user has been warned.
    """

    ranks: Ranks
    cache: WeightCache
    switch: Switch
    prepare: Callable[[Any, Sequence[OptimizerLike], int], tuple[LossScaler, list[AdoptedOptimizer]]]
    adopted: Mapping[int, AdoptedOptimizer]
    leaves: ScaledLeaves
    overflows: OverflowHandler
    checks_finite: bool = False
    warned: set[int] = field(default_factory=set)
    open: list[ScaledBlock[Any]] = field(default_factory=list)

    def gradients(self) -> list[OptimizerGradients]:
        """Returns the gradients of all adopted optimizers."""
        return [each.gradients for each in list(self.adopted.values())]

    def left_scaled(self) -> list[OptimizerGradients]:
        """Returns the gradients that blocks which have ended left scaled, for a later block or a step to unscale."""
        return [each for each in self.gradients() if (by := each.scaled_by) and not (by.is_open or by.is_mixed)]

    def updated(self) -> set[int]:
        """Returns the ids of the parameters that adopted optimizers update."""
        return {id(own) for each in self.gradients() for own in each.updated.model_parameters()}

    @property
    def watched(self) -> list[ScaledBlock[Any]]:
        """The open blocks that warn of backward passes from other losses."""
        return [each for each in self.open if each.watched]


class _WaitingGradients:
    """Half gradients with masters, which are cleared when the backward pass of a block begins, or a block inside it.

    Until then the user may change or clear them.

    Args:
        blocks: what all blocks of the session share.
        scale_use: the block's use of a scale.
        replicas: what DDP does in the block; None: no model is in a wrapper.
    """

    def __init__(self, blocks: Blocks, scale_use: ScaleUse, replicas: ReplicasInBlock | None) -> None:
        self._blocks, self._scale_use, self._replicas = blocks, scale_use, replicas
        self.gradients: list[MasterGradients] = []
        self._hooks: list[RemovableHandle] = []  # on the losses

    def wait(self, gradients: Sequence[OptimizerGradients], losses: Sequence[Tensor]) -> None:
        """Waits for a backward pass from one of the losses; without any, the gradients are cleared at once."""
        self.gradients = [each.masters.gradients for each in gradients if not each.masters.gradients.are_clear()]
        if self.gradients:
            self._hooks = [each.register_hook(self.clear_for_backward) for each in losses if each.requires_grad]
        if not self._hooks:
            self.clear_for_backward()

    def stop(self) -> list[MasterGradients]:
        """Returns the gradients that still wait, and removes the hooks."""
        waiting, self.gradients = self.gradients, []
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        return waiting

    def clear_for_backward(self, *_: object) -> None:
        """Copies to the masters the half gradients that the user changed, and clears the half ones."""
        replicas = self._replicas
        with self._blocks.switch.suspended():
            for gradients in self.stop():
                if replicas is None or replicas.were_reduced:
                    gradients.copy_edits()
                    gradients.clear_for_backward()
                else:
                    self._leave_to_wrapper(gradients, replicas)
            if replicas is not None:
                replicas.note_existing()

    def _leave_to_wrapper(self, gradients: MasterGradients, replicas: ReplicasInBlock) -> None:
        """Does what `clear_for_backward` does, but leaves to DDP, scaled, what it has not reduced."""
        unreduced = replicas.unreduced()
        self._blocks.ranks.note_unreduced(gradients.leave_to_reduction(unreduced, self._scale_use.scale))

    def end(self) -> bool:
        """Copies changed half gradients to the masters, if no backward pass has begun.

        Returns:
            True if there are changes, which must be those of a backward pass from another loss.
        """
        waiting, replicas = self.stop(), self._replicas
        were_written = any(gradients.were_written() for gradients in waiting)
        for gradients in waiting:
            if replicas is None or replicas.were_reduced or replicas.have_reduced():
                gradients.copy_edits()
            else:
                self._leave_to_wrapper(gradients, replicas)
        return were_written


class ScaledBlock(Generic[_L]):
    """The context manager that ``amp.scale_loss`` returns; to be entered once.

    A class, since a generator takes longer to enter and to leave than the work in it.

    Args:
        blocks: what all blocks of the session share.
        loss: a loss, or nested lists, tuples and dicts of losses.
        optimizers: the user's, whose parameters receive gradients in the block. A parameter of two is handled once.
        loss_id: the number of the scale.
        delay_unscale: leaves the gradients scaled on exit.
        delay_overflow_check: leaves gradients that overflowed as they are, for user code that judges them.

    Attributes:
        scale_use: this use of the scale; set on entry.
        watched: nodes of the scaled losses in the graph; empty if the block does not warn of other losses.
        beside: optimizers that the block was not handed.
        is_used: True once a backward pass went through one of them, or if none is watched.
        has_warned: True once it has.
    """

    watched: tuple[Node, ...] = ()
    beside: Sequence[Bystander] = ()
    is_used = True
    has_warned = False
    _replicas: ReplicasInBlock | None = None  # None: no model is in a wrapper
    _waiting: _WaitingGradients | None = None  # None: the block began without gradients

    def __init__(
        self,
        blocks: Blocks,
        loss: _L,
        optimizers: Sequence[OptimizerLike],
        loss_id: int,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        self._blocks = blocks
        self._arguments: tuple[_L, Sequence[OptimizerLike]] | None = (loss, optimizers)
        self._loss_id = loss_id
        self._delays_unscaling = delay_unscale
        self._is_judged_elsewhere = delay_overflow_check
        self._before: list[tuple[int, int]] = []  # the gradients that were there on entry

    def backward(self, *_: object, **__: object) -> None:
        """Raises: the block has to end before the gradients are unscaled."""
        raise UsageError(
            "amp.scale_loss gives a block, and no loss. Type with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()."
        )

    def __enter__(self) -> _L:
        """Scales the loss, and the gradients that the backward pass is going to add to.

        Returns:
            The scaled loss in float32, in the same nested lists, tuples and dicts.

        Raises:
            UsageError: the block was entered before, or stands inside another one for the same optimizer. Or gradients
                of two scales would be added up, the loss was scaled before, or an optimizer was never passed to
                ``amp.initialize``.
            OptionError: the number of the scale is out of range, or the loss is no floating tensor.
        """
        if self._arguments is None:
            state = "is open already" if self in self._blocks.open else "has ended"
            raise UsageError(
                f"this amp.scale_loss block {state}, and a block can be entered only once. Call amp.scale_loss(loss, "
                "optimizer) anew for each backward pass: with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()."
            )
        loss, blocks = self._arguments[0], self._blocks
        with blocks.switch.suspended():
            self._scaler, optimizers = blocks.prepare(*self._arguments, self._loss_id)
            self._gradients = [optimizer.gradients for optimizer in dict.fromkeys(optimizers)]
            if is_scaled(loss, searches=bool(blocks.open)):  # a search takes time, and only nested blocks need it
                raise UsageError(
                    "this loss was scaled before, by another amp.scale_loss: its gradients would be multiplied by both "
                    "scales. Give the loss itself, and all optimizers that it trains: amp.scale_loss(loss, "
                    "[optimizer, other])."
                )
            others = self._take_in_bystanders(loss)
            for each in self._gradients:
                if each.verdicts.pending:  # first, since the scale may back off
                    each.forget_cleared_verdict()
            self.scale_use = scale_use = ScaleUse(self._scaler, self._loss_id, blocks.checks_finite)
            scale_use.is_judged_elsewhere = self._is_judged_elsewhere
            self._unscaling = Unscaling(scale_use, self._gradients, blocks.ranks)
            if blocks.ranks.has_wrappers:
                self._replicas = blocks.ranks.begin_block(self._unscaling.model_parameters())
            # First what may run out of memory: nothing has begun then.
            scaled, losses = scale_use.apply(loss)
            if not self.begin_if_clear():
                if self._joins_earlier():
                    scaled, losses = scale_use.apply(loss)
                self._begin(losses)
            blocks.open.append(self)
            if not scale_use.is_one:
                self._begin_to_watch(loss, losses, others)
        blocks.cache.end_iteration()
        self._arguments = None  # the user may delete the loss to free its graph
        return scaled  # type: ignore[no-any-return]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Unscales the gradients; after an error in the block drops them, so that the next one starts clean.

        Warns:
            AmpWarning: there are new gradients, and no backward pass began with the scaled loss.
        """
        blocks, has_ended = self._blocks, False
        blocks.open.remove(self)
        with blocks.switch.suspended():
            try:
                if kind is not None:
                    self._abandon()
                elif blocks.switch.active:
                    self._end()
                else:  # amp.deinitialize was called inside the block, and nothing would unscale later
                    self._unscaling.run()
                has_ended = kind is None
            finally:
                self._end_beside(has_failed=not has_ended)
                if blocks.leaves.found:
                    blocks.leaves.end_block()
                if self.has_warned:  # a loop that uses another loss does so in every step
                    blocks.warned.add(self._loss_id)
                blocks.cache.end_iteration()

    # Entry

    def _take_in_bystanders(self, loss: Any) -> list[OptimizerGradients]:
        """Takes in the optimizers that the block was not handed, and to whose gradients it has to add.

        Returns:
            The gradients of those that it has not taken in.
        """
        thread = weakref.ref(threading.current_thread())
        for each in self._gradients:
            each.thread = thread
        self._tell_outer(ends=True)
        if len(self._blocks.adopted) <= len(self._gradients) or self._scaler.is_one:
            return []
        # What other threads, and blocks around this one, do with their gradients is their own.
        others = [each for each in self._blocks.gradients() if not each.is_in_block and each.is_of_this_thread]
        others = [each for each in others if each not in self._gradients]
        taken = reached(others, loss)
        self._gradients += taken
        return [each for each in others if each not in taken]

    def _begin_to_watch(self, loss: Any, losses: Sequence[Tensor], others: Sequence[OptimizerGradients]) -> None:
        """Prepares warnings, and notes the gradients of other optimizers."""
        try:
            self._watch(losses)
            if self._loss_id not in self._blocks.leaves.looked:
                self._blocks.leaves.check(self._loss_id, loss, losses, self._blocks.updated)
            if others:
                handed = set(map(id, self._unscaling.model_parameters()))
                self.beside = [Bystander(each, handed) for each in others]
        except BaseException:
            self._blocks.open.remove(self)
            self._abandon()
            raise

    def _end_beside(self, has_failed: bool) -> None:
        beside, self.beside = self.beside, ()
        for each in beside:
            each.end(self.scale_use, has_failed=has_failed)
        self._tell_outer(ends=False)

    def _tell_outer(self, *, ends: bool) -> None:
        """Has the blocks around this one unscale what they have added to others' gradients, and begin anew with these.

        This block may add to any of these as well, and takes those that are there for unscaled ones. It may also add to
        those of the blocks around it, before their own backward passes begin.
        """
        for block in tuple(self._blocks.open):
            if ends and block._waiting is not None and block._gradients[0].is_of_this_thread:
                block._waiting.clear_for_backward()
            for each in block.beside:
                if each.gradients.is_of_this_thread:
                    if ends:
                        each.end(block.scale_use)
                    each.begin()

    def begin_if_clear(self) -> bool:
        """Begins the block if there are no gradients to scale and no earlier verdicts, as in most steps.

        Returns:
            True if it has begun. Otherwise nothing was changed.
        """
        for each in self._gradients:
            if not each.are_clear():
                return False
        for each in self._gradients:
            each.scaled_by = self.scale_use
        self.scale_use.is_open = True
        return True

    def _joins_earlier(self) -> bool:
        """Keeps the scale of an earlier block whose gradients are scaled still, though a step may have changed it.

        Returns:
            True if there is such a block.
        """
        for each in self._gradients:
            earlier = each.scaled_by
            if earlier is None or earlier.is_open or earlier.is_mixed:
                continue
            if earlier.scaler is self._scaler and each.updated.have_gradients():
                self.scale_use.reuse_scale_of(earlier)
                return True
        return False

    def _begin(self, losses: Sequence[Tensor]) -> None:
        """Scales existing gradients, so that the backward pass adds scaled gradients to scaled ones.

        Args:
            losses: the scaled losses that take hooks.

        Raises:
            UsageError: existing gradients are scaled by another scale, or by a block around this one; or the backward
                pass would add gradients of another scale to those of such a block.
        """
        for each in self._gradients:
            self._check_may_follow(each)
            self._check_may_widen(each)
        around = [block for block in self._blocks.open if block._gradients[0].is_of_this_thread]
        if around and not self.scale_use.is_one:
            self._check_may_be_inside(around, leaves_of(losses))
        unscaled = [each for each in self._gradients if each.scaled_by is None]
        # Another optimizer may have scaled the gradient of a shared parameter already.
        ready = (each.updated.parameters() for each in self._gradients if each.scaled_by is not None)
        scaled = {id(parameter) for parameters in ready for parameter in parameters}
        try:
            for each in unscaled:
                each.masters.make_missing()
            self._unscaling.scale_existing(unscaled, but=scaled)
            for each in self._gradients:
                if each.scaled_by is not None:
                    each.masters.gradients.note_cleared()
                    each.masters.gradients.note_zeroed()
                each.scaled_by = self.scale_use
            self._waiting = _WaitingGradients(self._blocks, self.scale_use, self._replicas)
            self._waiting.wait(unscaled, losses)
            self._before = self._existing()
            if self._replicas is not None:
                self._replicas.note_existing()
        except BaseException:
            self._abandon()
            raise
        self.scale_use.is_open = True

    def _check_may_follow(self, gradients: OptimizerGradients) -> None:
        gradients.check_shared("this amp.scale_loss would add to", self._gradients)
        earlier = gradients.scaled_by
        if earlier is None:
            return
        if earlier.is_open:
            raise UsageError(
                "this amp.scale_loss stands inside another one for the same optimizer, so that its gradients would be "
                "unscaled twice. End the outer block first, or add the losses up and scale their sum."
            )
        gradients.check_not_mixed()
        if gradients.scaled_by is None:
            return
        if not gradients.updated.have_gradients():
            gradients.note_unscaled()
        elif not earlier.is_same_scale(self.scale_use):
            raise UsageError(
                f"the gradients of this {type(gradients.updated.optimizer()).__name__} are scaled by loss scaler "
                f"{earlier.scaler_id} at {float(earlier.scale):g}, and this amp.scale_loss would add gradients scaled "
                f"by loss scaler {self.scale_use.scaler_id} at {float(self.scale_use.scale):g}. Leave out "
                "delay_unscale=True in the previous amp.scale_loss."
            )

    def _check_may_be_inside(self, around: Sequence[ScaledBlock[Any]], leaves: Collection[int]) -> None:
        """Raises if the backward pass reaches gradients of other blocks, and this one or another scale changes them.

        Args:
            around: the blocks around this one.
            leaves: ids of the tensors that it reaches.
        """
        own = set(map(id, self._unscaling.model_parameters()))
        scale = self.scale_use
        for block in around:
            reached = {id(each) for each in block._unscaling.model_parameters()}.intersection(leaves)
            outer = block.scale_use
            if reached and (not reached.isdisjoint(own) or float(outer.scale) != float(scale.scale)):
                raise UsageError(
                    f"this amp.scale_loss stands inside another one, and its backward pass reaches gradients that loss "
                    f"scaler {outer.scaler_id} multiplies there by {float(outer.scale):g}. Loss scaler "
                    f"{scale.scaler_id} would add some multiplied by {float(scale.scale):g}, or unscale these too. End "
                    "the outer block first."
                )

    def _check_may_widen(self, gradients: OptimizerGradients) -> None:
        """Raises if scaling would make half gradients float32 that DDP adds to: it expects its parameters' dtype."""
        ranks = self._blocks.ranks
        if self._scaler.is_one or gradients.scaled_by is not None or not ranks.has_wrappers:
            return
        if ranks.reduced_among(gradients.updated.with_half_gradients()):
            raise UsageError(
                "DistributedDataParallel cannot add to half gradients that were unscaled, as it takes none of another "
                "type than its parameters. Put all passes before the last one of a step under no_sync(), or use "
                "opt_level='O2', which has float32 masters."
            )

    # Backward passes from other losses

    def _watch(self, losses: Sequence[Tensor]) -> None:
        """Prepares the warning that a backward pass began with another loss."""
        tracer = self._blocks.overflows.tracer
        if tracer is not None and tracer.notes_steps:
            tracer.note_losses(losses)
        if self._loss_id in self._blocks.warned:
            return
        self.watched = tuple(each.grad_fn for each in losses if each.grad_fn is not None)
        if self.watched:
            self.is_used = False

    def unscales_any_of(self, parameters: Collection[int]) -> bool:
        """Returns True if the block is going to unscale the gradient of one of these parameters.

        Args:
            parameters: ids of tensors.
        """
        return bool(parameters) and any(
            id(parameter) in parameters
            for each in self._gradients
            for parameter in (
                # Half gradients that wait for the backward pass are taken as the user leaves them, unscaled.
                each.masters.parameters_without_master(each.updated.model_parameters())
                if self._waiting is not None and each.masters.gradients in self._waiting.gradients
                else each.updated.model_parameters()
            )
        )

    def _existing(self) -> list[tuple[int, int]]:
        """Returns the ids and version counters of the gradients of the model's parameters."""
        parameters = self._unscaling.model_parameters()
        return [(id(each.grad), each.grad._version) for each in parameters if each.grad is not None]

    # Exit

    def _end(self) -> None:
        """Unscales, unless that is delayed or DDP has postponed the reduction of these gradients."""
        scale_use = self.scale_use
        scale_use.is_open = False
        self.is_used = (
            self.is_used or self.has_warned or any(map(_was_freed, self.watched)) or self._existing() == self._before
        )
        self.watched = ()
        if self._replicas is not None:
            self._replicas.end(is_judged=self._scaler.dynamic)
            moved = self._replicas.moved()
            for each in self._gradients if moved else ():
                each.masters.gradients.note_moved_to_buckets(moved)
        if self._waiting is not None and self._waiting.end() and not scale_use.is_one:
            self.is_used = False
        postponed = self._postponed()
        scale_use.is_postponed = bool(postponed)
        if self._delays_unscaling:
            postponed = self._gradients
        for each in postponed:
            each.note_scaled()
        if not postponed:
            self._unscaling.run()
        elif len(postponed) < len(self._gradients):
            others = [each for each in self._gradients if each not in postponed]
            # The ranks agree on these as they do if none is postponed: an overflow of any moves the scale of all.
            Unscaling(scale_use, others, self._blocks.ranks).run(self._unscaling.model_parameters())
        if not self.is_used and any(each.updated.have_gradients() for each in self._gradients):
            self.has_warned = True
            warn(
                "nothing went backward through the scaled loss of this amp.scale_loss, and new gradients are divided "
                "by the scale all the same. Type: with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()."
            )

    def _postponed(self) -> list[OptimizerGradients]:
        """Returns the gradients that wait for a wrapper to reduce them: their unscaling waits too.

        Otherwise scaled and unscaled gradients would be summed, and the reduction would miss those in masters.
        """
        replicas, ranks = self._replicas, self._blocks.ranks
        if replicas is None:
            return []
        concerned = (each for each in self._gradients if not self.scale_use.is_one or each.masters)
        postponed = [
            each
            for each in concerned
            if replicas.is_postponed(each.updated.model_parameters())
            or ranks.fsdp.is_postponed(each.updated.model_parameters())
        ]
        if len(postponed) not in (0, len(self._gradients)):
            ids = {id(parameter) for each in postponed for parameter in each.updated.model_parameters()}
            others = (each for each in self._gradients if each not in postponed)
            if any(id(parameter) in ids for each in others for parameter in each.updated.model_parameters()):
                return self._gradients
        return postponed

    def _abandon(self) -> None:
        """Drops all gradients, after an error in the block or on entry."""
        self.scale_use.is_open = False
        self.watched = ()
        if self._waiting is not None:
            self._waiting.stop()
        self._unscaling.abandon()


def _was_freed(node: Node) -> bool:
    """Returns True if a backward pass has freed the graph of a scaled loss.

    Code that calls torch's engine by itself goes past `ampatch.scaling.unscaled_losses`, which sees all others.

    Args:
        node: the loss's node, which saves its factor.
    """
    try:
        getattr(node, SAVED_OTHER, None)
    except RuntimeError:  # torch's error for what is freed
        return True
    return False
