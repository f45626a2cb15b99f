"""Finds and casts the tensors in the arguments and results of operators.

Must never change a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.torch_private.modes import is_traceable_wrapper_subclass
from ampatch.torch_private.operators import UNSAFE_VIEW, tree_leaves, tree_map
from ampatch.torch_private.tensors import is_zerotensor, uncoalesced_values

_CONTAINERS = frozenset({tuple, list, dict})


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in arguments or results, those inside of wrapper classes (DTensor) in their place."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # By hand, since a watch asks it twice for each operator: a tree map takes ten times as long.
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.layout is torch.sparse_coo:
            found.append(uncoalesced_values(value))
        elif value.layout is torch.strided and not (value.is_meta or value.is_nested or is_zerotensor(value)):
            found.append(value)
    elif kind in _CONTAINERS:
        for each in value.values() if kind is dict else value:
            _collect(each, found)
    elif isinstance(value, Tensor):
        inner: Any = value
        if is_traceable_wrapper_subclass(inner):
            for name in inner.__tensor_flatten__()[0]:
                _collect(getattr(inner, name), found)
        else:
            _collect(value.as_subclass(Tensor), found)


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's values; of a sparse one, those that it keeps."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    return sum(each.nbytes for each in tensors_in(tensor))


def versions_of(arguments: Any) -> tuple[int, ...]:
    """Returns the version counters of the tensors in arguments, which operators in place advance."""
    return tuple(0 if each.is_inference() else each._version for each in tensors_in(arguments))


def has_inf(value: Any) -> bool:
    """Returns True if a number among arguments is inf."""
    kind = type(value)
    if kind in _CONTAINERS:
        return any(map(has_inf, value.values() if kind is dict else value))
    return kind is float and math.isinf(value)


def with_types(value: Any, types: Mapping[torch.dtype, torch.dtype]) -> Any:
    """Returns an operator's arguments with tensors and dtypes of some types in others; casts are copies."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(types[leaf.dtype]) if leaf.dtype in types else leaf
        return types.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return tree_map(cast, value)


def floating_in(result: Any) -> list[Tensor]:
    """Returns the dense floating-point tensors in an operator's results that are not empty."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    floating = [each for each in tensors if each.is_floating_point() and each.layout is torch.strided and each.numel()]
    return [each for each in floating if not (each.is_meta or is_zerotensor(each))]  # as forward mode passes them


@cache
def is_view(op: Any) -> bool:
    """Returns True if the results of an operator share memory with its arguments, and it writes nothing."""
    if op is UNSAFE_VIEW:  # a view, of which its schema says nothing
        return True
    returns = op._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
