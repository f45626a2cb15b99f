"""The operators of `torch.ops.ampatch` on torch's own multi-tensor kernels: what runs where there is no extension.

Every function does what the operator of its name does, and is what the tests compare that with. Its tensors are on one
device, of float16, bfloat16, float32 or float64, and of any strides. Must not choose: `ampatch.kernels` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


def unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grads *= inv_scale`` in place; sets ``found_inf`` where an element of ``grads`` was not finite."""
    for (group,) in _by_dtype(grads):
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inv_scale)
        increment_version(group)  # which this one of torch's own operators does not (torch 2.13)


def unscale_copy(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """``master_grads = grads * inv_scale`` in float32; with ``write_back`` then ``grads = master_grads``, rounded."""
    for narrow, wide in _by_dtype(grads, master_grads):
        torch._foreach_copy_(wide, narrow)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inv_scale)
        if write_back:
            torch._foreach_copy_(narrow, wide)


def unscale_add(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """``master_grads += grads * inv_scale`` in float32; with ``write_back`` then ``grads = master_grads``, rounded."""
    for narrow, wide in _by_dtype(grads, master_grads):
        unscaled = [torch.empty_like(grad, dtype=torch.float32) for grad in narrow]
        unscale_copy(narrow, unscaled, inv_scale, found_inf, False)
        torch._foreach_add_(wide, unscaled)
        if write_back:
            torch._foreach_copy_(narrow, wide)


def found_inf_norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """Adds the sum of ``(grads * inv_scale) ** 2`` to ``sum_of_squares``, and sets ``found_inf`` as `unscale_` does."""
    for (group,) in _by_dtype([grad for grad in grads if grad.numel()]):
        norms = torch.stack(torch._foreach_norm(group, 2, dtype=torch.float64))
        # No sum of squares of the other types is infinite in float64, unless there is something that is not finite.
        is_double = group[0].dtype is torch.float64
        peaks = torch.stack(torch._foreach_norm(group, math.inf)) if is_double else norms
        found_inf.masked_fill_(~peaks.isfinite().all(), 1)
        sum_of_squares += (norms * inv_scale).square_().sum()


def copy_to_half(masters: list[Tensor], halves: list[Tensor]) -> None:
    """``halves = masters``, rounded."""
    if halves:
        torch._foreach_copy_(halves, masters)


def update_scale(
    scale: Tensor,
    unskipped: Tensor,
    hysteresis_left: Tensor,
    found_inf: Tensor,
    factor: float,
    window: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    """The transition of `ampatch.loss_scaler.next_state`, in place on the device."""
    overflow = found_inf != 0
    hysteresis_left.sub_(overflow.to(torch.int32))
    unskipped.add_(1).masked_fill_(overflow, 0)
    backs_off = overflow & (hysteresis_left <= 0)
    grows = unskipped >= window
    unskipped.masked_fill_(grows, 0)
    hysteresis_left.masked_fill_(grows, hysteresis)
    changed = torch.where(backs_off, scale / factor, torch.where(grows, scale * factor, scale))
    scale.copy_(changed.clamp_(floor, ceiling))


def _by_dtype(*lists: list[Tensor]) -> Iterator[Sequence[list[Tensor]]]:
    """Lists in groups in which the first has one dtype, as torch's multi-tensor kernels want it."""
    dtypes = {tensor.dtype for tensor in lists[0]}
    if len(dtypes) == 1:
        yield lists
        return
    for dtype in dtypes:
        rows = [row for row in zip(*lists, strict=True) if row[0].dtype is dtype]
        yield [list(column) for column in zip(*rows, strict=True)]
