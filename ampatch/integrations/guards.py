"""Guards: code of amp around methods of a framework's class, and around users' overrides of them.

Owns how a guard gets around a method, wherever among the bases of a class it is defined. Must not know any framework.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ampatch.errors import UsageError

#: Functions that return a method with a guard around it, by the name of the method.
Guards = Mapping[str, Callable[[Any], Any]]

_M = TypeVar("_M", bound=Callable[..., Any])

_GUARDED = "_is_guarded_by_ampatch"


def guarded(guards: Guards, method: _M, name: str = "") -> _M:
    """Returns a method with its guard around it.

    Args:
        guards: the guards of a mixin.
        method: method to guard. If it calls its parent's, which is guarded too, the inner guard changes nothing.
        name: name under which a class has it; empty: its own.
    """
    made = guards[name or method.__name__](method)
    setattr(made, _GUARDED, True)
    return made  # type: ignore[no-any-return]


def guard_methods(cls: type, guards: Guards) -> None:
    """Puts the guards around a class's own methods, and around those of bases that precede the mixin."""
    for name in guards:
        method = cls.__dict__.get(name)
        if method is None and not hasattr(getattr(cls, name), _GUARDED):
            method = _inherited(cls, name)
        if method is not None and not hasattr(method, _GUARDED):
            setattr(cls, name, guarded(guards, method, name))


def check_precedes(mixin: type, base: type, cls: type, kind: str) -> None:
    """Raises if a class names a mixin after the framework's class.

    Args:
        mixin: the class with the guards.
        base: the framework's class, whose methods they guard.
        cls: class that derives from the mixin, and perhaps from the base.
        kind: word for the base in the message, such as "net".

    Raises:
        UsageError: it does.
    """
    if issubclass(cls, base) and cls.__mro__.index(base) < cls.__mro__.index(mixin):
        raise UsageError(
            f"{cls.__name__} names {mixin.__name__} after the {kind}, whose methods would bypass it. Type "
            f"class {cls.__name__}({mixin.__name__}, {cls.__bases__[0].__name__})."
        )


def _inherited(cls: type, name: str) -> Callable[..., Any]:
    """Returns a method that calls the method of this name that a class inherits."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    return functools.wraps(getattr(cls, name))(method)
