"""The arguments of ``amp.initialize`` that users of a framework give to its adapter.

Owns their names, the check of the level and its overrides, and whether they turn amp on. Must not read them from a
framework's objects.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ampatch import amp, opt_levels
from ampatch.errors import OptionError, did_you_mean

#: Arguments that replace a value of the opt level.
OVERRIDES = tuple(field.name for field in dataclasses.fields(opt_levels.Overrides))

#: Arguments that decide whether amp is on.
DECIDING = ("enabled", "opt_level", *OVERRIDES)


def names(*own: str) -> list[str]:
    """Returns the names of the arguments, without models, optimizers, ``num_losses`` and others that an adapter owns.

    Args:
        own: further arguments that the adapter passes itself.
    """
    excluded = {"models", "optimizers", "num_losses", *own}
    return [name for name in inspect.signature(amp.initialize).parameters if name not in excluded]


def hint(name: str, known: Sequence[str], also: str = "") -> str:
    """Returns the end of an error about an unknown name: similar names, or all known ones.

    Args:
        name: name that is not known.
        known: names that are.
        also: one more known name, which is not looked at for similarity; empty: none.
    """
    return did_you_mean(name, known) or f" Expected {f'{also} or ' if also else ''}one of {', '.join(known)}."


def check_names(given: Iterable[str], known: Sequence[str], whose: str) -> None:
    """Raises if a name is not known.

    Args:
        given: names that the user gave.
        known: names that are known.
        whose: the beginning of the error, such as "prepare got".

    Raises:
        OptionError: one is not.
    """
    for name in given:
        if name not in known:
            raise OptionError(f"{whose} the unknown argument {name!r}.{hint(name, known)}")


def check_level(given: Mapping[str, Any]) -> None:
    """Raises if the level, half type, verbosity or an override is not allowed, or contradicts another.

    Values that depend on the model's device or on other sessions are checked when amp is set up.

    Raises:
        OptionError: one of them does.
    """
    opt_levels.check_verbosity(given.get("verbosity", 1))
    half = opt_levels.check_half_dtype(given.get("half_dtype") or torch.bfloat16)
    overrides = opt_levels.Overrides(**{name: given.get(name) for name in OVERRIDES})
    opt_levels.resolve(given.get("opt_level", "O1"), half, overrides)


def turn_on(given: Mapping[str, Any]) -> bool:
    """Returns True if amp does anything with these arguments: O0 without overrides does not.

    Raises:
        OptionError: ``enabled`` is a text other than "True" and "False".
    """
    if not opt_levels.as_flag("enabled", given.get("enabled", True)):
        return False
    return given.get("opt_level", "O1") != "O0" or any(given.get(name) is not None for name in OVERRIDES)
