"""Chooses the lists that this thread computes by: the session's, or those of a part of a model with its own rules.

Owns the state of each thread, and the adapters that read it. A part's rules are in force in the thread that runs its
forward. torch.compile must compile anew if the rules change. It guards, for each thread, the type of every autocast
that is on. So under a part's rules autocast is on for a device that no tensor here uses. Its type, the token, stands
for the set of rules. Must not know models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ampatch.compilers import called_in_graphs, traced_within_others
from ampatch.ledger import PatchLedger
from ampatch.switch import checkpoint_functions, parallel_apply_owners

# torch has this device on macOS only, where ampatch does not run. Like the device of the switch, torch ignores it in
# its check whether any autocast is on.
_SIGNAL = "mps"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Adapt = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]

#: Stands for one set of rules.
Token = torch.dtype

#: Stands for the session's rules. It is a type under which torch.autocast accepts the device.
NO_TOKEN: Token = torch.float16

#: All tokens of rules of parts, in the order of their use.
TOKENS: Sequence[Token] = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {torch.float16, torch.bfloat16},
    key=str,
)


def in_force() -> Token:
    """Returns the token of the rules that this thread computes by; another type if these are the session's."""
    return torch.get_autocast_dtype(_SIGNAL)


def choosing(adapt: Adapt, of_parts: Mapping[Token, Adapt]) -> Adapt:
    """Returns an adapter that adapts by the rules in force.

    Args:
        adapt: adapter by the session's rules.
        of_parts: adapters by the rules of parts, where these differ.
    """

    def by_rules_in_force(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        found = of_parts.get(torch.get_autocast_dtype(_SIGNAL))
        return adapt(args, kwargs) if found is None else found(args, kwargs)

    return by_rules_in_force


def unchanged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Adapts nothing: for functions without a rule."""
    return args, kwargs


def under(token: Token) -> AbstractContextManager[None]:
    """Puts other rules in force in this thread until the block ends; nests. In compiled code the graph does so."""
    return _under_in_graph(token) if is_dynamo_compiling() else _Region(True, token)


class _Region:
    """A region of code with given rules."""

    __slots__ = ("_before", "_state")

    def __init__(self, is_own: bool, token: Token) -> None:
        self._state = is_own, token

    @traced_within_others
    def __enter__(self) -> None:
        torch._dynamo.graph_break()  # a graph cannot know by which rules it will run
        self._before = _state()
        _set_state(*self._state)

    @traced_within_others
    def __exit__(self, *_: object) -> None:
        _set_state(*self._before)


def _state() -> tuple[bool, Token]:
    return torch.is_autocast_enabled(_SIGNAL), torch.get_autocast_dtype(_SIGNAL)


def _set_state(is_own: bool, token: Token) -> None:
    torch.set_autocast_enabled(_SIGNAL, is_own)
    torch.set_autocast_dtype(_SIGNAL, token)


@contextlib.contextmanager
def _under_in_graph(token: Token) -> Iterator[None]:
    """Replaces a region under torch.compile."""
    before = torch.get_autocast_dtype(_SIGNAL) if torch.is_autocast_enabled(_SIGNAL) else NO_TOKEN
    with torch.autocast(_SIGNAL, NO_TOKEN):  # tracing restores this wherever it stops or restarts, the type too
        _set_token(str(token))
        try:
            yield
        finally:
            _set_token(str(before))


@called_in_graphs
def _set_token(name: str) -> None:
    """Notes in a graph by which rules it goes on; sets autocast itself, since export records it without entering it."""
    token = getattr(torch, name.removeprefix("torch."))
    _set_state(token is not NO_TOKEN, token)


def carry(ledger: PatchLedger) -> None:
    """Patches torch, so that recomputed regions and `torch.nn.DataParallel`'s threads keep the rules of their caller.

    Call it after the switch has patched the same functions.

    Args:
        ledger: records the patches.
    """
    for owner, name, position in checkpoint_functions():
        ledger.set(owner, name, _carried_by_checkpoint(getattr(owner, name), position))
    for owner in parallel_apply_owners():
        ledger.set(owner, "parallel_apply", _carried_to_threads(owner.parallel_apply))


def _carried_by_checkpoint(checkpoint: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(checkpoint)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        function = _with_state(_state(), args[position])
        return checkpoint(*args[:position], function, *args[position + 1 :], **kwargs)

    return wrapper


def _carried_to_threads(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parallel_apply)
    def wrapper(modules: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
        return parallel_apply([_with_state(_state(), module) for module in modules], *args, **kwargs)

    return wrapper


def _with_state(state: tuple[bool, Token], function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _Region(*state):
            return function(*args, **kwargs)

    return wrapper
