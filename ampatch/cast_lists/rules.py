"""Rules as values: what a list says of one function, and which functions can be listed at all.

Must not read a file, nor patch a function.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from ampatch.cast_lists import signatures
from ampatch.cast_lists.paths import Path
from ampatch.errors import did_you_mean


class Treatment(enum.Enum):
    """What happens to the arguments of a function; the value is the name of its list."""

    WHITELIST = "whitelist"
    BLACKLIST = "blacklist"
    PROMOTE = "promote"
    BANNED = "banned"


UNLISTED = "unlisted"


#: Arguments, each with the values for which a rule applies.
When = tuple[tuple[str, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a list says of one function.

    Attributes:
        path: the function's place.
        treatment: the list it stands in.
        source: file and line, for people. What a rule does, and so whether two are equal, does not depend on it.
        when: all of these have to hold; empty: it always applies.
        via_dtype: whether a blacklisted function computes in float32 by being passed ``dtype=torch.float32``.
        instead: what the error of a banned function tells the user to do.
        optional: whether a path that does not exist is passed over.
    """

    path: Path
    treatment: Treatment
    source: str = field(compare=False)
    when: When = ()
    via_dtype: bool = False
    instead: str | None = None
    optional: bool = field(default=False, compare=False)


#: What a file says: the rule that a path gets for a half dtype, or None where it is to have none.
Changes = Sequence[tuple[tuple[Path, torch.dtype], Rule | None]]


def typed_conditions(when: When) -> str:
    """Conditions on arguments, with the values as they stand in the YAML file, so that True is told from the string."""
    return ", ".join(f"{name}={'|'.join(map(_as_typed, values))}" for name, values in when)


def _as_typed(value: object) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


def why_unfit(path: Path, owner: object, function: Any, when: When = (), via_dtype: bool = False) -> str | None:
    """Returns why what stands at a path cannot be listed so, in a sentence; None if it can."""
    if not isinstance(owner, (types.ModuleType, type)):
        return f"{path.namespace!r} is {type(owner).__name__!r}; expected a module or a class."
    if isinstance(owner, type) and owner.__flags__ & _IMMUTABLE:
        return f"{path.namespace!r} is a class in C, and cannot be patched; name a class in Python, as torch.Tensor is."
    if isinstance(function, type) and function.__flags__ & _IMMUTABLE:
        return f"{path} is a class, not a function."
    if isinstance(function, type):
        return f"{path} is a class, not a function; name a method of it, such as `{path}: [forward]`."
    if not callable(function):
        return f"{path} is {type(function).__name__!r}, not a function."
    if not when and not via_dtype:
        return None
    readable = signatures.parameter_names(function)
    for argument, _ in when:
        if argument not in readable:
            known = f"expected {', '.join(readable)}.{did_you_mean(argument, readable)}" if readable else "none can."
            return f"`when` names the argument {argument!r}, which cannot be told from a call of {path}; {known}"
    if via_dtype and "dtype" not in readable:
        return f"{path} has no argument `dtype`; leave `via_dtype` out, and its arguments are cast instead."
    return None


# Py_TPFLAGS_IMMUTABLETYPE: setting an attribute of such a class raises TypeError.
_IMMUTABLE = 1 << 8
