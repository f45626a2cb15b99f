"""Finds the places that hold a function: modules, classes, models, containers, closures and default arguments.

Owns which modules are searched for names bound earlier, and which places amp searches but does not change.
Must only read, and never call what it finds.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ampatch.function_wrapper import FunctionWrapper, unwrapped
from ampatch.ledger import bindings, loaded_modules
from ampatch.patching.container_functions import OPENED
from ampatch.torch_private.operators import NN


def swept_modules() -> list[types.ModuleType]:
    """Returns the modules in which names bound earlier are replaced."""
    # Names in torch's own modules stay as they are, except in torch.functional, where users call functions too, and in
    # torch._C._nn, under whose names torch compares what `__torch_function__` is asked about.
    return [torch.functional, NN, *loaded_modules("torch", "ampatch")]


def bound_methods(owners: Iterable[object], wanted: Container[int]) -> Iterator[tuple[object, str, types.MethodType]]:
    """Yields the places where modules hold a method that was bound to its class or object, as in ``relu = Relu.apply``.

    Args:
        owners: Python modules, or modules of a model.
        wanted: ids of the functions behind the methods, without amp.
    """
    for owner in owners:
        for name, held in object.__getattribute__(owner, "__dict__").copy().items():
            if type(held) is types.MethodType and id(unwrapped(held.__func__)) in wanted:
                yield owner, name, held


def rebound(method: types.MethodType) -> types.MethodType:
    """Returns a bound method with the wrapper, or the original, that the class of its object has in its place now."""
    owner, function = method.__self__, unwrapped(method.__func__)
    for kind in (owner if issubclass(type(owner), type) else type(owner)).__mro__:  # type: ignore[attr-defined]
        for held in vars(kind).values():
            found = held.__func__ if type(held) in (staticmethod, classmethod) else held
            if found is not method.__func__ and unwrapped(found) is function:
                return types.MethodType(found, owner)
    return method


class Kind(enum.Enum):
    """The kind of a place that holds a function."""

    MODULE = "name in a module"
    MODEL = "attribute of a model"
    CONTAINER = "container of a module"
    MODEL_CONTAINER = "container of a model"
    CLASS = "attribute of a class"
    FUNCTION = "closure or default argument"


@dataclass(frozen=True, slots=True)
class Place:
    """A place that holds a function.

    Attributes:
        kind: kind of the place.
        owner: module, module of a model, class or function.
        name: name of the attribute, or of the variable or argument.
        held: the function.
    """

    kind: Kind
    owner: object
    name: str
    held: object


def name_of(owner: object) -> str:
    """Returns the name of a module, class or function; of another object, that of its class."""
    if issubclass(type(owner), types.ModuleType):
        return str(object.__getattribute__(owner, "__dict__").get("__name__"))
    named: Any = owner if isinstance(owner, (type, types.FunctionType, FunctionWrapper)) else type(owner)
    return f"{named.__module__}.{named.__qualname__}"


def places(wanted: Mapping[int, object]) -> list[Place]:
    """Returns every place outside of torch and ampatch that holds one of some functions, and those in torch.functional.

    Searches modules, models, classes, functions, and containers and partials in them. Does not search attributes of
    other objects.

    Args:
        wanted: functions to look for, by their ``id``.
    """
    # A list, because gc.get_objects() also returns a tuple that a caller is still building: it must have one reference.
    return list(_places(wanted))


def _places(wanted: Mapping[int, object]) -> Iterator[Place]:
    swept = swept_modules()
    yield from (Place(Kind.MODULE, *found) for found in bindings(swept, wanted))
    yield from _in_containers(Kind.CONTAINER, swept[2:], wanted)
    models = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and _has_attributes(each)]
    yield from (Place(Kind.MODEL, *found) for found in bindings(models, wanted))
    yield from _in_containers(Kind.MODEL_CONTAINER, models, wanted)
    yield from _in_classes(wanted)
    yield from captures(wanted)


def _has_attributes(model: object) -> bool:
    try:  # raises for objects that are not initialised yet, and for proxies
        return type(object.__getattribute__(model, "__dict__")) is dict
    except AttributeError:
        return False


def _in_containers(kind: Kind, owners: Iterable[object], wanted: Mapping[int, object]) -> Iterator[Place]:
    for owner in owners:
        for name, value in list(object.__getattribute__(owner, "__dict__").items()):
            if type(value) in OPENED:
                yield from (Place(kind, owner, name, held) for held in held_in(value) if id(held) in wanted)


def _in_classes(wanted: Mapping[int, object]) -> Iterator[Place]:
    for owner in gc.get_objects():
        if not issubclass(type(owner), type) or _belongs_to_torch_or_amp(vars(owner).get("__module__")):
            continue
        for name, value in list(vars(owner).items()):
            function = value.__func__ if type(value) in (staticmethod, classmethod) else value
            for held in held_in(function):
                if id(held) in wanted:
                    yield Place(Kind.CLASS, owner, name, held)


def captures(wanted: Container[int]) -> Iterator[Place]:
    """Yields the functions outside of torch and ampatch that hold one of some objects in a closure or a default.

    They hold it directly, in a container or partial, or in a container of these. amp cannot replace it there.

    Args:
        wanted: ids of the objects to look for.
    """
    for function in gc.get_objects():
        if type(function) is not types.FunctionType:
            continue
        captures_any = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        if captures_any and not _belongs_to_torch_or_amp(function.__globals__.get("__name__")):
            for name, value in _captures(function):
                for held in held_in(value):
                    if id(held) in wanted:
                        yield Place(Kind.FUNCTION, function, name, held)


def held_in(value: object, deeper: int = 2) -> Iterator[object]:
    """Yields a value and, if it is a container or a partial, its contents, to a depth of two."""
    yield value
    # A dict with `__name__` holds the attributes of a module.
    if deeper and type(value) in OPENED and not (type(value) is dict and "__name__" in value):
        for held in gc.get_referents(value):
            yield from held_in(held, deeper - 1)


def _captures(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yields the names and values of a function's closure and of its default arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield name, cell.cell_contents
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    # A named tuple's `__new__` has more defaults than arguments.
    yield from zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def _belongs_to_torch_or_amp(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "ampatch")
