"""Chooses the lists for this thread: the session's, or those of a part of a model with its own rules.

Owns the state of each thread, and the adapters that read it. A part's rules are in force in the thread that runs its
forward. torch.compile must compile again if the rules change. It guards, for each thread, the type of every autocast
that is on. So under a part's rules, autocast is on for a device that no tensor here uses. The autocast's type, the
*token*, identifies the set of rules. Must not know models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ampatch.casting.nested import Adapt, Arguments
from ampatch.compilers import called_in_graphs
from ampatch.half_types import HALVES
from ampatch.switch import KINDS, RULES, Region

#: Makes the result of a call of what it has returned; see `ampatch.patching.adapters.Adapter`.
Finish = Callable[[Arguments, Arguments, Any], Any]

#: Makes a call itself, or returns None; see `ampatch.patching.adapters.Adapter`.
Instead = Callable[[tuple[Any, ...], dict[str, Any]], Any]

#: Identifies one set of rules.
Token = torch.dtype

#: Identifies the session's rules. It is a type that torch.autocast accepts for the device.
NO_TOKEN: Token = torch.float16

#: All tokens of rules of parts, in the order of their use.
TOKENS: Sequence[Token] = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - HALVES,
    key=str,
)


def in_force() -> Token:
    """Returns the token of this thread's rules; another type if these are the session's."""
    return torch.get_autocast_dtype(RULES)


def choosing(adapt: Adapt, of_parts: Mapping[Token, Adapt]) -> Adapt:
    """Returns an adapter that adapts by the rules in force.

    Args:
        adapt: adapter by the session's rules.
        of_parts: adapters by the rules of parts, where these differ.
    """

    def by_rules_in_force(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        found = of_parts.get(torch.get_autocast_dtype(RULES))
        return adapt(args, kwargs) if found is None else found(args, kwargs)

    return by_rules_in_force


def finishing(finish: Finish | None, of_parts: Mapping[Token, Finish | None]) -> Finish | None:
    """Returns a function that finishes calls by the rules in force; None if none does anything. See `choosing`."""
    if finish is None and not any(of_parts.values()):
        return None

    def by_rules_in_force(given: Arguments, adapted: Arguments, result: Any) -> Any:
        found = of_parts.get(torch.get_autocast_dtype(RULES), finish)
        return result if found is None else found(given, adapted, result)

    return by_rules_in_force


def trying(instead: Instead | None, of_parts: Mapping[Token, Instead | None]) -> Instead | None:
    """Returns a function that makes calls itself by the rules in force; None if none does. See `choosing`."""
    if instead is None and not any(of_parts.values()):
        return None

    def by_rules_in_force(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = of_parts.get(torch.get_autocast_dtype(RULES), instead)
        return None if found is None else found(args, kwargs)

    return by_rules_in_force


def unchanged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments unchanged, for functions without a rule."""
    return args, kwargs


def under(token: Token) -> AbstractContextManager[None]:
    """Puts other rules in force in this thread until the block ends; nests. In compiled code the graph does this."""
    if is_dynamo_compiling():
        return _under_in_graph(token)
    others = (None,) * len(KINDS)
    return Region((None, (*others, True), (*others, token), None))


@contextlib.contextmanager
def _under_in_graph(token: Token) -> Iterator[None]:
    """Replaces a region under torch.compile."""
    before = torch.get_autocast_dtype(RULES) if torch.is_autocast_enabled(RULES) else NO_TOKEN
    with torch.autocast(RULES, NO_TOKEN):  # tracing restores this, with the type, wherever it stops or restarts
        _set_token(str(token))
        try:
            yield
        finally:
            _set_token(str(before))


@called_in_graphs
def _set_token(name: str) -> None:
    """Records in a graph which rules apply from here on. Sets autocast, since export records it without entering it."""
    token = getattr(torch, name.removeprefix("torch."))
    torch.set_autocast_enabled(RULES, token is not NO_TOKEN)
    torch.set_autocast_dtype(RULES, token)
