"""What a forward writes into the containers that it was called with, carried back to the caller's.

Where tensors are cast the forward gets containers of its own, and results that it leaves in them (a key in a batch, an
item at the end of a list, an attribute) would be lost with those. Owns which forwards are under way, and what they were
handed. Decides nothing about types; must never write to a container that the forward has not written to.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ampatch.casting import PLAIN, attributes_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Items = dict[Any, object]

_WITHOUT_ATTRIBUTES = (dict, collections.OrderedDict, collections.defaultdict)


@dataclass(frozen=True, slots=True)
class _Handed:
    """A container that a forward was handed.

    Attributes:
        theirs: the caller's.
        given: what the forward got; the same one where nothing in it was cast.
        read: reads what is in a container: by key, by place or by attribute.
        items: what that read when the forward began.
    """

    theirs: Any
    given: Any
    read: Callable[[Any], Items]
    items: Items


class _Forward:
    """A forward under way.

    Attributes:
        module: whose it is.
        handed: the containers among its arguments, and those in them.
        theirs: what the caller has for each thing that the forward was given, by the id of the latter.
    """

    __slots__ = ("handed", "module", "theirs")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.handed: list[_Handed] = []
        self.theirs: dict[int, object] = {}


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_stack = _Stack()
# torch.compile cannot look into what is local to a thread. It traces in one alone.
_traced: list[_Forward] = []


def begin(module: nn.Module, theirs: Arguments, given: Arguments) -> None:
    """Takes note of what a forward is called with.

    Args:
        module: whose forward begins.
        theirs: the arguments as the caller has them.
        given: the same ones as the forward gets them.
    """
    if is_exporting():  # the program that comes of it cannot write to its arguments
        return
    forward = _Forward(module)
    for outer, inner in ((theirs[0], given[0]), (tuple(theirs[1].values()), tuple(given[1].values()))):
        for place, value in enumerate(inner):
            if type(value) not in PLAIN and not isinstance(value, Tensor):
                _open(forward, outer[place], value)
    _forwards().append(forward)


def end(module: nn.Module, cast: Callable[[object], object]) -> None:
    """Carries back what a forward has written, also where it has raised.

    Args:
        module: whose forward ends.
        cast: what is done to values that the forward has made.
    """
    forwards = _forwards()
    # A hook before amp's may have raised, so that the forward never began.
    if forwards and forwards[-1].module is module:
        forward = forwards.pop()
        for handed in forward.handed:
            _carry_back(handed, forward.theirs, cast)


def _forwards() -> list[_Forward]:
    return _traced if is_compiling() else _stack.forwards


def _open(forward: _Forward, theirs: Any, given: Any) -> None:
    """Takes note of a value and of what is in it."""
    if id(given) in forward.theirs:
        return
    forward.theirs[id(given)] = theirs
    if isinstance(given, Tensor) or type(given) in PLAIN:
        return
    if isinstance(given, (list, tuple)):
        _open_items(forward, theirs, given, _by_place)
        return
    if isinstance(given, dict):
        _open_items(forward, theirs, given, _by_key)
    if given is not theirs and type(given) is type(theirs) and type(given) not in _WITHOUT_ATTRIBUTES:
        _open_items(forward, theirs, given, attributes_of)


def _open_items(forward: _Forward, theirs: Any, given: Any, read: Callable[[Any], Items]) -> None:
    items, outer = read(given), read(theirs)
    if not isinstance(given, tuple):
        forward.handed.append(_Handed(theirs, given, read, items))
    for key, item in items.items():
        if key in outer:
            _open(forward, outer[key], item)


def _by_place(value: list[object] | tuple[object, ...]) -> Items:
    return dict(enumerate(value))


def _by_key(value: dict[Any, object]) -> Items:
    return dict(value.items())


def _carry_back(handed: _Handed, theirs: dict[int, object], cast: Callable[[object], object]) -> None:
    now = handed.read(handed.given)
    if now.keys() == handed.items.keys() and all(item is handed.items[key] for key, item in now.items()):
        return

    def as_theirs(item: object) -> object:
        if id(item) not in theirs:
            theirs[id(item)] = cast(item)  # once, however often it stands somewhere
        return theirs[id(item)]

    if handed.read is _by_place:
        handed.theirs[:] = [as_theirs(item) for item in now.values()]
        return
    written = {
        key: as_theirs(item) for key, item in now.items() if key not in handed.items or item is not handed.items[key]
    }
    # What is an item may be an attribute too, and be gone already.
    gone = [key for key in handed.items if key not in now and key in handed.read(handed.theirs)]
    if handed.read is _by_key:
        _write_items(handed.theirs, written, gone)
    else:
        _write_attributes(handed.theirs, written, gone)


# Statements, since no compiler knows the functions of ``operator`` for them.


def _write_items(theirs: dict[Any, object], written: Items, gone: list[Any]) -> None:
    for key in gone:
        del theirs[key]
    for key, item in written.items():
        theirs[key] = item  # noqa: PERF403 - a class may do more than update() does


def _write_attributes(theirs: object, written: Items, gone: list[Any]) -> None:
    # Frozen dataclasses refuse to have them set, but a forward can.
    for name in gone:
        object.__delattr__(theirs, name)
    for name, item in written.items():
        object.__setattr__(theirs, name, item)
