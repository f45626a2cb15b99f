"""What a forward writes into the containers that it was called with, carried back to the caller's.

Where tensors are cast the forward gets containers of its own, and results that it leaves in them (a key in a batch, an
item at the end of a list, an attribute) would be lost with those; so would what it writes to a tensor in place. Owns
which forwards are under way, and what they were handed. Decides nothing about types; must never write to what the
forward has not written to.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ampatch.casting import PLAIN, Known, attributes_of, cast_floating, is_opened

#: Positional arguments and those by keyword.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: What is in a container: by place, or by key or attribute.
Items = list[Any] | dict[Any, Any]

_WITHOUT_ATTRIBUTES = (list, dict, collections.OrderedDict, collections.defaultdict)


@dataclass(frozen=True, slots=True)
class _Handed:
    """A container that a forward was handed.

    Attributes:
        theirs: the caller's.
        given: what the forward got; the same one where nothing in it was cast.
        read: reads what is in a container.
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
        frame: the call that runs it, in which it ends however it ends; None where torch.compile traces it.
        handed: the containers among its arguments, and those in them.
        known: what the caller has for each tensor and container that the forward was given.
        versions: of each tensor that it was given a copy of the caller's, the copy, and how often this had been written
            to when the forward began.
    """

    __slots__ = ("frame", "handed", "known", "module", "versions")

    def __init__(self, module: nn.Module, frame: FrameType | None) -> None:
        self.module = module
        self.frame = frame
        self.handed: list[_Handed] = []
        self.known = Known()
        self.versions: list[tuple[Tensor, Tensor, int]] = []


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
    if is_exporting():  # the program that comes of it cannot write to its arguments
        return
    if is_compiling():
        forwards, forward = _traced, _Forward(module, None)
    else:
        forwards, forward = _stack.forwards, _Forward(module, sys._getframe(2))
        _drop_interrupted(forwards, module)
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
    forwards = _traced if is_compiling() else _stack.forwards
    # A hook before amp's may have raised, so that the forward never began.
    if forwards and forwards[-1].module is module:
        forward = forwards.pop()
        known = forward.known
        for theirs, given, version in forward.versions:
            if given._version != version:
                _write_tensor(theirs, given)
        for handed in forward.handed:
            _carry_back(handed, lambda item: item if dtype is None else cast_floating(item, dtype, known))
    return result if dtype is None else cast_floating(result, dtype, known)


def _drop_interrupted(forwards: list[_Forward], module: nn.Module) -> None:
    """Forgets forwards that ended without a word, as by Ctrl-C, once their module is called again."""
    for index, forward in enumerate(forwards):
        if forward.module is module and not _is_running(forward.frame):
            del forwards[index:]
            return


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
    if forward.known.find(given) is not None or type(given) is not type(theirs):
        return
    if isinstance(given, tuple):
        _open_all(forward, theirs, given)
        return
    is_tensor = isinstance(given, Tensor)
    if not is_tensor and not is_opened(given):
        return
    if is_tensor:
        # The copy stands for the caller's where it is told what is written to it.
        if given is not theirs and not is_compiling() and not given.is_inference():
            forward.known.add(given, theirs)
            forward.versions.append((theirs, given, given._version))
        return
    forward.known.add(given, theirs)
    if isinstance(given, list):
        forward.handed.append(_Handed(theirs, given, list, list(given)))
        _open_all(forward, theirs, given)
    elif isinstance(given, dict):
        _open_items(forward, theirs, given, _by_key)
    if type(given) not in _WITHOUT_ATTRIBUTES:
        _open_items(forward, theirs, given, attributes_of)


def _open_items(forward: _Forward, theirs: Any, given: Any, read: Callable[[Any], dict[Any, Any]]) -> None:
    items, outer = read(given), read(theirs)
    forward.handed.append(_Handed(theirs, given, read, items))
    for key, item in items.items():
        if type(item) not in PLAIN and key in outer:
            _open(forward, outer[key], item)


def _by_key(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(value.items())


def _write_tensor(theirs: Tensor, given: Tensor) -> None:
    """Writes to the caller's tensor what the forward has written to its copy, with the graph that this has."""
    if given.requires_grad:
        theirs.copy_(given)
    else:  # where nothing was written the caller's keeps its digits
        theirs.copy_(torch.where(given == theirs.to(given.dtype), theirs, given.to(theirs.dtype)))


def _carry_back(handed: _Handed, as_theirs: Callable[[Any], Any]) -> None:
    now, before, theirs = handed.read(handed.given), handed.items, handed.theirs
    if isinstance(now, list) or isinstance(before, list):
        if len(now) != len(before) or any(item is not before[place] for place, item in enumerate(now)):
            theirs[:] = [as_theirs(item) for item in now]
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
    # Frozen dataclasses refuse to have them set, but a forward can.
    for name in gone:
        object.__delattr__(theirs, name)
    for name, item in written.items():
        object.__setattr__(theirs, name, item)
