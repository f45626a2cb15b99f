"""Whether casts are on: on for the process, off for a thread.

On belongs to the process, because autograd runs backward functions, and with them checkpoint recomputation, on threads
of its own, which must see casts on. Off belongs to the thread, because one thread's `disable_casts` must not reach
another's.

Compiled code must follow, and torch.compile does not guard what its graphs do by name, such as methods of tensors. What
it guards always, per thread, is for which types of device autocast is enabled. So where casts are off autocast is on
for a type of device that no tensor here is on: nothing but that guard looks at it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from ampatch.patching import PatchLedger

# An accelerator whose backend is not public. torch leaves it out even when it asks whether *any* autocast is enabled.
_SIGNAL = "maia"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.off = 0


class Switch:
    """The on/off switch of one session.

    Attributes:
        active: on for the process; set once the session is installed, cleared for good when it is taken down.
        thread: ``thread.off`` counts the regions of this thread in which casts are off.
    """

    __slots__ = ("active", "thread")

    def __init__(self) -> None:
        self.active = False
        self.thread = _Thread()

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Casts are off in this thread until the block ends; nests."""
        with self._at(self.thread.off + 1):
            yield

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Takes back one `disabled` until the block ends: for a closure that an optimizer's step calls."""
        with self._at(self.thread.off - 1):
            yield

    def follow_checkpoints(self, ledger: PatchLedger) -> None:
        """Has `torch.utils.checkpoint` recompute a region with casts on or off, as they were when it ran."""
        # Below torch.utils.checkpoint.checkpoint, which many have bound or put into a functools.partial before.
        for owner, name in (
            (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"),
            (torch.utils.checkpoint.CheckpointFunction, "apply"),
        ):
            ledger.set(owner, name, self._remembered_by(getattr(owner, name)))

    def _remembered_by(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(checkpoint)
        def wrapper(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            off = self.thread.off

            def as_it_ran(*args: Any, **kwargs: Any) -> Any:
                with self._at(off):
                    return function(*args, **kwargs)

            return checkpoint(as_it_ran, *args, **kwargs)

        return wrapper

    @contextlib.contextmanager
    def _at(self, off: int) -> Iterator[None]:
        # Inside a graph casts could be switched for functions only, not for what the graph does by name.
        torch._dynamo.graph_break()
        before, signal = self.thread.off, torch.is_autocast_enabled(_SIGNAL)
        self.thread.off = off
        torch.set_autocast_enabled(_SIGNAL, off > 0)
        try:
            yield
        finally:
            self.thread.off = before
            torch.set_autocast_enabled(_SIGNAL, signal)
