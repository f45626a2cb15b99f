"""Clips gradients by their norm, and unscales them in the same pass if a block left them scaled.

Owns the passes over the gradients: one reads them, for the norm and for overflows; one writes them. Must not decide
whether a step is skipped.

If gradients are sharded over ranks, each rank reads its own shards and an all-reduce sums the squares. So all ranks
have to clip at the same time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ampatch.distributed import Group, Ranks
from ampatch.errors import UsageError, warn
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.scaling.optimizer_gradients import NOT_REDUCED, OptimizerGradients
from ampatch.scaling.optimizer_step import AdoptedOptimizer
from ampatch.scaling.unscaling import Unscaling
from ampatch.torch_private.optimizers import GET_TOTAL_NORM, GROUP_TENSORS
from ampatch.weights.optimizer_state import gradients_of

_IS_RECORDED = operator.attrgetter("requires_grad")

# The process groups over which gradients are sharded, and this rank's shards of them.
_Part = tuple[tuple[Group, ...], list[Tensor]]


def clip(optimizer: AdoptedOptimizer, max_norm: float) -> Tensor:
    """Clips the gradients of an adopted optimizer; unscales them first if a block left them scaled.

    Args:
        optimizer: adopted optimizer.
        max_norm: norm to which gradients with a greater norm are scaled down.

    Returns:
        The norm of the unscaled gradients before clipping: 0-dimensional float32.

    Raises:
        UsageError: the block is still open; the gradients are scaled by a block for another optimizer; or they are not
            reduced over ranks yet, and ``max_norm`` is finite.
    """
    gradients = optimizer.gradients
    unscaling = _left_to_unscale(gradients, "amp.clip_grad_norm_", "clip", may_be_postponed=math.isinf(max_norm))
    if unscaling is not None:
        if len(unscaling.gradients) == 1 and _are_plain(gradients):
            return _clip_scaled(gradients, unscaling, max_norm)
        unscaling.run()
    gradients.synchronise()
    norm = clip_unscaled(gradients.updated.parameters(), max_norm, gradients.ranks)
    gradients.masters.gradients.copy_to_half()
    return norm


def unscale(optimizer: AdoptedOptimizer) -> None:
    """Unscales the gradients of an adopted optimizer if a block left them scaled.

    Args:
        optimizer: adopted optimizer. The gradients of all other optimizers of that block are unscaled too.

    Raises:
        UsageError: the block is still open; or the gradients are scaled by a block for another optimizer.
    """
    gradients = optimizer.gradients
    unscaling = _left_to_unscale(gradients, "amp.unscale_", "unscale", may_be_postponed=True)
    if unscaling is not None:
        unscaling.run()
    gradients.synchronise()


def _left_to_unscale(
    gradients: OptimizerGradients, caller: str, does: str, *, may_be_postponed: bool
) -> Unscaling | None:
    """Returns the unscaling that a block has left undone; None if there is none, or its gradients were cleared."""
    gradients.check_not_mixed()
    scale_use = gradients.scaled_by
    together = [each for each in gradients.others() if scale_use is not None and each.scaled_by is scale_use]
    gradients.check_shared(f"{caller} would {does}", together)
    if scale_use is None:
        return None
    if scale_use.is_open:
        raise UsageError(f"{caller} stands inside the amp.scale_loss block. Move it behind the block.")
    if scale_use.is_postponed and not may_be_postponed and gradients.updated.have_gradients():
        raise UsageError(f"{caller} would {does} gradients that are still scaled: {NOT_REDUCED}")
    for each in together:
        each.masters.gradients.note_cleared()
        each.masters.gradients.note_zeroed()
    if not (gradients.updated.have_gradients() or gradients.ranks.are_sharded(gradients.updated.parameters())):
        gradients.note_unscaled()
        return None
    return Unscaling(scale_use, together, gradients.ranks)


def watch(ledger: PatchLedger, check: Callable[[Sequence[Tensor]], object]) -> None:
    """Makes torch's own clipping warn of gradients that are still scaled.

    Args:
        ledger: records what is installed.
        check: called with the gradients that torch clips, or takes the norm of; empty if there are none.
    """

    # All of torch's functions that clip or take norms call these two, whatever name user code has bound before. Only
    # the second is called without gradients, as masters have none while those of their half parameters are scaled.
    def check_if_empty(tensors: object, *_: object, **__: object) -> None:
        if isinstance(tensors, list) and not tensors:
            check(tensors)

    ledger.before(*GROUP_TENSORS, lambda lists, *_, **__: check(lists[0]))
    ledger.before(*GET_TOTAL_NORM, check_if_empty)


def warn_of_scaled(gradients: OptimizerGradients, clipped: Iterable[Tensor]) -> None:
    """Warns, once for each optimizer of a block, if torch is about to clip scaled gradients, or to take their norm.

    Args:
        gradients: the optimizer's gradients.
        clipped: the gradients that torch was given. Empty if the user asked for those of masters, which have none
            before the half gradients are unscaled.
    """
    scaled_by, masters = gradients.scaled_by, gradients.masters
    if scaled_by is None or scaled_by.is_one or scaled_by is gradients.warned_of_clipping:
        return
    ids = set(map(id, clipped))
    own = (each for each in gradients.updated.model_parameters() if each.grad is not None)
    scaled = [each for each in own if not masters.gradients.shows(each)]
    if any(id(each.grad) in ids for each in scaled):
        what = "so that the norm is too large by the loss scale"
    elif not ids and masters.wanted and scaled:
        what = "and the float32 masters have none yet, so that nothing is clipped"
    else:
        return
    gradients.warned_of_clipping = scaled_by  # torch may call this several times for one norm
    warn(
        f"gradients are clipped, or their norm is taken, where amp.scale_loss has them scaled still, {what}. Do it "
        "behind the block, without delay_unscale=True; or type amp.clip_grad_norm_(optimizer, max_norm) there."
    )


def clip_unscaled(parameters: Iterable[Tensor], max_norm: float, ranks: Ranks) -> Tensor:
    """Clips the gradients of parameters by the norm of all of them taken together.

    Args:
        parameters: parameters; their gradients may have any shape, layout, dtype and device, or be None.
        max_norm: norm to which gradients with a greater norm are scaled down.
        ranks: the ranks that may share gradients.

    Returns:
        The norm before clipping: 0-dimensional float32, on the device of the first gradient.
    """
    parameters = list(parameters)
    parts = _parts(parameters, ranks)
    grads = [grad for _, part in parts for grad in part]
    one = torch.ones((), dtype=torch.float32, device=grads[0].device if grads else "cpu")
    norm, factor, _ = _measure(parts, parameters, ranks, one, max_norm)
    if not math.isinf(max_norm):
        with torch.no_grad():
            kernels.multiply_(grads, factor)
    return norm


def _are_plain(gradients: OptimizerGradients) -> bool:
    """Returns True if one factor can unscale and clip all gradients: none is a sum of blocks, and none has a graph."""
    scaled = [*gradients_of(gradients.updated.parameters()), *gradients.masters.gradients.new()]
    return not gradients.masters.gradients.has_sums() and not any(map(_IS_RECORDED, scaled))


def _clip_scaled(gradients: OptimizerGradients, unscaling: Unscaling, max_norm: float) -> Tensor:
    """Unscales and clips at once: reads the gradients once, and writes them once."""
    try:
        unscaling.tell_observers()
        inv_scale = unscaling.scale_use.scale.reciprocal()
        parts = _parts(gradients.updated.parameters(), gradients.ranks)
        if of_masters := gradients.masters.gradients.new():
            parts.append(((), of_masters))
        norm, factor, found_inf = _measure(parts, gradients.updated.parameters(), gradients.ranks, inv_scale, max_norm)
        kernels.multiply_(gradients_of(gradients.updated.parameters()), inv_scale * factor)
        gradients.masters.gradients.unscale_to_masters(inv_scale * factor)
        unscaling.note_unscaled(found_inf)
    except BaseException:
        unscaling.abandon()
        raise
    return norm


def _parts(parameters: Iterable[Tensor], ranks: Ranks) -> list[_Part]:
    return [(groups, gradients_of(part)) for groups, part in ranks.by_shard_groups(parameters)]


def _measure(
    parts: Iterable[_Part], parameters: Iterable[Tensor], ranks: Ranks, inv_scale: Tensor, max_norm: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm of gradients times ``inv_scale``, the factor that clips them, and the verdict of all ranks.

    All are 0-dimensional float32.
    """
    found_inf = torch.zeros_like(inv_scale)
    total = torch.zeros((), dtype=torch.float64, device=found_inf.device)
    for groups, grads in parts:
        of_part = torch.zeros_like(total) if groups else total
        kernels.found_inf_norm(grads, inv_scale, found_inf, of_part)
        for group in groups:
            group.reduce_(of_part, dist.ReduceOp.SUM)
        if groups:
            total += of_part
    ranks.reduce_overflow_(found_inf, parameters)
    norm, factor = kernels.clip_factor(total, found_inf, max_norm)
    return norm, factor, found_inf
