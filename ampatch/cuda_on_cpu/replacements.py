"""How something of torch is replaced while the CPU stands in: in every place where it stands, and through the ledger.

Knows which original each replacement stands for. Knows nothing of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampatch.ledger import PatchLedger, bindings, loaded_modules

Function = Callable[..., Any]


class Replacements:
    """What was replaced, and what is to be.

    Args:
        ledger: takes note of everything.
    """

    def __init__(self, ledger: PatchLedger) -> None:
        self.ledger = ledger
        # By the id of what is to be replaced: it, and what takes its place wherever modules hold it.
        self._wanted: dict[int, object] = {}
        self._standing_in: dict[int, object] = {}
        # By the id of a replacement: it, so that the id is its own for as long as this lives, and the original.
        self._originals: dict[int, tuple[object, object]] = {}

    def original_of(self, function: object) -> object:
        """Returns the original of a replacement; anything else as it is."""
        replacement, original = self._originals.get(id(function), (function, function))
        return original if replacement is function else function

    def method(self, owner: type, name: str, make: Callable[[Function], Function]) -> None:
        """Replaces a method by what ``make`` gives for the original; nothing where this torch has no such method."""
        if hasattr(owner, name):
            original = getattr(owner, name)
            stand_in = self._known(make(original), original, owner.__module__, f"{owner.__qualname__}.{name}")
            self.ledger.set(owner, name, stand_in)

    def function(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Is to replace a function of a module likewise, in every module."""
        original = getattr(owner, name, None)
        if original is not None and id(original) not in self._wanted:  # else it is known under another name
            self.everywhere(original, self._known(make(original), original, owner.__name__, name))

    def everywhere(self, original: object, stand_in: object) -> None:
        """Is to replace an object by another in every module that holds it."""
        self._wanted[id(original)], self._standing_in[id(original)] = original, stand_in

    def place(self) -> None:
        """Does so, looking through all modules once."""
        # In torch._C lie the originals, for TorchScript too, which makes its table of them when it first needs one.
        modules = [each for each in loaded_modules("ampatch") if not each.__name__.startswith("torch._C")]
        for holder, name, original in bindings(modules, self._wanted):
            self.ledger.set(holder, name, self._standing_in[id(original)])

    def _known(self, replacement: Function, original: Function, module: str, qualified: str) -> Function:
        functools.update_wrapper(replacement, original)
        # Where a pickle finds the replacement while it is installed, and the original where it is not.
        replacement.__module__, replacement.__qualname__ = module, qualified
        self._originals[id(replacement)] = (replacement, original)
        return replacement
