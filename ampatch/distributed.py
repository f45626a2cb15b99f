"""Several ranks: how parameters are spread over them, and whether the last backward pass postponed the all-reduce.

Reads the state of torch's wrappers (DistributedDataParallel, both FSDPs) and of sharded tensors (DTensor). Owns the
list of wrappers, and whether each one's next backward pass reduces gradients. Must know neither scales nor optimizers,
only their parameters. Every rank must run the same collectives in the same order. So no answer that decides about a
collective must depend on which gradients one rank happens to have.
"""

from __future__ import annotations

import enum
import gc
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampatch.errors import UsageError

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


class Ranks:
    """The distributed wrappers of a session's models, and how their parameters are spread over ranks.

    Attributes:
        has_wrappers: True if a DDP or FSDP wrapper was found.
    """

    def __init__(self) -> None:
        self.has_wrappers = False
        # In the order in which they were found, outer wrappers first. The order is the same on every rank.
        self._ddp: weakref.WeakKeyDictionary[nn.Module, _Replica] = weakref.WeakKeyDictionary()
        self._fsdp1: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # of FSDP1
        self._fsdp2: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # of FSDP2
        self._layouts: dict[tuple[Any, tuple[Any, ...]], _Layout] = {}

    def find_wrappers(self, model: nn.Module) -> list[DistributedDataParallel]:
        """Records the wrappers in a model; wrappers made later need another call, or `add`.

        Returns:
            The DDP wrappers, whose forward passes the caller must report.
        """
        replicating = []
        fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, there are no FSDP wrappers
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self.add(module)
                replicating.append(module)
            elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                self._fsdp1[module] = None
                self.has_wrappers = True
            elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
                self._fsdp2[module] = None
                self.has_wrappers = True
        return replicating

    @property
    def gathers_weights(self) -> bool:
        """True if there is an FSDP model, whose layers have whole weights only while they run."""
        return bool(self._fsdp1) or bool(self._fsdp2)

    def add(self, wrapper: DistributedDataParallel) -> _Replica:
        """Records a DDP wrapper, if it is new, and returns its record."""
        self.has_wrappers = True
        replica = self._ddp.get(wrapper)
        if replica is None:
            ignored = wrapper.parameters_to_ignore
            reduced = (each for name, each in wrapper.module.named_parameters() if name not in ignored)
            replica = self._ddp[wrapper] = _Replica(frozenset(map(id, reduced)))
        return replica

    def forget(self, wrapper: DistributedDataParallel) -> None:
        """Drops the record of a wrapper that no training goes on in."""
        self._ddp.pop(wrapper, None)

    def expect_backward(self, wrapper: DistributedDataParallel) -> None:
        """Records whether the next backward pass reduces gradients, if other code than a forward pass prepares it."""
        reduces = wrapper.require_backward_grad_sync
        self.add(wrapper).next = _NextBackward.REDUCES if reduces else _NextBackward.POSTPONES

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """Records at a wrapper's forward pass whether its next backward pass reduces gradients.

        If an earlier forward pass decided that it does, a later one under ``no_sync`` does not change that until a
        backward pass has run.
        """
        replica = self.add(wrapper)
        if torch.is_grad_enabled() and replica.next is not _NextBackward.REDUCES:
            replica.next = _NextBackward.REDUCES if wrapper.require_backward_grad_sync else _NextBackward.POSTPONES

    def watch_backward(self, wrapper: DistributedDataParallel, outputs: object) -> None:
        """Adds hooks to a forward pass's outputs, which record that the backward pass reduces gradients.

        Adds none if the next backward pass does not reduce. The hooks also run outside of a block.
        """
        replica = self.add(wrapper)
        if replica.next is not _NextBackward.REDUCES:
            return

        def begun(_: Tensor) -> None:
            if replica.next is _NextBackward.REDUCES:
                replica.next = _NextBackward.IS_REDUCED

        for tensor in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(begun)

    def begin_block(self) -> None:
        """Begins a block: records if a backward pass before it reduced gradients, and resets that state."""
        for wrapper, replica in list(self._ddp.items()):
            replica.was_reduced = replica.next is _NextBackward.IS_REDUCED
            if replica.was_reduced:
                replica.next, replica.has_unreduced = _NextBackward.NONE, False
            replica.before = _moments_of(wrapper, replica) if replica.has_unreduced else []

    def end_block(self, parameters: Iterable[Tensor]) -> None:
        """Ends a block of an optimizer with these parameters: their reducing backward pass is over, if it has begun."""
        for wrapper, replica in self._replicas_of(parameters):
            if replica.next is _NextBackward.POSTPONES:
                replica.has_unreduced = bool(_moments_of(wrapper, replica))
            elif not _is_still_to_reduce(wrapper, replica):
                replica.next, replica.has_unreduced = _NextBackward.NONE, False

    def are_reduced(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if a backward pass before the present block has reduced gradients in all wrappers of these."""
        return all(replica.was_reduced for _, replica in self._replicas_of(parameters))

    def _replicas_of(self, parameters: Iterable[Tensor]) -> list[tuple[Any, _Replica]]:
        """Returns the wrappers that reduce gradients of these parameters, with their records."""
        ids = set(map(id, parameters)) if self._ddp else set()
        return [(wrapper, replica) for wrapper, replica in list(self._ddp.items()) if not ids.isdisjoint(replica.ids)]

    @property
    def replicates(self) -> bool:
        """True if there is a DDP model, of which each rank has a copy."""
        return bool(self._ddp)

    def are_replicated(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if any of these parameters is of a DDP model."""
        replicated = {id(each) for wrapper in list(self._ddp) for each in wrapper.parameters()}
        return any(id(parameter) in replicated for parameter in parameters)

    def is_postponed(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if the last backward pass left a gradient of these for a later backward pass to reduce.

        A backward pass that bypasses the wrapper also leaves gradients: that of an auxiliary loss of the module inside.
        """
        parameters = list(parameters)
        replicas = [replica for _, replica in self._replicas_of(parameters)]
        if any(replica.next is _NextBackward.POSTPONES for replica in replicas):
            return True
        if not any(replica.next in (_NextBackward.REDUCES, _NextBackward.IS_REDUCED) for replica in replicas):
            ids = frozenset().union(*(replica.ids for replica in replicas))
            if any(parameter.grad is not None and id(parameter) in ids for parameter in parameters):
                return True
        postponed: set[int] = set()
        for module in list(self._fsdp1):
            if not module._sync_gradients:
                postponed.update(map(id, module.parameters()))
        for module in list(self._fsdp2):
            for group in _parameter_groups(module):
                if not (group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp)):
                    postponed.update(id(each.sharded_param) for each in group.fsdp_params)
        return bool(postponed) and any(id(parameter) in postponed for parameter in parameters)

    def are_still_to_reduce(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if gradients of these wait for a backward pass that a forward pass has prepared.

        So they do if a block for another model's loss stands between the two passes.
        """
        if not any(replica.has_unreduced for replica in self._ddp.values()):  # nearly always
            return False
        return any(_is_still_to_reduce(*each) for each in self._replicas_of(parameters))

    def has_unreduced(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if FSDP2 holds gradients of these internally that it has not reduced yet."""
        return any(True for _ in self._unreduced(parameters))

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drops gradients of these that FSDP2 holds internally."""
        for group in self._unreduced(parameters):
            group._partial_reduce_output = None
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None

    def _unreduced(self, parameters: Iterable[Tensor]) -> Iterator[Any]:
        """Returns FSDP2's parameter groups that hold unreduced gradients and contain any of these parameters."""
        keeping = [
            group
            for module in list(self._fsdp2)
            for group in _parameter_groups(module)
            if group._partial_reduce_output is not None  # HSDP has not reduced it over replicas yet
            or any(
                each.unsharded_accumulated_grad is not None
                or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
                for each in group.fsdp_params
            )
        ]
        ids = set(map(id, parameters)) if keeping else set()
        return (group for group in keeping if any(id(each.sharded_param) in ids for each in group.fsdp_params))

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
        groups.update(dict.fromkeys(self._groups_beside(parameters)))
        for group in groups:
            group.reduce_(found_inf, dist.ReduceOp.MAX)

    def _groups_beside(self, parameters: list[Tensor]) -> Iterator[Group]:
        """Yields the groups of these parameters' DDP wrappers, if no wrapper reduces some of the parameters."""
        found = self._replicas_of(parameters)
        ids = frozenset().union(*(replica.ids for _, replica in found))
        if found and not ids.issuperset(map(id, parameters)):
            for wrapper, _ in found:
                yield Group(wrapper.process_group, wrapper.device_type)

    def are_sharded(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if other ranks have pieces of these; all ranks must then do the same, gradients or not."""
        return any(spread.pieces for spread in self._layouts_of(parameters))

    def by_shard_groups(self, parameters: Iterable[Tensor]) -> list[tuple[tuple[Group, ...], list[Tensor]]]:
        """Returns parameters by the groups over which their elements are spread; unsharded ones by an empty tuple."""
        parameters = list(parameters)
        if _is_not_distributed():
            return [((), parameters)]
        parts: dict[tuple[Group, ...], list[Tensor]] = {}
        for parameter, spread in zip(parameters, self._layouts_of(parameters), strict=True):
            parts.setdefault(spread.pieces, []).append(parameter)
        return list(parts.items())

    def _layouts_of(self, parameters: Iterable[Tensor]) -> Iterator[_Layout]:
        """Yields how each parameter is spread over ranks; nothing if torch.distributed is not initialized."""
        if _is_not_distributed():
            return iter(())
        # Inner modules come later, and overwrite the outer ones: the innermost FSDP module decides.
        flat = {id(each): module for module in list(self._fsdp1) for each in module.parameters()}
        return (self._layout(parameter, flat) for parameter in parameters)

    def _layout(self, parameter: Any, flat: Mapping[int, Any]) -> _Layout:
        if hasattr(parameter, "device_mesh"):
            layout = (parameter.device_mesh, parameter.placements)
            if layout not in self._layouts:
                self._layouts[layout] = _layout_of(*layout)
            return self._layouts[layout]
        return _layout_within(flat.get(id(parameter))) if hasattr(parameter, "_fsdp_flattened") else _WHOLE


class _NextBackward(enum.Enum):
    """What the next backward pass through a wrapper does with gradients."""

    REDUCES = "it reduces them, as decided at a forward pass; no backward pass has run since"
    IS_REDUCED = "a backward pass has run, and reduced them"
    POSTPONES = "it leaves them unreduced, as decided at the last forward pass"
    NONE = "none is expected: no forward pass yet, or its backward pass is over"


@dataclass(slots=True, eq=False)
class _Replica:
    """Record of a DDP wrapper.

    Attributes:
        ids: ids of the parameters whose gradients it reduces.
        next: action of its next backward pass.
        was_reduced: True if a backward pass before the present block has reduced the gradients.
        has_unreduced: True if an earlier block has left gradients for a later backward pass to reduce.
        before: moments of these gradients when the present block began.
    """

    ids: frozenset[int]
    next: _NextBackward = _NextBackward.NONE
    was_reduced: bool = False
    has_unreduced: bool = False
    before: list[tuple[int, int]] = field(default_factory=list)


def _moments_of(wrapper: nn.Module, replica: _Replica) -> list[tuple[int, int]]:
    """Returns the ids and version counters of the gradients that a wrapper reduces."""
    return [
        (id(grad), grad._version)
        for parameter in wrapper.parameters()
        if id(parameter) in replica.ids and (grad := parameter.grad) is not None
    ]


def _is_still_to_reduce(wrapper: nn.Module, replica: _Replica) -> bool:
    """Returns True if gradients of earlier blocks wait for the backward pass that the last forward pass has prepared.

    The gradients tell whether that has run: not all outputs of a forward pass take a hook that would.
    """
    return (
        replica.next is _NextBackward.REDUCES
        and replica.has_unreduced
        and bool(replica.before)
        and replica.before == _moments_of(wrapper, replica)
    )


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


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Returns True if a wrapper runs in its ``join()``, in which some ranks can run out of data before others."""
    return bool(wrapper._join_config.enable)


def broadcast_tensors(wrapper: DistributedDataParallel) -> Iterator[Tensor]:
    """Yields the parameters and buffers that DDP broadcast from rank 0."""
    for name, tensor in itertools.chain(wrapper.module.named_parameters(), wrapper.module.named_buffers()):
        if name not in wrapper.parameters_to_ignore:
            yield tensor


@torch.no_grad()
def broadcast_from_rank_0(tensor: Tensor, wrapper: DistributedDataParallel) -> None:
    """Overwrites a tensor with its value on rank 0 of a wrapper's process group."""
    dist.broadcast(tensor, group=wrapper.process_group, group_src=0)


def redistribute_gradient(parameter: Tensor) -> None:
    """Redistributes a DTensor's gradient like its parameter; the backward pass may leave partial sums."""
    grad: Any = parameter.grad
    if hasattr(parameter, "placements") and grad is not None and grad.placements != parameter.placements:
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=parameter.placements)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Returns True if any of these is a DTensor or was flattened by FSDP, so that this rank may have only a piece."""
    return any(hasattr(each, "device_mesh") or getattr(each, "_fsdp_flattened", False) for each in parameters)


def _parameter_groups(module: Any) -> Sequence[Any]:
    """Returns an FSDP2 module's parameter groups; FSDP2 gathers the parameters of a group together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13
