"""The arguments of ``amp.initialize`` that users of a framework give to its adapter.

Owns their names, the check of the level and its overrides, and whether they turn amp on. Must not read them from a
framework's objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ampatch import amp, opt_levels

#: Arguments that decide whether amp is on.
DECIDING = ("enabled", "opt_level", *opt_levels.OVERRIDES)


def names(*own: str) -> list[str]:
    """Returns the names of the arguments, without models, optimizers, ``num_losses`` and others that an adapter owns.

    Args:
        own: further arguments that the adapter passes itself.
    """
    excluded = {"models", "optimizers", "num_losses", *own}
    return [name for name in inspect.signature(amp.initialize).parameters if name not in excluded]


def check_level(given: Mapping[str, Any]) -> None:
    """Raises if the level, half type, verbosity or an override is not allowed, or contradicts another.

    Values that depend on the model's device or on other sessions are checked when amp is set up.

    Raises:
        OptionError: one of them does.
    """
    opt_levels.check_verbosity(given.get("verbosity", 1))
    half = opt_levels.check_half_dtype(given.get("half_dtype") or torch.bfloat16)
    opt_levels.resolve(given.get("opt_level", "O1"), half, **{name: given.get(name) for name in opt_levels.OVERRIDES})


def turn_on(given: Mapping[str, Any]) -> bool:
    """Returns True if amp does anything with these arguments: O0 without overrides does not.

    Raises:
        OptionError: ``enabled`` is a text other than "True" and "False".
    """
    if not opt_levels.as_flag("enabled", given.get("enabled", True)):
        return False
    return given.get("opt_level", "O1") != "O0" or any(given.get(name) is not None for name in opt_levels.OVERRIDES)
