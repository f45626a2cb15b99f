"""The operators of the compiled extension, with version counters kept up to date.

Every function calls the operator of its name in `torch.ops.ampatch`, which `ampatch.native.extension` has loaded. Then
it increments the version counters of the tensors it wrote, so that autograd and the cache of casts notice the writes:
torch does so for its own operators only. `follow` increments none, because a change of version means that user code
wrote to the master. Must not choose an implementation: `ampatch.native.kernels` does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


def unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Does what `ampatch.native.torch_kernels.unscale_` does."""
    torch.ops.ampatch.unscale_(grads, inv_scale, found_inf)
    increment_version(grads)


def unscale_copy(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Does what `ampatch.native.torch_kernels.unscale_copy` does."""
    torch.ops.ampatch.unscale_copy(grads, master_grads, inv_scale, found_inf, write_back)
    increment_version([*master_grads, *grads] if write_back else master_grads)


def unscale_add(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Does what `ampatch.native.torch_kernels.unscale_add` does."""
    torch.ops.ampatch.unscale_add(grads, master_grads, inv_scale, found_inf, write_back)
    increment_version([*master_grads, *grads] if write_back else master_grads)


def found_inf_norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """Does what `ampatch.native.torch_kernels.found_inf_norm` does, except that it squares in float32."""
    torch.ops.ampatch.found_inf_norm(grads, inv_scale, found_inf, sum_of_squares)


def copy_to_half(masters: list[Tensor], halves: list[Tensor]) -> None:
    """Does what `ampatch.native.torch_kernels.copy_to_half` does."""
    if halves:  # the dispatcher picks the kernel by the tensors, and so needs at least one
        torch.ops.ampatch.copy_to_half(masters, halves)
        increment_version(halves)


def show(master_grads: list[Tensor], grads: list[Tensor]) -> None:
    """Does what `ampatch.native.torch_kernels.show` does."""
    if grads:
        torch.ops.ampatch.show(master_grads, grads)
        increment_version(grads)


def fingerprint(halves: list[Tensor], fingerprints: Tensor) -> None:
    """Does what `ampatch.native.torch_kernels.fingerprint` does; the numbers of the two differ."""
    torch.ops.ampatch.fingerprint(halves, fingerprints)


def follow(halves: list[Tensor], masters: list[Tensor], before: Tensor, now: Tensor, of_gradients: bool) -> None:
    """Does what `ampatch.native.torch_kernels.follow` does."""
    torch.ops.ampatch.follow(halves, masters, before, now, of_gradients)


def follow_by_value(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """Does what `ampatch.native.torch_kernels.follow_by_value` does."""
    some = [index for index, half in enumerate(narrow) if half.numel()]
    if some:
        numbers = torch.zeros(len(some), dtype=torch.float64, device=narrow[0].device)
        # Different fingerprints: `follow` treats every tensor as changed.
        follow([narrow[index] for index in some], [wide[index] for index in some], numbers, numbers + 1, False)


def update_scale(
    scale: Tensor,
    unskipped: Tensor,
    hysteresis_left: Tensor,
    found_inf: Tensor,
    growth: float,
    backoff: float,
    window: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    """Does what `ampatch.native.torch_kernels.update_scale` does."""
    torch.ops.ampatch.update_scale(
        scale, unskipped, hysteresis_left, found_inf, growth, backoff, window, hysteresis, floor, ceiling
    )
    increment_version([scale, unskipped, hysteresis_left])
