"""torch's two stacks of modes: of functions, and of operators.

Puts a mode below those of other code, and takes it out from under them. Must never run code of other modes: some
reset themselves on entry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampatch.torch_private import modes
from ampatch.torch_private.devices import DeviceContext


@dataclass(frozen=True, slots=True)
class ModeStack:
    """One of torch's stacks, of this thread.

    Attributes:
        modes: returns its modes, the innermost last.
        push: puts a mode on top.
        pop: removes the mode on top, and returns it.
    """

    modes: Callable[[], list[Any]]
    push: Callable[[Any], None]
    pop: Callable[[], Any]

    def insert(self, mode: Any) -> None:
        """Puts a mode below all others."""
        popped = [self.pop() for _ in self.modes()]
        # torch keeps a default device at the bottom, and checks that.
        below = [popped.pop()] if popped and isinstance(popped[-1], DeviceContext) else []
        for each in (*below, mode, *reversed(popped)):
            self.push(each)

    @contextlib.contextmanager
    def without(self, mode: Any) -> Iterator[None]:
        """Takes a mode out until the block ends; without it does nothing."""
        is_on = mode in self.modes()
        self.remove(mode)
        try:
            yield
        finally:
            if is_on:
                self.insert(mode)

    def remove(self, mode: Any) -> None:
        """Takes a mode out, wherever it is; without it does nothing."""
        if mode in self.modes():
            popped = [self.pop() for _ in self.modes()]
            for each in reversed(popped):
                if each is not mode:
                    self.push(each)


FUNCTIONS = ModeStack(modes.function_modes, modes.push_function_mode, modes.pop_function_mode)
OPERATORS = ModeStack(modes.dispatch_modes, modes.push_dispatch_mode, modes.pop_dispatch_mode)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Takes all modes off this thread's stacks until the block ends."""
    popped = [(stack, [stack.pop() for _ in stack.modes()]) for stack in (FUNCTIONS, OPERATORS)]
    try:
        yield
    finally:
        for stack, modes in popped:
            for mode in reversed(modes):
                stack.push(mode)
