"""Positions of a function's arguments by name, also for torch's builtins.

``inspect.signature`` fails for most of torch's functions, which are builtins. Their parameters are read from the
operators' schemas. ``torch.overrides.get_testing_overrides`` is not used: in dozens of cases its names or positions
differ from the function's (``topk``, ``polygamma``, ``convolution``). Must only read, never change anything.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ampatch.torch_private.operators import get_schemas_for_operator


@dataclass(frozen=True, slots=True)
class ArgumentReader:
    """Reads one argument of a call: by keyword, else by position, else its default (None if it has none).

    Attributes:
        name: name of the argument.
        position: position of the argument; None if it is keyword-only.
        default: value if the call does not pass the argument.
        aliases: other keywords for the argument.
    """

    name: str
    position: int | None
    default: object
    aliases: tuple[str, ...] = ()

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Returns the argument's value in a call."""
        for name in (self.name, *self.aliases):
            if name in kwargs:
                return kwargs[name]
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return self.default


def parameter_names(function: Callable[..., object]) -> tuple[str, ...]:
    """Returns the names of the arguments that can be read from any call: by position, then the keyword-only ones.

    Empty if the function has no signature and no operator's schema.
    """
    return tuple(_readers(function))


def may_have(function: Callable[..., object], name: str) -> bool:
    """Returns True if a function might have an argument ``name``, without reading its signature.

    ``name`` must not be in any operator's schema: the result is False for all builtins.
    """
    if type(function) is types.FunctionType and not hasattr(function, "__wrapped__"):
        return name in function.__code__.co_varnames
    return type(function) not in _BUILTINS


def argument_reader(function: Callable[..., object], name: str) -> ArgumentReader | None:
    """Returns the reader of the argument ``name`` in calls of ``function``; None if its position is not known."""
    return _readers(function).get(name)


def first_argument_reader(function: Callable[..., object]) -> ArgumentReader | None:
    """Returns the reader of the first argument in calls of ``function``; None if its position is not known."""
    return next(iter(_readers(function).values()), None)


# NumPy's keywords that torch's builtins also accept (numpy_compatibility_arg_names in its python_arg_parser.cpp).
_NUMPY_NAMES = {"input": ("x", "a", "x1"), "other": ("x2",), "dim": ("axis",), "keepdim": ("keepdims",)}


def _readers(function: Callable[..., object]) -> Mapping[str, ArgumentReader]:
    # inspect.signature fails for these, and is slow to raise.
    if type(function) in _BUILTINS and not getattr(function, "__text_signature__", None):
        return _readers_of_operator(function.__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _readers_of_operator(getattr(function, "__name__", ""))
    return _readers_of([_of_signature(signature)])


_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType)


def _readers_of_operator(name: str) -> Mapping[str, ArgumentReader]:
    return _cached_readers(name, tuple(map(str, get_schemas_for_operator(f"aten::{name}"))))


@functools.cache  # the schemas are in the key, as a library can add overloads, and define one anew
def _cached_readers(name: str, _: tuple[str, ...]) -> Mapping[str, ArgumentReader]:
    return types.MappingProxyType(_readers_of(_overloads_of_operator(name)))


def _readers_of(overloads: list[list[ArgumentReader]]) -> dict[str, ArgumentReader]:
    """Returns the readers for calls of any of the overloads, from the readers of each overload."""
    places = [[each.name for each in overload if each.position is not None] for overload in overloads]
    readers: dict[str, ArgumentReader] = {}
    for reader in (reader for overload in overloads for reader in overload):
        name = reader.name
        position = next((names.index(name) for names in places if name in names), None)
        # The second argument of torch.max is a dimension or another tensor: its position does not say which.
        if position is not None and any(len(names) > position and names[position] != name for names in places):
            continue
        known = readers.get(name)
        default = reader.default if known is None or known.default is None else known.default
        readers[name] = replace(reader, position=position, default=default)
    # Without sorting, the keyword-only arguments of one overload would precede the arguments that the next one adds.
    last = max(map(len, places), default=0)
    return dict(sorted(readers.items(), key=lambda item: last if item[1].position is None else item[1].position))


def _of_signature(signature: inspect.Signature) -> list[ArgumentReader]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        ArgumentReader(p.name, index if p.kind in positional else None, None if p.default is p.empty else p.default)
        for index, p in enumerate(signature.parameters.values())
        if p.kind not in variadic
    ]


def _overloads_of_operator(name: str) -> list[list[ArgumentReader]]:
    """Returns the overloads that take a tensor; the others are TorchScript's, for plain numbers."""
    return [
        [_of_schema(argument, index) for index, argument in enumerate(schema.arguments) if not argument.is_out]
        for schema in get_schemas_for_operator(f"aten::{name}")
        if any("Tensor" in str(argument.type) for argument in schema.arguments)
    ]


def _of_schema(argument: Any, index: int) -> ArgumentReader:
    # A schema's self is called input in Python; in a method it is the tensor itself.
    name = "input" if argument.name == "self" else argument.name
    default = argument.default_value if argument.has_default_value() else None
    return ArgumentReader(name, None if argument.kwarg_only else index, default, _NUMPY_NAMES.get(name, ()))
