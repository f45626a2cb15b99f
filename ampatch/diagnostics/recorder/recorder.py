"""Has torch tell of the functions, operators and modules that run in one thread, and in its backward passes.

Owns all that recordings have in common: two modes of torch, hooks on all modules, the modules that run in each thread,
and what is not recorded. Consumers are subclasses: they record what they are told. Must never change a result, nor
judge what runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ampatch.diagnostics.recorder.mode_stacks import FUNCTIONS, OPERATORS
from ampatch.torch_private import modes
from ampatch.torch_private.autograd import current_graph_task_id
from ampatch.torch_private.modes import TorchDispatchMode
from ampatch.torch_private.modules import global_forward_hooks_with_kwargs
from ampatch.torch_private.operators import FUSED_LAYERS
from ampatch.tracing import ObservingMode, is_capturing, is_recording

_THREADS = "Modules ran in other threads than the one that began the report; what these threads ran was not recorded."
_TRACED = "Calls under tracers and transforms (torch.export, torch.jit.trace, torch.func) were not recorded."
_CAPTURED = "Calls that a CUDA graph captures were not recorded, nor what its replays run."
_FUSED_CASTS = (
    "torch.autocast cast inside the fused kernels of transformer layers in eval mode; these casts were not counted."
)

#: Modules that have other kernels without gradients, and look for modes before they use them.
_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_has_fast_path = torch.backends.mha.get_fastpath_enabled
_HOOKS_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


@dataclass(frozen=True, slots=True)
class Running:
    """A module whose forward pass runs.

    Attributes:
        module: the module.
        task: the backward pass that recomputes it; -1 in a forward pass.
        has_gradients: True if gradients were enabled when it began.
        on_leave: puts the function mode back as it was before; None if it stayed as it was.
        noted: what the consumer notes of this pass.
    """

    module: nn.Module
    task: int
    has_gradients: bool
    on_leave: Callable[[], None] | None
    noted: Any


class Thread(threading.local):
    """What a thread is running.

    Attributes:
        running: the modules, from the outermost.
        fused_casts: keys of the autocast that was on when the last module with fused kernels began.
    """

    def __init__(self) -> None:
        self.running: list[Running] = []
        self.fused_casts: list[Any] = []

    def innermost(self) -> Running | None:
        """Returns the innermost module that runs; None in a backward pass that recomputes none."""
        running = self.running
        return running[-1] if running and running[-1].task == current_graph_task_id() else None


class Recorder:
    """Records what runs in one thread, and in the backward passes that it starts, until its block ends.

    A subclass records what `function`, `operator`, `enters` and `leaves` are told.

    Attributes:
        thread: what each thread is running.
        is_open: True between the begin and the end of the block; never in a process that was forked meanwhile.
        missed: what was not recorded, each sentence once.
    """

    #: True to be told of all that amp does: it then keeps no casts, as under modes of other code, and hides nothing.
    sees_amp = False

    def __init__(self) -> None:
        self.thread = Thread()
        self.is_open = False
        self.missed: dict[str, None] = {}
        self.function_mode = FunctionMode(self)
        self.operator_mode = (OperatorMode if self.sees_amp else _ModeWithoutAmp)(self)
        self._ident: int | None = None
        self._undo = contextlib.ExitStack()

    # What a consumer is told

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a torch function that torch reports to the mode."""
        return function(*args, **kwargs)

    def operator(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that torch reports to the mode."""
        return op(*args, **kwargs)

    def enters(self, module: nn.Module, args: Any) -> Any:
        """Hears that a module's forward pass begins, and returns what is to be noted of it."""

    def leaves(self, ended: Running, told: tuple[Any, ...]) -> None:
        """Hears that a module's forward pass has ended, whether it returned or raised.

        Args:
            ended: the module.
            told: its keyword arguments and its result; if it raised, not all of them.
        """

    # The block

    def __enter__(self) -> Self:
        undo, module = self._undo, torch.nn.modules.module
        self.is_open = True
        _open.add(self)
        undo.callback(module.register_module_forward_pre_hook(self._enter_module).remove)
        hook = module.register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True)
        undo.callback(hook.remove)
        undo.callback(global_forward_hooks_with_kwargs.pop, hook.id, None)  # torch forgets it
        # torch warns of such hooks at each call of a compiled module; these look through the compiled one. The comment
        # in the pattern tells this filter from another recorder's: Python keeps one of several equal filters.
        warnings.filterwarnings("ignore", message=f"{_HOOKS_WARNING}(?#{id(self)})")
        undo.enter_context(contextlib.suppress(ValueError))  # user code may have removed the filter
        undo.callback(warnings.filters.remove, warnings.filters[0])  # type: ignore[attr-defined]
        self.push()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def push(self) -> None:
        """Begins to record this thread.

        Puts both modes below all others of the thread, so that code that ends a mode finds its own on top.
        """
        self._ident = threading.get_ident()
        FUNCTIONS.insert(self.function_mode)
        OPERATORS.insert(self.operator_mode)

    def pop(self) -> None:
        """Removes both modes from this thread's stacks; those of other code stay. In another thread does nothing."""
        FUNCTIONS.remove(self.function_mode)
        OPERATORS.remove(self.operator_mode)

    def stop(self) -> None:
        """Stops recording. What was recorded stays."""
        self.is_open = False
        self.pop()
        self._undo.close()

    # Where this thread is

    @property
    def is_on(self) -> bool:
        """True if both modes are on this thread's stacks."""
        return self.function_mode in FUNCTIONS.modes() and self.operator_mode in OPERATORS.modes()

    @property
    def is_this_thread(self) -> bool:
        """True in the thread that is recorded; in all before `push`."""
        return self._ident in (None, threading.get_ident())

    @property
    def missed_threads(self) -> bool:
        """True if a module ran in another thread, which is not recorded."""
        return _THREADS in self.missed

    def is_told(self) -> bool:
        """Returns True if the consumer is told of what this thread runs."""
        return self.is_open and _hiding.get() <= (_HIDDEN if self.sees_amp else _SHOWN)

    def is_elsewhere(self) -> bool:
        """Returns True if what this thread runs is not recorded: in another thread, hidden, or traced."""
        is_here = self.is_this_thread or current_graph_task_id() != -1  # or in a backward pass that the thread began
        return not (self.is_told() and is_here) or self.is_traced()

    def is_traced(self) -> bool:
        """Returns True if this thread is traced, transformed or captured, so that operators run in other ways."""
        why = _TRACED if is_recording() else _CAPTURED if is_capturing() else None
        if why is not None:
            self.missed[why] = None
        return why is not None

    # Modules

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Context for a forward that is not called by its module, so that no hook tells that it runs."""
        self._enter_module(module, ())
        try:
            yield
        finally:
            self._leave_module(module)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_told():
            return
        mode, thread, task = self.function_mode, self.thread, current_graph_task_id()
        if not self.is_this_thread and task == -1:  # nor is it a backward pass that the thread has begun
            self.missed[_THREADS] = None
            return
        on_leave: Callable[[], None] | None = None
        with unseen():
            noted = self.enters(module, args)
            is_on = mode in FUNCTIONS.modes()
            if task != -1 and not is_on:  # torch has taken the mode off for the call of backward()
                FUNCTIONS.insert(mode)
                on_leave = partial(FUNCTIONS.remove, mode)
            elif is_on and not module.training and isinstance(module, _FAST_PATHS) and _has_fast_path():
                FUNCTIONS.remove(mode)  # torch would take other kernels
                on_leave = partial(FUNCTIONS.insert, mode)
                thread.fused_casts = [
                    key for kind, key in modes.AUTOCAST_KEYS.items() if torch.is_autocast_enabled(kind)
                ]
        thread.running.append(Running(module, task, torch.is_grad_enabled(), on_leave, noted))

    def _leave_module(self, module: nn.Module, _: Any = None, *told: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running = self.thread.running
        while any(each.module is module for each in running):
            ended = running.pop()
            with unseen():
                self.leaves(ended, told)
                if ended.on_leave is not None:
                    ended.on_leave()
            if ended.module is module:
                return


class _Telling:
    """A mode that tells a recorder what it sees. It keeps no recorder alive."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = weakref.ref(recorder)


class FunctionMode(_Telling, TorchFunctionMode):
    """Tells of functions."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self._recorder(), kwargs or {}
        if recorder is None or not recorder.is_told():
            return func(*args, **kwargs)
        return recorder.function(func, args, kwargs)


class OperatorMode(_Telling, TorchDispatchMode):
    """Tells of operators."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self._recorder(), kwargs or {}
        if recorder is None or not recorder.is_told():
            return func(*args, **kwargs)
        if func in FUSED_LAYERS:
            return _run_fused(recorder, func, args, kwargs)
        return recorder.operator(func, args, kwargs)


def _run_fused(recorder: Recorder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a fused kernel, which has autocast cast for the operators that it calls itself.

    torch has turned autocast off for the mode, as autocast has usually cast before.
    """
    with contextlib.ExitStack() as guards:
        for key in recorder.thread.fused_casts:
            recorder.missed[_FUSED_CASTS] = None
            guards.enter_context(modes.SetExcludeDispatchKeyGuard(key, False))
        return recorder.operator(op, args, kwargs)


class _ModeWithoutAmp(OperatorMode, ObservingMode):
    """Below it amp keeps casts as without it."""


#: What torch's functions see of this block: no function mode. Reading an attribute of a tensor is a function.
unseen = torch.DisableTorchFunction


_SHOWN, _HIDDEN, _PAUSED = 0, 1, 2
_hiding = ContextVar("hiding", default=_SHOWN)  # of each thread


@contextlib.contextmanager
def _hide(level: int) -> Iterator[None]:
    before = _hiding.set(max(_hiding.get(), level))
    try:
        yield
    finally:
        _hiding.reset(before)


def paused() -> contextlib.AbstractContextManager[None]:
    """Stops recording this thread's operators until the block ends."""
    return _hide(_PAUSED)


def hidden() -> contextlib.AbstractContextManager[None]:
    """Hides this thread's operators from reports until the block ends; a watch sees them."""
    return _hide(_HIDDEN)


_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _stop_in_child() -> None:
    """Stops recording in a process that was forked, such as a worker of a DataLoader."""
    for recorder in list(_open):
        recorder.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)
