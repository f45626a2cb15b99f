"""Delays Ctrl-C, so that it never interrupts an optimizer's step or the writing of a file.

Owns the signal handler. Must always restore the handler that it replaced.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Interrupt:
    """Record of whether Ctrl-C was pressed; pressing it again changes nothing.

    Attributes:
        requested: True if Ctrl-C was pressed.
    """

    requested: bool = False

    def request(self, *_: object) -> None:
        """Records that Ctrl-C was pressed. Takes the arguments of a signal handler."""
        self.requested = True


@contextmanager
def held_back() -> Iterator[Interrupt]:
    """Records Ctrl-C instead of raising KeyboardInterrupt while the block runs.

    Changes and records nothing if Ctrl-C would not raise KeyboardInterrupt (a background job ignores it, for example),
    or outside the main thread.
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
