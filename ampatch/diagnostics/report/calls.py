"""Records the calls, casts and modules of a report.

Owns two modes of torch, which see every function and operator, and the observer of amp's casts. Must never change a
result, nor which casts amp makes and keeps, nor sync with a device before it is asked for numbers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _current_autograd_node, _current_graph_task_id, _is_any_autocast_enabled
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ampatch.casting import cast_observers
from ampatch.casting.nested import CASTABLE, tensors_in
from ampatch.diagnostics.recorder import callers, mode_stacks
from ampatch.diagnostics.recorder.callers import Code
from ampatch.diagnostics.recorder.functions import Rulings, operator_called
from ampatch.diagnostics.recorder.operands import bytes_of
from ampatch.diagnostics.recorder.watch import is_view, pauses
from ampatch.diagnostics.report import rows as report_rows
from ampatch.diagnostics.report.modules import WRAPPERS, Modules, Running
from ampatch.diagnostics.report.rows import Row, Rows
from ampatch.errors import UsageError
from ampatch.function_wrapper import unwrapped
from ampatch.opt_levels import HALVES
from ampatch.patching import casting_mode
from ampatch.runtime import decoration_of, runtime
from ampatch.switch import WithoutCasts, is_in_region
from ampatch.tracing import ObservingMode, is_capturing, is_recording

_Casts = TypeVar("_Casts", Tensor, list[Tensor])
_V = TypeVar("_V")
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_aten = torch.ops.aten
_TO_COPY = _aten._to_copy.default
_CASTS_BACK = "ToCopyBackward0"
#: Functions by which users cast tensors themselves.
_CASTS_OF_USERS = frozenset(
    {*("to", "half", "float", "bfloat16", "double", "type", "type_as", "cpu", "cuda", "copy_", "tensor"), "as_tensor"}
)
#: The multiple that sizes of matrix products in half are to be of: 16 bytes.
_ALIGNED = 8
#: Casts whose backward passes may be still to come, and widened tensors: the oldest are forgotten.
_REMEMBERED = 100_000
#: Rounds of the work on which the cost of recording is measured.
_ROUNDS = 21


class CallRecorder:
    """Records what one thread calls, and the backward passes that it starts, until its block ends.

    Attributes:
        operators: number of operators that it has seen.
    """

    def __init__(self) -> None:
        self._rows = Rows()
        self._modules = Modules()
        self.operators = 0
        self._thread = _Thread()
        self._ident = -1
        self._is_on = False
        self._function_mode = mode_stacks.TellingFunctions(self.function)
        self._operator_mode = _Operators(self.operator)
        self._undo = contextlib.ExitStack()
        self._info = cache(_Info)
        self._by_node: dict[int, Row] = {}  # where the backward passes of casts count, by the numbers of their nodes
        # Casts of half tensors to wider types by their memory: its reference, and their version counters.
        self._widened: dict[int, tuple[StorageWeakRef, int]] = {}
        self._decorated: set[Any] = set()
        self._session: weakref.ref[Any] | None = None
        self._rulings: Rulings | None = None
        self._has_masters = False
        self._missed: dict[str, None] = {}  # what was not recorded, each sentence once

    def __enter__(self) -> CallRecorder:
        """Begins to record.

        Raises:
            UsageError: another report is open in this process.
        """
        if cast_observers.observer is not None:
            raise UsageError(
                "a report was begun inside the block of another one; expected one at a time in a process. End the "
                "outer block first."
            )
        casting_mode.reported_functions()  # its calls must not be recorded
        _costs()
        self._ident = threading.get_ident()
        undo, module = self._undo, torch.nn.modules.module
        cast_observers.observer = self
        undo.callback(setattr, cast_observers, "observer", None)
        for hook in (
            module.register_module_forward_pre_hook(self._enter_module),
            module.register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True),
        ):
            undo.callback(hook.remove)
            undo.callback(module._global_forward_hooks_with_kwargs.pop, hook.id, None)  # torch forgets it
        for stack, mode in ((mode_stacks.FUNCTIONS, self._function_mode), (mode_stacks.OPERATORS, self._operator_mode)):
            stack.insert(mode)
            undo.callback(stack.remove, mode)
        # torch warns of hooks of all modules at each call of a compiled one; these look through the compiled one.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        undo.callback(_remove_filter, warnings.filters[0])
        self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        self._undo.close()
        self._by_node.clear()
        self._widened.clear()

    def as_dict(self) -> dict[str, Any]:
        """Returns what was recorded so far as plain data; waits for casts on GPUs that still run."""
        rows = self._rows.read()
        functions = {row.function for row in rows}
        rules = {} if self._rulings is None else self._rulings.of(functions)
        rules |= dict.fromkeys(self._decorated & functions, "decorated")
        return {
            "totals": report_rows.totals(rows),
            "functions": report_rows.functions(rows, rules),
            "lines": report_rows.lines(rows),
            "misaligned": report_rows.misaligned(self._rows.products, self._modules.name_of),
            "modules": self._modules.as_dicts(self._has_masters),
            "notes": list(self._missed),
        }

    @property
    def seconds(self) -> float:
        """An estimate of the time that the recording took so far; waits for casts on GPUs that still run."""
        counts: dict[str, int] = report_rows.totals(self._rows.read())
        counts |= {"operators": self.operators, "modules": self._modules.count}
        return sum((seconds * counts[kind] for kind, seconds in _costs().items()), 0.0)

    # Functions

    def function(self, run: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs a torch function that torch reports to the mode."""
        thread, function = self._thread, unwrapped(run)
        if thread.wrapped is function:  # `call` has noted it
            thread.wrapped = None
            return run(*args, **kwargs)
        if not self._is_watching() or (info := self._info(function)).is_metadata or self._is_hidden():
            return run(*args, **kwargs)
        frame: Any = sys._getframe(2)
        if frame.f_code is _ASKS_MODES:  # a function in Python has called the mode: the caller is behind it
            frame = frame.f_back.f_back
        if info.is_operator_of_amp or (callers.owner_of(frame) is Code.AMP and not info.is_backward):
            return self._run_for_amp(run, args, kwargs, frame)
        called = operator_called(function, frame) if info.may_be_operator else function
        return self._run(called, info, run, args, kwargs, frame)

    def _run(self, function: Any, info: _Info, run: Any, args: _Args, kwargs: _Kwargs, frame: types.FrameType) -> Any:
        """Runs a function and counts the call.

        Args:
            function: the function to count.
            info: what is known of it.
            run: what to call in its place.
            args: its arguments.
            kwargs: its keyword arguments.
            frame: the frame that called it.
        """
        thread = self._thread
        row = self._rows.row(function, callers.users_frame(frame))
        if not row.types and callers.is_compiled(frame):
            self._missed[_COMPILED] = None
        with _unseen():
            given = _dtypes((args, kwargs)) if kwargs else _dtypes(args)
            # Not for a backward pass, whose results would all stay alive until its end.
            is_autocast = info.is_of_torch and not info.casts and _is_any_autocast_enabled() and not is_in_region()
            known = {id(each): each for each in tensors_in((args, kwargs))} if is_autocast else None
        around, thread.call = thread.call, _Call(row, info.is_of_torch, known)
        call = thread.call
        try:
            result = run(*args, **kwargs)
        finally:
            thread.call = around
            around.ran += call.ran
        # Only amp's wrappers show the calls that torch's own code makes: these count if amp casts for them.
        is_of_user = not around.is_of_torch
        if call.casts or (is_of_user and (call.ran or (isinstance(result, Tensor) and not info.is_getter))):
            with _unseen():
                row.numbers.calls += 1
                row.types[given, _dtypes(result)] += 1
        return result

    def _run_for_amp(self, function: Any, args: _Args, kwargs: _Kwargs, frame: types.FrameType) -> Any:
        """Runs a function that amp's own code calls: it is none of the user's calls, but may be a cast of a model's."""
        if function is Tensor.to and _is_in_hook_of_model(frame):
            row = self._rows.row(f"forward of {self._modules.last}", callers.users_frame(frame))
            if row.forward != self._modules.forward:
                row.forward = self._modules.forward
                row.numbers.calls += 1
            made = self._cast(row, args[0], lambda: function(*args, **kwargs))
            with _unseen():
                row.types[_dtypes(args[0]), _dtypes(made)] += 1
            return made
        with self._thread.own():
            return function(*args, **kwargs)

    def _is_watching(self) -> bool:
        """Returns True if calls of this thread are recorded here."""
        return self._is_on and not self._thread.is_own and not (pauses.paused or pauses.hidden)

    def _is_hidden(self) -> bool:
        """Returns True if this thread is traced, transformed or captured, so that operators run in other ways."""
        why = _TRACED if is_recording() else _CAPTURED if is_capturing() else None
        if why is not None:
            self._missed[why] = None
        return why is not None

    def _is_here(self) -> bool:
        """Returns True in the thread that is recorded, and in its backward passes."""
        return threading.get_ident() == self._ident or _current_graph_task_id() != -1

    # Calls and casts of amp's, as `cast_observers` has them

    def is_calling(self, function: object) -> bool:
        """Returns True if the wrapper of a function is to go on by itself."""
        thread = self._thread
        if thread.expected is function:
            thread.expected = None
            return True
        return not (self._is_watching() and self._is_here()) or self._is_hidden()

    def call(self, function: Any, wrapper: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
        """Calls a wrapper, and counts the call with the arguments of the caller."""
        self._note_session()
        if decoration_of(wrapper) is not None:
            self._decorated.add(function)
        info = self._info(function)
        run = partial(self._call_wrapper, function, info, wrapper)
        return self._run(function, info, run, args, kwargs, sys._getframe(2))

    def _call_wrapper(self, function: Any, info: _Info, wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        thread, mode = self._thread, self._function_mode
        thread.expected = function
        if info.is_of_torch and mode_stacks.FUNCTIONS.modes()[-1:] == [mode]:
            # As in a call that torch reports: no mode is on while torch's own code runs. Amp is faster so, as well.
            mode_stacks.FUNCTIONS.pop()
            try:
                return wrapper(*args, **kwargs)
            finally:
                mode_stacks.FUNCTIONS.push(mode)
        thread.wrapped = function
        try:
            return wrapper(*args, **kwargs)
        finally:
            thread.wrapped = thread.expected = None

    def cast(self, tensor: Tensor, make: Callable[[], _Casts]) -> _Casts:
        """Makes one or several casts, and counts them for the call that is running."""
        if not (self._is_watching() and self._is_here()) or self._is_hidden():
            return make()
        row = self._thread.call.row
        if row is None:
            row = self._rows.row(Tensor.to, callers.users_frame(sys._getframe(1)))
        return self._cast(row, tensor, make)

    def _cast(self, row: Row, tensor: Tensor, make: Callable[[], _Casts]) -> _Casts:
        with _unseen():
            source, is_on_gpu = tensor.dtype, tensor.is_cuda
        # Below the recorder's own modes: they would take ten times as long as a small cast, and count in its time.
        modes = mode_stacks.OPERATORS.without(self._operator_mode), mode_stacks.FUNCTIONS.without(self._function_mode)
        with self._thread.own(), modes[0], modes[1]:
            made: Any = self._rows.timed(row, is_on_gpu, make)
        with _unseen():
            for each in [made] if isinstance(made, Tensor) else made:
                self._note_cast(row, each, None if each.grad_fn is None else each.grad_fn._sequence_nr())
                self._modules.note_casts(bytes_of(each))
            if isinstance(made, Tensor):
                self._note_undone(row, tensor, source, made)
        return made  # type: ignore[no-any-return]

    def hit(self, kept: list[Tensor]) -> None:
        """Counts uses of kept casts for the call that is running."""
        call = self._thread.call
        row = call.row
        if row is None or not (self._is_watching() and self._is_here()):
            return
        call.casts += len(kept)
        with _unseen():
            row.numbers.cache_hits += len(kept)
            row.numbers.cache_hit_bytes += sum(map(bytes_of, kept))

    def _note_cast(self, row: Row, made: Tensor, node: int | None) -> None:
        """Counts a cast, and has its backward pass counted, which the node of this number runs."""
        row.numbers.casts += 1
        row.numbers.cast_bytes += bytes_of(made)
        self._thread.call.casts += 1
        if node is not None:
            remember(self._by_node, node, row)

    def _note_undone(self, row: Row | None, tensor: Tensor, source: torch.dtype, made: Tensor) -> None:
        """Notes a cast from half to a wider type, and counts one of its result back to half; none without a row."""
        if tensor.layout is not torch.strided or made.layout is not torch.strided:
            return
        widened = self._widened
        if source in HALVES and made.dtype not in HALVES:
            if len(widened) > _REMEMBERED:
                self._widened = widened = {key: each for key, each in widened.items() if not each[0].expired()}
            storage = StorageWeakRef(made.untyped_storage())
            widened[storage.cdata] = storage, _version_of(made)
        elif made.dtype in HALVES and source not in HALVES and row is not None and type(tensor) is not Parameter:
            known = widened.get(tensor.untyped_storage()._cdata)
            if known is not None and not known[0].expired() and known[1] == _version_of(tensor):  # not written to since
                row.undone += 1

    def _note_session(self) -> None:
        live = runtime.live
        if live is not None and (self._session is None or self._session() is not live):
            self._session, self._rulings = weakref.ref(live), Rulings(live)
            self._has_masters = bool(live.settings.properties.master_weights)

    # Operators

    def operator(self, op: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs an operator that torch reports to the mode."""
        if not self._is_on or pauses.paused or pauses.hidden or op.namespace == "profiler":  # the profiler's are labels
            return op(*args, **kwargs)
        thread = self._thread
        self.operators += 1
        if thread.is_own:
            return op(*args, **kwargs)
        call = thread.call
        call.ran += 1
        if op is _TO_COPY:
            result = self._copy(args, kwargs)
        else:
            if call.known is not None and call.row is not None:
                with _unseen():
                    self._note_hits(call.row, call.known, args)
            result = self._run_fused(op, args, kwargs) if op in _FUSED else op(*args, **kwargs)
        running = self._modules.running
        module = running[-1] if running and running[-1].task == _current_graph_task_id() else None
        if call.known is not None or module is not None:
            with _unseen():
                self._note_results(op, args, result, call, module)
        return result

    def _note_hits(self, row: Row, known: dict[int, Tensor], args: _Args) -> None:
        """Counts half tensors among an operator's arguments that nothing in this call has made."""
        for tensor in tensors_in(args):
            if id(tensor) not in known:
                known[id(tensor)] = tensor
                if tensor.dtype in HALVES and tensor.grad_fn is not None and tensor.grad_fn.name() == _CASTS_BACK:
                    row.numbers.cache_hits += 1
                    row.numbers.cache_hit_bytes += tensor.nbytes

    def _run_fused(self, op: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs a fused kernel, which has autocast cast for the operators that it calls itself.

        torch has turned autocast off for the mode, as autocast has usually cast before.
        """
        with contextlib.ExitStack() as guards:
            for key in self._thread.fused_casts:
                self._missed[_FUSED_CASTS] = None
                guards.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            return op(*args, **kwargs)

    def _note_results(self, op: Any, args: _Args, result: Any, call: _Call, module: Running | None) -> None:
        results = _tensors_of(result)
        if call.known is not None:
            call.known.update((id(each), each) for each in results)
        if module is None:
            return
        memory = _memory_of(op)
        if memory is not None:
            module.note_results(results, memory)
        sizes = _PRODUCTS.get(op)
        if sizes is not None and results and results[0].dtype in HALVES:
            size, pads = sizes(args, results[0])
            if size != pads:
                self._rows.products[call.row, module.module, results[0].dtype, size, pads] += 1

    def _copy(self, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs the operator below all casts, and counts one by autocast, or the backward pass of one that counted."""
        thread, dtype = self._thread, kwargs.get("dtype")
        with _unseen():
            tensor: Tensor = args[0]
            source, is_on_gpu = tensor.dtype, tensor.is_cuda
            if dtype is source or dtype not in CASTABLE or source not in CASTABLE:
                return _TO_COPY(*args, **kwargs)
            row, number = None, None
            node: Any = _current_autograd_node() if _current_graph_task_id() != -1 else None
            if node is not None and node.name() == _CASTS_BACK:
                row = self._by_node.get(node._sequence_nr())
            elif thread.call.known is not None:
                row = thread.call.row
                if torch.is_grad_enabled() and tensor.requires_grad:
                    number = torch._C._autograd._get_sequence_nr() - 1  # autograd has just made the node
        with _unseen():
            made = self._rows.timed(row, is_on_gpu, partial(_TO_COPY, *args, **kwargs))
            if row is not None:
                self._note_cast(row, made, number)
            if node is None:
                if row is not None:
                    self._modules.note_casts(bytes_of(made))
                self._note_undone(row, tensor, source, made)
        return made

    # Modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_watching():
            return
        if callers.is_compiled_module(module):
            self._missed[_COMPILED] = None
        if isinstance(module, WRAPPERS) or callers.is_around_compiled(module):
            return
        task = _current_graph_task_id()
        if task == -1 and threading.get_ident() != self._ident:
            self._missed[_THREADS] = None
            return
        self._note_session()
        mode, on_leave = self._function_mode, None
        with _unseen():
            is_on = mode in mode_stacks.FUNCTIONS.modes()
            if task != -1 and not is_on:  # torch has taken the mode off for the call of backward()
                mode_stacks.FUNCTIONS.insert(mode)
                on_leave = partial(mode_stacks.FUNCTIONS.remove, mode)
            elif is_on and not module.training and isinstance(module, _FAST_PATHS) and _has_fast_path():
                mode_stacks.FUNCTIONS.remove(mode)  # torch would take other kernels
                on_leave = partial(mode_stacks.FUNCTIONS.insert, mode)
                self._thread.fused_casts = [
                    key for device, key in _AUTOCAST_KEYS.items() if torch.is_autocast_enabled(device)
                ]
            self._modules.enter(module, list(tensors_in(args)), task, on_leave)

    def _leave_module(self, module: nn.Module, _: Any, *rest: Any) -> None:
        # If the forward raised, torch leaves out the keyword arguments.
        if self._modules.running:
            with _unseen():
                kwargs = rest[0] if len(rest) > 1 else {}
                self._modules.leave(module, list(tensors_in(kwargs)), list(tensors_in(rest[-1])))


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a function that is running.

    Attributes:
        row: where it counts; None outside of all calls.
        is_of_torch: True if the function is torch's, and runs no code of the user's.
        known: tensors that it was given or made, by id; None if autocast is off. Others are casts that autocast kept,
            which torch reports to no mode.
        ran: number of operators that it has run.
        casts: number of casts, and uses of kept ones, for it.
    """

    row: Row | None = None
    is_of_torch: bool = False
    known: dict[int, Tensor] | None = None
    ran: int = 0
    casts: int = 0


class _Thread(threading.local):
    """What a thread is running.

    Attributes:
        call: the innermost call.
        is_own: True in amp's own arithmetic.
        expected: function whose wrapper is called next, and is not to report the call again.
        wrapped: function that a wrapper is calling, and torch is not to report again.
        fused_casts: keys of the autocast that was on when the last module with fused kernels began.
    """

    def __init__(self) -> None:
        self.call = _Call()
        self.is_own = False
        self.expected: Any = None
        self.wrapped: Any = None
        self.fused_casts: list[Any] = []

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Counts nothing in this thread until the block ends."""
        before, self.is_own = self.is_own, True
        try:
            yield
        finally:
            self.is_own = before


class _Info:
    """What is known of a function.

    Attributes:
        is_metadata: True if it reads neither values nor types.
        is_getter: True if it reads or sets an attribute.
        casts: True if users cast by it.
        is_backward: True if it runs a backward pass, and with it code of the user's.
        is_of_torch: True if it runs no code of the user's.
        may_be_operator: True if torch reports it in place of an operator such as ``+``.
        is_operator_of_amp: True if it is one of amp's kernels.
    """

    def __init__(self, function: Any) -> None:
        name = getattr(function, "__name__", "")
        home = str(getattr(function, "__module__", None) or "torch")
        self.is_metadata = function in casting_mode.METADATA
        self.is_getter = name in ("__get__", "__set__", "__delete__")
        self.casts = name in _CASTS_OF_USERS
        self.is_backward = function in _BACKWARDS
        self.is_of_torch = home.partition(".")[0] == "torch" and not self.is_backward
        self.may_be_operator = function in casting_mode.reported_functions().values()
        self.is_operator_of_amp = str(getattr(function, "_qualified_op_name", "")).startswith("ampatch::")


class _Operators(mode_stacks.TellingOperators, ObservingMode):
    """Reports operators to a `CallRecorder`."""


def _remove_filter(ours: Any) -> None:
    if ours in warnings.filters:
        warnings.filters.remove(ours)  # type: ignore[attr-defined]


def _stop_in_child() -> None:
    """Stops recording in a process that was forked, such as a worker of a DataLoader."""
    if isinstance(cast_observers.observer, CallRecorder):
        cast_observers.observer._is_on, cast_observers.observer = False, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)


@cache
def _costs() -> dict[str, float]:
    """Measures what recording costs on this machine, once in a process; takes a few milliseconds.

    The kinds of work alternate, since code that repeats alone stays in the CPU's caches, as in no user's step. No mode
    of other code is on meanwhile, no cast list applies, and no random numbers are drawn.

    Returns:
        The seconds that an operator, a call, a cast of amp's and a module add each.
    """
    recorder = CallRecorder()  # watches this thread only, and nothing of amp's
    recorder._ident, recorder._is_on = threading.get_ident(), True
    module = nn.Identity()
    x = torch.ones(2, 4, device="cpu", requires_grad=True)

    def cast() -> Tensor:
        return x.to(torch.bfloat16)

    def run_module() -> None:
        recorder._enter_module(module, (x,))
        recorder._leave_module(module, (x,), {}, x)

    recorded: dict[str, Callable[[], object]] = {
        "operators": lambda: loss.backward(retain_graph=True),
        "calls": lambda: F.gelu(x),
        "casts": lambda: recorder.cast(x, cast),
        "modules": run_module,
    }
    # Without a session there are no casts, and turning them off would import torch's compiler.
    off = contextlib.nullcontext() if runtime.live is None else WithoutCasts()
    with mode_stacks.without_modes(), off, torch.inference_mode(False), torch.enable_grad():
        loss = functools.reduce(lambda y, _: F.gelu(y) + x, range(4), x).sum()
        plain = _medians({**recorded, "casts": cast, "modules": int})
        with recorder._operator_mode, recorder._function_mode:
            added = {kind: each - plain[kind] for kind, each in _medians(recorded).items()}
            before = recorder.operators
            loss.backward(retain_graph=True)
    added["operators"] /= recorder.operators - before
    for kind in ("calls", "casts"):  # each runs an operator
        added[kind] -= added["operators"]
    return {kind: max(0.0, each) for kind, each in added.items()}


def _medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median time of each kind of work, in seconds."""
    times: dict[str, list[float]] = {kind: [] for kind in works}
    for _ in range(_ROUNDS):
        for kind, work in works.items():
            begin = time.perf_counter()
            work()
            times[kind].append(time.perf_counter() - begin)
    return {kind: statistics.median(several) for kind, several in times.items()}


def remember(found: dict[int, _V], number: int, value: _V) -> None:
    """Adds what belongs to the number of a node in the graph, and forgets the oldest of very many."""
    found[number] = value
    if len(found) > _REMEMBERED:
        del found[next(iter(found))]


_THREADS = "Modules ran in other threads than the one that began the report; what these threads ran was not recorded."
_COMPILED = (
    "Code that torch.compile compiled ran uncompiled while the report recorded, as torch leaves code under modes."
)
_TRACED = "Calls under tracers and transforms (torch.export, torch.jit.trace, torch.func) were not recorded."
_FUSED_CASTS = (
    "torch.autocast cast inside the fused kernels of transformer layers in eval mode; these casts were not counted."
)
_CAPTURED = "Calls that a CUDA graph captures were not recorded, nor what its replays run."

_ASKS_MODES = torch.overrides.handle_torch_function.__code__
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
#: Modules that have other kernels without gradients, and look for modes before they use them.
_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
#: The kernels of these modules. They call operators that autocast casts for.
_FUSED = frozenset({_aten._transformer_encoder_layer_fwd.default, _aten._native_multi_head_attention.default})
_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
#: What torch's functions see of this block: no function mode. Reading an attribute of a tensor is a function.
_unseen = torch._C.DisableTorchFunction
_has_fast_path = torch.backends.mha.get_fastpath_enabled


def _dtypes(value: Any) -> tuple[torch.dtype, ...]:
    """Returns the types of the tensors in arguments or in a result, in order."""
    if isinstance(value, Tensor):
        return (value.dtype,)
    return tuple([each.dtype for each in tensors_in(value)]) if isinstance(value, (tuple, list, dict)) else ()


def _tensors_of(result: Any) -> list[Tensor]:
    """Returns the dense tensors in an operator's results."""
    found = [result] if isinstance(result, Tensor) else tensors_in(result)
    return [each for each in found if each.layout is torch.strided and not each.is_nested]


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@cache
def _memory_of(op: Any) -> bool | None:
    """Returns whether an operator's results are new memory; None if they are views of its arguments."""
    # torch.cond and the like are no overloads; they run other operators.
    if not isinstance(op, OpOverload) or is_view(op):
        return None
    return all(each.alias_info is None for each in op._schema.returns)


#: m, k and n of a product, and what tensor cores pad them to.
_Sizes = tuple[tuple[int, int, int], tuple[int, int, int]]


def _sizes_of_operands(a: Tensor, b: Tensor) -> _Sizes:
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    return (m, k, n), (_padded(m), _padded(k), _padded(n))


def _sizes_of_convolution(args: _Args, result: Tensor) -> _Sizes:
    """Returns the sizes of a convolution as of a product; its m, the places of the result, need no alignment."""
    weight, is_transposed = args[1], args[6]
    inputs, outputs = weight.shape[1], weight.shape[0]
    if is_transposed:
        inputs, outputs = outputs, inputs
    places = result.numel() // (result.shape[1] or 1)
    return (places, inputs, outputs), (places, _padded(inputs), _padded(outputs))


def _padded(size: int) -> int:
    return size + -size % _ALIGNED


_PRODUCTS: dict[Any, Callable[[tuple[Any, ...], Tensor], _Sizes]] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), lambda args, _: _sizes_of_operands(*args[:2])),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), lambda args, _: _sizes_of_operands(*args[1:3])),
    _aten.convolution.default: _sizes_of_convolution,
}

_MODELS_HOOKS = frozenset(
    {"ampatch.patching.adopted_model", "ampatch.patching.cast_labels", "ampatch.interfaces.inference_copy"}
)


def _is_in_hook_of_model(frame: types.FrameType | None) -> bool:
    """Returns True if a frame of ampatch's casts a model's arguments or results."""
    while frame is not None and callers.owner_of(frame) is Code.AMP:
        if frame.f_globals.get("__name__") in _MODELS_HOOKS:
            return True
        frame = frame.f_back
    return False
