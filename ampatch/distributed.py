"""Several ranks: how parameters are spread over them, and whether the last backward pass postponed the all-reduce.

Reads the state of torch's wrappers (DistributedDataParallel, both FSDPs) and of sharded tensors (DTensor). Owns the
list of wrappers, and whether each one's next backward pass reduces gradients. Must know neither scales nor optimizers,
only their parameters. Every rank must run the same collectives in the same order. So no answer that decides about a
collective must depend on which gradients one rank happens to have.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampatch.errors import UsageError
from ampatch.grouping import grouped
from ampatch.torch_private import distributed as private

_IS_AVAILABLE = dist.is_available()  # False if torch was built without torch.distributed


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, and the device type of the tensors that it reduces.

    Attributes:
        process_group: torch's process group.
        device_type: type of the device on which the group's backend needs tensors.
    """

    process_group: dist.ProcessGroup
    device_type: str

    def reduce_(self, tensor: Tensor, operation: Any) -> None:
        """All-reduces a tensor in place; syncs with the device only if the tensor is on another type of device."""
        there = tensor if tensor.device.type == self.device_type else tensor.to(self.device_type)
        dist.all_reduce(there, operation, group=self.process_group)
        if there is not tensor:
            tensor.copy_(there)


class FsdpModules:
    """The FSDP modules of a session's models, of both versions, and the gradients that these keep unreduced.

    True if there are any: their layers have whole weights only while they run.
    """

    def __init__(self) -> None:
        self._first: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._second: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._first) or bool(self._second)

    def add(self, module: nn.Module) -> None:
        """Records a module if it is one of FSDP's."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, there are no such modules
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            self._first[module] = None
        elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
            self._second[module] = None

    def flattened(self) -> dict[int, nn.Module]:
        """Returns the module of FSDP1 that has flattened each of its parameters, by id of the parameter."""
        return {id(each): module for module in list(self._first) for each in private.flattened_by(module)}

    def is_postponed(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if FSDP has left a gradient of these for a later backward pass to reduce."""
        if not self:
            return False
        parameters = list(parameters)
        postponed: set[int] = set()
        for module in list(self._first):
            if not private.syncs_gradients(module):
                postponed.update(map(id, private.flattened_by(module)))
        for group in self._groups():
            if private.is_postponed(group):
                postponed.update(id(each.sharded_param) for each in group.fsdp_params)
        return any(id(parameter) in postponed for parameter in parameters) or self.hold_back(parameters)

    def hold_back(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if FSDP2 holds gradients of these internally that it has not reduced yet."""
        return bool(self._second) and any(True for _ in self._holding_back(parameters))

    def drop_held_back(self, parameters: Iterable[Tensor]) -> None:
        """Drops gradients of these that FSDP2 holds internally."""
        for group in self._holding_back(parameters):
            private.drop_held_back(group)

    def _groups(self) -> Iterator[Any]:
        return (group for module in list(self._second) for group in private.parameter_groups(module))

    def _holding_back(self, parameters: Iterable[Tensor]) -> Iterator[Any]:
        """Returns FSDP2's parameter groups that hold unreduced gradients and contain any of these parameters."""
        keeping = list(filter(private.holds_back, self._groups()))
        ids = set(map(id, parameters)) if keeping else set()
        return (group for group in keeping if any(id(each.sharded_param) in ids for each in group.fsdp_params))


class Ranks:
    """The distributed wrappers of a session's models, and how their parameters are spread over ranks.

    Attributes:
        has_wrappers: True if a DDP or FSDP wrapper was found.
        fsdp: the FSDP modules.
    """

    def __init__(self) -> None:
        self.has_wrappers = False
        # In the order in which they were found, outer wrappers first. The order is the same on every rank.
        self._ddp: weakref.WeakKeyDictionary[DistributedDataParallel, _Replica] = weakref.WeakKeyDictionary()
        self.fsdp = FsdpModules()
        self._layouts: dict[tuple[Any, tuple[Any, ...]], _Layout] = {}

    def find_wrappers(self, model: nn.Module) -> list[DistributedDataParallel]:
        """Records the wrappers in a model; wrappers made later need another call, or `add`.

        Returns:
            The DDP wrappers, whose forward passes the caller must report.
        """
        replicating = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self.add(module)
                replicating.append(module)
            else:
                self.fsdp.add(module)
        self.has_wrappers = self.has_wrappers or bool(self.fsdp)
        return replicating

    def add(self, wrapper: DistributedDataParallel) -> None:
        """Records a DDP wrapper, if it is new."""
        self.has_wrappers = True
        if wrapper not in self._ddp:
            ignored = wrapper.parameters_to_ignore
            reduced = tuple(each for name, each in wrapper.module.named_parameters() if name not in ignored)
            self._ddp[wrapper] = _Replica(
                reduced,
                frozenset(map(id, reduced)),
                bool(wrapper.gradient_as_bucket_view),
                private.reductions_of(wrapper),
            )

    def forget(self, wrapper: DistributedDataParallel) -> None:
        """Drops the record of a wrapper that no training goes on in."""
        self._ddp.pop(wrapper, None)

    def _look(self) -> list[_Replica]:
        """Notes what the DDP wrappers have reduced since the last look; returns the records of all."""
        found = list(self._ddp.items())
        for wrapper, replica in found:
            replica.note_reductions(wrapper)
        return [replica for _, replica in found]

    def begin_block(self, parameters: Iterable[Tensor]) -> ReplicasInBlock:
        """Returns what DDP does in a block that begins now, with gradients of these parameters."""
        return ReplicasInBlock(self, set(map(id, parameters)) if self._ddp else set())

    def note_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Notes that these have got gradients outside of blocks, which wait unless a backward pass has reduced all."""
        ids = set(map(id, parameters)) if self._ddp else set()
        for replica in self._look() if ids else ():
            if not (replica.is_reduced or ids.isdisjoint(replica.ids)):
                replica.has_unreduced = True

    def before_backward(self, is_in_block: bool) -> list[tuple[_Replica, int, _Moments]]:
        """Returns what `after_backward` needs to see gradients that a backward pass adds and DDP does not reduce.

        Args:
            is_in_block: whether the backward pass runs in a block. The block itself sees what is added before DDP
                has reduced anything in it.
        """
        return [
            (replica, replica.count, _moments_of(replica.parameters))
            for replica in self._look()
            if replica.count != replica.count_at_begin or not is_in_block
        ]

    def after_backward(self, before: list[tuple[_Replica, int, _Moments]]) -> None:
        """Notes which wrappers have gradients now that a backward pass has added and DDP has not reduced."""
        if before:
            self._look()
        for replica, count, moments in before:
            if replica.count == count and not _are_same(moments, _moments_of(replica.parameters)):
                replica.has_unreduced = True

    def reduced_among(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns those of these parameters whose gradients a DDP wrapper reduces."""
        ids = frozenset().union(*(replica.ids for replica in list(self._ddp.values())))
        return [parameter for parameter in parameters if id(parameter) in ids]

    def reduce_overflow_(self, found_inf: Tensor, parameters: Iterable[Tensor]) -> None:
        """All-reduces an overflow flag over the ranks that have these parameters or pieces of them.

        Args:
            found_inf: 0-dimensional float32 tensor, not 0 after an overflow on this rank; changed in place.
            parameters: parameters whose gradients were checked, with or without a gradient on this rank.
        """
        if _is_not_distributed():
            return
        parameters = list(parameters)
        groups = dict.fromkeys(group for spread in self._layouts_of(parameters) for group in spread.holders)
        groups.update(self.groups_beside(set(map(id, parameters)) if self._ddp else set()))
        for group in groups:
            group.reduce_(found_inf, dist.ReduceOp.MAX)

    def groups_beside(self, ids: set[int]) -> dict[Group, None]:
        """Returns the groups of some parameters' DDP wrappers, if no wrapper reduces some of the parameters.

        Args:
            ids: ids of the parameters.
        """
        found = [(wrapper, replica) for wrapper, replica in list(self._ddp.items()) if not ids.isdisjoint(replica.ids)]
        if ids.issubset(frozenset().union(*(replica.ids for _, replica in found))):
            return {}
        groups: list[Any] = [(wrapper.process_group, str(wrapper.device_type)) for wrapper, _ in found]
        return {Group(*each): None for each in groups}

    def are_sharded(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if other ranks have pieces of these; all ranks must then do the same, gradients or not."""
        return any(spread.pieces for spread in self._layouts_of(parameters))

    def by_shard_groups(self, parameters: Iterable[Tensor]) -> list[tuple[tuple[Group, ...], list[Tensor]]]:
        """Returns parameters by the groups over which their elements are spread; unsharded ones by an empty tuple.

        Gives the gradients of DTensors their parameters' layout: the backward pass may leave partial sums.
        """
        parameters = list(parameters)
        if _is_not_distributed():
            return [((), parameters)]
        for parameter in parameters:
            _redistribute_gradient(parameter)
        spreads = zip(self._layouts_of(parameters), parameters, strict=True)
        return list(grouped((spread.pieces, parameter) for spread, parameter in spreads).items())

    def _layouts_of(self, parameters: Iterable[Tensor]) -> Iterator[_Layout]:
        """Yields how each parameter is spread over ranks; nothing if torch.distributed is not initialized."""
        if _is_not_distributed():
            return iter(())
        flat = self.fsdp.flattened()
        return (self._layout(parameter, flat) for parameter in parameters)

    def _layout(self, parameter: Any, flat: Mapping[int, Any]) -> _Layout:
        if hasattr(parameter, "device_mesh"):
            layout = (parameter.device_mesh, parameter.placements)
            if layout not in self._layouts:
                self._layouts[layout] = _layout_of(*layout)
            return self._layouts[layout]
        return _layout_within(flat.get(id(parameter))) if hasattr(parameter, private.FLATTENED) else _WHOLE


# The gradients of some parameters at a moment: for each a reference, and the version counter.
_Moments = list[tuple[Any, int]]


@dataclass(slots=True, eq=False)
class _Replica:
    """Record of a DDP wrapper.

    Attributes:
        parameters: the parameters whose gradients it reduces.
        ids: their ids.
        has_views: True if gradients are views of DDP's buckets, and DDP replaces tensors that are not.
        seen: what `reductions_of` returned at the last look.
        count: number of times that a look has found reductions.
        count_at_begin: this number when the last block began.
        count_at_end: this number when the last block of an optimizer with these parameters ended.
        has_unreduced: True if a gradient waits for a later backward pass to reduce it.
    """

    parameters: tuple[Tensor, ...]
    ids: frozenset[int]
    has_views: bool
    seen: object
    count: int = 0
    count_at_begin: int = 0
    count_at_end: int = 0
    has_unreduced: bool = False

    def note_reductions(self, wrapper: DistributedDataParallel) -> None:
        """Notes whether the wrapper has reduced gradients since the last look."""
        now = private.reductions_of(wrapper)
        # Other code than torch's reducer reduces in every backward pass outside of no_sync.
        is_elsewhere = any(private.reduces_elsewhere(wrapper))
        if now != self.seen or (is_elsewhere and wrapper.require_backward_grad_sync):
            self.seen, self.has_unreduced = now, False
            self.count += 1

    @property
    def is_reduced(self) -> bool:
        """True if the wrapper has reduced all gradients since the last block ended, or in the present one."""
        return self.count != self.count_at_end and not self.has_unreduced


class ReplicasInBlock:
    """The DDP wrappers of a block's optimizers, and what they have reduced in it.

    DDP adds up, in a backward pass that it reduces, all gradients that are there. So those that a block has added
    without that must stay as they are, until one that reduces.

    Args:
        ranks: the session's wrappers.
        ids: ids of the parameters whose gradients the block unscales.
    """

    def __init__(self, ranks: Ranks, ids: set[int]) -> None:
        self._ranks = ranks
        self._ids = ids
        # With the number of reductions so far.
        self._replicas: list[tuple[_Replica, int]] = []
        for each in ranks._look():
            each.count_at_begin = each.count
            if not ids.isdisjoint(each.ids):
                self._replicas.append((each, each.count))
        self._before: list[_Moments] | None = None  # None: the block began without gradients
        #: True if a backward pass since the last block has reduced the gradients of all wrappers.
        self.were_reduced = all(each.is_reduced for each, _ in self._replicas)

    def note_existing(self) -> None:
        """Notes the present gradients, which the block has not added."""
        self._before = [_moments_of(self._own(replica)) for replica, _ in self._replicas]

    def unreduced(self) -> set[int]:
        """Returns the ids of parameters with gradients that wait for a later backward pass to reduce them."""
        return {key for each, _ in self._replicas if each.has_unreduced for key in each.ids}

    def end(self, is_judged: bool) -> None:
        """Notes which wrappers have reduced all gradients, and which have gradients that the block has added.

        Args:
            is_judged: whether the ranks agree on an overflow when the block unscales.
        """
        self._ranks._look()
        for index, (replica, count) in enumerate(self._replicas):
            if replica.count == count:
                parameters = self._own(replica)
                if all(each.grad is None for each in parameters):
                    replica.has_unreduced = False
                elif self._before is None or not _are_same(self._before[index], _moments_of(parameters)):
                    replica.has_unreduced = True
            replica.count_at_end = replica.count
        if is_judged:
            self._agree([replica for replica, count in self._replicas if replica.count == count])

    def _agree(self, replicas: list[_Replica]) -> None:
        """Has wrappers' gradients wait on all ranks if they do on one, where the ranks agree on an overflow.

        Which rank reaches a wrapper under ``no_sync`` may depend on its data, and all must unscale in the same block.
        """
        for group in self._ranks.groups_beside(self._ids) if replicas else ():
            flags = torch.tensor([float(replica.has_unreduced) for replica in replicas], device="cpu")
            group.reduce_(flags, dist.ReduceOp.MAX)
            for replica, flag in zip(replicas, flags.tolist(), strict=True):
                replica.has_unreduced = bool(flag)

    def have_reduced(self) -> bool:
        """Returns True if all wrappers have reduced their gradients in the block."""
        return all(replica.count != count and not replica.has_unreduced for replica, count in self._replicas)

    def moved(self) -> set[int]:
        """Returns the ids of parameters whose gradients DDP may have moved to its buckets in the block."""
        return {key for each, count in self._replicas if each.has_views and each.count != count for key in each.ids}

    def is_postponed(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if a wrapper of these has gradients that wait for a later backward pass, after the block.

        A backward pass that bypasses the wrapper also leaves gradients: that of an auxiliary loss of the module inside.
        Which of the wrapper's parameters have them does not count, as that may depend on a rank's data.
        """
        return not self.unreduced().isdisjoint(map(id, parameters))

    def _own(self, replica: _Replica) -> list[Tensor]:
        return [each for each in replica.parameters if id(each) in self._ids]


def is_about_to_move_gradients(wrapper: DistributedDataParallel) -> bool:
    """Returns True if a wrapper's next forward pass may replace its buckets, and the gradients that are views of them.

    It does so once, after the first backward pass that reduces.
    """
    return wrapper.gradient_as_bucket_view and not private.has_rebuilt_buckets(wrapper) and torch.is_grad_enabled()


def _moments_of(parameters: Iterable[Tensor]) -> _Moments:
    """Returns references to gradients, with version counters. An id could be that of a later gradient."""
    return [
        (None, 0) if (grad := parameter.grad) is None else (weakref.ref(grad), grad._version)
        for parameter in parameters
    ]


def _are_same(before: _Moments, now: _Moments) -> bool:
    """Returns True if no gradient was written to or replaced."""
    # A tensor has one weak reference: `==` would compare the tensors.
    return all(was is is_now and version == later for (was, version), (is_now, later) in zip(before, now, strict=True))


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a parameter is spread over ranks.

    Attributes:
        holders: groups of all ranks that have the parameter or a piece of it.
        pieces: groups in which each rank has a different piece.
    """

    holders: tuple[Group, ...] = ()
    pieces: tuple[Group, ...] = ()


_WHOLE = _Layout()


def _layout_of(mesh: Any, placements: tuple[Any, ...]) -> _Layout:
    """Returns how a DTensor is spread over ranks."""
    groups = [Group(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.ndim)]
    sharded = [not each.is_replicate() and not each.is_partial() for each in placements]
    return _Layout(tuple(groups), tuple(group for group, is_sharded in zip(groups, sharded, strict=True) if is_sharded))


def _layout_within(module: Any) -> _Layout:
    """Returns how a parameter of a ``FullyShardedDataParallel`` is spread; its tensors do not record that.

    Args:
        module: the innermost module around the parameter, or None.

    Raises:
        UsageError: ``module`` is None: it was not passed to `amp.initialize`.
    """
    if module is None:
        raise UsageError(
            "found gradients of parameters that FullyShardedDataParallel has sharded, but amp does not know the "
            "module, so it cannot find the ranks that share them. Pass it to amp.initialize together with the "
            "optimizer, at opt_level='O1' or 'O4'."
        )
    group = Group(module.process_group, module.compute_device.type)
    is_whole = module.sharding_strategy.name == "NO_SHARD"
    return _Layout((group,), () if is_whole else (group,))


def _is_not_distributed() -> bool:
    """Returns True if torch.distributed is not initialized."""
    return not (_IS_AVAILABLE and dist.is_initialized())


def has_other_ranks() -> bool:
    """Returns True if torch.distributed is initialized for more than one rank."""
    return not _is_not_distributed() and dist.get_world_size() > 1


def replicating_wrappers() -> list[DistributedDataParallel]:
    """Returns all DDP wrappers on this rank, found among all of Python's objects; none without torch.distributed."""
    if _is_not_distributed():
        return []
    # issubclass of the type, not isinstance: a lazy proxy imports its module if its __class__ is read.
    return [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]


def broadcast_tensors(wrapper: DistributedDataParallel) -> Iterator[Tensor]:
    """Yields the parameters and buffers that DDP broadcast from rank 0."""
    for name, tensor in itertools.chain(wrapper.module.named_parameters(), wrapper.module.named_buffers()):
        if name not in wrapper.parameters_to_ignore:
            yield tensor


@torch.no_grad()
def broadcast_from_rank_0(tensor: Tensor, wrapper: DistributedDataParallel) -> None:
    """Overwrites a tensor with its value on rank 0 of a wrapper's process group."""
    dist.broadcast(tensor, group=wrapper.process_group, group_src=0)


def _redistribute_gradient(parameter: Tensor) -> None:
    grad: Any = parameter.grad
    if hasattr(parameter, "placements") and grad is not None and grad.placements != parameter.placements:
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=parameter.placements)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Returns True if any of these is a DTensor or was flattened by FSDP, so that this rank may have only a piece."""
    return any(hasattr(each, "device_mesh") or getattr(each, private.FLATTENED, False) for each in parameters)
