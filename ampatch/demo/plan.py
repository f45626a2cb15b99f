"""The plan of an `ampatch demo`: opt levels, half types, number of epochs and seed.

Owns these values and the order of the runs. Must not train. The four fields of a plan determine every result except the
times, so a checkpoint holds them, and a resumed demo reads them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ampatch.half_types import HALF_DTYPES
from ampatch.opt_levels import LEVELS

# The levels that the demo offers, and the half types of each (None: no half type).
OPT_LEVELS: dict[str, Sequence[str | None]] = {
    name: tuple(half for half, dtype in HALF_DTYPES.items() if level.half_dtype in (None, dtype))
    if level.patched or level.converts
    else (None,)
    for name, level in LEVELS.items()
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        opt_level: a key of ``OPT_LEVELS``.
        half_dtype: the half type's name, without "torch."; None if the level uses none.
    """

    opt_level: str
    half_dtype: str | None

    @property
    def dtype(self) -> torch.dtype | None:
        """Half type as a torch dtype; None if the level uses none."""
        return None if self.half_dtype is None else HALF_DTYPES[self.half_dtype]

    def __str__(self) -> str:
        return f"{self.opt_level} {self.half_dtype}" if self.half_dtype else self.opt_level


# Every run that a plan can have, by its setting: `O0`, `O1:float16` and so on.
SETTINGS: dict[str, Run] = {
    f"{opt_level}:{half_dtype}" if half_dtype else opt_level: Run(opt_level, half_dtype)
    for opt_level, half_dtypes in OPT_LEVELS.items()
    for half_dtype in half_dtypes
}
# Values of `--opt-levels`: a level means its runs in all half types, a setting means one run.
CHOICES = tuple(dict.fromkeys([*OPT_LEVELS, *SETTINGS]))


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs to train; the defaults of the fields are the demo's.

    Attributes:
        opt_levels: members of ``CHOICES``, in the order of the runs.
        half_dtypes: names of half types for levels given without one. A level that has none of these runs in its own.
        epochs: number of epochs of each run.
        seed: seed of the initial weights and of the order of the digits.
    """

    # float16 is slow on CPUs, and O2 in bfloat16 is O5.
    opt_levels: list[str] = field(default_factory=lambda: ["O0", "O1", "O2:float16", "O5"])
    half_dtypes: list[str] = field(default_factory=lambda: list(HALF_DTYPES))
    # Two epochs reach 97% in every default run with seeds 0 to 5, but not with seed 6.
    epochs: int = 3
    seed: int = 0

    def runs(self) -> list[Run]:
        """Returns the runs in order, each once: a level runs in those of the plan's half types that it offers."""
        runs: list[Run] = []
        for name in self.opt_levels:
            if name in OPT_LEVELS:
                allowed = OPT_LEVELS[name]
                chosen = [half_dtype for half_dtype in self.half_dtypes if half_dtype in allowed] or allowed
                runs += [Run(name, half_dtype) for half_dtype in chosen]
            else:
                runs.append(SETTINGS[name])
        return list(dict.fromkeys(runs))
