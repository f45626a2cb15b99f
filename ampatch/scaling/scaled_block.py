"""One ``scale_loss`` block: brings gradients to the scale, and back.

Owns nothing beyond its block: what outlasts it is a `ScaleUse`, which the adopted optimizers remember. One that was
left with ``delay_unscale=True`` can be taken up from there, and ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ampatch.casting.nested import tensors_in
from ampatch.distributed import Ranks
from ampatch.errors import UsageError, warn
from ampatch.native import kernels
from ampatch.scaling.optimizers import AdoptedOptimizer
from ampatch.scaling.scale_use import ScaleUse
from ampatch.weights.master_gradients import MasterGradients
from ampatch.weights.optimizer_state import gradients_of, has_gradients


class ScaledBlock:
    """The gradients' way through one block.

    Args:
        scale_use: the use that is made of a scale.
        optimizers: whose gradients the block works on; a parameter in two of them is handled once.
        ranks: those over which gradients may be spread.

    Attributes:
        scale_use: as given.
        watched: where in the graph the scaled losses are, until it ends; empty if nobody is to be warned any more.
        has_told: whether it has been warned that something else went backward.
    """

    has_told = False
    watched: tuple[Node, ...] = ()
    _is_used = True

    def __init__(self, scale_use: ScaleUse, optimizers: Sequence[AdoptedOptimizer], ranks: Ranks) -> None:
        self.scale_use = scale_use
        self._ranks = ranks
        self._scaler = scale_use.scaler
        self._optimizers = list(dict.fromkeys(optimizers))
        self._before: list[tuple[int, int]] = []  # the gradients that were there when it began
        self._waiting: list[MasterGradients] = []  # those that make way when backward begins
        self._hooks: list[RemovableHandle] = []  # that tell of it

    @property
    def is_of_one(self) -> bool:
        """Returns whether it is for one optimizer only."""
        return len(self._optimizers) == 1

    def begins_at_rest(self) -> bool:
        """Begins if there is nothing to bring to the scale, as in most steps: no gradient, and no pass since the last.

        Returns:
            Whether it has begun. If not, nothing was done, and `begin` is to be called.
        """
        for optimizer in self._optimizers:
            if not optimizer.is_at_rest():
                return False
        for optimizer in self._optimizers:
            optimizer.scaled_by = self.scale_use
        self.scale_use.is_open = True
        return True

    def watch(self, scaled_loss: object) -> None:
        """Has the end of the block warn if nothing went backward through the scaled loss, and there are gradients."""
        losses = _hookable(scaled_loss)
        self._is_used = not losses
        self.watched = tuple(each.grad_fn for each in losses if each.grad_fn is not None)
        for each in losses:
            each.register_hook(self._note_use)

    def _there(self) -> list[tuple[int, int]]:
        """Returns the gradients that are there: their ids and versions."""
        return [(id(each.grad), each.grad._version) for each in self._model_parameters() if each.grad is not None]

    def _note_use(self, _: Tensor) -> None:
        self._is_used = True

    def works_on(self, parameters: Collection[int]) -> bool:
        """Returns whether it divides the gradients of any of these by the scale, now that they have some.

        Args:
            parameters: ids of tensors.
        """
        return bool(parameters) and any(
            id(each) in parameters
            for optimizer in self._optimizers
            for each in (
                # Where half gradients wait for backward, what the user adds until then is taken as it is.
                optimizer.masters.without_master(optimizer.parameters())
                if optimizer.masters.gradients in self._waiting
                else optimizer.model_parameters()
            )
        )

    def go_on(self) -> bool:
        """Stays at the scale of a pass whose gradients are to be reduced with those of this one, if there is one."""
        for optimizer in self._optimizers:
            earlier = optimizer.scaled_by
            postponed = earlier is not None and earlier.is_postponed and earlier.scaler is self._scaler
            if earlier is not None and postponed and optimizer.has_gradients():
                self.scale_use.go_on_from(earlier)
                return True
        return False

    def begin(self, scaled_loss: object) -> None:
        """Brings what gradients there are to the scale, so that backward adds to them what is of their kind.

        Those of half parameters with masters make way only when backward begins: until then the user may clear or
        change them.

        Args:
            scaled_loss: what backward is to begin with, or nested lists, tuples and dicts of that.

        Raises:
            UsageError: they are scaled already, by another scale or by a block around this one.
        """
        for optimizer in self._optimizers:
            optimizer.unfold()
            self._check_may_follow(optimizer)
            self._check_may_widen(optimizer)
        unscaled = [optimizer for optimizer in self._optimizers if optimizer.scaled_by is None]
        # A parameter of two optimizers may be at the scale already, by one of them.
        scaled = {
            id(parameter)
            for optimizer in self._optimizers
            if optimizer.scaled_by is not None
            for parameter in optimizer.parameters()
        }
        try:
            for optimizer in unscaled:
                optimizer.masters.complete()
                if optimizer.pending:
                    optimizer.forget_what_was_cleared()
            # Mostly there are none: those of the step before were cleared.
            found = [] if self.scale_use.is_one else [each for each in unscaled if has_gradients(each.parameters())]
            for optimizer in found:
                optimizer.widen_half_gradients(but=scaled)
            if found:
                # By a scale of its own: gradients with a graph remember the factor, and the scaler's moves.
                kernels.multiply_(_in_place(found, but=scaled), self.scale_use.scale)
            for optimizer in self._optimizers:
                if optimizer.scaled_by is not None:
                    optimizer.masters.gradients.follow_clearing()
                    optimizer.masters.gradients.follow_zeroing()
                optimizer.scaled_by = self.scale_use
            self._wait_for_backward(unscaled, scaled_loss)
            self._before = self._there()
        except BaseException:
            self.abandon()
            raise
        self.scale_use.is_open = True

    def _wait_for_backward(self, optimizers: Sequence[AdoptedOptimizer], scaled_loss: object) -> None:
        self._waiting = [each.masters.gradients for each in optimizers if not each.masters.gradients.are_at_rest()]
        if self._waiting:
            self._hooks = [each.register_hook(self._make_way) for each in _hookable(scaled_loss)]
        if not self._hooks:
            self._make_way()

    def _stop_waiting(self) -> list[MasterGradients]:
        """Returns the gradients that still waited for backward, and removes the hooks."""
        waiting, self._waiting = self._waiting, []
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        return waiting

    def _make_way(self, *_: object) -> None:
        """Has masters follow what half parameters show, and clears that for the backward pass that begins."""
        are_reduced = self._ranks.are_reduced(self._model_parameters())
        for gradients in self._stop_waiting():
            gradients.follow(takes_new=are_reduced)
            gradients.make_way()
            if not are_reduced:  # DDP reduces what is there together with what comes
                gradients.scale_new(self.scale_use.scale)

    def _follow_unused(self) -> None:
        """Has masters follow what half parameters show, if no backward has begun."""
        waiting = self._stop_waiting()
        if not self.scale_use.is_one and any(gradients.were_written() for gradients in waiting):
            self._is_used = False
        for gradients in waiting:
            gradients.follow()

    def end(self, delay_unscale: bool, delay_overflow_check: bool) -> None:
        """Ends the block: unscales, looks for overflow, lets the scale react.

        Warns:
            AmpWarning: the block was watched, and what went backward was not the scaled loss.

        Where the reduction over processes is left to a later backward, so is all of that: pieces that are unscaled and
        such that are not would be added up.
        """
        self.scale_use.is_open = False
        self.watched = ()
        self._is_used = self._is_used or self.has_told or self._there() == self._before
        self._follow_unused()
        # To hand gradients on to masters sets them aside, where no later reduction would find them.
        if self._ranks.has_wrappers:
            touches = not self.scale_use.is_one or any(optimizer.masters for optimizer in self._optimizers)
            self.scale_use.is_postponed = touches and (
                self._ranks.is_postponed(self._model_parameters())
                or self._ranks.has_unreduced(self._model_parameters())
            )
            self._ranks.end_block(self._model_parameters())
        if delay_unscale or self.scale_use.is_postponed:
            for optimizer in self._optimizers:
                optimizer.note_scaled()
        else:
            self.finish(delay_overflow_check)
        if not self._is_used and any(optimizer.has_gradients() for optimizer in self._optimizers):
            self.has_told = True
            warn(
                "nothing went backward through the scaled loss of this amp.scale_loss, and new gradients are divided "
                "by the scale all the same. Type: with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()."
            )

    def finish(self, delay_overflow_check: bool = False) -> None:
        """Unscales, looks for overflow, lets the scale react."""
        try:
            found_inf = self._unscale()
            if found_inf is not None:
                self._ranks.agree(found_inf, self._model_parameters())
            self.settle(found_inf, delay_overflow_check)
        except BaseException:
            self.abandon()
            raise

    def settle(self, found_inf: Tensor | None, delay_overflow_check: bool = False) -> None:
        """Ends with gradients that are unscaled: what was found of them decides on the next steps, and moves the scale.

        Args:
            found_inf: 0-dimensional float32, not 0 if one was not finite, in whichever process; of no account under a
                static scale.
            delay_overflow_check: leaves the scale to a later pass.
        """
        for optimizer in self._optimizers:
            optimizer.leave_scale()
        if found_inf is None or not self._scaler.dynamic:
            if not delay_overflow_check:
                self._scaler.update()
            return
        self.scale_use.found_inf = found_inf
        self.scale_use.is_judged_later = delay_overflow_check
        for optimizer in self._optimizers:
            optimizer.remember(self.scale_use)
        if delay_overflow_check:
            self._scaler.note(found_inf)
        else:
            self._scaler.update_by(found_inf)

    def abandon(self) -> None:
        """Takes back a block that raised or ran out of memory: no gradient is left half done, the next starts clean."""
        self.scale_use.is_open = False
        self.watched = ()
        self._stop_waiting()
        for optimizer in self._optimizers:
            optimizer.drop_gradients()
            optimizer.pending.clear()

    def _model_parameters(self) -> Iterator[Tensor]:
        """Yields those of the model that the optimizers update, or have masters of."""
        for optimizer in self._optimizers:
            yield from optimizer.model_parameters()

    def _unscale(self) -> Tensor | None:
        """Returns what was found of the gradients; None under a static scale, where nothing is looked for."""
        masters = []
        for optimizer in self._optimizers:
            if optimizer.masters.wanted:
                masters.append(optimizer.masters)
                optimizer.masters.gradients.follow_clearing()
        scale, found_inf = self.scale_use.scale, None
        if self._scaler.dynamic:
            found_inf = kernels.unscale_by_(_in_place(self._optimizers), scale)
        elif not self.scale_use.is_one:
            kernels.multiply_(_in_place(self._optimizers), scale.reciprocal())
        if masters:
            inv_scale = None if self.scale_use.is_one else scale.reciprocal()
            for each in masters:
                each.gradients.take(inv_scale, found_inf)
        return found_inf

    def _check_may_follow(self, optimizer: AdoptedOptimizer) -> None:
        optimizer.check_shared("this amp.scale_loss would add to", self._optimizers)
        earlier = optimizer.scaled_by
        if earlier is None:
            return
        if earlier.is_open:
            raise UsageError(
                "this amp.scale_loss stands inside another one for the same optimizer, so that its gradients would be "
                "unscaled twice. End the outer block first, or add the losses up and scale their sum."
            )
        if not optimizer.has_gradients():
            optimizer.leave_scale()
        elif not earlier.is_same_scale(self.scale_use):
            raise UsageError(
                f"the gradients of an optimizer are scaled by loss scaler {earlier.scaler_id} at "
                f"{float(earlier.scale):g}, and this amp.scale_loss would add gradients scaled by loss scaler "
                f"{self.scale_use.scaler_id} at {float(self.scale_use.scale):g}. Leave out delay_unscale=True in the "
                "block before."
            )

    def _check_may_widen(self, optimizer: AdoptedOptimizer) -> None:
        """Half gradients are float32 while they are at a scale, and what DDP has reduced it wants to get as it gave."""
        if self._scaler.is_one or optimizer.scaled_by is not None or not self._ranks.replicates:
            return
        if self._ranks.are_replicated(optimizer.parameters_with_half_gradients()):
            raise UsageError(
                "DistributedDataParallel cannot add to half gradients that were unscaled, as it takes none of another "
                "type than its parameters. Put all passes before the last one of a step under no_sync(), or use "
                "opt_level='O2', which has float32 masters."
            )


def _hookable(loss: object) -> list[Tensor]:
    """Returns the losses on which a hook tells when backward begins."""
    return [each for each in tensors_in(loss) if each.requires_grad and not is_functorch_wrapped_tensor(each)]


def _in_place(optimizers: Sequence[AdoptedOptimizer], but: Collection[int] = ()) -> list[Tensor]:
    """Returns the gradients that are scaled and unscaled where they are: those of parameters without a master."""
    if len(optimizers) == 1 and not but and not optimizers[0].masters.wanted:
        return optimizers[0].gradients()
    return gradients_of(
        parameter
        for optimizer in optimizers
        for parameter in optimizer.masters.without_master(optimizer.parameters())
        if id(parameter) not in but
    )
