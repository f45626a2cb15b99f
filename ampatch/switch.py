"""The region that a thread computes in: whether casts are on there, and to which types.

Regions are those of torch.autocast: every thread has its own, torch.compile guards them, and autograd carries them to
its threads. In a region, the autocast state of a device type says what amp does with tensors there: nothing if it is
off, otherwise casts to its half type. A session enters one around the forward of each adopted model. `disable_casts` is
a region in which autocast is off. Outside of any region, calls are cast that belong to a model by their arguments, or
all of them under `amp.init`. To tell that from a region that is off, every region turns autocast on for a device type
that no tensor here uses.

Owns the state of a thread, and how regions begin and end. Must not know lists or models.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling, is_exporting

from ampatch.compilers import called_in_graphs, traced_within_others
from ampatch.errors import OptionError
from ampatch.ledger import PatchLedger
from ampatch.torch_private import autograd, modes

# An accelerator whose backend is not public. torch ignores it even in its check whether *any* autocast is enabled.
_SIGNAL = "maia"

#: The device types of regions that amp begins.
_accelerator = torch.accelerator.current_accelerator()
KINDS = tuple(dict.fromkeys(("cpu", "cuda", *([] if _accelerator is None else [_accelerator.type]))))

#: The device type whose autocast stands for the lists of a part of a model: see `ampatch.patching.thread_rules`. torch
#: has it on macOS only, where ampatch does not run, and ignores it in its check whether any autocast is on.
RULES = "mps"

_PLACES = (*KINDS, RULES)

_F = TypeVar("_F", bound=Callable[..., Any])


#: The autocast state of a thread: whether it is in a region; for each of `KINDS` and for `RULES`, whether autocast is
#: on, and its type; whether autocast keeps its casts. Everywhere None means that this part of the state stays as it is.
State = tuple[bool | None, tuple[bool | None, ...], tuple[torch.dtype | None, ...] | None, bool | None]

_AS_THEY_ARE = (None,) * len(_PLACES)

#: The state of a region without casts.
OFF: State = (True, (*(False for _ in KINDS), None), None, None)


#: The state of a thread without regions and without autocast.
PLAIN: State = (False, (False,) * len(_PLACES), None, None)


#: The state in the forward of a model with half weights, where amp casts what meets them. Autocast does nothing there:
#: it is on for a device that no tensor here uses, so that every thread has its own state and torch.compile guards it.
IN_HALF: State = (None, (*(None for _ in KINDS), True), (*(None for _ in KINDS), torch.float16), None)


def is_in_half() -> bool:
    """Returns True in the state `IN_HALF`. Sessions that patch by the lists use the same device for `RULES`."""
    return torch.is_autocast_enabled(RULES)


def state() -> State:
    """Returns the state of this thread."""
    return (
        is_in_region(),
        tuple([torch.is_autocast_enabled(kind) for kind in _PLACES]),
        tuple([torch.get_autocast_dtype(kind) for kind in _PLACES]),
        torch.is_autocast_cache_enabled(),
    )


def casting_to(dtype: torch.dtype, kinds: Collection[str]) -> State:
    """Returns the state in which amp casts to a half type on devices of some types, and keeps the casts itself."""
    on = (*[kind in kinds for kind in KINDS], None)
    return True, on, tuple([dtype if each else None for each in on]), False


def turn_on(dtype: torch.dtype, kinds: Collection[str]) -> None:
    """Begins a region in this thread, with autocast on for some device types, and as it is for the others."""
    here = [kind in kinds for kind in _PLACES]
    exchange((True, tuple([each or None for each in here]), tuple([dtype if each else None for each in here]), None))


def exchange(wanted: State) -> State:
    """Puts this thread into a state; returns the one that it was in, as far as it has changed."""
    in_region, enabled, dtypes, is_cached = wanted
    signals, switches = (_SIGNAL, *_PLACES), (in_region, *enabled)
    # All is read first: `ampatch run --cpu` makes one state of two.
    before = [
        None if on is None else torch.is_autocast_enabled(kind) for kind, on in zip(signals, switches, strict=True)
    ]
    had = None
    if dtypes is not None:
        had = tuple(
            [None if to is None else torch.get_autocast_dtype(at) for at, to in zip(_PLACES, dtypes, strict=True)]
        )
    was_cached = None if is_cached is None else torch.is_autocast_cache_enabled()
    for kind, on, was_on in zip(signals, switches, before, strict=True):
        if on is not None and on is not was_on:
            torch.set_autocast_enabled(kind, on)
    for kind, dtype in zip(_PLACES, dtypes or (), strict=False):
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)
    if is_cached is not None:
        torch.set_autocast_cache_enabled(is_cached)
    return before[0], tuple(before[1:]), had, was_cached


_T = TypeVar("_T")


def _over(wanted: State, other: State) -> State:
    """Returns a state; what it leaves as it is, it has from the other."""
    in_region, enabled, dtypes, is_cached = wanted
    return (
        other[0] if in_region is None else in_region,
        _each(enabled, other[1]),
        _each(dtypes or _AS_THEY_ARE, other[2] or _AS_THEY_ARE),
        other[3] if is_cached is None else is_cached,
    )


def _each(wanted: Sequence[_T | None], other: Sequence[_T | None]) -> tuple[_T | None, ...]:
    return tuple([two if one is None else one for one, two in zip(wanted, other, strict=True)])


class _Implementation:
    """What exchanges states: `exchange`, or the same in C++."""

    exchange: Callable[[State], State] = staticmethod(exchange)


def run_in(module: types.ModuleType | None) -> None:
    """Exchanges states by the compiled library from now on; None: in Python."""
    is_known = module is not None and KINDS == ("cpu", "cuda")
    _Implementation.exchange = staticmethod(module.exchange if is_known else exchange)  # type: ignore[union-attr]


def is_in_region() -> bool:
    """Returns True if this thread, or under a tracer the traced code, is in a region; then `dtype_in_region` holds."""
    return torch.is_autocast_enabled(_SIGNAL)


def is_set_by_autocast(kinds: Collection[str]) -> bool:
    """Returns True if autocast says what amp does here: in a region, or where code has turned it on without one.

    Args:
        kinds: the device types that count.
    """
    if not modes.is_any_autocast_enabled():
        return is_in_region()
    return is_in_region() or any(torch.is_autocast_enabled(kind) for kind in KINDS if kind in kinds)


def dtype_in_region(kind: str) -> torch.dtype | None:
    """Returns the half type that a device type's whitelisted functions compute in here; None if nothing is cast."""
    for each in KINDS if kind == "meta" else (kind,):  # autocast has no "meta"
        if torch.is_autocast_enabled(each):
            return torch.get_autocast_dtype(each)
    return None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions: list[Region] = []  # those that are open, in the order of their beginnings
        self.without_casts: list[Region] = []  # those of `WithoutCasts`


_thread = _Thread()

#: A block that changes nothing; may be entered several times at once.
_NOTHING = contextlib.nullcontext()


# For each thread, the numbers of autograd's nodes where the thread has begun and ended regions, in turn and in order.
_bounds: dict[int, list[int]] = {}
_MOST_BOUNDS = 2**16


def _note_made(first: int) -> None:
    """Notes that the nodes of this thread from a number on were made in a region."""
    bounds, end = _bounds.setdefault(threading.get_ident(), []), autograd.next_sequence_number()
    if end > first:
        del bounds[bisect.bisect_left(bounds, first) :]  # of regions inside, and of one that ended just here
        bounds += [end] if len(bounds) % 2 else [first, end]
        if len(bounds) > _MOST_BOUNDS:
            del bounds[: _MOST_BOUNDS // 2]


def was_made_in_region(number: int) -> bool:
    """Returns True if a node of autograd was made in a region, so that its backward pass has the state of that."""
    return any(bisect.bisect_right(bounds, number) % 2 for bounds in list(_bounds.values()))


def is_in_backward_of_region() -> bool:
    """Returns True in the backward pass of a user's `torch.autograd.Function` whose forward ran in a region."""
    if is_dynamo_compiling() or autograd.current_graph_task_id() == -1:
        return False
    node = autograd.current_node()
    return node is not None and was_made_in_region(autograd.sequence_number(node))


def enter_block(block: object, before: State) -> None:
    """Notes that this thread has entered a block of torch.autocast, and the state that it was in before."""
    region = Region(OFF)
    region._block, region._before, region._first = block, before, autograd.next_sequence_number()
    region._innermost = _thread.regions[-1]._innermost if _thread.regions else None
    _thread.regions.append(region)


def leave_block(block: object, leave: Callable[[], object]) -> object:
    """Leaves a block of torch.autocast, by torch's own function; other blocks and regions may still be open."""
    region = next((region for region in reversed(_thread.regions) if region._block is block), None)
    now = None if region is None or region is _thread.regions[-1] else state()
    result = leave()
    if region is not None:
        region.__exit__()
    if now is not None:
        exchange(now)
    return result


def forget_regions() -> None:
    """Ends the regions of this thread that cast, and those of torch.autocast, because their session ends."""
    regions = _thread.regions
    has_blocks = any(region._block is not None for region in regions)
    before: State | None = None
    for region in list(regions):
        if region._block is not None:
            regions.remove(region)
        elif before is not None:  # behind a region that casts
            before = region._before = _over(before, region._before)
        elif region is regions[0]:
            region._before = (False, *region._before[1:])
        if region._block is None and before is None and any(region._state[1]):
            before = region._before
    if before is not None and any(regions[-1]._state[1]):
        exchange(before)
    elif not regions and is_in_region():  # only a compiler that failed has left it so without a block
        exchange((False, OFF[1] if not has_blocks else _AS_THEY_ARE, None, None))


class Region:
    """A region of code with a given state.

    It is a class, because every optimizer step enters one and a generator is slower. Regions may end in any order, for
    example those of two generators or of two asyncio tasks.
    """

    __slots__ = ("_around", "_before", "_block", "_first", "_innermost", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._block: object = None  # the block of torch.autocast that it stands for, if it is one
        # The region that `undoing_one` undoes here; and the one around that.
        self._innermost: Region | None = self
        self._around: Region | None = None

    @classmethod
    def undoing_one(cls) -> AbstractContextManager[None]:
        """Returns a region in the state around the innermost region; then that one counts as left."""
        innermost = _thread.regions[-1]._innermost if _thread.regions else None
        if innermost is None:
            return _NOTHING
        region = cls(innermost._before)
        region._innermost = innermost._around
        return region

    @traced_within_others
    def __enter__(self) -> None:
        if is_dynamo_compiling():
            from ampatch.torch_private.tracers import graph_break

            graph_break()  # a graph cannot know in which state it will run
        if self._innermost is self and _thread.regions:
            self._around = _thread.regions[-1]._innermost
        _thread.regions.append(self)
        self._first = autograd.next_sequence_number()
        self._before = _Implementation.exchange(self._state)

    @traced_within_others
    def __exit__(self, *_: object) -> None:
        regions = _thread.regions
        if self not in regions:  # a generator has ended in another thread
            return
        _note_made(self._first)
        place = regions.index(self)
        del regions[place]
        if place == len(regions):
            _Implementation.exchange(self._before)
        else:  # one that began later is still open
            regions[place]._before = _over(self._before, regions[place]._before)


class Switch:
    """The on/off switch of one session.

    Args:
        patches: whether the session patches functions, so that there are casts to turn off.

    Attributes:
        active: True while patched functions may cast; set once the session is installed, cleared for good when it is
            taken down.
    """

    __slots__ = ("_patches", "active")

    def __init__(self, patches: bool = True) -> None:
        self.active = False
        self._patches = patches

    @staticmethod
    def is_off() -> bool:
        """Returns True if this thread, or under a tracer the traced code, is in a region that casts nothing."""
        return is_in_region() and not modes.is_any_autocast_enabled()

    @staticmethod
    def disabled() -> AbstractContextManager[None]:
        """Turns casts off in this thread until the block ends; nests. In compiled code the graph turns them off."""
        return in_graph(OFF) if is_dynamo_compiling() else Region(OFF)

    def suspended(self) -> AbstractContextManager[None]:
        """Turns casts off for amp's own arithmetic, which is never traced; a no-op if no functions are patched."""
        return Region(OFF) if self._patches else _NOTHING

    def resumed(self) -> AbstractContextManager[None]:
        """Undoes one `suspended` until the block ends: for a closure that an optimizer's step calls."""
        return Region.undoing_one() if self._patches else _NOTHING

    def patch_checkpoint(
        self,
        ledger: PatchLedger,
        recomputed: Callable[[], object],
        state_of_reentrant: Callable[[tuple[Any, ...]], State] | None = None,
    ) -> None:
        """Patches `torch.utils.checkpoint`, so that it recomputes a region in the state of its first run.

        torch remembers the types of autocast itself, but not whether the thread was in a region. The patched functions
        are below torch.utils.checkpoint.checkpoint, since other code may have bound that before or put it into a
        functools.partial; and below the generator under it, which torch.distributed has bound.

        Args:
            ledger: records the patches.
            recomputed: function called after each recomputation in the backward pass, even if it raised.
            state_of_reentrant: returns the state for a reentrant checkpoint's arguments; None: the state around it.
        """

        def remembering(
            checkpoint: Callable[..., Any], position: int, state_of: Callable[[tuple[Any, ...]], State] | None
        ) -> Callable[..., Any]:
            @functools.wraps(checkpoint)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                here, function = state() if state_of is None else state_of(args), args[position]

                def as_it_ran(*args: Any, **kwargs: Any) -> Any:
                    try:
                        return _call_in(here, function, *args, **kwargs)
                    finally:
                        if autograd.current_graph_task_id() != -1:  # in the backward pass
                            recomputed()

                return checkpoint(*args[:position], as_it_ran, *args[position + 1 :], **kwargs)

            return wrapper

        frame, reentrant = autograd.CheckpointFrame, torch.utils.checkpoint.CheckpointFunction
        ledger.set(frame, "__init__", remembering(frame.__init__, 1, None))
        ledger.set(reentrant, "apply", remembering(reentrant.apply, 0, state_of_reentrant))

    def patch_data_parallel(self, ledger: PatchLedger) -> None:
        """Patches `torch.nn.DataParallel`, so that its threads cast if and only if the thread that starts them does."""
        # In their package, functions of the same names hide these two modules.
        modules = [importlib.import_module(f"torch.nn.parallel.{name}") for name in ("parallel_apply", "data_parallel")]
        for owner in (torch.nn.parallel, *modules):
            ledger.set(owner, "parallel_apply", self._carried_by(owner.parallel_apply))

    def _carried_by(self, parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parallel_apply)
        def wrapper(modules: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
            here = state()
            return parallel_apply([functools.partial(_call_in, here, module) for module in modules], *args, **kwargs)

        return wrapper


def _call_in(wanted: State, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Region(wanted):
        return function(*args, **kwargs)


class WithoutCasts:
    """Turns casts off in this thread: a context manager that can be entered repeatedly, or a decorator.

    Applies to all sessions, including sessions that begin meanwhile.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "amp.disable_casts()"

    @traced_within_others
    def __enter__(self) -> None:
        region = Region(OFF)
        region.__enter__()
        _thread.without_casts.append(region)

    @traced_within_others
    def __exit__(self, *_: object) -> None:
        if _thread.without_casts:
            _thread.without_casts.pop().__exit__()

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
                return await in_steps(function(*args, **kwargs), WithoutCasts)

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with in_graph(OFF) if is_dynamo_compiling() else self:
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]


@types.coroutine
def in_steps(steps: Any, block: Callable[[], AbstractContextManager[None]]) -> Any:
    """Runs a generator or coroutine with each of its steps in a block of its own; what runs between is outside of it.

    The result is a generator; a coroutine may await it as well.
    """
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


@contextlib.contextmanager
def in_graph(wanted: State) -> Iterator[None]:
    """Replaces a region under torch.compile, which restores blocks of autocast wherever it stops or restarts."""
    if is_exporting():  # a block would become a graph of its own
        before = state()
        _set_in_graph(*_told(wanted))
        try:
            yield
        finally:
            _set_in_graph(*_told(before))
        return
    first, second, third, fourth = blocks_of(wanted)
    with first, second, third, fourth:
        yield


def blocks_of(wanted: State) -> list[AbstractContextManager[Any]]:
    """Returns four blocks, in which code that Dynamo traces is in a state."""
    if wanted[0] is None:  # `IN_HALF`
        return [torch.autocast(RULES, torch.float16), *(contextlib.nullcontext() for _ in range(3))]
    blocks: list[AbstractContextManager[Any]] = [torch.autocast(_SIGNAL, torch.bfloat16)]
    for index in range(3):
        on = wanted[1][index] if index < len(KINDS) else None
        if on or (on is False and torch.is_autocast_enabled(KINDS[index])):
            dtype = wanted[2][index] if wanted[2] else None
            blocks.append(torch.autocast(KINDS[index], dtype, on))
        else:
            blocks.append(contextlib.nullcontext())
    return blocks


def _told(wanted: State) -> tuple[str, str]:
    in_region, enabled, dtypes, _ = wanted
    states = "".join(["-" if on is None else "01"[on] for on in (in_region, *enabled)])
    return states, ",".join([str(dtype) for dtype in dtypes or ()])


@called_in_graphs
def _set_in_graph(states: str, dtypes: str) -> None:
    """Sets the state when export traces the graph, and does nothing to the graph."""
    told = [getattr(torch, name.removeprefix("torch."), None) for name in dtypes.split(",") if name]
    in_region, *enabled = [None if on == "-" else on == "1" for on in states]
    exchange((in_region, tuple(enabled), tuple(told) or None, None))
