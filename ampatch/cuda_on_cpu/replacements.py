"""Replaces objects of torch while the CPU stands in: in every module that holds them, and through the ledger.

Owns the mapping from replacements to originals. Must not know about devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampatch.ledger import PatchLedger, bindings, loaded_modules
from ampatch.torch_private.devices import EXTENSION

Function = Callable[..., Any]


class Replacements:
    """Replacements that were made, and replacements that `place` has yet to make.

    Args:
        ledger: ledger that records every replacement.
    """

    def __init__(self, ledger: PatchLedger) -> None:
        self.ledger = ledger
        # By the id of an original: the original, and its replacement in every module that holds it.
        self._wanted: dict[int, object] = {}
        self._standing_in: dict[int, object] = {}
        # By the id of a replacement: the replacement and its original. The reference keeps the id from being reused.
        self._originals: dict[int, tuple[object, object]] = {}

    def original_of(self, function: object) -> object:
        """Returns the original of a replacement, and any other object unchanged."""
        replacement, original = self._originals.get(id(function), (function, function))
        return original if replacement is function else function

    def method(self, owner: type, name: str, called: Function) -> None:
        """Has a method call ``called(original, self, ...)``; a no-op if this version of torch has no such method."""
        if hasattr(owner, name):
            stand_in = self._calling(called, getattr(owner, name), owner.__module__, f"{owner.__qualname__}.{name}")
            self.ledger.set(owner, name, stand_in)

    def function(self, owner: Any, name: str, called: Function) -> None:
        """Registers a module's function to call ``called(original, ...)`` in every module; a no-op if there is none."""
        original = getattr(owner, name, None)
        if original is not None and id(original) not in self._wanted:  # else it is registered under another name
            self.everywhere(original, self._calling(called, original, owner.__name__, name))

    def everywhere(self, original: object, stand_in: object) -> None:
        """Registers an object to be replaced by another in every module that holds it."""
        self._wanted[id(original)], self._standing_in[id(original)] = original, stand_in

    def place(self) -> None:
        """Makes the registered replacements in all loaded modules but those of ampatch and torch._C."""
        # torch._C keeps the originals: TorchScript builds its table of them when it first needs one.
        modules = [each for each in loaded_modules("ampatch") if not each.__name__.startswith(EXTENSION.__name__)]
        for holder, name, original in bindings(modules, self._wanted):
            self.ledger.set(holder, name, self._standing_in[id(original)])

    def _calling(self, called: Function, original: Function, module: str, qualified: str) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return called(original, *args, **kwargs)

        # Under this name a pickle finds the replacement while it is installed, and the original when it is not.
        replacement.__module__, replacement.__qualname__ = module, qualified
        self._originals[id(replacement)] = (replacement, original)
        return replacement
