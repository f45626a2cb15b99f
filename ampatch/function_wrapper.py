"""The identity of wrapped functions: a wrapper equals its original.

Code compares functions with torch's names: in ``__torch_function__``, in passes over traced graphs, in registries that
were filled before a session or in it. Owns all of a wrapper but its call: equality, names, attributes. Must not know
what a call does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, Self

#: The slots of wrapper classes. Those that `FunctionWrapper.derived` makes may have a base in C, and that has slots.
NO_SLOTS: tuple[str, ...] = ()


class FunctionWrapper:
    """Base of the objects that stand under the name of a function.

    A wrapper has the attributes and the hash of its original, and binds to instances only if the original does. Its
    ``__dict__`` is the user's: functools.wraps copies it. So what amp keeps is in slots.

    Args:
        original: the function.

    Attributes:
        original: the function.
    """

    __slots__ = NO_SLOTS
    #: The slots of the classes that `derived` makes.
    state: ClassVar[tuple[str, ...]] = ("__dict__", "__weakref__", "original")

    original: Callable[..., Any]
    __module__: str
    __qualname__: str

    @classmethod
    @functools.cache
    def derived(cls, *bases: type) -> type[Self]:
        """Returns the class of instances: with slots, and with other bases in front, which may be written in C."""
        return type(cls.__name__, (*bases, cls), {"__slots__": cls.state, "__module__": cls.__module__})

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original; subclasses say how."""
        return self.original(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__qualname__}, patched by ampatch>"

    def __eq__(self, other: object) -> Any:
        return self.original == unwrapped(other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        binds = instance is not None and hasattr(type(self.original), "__get__")
        return types.MethodType(self, instance) if binds else self

    def __reduce__(self) -> str:
        return self.__qualname__  # as for functions: by name


def is_wrapper(value: object) -> bool:
    """Returns True if ``value`` is a wrapper itself, and not a proxy around one."""
    return issubclass(type(value), FunctionWrapper)  # not isinstance(), which accepts proxies


def unwrapped(value: object) -> object:
    """Returns the function under amp's wrappers; any other value unchanged."""
    while is_wrapper(value):
        value = value.original  # type: ignore[attr-defined]
    return value
