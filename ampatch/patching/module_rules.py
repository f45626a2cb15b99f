"""Modules with rules of their own at O1 and O4: ``modules`` in a cast-lists file.

Owns the forward that replaces a module's own, and runs it under the module's rules. Must never cast an argument or a
result: functions do, by the rules in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import nn

from ampatch.cast_lists.rules import ModuleRules
from ampatch.errors import OptionError
from ampatch.ledger import PatchLedger
from ampatch.patching import thread_rules
from ampatch.patching.replaced_forward import Block, ReplacedForward, check_replaceable, own_forward
from ampatch.patching.thread_rules import TOKENS, Token
from ampatch.switch import Switch


def tokens_of(entries: Sequence[ModuleRules]) -> dict[ModuleRules, Token]:
    """Returns a token for each entry that has rules of its own; entries with the same changes share one.

    Raises:
        OptionError: there are more such entries than tokens.
    """
    changes = list(dict.fromkeys(entry.changes for entry in entries))
    if len(changes) > len(TOKENS):
        raise OptionError(
            f"cast_lists has {len(changes)} different sets of rules under modules; expected at most {len(TOKENS)}. "
            "Give some of them the same rules."
        )
    return {entry: TOKENS[changes.index(entry.changes)] for entry in entries}


def give_own_rules(modules: Mapping[nn.Module, tuple[str, str, Token]], ledger: PatchLedger, switch: Switch) -> None:
    """Makes modules compute by rules of their own while the session casts.

    Args:
        modules: modules that have a forward, each with its name and the entry that decides, both for messages, and
            with the token of its rules. Modules that already have rules keep them.
        ledger: records the changes.
        switch: switch of the session.

    Raises:
        OptionError: TorchScript has compiled one of them, or its forward is an asynchronous generator.
    """
    for module, (name, asked, token) in modules.items():
        own = own_forward(module, switch)
        if own is not None:
            check_replaceable(module, name, asked)
            ledger.set(module, "forward", _ForwardUnderRules(module, own, switch, token))


class _ForwardUnderRules(ReplacedForward):
    """The forward of a module that computes by its own rules until its session ends."""

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        switch: Switch | None = None,
        token: Token = thread_rules.NO_TOKEN,
    ) -> None:
        super().__init__(module, own, switch)
        self._token = token

    def block(self) -> Block:
        """Returns a block in which the rules are in force."""
        return thread_rules.under(self._token)

    def copied(self, module: nn.Module, own: Callable[..., Any]) -> Self:
        """Returns the forward of a copy of the module."""
        return type(self)(module, own, self.switch, self._token)
