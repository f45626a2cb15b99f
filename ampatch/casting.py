"""Pure casts of nested arguments: containers are walked, and tensors handed to a function.

Decides nothing about types; what comes back is the very same object wherever nothing was cast.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: The types that a cast may come from. float64, complex, quantized, 8-bit and integer tensors are never touched.
CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: Most arguments are of these, and hold no tensor: they are passed over before anything dearer is asked.
PLAIN = frozenset({int, float, bool, str, type(None)})

TensorCast = Callable[[Tensor], Tensor]


def cast_tensors(value: object, cast: TensorCast) -> object:
    """``value`` with ``cast`` applied to every tensor in it, through lists, tuples, named tuples and dicts.

    Args:
        value: any object. Containers keep their class.
        cast: what is done to a tensor; returns the tensor itself where nothing is to be done.

    Returns:
        The same object if no tensor changed; otherwise new containers around the new tensors.
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


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _like_sequence(value: list[object] | tuple[object, ...], items: list[object]) -> object:
    kind = type(value)
    if kind is list:
        return items
    if isinstance(value, list):
        like = copy.copy(value)  # a user's class may be made from anything, so it is not called
        like[:] = items
        return like
    if hasattr(kind, "_make"):  # a named tuple takes its fields one by one
        return kind._make(items)
    return kind(items)


def _like_dict(value: dict[object, object], values: dict[object, object]) -> object:
    if type(value) is dict:
        return values
    like = copy.copy(value)  # keeps a default factory, and attributes
    for key, item in values.items():
        like[key] = item
    return like
