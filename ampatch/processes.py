"""Several processes: over which of them gradients are spread, and whether a backward has left them to be reduced later.

Reads what torch's wrappers (DistributedDataParallel, both FSDPs) and sharded tensors (DTensor) say of themselves; owns
the list of wrappers, and what each was told at its last forward. Must know neither scales nor optimizers: it is given
their parameters. Every process has to ask the same in the same order, so that no answer may depend on which gradients
one of them happens to have.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampatch.errors import UsageError


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that reduce together.

    Attributes:
        processes: torch's group of them.
        device_type: where it wants tensors to be.
    """

    processes: dist.ProcessGroup
    device_type: str

    def reduce_(self, tensor: Tensor, operation: Any) -> None:
        """Reduces a tensor in place over the processes; does not wait for the device."""
        there = tensor if tensor.device.type == self.device_type else tensor.to(self.device_type)
        dist.all_reduce(there, operation, group=self.processes)
        if there is not tensor:
            tensor.copy_(there, non_blocking=True)


class Processes:
    """What a session knows of the processes beside its own."""

    def __init__(self) -> None:
        self._replicating: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._flattening: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of FSDP1
        self._sharding: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of FSDP2
        self._postponing: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def find_wrappers(self, model: nn.Module) -> None:
        """Takes note of the wrappers in a model; one made later is found when it is asked for again, or by `add`."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it there are none
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self.add(module)
            elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                self._flattening.add(module)
            elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
                self._sharding.add(module)

    @property
    def gathers_weights(self) -> bool:
        """Whether there is a model whose layers have whole weights only while they are at work."""
        return bool(self._flattening) or bool(self._sharding)

    def add(self, wrapper: DistributedDataParallel) -> None:
        """Takes note of a wrapper."""
        self._replicating.add(wrapper)

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """A forward has ended, and with it was decided whether its backward reduces gradients."""
        if torch.is_grad_enabled():
            self._postponing[wrapper] = not wrapper.require_backward_grad_sync

    def are_replicated(self, parameters: Iterable[Tensor]) -> bool:
        """Whether one of these is of a model of which several processes each have a copy."""
        replicated = {id(each) for wrapper in list(self._replicating) for each in wrapper.parameters()}
        return any(id(parameter) in replicated for parameter in parameters)

    def is_postponed(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the last backward has left the gradient of one of these to be reduced with those of a later one."""
        postponed: set[int] = set()
        for wrapper in list(self._replicating):
            if self._postponing.get(wrapper, not wrapper.require_backward_grad_sync):
                postponed.update(map(id, wrapper.parameters()))
        for module in list(self._flattening):
            if not module._sync_gradients:
                postponed.update(map(id, module.parameters()))
        for module in list(self._sharding):
            for group in _parameter_groups(module):
                if not (group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp)):
                    postponed.update(id(each.sharded_param) for each in group.fsdp_params)
        return bool(postponed) and any(id(parameter) in postponed for parameter in parameters)

    def has_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        """Whether there are gradients of these out of sight: FSDP2 keeps to itself those that it has not reduced."""
        return any(True for _ in self._unreduced(parameters))

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drops gradients of these that are out of sight."""
        for kept in self._unreduced(parameters):
            kept.unsharded_accumulated_grad = None
            kept._unsharded_param.grad = None

    def _unreduced(self, parameters: Iterable[Tensor]) -> Iterator[Any]:
        """What FSDP2 knows of each of these parameters of which it keeps a gradient."""
        there = {
            id(each.sharded_param): each
            for module in list(self._sharding)
            for group in _parameter_groups(module)
            for each in group.fsdp_params
            if each.unsharded_accumulated_grad is not None
            or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
        }
        return (there[id(parameter)] for parameter in (parameters if there else ()) if id(parameter) in there)

    def agree(self, found_inf: Tensor, parameters: Iterable[Tensor]) -> None:
        """Has every process know of an overflow in a piece of a gradient that only one of them has.

        Args:
            found_inf: 0-dimensional float32, not 0 after an overflow; changed in place.
            parameters: those whose gradients were looked at, whether they have any here or not.
        """
        for group in dict.fromkeys(group for spread in self._spreads(parameters) for group in spread.holders):
            group.reduce_(found_inf, dist.ReduceOp.MAX)

    def share(self, parameters: Iterable[Tensor]) -> bool:
        """Whether other processes have pieces of these, so that all have to do the same, gradients or not."""
        return any(spread.pieces for spread in self._spreads(parameters))

    def by_pieces(self, parameters: Iterable[Tensor]) -> list[tuple[tuple[Group, ...], list[Tensor]]]:
        """Parameters by the groups over which their elements are spread, which is none where they are whole."""
        parameters = list(parameters)
        parts: dict[tuple[Group, ...], list[Tensor]] = {}
        for parameter, spread in zip(parameters, self._spreads(parameters), strict=True):
            parts.setdefault(spread.pieces, []).append(parameter)
        return list(parts.items())

    def _spreads(self, parameters: Iterable[Tensor]) -> Iterator[_Spread]:
        if not (dist.is_available() and dist.is_initialized()):
            return (_WHOLE for _ in parameters)
        flat = {id(parameter): module for module in list(self._flattening) for parameter in module.parameters()}
        return (
            _spread_of(parameter)
            if hasattr(parameter, "device_mesh")
            else _spread_within(flat.get(id(parameter)))
            if id(parameter) in flat or hasattr(parameter, "_fsdp_flattened")
            else _WHOLE
            for parameter in parameters
        )


@dataclass(frozen=True, slots=True)
class _Spread:
    """How a parameter lies on processes.

    Attributes:
        holders: the groups of all that have it or a piece of it.
        pieces: the groups in which each process has another piece.
    """

    holders: tuple[Group, ...] = ()
    pieces: tuple[Group, ...] = ()


_WHOLE = _Spread()


def _spread_of(parameter: Any) -> _Spread:
    """Of a DTensor."""
    mesh = parameter.device_mesh
    groups = [Group(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.ndim)]
    sharded = [not each.is_replicate() and not each.is_partial() for each in parameter.placements]
    return _Spread(tuple(groups), tuple(group for group, is_sharded in zip(groups, sharded, strict=True) if is_sharded))


def _spread_within(module: Any) -> _Spread:
    """Of a parameter of a ``FullyShardedDataParallel``, whose tensors do not say so themselves.

    Raises:
        UsageError: the module is not known.
    """
    if module is None:
        raise UsageError(
            "found gradients of parameters that FullyShardedDataParallel has sharded, and amp does not know the "
            "module, so that it cannot tell over which processes. Hand it to amp.initialize together with the "
            "optimizer, at opt_level='O1' or 'O4'."
        )
    group = Group(module.process_group, module.compute_device.type)
    is_whole = module.sharding_strategy.name == "NO_SHARD"
    return _Spread((group,), () if is_whole else (group,))


def sent_by(wrapper: DistributedDataParallel) -> Iterator[Tensor]:
    """The weights and buffers of which the first process's have replaced the others'."""
    for name, tensor in itertools.chain(wrapper.module.named_parameters(), wrapper.module.named_buffers()):
        if name not in wrapper.parameters_to_ignore:
            yield tensor


@torch.no_grad()
def send_from_first(tensor: Tensor, wrapper: DistributedDataParallel) -> None:
    """Overwrites a tensor by what it is in the first of a wrapper's processes."""
    dist.broadcast(tensor, group=wrapper.process_group, group_src=0)


@torch.no_grad()
def lay_out_gradient(parameter: Tensor) -> None:
    """Has the gradient of a DTensor lie on processes as the parameter does; backward may leave sums to be done yet."""
    grad: Any = parameter.grad
    if hasattr(parameter, "placements") and grad is not None and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether a process has a piece only of one of these, by what their tensors say."""
    return any(hasattr(each, "device_mesh") or getattr(each, "_fsdp_flattened", False) for each in parameters)


def _parameter_groups(module: Any) -> Sequence[Any]:
    """FSDP2's groups of the parameters that it gathers together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13
