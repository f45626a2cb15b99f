"""Copies what a forward pass, or a user's function, writes to its arguments back to the caller's objects.

If amp casts the arguments, the forward pass gets its own containers and tensors. Without this module, results that it
puts into these containers would be lost: a key in a batch, an item at the end of a list, an attribute. In-place writes
to tensors would be lost too. Owns which forward
passes are running, and which arguments they got. Must not decide on dtypes, and must never write to an object that the
forward pass has not written to.

Functions that are decorated or registered count as forward passes.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from ampatch.casting.nested import PLAIN, Arguments, Replacements, attributes_of, cast_floating, is_opened
from ampatch.compilers import constant_while_traced
from ampatch.errors import UsageError
from ampatch.torch_private.modes import get_unwrapped, is_functorch_wrapped_tensor

#: Contents of a container: by position, or by key or attribute.
Items = list[Any] | dict[Any, Any]

_WITHOUT_ATTRIBUTES = (list, dict, collections.OrderedDict, collections.defaultdict)

_OF_MODULES = vars(torch.nn.modules.module)


@dataclass(frozen=True, slots=True)
class _Container:
    """A container that was passed to a forward pass.

    Attributes:
        original: the caller's container.
        passed: container that the forward pass got; the caller's own if nothing in it was cast.
        read: function that returns the contents of a container.
        items: contents of ``passed`` when the forward pass began.
        outer: contents of ``original`` when the forward pass began.
    """

    original: Any
    passed: Any
    read: Callable[[Any], Items]
    items: Items
    outer: Items


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor whose copy was passed to a forward pass.

    Attributes:
        original: the caller's tensor.
        passed: the copy.
        version: version counter of the copy when the forward pass began.
        node: id of the ``grad_fn`` of the copy when the forward pass began.
    """

    original: Tensor
    passed: Tensor
    version: int
    node: int


class _Forward:
    """A running forward pass.

    Attributes:
        module: module that it belongs to; None if `call` runs it.
        frame: frame of the module's call; once it has left the stack, the forward pass has ended. None if torch.compile
            traces it, or if `call` runs it.
        containers: containers among its arguments, and containers in these.
        known: the caller's object for each tensor and container that the forward pass got.
        copies: copies of the caller's tensors that it got.
    """

    __slots__ = ("containers", "copies", "frame", "known", "module")

    def __init__(self, module: nn.Module | None = None, frame: FrameType | None = None) -> None:
        self.module = module
        self.frame = frame
        self.containers: list[_Container] = []
        self.known = Replacements()
        self.copies: list[_Copy] = []


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_stack = _Stack()
# torch.compile cannot read thread-local objects. It traces in one thread only.
_traced: list[_Forward] = []


def begin(module: nn.Module, original: Arguments, passed: Arguments) -> None:
    """Records the arguments of a forward pass. Must be called by the hook itself, as `_call` counts stack frames.

    Args:
        module: module whose forward pass begins.
        original: arguments as the caller passed them.
        passed: arguments as the forward pass gets them; casts in them have version counters (`with_versions`).
    """
    if is_exporting():  # an exported program cannot write to its arguments, and torch warns about objects kept here
        return
    if is_compiling():
        forwards, forward = _traced, _Forward(module)
    else:
        drop_interrupted()
        forwards, forward = _stack.forwards, _Forward(module, _call())
    _track_arguments(forward, original, passed)
    forwards.append(forward)


def end(module: nn.Module, dtype: torch.dtype | None, result: object) -> object:
    """Copies the writes of a forward pass back to the caller's objects, also if it raised.

    Args:
        module: module whose forward pass ends.
        dtype: dtype to cast new tensors to, in the result and in the writes; None leaves them as they are.
        result: result of the forward pass; None if it raised.

    Returns:
        The result for the caller. Arguments in it are replaced by the caller's own; if ``dtype`` is None, only those
        that the forward pass has written to.
    """
    known = Replacements()
    if not is_compiling():
        drop_interrupted()
    forwards = _traced if is_compiling() else _stack.forwards
    # If a hook before amp's raised, this forward pass never began.
    if forwards and forwards[-1].module is module:
        forward = forwards.pop()
        known = forward.known
        _write_all(forward, dtype)
    return cast_floating(result, dtype, known)


def call(function: Callable[..., Any], original: Arguments, passed: Arguments, module: nn.Module | None = None) -> Any:
    """Calls a function with cast arguments; its writes to them reach the caller's objects, also if it raises.

    Args:
        function: function to call.
        original: arguments as the caller passed them.
        passed: the same, with casts in place of some tensors, which have version counters (`with_versions`).
        module: module whose forward the function is; None for any other function. Only for other functions are writes
            to tensors also found in compiled code.

    Returns:
        The function's result. Arguments in it that the function has written to are replaced by the caller's own.
    """
    unchanged = all(map(operator.is_, passed[0], original[0])) and (
        not passed[1] or all(map(operator.is_, passed[1].values(), original[1].values()))
    )
    if unchanged or is_exporting():  # as in `begin`
        return function(*passed[0], **passed[1])
    # Not in a list outside of this call: torch.compile refuses changes of such a list in a checkpoint.
    written = _Forward(module)
    _track_arguments(written, original, passed)
    try:
        result = function(*passed[0], **passed[1])
    finally:
        _write_all(written, None)
    return cast_floating(result, None, written.known)


def drop_interrupted() -> None:
    """Drops the forward passes of this thread that ended without a call of `end`, for example by Ctrl-C."""
    forwards = _stack.forwards
    while forwards and not is_running(forwards[-1].frame):
        forwards.pop()


def _call() -> FrameType:
    """Returns the frame of a module's call whose hook has called `begin`: the outermost of torch's frames for it."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_back.f_globals is _OF_MODULES:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Returns True if this thread is still running the call of a frame; False if Ctrl-C has ended it."""
    caller: FrameType | None = sys._getframe()
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


def _track_arguments(forward: _Forward, original: Arguments, passed: Arguments) -> None:
    _track_all(forward, original[0], passed[0])
    _track_all(forward, list(original[1].values()), list(passed[1].values()))


def _track_all(forward: _Forward, original: Sequence[Any], passed: Sequence[Any]) -> None:
    for place, inner in enumerate(passed):
        if type(inner) not in PLAIN:
            _track(forward, original[place], inner)


def _track(forward: _Forward, original: Any, passed: Any) -> None:
    """Records a value and its contents."""
    if isinstance(passed, Tensor):
        _track_tensor(forward, original, passed)
        return
    if type(passed) is not type(original) or not is_opened(passed) or forward.known.find(passed) is not None:
        return
    if isinstance(passed, tuple):
        _track_all(forward, original, passed)
        return
    forward.known.add(passed, original)
    if isinstance(passed, list):
        forward.containers.append(_Container(original, passed, list, list(passed), list(original)))
        _track_all(forward, original, passed)
    elif isinstance(passed, dict):
        _track_items(forward, original, passed, _by_key)
    if type(passed) not in _WITHOUT_ATTRIBUTES:
        _track_items(forward, original, passed, attributes_of)


def _track_tensor(forward: _Forward, original: Any, passed: Tensor) -> None:
    if passed is original or not isinstance(original, Tensor) or (forward.module is not None and is_compiling()):
        return
    if forward.known.find(passed) is None:
        # `end` replaces the copy by the caller's tensor, after it has copied in-place writes to that.
        forward.known.add(passed, original)
        forward.copies.append(_Copy(original, passed, *_state_of(passed)))


def _state_of(tensor: Any) -> tuple[int, int]:
    """Returns the version counter of a tensor, and the id of its ``grad_fn``.

    Under torch.compile both are constants, as they are at this point of the trace.
    """
    if is_dynamo_compiling():
        # In the graph a version is a number that no branch can depend on.
        from ampatch.torch_private.tracers import comptime

        comptime(lambda trace: _noted.append(_state_of(trace.get_local("tensor").as_fake())))
        return _noted_state()
    counted = tensor
    while is_functorch_wrapped_tensor(counted):  # those of torch.vmap count nothing themselves
        counted = get_unwrapped(counted)
    return counted._version, id(tensor.grad_fn)


_noted: list[tuple[int, int]] = []


@constant_while_traced
def _noted_state() -> tuple[int, int]:
    return _noted.pop()


def _track_items(forward: _Forward, original: Any, passed: Any, read: Callable[[Any], dict[Any, Any]]) -> None:
    items, outer = read(passed), read(original)
    forward.containers.append(_Container(original, passed, read, items, outer))
    for key, item in items.items():
        if type(item) not in PLAIN and key in outer:
            _track(forward, outer[key], item)


def _by_key(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(value.items())


def _write_all(forward: _Forward, dtype: torch.dtype | None) -> None:
    """Copies all writes of a forward pass to the caller's objects; casts new tensors to ``dtype`` if it is given.

    If the forward pass casts no result, the caller gets the copies in it. So only objects that the forward pass has
    written to stay known.
    """
    known = forward.known
    for copy in forward.copies:
        is_written = _state_of(copy.passed)[0] != copy.version
        if not (_write_tensor(copy, forward.module is None) if is_written else dtype is not None):
            known.forget(copy.passed)
    for container in forward.containers:
        if not _write_container(container, lambda item: cast_floating(item, dtype, known)) and dtype is None:
            known.forget(container.passed)


def _write_tensor(copy: _Copy, is_function: bool) -> bool:
    """Copies in-place writes from a copy to the caller's tensor, together with their graph.

    In a strided tensor, elements that the forward pass has not changed keep all their digits.

    Returns:
        True if it could; False if the copy has another shape than the caller's tensor.

    Raises:
        UsageError: the shape differs, and the caller has called a function, not a model.
    """
    original, passed = copy.original, copy.passed
    if passed.shape != original.shape:
        if is_function:
            raise UsageError(
                f"a function gave shape {tuple(passed.shape)} to an argument of shape {tuple(original.shape)} in "
                "place, but amp had cast it. Type x = x.unsqueeze(0) instead of x.unsqueeze_(0), and return x."
            )
        return False
    with torch.no_grad():
        before = original.clone()
    with contextlib.nullcontext() if _state_of(passed)[1] != copy.node else torch.no_grad():
        original.copy_(passed)
    if passed.layout is torch.strided:
        with torch.no_grad():
            original.copy_(torch.where(passed == before.to(passed.dtype), before, original))
    return True


def _write_container(container: _Container, as_original: Callable[[Any], Any]) -> bool:
    """Copies the changes of a container to the caller's; returns True if there are any."""
    now, before, original = container.read(container.passed), container.items, container.original
    if isinstance(now, list) or isinstance(before, list):
        changed = len(now) != len(before) or any(item is not before[place] for place, item in enumerate(now))
        if changed:
            original[:] = _items_of_list(now, before, list(container.outer), as_original)
        return changed
    written = {key: as_original(item) for key, item in now.items() if key not in before or item is not before[key]}
    # An item may be an attribute too, and be gone already.
    gone = [key for key in before if key not in now and key in container.read(original)]
    if container.read is _by_key:
        _write_items(original, written, gone)
        if list(now) != list(before):
            _put_in_order(original, list(now))
    else:
        _write_attributes(original, written, gone)
    return bool(written or gone)


def _items_of_list(now: Items, before: Items, outer: list[Any], as_original: Callable[[Any], Any]) -> Iterator[Any]:
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
        # Used only once: an item that occurs twice may have been written to in a way that torch does not count.
        moved.forget(item)
        yield as_original(item) if own is None else own


# These use statements, as compilers do not know the functions of ``operator`` that do the same.


def _write_items(original: dict[Any, Any], written: dict[Any, Any], gone: list[Any]) -> None:
    for key in gone:
        del original[key]
    for key, item in written.items():
        original[key] = item  # noqa: PERF403 - a class may do more than update() does


def _put_in_order(original: dict[Any, Any], keys: list[Any]) -> None:
    if list(original) != keys:
        items = [(key, original.pop(key)) for key in keys]
        for key, item in items:
            original[key] = item  # noqa: PERF403 - as above


def _write_attributes(original: object, written: dict[Any, Any], gone: list[Any]) -> None:
    # Not setattr(): frozen dataclasses refuse it, and a property may hide an attribute. A forward pass can write both.
    own = getattr(original, "__dict__", {})
    for name in gone:
        if name in own:
            del own[name]
        else:
            object.__delattr__(original, name)
    for name, item in written.items():
        if isinstance(getattr(type(original), name, None), property):  # it hides what only ``__dict__`` can hold
            own[name] = item
        else:
            object.__setattr__(original, name, item)
