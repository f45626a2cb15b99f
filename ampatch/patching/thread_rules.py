"""Chooses the lists for this thread: the session's, or those of a part of a model with its own rules.

Owns the state of each thread. A part's rules are in force in the thread that runs its forward. torch.compile must
compile again if the rules change. It guards, for each thread, the type of every autocast that is on. So under a part's
rules, autocast is on for a device that no tensor here uses. The autocast's type, the *token*, identifies the set of
rules. Must not know models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from ampatch.compilers import called_in_graphs
from ampatch.half_types import HALVES
from ampatch.switch import KINDS, RULES, Region

_T = TypeVar("_T")

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


def choosing(of_session: _T, of_parts: Mapping[Token, _T]) -> Callable[..., _T]:
    """Returns a function that returns, for any arguments, what belongs to the rules in force.

    Args:
        of_session: what belongs to the session's rules.
        of_parts: what belongs to the rules of parts, where these differ.
    """
    return lambda *_: of_parts.get(torch.get_autocast_dtype(RULES), of_session)


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
