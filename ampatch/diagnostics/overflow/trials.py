"""Tries a change before a trace suggests it: some functions in float32, as a blacklist would run them.

Owns the search for a small set of functions. Must never change a result outside of its block.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampatch.cast_lists.paths import Path, identity
from ampatch.cast_lists.spellings import EVERY_NAMESPACE, spellings
from ampatch.casting import cast_observers
from ampatch.casting.nested import cast_floating
from ampatch.function_wrapper import unwrapped
from ampatch.switch import Switch, WithoutCasts, is_in_region
from ampatch.tracing import ObservingMode

#: A function as a cast list has it: its namespace, or "*" for all, and its name.
Entry = tuple[str, str]

#: Functions of one change.
_MOST = 5


@contextmanager
def in_float32(entries: Iterable[Entry]) -> Iterator[None]:
    """Context in which some functions run in float32, however they are called, where amp casts."""
    paths = (
        spellings(name) if namespace == EVERY_NAMESPACE else [Path(namespace, name)] for namespace, name in entries
    )
    run = _InFloat32({id(unwrapped(identity(path))) for path in itertools.chain.from_iterable(paths)})
    # The first one has calls of patched functions come to the observer.
    with ObservingMode(), run:  # type: ignore[no-untyped-call]
        before, cast_observers.observer = cast_observers.observer, run
        try:
            yield
        finally:
            cast_observers.observer = before


class _InFloat32(TorchFunctionMode):
    """Runs functions in float32: patched ones as an observer of their calls, all others as a mode."""

    def __init__(self, ids: set[int]) -> None:
        super().__init__()
        self._ids, self._thread = ids, threading.get_ident()

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(unwrapped(func)) in self._ids and is_in_region() and not Switch.is_off():
            return self.call(unwrapped(func), func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    # What `cast_observers` asks

    def is_calling(self, function: object) -> bool:
        return id(function) not in self._ids or threading.get_ident() != self._thread

    def call(self, function: Any, _: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        wide_args, wide_kwargs = cast_floating((args, kwargs), torch.float32)
        with WithoutCasts():
            return function(*wide_args, **wide_kwargs)

    def cast(self, _: Any, make: Callable[[], Any]) -> Any:
        return make()

    def hit(self, kept: object) -> None:
        pass


def smallest(candidates: Iterable[Entry], is_finite: Callable[[list[Entry]], bool | None]) -> list[Entry] | None:
    """Returns a few functions with which in float32 a forward pass is finite; None if none were found.

    Args:
        candidates: functions, the likeliest first. They are added up, and then those dropped that are not needed.
        is_finite: runs the forward pass with functions in float32; returns None if that raises.
    """
    chosen: list[Entry] = []
    for each in itertools.islice(candidates, _MOST):
        result = is_finite([*chosen, each])
        if result is not None:  # None: it raises
            chosen.append(each)
        if result:
            break
    else:
        return None
    for each in chosen[:-1]:
        fewer = [other for other in chosen if other != each]
        if is_finite(fewer):
            chosen = fewer
    return chosen
