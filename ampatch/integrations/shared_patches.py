"""Patches of a framework's methods, and of its classes that several trainers of one process share.

Owns how a function gets around a method, and how many trainers need a patch. Must not know which framework it is, nor
what is patched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from ampatch.ledger import PatchLedger


def put_around(ledger: PatchLedger, owner: object, name: str, function: Callable[..., Any]) -> None:
    """Has calls of ``owner.name`` call a function instead, which gets the original and then the call's arguments.

    A copy of an object has the method of its class.
    """
    original = getattr(owner, name)
    if not isinstance(owner, (type, types.ModuleType)):
        ledger.set(owner, name, _Around(owner, name, original, function))
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    ledger.set(owner, name, method)


class _Around:
    """A method of one object, with a function around it."""

    def __init__(self, owner: object, name: str, original: Callable[..., Any], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._owner, self._name, self._original, self._function = owner, name, original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with the original method."""
        return self._function(self._original, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)  # a copy of the owner has no attributes of its own yet


class SharedPatches:
    """Patches that are installed while at least one `installed` block runs, in any thread.

    Args:
        install: function that installs them through the ledger that it gets.
    """

    def __init__(self, install: Callable[[PatchLedger], None]) -> None:
        self._install = install
        self._ledger = PatchLedger()
        self._lock = threading.RLock()
        self._users = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the patches while the block runs; the last block to end undoes them."""
        with self._lock:
            self._users += 1
        try:
            with self._lock:
                if not self._ledger.patches:
                    self._install(self._ledger)
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._ledger.undo()
