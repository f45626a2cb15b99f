"""SyncBatchNorm on the CPU: batch norm over the batches of all ranks. torch has kernels for GPUs only.

Owns the computation. Must not know its callers, `ampatch.apex.parallel` and `ampatch.cuda_on_cpu`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampatch.errors import UsageError
from ampatch.half_types import HALVES
from ampatch.torch_private.modules import SYNC_BATCH_NORM_CHECKS


def synchronised(norm: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """Returns the layer's output in training: ``input`` normalised by the statistics of all ranks.

    Computes in float32, or in float64 for float64 input. Differentiable: the forward and the backward pass both call
    collectives, so every rank must run them. Updates the layer's running statistics. Ranks may have batches of
    different sizes.

    Args:
        norm: layer to apply; its weight and bias get the gradients of this rank's batch only.
        input: floating-point tensor of shape (N, C, ...) on the CPU.

    Returns:
        A tensor of the shape and dtype of ``input``.

    Raises:
        ValueError: ``input`` has fewer than two dimensions or no channels; raised by torch.
        UsageError: the batches of all ranks together hold at most one value per channel.
    """
    for check in SYNC_BATCH_NORM_CHECKS:
        check(norm, input)
    group = norm.process_group or dist.group.WORLD
    values = input.float() if input.dtype in HALVES else input
    dims = [0, *range(2, values.dim())]
    shape = [-1] + [1] * (values.dim() - 2)
    local_count = values.new_tensor([values.numel() // values.size(1)])
    total = _sum_over(group, torch.cat([values.sum(dims), local_count]))
    count = total[-1].detach()
    if count <= 1:
        raise UsageError(
            f"SyncBatchNorm found {int(count)} value a channel in the batches of all ranks together; expected more "
            "than 1 in training. Use larger batches, or model.eval()."
        )
    mean = total[:-1] / count
    centred = values - mean.view(shape)
    variance = _sum_over(group, centred.square().sum(dims)) / count
    _track(norm, mean, variance * (count / (count - 1)))
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        out = out * norm.weight.view(shape)
    if norm.bias is not None:
        out = out + norm.bias.view(shape)
    return out.to(input.dtype)


@torch.no_grad()
def _track(norm: nn.SyncBatchNorm, mean: Tensor, variance: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked += 1
    share = 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    for running, found in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.mul_(1 - share).add_(found, alpha=share)


class _SumOver(torch.autograd.Function):
    """Sums a tensor over the ranks in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _sum_over(ctx.group, *grads)


def _sum_over(group: Any, tensor: Tensor) -> Tensor:
    total: Tensor = _SumOver.apply(group, tensor)  # type: ignore[no-untyped-call]
    return total
