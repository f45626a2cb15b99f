"""Ctrl-C held back until it is convenient, so that nothing stops in the middle of an optimizer's step or of a file.

Owns the signal handler, and puts back the one that it found.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed; pressing it again changes nothing."""

    requested: bool = False

    def request(self, *_: object) -> None:
        """Takes note. Has the arguments of a signal handler."""
        self.requested = True


@contextmanager
def held_back() -> Iterator[Interrupt]:
    """Has Ctrl-C only be noted while the block runs.

    Where Ctrl-C does not raise KeyboardInterrupt in the first place (it is ignored, say, as in a background job), or in
    another thread than the main one, all stays as it is and nothing is noted.
    """
    interrupt = Interrupt()
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
