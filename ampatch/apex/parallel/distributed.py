"""Reduces gradients and parameters over ranks like ``apex.parallel.distributed``, by ``torch.distributed``.

Owns what Apex's arguments mean for torch's DistributedDataParallel (DDP). Must not reduce where DDP can, because the
session knows DDP, and makes all ranks skip a step together.
"""

# No `from __future__ import annotations`: torch compares the annotations of a communication hook with classes.

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampatch.apex.apex_C import flatten, unflatten
from ampatch.errors import OptionError, warn
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES, HALVES
from ampatch.runtime import runtime

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DDP with Apex's arguments.

    The module stays on its device. All ranks start from the weights of rank 0. Each rank keeps its own buffers, such as
    running statistics, as in Apex. Wrap the model after ``amp.initialize``.

    Parameters without a gradient are allowed; Apex allowed them if they were the same in every backward pass. To find
    them, torch searches the graph of ``forward``'s outputs. It reports once on the console if there are none.

    Because of this search, torch raises "mark a variable ready only once" in two cases that Apex never noticed. One is
    ``torch.utils.checkpoint`` with ``use_reentrant=True``; the other is parameters used outside the graph of
    ``forward``'s outputs. If the graph is always the same, ``model._set_static_graph()`` before the first forward pass
    allows both.

    Args:
        module: module with parameters of any floating-point dtype, all on this rank's device.
        message_size: number of elements that torch reduces at once, as soon as their gradients are ready.
        delay_allreduce: no effect any more, because torch finds parameters without a gradient in either case.
        shared_param: not supported, as in Apex.
        allreduce_trigger_params: no effect any more, because torch decides when to reduce.
        retain_allreduce_buffers: not supported, because there are no such buffers. Read reduced gradients from
            ``p.grad``.
        allreduce_always_fp32: True to reduce half gradients in float32.
        num_allreduce_streams: no effect any more.
        allreduce_communicators: no effect any more.
        gradient_average: True to divide the sum over ranks by their number.
        gradient_predivide_factor: divisor of gradients before the sum; as in Apex, it is multiplied back only if
            gradients are averaged.
        gradient_average_split_factor: older name of ``gradient_predivide_factor``.
        prof: no effect any more, because ``torch.profiler`` shows the reductions anyway.

    Raises:
        OptionError: an argument is not supported or out of range, or two arguments contradict each other.
        ValueError: no process group was set up; raised by torch.

    Warns:
        AmpWarning: arguments were given that have no effect any more.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence[Any] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise OptionError(
                "shared_param is no option of DistributedDataParallel any more. Leave it out: parameters that modules "
                "share are found without it."
            )
        if retain_allreduce_buffers:
            raise OptionError(
                "retain_allreduce_buffers=True would keep reduced gradients in allreduce_buffers, which torch's "
                "DistributedDataParallel does not have. Leave it out, and read the gradients from p.grad."
            )
        if allreduce_trigger_params and delay_allreduce:
            raise OptionError("allreduce_trigger_params is given together with delay_allreduce=True; expected one.")
        if gradient_average_split_factor is not None:
            gradient_predivide_factor = gradient_average_split_factor
        if gradient_predivide_factor <= 0:
            raise OptionError(
                f"gradient_predivide_factor is {gradient_predivide_factor!r}; expected a number above 0, such as 1.0."
            )
        ignored = {
            "allreduce_trigger_params": bool(allreduce_trigger_params),
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": bool(allreduce_communicators),
            "prof": prof,
        }
        if any(ignored.values()):
            warn(
                f"{', '.join(name for name, is_given in ignored.items() if is_given)}: without effect, since torch's "
                "DistributedDataParallel decides itself when and where it reduces gradients. Leave it out."
            )
        size = max((parameter.element_size() for parameter in module.parameters()), default=1)
        super().__init__(
            module, bucket_cap_mb=max(1, message_size * size >> 20), find_unused_parameters=True, **_OWN_BUFFERS
        )
        reduction = _Reduction(allreduce_always_fp32, gradient_predivide_factor, gradient_average)
        if reduction != _Reduction():
            self.register_comm_hook(reduction, _reduce)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)  # torch has made a new reducer without the hooks

    def enable_allreduce(self) -> None:
        """Makes backward passes reduce again after the next forward pass, with gradients accumulated meanwhile."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Stops backward passes from reducing gradients after the next forward pass, as in a ``no_sync`` block."""
        self.require_backward_grad_sync = False


# Each rank keeps its own buffers, as in Apex. From torch 2.13 on, DDP has an argument for exactly this.
_OWN_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Options of a reduction; the defaults are those of torch.

    Attributes:
        in_float32: True if half gradients are cast to float32 for the reduction.
        predivided_by: divisor of gradients before the sum.
        averages: True if the result is the mean.
    """

    in_float32: bool = False
    predivided_by: float = 1.0
    averages: bool = True


def _reduce(reduction: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sums ``bucket`` over all ranks and divides it; a communication hook."""
    gradients = bucket.buffer()
    wide = gradients.float() if reduction.in_float32 and gradients.dtype in HALVES else gradients
    wide.div_(reduction.predivided_by)

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        total = future.value()[0]
        if reduction.averages:
            total.mul_(reduction.predivided_by / dist.get_world_size())
        return total if wide is gradients else gradients.copy_(total)

    work: Any = dist.all_reduce(wide, async_op=True)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(finish)
    return reduced


class Reducer:
    """Averages gradients over ranks when the script calls `reduce`.

    ::

        reducer = Reducer(model)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            reducer.reduce()
        optimizer.step()

    Call `reduce` inside the block: gradients are then reduced before amp checks them for overflow, so that all ranks
    skip the same steps.

    Args:
        module_or_grads_list: gradients, or a module. The constructor overwrites a module's parameters with those of
            rank 0.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            _send_parameters(self.module)
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Averages the given gradients, or the current gradients of the module's parameters."""
        module, grads = self.module, self.grads
        if module is not None:
            grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def _send_parameters(module: nn.Module) -> None:
    """Overwrites parameters with those of rank 0; for half parameters, also the float32 values behind them."""
    session, parameters = runtime.live, list(module.parameters())
    if session is None:
        flat_dist_call(parameters, dist.broadcast, (0,))
        return
    session.masters.synchronise()
    values = {parameter: session.weights.conversion.kept_float32_values(parameter) for parameter in parameters}
    behind = {parameter: full for parameter, full in values.items() if full is not None}
    flat_dist_call([*parameters, *behind.values()], dist.broadcast, (0,))
    for parameter, full in behind.items():
        session.weights.conversion.set(parameter, full)


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Calls a collective once for several tensors, and copies the result back to them.

    Args:
        bucket: dense tensors of one dtype and device.
        call: collective that changes one flat tensor in place, such as ``torch.distributed.broadcast``. After
            ``torch.distributed.all_reduce`` the tensors are divided by the number of ranks.
        extra_args: further positional arguments of ``call``.
    """
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synchronised in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.copy_(synchronised)


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Calls `apply_flat_dist_call` once for each dtype and device among the tensors.

    For a model that ``amp.initialize`` has made half, this sends the half weights without the float32 masters behind
    them. The masters of rank 0 then keep digits that other ranks lose. `Reducer` and `DistributedDataParallel` send
    both.
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Returns the tensors grouped by ``tensor.type()``, in the order in which the types first occur."""
    return OrderedDict(grouped((tensor.type(), tensor) for tensor in tensors))


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns the float16, bfloat16, float32 and float64 tensors, a list for each dtype that occurs."""
    tensors = list(tensors)
    dtypes = (*HALF_DTYPES.values(), torch.float32, torch.float64)
    buckets = [[tensor for tensor in tensors if tensor.dtype is dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Appends every tensor in nested iterables to a list; skips all other objects."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, str):
        for each in maybe_tensor:
            extract_tensors(each, tensor_list)
