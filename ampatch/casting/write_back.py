"""What a forward writes into the containers that it was called with, carried back to the caller's.

Where tensors are cast the forward gets containers of its own. Results that it leaves in them (a key in a batch, an item
at the end of a list, an attribute) would be lost with those; so would what it writes to a tensor in place. Owns
which forwards are under way, and what they were handed. Decides nothing about types; must never write to what the
forward has not written to.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.compiler import is_compiling, is_exporting

from ampatch.casting.nested import PLAIN, Known, attributes_of, cast_floating, is_opened

#: Positional arguments and those by keyword.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: What is in a container: by place, or by key or attribute.
Items = list[Any] | dict[Any, Any]

_WITHOUT_ATTRIBUTES = (list, dict, collections.OrderedDict, collections.defaultdict)

_OF_MODULES = vars(torch.nn.modules.module)


@dataclass(frozen=True, slots=True)
class _Handed:
    """A container that a forward was handed.

    Attributes:
        theirs: the caller's.
        given: what the forward got; the same one where nothing in it was cast.
        read: reads what is in a container.
        items: what that read when the forward began.
        outer: what it read in the caller's.
    """

    theirs: Any
    given: Any
    read: Callable[[Any], Items]
    items: Items
    outer: Items


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor that a forward was given a copy of.

    Attributes:
        theirs: the caller's.
        given: the copy.
        version: how often this had been written to when the forward began.
        node: where it came from in the graph then.
    """

    theirs: Tensor
    given: Tensor
    version: int
    node: Node | None


class _Forward:
    """A forward under way.

    Attributes:
        module: whose it is.
        frame: the call that runs it, in which it ends however it ends; None where torch.compile traces it.
        handed: the containers among its arguments, and those in them.
        known: what the caller has for each tensor and container that the forward was given.
        copies: of the caller's tensors that the forward was given, and that torch counts writes to.
    """

    __slots__ = ("copies", "frame", "handed", "known", "module")

    def __init__(self, module: nn.Module, frame: FrameType | None) -> None:
        self.module = module
        self.frame = frame
        self.handed: list[_Handed] = []
        self.known = Known()
        self.copies: list[_Copy] = []


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_stack = _Stack()
# torch.compile cannot look into what is local to a thread. It traces in one alone.
_traced: list[_Forward] = []


def begin(module: nn.Module, theirs: Arguments, given: Arguments) -> None:
    """Takes note of what a forward is called with. To be called by the hook itself.

    Args:
        module: whose forward begins.
        theirs: the arguments as the caller has them.
        given: the same ones as the forward gets them.
    """
    if is_exporting():  # the program that comes of it cannot write to its arguments, and torch warns of what is kept
        return
    if is_compiling():
        forwards, forward = _traced, _Forward(module, None)
    else:
        drop_interrupted()
        forwards, forward = _stack.forwards, _Forward(module, _call())
    _open_all(forward, theirs[0], given[0])
    _open_all(forward, list(theirs[1].values()), list(given[1].values()))
    forwards.append(forward)


def end(module: nn.Module, dtype: torch.dtype | None, result: object) -> object:
    """Carries back what a forward has written, also where it has raised.

    Args:
        module: whose forward ends.
        dtype: the type that the caller is to have what the forward has made in; None: in that in which it was made.
        result: what the forward returns; None where it has raised.

    Returns:
        The result for the caller, in which arguments are the caller's own.
    """
    known = Known()
    if not is_compiling():
        drop_interrupted()
    forwards = _traced if is_compiling() else _stack.forwards
    # A hook before amp's may have raised, so that the forward never began.
    if forwards and forwards[-1].module is module:
        forward = forwards.pop()
        known = forward.known
        for copy in forward.copies:
            if copy.given._version != copy.version and not _write_tensor(copy):
                known.forget(copy.given)
        for handed in forward.handed:
            _carry_back(handed, lambda item: item if dtype is None else cast_floating(item, dtype, known))
    return result if dtype is None else cast_floating(result, dtype, known)


def drop_interrupted() -> None:
    """Lets go of forwards of this thread that ended without a word, as by Ctrl-C."""
    forwards = _stack.forwards
    while forwards and not _is_running(forwards[-1].frame):
        forwards.pop()


def _call() -> FrameType:
    """Returns the call of a module whose hook has called `begin`: the outermost of torch's frames for it."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_back.f_globals is _OF_MODULES:
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType | None) -> bool:
    caller: FrameType | None = sys._getframe()
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


def _open_all(forward: _Forward, theirs: Sequence[Any], given: Sequence[Any]) -> None:
    for place, inner in enumerate(given):
        if type(inner) not in PLAIN:
            _open(forward, theirs[place], inner)


def _open(forward: _Forward, theirs: Any, given: Any) -> None:
    """Takes note of a value and of what is in it."""
    if isinstance(given, Tensor):
        _open_tensor(forward, theirs, given)
        return
    if type(given) is not type(theirs) or not is_opened(given) or forward.known.find(given) is not None:
        return
    if isinstance(given, tuple):
        if len(given) == len(theirs):  # which a class's own ``to`` may have made longer
            _open_all(forward, theirs, given)
        return
    forward.known.add(given, theirs)
    if isinstance(given, list):
        if len(given) == len(theirs):
            forward.handed.append(_Handed(theirs, given, list, list(given), list(theirs)))
            _open_all(forward, theirs, given)
    elif isinstance(given, dict):
        _open_items(forward, theirs, given, _by_key)
    if type(given) not in _WITHOUT_ATTRIBUTES:
        _open_items(forward, theirs, given, attributes_of)


def _open_tensor(forward: _Forward, theirs: Any, given: Tensor) -> None:
    if given is theirs or not isinstance(theirs, Tensor) or is_compiling() or given.is_inference():
        return
    if forward.known.find(given) is None:
        # The copy stands for the caller's, which is told what is written to it.
        forward.known.add(given, theirs)
        forward.copies.append(_Copy(theirs, given, given._version, given.grad_fn))


def _open_items(forward: _Forward, theirs: Any, given: Any, read: Callable[[Any], dict[Any, Any]]) -> None:
    items, outer = read(given), read(theirs)
    forward.handed.append(_Handed(theirs, given, read, items, outer))
    for key, item in items.items():
        if type(item) not in PLAIN and key in outer:
            _open(forward, outer[key], item)


def _by_key(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(value.items())


def _write_tensor(copy: _Copy) -> bool:
    """Writes to the caller's tensor what the forward has written to its copy, with the graph that this has.

    What the forward has not written to keeps its digits.

    Returns:
        Whether it could: not where the copy has another shape by now.
    """
    theirs, given = copy.theirs, copy.given
    if given.shape != theirs.shape or given.layout is not theirs.layout:
        return False
    with torch.no_grad():
        before = theirs.clone()
    with contextlib.nullcontext() if given.grad_fn is not copy.node else torch.no_grad():
        theirs.copy_(given)
    if given.layout is torch.strided:
        with torch.no_grad():
            theirs.copy_(torch.where(given == before.to(given.dtype), before, theirs))
    return True


def _carry_back(handed: _Handed, as_theirs: Callable[[Any], Any]) -> None:
    now, before, theirs = handed.read(handed.given), handed.items, handed.theirs
    if isinstance(now, list) or isinstance(before, list):
        if len(now) != len(before) or any(item is not before[place] for place, item in enumerate(now)):
            theirs[:] = _items_of_list(now, before, list(handed.outer), as_theirs)
        return
    written = {key: as_theirs(item) for key, item in now.items() if key not in before or item is not before[key]}
    # What is an item may be an attribute too, and be gone already.
    gone = [key for key in before if key not in now and key in handed.read(theirs)]
    if handed.read is _by_key:
        _write_items(theirs, written, gone)
        if list(now) != list(before):
            _put_in_order(theirs, list(now))
    else:
        _write_attributes(theirs, written, gone)


def _items_of_list(now: Items, before: Items, outer: list[Any], as_theirs: Callable[[Any], Any]) -> Iterator[Any]:
    """Gives the items for the caller's list: his own for those that were there when the forward began."""
    moved = Known()
    for place, item in enumerate(before):
        if place >= len(now) or now[place] is not item:
            moved.add(item, outer[place])
    for place, item in enumerate(now):
        if place < len(before) and item is before[place]:
            yield outer[place]
            continue
        own = moved.find(item)
        # One that stands there twice may have been written to where nothing counts that.
        moved.forget(item)
        yield as_theirs(item) if own is None else own


# Statements, since no compiler knows the functions of ``operator`` for them.


def _write_items(theirs: dict[Any, Any], written: dict[Any, Any], gone: list[Any]) -> None:
    for key in gone:
        del theirs[key]
    for key, item in written.items():
        theirs[key] = item  # noqa: PERF403 - a class may do more than update() does


def _put_in_order(theirs: dict[Any, Any], keys: list[Any]) -> None:
    if list(theirs) != keys:
        items = [(key, theirs.pop(key)) for key in keys]
        for key, item in items:
            theirs[key] = item  # noqa: PERF403 - as above


def _write_attributes(theirs: object, written: dict[Any, Any], gone: list[Any]) -> None:
    # Frozen dataclasses refuse to have them set, and a property may stand before one, but a forward can.
    own = getattr(theirs, "__dict__", {})
    for name in gone:
        if name in own:
            del own[name]
        else:
            object.__delattr__(theirs, name)
    for name, item in written.items():
        if _stands_before(theirs, name):
            own[name] = item
        else:
            object.__setattr__(theirs, name, item)


def _stands_before(value: object, name: str) -> bool:
    """Returns whether an attribute can stand in an object's ``__dict__`` only, behind one of its class."""
    return isinstance(getattr(type(value), name, None), property)
