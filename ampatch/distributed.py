"""Several ranks: over which of them gradients are spread, and whether a backward has left them to be reduced later.

Reads what torch's wrappers (DistributedDataParallel, both FSDPs) and sharded tensors (DTensor) say of themselves; owns
the list of wrappers, and what each was told at its last forward. Must know neither scales nor optimizers: it is given
their parameters. Every process has to ask the same in the same order, so that no answer may depend on which gradients
one of them happens to have.
"""

from __future__ import annotations

import enum
import gc
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampatch.errors import UsageError

_IS_AVAILABLE = dist.is_available()  # or torch was built without


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that reduce together.

    Attributes:
        process_group: torch's.
        device_type: where it wants tensors to be.
    """

    process_group: dist.ProcessGroup
    device_type: str

    def reduce_(self, tensor: Tensor, operation: Any) -> None:
        """Reduces a tensor in place over the processes; waits for the device only where it lies on another."""
        there = tensor if tensor.device.type == self.device_type else tensor.to(self.device_type)
        dist.all_reduce(there, operation, group=self.process_group)
        if there is not tensor:
            tensor.copy_(there)


class Ranks:
    """What a session knows of the processes beside its own.

    Attributes:
        has_wrappers: whether any model was found that a wrapper has spread over processes.
    """

    def __init__(self) -> None:
        self.has_wrappers = False
        # In the order in which they were found, which is the same everywhere: the outer ones first.
        self._replicating: weakref.WeakKeyDictionary[nn.Module, _Replica] = weakref.WeakKeyDictionary()
        self._flattening: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # of FSDP1
        self._sharding: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # of FSDP2
        self._layouts: dict[tuple[Any, tuple[Any, ...]], _Spread] = {}

    def find_wrappers(self, model: nn.Module) -> list[DistributedDataParallel]:
        """Takes note of the wrappers in a model; one made later is found when it is asked for again, or by `add`.

        Returns:
            Those that replicate, whose forwards are to be told of.
        """
        replicating = []
        fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it there are none
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self.add(module)
                replicating.append(module)
            elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                self._flattening[module] = None
                self.has_wrappers = True
            elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
                self._sharding[module] = None
                self.has_wrappers = True
        return replicating

    @property
    def gathers_weights(self) -> bool:
        """Whether there is a model whose layers have whole weights only while they are at work."""
        return bool(self._flattening) or bool(self._sharding)

    def add(self, wrapper: DistributedDataParallel) -> _Replica:
        """Takes note of a wrapper."""
        self.has_wrappers = True
        replica = self._replicating.get(wrapper)
        if replica is None:
            ignored = wrapper.parameters_to_ignore
            reduced = (each for name, each in wrapper.module.named_parameters() if name not in ignored)
            replica = self._replicating[wrapper] = _Replica(frozenset(map(id, reduced)))
        return replica

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """Notes that a wrapper runs forward: now it decides whether the next backward reduces gradients.

        Once it is to reduce them, forwards that are not to do not change that until there was a backward.
        """
        replica = self.add(wrapper)
        if torch.is_grad_enabled() and replica.next is not _Next.REDUCES:
            replica.next = _Next.REDUCES if wrapper.require_backward_grad_sync else _Next.POSTPONES

    def watch_backward(self, wrapper: DistributedDataParallel, outputs: object) -> None:
        """Has the backward of a wrapper's forward tell that it reduces what was to be reduced, wherever it runs."""
        replica = self.add(wrapper)
        if replica.next is not _Next.REDUCES:
            return

        def begun(_: Tensor) -> None:
            if replica.next is _Next.REDUCES:
                replica.next = _Next.IS_REDUCED

        for tensor in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(begun)

    def begin_block(self) -> None:
        """Begins a block: forgets synchronised backwards from before it."""
        for replica in list(self._replicating.values()):
            replica.was_reduced = replica.next is _Next.IS_REDUCED
            if replica.was_reduced:
                replica.next = _Next.NONE

    def end_block(self, parameters: Iterable[Tensor]) -> None:
        """Ends a block of an optimizer with these parameters: their synchronised backward is over."""
        for replica in self._replicas_of(parameters):
            if replica.next in (_Next.REDUCES, _Next.IS_REDUCED):
                replica.next = _Next.NONE

    def are_reduced(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether a backward between two blocks has reduced all gradients of these that are to be reduced."""
        return all(replica.was_reduced for replica in self._replicas_of(parameters))

    def _replicas_of(self, parameters: Iterable[Tensor]) -> list[_Replica]:
        """Returns the wrappers that reduce gradients of these parameters."""
        ids = set(map(id, parameters)) if self._replicating else set()
        return [replica for replica in list(self._replicating.values()) if not ids.isdisjoint(replica.ids)]

    @property
    def replicates(self) -> bool:
        """Whether there is a model of which several processes each have a copy."""
        return bool(self._replicating)

    def are_replicated(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether one of these is of such a model."""
        replicated = {id(each) for wrapper in list(self._replicating) for each in wrapper.parameters()}
        return any(id(parameter) in replicated for parameter in parameters)

    def is_postponed(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether the last backward has left the gradient of one of these for a later one to reduce.

        So does a backward that did not come through the wrapper: that of an auxiliary loss of the module inside.
        """
        parameters = list(parameters)
        replicas = self._replicas_of(parameters)
        if any(replica.next is _Next.POSTPONES for replica in replicas):
            return True
        if not any(replica.next in (_Next.REDUCES, _Next.IS_REDUCED) for replica in replicas):
            ids = frozenset().union(*(replica.ids for replica in replicas))
            if any(parameter.grad is not None and id(parameter) in ids for parameter in parameters):
                return True
        postponed: set[int] = set()
        for module in list(self._flattening):
            if not module._sync_gradients:
                postponed.update(map(id, module.parameters()))
        for module in list(self._sharding):
            for group in _parameter_groups(module):
                if not (group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp)):
                    postponed.update(id(each.sharded_param) for each in group.fsdp_params)
        return bool(postponed) and any(id(parameter) in postponed for parameter in parameters)

    def has_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether FSDP2 keeps gradients of these to itself, since it has not reduced them."""
        return any(True for _ in self._unreduced(parameters))

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drops gradients of these that are out of sight."""
        for group in self._unreduced(parameters):
            group._partial_reduce_output = None
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None

    def _unreduced(self, parameters: Iterable[Tensor]) -> Iterator[Any]:
        """FSDP2's groups of parameters that keep gradients, of those that have one of these."""
        keeping = [
            group
            for module in list(self._sharding)
            for group in _parameter_groups(module)
            if group._partial_reduce_output is not None  # of HSDP, not reduced over replicas yet
            or any(
                each.unsharded_accumulated_grad is not None
                or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
                for each in group.fsdp_params
            )
        ]
        ids = set(map(id, parameters)) if keeping else set()
        return (group for group in keeping if any(id(each.sharded_param) in ids for each in group.fsdp_params))

    def agree(self, found_inf: Tensor, parameters: Iterable[Tensor]) -> None:
        """Has every process know of an overflow in a piece of a gradient that only one of them has.

        Args:
            found_inf: 0-dimensional float32, not 0 after an overflow; changed in place.
            parameters: those whose gradients were looked at, whether they have any here or not.
        """
        if _is_alone():
            return
        parameters = list(parameters)
        groups = dict.fromkeys(group for spread in self._spreads(parameters) for group in spread.holders)
        groups.update(dict.fromkeys(self._groups_beside(parameters)))
        for group in groups:
            group.reduce_(found_inf, dist.ReduceOp.MAX)

    def _groups_beside(self, parameters: list[Tensor]) -> Iterator[Group]:
        """Yields the groups of wrappers, where some parameters of the same optimizers are reduced by no wrapper."""
        replicas = self._replicas_of(parameters)
        ids = frozenset().union(*(replica.ids for replica in replicas))
        if replicas and not ids.issuperset(map(id, parameters)):
            wrapper: Any
            for wrapper, replica in list(self._replicating.items()):
                if replica in replicas:
                    yield Group(wrapper.process_group, wrapper.device_type)

    def share(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether other processes have pieces of these, so that all have to do the same, gradients or not."""
        return any(spread.pieces for spread in self._spreads(parameters))

    def by_pieces(self, parameters: Iterable[Tensor]) -> list[tuple[tuple[Group, ...], list[Tensor]]]:
        """Returns parameters by the groups over which their elements are spread, which is none where they are whole."""
        parameters = list(parameters)
        if _is_alone():
            return [((), parameters)]
        parts: dict[tuple[Group, ...], list[Tensor]] = {}
        for parameter, spread in zip(parameters, self._spreads(parameters), strict=True):
            parts.setdefault(spread.pieces, []).append(parameter)
        return list(parts.items())

    def _spreads(self, parameters: Iterable[Tensor]) -> Iterator[_Spread]:
        """Returns how each of them lies on processes; none where there is this process only."""
        if _is_alone():
            return iter(())
        # Of modules in one another the inner one's word counts.
        flat = {id(each): module for module in list(self._flattening) for each in module.parameters()}
        return (self._spread(parameter, flat) for parameter in parameters)

    def _spread(self, parameter: Any, flat: Mapping[int, Any]) -> _Spread:
        if hasattr(parameter, "device_mesh"):
            layout = (parameter.device_mesh, parameter.placements)
            if layout not in self._layouts:
                self._layouts[layout] = _spread_of(*layout)
            return self._layouts[layout]
        return _spread_within(flat.get(id(parameter))) if hasattr(parameter, "_fsdp_flattened") else _WHOLE


class _Next(enum.Enum):
    """What the next backward through a wrapper does with gradients."""

    REDUCES = "it reduces them, as it was told at a forward that none has followed yet"
    IS_REDUCED = "there was one, which has reduced them"
    POSTPONES = "it leaves them, as it was told at the last forward"
    NONE = "there is none to come: no forward yet, or a backward has followed it"


@dataclass(slots=True, eq=False)
class _Replica:
    """What is known of a wrapper that replicates a model.

    Attributes:
        ids: of the parameters that it reduces.
        next: what its next backward does.
        was_reduced: whether a backward before the present block has reduced what is there.
    """

    ids: frozenset[int]
    next: _Next = _Next.NONE
    was_reduced: bool = False


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


def _spread_of(mesh: Any, placements: tuple[Any, ...]) -> _Spread:
    """Returns how a DTensor lies on ranks."""
    groups = [Group(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.ndim)]
    sharded = [not each.is_replicate() and not each.is_partial() for each in placements]
    return _Spread(tuple(groups), tuple(group for group, is_sharded in zip(groups, sharded, strict=True) if is_sharded))


def _spread_within(module: Any) -> _Spread:
    """Returns that of a parameter of a ``FullyShardedDataParallel``, whose tensors do not say so themselves.

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


def _is_alone() -> bool:
    """Returns whether torch was told of no other process."""
    return not (_IS_AVAILABLE and dist.is_initialized())


def replicating_wrappers() -> list[DistributedDataParallel]:
    """Returns all that are in this process; looks through all of Python's objects if several ranks were set up."""
    if _is_alone():
        return []
    # By its type: to ask a lazy proxy for its class would make it import.
    return [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Returns whether it runs in its ``join()``, where processes may run out of data before the others do."""
    return bool(wrapper._join_config.enable)


def sent_by(wrapper: DistributedDataParallel) -> Iterator[Tensor]:
    """Yields the parameters and buffers that DDP broadcast from rank 0."""
    for name, tensor in itertools.chain(wrapper.module.named_parameters(), wrapper.module.named_buffers()):
        if name not in wrapper.parameters_to_ignore:
            yield tensor


@torch.no_grad()
def send_from_first(tensor: Tensor, wrapper: DistributedDataParallel) -> None:
    """Overwrites a tensor by what it is in the first of a wrapper's processes."""
    dist.broadcast(tensor, group=wrapper.process_group, group_src=0)


def lay_out_gradient(parameter: Tensor) -> None:
    """Has the gradient of a DTensor lie on processes as the parameter does; backward may leave sums to be done yet."""
    grad: Any = parameter.grad
    if hasattr(parameter, "placements") and grad is not None and grad.placements != parameter.placements:
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=parameter.placements)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Returns whether a process has a piece only of one of these, by what their tensors say."""
    return any(hasattr(each, "device_mesh") or getattr(each, "_fsdp_flattened", False) for each in parameters)


def _parameter_groups(module: Any) -> Sequence[Any]:
    """FSDP2's groups of the parameters that it gathers together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13
