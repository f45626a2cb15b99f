"""Makes parts of a model compute in float32, or by their own rules, although torch's functions are patched.

These are the parts in ``keep_fp32`` and those under ``modules`` in a cast-lists file, at O1 and O4.

Owns the forward that replaces a part's own. For a part in float32, it casts half arguments to float32, and runs with
casts off. For a part with rules, it runs under these. Must never cast a result: functions outside of the part cast it
by their own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampatch.cast_lists.rules import ModuleRules
from ampatch.casting import write_back
from ampatch.casting.nested import cast_floating, with_versions
from ampatch.errors import OptionError
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.patching import thread_rules
from ampatch.patching.replaced_forward import Block, ReplacedForward, check_replaceable, own_forward
from ampatch.patching.thread_rules import TOKENS, Token
from ampatch.switch import Switch


def tokens_of(entries: Sequence[ModuleRules]) -> dict[ModuleRules, Token]:
    """Returns a token for each entry that has rules of its own; entries that say the same share one.

    Raises:
        OptionError: there are more such entries than tokens.
    """
    effects = list(dict.fromkeys(entry.effect for entry in entries))
    if len(effects) > len(TOKENS):
        raise OptionError(
            f"cast_lists has {len(effects)} different sets of rules under modules; expected at most {len(TOKENS)}. "
            "Give some of them the same rules."
        )
    return {entry: TOKENS[effects.index(entry.effect)] for entry in entries}


def give_rules(parts: Mapping[nn.Module, tuple[str, str, Token | None]], ledger: PatchLedger, switch: Switch) -> None:
    """Makes parts of a model compute in float32, or by rules of their own, while the session casts.

    Args:
        parts: modules that have a forward. Each maps to its name and the option or entry that decides, both for
            messages, and to the token of its rules; None for float32. Parts that already have this forward are skipped.
        ledger: records the changes.
        switch: switch of the session.

    Raises:
        OptionError: TorchScript has compiled a part; its forward is an asynchronous generator; or it should compute in
            float32 but has half weights.
    """
    for module, (name, asked, token) in parts.items():
        own = own_forward(module, switch)
        if own is not None:
            check_replaceable(module, name, asked)
            if token is None:
                _check_not_half(module, name, asked)
            ledger.set(module, "forward", _ForwardOfPart(module, own, switch, token))


def _check_not_half(module: nn.Module, name: str, asked: str) -> None:
    half = next((each for each, parameter in module.named_parameters() if parameter.dtype in HALVES), None)
    if half is not None:
        raise OptionError(
            f"{asked} matches {name!r}, whose {half!r} is half, and this opt level leaves weights as they are. "
            f"Convert it first: model.get_submodule({name!r}).float()."
        )


class _ForwardOfPart(ReplacedForward):
    """The forward of a part until its session ends."""

    def __init__(
        self, module: nn.Module, own: Callable[..., Any], switch: Switch | None = None, token: Token | None = None
    ) -> None:
        super().__init__(module, own, switch)
        self._token = token

    def block(self) -> Block:
        """Returns a block without casts, or one that puts the part's rules in force."""
        return Switch.disabled() if self._token is None else thread_rules.under(self._token)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward; in float32, on float32 arguments."""
        if self._token is not None:
            return self.in_block(*args, **kwargs)
        given = with_versions(cast_floating, (args, kwargs), torch.float32)
        return write_back.call(self.in_block, (args, kwargs), given, self.module)
