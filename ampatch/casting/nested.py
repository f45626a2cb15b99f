"""Casts nested arguments: opens containers, and calls a function on each tensor in them.

Must not decide on dtypes. If nothing was cast, the result must be the very same object.

There are two traversals. `cast_tensors` runs in each call of a patched function: it opens only the containers that
torch's functions accept, and does only what it must. `cast_floating` runs once per forward pass: it opens the
containers that users pass to a model.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from dataclasses import fields
from types import MemberDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ampatch.half_types import HALVES

#: The positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Returns the arguments that a rule asks for, given the arguments of a call. Can raise `BannedFunctionError`.
Adapt = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]

#: The dtypes that a cast may start from. float64, complex, quantized, 8-bit and integer tensors are never cast.
CASTABLE = frozenset({torch.float32, *HALVES})

_T = TypeVar("_T")

#: The classes of most arguments. They hold no tensor, so they are skipped before any slower check.
PLAIN = frozenset({int, float, bool, str, type(None)})


class Replacements:
    """Replacements of objects, found by identity. Keeps objects and replacements alive, so that no id is reused."""

    __slots__ = ("_by_id", "_pairs")

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[object, object]] = {}
        # A list under torch.compile, which would compile again for each new id.
        self._pairs: list[tuple[object, object]] | None = [] if is_compiling() else None

    def find(self, value: object) -> Any:
        """Returns the replacement of a value; None if there is none."""
        if self._pairs is not None:
            for known, other in reversed(self._pairs):
                if known is value:
                    return other
            return None
        found = self._by_id.get(id(value))
        return None if found is None else found[1]

    def add(self, value: object, other: object) -> None:
        """Makes ``other`` the replacement of ``value``, instead of an earlier one."""
        if self._pairs is None:
            self._by_id[id(value)] = value, other
        else:
            self._pairs.append((value, other))

    def forget(self, value: object) -> None:
        """Removes the replacement of a value."""
        if self._pairs is None:
            self._by_id.pop(id(value), None)
        else:
            self._pairs = [pair for pair in self._pairs if pair[0] is not value]


TensorCast = Callable[[Tensor], Tensor]


def cast_tensors(value: object, cast: TensorCast) -> object:
    """Returns ``value`` with ``cast`` applied to every tensor in it, in lists, tuples, named tuples and dicts.

    Args:
        value: any object. Containers keep their class.
        cast: function that casts a tensor; returns the tensor itself if no cast is needed.

    Returns:
        The same object if no tensor changed; otherwise new containers with the new tensors.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (list, tuple)):
        items = [item if type(item) in PLAIN else cast_tensors(item, cast) for item in value]
        return value if all(map(operator.is_, items, value)) else _like_sequence(value, items)
    if isinstance(value, dict):
        values = {key: cast_tensors(item, cast) for key, item in value.items()}
        return value if all(map(operator.is_, values.values(), value.values())) else _like_dict(value, values)
    return value


def cast_floating(value: object, dtype: torch.dtype | None, known: Replacements | None = None) -> Any:
    """Returns ``value`` with every float32, float16 and bfloat16 tensor in it cast to ``dtype``.

    Opens lists, tuples, named tuples, dicts, other mappings, and the fields of dataclasses. Returns all other objects
    unchanged: their method ``to`` may change data that they share with other objects.

    Args:
        value: any object. It is never written to.
        dtype: a floating dtype; None casts nothing, and only makes the known replacements.
        known: replacements of objects in ``value``; new ones are added.

    Returns:
        The same object if nothing changed; otherwise one of the same class, with the attributes of the old one. An
        object in several places has one replacement in all of them. A container that holds itself is opened once: the
        references to itself stay references to the old one.
    """
    return _cast_floating(value, dtype, Replacements() if known is None else known)


def with_versions(make: Callable[..., _T], *given: Any) -> _T:
    """Returns ``make(*given)``: new casts, with the version counters that casts made in inference mode would lack."""
    # In this order: Dynamo cannot trace the second question.
    if is_compiling() or not torch.is_inference_mode_enabled():
        return make(*given)
    with torch.inference_mode(False), torch.no_grad():
        return make(*given)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yields every tensor in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns every tensor in the arguments of a call, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) not in PLAIN:
            found.extend(tensors_in(value))
    return found


def _cast_floating(value: Any, dtype: torch.dtype | None, known: Replacements) -> Any:
    if type(value) in PLAIN:
        return value
    cast: object = known.find(value)
    if cast is not None and not isinstance(cast, Tensor):
        return cast
    value = value if cast is None else cast
    if isinstance(value, Tensor):
        cast = value.to(dtype) if dtype and value.dtype in CASTABLE and value.dtype != dtype else value
    elif isinstance(value, tuple):  # can hold itself only through a container of another class
        return _cast_sequence(value, dtype, known)
    else:
        cast_opened = _floating_cast_of(value)
        if cast_opened is None:
            return value
        known.add(value, value)  # found if it holds itself
        cast = cast_opened(value, dtype, known)
    known.add(value, cast)
    return cast


def is_opened(value: object) -> bool:
    """Returns True if `cast_floating` looks for tensors in an object that is not a tensor."""
    return isinstance(value, tuple) or _floating_cast_of(value) is not None


def _floating_cast_of(value: object) -> Callable[[Any, Any, Replacements], object] | None:
    """Returns the function that casts an object that is neither a tensor nor a tuple; None if it stays unchanged."""
    kind = type(value)
    if isinstance(value, list):
        return _cast_sequence
    if isinstance(value, (type, nn.Module)):
        return None
    if hasattr(kind, "__dataclass_fields__"):
        return _cast_dataclass
    if isinstance(value, dict):
        return _cast_dict
    return _cast_mapping if isinstance(value, Mapping) else None


def _cast_sequence(value: list[object] | tuple[object, ...], dtype: torch.dtype | None, known: Replacements) -> object:
    items = [_cast_floating(item, dtype, known) for item in value]
    return value if all(map(_same, items, value)) else _like_sequence(value, items)


def _cast_dict(value: dict[Any, object], dtype: torch.dtype | None, known: Replacements) -> object:
    values = {key: _cast_floating(item, dtype, known) for key, item in value.items()}
    return value if all(map(_same, values.values(), value.values())) else _like_dict(value, values)


def _cast_dataclass(value: Any, dtype: torch.dtype | None, known: Replacements) -> object:
    """Casts the fields; if the dataclass is also a dict, such as Hugging Face's ModelOutput, the items too."""
    items = dict(value.items()) if isinstance(value, dict) else {}
    held = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    # A field that is also an item is cast as an item. A field can differ from the item of its name: ModelOutput keeps
    # the item when its attribute is set to None.
    held = {name: field for name, field in held.items() if name not in items or not _same(items[name], field)}
    new_items = {key: _cast_floating(item, dtype, known) for key, item in items.items()}
    new_held = {name: _cast_floating(field, dtype, known) for name, field in held.items()}
    if all(map(_same, (*new_items.values(), *new_held.values()), (*items.values(), *held.values()))):
        return value
    if not isinstance(value, dict):
        return _made(value, {**attributes_of(value), **new_held})
    like = _like_dict(value, new_items)
    for name, field in new_held.items():  # after the items: setting them may set attributes
        object.__setattr__(like, name, field)
    return like


def _cast_mapping(value: Mapping[Any, object], dtype: torch.dtype | None, known: Replacements) -> object:
    # A user's class may keep its items anywhere. Setting them in a copy could change the original, which may share the
    # place. So the attributes that store the items are cast; they are found by their contents.
    items = dict(value.items())
    ids = {id(item) for item in items.values() if type(item) not in PLAIN}
    attributes = attributes_of(value)
    stores = {name: store for name, store in attributes.items() if _holds_any(store, ids)}
    if stores:
        cast = {name: _cast_floating(store, dtype, known) for name, store in stores.items()}
        unchanged = all(map(_same, cast.values(), stores.values()))
        return value if unchanged else _made(value, {**attributes, **cast})
    values = {key: _cast_floating(item, dtype, known) for key, item in items.items()}
    if all(map(_same, values.values(), items.values())):
        return value
    try:  # fails for a class in C, or one that nests its items deeper
        like: Any = type(value)(values)  # type: ignore[call-arg]
    except TypeError:
        return value
    return like if all(like.get(key) is item for key, item in values.items()) else value


def _holds_any(store: object, ids: Set[int]) -> bool:
    items = store.values() if isinstance(store, Mapping) else store
    return isinstance(items, (list, tuple, ValuesView)) and any(id(item) in ids for item in items)


def _same(new: object, old: object) -> bool:
    """Returns True if both are one object, or tuples of the same objects, which torch.compile cannot tell apart."""
    if isinstance(new, tuple) and isinstance(old, tuple):
        return len(new) == len(old) and all(map(_same, new, old))
    return new is old


# The functions below rebuild objects by ``__new__`` alone, as copy and pickle do: the ``__init__`` of a user's class
# can take any arguments, and can do anything.


def _like_sequence(value: list[object] | tuple[object, ...], items: list[object]) -> object:
    kind = type(value)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if isinstance(value, list):
        copied = _made(value, attributes_of(value))
        copied[:] = items
        return copied
    try:
        like: Any = tuple.__new__(kind, items)  # type: ignore[type-var]  # mypy does not narrow type(value)
    except TypeError:  # a class in C, such as those of torch.return_types
        return kind(items)
    if hasattr(value, "__dict__"):
        like.__dict__.update(value.__dict__)
    return like


def _like_dict(value: dict[Any, object], values: dict[Any, object]) -> object:
    if type(value) is dict:
        return values
    if type(value) is collections.OrderedDict and torch.compiler.is_compiling():
        return collections.OrderedDict(values)  # from torch 2.14 on, compilers cannot read its attributes
    attributes = attributes_of(value)
    for name, held in attributes.items():
        if name in values and _same(value[name], held):  # many classes have their items as attributes too
            attributes[name] = values[name]
    like = _made(value, attributes)
    if isinstance(value, collections.defaultdict):
        like.default_factory = value.default_factory
    for key, item in values.items():
        like[key] = item
    if getattr(value, "__dict__", None) is value:
        like.__dict__ = like
    return like


def _made(value: object, attributes: Mapping[str, object]) -> Any:
    """Returns an object of the class of ``value`` with these attributes and no items, even if the class is frozen."""
    kind = type(value)
    like: Any = kind.__new__(kind)
    own = getattr(value, "__dict__", {})
    for name, held in attributes.items():
        if name in own:
            like.__dict__[name] = held
        else:
            object.__setattr__(like, name, held)
    return like


def attributes_of(value: object) -> dict[str, Any]:
    """Returns the attributes that an object holds itself, in slots and in its ``__dict__``."""
    slots = [
        name
        for kind in type(value).__mro__
        if hasattr(kind, "__slots__")
        for name, member in vars(kind).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    ]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
