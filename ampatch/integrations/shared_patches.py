"""Patches of a framework's classes that several trainers of one process share.

Owns how many trainers need them. Must not know which framework it is, nor what is patched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ampatch.ledger import PatchLedger


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
