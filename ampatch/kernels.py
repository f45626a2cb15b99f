"""Gradient work on lists of tensors, and the update of the scale: the only file that chooses an implementation.

Every function works on the device the tensors are on and reads nothing back to the host. Today the implementation is
torch's own multi-tensor kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def in_use() -> str:
    """Which kernels do the work here, and why, in a sentence for people."""
    return "torch's own multi-tensor kernels, as this version of ampatch has no compiled extension"


def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies every tensor by a scalar tensor in place.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        factor: 0-dimensional float32.
    """
    for group in _by_kind(grads):
        torch._foreach_mul_(group, factor.to(group[0].device, non_blocking=True))


def unscale_(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grads *= inv_scale`` in place, and ``found_inf = 1`` if any element was not finite; it is never reset.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device; sparse ones are coalesced.
        inv_scale: 0-dimensional float32.
        found_inf: 0-dimensional float32.
    """
    plain: list[Tensor] = []
    recorded: list[Tensor] = []
    for grad in grads:
        if grad.is_sparse and not grad.is_coalesced():
            grad.copy_(grad.coalesce())  # two entries of one index may overflow in their sum
        # Gradients of backward(create_graph=True) have a graph of their own, which this multiplication has to be in.
        (recorded if grad.requires_grad else plain).append(grad)
    for group in _by_kind(plain):
        device = group[0].device
        if device == found_inf.device:
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inv_scale.to(device, non_blocking=True))
        else:
            there = torch.zeros_like(found_inf, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, there, inv_scale.to(device, non_blocking=True))
            torch.maximum(found_inf, there.to(found_inf.device, non_blocking=True), out=found_inf)
    for grad in recorded:
        finite = values_of(grad.detach()).isfinite().all()
        found_inf.masked_fill_(~finite.to(found_inf.device, non_blocking=True), 1)
    multiply_(recorded, inv_scale)


def widened(grads: list[Tensor]) -> list[Tensor]:
    """Float32 copies of half gradients.

    Args:
        grads: float16 or bfloat16 tensors of any shape, layout and device.
    """
    wide = [
        torch.empty_like(grad, dtype=torch.float32) if grad.layout is torch.strided else grad.to(torch.float32)
        for grad in grads
    ]
    dense = [index for index, grad in enumerate(grads) if grad.layout is torch.strided]
    copy_([wide[index] for index in dense], [grads[index] for index in dense])
    return wide


def copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, of another type perhaps.

    Args:
        targets: dense tensors of any dtype and device.
        sources: as many, of the same shapes.
    """
    if targets:
        torch._foreach_copy_(targets, sources)


def add_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Adds each source to its target in place.

    Args:
        targets: dense tensors of any dtype and device.
        sources: as many, of the same shapes, dtypes and devices.
    """
    if targets:
        torch._foreach_add_(targets, sources)


def zero_after_overflow_(grads: Iterable[Tensor], found_inf: Tensor) -> None:
    """Zeroes every tensor in place if ``found_inf`` is not 0.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        found_inf: 0-dimensional float32.
    """
    for group in _by_kind(grads):
        overflow = found_inf.to(group[0].device, non_blocking=True) != 0
        for grad in group:
            grad.masked_fill_(overflow, 0)


def update_scale_(
    scale: Tensor,
    unskipped: Tensor,
    hysteresis_left: Tensor,
    found_inf: Tensor,
    *,
    factor: float,
    window: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    """The transition of `ampatch.loss_scaler.next_state`, in place on the device.

    Args:
        scale: 0-dimensional float32.
        unskipped: 0-dimensional int32, clean steps since the last change.
        hysteresis_left: 0-dimensional int32.
        found_inf: 0-dimensional float32, not 0 after an overflow.
        factor: by which the scale grows and backs off.
        window: clean steps before it grows.
        hysteresis: overflows before it backs off.
        floor: the least scale.
        ceiling: the greatest.
    """
    overflow = found_inf != 0
    hysteresis_left.sub_(overflow.to(torch.int32))
    unskipped.add_(1).masked_fill_(overflow, 0)
    backs_off = overflow & (hysteresis_left <= 0)
    grows = unskipped >= window
    unskipped.masked_fill_(grows, 0)
    hysteresis_left.masked_fill_(grows, hysteresis)
    changed = torch.where(backs_off, scale / factor, torch.where(grows, scale * factor, scale))
    scale.copy_(changed.clamp_(floor, ceiling))


def _by_kind(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The values of tensors in groups of one device and dtype, which torch's multi-tensor kernels are fast on."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = values_of(tensor)
        groups.setdefault((values.device, values.dtype), []).append(values)
    yield from groups.values()


def values_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor as a dense and real one that shares its memory."""
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:  # compressed rows or columns
        tensor = tensor.values()
    if tensor.is_complex():
        # A conjugated view has no real view, and the tensor that it conjugates will do.
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor
