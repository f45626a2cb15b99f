"""Finds modules whose forward computes with complex numbers, which have no half type.

Reads classes and attributes of modules. Must never run or change them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Iterator

from torch import nn

from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.spellings import called_by
from ampatch.function_wrapper import unwrapped

_NAMES = frozenset({"complex", "eig", "eigvals", "istft", "polar", "stft", "view_as_complex"})


def is_complex(path: Path) -> bool:
    """Returns True if a function of torch has complex arguments or a complex result."""
    return path.namespace == "torch.fft" or (path.namespace.partition(".")[0] == "torch" and path.name in _NAMES)


def modules_that_call(functions: Container[int], model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of a model whose methods or attributes name one of some functions.

    Methods of torch's own classes are not read. A call by way of another Python module is not found.

    Args:
        functions: ids of the functions, without amp.
        model: model whose submodules are read, itself included.
    """
    names: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in names:
            names[kind] = any(
                each in functions for method in _methods(kind) for each in (id(method), *called_by(method))
            )
        if names[kind] or any(id(each) in functions for each in _held_by(module)):
            yield module


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            for value in vars(base).values():
                found = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(found, types.FunctionType):
                    yield found


def _held_by(module: nn.Module) -> Iterator[object]:
    for value in vars(module).values():
        held = value
        while isinstance(held, functools.partial):
            held = held.func
        yield unwrapped(held)
