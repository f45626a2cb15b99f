"""Opt levels to try, as users give them, and the calls of ``amp.initialize`` that set them up, as text.

Must never run a model.
"""

from __future__ import annotations

import torch

from ampatch.errors import OptionError
from ampatch.half_types import HALF_TYPES
from ampatch.opt_levels import LEVELS, check_half_dtype, check_opt_level, dtype_name

#: An opt level and its half type.
Level = tuple[str, torch.dtype]

#: O4 and O5 are O1 and O2 in bfloat16.
_IN_BFLOAT16 = {"O4": "O1", "O5": "O2"}


def levels_of(opt_level: object, half_dtype: object = None) -> list[Level]:
    """Returns a level with its half types: both, unless one is given or the level has its own.

    Raises:
        OptionError: the level or the half type is none; the level is O0; or the two contradict each other.
    """
    level = check_opt_level(opt_level)
    if level == "O0":
        others = ", ".join(each for each in LEVELS if each != level)
        raise OptionError(f"O0 is float32, with which every level is compared; expected one of {others}.")
    half = None if half_dtype is None else check_half_dtype(half_dtype)
    halves = HALF_TYPES if LEVELS[level].half_dtype is None else (torch.bfloat16,)
    if half not in (None, *halves):
        other = _IN_BFLOAT16.get(level, "O2")
        raise OptionError(f"{level} is bfloat16, and half_dtype is {half}. Type {other!r} instead.")
    return [(level, each) for each in halves if half in (None, each)]


def as_o1_to_o3(level: Level) -> Level:
    """Returns the level that does the same: O1 and O2 in bfloat16 for O4 and O5, itself for all others."""
    return _IN_BFLOAT16.get(level[0], level[0]), level[1]


def checked_levels(levels: object) -> list[Level]:
    """Returns opt levels with their half types, those that do the same once.

    Args:
        levels: a level, such as "O1"; a pair of a level and a half type; or a list or tuple of these.

    Raises:
        OptionError: one of them is neither, or there is none.
    """
    found: dict[Level, Level] = {}
    for each in levels if isinstance(levels, (list, tuple)) else [levels]:
        pair = each if isinstance(each, (list, tuple)) else (each,)
        if len(pair) not in (1, 2):
            raise OptionError(f"levels has {each!r}; expected a level ('O1'), or a pair ('O1', torch.float16).")
        for level in levels_of(*pair):
            found.setdefault(as_o1_to_o3(level), level)
    if not found:
        raise OptionError("levels is empty; expected opt levels, such as ('O1', 'O2').")
    return list(found.values())


def name_of(level: str, half_dtype: torch.dtype) -> str:
    """Returns a level with its half type, such as "O1 float16"; O0 has none."""
    return level if level == "O0" else f"{level} {dtype_name(half_dtype)}"


def call_of(opt_level: str, half_dtype: str, *arguments: str) -> str:
    """Returns a call of ``amp.initialize`` as text to paste."""
    half = [] if LEVELS[opt_level].half_dtype is not None else [f'half_dtype="{half_dtype}"']
    given = ["model", "optimizer", f'opt_level="{opt_level}"', *half, *arguments]
    return f"amp.initialize({', '.join(given)})"
