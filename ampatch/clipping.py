"""Clipping gradients by their norm, together with the unscaling where that is still to be done.

Owns the order of passes over the gradients: one that reads, for the norm and for overflow; and one that writes, unless
the optimizer's own kernel does that. Must not decide whether a step is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ampatch import kernels
from ampatch.errors import UsageError
from ampatch.optimizers import AdoptedOptimizer
from ampatch.scaled_pass import ScaledPass
from ampatch.scaling import Scaling


def clip(optimizer: AdoptedOptimizer, max_norm: float, everyone: Iterable[AdoptedOptimizer]) -> Tensor:
    """Clips the gradients of an adopted optimizer; unscales them if a block has left that to be done.

    Args:
        optimizer: whose gradients.
        max_norm: the most that their norm may be.
        everyone: all optimizers of the session.

    Returns:
        The norm before, of unscaled gradients: 0-dimensional float32.

    Raises:
        UsageError: inside the block, or the gradients are scaled by a block for another optimizer.
    """
    optimizer.unfold()
    scaling = optimizer.scaled_by
    together = [each for each in everyone if scaling is not None and each.scaled_by is scaling]
    optimizer.check_shared("amp.clip_grad_norm_ would clip", together)
    _check_whole(optimizer.gradients())
    if scaling is not None and scaling.is_open:
        raise UsageError("amp.clip_grad_norm_ stands inside the amp.scale_loss block. Move it behind the block.")
    for each in together:
        each.masters.follow_clearing()
        each.masters.follow_zeroing()
    if scaling is not None and not optimizer.has_gradients():  # cleared since
        optimizer.leave_scale()
    elif scaling is not None:
        if together == [optimizer] and _is_plain(optimizer):
            return _clip_scaled(optimizer, scaling, max_norm)
        ScaledPass(scaling, together).end(delay_unscale=False, delay_overflow_check=False)
    optimizer.bring_up_to_date()
    norm = clip_unscaled(optimizer.gradients(), max_norm)
    optimizer.masters.show_gradients()
    return norm


def clip_unscaled(grads: list[Tensor], max_norm: float) -> Tensor:
    """Clips gradients by the norm of all of them taken together.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        max_norm: the most that their norm may be.

    Returns:
        The norm before: 0-dimensional float32, on the device of the first.
    """
    _check_whole(grads)
    one = torch.ones((), device=grads[0].device if grads else None)
    found_inf = torch.zeros_like(one)
    norm = _norm(grads, one, found_inf)
    if not math.isinf(max_norm):
        with torch.no_grad():
            kernels.multiply_(grads, _factor(norm, max_norm, found_inf))
    return norm.float()


def _is_plain(optimizer: AdoptedOptimizer) -> bool:
    """Whether all of its gradients are as backward left them, so that one factor unscales and clips them."""
    return not optimizer.masters.has_sums() and not any(grad.requires_grad for grad in _scaled(optimizer))


def _scaled(optimizer: AdoptedOptimizer) -> list[Tensor]:
    return [*optimizer.gradients(), *optimizer.masters.new_gradients()]


def _clip_scaled(optimizer: AdoptedOptimizer, scaling: Scaling, max_norm: float) -> Tensor:
    """Ends a pass that left its gradients scaled: reads them once, and writes them once or leaves that to the step."""
    scaled_pass = ScaledPass(scaling, [optimizer])
    with scaled_pass.whole():
        inv_scale, found_inf = scaling.scale.reciprocal(), scaling.scaler.no_overflow()
        norm = _norm(_scaled(optimizer), inv_scale, found_inf)
        factor = _factor(norm, max_norm, found_inf)
        folds = optimizer.may_fold()
        if not folds:
            kernels.multiply_(optimizer.gradients(), inv_scale * factor)
            optimizer.masters.take_gradients(inv_scale * factor)
        scaled_pass.settle(found_inf)
        if folds:
            optimizer.fold(scaling, scaling.scale / factor)
    return norm.float()


def _norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    sum_of_squares = torch.zeros((), dtype=torch.float64, device=found_inf.device)
    kernels.found_inf_norm(grads, inv_scale, found_inf, sum_of_squares)
    return sum_of_squares.sqrt_()


def _factor(norm: Tensor, max_norm: float, found_inf: Tensor) -> Tensor:
    """What gradients of a norm are to be multiplied by; the margin is that of ``torch.nn.utils.clip_grad_norm_``.

    It is 1 after an overflow: gradients that are not finite are to be found where they came up, and not everywhere.
    """
    factor = torch.ones_like(norm) if math.isinf(max_norm) else (max_norm / (norm + 1e-6)).clamp_(max=1)
    return factor.float().masked_fill_(found_inf != 0, 1)


def _check_whole(grads: list[Tensor]) -> None:
    if any(hasattr(grad, "device_mesh") for grad in grads):
        raise UsageError(
            "found gradients that are sharded over processes (DTensor), whose norm amp.clip_grad_norm_ does not know. "
            "Clip them after a block without delay_unscale=True: "
            "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)."
        )
