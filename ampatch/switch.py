"""Whether casts are on: on for the process, off for a thread.

On belongs to the process, because autograd runs backward functions, and with them checkpoint recomputation, on threads
of its own, which must see casts on. Off belongs to the thread, because one thread's `disable_casts` must not reach
another's.

Compiled code must follow, and torch.compile does not guard what its graphs do by name, such as methods of tensors. What
it guards always, per thread, is for which types of device autocast is enabled; it sets that within its graphs as well,
and takes it back whatever raises. So casts are off where autocast is on for a type of device that no tensor here is on.
To ask torch for that takes longer than a call may cost, so a count beside it says whether there is anything to ask for.
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

# An accelerator whose backend is not public. torch leaves it out even when it asks whether *any* autocast is enabled.
_SIGNAL = "maia"

_F = TypeVar("_F", bound=Callable[..., Any])


class _Thread(threading.local):
    def __init__(self) -> None:
        self.off = 0


class Switch:
    """The on/off switch of one session.

    Attributes:
        active: on for the process; set once the session is installed, cleared for good when it is taken down.
        thread: ``thread.off`` counts the regions without casts that this thread is in. Where it is 0, and no tracer at
            work, casts are on; otherwise `is_off` tells. All sessions share it.
    """

    __slots__ = ("active",)
    thread = _Thread()

    def __init__(self) -> None:
        self.active = False

    @classmethod
    def is_off(cls) -> bool:
        """Returns whether casts are off in this thread, or under a tracer where it has come to."""
        asks = is_dynamo_compiling() or cls.thread.off or _len_torch_dispatch_stack()
        return bool(asks) and cls.is_signalled_off()

    @staticmethod
    def is_signalled_off() -> bool:
        """`is_off` where there is something to ask for, as the caller has seen."""
        return torch.is_autocast_enabled(_SIGNAL)

    def disabled(self) -> AbstractContextManager[None]:
        """Casts are off in this thread until the block ends; nests. In compiled code the graph turns them off."""
        return off_in_graph() if is_dynamo_compiling() else _Region(self._count() + 1)

    def suspended(self) -> AbstractContextManager[None]:
        """`disabled`, in less time, for code that is never traced: an optimizer's step."""
        return _Region(self._count() + 1)

    def resumed(self) -> AbstractContextManager[None]:
        """Takes back one `disabled` until the block ends: for a closure that an optimizer's step calls."""
        return _Region(self._count() - 1)

    def follow_checkpoints(self, ledger: PatchLedger, recomputed: Callable[[], object]) -> None:
        """Has `torch.utils.checkpoint` recompute a region with casts on or off, as they were when it ran.

        Args:
            ledger: takes note of what is installed.
            recomputed: called when a region was recomputed, or was about to be.
        """
        # Below torch.utils.checkpoint.checkpoint, which many have bound or put into a functools.partial before, and
        # below the generator under it, which torch.distributed has bound.
        for owner, name, position in (
            (torch.utils.checkpoint._CheckpointFrame, "__init__", 1),
            (torch.utils.checkpoint.CheckpointFunction, "apply", 0),
        ):
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
                    if torch._C._current_graph_task_id() != -1:  # in backward
                        recomputed()

            return checkpoint(*args[:position], as_it_ran, *args[position + 1 :], **kwargs)

        return wrapper

    def follow_replicas(self, ledger: PatchLedger) -> None:
        """Has the threads of `torch.nn.DataParallel` run with casts on or off, as the one that starts them."""
        # Two of the modules that bind it have the name of a function in their package.
        modules = [importlib.import_module(f"torch.nn.parallel.{name}") for name in ("parallel_apply", "data_parallel")]
        for owner in (torch.nn.parallel, *modules):
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
        """Returns the regions that this thread is in, less those of graphs that raised."""
        return cls.thread.off if cls.is_off() else 0


class WithoutCasts:
    """Casts are off in this thread: as a block, however often it is entered, or as a decorator.

    Of all sessions, and of those that begin meanwhile.
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
        """Returns a function that runs without casts: a generator or a coroutine too, from step to step.

        Raises:
            OptionError: it is no function, or an asynchronous generator.
        """
        if isinstance(function, type) or not callable(function) or inspect.isasyncgenfunction(function):
            found = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
            raise OptionError(
                f"amp.disable_casts got {found}, and decorates functions, generators and coroutines. Put "
                "with amp.disable_casts(): inside of what is to run without casts."
            )
        wrapper: Any
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (yield from _in_steps(function(*args, **kwargs)))

        elif inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await _Awaitable(function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with off_in_graph() if is_dynamo_compiling() else self:
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]


class _Awaitable:
    """A coroutine that runs without casts, while others that run in between have theirs."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Any:
        return (yield from _in_steps(self._coroutine))


def _in_steps(steps: Any) -> Any:
    """Runs a generator or coroutine without casts from each of its steps to the next, and not in between."""
    off = WithoutCasts()
    resume, value = steps.send, None
    while True:
        try:
            with off:
                given = resume(value)
        except StopIteration as ended:
            return ended.value
        try:
            resume, value = steps.send, (yield given)
        except GeneratorExit:
            with off:
                steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 - thrown in, whatever it is
            resume, value = steps.throw, error


class _Region:
    """A block in which casts are off for one reason or several, or on for none.

    A class, since every step of an optimizer is one, and a generator takes longer. Regions need not end in the reverse
    order of their beginnings: those of two generators do not, nor those of two tasks of asyncio.
    """

    __slots__ = ("_before", "_off", "_signal")

    def __init__(self, off: int) -> None:
        self._off = off

    @traced_within_others
    def __enter__(self) -> None:
        # A graph cannot know how many regions it will run in.
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
        else:  # some that began later are not over, or some that began earlier are
            thread.off = max(0, thread.off - self._off + self._before)
            torch.set_autocast_enabled(_SIGNAL, thread.off > 0)


@contextlib.contextmanager
def off_in_graph() -> Iterator[None]:
    """Stands for a region where torch.compile traces: casts are off from one place of its graph to another."""
    before = torch.is_autocast_enabled(_SIGNAL)
    with torch.autocast(_SIGNAL, torch.bfloat16):  # which tracing takes back wherever it stops or starts anew
        _count_region(1, True)
        try:
            yield
        finally:
            _count_region(-1, before)


@called_in_graphs
def _count_region(step: int, off: bool) -> None:
    """Notes that a graph enters or leaves a region, in which export has autocast recorded and not entered."""
    torch.set_autocast_enabled(_SIGNAL, off)
    if not _len_torch_dispatch_stack():  # it is run as it was traced, by a backend such as "eager", and not traced on
        Switch.thread.off += step
