"""What a call of `ampatch demo` trains: which opt levels, in which half types, for how long, from which seed.

Only values and the order of the runs. These four decide every result but the times, so that a checkpoint holds them,
and a resumed demo takes them from there.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be trained; what is left out is the demo's default.

    Attributes:
        opt_levels: keys of ``OPT_LEVELS``, in the order of the runs.
        half_dtypes: names of half types. A level for none of these runs in its own.
        epochs: how often each run sees every digit.
        seed: decides the first weights and the order of the digits.
    """

    opt_levels: list[str] = field(default_factory=lambda: list(OPT_LEVELS))
    half_dtypes: list[str] = field(default_factory=lambda: list(HALF_DTYPES))
    epochs: int = 10
    seed: int = 0

    def runs(self) -> list[Run]:
        """The runs in their order: each level in those of the half types that are for it."""
        return [
            Run(opt_level, half_dtype)
            for opt_level in self.opt_levels
            for half_dtype in [name for name in self.half_dtypes if name in OPT_LEVELS[opt_level]]
            or OPT_LEVELS[opt_level]
        ]
