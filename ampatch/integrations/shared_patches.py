"""Patches of a framework's methods, and of its classes that several trainers of one process share.

Owns how a function gets around a method, and how many trainers need a patch. Must not know which framework it is, nor
what is patched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ampatch.ledger import PatchLedger


def put_around(ledger: PatchLedger, owner: object, name: str, function: Callable[..., Any]) -> None:
    """Has calls of ``owner.name`` call a function instead, which gets the original and then the call's arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    ledger.set(owner, name, method)


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
