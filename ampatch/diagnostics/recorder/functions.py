"""Names torch's functions as cast lists do, and says which list rules each.

Must never patch a function, nor change a session.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch.overrides import resolve_name

from ampatch.cast_lists.paths import find_owner, identity
from ampatch.cast_lists.spellings import NAMESPACES, SYMBOLS
from ampatch.function_wrapper import unwrapped
from ampatch.patching import casting_mode
from ampatch.runtime import decoration_of
from ampatch.session import Session
from ampatch.torch_private.operators import OpOverload, OpOverloadPacket

#: Where functions are looked for by their own names, in this order.
_PLACES = ("torch.nn.functional", *NAMESPACES, "torch.autograd")


def name_of(function: Any) -> str:
    """Returns the public path of a function, as the cast lists have it."""
    # By id: torch.mm == torch.spmm is True.
    known = _names.get(id(function))
    if known is None:
        known = _names[id(function)] = function, _found_name(function)
    return known[1]


_names: dict[int, tuple[Any, str]] = {}  # with the functions, whose ids stay their own


def _found_name(function: Any) -> str:
    if isinstance(function, str):
        return function
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{function}"
    own = getattr(function, "__name__", None)
    for place in _PLACES:
        if own is not None and unwrapped(getattr(find_owner(place), own, None)) is function:
            return f"{place}.{own}"
    if decoration_of(function) is None and not isinstance(function, types.FunctionType):
        named = resolve_name(function)
        if named is not None:
            return str(named)
    home = getattr(function, "__module__", None) or "torch"
    return f"{home}.{getattr(function, '__qualname__', own or function)}"


# Operators: torch reports `x + y` as `Tensor.add`. The instruction that called it tells them apart.

_UNARY = {"UNARY_NEGATIVE": "neg", "UNARY_INVERT": "invert", "UNARY_POSITIVE": "pos"}
_BINARY = {**SYMBOLS, "<<": "lshift", ">>": "rshift", "&": "and", "|": "or", "^": "xor"}


def operator_called(function: Any, frame: types.FrameType) -> Any:
    """Returns the operator's method, such as ``Tensor.__add__``, if a frame calls a function by an operator.

    Args:
        function: the function that torch reports.
        frame: the frame that called it.

    Returns:
        The method; the function itself if it was called by its name.
    """
    methods = _methods().get(function)
    if methods is None:
        return function
    code, at = frame.f_code, frame.f_lasti
    key = id(code), at
    known = _called.get(key)
    if known is None:
        known = _called[key] = code, _operator_at(code, at)
    return methods.get(known[1], function)


_called: dict[tuple[int, int], tuple[types.CodeType, str | None]] = {}


def _operator_at(code: types.CodeType, at: int) -> str | None:
    """Returns the method of the operator that an instruction is, such as ``__iadd__``; None for other instructions."""
    instructions = ((each.opname, each.argrepr) for each in dis.get_instructions(code) if each.offset == at)
    kind, symbol = next(instructions, ("", ""))
    if kind not in ("COMPARE_OP", "BINARY_OP"):
        name = _UNARY.get(kind)
    elif symbol.endswith("=") and symbol not in _BINARY:
        name = f"i{_BINARY[symbol[:-1]]}"
    else:
        name = _BINARY.get(symbol)
    return name and f"__{name}__"


@cache
def _methods() -> dict[Any, dict[str | None, Any]]:
    """Returns the methods of operators by their names, by the function that torch reports for them."""
    found: dict[Any, dict[str | None, Any]] = {}
    for method, function in casting_mode.reported_functions().items():
        if function is not method:
            found.setdefault(function, {})[method.__name__] = method
    return found


class Rulings:
    """Which list rules each function in a session.

    Args:
        session: the session; it is not kept.

    Attributes:
        half_dtype: the half type of the session.
    """

    def __init__(self, session: Session) -> None:
        self.half_dtype = session.settings.properties.half_dtype
        self._lists = session.settings.lists
        self._of_parts = tuple(session.casts.lists_of_parts.values())
        self._registered = session.casts.registered
        self._patches = session.settings.patches_functions

    def of(self, functions: Iterable[Any], *, of_parts: bool = True) -> dict[Any, str]:
        """Returns "whitelist", "blacklist", "promote", "banned", "by part" or "registered" by function.

        "by part" is a function that parts of a model treat otherwise than the session does.

        Args:
            functions: the functions.
            of_parts: False returns the session's lists also for functions that parts treat otherwise.
        """
        if not self._patches:
            return {}
        of_session = self._lists.for_half(self.half_dtype)
        ruled = {id(identity(path)): rule.treatment.value for path, rule in of_session.items()}
        for lists in self._of_parts if of_parts else ():
            own = lists.for_half(self.half_dtype)
            differing = (path for path in {**of_session, **own} if own.get(path) != of_session.get(path))
            ruled |= {id(identity(path)): "by part" for path in differing}
        ruled |= {id(unwrapped(getattr(known.owner, known.name, None))): "registered" for known in self._registered}
        return {function: ruled[id(function)] for function in functions if id(function) in ruled}

    def formats_of(self, functions: Iterable[Any]) -> dict[Any, str]:
        """Returns the number formats of functions as text, of those that have some; several if parts have others."""
        found: dict[int, dict[str, None]] = {}
        for lists in (self._lists, *self._of_parts):
            for path, rule in lists.for_half(self.half_dtype).items():
                if rule.formats is not None:
                    found.setdefault(id(identity(path)), {})[str(rule.formats)] = None
        return {function: "; ".join(found[id(function)]) for function in functions if id(function) in found}
