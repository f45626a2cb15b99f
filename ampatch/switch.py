"""The on/off switch of casts: it turns them on for the process, and off for a thread.

"On" belongs to the process: autograd runs backward functions, and checkpoint recomputation, on its own threads, and
these must see casts on. "Off" belongs to the thread: `disable_casts` in one thread must never reach another.

Compiled code must obey the switch too, but torch.compile does not guard functions that its graphs call by name, such as
methods of tensors. It always guards, per thread, the device types for which autocast is enabled. Graphs can also set
that, and torch.compile restores it after any exception. So casts are off while autocast is on for a device type that
no tensor here uses. Reading this from torch at every call would be too slow, so a count shows whether to read it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from ampatch.compilers import called_in_graphs, traced_within_others
from ampatch.errors import OptionError
from ampatch.ledger import PatchLedger

# An accelerator whose backend is not public. torch ignores it even in its check whether *any* autocast is enabled.
_SIGNAL = "maia"

_F = TypeVar("_F", bound=Callable[..., Any])


class _Thread(threading.local):
    def __init__(self) -> None:
        self.off = 0


#: A block that changes nothing; may be entered several times at once.
_NOTHING = contextlib.nullcontext()


class Switch:
    """The on/off switch of one session.

    Args:
        patches: whether the session patches functions, so that there are casts to turn off.

    Attributes:
        active: True if casts are on for the process; set once the session is installed, cleared for good when it is
            taken down.
        thread: ``thread.off`` is the number of regions without casts that this thread is in. If it is 0 and no tracer
            is active, casts are on; otherwise `is_off` decides. All sessions share it.
    """

    __slots__ = ("_patches", "active")
    thread = _Thread()

    def __init__(self, patches: bool = True) -> None:
        self.active = False
        self._patches = patches

    @classmethod
    def is_off(cls) -> bool:
        """Returns True if casts are off in this thread, or, under a tracer, at this point of the traced code."""
        asks = is_dynamo_compiling() or cls.thread.off or _len_torch_dispatch_stack()
        return bool(asks) and cls.is_signalled_off()

    @staticmethod
    def is_signalled_off() -> bool:
        """Returns what `is_off` returns, without its quick check; the caller must have made that check."""
        return torch.is_autocast_enabled(_SIGNAL)

    def disabled(self) -> AbstractContextManager[None]:
        """Turns casts off in this thread until the block ends; nests. In compiled code the graph turns them off."""
        return off_in_graph() if is_dynamo_compiling() else _Region(self._count() + 1)

    def suspended(self) -> AbstractContextManager[None]:
        """Turns casts off for amp's own arithmetic, which is never traced; a no-op if no functions are patched."""
        if not self._patches:
            return _NOTHING
        return _Region(self._count() + 1 if self.thread.off else 1)

    def resumed(self) -> AbstractContextManager[None]:
        """Undoes one `suspended` until the block ends: for a closure that an optimizer's step calls."""
        return _Region(self._count() - 1) if self._patches else _NOTHING

    def patch_checkpoint(self, ledger: PatchLedger, recomputed: Callable[[], object]) -> None:
        """Patches `torch.utils.checkpoint`, so that it recomputes a region with casts on or off as in its first run.

        Args:
            ledger: records the patches.
            recomputed: function called after each recomputation in the backward pass, even if it raised.
        """
        for owner, name, position in checkpoint_functions():
            ledger.set(owner, name, self._remembered_by(getattr(owner, name), position, recomputed))

    def _remembered_by(
        self, checkpoint: Callable[..., Any], position: int, recomputed: Callable[[], object]
    ) -> Callable[..., Any]:
        @functools.wraps(checkpoint)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            off, function = self._count(), args[position]

            def as_it_ran(*args: Any, **kwargs: Any) -> Any:
                try:
                    with _Region(off):
                        return function(*args, **kwargs)
                finally:
                    if torch._C._current_graph_task_id() != -1:  # in the backward pass
                        recomputed()

            return checkpoint(*args[:position], as_it_ran, *args[position + 1 :], **kwargs)

        return wrapper

    def patch_data_parallel(self, ledger: PatchLedger) -> None:
        """Patches `torch.nn.DataParallel`, so that its threads cast if and only if the thread that starts them does."""
        for owner in parallel_apply_owners():
            ledger.set(owner, "parallel_apply", self._carried_by(owner.parallel_apply))

    def _carried_by(self, parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parallel_apply)
        def wrapper(modules: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
            off = self._count()

            def as_here(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                with _Region(off):
                    return module(*args, **kwargs)

            return parallel_apply([functools.partial(as_here, module) for module in modules], *args, **kwargs)

        return wrapper

    @classmethod
    def _count(cls) -> int:
        """Returns the number of regions that this thread is in, without regions of graphs that raised."""
        return cls.thread.off if cls.is_off() else 0


class WithoutCasts:
    """Turns casts off in this thread: a context manager that can be entered repeatedly, or a decorator.

    Applies to all sessions, including sessions that begin meanwhile.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "amp.disable_casts()"

    @traced_within_others
    def __enter__(self) -> None:
        torch._dynamo.graph_break()  # as in `_Region`
        Switch.thread.off = Switch._count() + 1
        torch.set_autocast_enabled(_SIGNAL, True)

    @traced_within_others
    def __exit__(self, *_: object) -> None:
        Switch.thread.off = max(0, Switch.thread.off - 1)
        torch.set_autocast_enabled(_SIGNAL, Switch.thread.off > 0)

    def __call__(self, function: _F) -> _F:
        """Returns a function that runs without casts; a generator or a coroutine does so in each of its steps.

        Raises:
            OptionError: ``function`` is no function, or an asynchronous generator.
        """
        if isinstance(function, type) or not callable(function) or inspect.isasyncgenfunction(function):
            found = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
            raise OptionError(
                f"amp.disable_casts got {found}, and decorates functions, generators and coroutines. Put "
                "with amp.disable_casts(): inside it, around the code that is to run without casts."
            )
        wrapper: Any
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (yield from in_steps(function(*args, **kwargs), WithoutCasts))

        elif inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await InSteps(function(*args, **kwargs), WithoutCasts)

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with off_in_graph() if is_dynamo_compiling() else self:
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]


class InSteps:
    """Awaits a coroutine in a block; coroutines that run between its steps are outside of it."""

    def __init__(self, coroutine: Any, block: Callable[[], AbstractContextManager[None]]) -> None:
        self._coroutine, self._block = coroutine, block

    def __await__(self) -> Any:
        return (yield from in_steps(self._coroutine, self._block))


def in_steps(steps: Any, block: Callable[[], AbstractContextManager[None]]) -> Any:
    """Runs a generator or coroutine with each of its steps in a block of its own."""
    resume, value = steps.send, None
    while True:
        try:
            with block():
                given = resume(value)
        except StopIteration as ended:
            return ended.value
        try:
            resume, value = steps.send, (yield given)
        except GeneratorExit:
            with block():
                steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 - any exception thrown into the generator
            resume, value = steps.throw, error


def checkpoint_functions() -> list[tuple[Any, str, int]]:
    """Returns the functions to patch in `torch.utils.checkpoint`: owner, name, and the position of the region.

    They are the level below torch.utils.checkpoint.checkpoint, since other code may have bound that before or put it
    into a functools.partial. Also below the generator under it, which torch.distributed has bound.
    """
    return [
        (torch.utils.checkpoint._CheckpointFrame, "__init__", 1),
        (torch.utils.checkpoint.CheckpointFunction, "apply", 0),
    ]


def parallel_apply_owners() -> list[Any]:
    """Returns the modules that hold the ``parallel_apply`` of `torch.nn.DataParallel`."""
    # In their package, functions of the same names hide these two modules.
    modules = [importlib.import_module(f"torch.nn.parallel.{name}") for name in ("parallel_apply", "data_parallel")]
    return [torch.nn.parallel, *modules]


class _Region:
    """A region of code with a given number of reasons for casts to be off; they are on if it is 0.

    It is a class, because every optimizer step enters one and a generator is slower. Regions may end in any order, for
    example those of two generators or of two asyncio tasks.
    """

    __slots__ = ("_before", "_off", "_signal")

    def __init__(self, off: int) -> None:
        self._off = off

    @traced_within_others
    def __enter__(self) -> None:
        # A graph cannot know in how many regions it will run.
        torch._dynamo.graph_break()
        thread = Switch.thread
        self._before, self._signal = thread.off, torch.is_autocast_enabled(_SIGNAL)
        thread.off = self._off
        torch.set_autocast_enabled(_SIGNAL, self._off > 0)

    @traced_within_others
    def __exit__(self, *_: object) -> None:
        thread = Switch.thread
        if thread.off == self._off:
            thread.off = self._before
            torch.set_autocast_enabled(_SIGNAL, self._signal)
        else:  # a region that began later is still open, or one that began earlier has ended
            thread.off = max(0, thread.off - self._off + self._before)
            torch.set_autocast_enabled(_SIGNAL, thread.off > 0)


@contextlib.contextmanager
def off_in_graph() -> Iterator[None]:
    """Replaces a region under torch.compile: turns casts off between two places in the graph."""
    before = torch.is_autocast_enabled(_SIGNAL)
    with torch.autocast(_SIGNAL, torch.bfloat16):  # tracing restores this wherever it stops or restarts
        _count_region(1, True)
        try:
            yield
        finally:
            _count_region(-1, before)


@called_in_graphs
def _count_region(step: int, off: bool) -> None:
    """Notes that a graph enters or leaves a region; sets autocast, since export records it without entering it."""
    torch.set_autocast_enabled(_SIGNAL, off)
    if not _len_torch_dispatch_stack():  # the graph runs as it was traced ("eager" backend), and is not traced further
        Switch.thread.off += step
