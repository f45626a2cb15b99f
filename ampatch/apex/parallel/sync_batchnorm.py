"""Batch norm over the batches of several processes, as ``apex.parallel.SyncBatchNorm``, on torch's own.

Owns what Apex's module had beyond torch's: channels in the last place, an addend and a relu. Must not take statistics
itself: torch's kernels do on a GPU, and `ampatch.sync_batch_norm` does on the CPU, which torch's refuse.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampatch.errors import OptionError, warn
from ampatch.sync_batch_norm import synchronised


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm whose statistics in training are those of the batches of all processes, taken together.

    The batches may be of different sizes. Gradients of weight and bias are each process's own, to be reduced with those
    of all other parameters. On the CPU the statistics are taken by differentiable collectives in float32.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: of the running statistics; None: they are the mean over all batches.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics.
        process_group: whose processes; None: all.
        channel_last: whether inputs have their channels in the last place: (N, ..., C). Of two dimensions they do in
            either case.
        fuse_relu: whether the output goes through a relu.
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
        """Normalises.

        Args:
            input: floating, (N, C, ...), or (N, ..., C) with ``channel_last``. A half one may meet float32 parameters.
            z: of the same shape, added to what is normalised, ahead of the relu.

        Returns:
            Of the shape and dtype of ``input``.

        Raises:
            ValueError: ``input`` has fewer than two dimensions or no channels; of torch.
            UsageError: it is on the CPU, and all processes together have one value a channel.
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
    """Puts a `SyncBatchNorm` in the place of every batch norm in a module.

    The new ones have the parameters and buffers of the old, the same objects, so that optimizers made before go on
    with them. Hooks on the old ones do not come along.

    Args:
        module: changed in place; a batch norm itself is replaced.
        process_group: whose processes take statistics together; None: all.
        channel_last: as for `SyncBatchNorm`.

    Returns:
        The module, or what replaces it.

    Warns:
        AmpWarning: a batch norm has a forward of its own, which is lost.
    """
    return _converted(module, process_group, channel_last, {})


def _converted(
    module: nn.Module, process_group: Any, channel_last: bool, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module not in done:
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            done[module] = _synchronised(module, process_group, channel_last)
        else:
            done[module] = module
            for name, child in module._modules.items():  # a module that has two names is there once only otherwise
                if child is not None:
                    setattr(module, name, _converted(child, process_group, channel_last, done))
    return done[module]


def _synchronised(norm: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    if type(norm).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        warn(
            f"convert_syncbn_model replaces a {type(norm).__name__}, whose forward is not that of torch's batch norm: "
            "SyncBatchNorm only normalises. Convert the model by the function of the package that it comes from, if "
            "there is one."
        )
    new = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
        channel_last,
    )
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    return new.train(norm.training)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Divides all processes into groups that take statistics together; every process has to call this.

    Args:
        group_size: how many processes are in a group; 0: all.

    Returns:
        The group that this process is in; None, which means all processes, if there is one only.

    Raises:
        OptionError: the number of processes is no multiple of it.
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
    # torch wants every process to make all groups, those of others too.
    groups = [dist.new_group(list(range(first, first + group_size))) for first in range(0, count, group_size)]
    mine: dist.ProcessGroup = groups[dist.get_rank() // group_size]
    return mine
