"""Guards: code of amp around methods of a framework's class, and around users' overrides of them.

Owns how a guard gets around a method, wherever among the bases of a class it is defined. Must not know any framework.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ampatch.errors import UsageError

#: By the name of a method, the function that runs it. It gets the object, and a function that calls the method.
Guards = Mapping[str, Callable[[Any, Callable[[], Any]], Any]]

_GUARDED = "_is_guarded_by_ampatch"


def guard_methods(cls: type, guards: Guards) -> None:
    """Puts the guards around a class's own methods, and around those that it inherits without a guard.

    If a guarded method calls its parent's, which is guarded too, the inner guard changes nothing.
    """
    for name, guard in guards.items():
        method = getattr(cls, name, None)
        if method is not None and not hasattr(method, _GUARDED):
            own = method if name in vars(cls) else _inherited(cls, name)
            setattr(cls, name, _guarded(own, guard))


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


def _guarded(method: Callable[..., Any], guard: Callable[[Any, Callable[[], Any]], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return guard(self, functools.partial(method, self, *args, **kwargs))

    setattr(guarded, _GUARDED, True)
    return guarded
