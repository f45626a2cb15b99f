"""Clipping gradients by their norm, together with the unscaling where that is still to be done.

Owns the order of passes over the gradients: one that reads, for the norm and for overflow; and one that writes, unless
the optimizer's own kernel does that. Must not decide whether a step is skipped.

If gradients are spread over ranks, each reads its own pieces, and an all-reduce adds up the sums of squares. So
every process has to clip, at the same time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from ampatch.distributed import Group, Ranks, lay_out_gradient
from ampatch.errors import UsageError
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.scaling.optimizers import NOT_REDUCED, AdoptedOptimizer
from ampatch.scaling.scaled_block import ScaledBlock
from ampatch.weights.optimizer_state import gradients_of

# Gradients that are summed up on their own: the groups over which their elements are spread, and this process's.
_Part = tuple[tuple[Group, ...], list[Tensor]]


def clip(optimizer: AdoptedOptimizer, max_norm: float, everyone: Iterable[AdoptedOptimizer], ranks: Ranks) -> Tensor:
    """Clips the gradients of an adopted optimizer; unscales them if a block has left that to be done.

    Args:
        optimizer: whose gradients.
        max_norm: the most that their norm may be.
        everyone: all optimizers of the session.
        ranks: those over which gradients may be spread.

    Returns:
        The norm before, of unscaled gradients: 0-dimensional float32.

    Raises:
        UsageError: inside the block; the gradients are scaled by a block for another optimizer; or they are yet to be
            reduced over ranks, and ``max_norm`` is not infinite.
    """
    optimizer.unfold()
    scaled_block = _left_by_a_block(
        optimizer, everyone, ranks, "amp.clip_grad_norm_", "clip", may_be_postponed=math.isinf(max_norm)
    )
    if scaled_block is not None:
        if scaled_block.is_of_one and _is_plain(optimizer):
            return _clip_scaled(optimizer, scaled_block, max_norm, ranks)
        scaled_block.finish()
    optimizer.bring_up_to_date()
    norm = clip_unscaled(optimizer.parameters(), max_norm, ranks)
    optimizer.masters.gradients.show()
    return norm


def unscale(optimizer: AdoptedOptimizer, everyone: Iterable[AdoptedOptimizer], ranks: Ranks) -> None:
    """Unscales the gradients of an adopted optimizer, if a block has left that to be done.

    Args:
        optimizer: whose gradients; and those of all others of that block.
        everyone: all optimizers of the session.
        ranks: those over which gradients may be spread.

    Raises:
        UsageError: inside the block; or the gradients are scaled by a block for another optimizer.
    """
    optimizer.unfold()
    scaled_block = _left_by_a_block(optimizer, everyone, ranks, "amp.unscale_", "unscale", may_be_postponed=True)
    if scaled_block is not None:
        scaled_block.finish()
    optimizer.bring_up_to_date()


def _left_by_a_block(
    optimizer: AdoptedOptimizer,
    everyone: Iterable[AdoptedOptimizer],
    ranks: Ranks,
    caller: str,
    does: str,
    *,
    may_be_postponed: bool,
) -> ScaledBlock | None:
    """Returns the pass that a block has left to be ended; None if there is none, or its gradients were cleared."""
    scale_use = optimizer.scaled_by
    together = [each for each in everyone if scale_use is not None and each.scaled_by is scale_use]
    optimizer.check_shared(f"{caller} would {does}", together)
    if scale_use is None:
        return None
    if scale_use.is_open:
        raise UsageError(f"{caller} stands inside the amp.scale_loss block. Move it behind the block.")
    if scale_use.is_postponed and not may_be_postponed and optimizer.has_gradients():
        raise UsageError(f"{caller} would {does} gradients that are still scaled: {NOT_REDUCED}")
    for each in together:
        each.masters.gradients.follow_clearing()
        each.masters.gradients.follow_zeroing()
    if not (optimizer.has_gradients() or ranks.share(optimizer.parameters())):
        optimizer.leave_scale()  # they were cleared since
        return None
    return ScaledBlock(scale_use, together, ranks)


def watch(ledger: PatchLedger, adopted: Callable[[], Sequence[AdoptedOptimizer] | None]) -> None:
    """Has torch's own clipping warn of gradients that are still scaled.

    Args:
        ledger: takes note of what is installed.
        adopted: gives the optimizers whose gradients may be; None: there are none.
    """
    # Below all of torch's functions that clip and take norms, which many have bound before. Only the second is called
    # where there are no gradients, as masters have none yet where those of their half parameters are scaled.
    group = clip_grad._group_tensors_by_device_and_dtype  # type: ignore[attr-defined]
    total_norm = clip_grad._get_total_norm

    @functools.wraps(group)
    def grouped(tensorlistlist: Any, *args: Any, **kwargs: Any) -> Any:
        check(tensorlistlist[0])
        return group(tensorlistlist, *args, **kwargs)

    @functools.wraps(total_norm)
    def taken(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, list) and not tensors:
            check(tensors)
        return total_norm(tensors, *args, **kwargs)

    def check(grads: Sequence[Tensor]) -> None:
        for each in adopted() or ():
            each.check_not_scaled_when_clipped(grads)

    ledger.set(clip_grad, "_group_tensors_by_device_and_dtype", grouped)
    ledger.set(clip_grad, "_get_total_norm", taken)


def clip_unscaled(parameters: Iterable[Tensor], max_norm: float, ranks: Ranks) -> Tensor:
    """Clips the gradients of parameters by the norm of all of them taken together.

    Args:
        parameters: with gradients of any shape, layout, dtype and device, or with none.
        max_norm: the most that their norm may be.
        ranks: those over which gradients may be spread.

    Returns:
        The norm before: 0-dimensional float32, on the device of the first gradient.
    """
    parameters = list(parameters)
    parts = list(_parts(parameters, ranks))
    grads = [grad for _, part in parts for grad in part]
    one = torch.ones((), dtype=torch.float32, device=grads[0].device if grads else None)
    found_inf = torch.zeros_like(one)
    norm = _norm(parts, one, found_inf)
    ranks.agree(found_inf, parameters)
    if not math.isinf(max_norm):
        with torch.no_grad():
            kernels.multiply_(grads, _factor(norm, max_norm, found_inf))
    return norm.float()


def _is_plain(optimizer: AdoptedOptimizer) -> bool:
    """Returns whether all of its gradients are as backward left them, so that one factor unscales and clips them."""
    scaled = [*optimizer.gradients(), *optimizer.masters.gradients.new()]
    return not optimizer.masters.gradients.has_sums() and not any(grad.requires_grad for grad in scaled)


def _clip_scaled(optimizer: AdoptedOptimizer, scaled_block: ScaledBlock, max_norm: float, ranks: Ranks) -> Tensor:
    """Ends a pass that left its gradients scaled: reads them once, and writes them once or leaves that to the step."""
    scale_use = scaled_block.scale_use
    try:
        inv_scale, found_inf = scale_use.scale.reciprocal(), scale_use.scaler.no_overflow()
        parts = [*_parts(optimizer.parameters(), ranks), ((), optimizer.masters.gradients.new())]
        norm = _norm(parts, inv_scale, found_inf)
        ranks.agree(found_inf, optimizer.parameters())
        factor = _factor(norm, max_norm, found_inf)
        defers = optimizer.may_defer()
        if not defers:
            kernels.multiply_(optimizer.gradients(), inv_scale * factor)
            optimizer.masters.gradients.take(inv_scale * factor)
        scaled_block.settle(found_inf)
        if defers:
            optimizer.defer(scale_use, scale_use.scale / factor)
    except BaseException:
        scaled_block.abandon()
        raise
    return norm.float()


def _parts(parameters: Iterable[Tensor], ranks: Ranks) -> Iterator[_Part]:
    for groups, part in ranks.by_pieces(parameters):
        for parameter in part:
            lay_out_gradient(parameter)
        yield groups, gradients_of(part)


def _norm(parts: Iterable[_Part], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    """Returns the norm of gradients times ``inv_scale``, 0-dimensional float64; sets ``found_inf`` for this process."""
    total = torch.zeros((), dtype=torch.float64, device=found_inf.device)
    for groups, grads in parts:
        sum_of_squares = torch.zeros_like(total)
        kernels.found_inf_norm(grads, inv_scale, found_inf, sum_of_squares)
        for group in groups:
            group.reduce_(sum_of_squares, dist.ReduceOp.SUM)
        total += sum_of_squares
    return total.sqrt_()


def _factor(norm: Tensor, max_norm: float, found_inf: Tensor) -> Tensor:
    """Returns what gradients of a norm are to be multiplied by, with the margin of ``torch.nn.utils.clip_grad_norm_``.

    It is 1 after an overflow: gradients that are not finite are to be found where they came up, and not everywhere.
    """
    factor = torch.ones_like(norm) if math.isinf(max_norm) else (max_norm / (norm + 1e-6)).clamp_(max=1)
    return factor.float().masked_fill_(found_inf != 0, 1)
