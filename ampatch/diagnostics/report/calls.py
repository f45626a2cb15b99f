"""Records the calls, casts and modules of a report.

Owns the observer of amp's casts; the recorder tells it every function, operator and module. Must never change a result,
nor which casts amp makes and keeps, nor sync with a device before it is asked for numbers.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from timeit import timeit
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ampatch.casting import cast_observers, nested
from ampatch.casting.nested import CASTABLE, tensors_in
from ampatch.diagnostics.recorder import callers, mode_stacks, operands
from ampatch.diagnostics.recorder.callers import Code
from ampatch.diagnostics.recorder.functions import Rulings, operator_called
from ampatch.diagnostics.recorder.operands import bytes_of, is_view
from ampatch.diagnostics.recorder.recorder import Recorder, Running, Thread, hidden, unseen
from ampatch.diagnostics.report import rows as report_rows
from ampatch.diagnostics.report.modules import Forward, Modules
from ampatch.diagnostics.report.rows import Row, Rows
from ampatch.errors import UsageError
from ampatch.function_wrapper import unwrapped
from ampatch.half_types import HALVES
from ampatch.patching import casting_mode
from ampatch.patching.adopted_model import WRAPPERS
from ampatch.runtime import decoration_of, runtime
from ampatch.switch import WithoutCasts, is_in_region
from ampatch.torch_private.autograd import current_graph_task_id, current_node, next_sequence_number, sequence_number
from ampatch.torch_private.modes import is_any_autocast_enabled
from ampatch.torch_private.operators import QUALIFIED_NAME, TO_COPY, OpOverload
from ampatch.torch_private.tensors import storage_id

_Casts = TypeVar("_Casts", Tensor, list[Tensor])
_V = TypeVar("_V")
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Widened = dict[int, tuple[StorageWeakRef, tuple[int, ...]]]

_CASTS_BACK = "ToCopyBackward0"
#: The code that casts the arguments and results of models and of their parts.
_CASTS_OF_MODELS = vars(nested)
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


class CallRecorder(Recorder):
    """Records what one thread calls, and the backward passes that it starts, until its block ends.

    Attributes:
        operators: number of operators that it has recorded; amp's own casts are none.
    """

    thread: _Thread

    def __init__(self) -> None:
        super().__init__()
        self.thread = _Thread()
        self.operators = 0
        self._rows = Rows()
        self._modules = Modules()
        self._info = cache(_Info)
        self._by_node: dict[int, Row] = {}  # where the backward passes of casts count, by the numbers of their nodes
        # Tensors that were cast from half to a wider type, by their memory: its reference, and their version counters.
        self._widened: _Widened = {}
        self._decorated: set[Any] = set()
        self._session: weakref.ref[Any] | None = None
        self._rulings: Rulings | None = None
        self._master_bytes = 0

    def __enter__(self) -> Self:
        """Begins to record.

        Raises:
            UsageError: another report is open in this process.
        """
        if cast_observers.observer is not None:
            raise UsageError(
                "a report was begun inside the block of another one; expected one at a time, as two would watch each "
                "other. End the outer block first, or read that report while it is open. A script under `ampatch run "
                "--report` is watched as a whole: leave out one of the two."
            )
        casting_mode.reported_functions()  # its calls must not be recorded
        _costs()
        cast_observers.observer = self
        self._undo.callback(setattr, cast_observers, "observer", None)
        return super().__enter__()

    def stop(self) -> None:
        """Stops recording. What was recorded stays."""
        super().stop()
        self._by_node.clear()
        self._widened.clear()

    def as_dict(self) -> dict[str, Any]:
        """Returns what was recorded so far as plain data; waits for casts on GPUs that still run."""
        rows = self._rows.read()
        functions = {row.function for row in rows}
        rules = {} if self._rulings is None else self._rulings.of(functions)
        rules |= dict.fromkeys(self._decorated & functions, "decorated")
        formats = {} if self._rulings is None else self._rulings.formats_of(functions)
        return {
            "totals": report_rows.totals(rows),
            "functions": report_rows.functions(rows, rules, formats),
            "lines": report_rows.lines(rows),
            "misaligned": report_rows.misaligned(self._rows.products, self._modules.names()),
            "modules": self._modules.as_dicts(self._master_bytes),
            "notes": list(self.missed),
        }

    @property
    def seconds(self) -> float:
        """An estimate of the time that the recording took so far; waits for casts on GPUs that still run."""
        counts: dict[str, int] = report_rows.totals(self._rows.read())
        counts |= {"operators": self.operators, "modules": self._modules.count}
        return sum((seconds * counts[kind] for kind, seconds in _costs().items()), 0.0)

    # Functions

    def function(self, run: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs a torch function, and counts the call."""
        thread, function = self.thread, unwrapped(run)
        if thread.wrapped is function:  # `call` has noted it
            thread.wrapped = None
            return run(*args, **kwargs)
        info = self._info(function)
        if info.is_metadata or self.is_traced():
            return run(*args, **kwargs)
        frame: Any = sys._getframe(2)
        if frame.f_code is _ASKS_MODES:  # a function in Python has called the mode: the caller is behind it
            frame = frame.f_back.f_back
        if info.is_operator_of_amp or (callers.owner_of(frame) is Code.AMP and not info.is_backward):
            return self._run_for_amp(run, args, kwargs, frame)
        return self._run(operator_called(function, frame), info, run, args, kwargs, frame)

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
        thread = self.thread
        row = self._rows.row(function, callers.users_frame(frame))
        if not row.types and callers.is_compiled(frame):
            self.missed[_COMPILED] = None
        with unseen():
            given = _dtypes((args, kwargs)) if kwargs else _dtypes(args)
            # Not for a backward pass, whose results would all stay alive until its end.
            is_autocast = info.is_of_torch and not info.casts and is_any_autocast_enabled() and not is_in_region()
            known = {id(each): each for each in tensors_in((args, kwargs))} if is_autocast else None
        around, thread.call = thread.call, _Call(row, info.is_of_torch, known)
        call = thread.call
        try:
            result = run(*args, **kwargs)
        finally:
            thread.call = around
            around.ran |= call.ran
        # Only amp's wrappers show the calls that torch's own code makes: these count if amp casts for them.
        is_of_user = not around.is_of_torch
        if call.casts or (is_of_user and (call.ran or (isinstance(result, Tensor) and not info.is_getter))):
            with unseen():
                row.calls += 1
                row.types[given, _dtypes(result)] += 1
        return result

    def _run_for_amp(self, function: Any, args: _Args, kwargs: _Kwargs, frame: types.FrameType) -> Any:
        """Runs a function that amp's own code calls: it is none of the user's calls, but may be a cast of a model's."""
        if function is Tensor.to and frame.f_globals is _CASTS_OF_MODELS:
            last = self._modules.last
            name = "" if last is None else last.module.class_name
            row = self._rows.row(f"forward of {name}", callers.users_frame(frame))
            if row.forward is not last:
                row.forward = last
                row.calls += 1
            made = self._cast(row, args[0], lambda: function(*args, **kwargs))
            with unseen():
                row.types[_dtypes(args[0]), _dtypes(made)] += 1
            return made
        with hidden():
            return function(*args, **kwargs)

    # Calls and casts of amp's, as `cast_observers` has them

    def is_calling(self, function: object) -> bool:
        """Returns True if the wrapper of a function is to go on by itself."""
        thread = self.thread
        if thread.expected is function:
            thread.expected = None
            return True
        return self.is_elsewhere()

    def call(self, function: Any, wrapper: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
        """Calls a wrapper, and counts the call with the arguments of the caller."""
        self._note_session()
        if decoration_of(wrapper) is not None:
            self._decorated.add(function)
        info, thread, functions = self._info(function), self.thread, mode_stacks.FUNCTIONS

        def run(*args: Any, **kwargs: Any) -> Any:
            # As in a call that torch reports: no mode is on while torch's own code runs. This is also faster.
            taken = functions.pop() if info.is_of_torch and functions.modes()[-1:] == [self.function_mode] else None
            thread.expected, thread.wrapped = function, function if taken is None else None
            try:
                return wrapper(*args, **kwargs)
            finally:
                thread.expected = thread.wrapped = None
                if taken is not None:
                    functions.push(taken)

        return self._run(function, info, run, args, kwargs, sys._getframe(2))

    def cast(self, tensor: Tensor, make: Callable[[], _Casts]) -> _Casts:
        """Makes one or several casts, and counts them for the call that is running."""
        if self.is_elsewhere():
            return make()
        row = self.thread.call.row or self._rows.row(Tensor.to, callers.users_frame(sys._getframe(1)))
        return self._cast(row, tensor, make)

    def _cast(self, row: Row, tensor: Tensor, make: Callable[[], _Casts]) -> _Casts:
        with unseen():
            is_on_gpu = tensor.is_cuda
        # Below the recorder's own modes: they would take ten times as long as a small cast, and count in its time.
        modes = mode_stacks.OPERATORS.without(self.operator_mode), mode_stacks.FUNCTIONS.without(self.function_mode)
        with hidden(), modes[0], modes[1]:
            made: Any = self._rows.timed(row, is_on_gpu, make)
        with unseen():
            for each in [made] if isinstance(made, Tensor) else made:
                self._note_cast(row, each, None if each.grad_fn is None else sequence_number(each.grad_fn))
            if isinstance(made, Tensor):
                row.undone += _undoes(self._widened, tensor, made)
        return made  # type: ignore[no-any-return]

    def hit(self, kept: list[Tensor]) -> None:
        """Counts uses of kept casts for the call that is running."""
        call = self.thread.call
        if call.row is not None and self.is_told():
            call.casts += len(kept)
            with unseen():
                call.row.add_hits(kept)

    def _note_cast(self, row: Row, made: Tensor, node: int | None) -> None:
        """Counts a cast, and has its backward pass counted, which the node of this number runs."""
        size, running = bytes_of(made), self.thread.innermost()
        row.casts += 1
        row.cast_bytes += size
        self.thread.call.casts += 1
        if running is not None and running.noted is not None:
            running.noted.cast_bytes += size
        if node is not None:
            remember(self._by_node, node, row)

    def _note_session(self) -> None:
        live = runtime.live
        if live is not None and (self._session is None or self._session() is not live):
            self._session, self._rulings = weakref.ref(live), Rulings(live)
            self._master_bytes = live.settings.properties.master_bytes
            self._modules.sessions += 1

    # Operators

    def operator(self, op: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs an operator, and counts it for the function and the module that run."""
        if op.namespace == "profiler":  # the profiler's are labels
            return op(*args, **kwargs)
        self.operators += 1
        call = self.thread.call
        call.ran = True
        if op is TO_COPY:
            result = self._copy(args, kwargs)
        else:
            if call.known is not None:
                with unseen():
                    call.note_hits(args)
            result = op(*args, **kwargs)
        running = self.thread.innermost()
        forward = None if running is None else running.noted
        if call.known is not None or forward is not None:
            with unseen():
                self._note_results(op, args, result, call, forward)
        return result

    def _note_results(self, op: Any, args: _Args, result: Any, call: _Call, forward: Forward | None) -> None:
        results = operands.tensors_in(result)
        if call.known is not None:
            call.known.update((id(each), each) for each in results)
        if forward is None:
            return
        memory = _memory_of(op)
        if memory is not None:
            forward.note_results(results, memory)
        if op in _PRODUCTS and results and results[0].dtype in HALVES:
            m, k, n = size = _size_of(op, args, results[0])
            pads = m if op is _CONVOLUTION else _padded(m), _padded(k), _padded(n)
            if size != pads:
                self._rows.products[call.row, forward.module, results[0].dtype, size, pads] += 1

    def _copy(self, args: _Args, kwargs: _Kwargs) -> Any:
        """Runs the operator below all casts, and counts one by autocast, or the backward pass of one that counted."""
        thread, dtype = self.thread, kwargs.get("dtype")
        with unseen():
            tensor: Tensor = args[0]
            if dtype is tensor.dtype or dtype not in CASTABLE or tensor.dtype not in CASTABLE:
                return TO_COPY(*args, **kwargs)
            row, number = None, None
            node: Any = current_node() if current_graph_task_id() != -1 else None
            if node is not None and node.name() == _CASTS_BACK:
                row = self._by_node.get(sequence_number(node))
            elif thread.call.known is not None:
                row = thread.call.row
                if torch.is_grad_enabled() and tensor.requires_grad:
                    number = next_sequence_number() - 1  # autograd has just made the node
            made = self._rows.timed(row, tensor.is_cuda, partial(TO_COPY, *args, **kwargs))
            if row is not None:
                self._note_cast(row, made, number)
            if node is None and _undoes(self._widened, tensor, made) and row is not None:
                row.undone += 1
        return made

    # Modules

    def enters(self, module: nn.Module, args: Any) -> Forward | None:
        """Notes that a module's forward pass begins, unless the module is around the user's model."""
        if callers.is_compiled_module(module):
            self.missed[_COMPILED] = None
        if isinstance(module, WRAPPERS) or callers.is_around_compiled(module):
            return None
        self._note_session()
        outermost = next((each.noted for each in self.thread.running if each.noted is not None), None)
        return self._modules.enter(module, outermost, list(tensors_in(args)))

    def leaves(self, ended: Running, told: tuple[Any, ...]) -> None:
        """Notes that a module's forward pass has ended."""
        if ended.noted is not None:
            kwargs = told[0] if len(told) > 1 else {}
            self._modules.leave(ended.module, ended.noted, list(tensors_in(kwargs)), list(tensors_in(told[-1:])))


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a function that is running.

    Attributes:
        row: where it counts; None outside of all calls.
        is_of_torch: True if the function is torch's, and runs no code of the user's.
        known: tensors that it was given or made, by id; None if autocast is off. Others are casts that autocast kept,
            which torch reports to no mode.
        ran: True once it has run an operator.
        casts: number of casts, and uses of kept ones, for it.
    """

    row: Row | None = None
    is_of_torch: bool = False
    known: dict[int, Tensor] | None = None
    ran: bool = False
    casts: int = 0

    def note_hits(self, args: _Args) -> None:
        """Counts half tensors among an operator's arguments that nothing in this call has made."""
        row, known = self.row, self.known
        if row is None or known is None:
            return
        for tensor in tensors_in(args):
            if id(tensor) not in known:
                known[id(tensor)] = tensor
                if tensor.dtype in HALVES and tensor.grad_fn is not None and tensor.grad_fn.name() == _CASTS_BACK:
                    row.add_hits([tensor])


def _undoes(widened: _Widened, tensor: Tensor, made: Tensor) -> bool:
    """Notes a cast to a wider type; returns True for a cast back to half of one to which nothing has written since."""
    if tensor.layout is not torch.strided or made.layout is not torch.strided:
        return False
    if tensor.dtype in HALVES and made.dtype not in HALVES:
        storage = StorageWeakRef(made.untyped_storage())
        remember(widened, storage.cdata, (storage, operands.versions_of(made)))
    elif made.dtype in HALVES and tensor.dtype not in HALVES and type(tensor) is not Parameter:
        wide, versions = widened.get(storage_id(tensor.untyped_storage()), (None, ()))
        return wide is not None and not wide.expired() and versions == operands.versions_of(tensor)
    return False


class _Thread(Thread):
    """What a thread is running.

    Attributes:
        call: the innermost call.
        expected: function whose wrapper is called next, and is not to report the call again.
        wrapped: function that a wrapper is calling, and torch is not to report again.
    """

    call = _Call()
    expected: Any = None
    wrapped: Any = None


class _Info:
    """What is known of a function.

    Attributes:
        is_metadata: True if it reads neither values nor types.
        is_getter: True if it reads or sets an attribute.
        casts: True if users cast by it.
        is_backward: True if it runs a backward pass, and with it code of the user's.
        is_of_torch: True if it runs no code of the user's.
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
        self.is_operator_of_amp = str(getattr(function, QUALIFIED_NAME, "")).startswith("ampatch::")


@cache
def _costs() -> dict[str, float]:
    """Measures what recording costs on this machine, once in a process; takes a few milliseconds.

    The kinds of work alternate, since code that repeats alone stays in the CPU's caches, as in no user's step. No mode
    of other code is on meanwhile, no cast list applies, and no random numbers are drawn.

    Returns:
        The seconds that an operator, a call, a cast of amp's and a module add each.
    """
    recorder = CallRecorder()  # watches this thread only, and nothing of amp's
    recorder.is_open = True
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
        with recorder.operator_mode, recorder.function_mode:
            added = {kind: each - plain[kind] for kind, each in _medians(recorded).items()}
            before = recorder.operators
            loss.backward(retain_graph=True)
    added["operators"] /= recorder.operators - before
    for kind in ("calls", "casts"):  # each runs an operator
        added[kind] -= added["operators"]
    return {kind: max(0.0, each) for kind, each in added.items()}


def _medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median time of each kind of work, in seconds."""
    rounds = [{kind: timeit(work, number=1) for kind, work in works.items()} for _ in range(_ROUNDS)]
    return {kind: statistics.median(each[kind] for each in rounds) for kind in works}


def remember(found: dict[int, _V], number: int, value: _V) -> None:
    """Adds what belongs to the number of a node in the graph, and forgets the oldest of very many."""
    found[number] = value
    if len(found) > _REMEMBERED:
        del found[next(iter(found))]


_COMPILED = (
    "Code that torch.compile compiled ran uncompiled while the report recorded, as torch leaves code under modes."
)

_ASKS_MODES = torch.overrides.handle_torch_function.__code__
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


def _dtypes(value: Any) -> tuple[torch.dtype, ...]:
    """Returns the types of the tensors in arguments or in a result, in order."""
    if isinstance(value, Tensor):
        return (value.dtype,)
    return tuple([each.dtype for each in tensors_in(value)]) if isinstance(value, (tuple, list, dict)) else ()


@cache
def _memory_of(op: Any) -> bool | None:
    """Returns whether an operator's results are new memory; None if they are views of its arguments."""
    # torch.cond and the like are no overloads; they run other operators.
    if not isinstance(op, OpOverload) or is_view(op):
        return None
    return all(each.alias_info is None for each in op._schema.returns)


_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution.default
_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _CONVOLUTION})


def _size_of(op: Any, args: _Args, result: Tensor) -> tuple[int, int, int]:
    """Returns m, k and n of a product. The m of a convolution, the places of the result, needs no alignment."""
    if op is _CONVOLUTION:
        outputs, inputs = args[1].shape[:2]
        k, n = (outputs, inputs) if args[6] else (inputs, outputs)  # transposed or not
        return result.numel() // (result.shape[1] or 1), k, n
    a, b = args[-2:]  # behind what the product is added to
    return a.shape[-2], a.shape[-1], b.shape[-1]


def _padded(size: int) -> int:
    return size + -size % _ALIGNED
