"""Watches the operators of forward and backward passes: which code called each, and the largest values in and out.

Owns the record of operators. The recorder tells it the torch functions that are called, and the operators below them,
those of the backward pass included. The values stay on the device until `Watch.read`. Must never change a result, and
must not judge what it sees: `causes` does.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.diagnostics.recorder.callers import users_frame
from ampatch.diagnostics.recorder.operands import has_inf, is_view, tensors_in, versions_of
from ampatch.diagnostics.recorder.recorder import Recorder, Running, paused
from ampatch.diagnostics.recorder.records import ArrivedGradient, Place, Values, WatchedOp
from ampatch.diagnostics.recorder.written_memory import WrittenMemory
from ampatch.function_wrapper import unwrapped
from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.torch_private import tensors
from ampatch.torch_private.autograd import current_graph_task_id, current_node, next_sequence_number, sequence_number
from ampatch.torch_private.operators import tree_map_only

#: The types whose largest values are read.
_MEASURED = HALVES | {torch.float32, torch.float64, torch.complex64, torch.complex128}

_ACCUMULATES = "torch::autograd::AccumulateGrad"
#: What adds a gradient there; DDP's hooks on this node, which spread the gradients of other ranks, do not.
_ADDS = frozenset({"aten::add", "aten::add_"})
_aten = torch.ops.aten
#: Operators whose results hold whatever was in memory.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


class Watch(Recorder):
    """Records the operators of forward passes that may have a backward pass, and of the backward passes.

    Args:
        keep: returns whether the arguments of an operator are kept alive, given the values of its inputs and results.
            For an operator that writes to its inputs, it gets the inputs only. None keeps no arguments.
        keep_results: whether to keep copies of all results, which later operators may write to. Parameters among the
            arguments then keep the memory that they have now: the end of a session gives them other memory.

    Attributes:
        ops: the operators recorded, in the order in which they ran.
        gradients: each parameter's incoming gradients, in the order of the backward passes.
        count: number of operators recorded so far, forgotten ones included.
    """

    sees_amp = True

    def __init__(self, keep: Callable[[Sequence[Values]], bool] | None = None, keep_results: bool = False) -> None:
        super().__init__()
        self.ops: list[WatchedOp] = []
        self.gradients: list[ArrivedGradient] = []
        self._roots: tuple[Values, ...] = ()
        self._keep = keep
        self._keep_results = keep_results
        self._written = WrittenMemory()
        self._by_node: dict[int, WatchedOp | None] = {}
        self.count = 0
        self._last_number = -1
        self._last_arrival = (-1, 0)
        self._functions: list[Any] = []
        self._uses = Counter[int]()  # of each module, by id, in the outermost forward pass that runs

    def push(self) -> None:
        """Begins to watch this thread."""
        super().push()
        self._own_node()

    def enters(self, module: nn.Module, _: Any) -> bool:
        """Takes the modes off for an evaluation, which is not recorded: it then runs what it runs without a watch."""
        is_evaluation = not (self.thread.running or module.training or torch.is_grad_enabled())
        is_left_out = is_evaluation and self.is_on and current_graph_task_id() == -1
        if is_left_out:
            self.pop()
        if current_graph_task_id() == -1:
            if not self.thread.running:
                self._uses.clear()
            self._uses[id(module)] += 1
        return is_left_out

    def leaves(self, ended: Running, _: Any) -> None:
        """Puts the modes back after an evaluation."""
        if ended.noted:
            self.push()

    def forget(self) -> None:
        """Drops what was recorded."""
        self.ops, self.gradients, self._by_node, self._written = [], [], {}, WrittenMemory()

    def read(self) -> None:
        """Copies the largest values to the host; syncs with each device once for each type."""
        of_ops = (values for op in self.ops for values in (*op.inputs, *op.outputs))
        of_gradients = (values for gradient in self.gradients for values in (gradient.values, *gradient.roots))
        waiting = grouped(
            ((each.on_device[0].device, each.on_device[0].dtype, len(each.on_device)), each)
            for each in dict.fromkeys(itertools.chain(of_ops, of_gradients))
            if each.on_device
        )
        with paused():
            for (*_, count), alike in waiting.items():
                stacked = _aten.stack.default([each for values in alike for each in values.on_device])
                # tolist() has no bfloat16. float64 keeps what float32 would round to inf.
                numbers = (stacked if stacked.dtype is torch.float64 else stacked.float()).view(-1, count).tolist()
                for values, extremes in zip(alike, numbers, strict=True):
                    is_nan = any(map(math.isnan, extremes))
                    values.largest, values.on_device = math.nan if is_nan else max(map(abs, extremes)), ()
                    values.highest = extremes[-1]

    def operator(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and records it."""
        if self.is_traced():
            return op(*args, **kwargs)
        node: Any = current_node()
        own_node = self._own_node()  # with create_graph=True backward passes make some as well
        is_backward = node is not None and self.thread.innermost() is None
        # In the forward of an autograd.Function gradients are off, so that the outermost module decides.
        running = self.thread.running
        if not (is_backward or (running[0].has_gradients if running else torch.is_grad_enabled())):
            for each in tensors_in([args[place] for place in _written_positions(op) if place < len(args)]):
                self._written.drop(each)
            return op(*args, **kwargs)
        accumulates = node is not None and node.name() == _ACCUMULATES
        if accumulates:
            self._note_gradient(node, args)
        if is_view(op):
            if own_node is not None:
                self._by_node[own_node] = None
            return op(*args, **kwargs)
        watched = WatchedOp(
            op,
            self.count,
            is_backward,
            self._functions[-1] if self._functions and not is_backward else None,
            tuple([each.module for each in running]),
            Place.of(users_frame(sys._getframe(1))),
            None if node is None else node.name(),
            self._by_node.get(sequence_number(node)) if is_backward else None,
            parameter=node.variable if accumulates and op._schema.name in _ADDS else None,
            has_inf_argument=has_inf((args, kwargs)),
            use=self._uses[id(running[-1].module)] if running else 1,
        )
        self.count += 1
        result = self._run_watched(watched, args, kwargs)
        if own_node is not None:
            self._by_node[own_node] = watched
        return result

    def _run_watched(self, watched: WatchedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op, keep = watched.op, self._keep
        writes = bool(_written_positions(op))
        watched.inputs = [self._values_of(each) for each in measured((args, kwargs))]
        if keep is not None and writes and keep(watched.inputs):
            watched.arguments = _with_copies_of_written(op, args, kwargs)
        result = op(*args, **kwargs)
        if watched.op_name in _UNINITIALISED:
            for each in measured(result):
                self._written.drop(each)
            return result
        for each in measured(result):
            values = Values(each.dtype, tuple(each.shape), watched, on_device=_extremes(each))
            self._written.write(each, values)
            watched.outputs.append(values)
        if keep is not None and not writes and keep((*watched.inputs, *watched.outputs)):
            watched.arguments = args, kwargs
        if self._keep_results:
            with torch.no_grad(), paused():
                watched.results = tuple(each.detach().clone() for each in measured(result))
                watched.arguments = tree_map_only(nn.Parameter, Tensor.detach, watched.arguments)
        watched.versions = versions_of(watched.arguments)
        for writer in watched.writers:
            writer.readers.append(watched)
        self.ops.append(watched)
        return result

    def _own_node(self) -> int | None:
        """Returns the number of the node that autograd has just made for the running operator; None if it made none."""
        number = next_sequence_number()
        last, self._last_number = self._last_number, number
        return None if number == last else number - 1

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a torch function; operators below it are recorded as parts of it."""
        if function is _BACKWARD:
            self._roots = tuple(map(self._values_of, measured(args[:1])))
        self._functions.append(unwrapped(function))
        try:
            return function(*args, **kwargs)
        finally:
            self._functions.pop()
            if function is _BACKWARD:
                self._roots = ()

    def _note_gradient(self, node: Any, args: tuple[Any, ...]) -> None:
        arrival = current_graph_task_id(), id(node.variable)
        incoming = measured(args)
        if incoming and arrival != self._last_arrival:  # several operators may take a gradient in
            self._last_arrival = arrival
            self.gradients.append(ArrivedGradient(node.variable, self._values_of(incoming[-1]), self._roots))

    def note_gradient(self, parameter: Tensor, gradient: Tensor, roots: Sequence[Tensor]) -> None:
        """Notes a gradient that a backward pass from some tensors has returned, and not added to ``.grad``."""
        of_roots = tuple(map(self._values_of, measured(list(roots))))
        self.gradients.append(ArrivedGradient(parameter, self._values_of(gradient), of_roots))

    def _values_of(self, tensor: Tensor) -> Values:
        def measure(parts: tuple[Values, ...]) -> Values:
            is_leaf = (tensor._base if tensors.is_view(tensor) else tensor).grad_fn is None  # type: ignore[union-attr]
            return Values(tensor.dtype, tuple(tensor.shape), None, parts, is_leaf, on_device=_extremes(tensor))

        return self._written.read(tensor, measure)


def run_again(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of an operator, without recording it; None if it cannot run on these arguments."""
    try:
        with torch.no_grad(), paused():
            return op(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return None


_BACKWARD = Tensor.backward


def measured(value: Any) -> list[Tensor]:
    """Returns the floating-point and complex tensors in arguments or results, of which a watch knows the values."""
    return [each for each in tensors_in(value) if each.dtype in _MEASURED]


def _extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the least and the greatest value on the device, or the greatest absolute one of complex numbers.

    inf and NaN pass through. On the CPU a norm takes twenty times as long.
    """
    if not tensor.numel():
        return ()
    with torch.no_grad(), paused():
        if tensor.is_complex():
            return (_aten.linalg_vector_norm.default(tensor, math.inf),)
        return _aten.aminmax.default(tensor)  # type: ignore[no-any-return]


@cache
def _written_positions(op: Any) -> tuple[int, ...]:
    """Returns the positions of the arguments that an operator writes to."""
    arguments = enumerate(op._schema.arguments)
    return tuple(place for place, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _with_copies_of_written(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments, with copies of those that the operator is going to write to; None if it writes to others.

    Copied are tensors that are passed by position; others are those of ``out=``, and in lists.
    """
    written = _written_positions(op)
    if not all(place < len(args) and isinstance(args[place], Tensor) for place in written):
        return None
    copies = [each.detach().clone() if place in written else each for place, each in enumerate(args)]
    return tuple(copies), kwargs
