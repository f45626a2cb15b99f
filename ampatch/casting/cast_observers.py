"""Shows casts, and the calls that need them, to an observer, such as an open `amp.report`.

Owns the observer of the process, since a report may begin before a session and outlive it. Calls in C++ do not check
for an observer. So each observer keeps a dispatch mode on the stack (`tracing.ObservingMode`), which sends all calls
through Python. An observer must never change a cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

_Casts = TypeVar("_Casts", Tensor, list[Tensor])


class CastObserver(Protocol):
    """Watches calls of patched and decorated functions, and their casts."""

    def is_calling(self, function: object) -> bool:
        """Returns False if the wrapper must hand this call to `call`.

        Returns True in the call that `call` itself makes, and in threads that are not watched.
        """

    def call(self, function: Any, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a wrapper, and returns what it returns.

        Args:
            function: the original, which the wrapper calls with cast arguments.
            wrapper: amp's function in its place.
            args: arguments of the caller.
            kwargs: keyword arguments of the caller.
        """

    def cast(self, tensor: Tensor, make: Callable[[], _Casts]) -> _Casts:
        """Makes one or several casts for the call that is running, and returns them.

        Args:
            tensor: what is cast, or the first of several.
            make: function that casts.
        """

    def hit(self, kept: list[Tensor]) -> None:
        """Called when a call uses casts that were made before."""


#: The current observer; None if there is none.
observer: CastObserver | None = None


def cast(tensor: Tensor, make: Callable[[], _Casts]) -> _Casts:
    """Makes one or several casts, through the observer if there is one."""
    return make() if observer is None else observer.cast(tensor, make)


def hit(kept: list[Tensor]) -> None:
    """Tells the observer, if there is one, that a call uses casts that were made before."""
    if observer is not None:
        observer.hit(kept)
