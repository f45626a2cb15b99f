"""Batch norm over the batches of all ranks, like ``apex.parallel.SyncBatchNorm``, built on torch's own.

Owns what Apex's module had beyond torch's: channels in the last dimension, an addend and a relu. Must not compute
statistics itself. torch does this on a GPU, and `ampatch.sync_batch_norm` on the CPU, where torch raises.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ampatch.errors import OptionError, warn
from ampatch.sync_batch_norm import synchronised
from ampatch.torch_private.modules import BatchNorm


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm that in training uses the statistics of the batches of all ranks together.

    The batches may differ in size. Gradients of weight and bias are each rank's own: reduce them with those of all
    other parameters. On the CPU, differentiable collectives compute the statistics in float32.

    Args:
        num_features: number of channels.
        eps: term added to the variance.
        momentum: momentum of the running statistics; None for the mean over all batches.
        affine: True to have weight and bias.
        track_running_stats: True to keep running statistics.
        process_group: group of ranks that share statistics; None for all ranks.
        channel_last: True if channels are the last dimension of inputs: (N, ..., C). In 2-dimensional inputs they
            always are.
        fuse_relu: True to apply a relu to the output.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalizes a batch.

        Args:
            input: floating-point tensor of shape (N, C, ...), or (N, ..., C) with ``channel_last``. It may be half
                while the parameters are float32.
            z: tensor of the same shape, added to the normalized batch before the relu.

        Returns:
            Tensor of the shape and dtype of ``input``.

        Raises:
            ValueError: ``input`` has fewer than two dimensions or no channels; raised by torch.
            UsageError: ``input`` is on the CPU, and all ranks together have only one value per channel.
        """
        moved = input.movedim(-1, 1) if self.channel_last else input
        is_over_group = self.training and dist.is_available() and dist.is_initialized()
        out = synchronised(self, moved) if is_over_group and moved.device.type == "cpu" else super().forward(moved)
        if self.channel_last:
            out = out.movedim(1, -1)
        if z is not None:
            out = out + z
        return F.relu(out) if self.fuse_relu else out


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replaces every batch norm in a module by a `SyncBatchNorm`.

    The new layers have the parameters and buffers of the old ones, as the same objects, so that existing optimizers
    keep updating them. Hooks of the old layers are lost.

    Args:
        module: module to change in place; if it is a batch norm itself, only the returned layer is new.
        process_group: group of ranks that share statistics; None for all ranks.
        channel_last: True if channels are the last dimension of inputs, as for `SyncBatchNorm`.

    Returns:
        The module, or its replacement.

    Warns:
        AmpWarning: a batch norm has a ``forward`` of its own, which is lost.
    """
    done: dict[nn.Module, nn.Module] = {}

    def converted(module: nn.Module) -> nn.Module:
        if module not in done:
            if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
                done[module] = _synchronised(module, process_group, channel_last)
            else:
                done[module] = module
                for name, child in module._modules.items():  # named_children() skips second names
                    if child is not None:
                        setattr(module, name, converted(child))
        return done[module]

    return converted(module)


def _synchronised(norm: BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    if type(norm).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
        warn(
            f"convert_syncbn_model replaces a {type(norm).__name__}, whose forward is not that of torch's batch norm: "
            "SyncBatchNorm only normalizes. Convert the model with a function of the package that it comes from, if "
            "there is one."
        )
    new = SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, process_group, channel_last
    )
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    return new.train(norm.training)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Divides all ranks into groups that share statistics; every rank must call this function.

    Args:
        group_size: number of ranks in a group; 0 for all ranks.

    Returns:
        Group of this rank; None, which means all ranks, if there is only one group.

    Raises:
        OptionError: the number of ranks is not a multiple of ``group_size``.
    """
    if group_size == 0:
        return None
    count = dist.get_world_size()
    if group_size < 0 or count % group_size:
        divisors = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise OptionError(
            f"group_size is {group_size}, and there are {count} processes, which cannot be divided into groups of that "
            f"size; expected one of {divisors}, or 0 for all processes together."
        )
    if group_size == count:
        return None
    mine: dist.ProcessGroup = dist.new_subgroups(group_size)[0]
    return mine
