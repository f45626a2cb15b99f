"""The optimizers that a block was not handed, whose gradients its backward pass may reach all the same.

A part that two models share, or a critic that a generator's loss goes through. What the pass adds to their gradients is
scaled as well. Owns what becomes of these gradients at the end of the block: they are unscaled, or known to be mixed.
Must not touch the gradients of the optimizers that the block was handed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from ampatch import distributed
from ampatch.casting.nested import tensors_in
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.native import kernels
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.scale_use import ScaleUse
from ampatch.scaling.unscaling import Unscaling, without_masters
from ampatch.weights.untracked_writes import is_since, moment_of


def leaves_of(loss: object) -> Collection[int]:
    """Returns the ids of the leaves that a loss, or nested lists, tuples and dicts of losses lead to."""
    return leaves_among(nodes_of(each.grad_fn for each in tensors_in(loss) if each.grad_fn is not None)).keys()


def reached(others: Iterable[OptimizerGradients], loss: object) -> list[OptimizerGradients]:
    """Returns those among other optimizers that a loss leads to, and that have gradients which no step has used.

    The block has to take them in: scaled gradients are about to be added to theirs.

    Args:
        others: gradients of optimizers that the block was not handed.
        loss: a loss, or nested lists, tuples and dicts of losses.
    """
    concerned = [
        each for each in others if each.scaled_by is None and each.verdicts.pending and each.updated.have_gradients()
    ]
    if not concerned or (distributed.has_other_ranks() and concerned[0].ranks.has_wrappers):
        return []  # other ranks, whose losses may lead elsewhere, have to take in the same
    leaves = leaves_of(loss)
    return [each for each in concerned if any(id(own) in leaves for own in each.updated.model_parameters())]


class Bystander:
    """The gradients of one other optimizer, from the beginning of a block to its end.

    Args:
        gradients: gradients of an optimizer that the block was not handed.
        handed: ids of the parameters of those that it was.

    Attributes:
        gradients: as given.
    """

    def __init__(self, gradients: OptimizerGradients, handed: Collection[int]) -> None:
        self.gradients = gradients
        self._handed = handed
        self.begin()

    def begin(self) -> None:
        """Notes what gradients there are."""
        gradients = self.gradients
        gradients.note_dropped_while_scaled()  # as the backward pass will
        if gradients.verdicts.pending and gradients.scaled_by is None:
            gradients.forget_cleared_verdict()
        elif gradients.scaled_by is None and gradients.masters.wanted:
            gradients.synchronise()  # so that new half gradients at the end are this block's
        there = self._there()
        self._before = {key: moment_of(grad) for key, grad in there.items()}
        # Whether they are other than zero, on the device: sums with zeros are no mixture.
        self._were_there: Tensor | None = None
        if there and gradients.scaled_by is None:
            _, squares = kernels.flag_and_squares(there.values(), next(iter(there.values())).device, factor=2.0**64)
            self._were_there = squares != 0

    def _there(self) -> dict[int, Tensor]:
        """Returns the gradients, by id of the parameter."""
        return {
            id(parameter): parameter.grad
            for parameter in self.gradients.updated.model_parameters()
            if parameter.grad is not None and id(parameter) not in self._handed
        }

    def end(self, scale_use: ScaleUse, *, has_failed: bool = False) -> None:
        """Unscales the gradients that the block has written, and marks those that it has added to others.

        Args:
            scale_use: the block's use of a scale.
            has_failed: whether the block ends by an error.
        """
        gradients, before = self.gradients, self._before
        if not gradients.is_of_this_thread:  # another thread has begun to train with it
            return
        written = {key for key, grad in self._there().items() if key not in before or not is_since(before[key], grad)}
        earlier = gradients.scaled_by
        if not written or (earlier is not None and not earlier.is_mixed and earlier.is_same_scale(scale_use)):
            return
        use = scale_use.for_bystander()
        # Which ranks reach them may depend on their data, and a reduction of the verdict could wait for ever.
        is_anyones = distributed.has_other_ranks() and gradients.ranks.has_wrappers
        if has_failed or earlier is not None or is_anyones:
            gradients.mark_mixed(use)
            return
        self._unscale(use, written)
        if not before.keys().isdisjoint(written):
            gradients.mark_mixed(use, where=self._were_there)

    def _unscale(self, use: ScaleUse, written: Collection[int]) -> None:
        masters = self.gradients.masters
        others = {id(each) for each in self.gradients.updated.model_parameters()}.difference(written)
        found_inf = kernels.unscale_by_(without_masters([self.gradients], but=others), use.scale)
        if masters.wanted:
            masters.gradients.unscale_to_masters(use.scale.reciprocal(), found_inf)
        Unscaling(use, [self.gradients], self.gradients.ranks).note_unscaled(found_inf)
