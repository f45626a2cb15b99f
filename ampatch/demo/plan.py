"""What a call of `ampatch demo` trains: which opt levels, in which half types, for how long, from which seed.

Only values and the order of the runs. The four fields of a plan decide every result but the times, so that a checkpoint
holds them, and a resumed demo takes them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ampatch.opt_levels import HALF_DTYPES

# The levels that the demo offers, with the half types that each is for (None is none at all).
OPT_LEVELS: dict[str, Sequence[str | None]] = {
    "O0": (None,),
    "O1": tuple(HALF_DTYPES),
    "O2": tuple(HALF_DTYPES),
    "O3": tuple(HALF_DTYPES),
    "O4": ("bfloat16",),
    "O5": ("bfloat16",),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        opt_level: a key of ``OPT_LEVELS``.
        half_dtype: the half type's name, without "torch."; None where the level uses none.
    """

    opt_level: str
    half_dtype: str | None

    @property
    def dtype(self) -> torch.dtype | None:
        """The half type itself."""
        return None if self.half_dtype is None else HALF_DTYPES[self.half_dtype]

    def __str__(self) -> str:
        return f"{self.opt_level} {self.half_dtype}" if self.half_dtype else self.opt_level


# Every run that a plan may have, by its setting: `O0`, `O1:float16` and so on.
SETTINGS: dict[str, Run] = {
    f"{opt_level}:{half_dtype}" if half_dtype else opt_level: Run(opt_level, half_dtype)
    for opt_level, half_dtypes in OPT_LEVELS.items()
    for half_dtype in half_dtypes
}
# What `--opt-levels` takes: a level stands for its runs in all half types, a setting for one run.
CHOICES = tuple(dict.fromkeys([*OPT_LEVELS, *SETTINGS]))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be trained; what is left out is the demo's default.

    Attributes:
        opt_levels: members of ``CHOICES``, in the order of the runs.
        half_dtypes: names of half types, for levels that stand without one. A level for none of these runs in its own.
        epochs: how often each run sees every digit.
        seed: decides the first weights and the order of the digits.
    """

    # float16 is slow on CPUs, and O2 in bfloat16 is O5.
    opt_levels: list[str] = field(default_factory=lambda: ["O0", "O1", "O2:float16", "O5"])
    half_dtypes: list[str] = field(default_factory=lambda: list(HALF_DTYPES))
    # Two reach 97% in every default run with seeds 0 to 5, but not with seed 6.
    epochs: int = 3
    seed: int = 0

    def runs(self) -> list[Run]:
        """Returns the runs in their order, each once: a level runs in those of the half types that are for it."""
        runs: list[Run] = []
        for name in self.opt_levels:
            if name in OPT_LEVELS:
                allowed = OPT_LEVELS[name]
                chosen = [half_dtype for half_dtype in self.half_dtypes if half_dtype in allowed] or allowed
                runs += [Run(name, half_dtype) for half_dtype in chosen]
            else:
                runs.append(SETTINGS[name])
        return list(dict.fromkeys(runs))
