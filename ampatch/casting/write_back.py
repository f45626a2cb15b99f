"""Copies the writes of a forward pass to its arguments back to the caller's objects.

If amp casts the arguments, the forward pass gets its own containers and tensors. Results in these containers (a key in
a batch, an item at the end of a list, an attribute) would be lost, like in-place writes to tensors. Owns which forward
passes are running, and which arguments they got. Must not decide on dtypes, and must never write to an object that the
forward pass has not written to.
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

from ampatch.casting.nested import PLAIN, Replacements, attributes_of, cast_floating, is_opened

#: Positional arguments and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Contents of a container: by position, or by key or attribute.
Items = list[Any] | dict[Any, Any]

_WITHOUT_ATTRIBUTES = (list, dict, collections.OrderedDict, collections.defaultdict)

_OF_MODULES = vars(torch.nn.modules.module)


@dataclass(frozen=True, slots=True)
class _Handed:
    """A container that was passed to a forward pass.

    Attributes:
        theirs: the caller's container.
        given: container that the forward pass got; the caller's own if nothing in it was cast.
        read: function that returns the contents of a container.
        items: contents of ``given`` when the forward pass began.
        outer: contents of ``theirs`` when the forward pass began.
    """

    theirs: Any
    given: Any
    read: Callable[[Any], Items]
    items: Items
    outer: Items


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor whose copy was passed to a forward pass.

    Attributes:
        theirs: the caller's tensor.
        given: the copy.
        version: version counter of the copy when the forward pass began.
        node: ``grad_fn`` of the copy when the forward pass began.
    """

    theirs: Tensor
    given: Tensor
    version: int
    node: Node | None


class _Forward:
    """A running forward pass.

    Attributes:
        module: module that it belongs to.
        frame: frame of the module's call; once it has left the stack, the forward pass has ended. None if torch.compile
            traces it.
        handed: containers among its arguments, and containers in these.
        known: the caller's object for each tensor and container that the forward pass got.
        copies: copies of the caller's tensors that it got, if torch counts the writes to them.
    """

    __slots__ = ("copies", "frame", "handed", "known", "module")

    def __init__(self, module: nn.Module, frame: FrameType | None) -> None:
        self.module = module
        self.frame = frame
        self.handed: list[_Handed] = []
        self.known = Replacements()
        self.copies: list[_Copy] = []


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_stack = _Stack()
# torch.compile cannot read thread-local objects. It traces in one thread only.
_traced: list[_Forward] = []


def begin(module: nn.Module, theirs: Arguments, given: Arguments) -> None:
    """Records the arguments of a forward pass. Must be called by the hook itself, as `_call` counts stack frames.

    Args:
        module: module whose forward pass begins.
        theirs: arguments as the caller passed them.
        given: arguments as the forward pass gets them.
    """
    if is_exporting():  # an exported program cannot write to its arguments, and torch warns about objects kept here
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
    """Copies the writes of a forward pass back to the caller's objects, also if it raised.

    Args:
        module: module whose forward pass ends.
        dtype: dtype to cast new tensors to, in the result and in the writes; None leaves both unchanged.
        result: result of the forward pass; None if it raised.

    Returns:
        The result for the caller. If ``dtype`` is given, arguments in it are replaced by the caller's own.
    """
    known = Replacements()
    if not is_compiling():
        drop_interrupted()
    forwards = _traced if is_compiling() else _stack.forwards
    # If a hook before amp's raised, this forward pass never began.
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
    """Drops the forward passes of this thread that ended without a call of `end`, for example by Ctrl-C."""
    forwards = _stack.forwards
    while forwards and not _is_running(forwards[-1].frame):
        forwards.pop()


def _call() -> FrameType:
    """Returns the frame of a module's call whose hook has called `begin`: the outermost of torch's frames for it."""
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
    """Records a value and its contents."""
    if isinstance(given, Tensor):
        _open_tensor(forward, theirs, given)
        return
    if type(given) is not type(theirs) or not is_opened(given) or forward.known.find(given) is not None:
        return
    if isinstance(given, tuple):
        if len(given) == len(theirs):  # the ``to`` of its class may have made it longer
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
        # `end` replaces the copy by the caller's tensor, after it has copied in-place writes to that.
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
    """Copies in-place writes from a copy to the caller's tensor, together with their graph.

    In a strided tensor, elements that the forward pass has not changed keep all their digits.

    Returns:
        True if it could; False if the copy has another shape or layout than the caller's tensor.
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
    # An item may be an attribute too, and be gone already.
    gone = [key for key in before if key not in now and key in handed.read(theirs)]
    if handed.read is _by_key:
        _write_items(theirs, written, gone)
        if list(now) != list(before):
            _put_in_order(theirs, list(now))
    else:
        _write_attributes(theirs, written, gone)


def _items_of_list(now: Items, before: Items, outer: list[Any], as_theirs: Callable[[Any], Any]) -> Iterator[Any]:
    """Yields the items for the caller's list: the caller's own for items that it held when the forward pass began."""
    moved = Replacements()
    for place, item in enumerate(before):
        if place >= len(now) or now[place] is not item:
            moved.add(item, outer[place])
    for place, item in enumerate(now):
        if place < len(before) and item is before[place]:
            yield outer[place]
            continue
        own = moved.find(item)
        # Used once only: an item that occurs twice may have been written to in a way that torch does not count.
        moved.forget(item)
        yield as_theirs(item) if own is None else own


# These use statements, as compilers do not know the functions of ``operator`` that do the same.


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
    # Not setattr(): frozen dataclasses refuse it, and a property may hide an attribute. A forward pass can write both.
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
    """Returns True if a property of the class hides the attribute, so that only ``__dict__`` can hold it."""
    return isinstance(getattr(type(value), name, None), property)
