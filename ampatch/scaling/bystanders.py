"""The optimizers that a block was not handed, whose gradients its backward pass may reach all the same.

A part that two models share, or a critic that a generator's loss goes through. What the pass adds to their gradients is
scaled as well. Owns what becomes of these gradients at the end of the block: they are unscaled, or known to be mixed.
Must not touch the gradients of the optimizers that the block was handed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from ampatch import distributed
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.native import kernels
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.scale_use import ScaleUse
from ampatch.tracing import is_capturing
from ampatch.weights.optimizer_state import gradients_of

_Moments = dict[int, tuple[Tensor, int]]  # each gradient and its version, by id of the parameter


def reached(others: Iterable[OptimizerGradients], losses: Sequence[Tensor]) -> list[OptimizerGradients]:
    """Returns those among other optimizers that losses lead to, and that have gradients which no step has used.

    The block has to take them in: scaled gradients are about to be added to theirs.

    Args:
        others: gradients of optimizers that the block was not handed.
        losses: the losses.
    """
    with_gradients = [each for each in others if each.pending and each.scaled_by is None and each.exist()]
    if not with_gradients:
        return []
    leaves = leaves_among(nodes_of(loss.grad_fn for loss in losses if loss.grad_fn is not None))
    return [each for each in with_gradients if any(id(parameter) in leaves for parameter in each.model_parameters())]


class Bystanders:
    """The gradients of other optimizers, from the beginning of a block to its end.

    Args:
        others: gradients of the optimizers that the block was not handed.
        handed: ids of the parameters of those that it was.
    """

    def __init__(self, others: Iterable[OptimizerGradients], handed: Collection[int]) -> None:
        self._handed = handed
        self._before: list[tuple[OptimizerGradients, int, _Moments]] = []
        for each in others:
            each.settle_left_scaled()  # as the backward pass will
            if each.scaled_by is None and each.masters.wanted:
                each.synchronise()  # so that new half gradients at the end are this block's
            self._before.append((each, each.blocks, self._moments(each)))

    def _moments(self, gradients: OptimizerGradients) -> _Moments:
        return {
            id(parameter): (grad, grad._version)
            for parameter in gradients.model_parameters()
            if (grad := parameter.grad) is not None and id(parameter) not in self._handed
        }

    def end(self, scale_use: ScaleUse, *, has_failed: bool = False) -> None:
        """Unscales the gradients that the block has made, and notes those that it has added to.

        Args:
            scale_use: the block's use of a scale.
            has_failed: whether the block ends by an error.
        """
        for each, blocks, before in self._before:
            now = self._moments(each)
            written = {key for key, (grad, version) in now.items() if not _is(before.get(key), grad, version)}
            if not written or each.blocks != blocks:  # what a block within this one has written, it has unscaled
                continue
            parameters = list(each.model_parameters())
            is_shared = distributed.has_other_ranks() and (
                each.ranks.are_replicated(parameters) or each.ranks.are_sharded(parameters)
            )
            earlier, use = each.scaled_by, scale_use.apart()
            if earlier is not None and not earlier.is_mixed and earlier.is_same_scale(use):
                continue
            if has_failed or is_shared or earlier is not None or not before.keys().isdisjoint(written):
                each.scaled_by, use.is_mixed = use, True
                each.note_scaled()
            else:
                self._unscale(each, use, [parameter for parameter in parameters if id(parameter) in written])

    @staticmethod
    def _unscale(gradients: OptimizerGradients, use: ScaleUse, parameters: list[Tensor]) -> None:
        masters = gradients.masters.ids()
        own = gradients_of(parameter for parameter in parameters if id(parameter) not in masters)
        found_inf = kernels.unscale_by_(own, use.scale)
        if gradients.masters.wanted:
            gradients.masters.gradients.unscale_to_masters(use.scale.reciprocal(), found_inf)
        if use.scaler.dynamic:
            use.found_inf, use.is_captured = found_inf, is_capturing()
        gradients.add_verdict(use)


def _is(before: tuple[Tensor, int] | None, grad: Tensor, version: int) -> bool:
    return before is not None and before[0] is grad and before[1] == version
