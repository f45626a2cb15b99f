"""The half types as a table: what code asks of a type stands in its row.

A new half type is a row here, and what its kernels need in ``csrc/``. Must not touch a tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ampatch.formats import FORMATS


@dataclass(frozen=True, slots=True)
class HalfType:
    """A row of the table.

    Attributes:
        dtype: torch's dtype.
        name: torch's name for it.
        aliases: other names that an argument accepts for it, as in other libraries.
        spellings: further names that torch's errors have for it.
        needs_scale: True if it has less range than float32, so that gradients become zero without a loss scale.
        least: the smallest positive (subnormal) number.
        tensor_cores: the least compute capability of NVIDIA's GPUs with tensor cores for it (CUDA C++ Programming
            Guide, "Compute Capabilities").
    """

    dtype: torch.dtype
    name: str
    aliases: tuple[str, ...]
    spellings: tuple[str, ...]
    needs_scale: bool
    least: float
    tensor_cores: tuple[int, int]


# "half" is float16, like torch.half, even if the session's half dtype is bfloat16.
_ROWS = (
    HalfType(torch.float16, "float16", ("half", "fp16"), ("Half",), True, FORMATS["float16"].least, (7, 0)),
    HalfType(torch.bfloat16, "bfloat16", ("bf16",), ("BFloat16",), False, FORMATS["bfloat16"].least, (8, 0)),
)

#: The rows, by dtype.
HALF_TYPES = {row.dtype: row for row in _ROWS}

#: The dtypes, by torch's names for them.
HALF_DTYPES = {row.name: row.dtype for row in _ROWS}

#: The dtypes.
HALVES = frozenset(HALF_TYPES)


def needs_scale(dtype: torch.dtype | None) -> bool:
    """Returns True for a half type in which gradients become zero without a loss scale."""
    return dtype in HALVES and HALF_TYPES[dtype].needs_scale


def default_half(device_types: Collection[str]) -> torch.dtype:
    """Returns the half type for models on devices of these types: CPUs compute in bfloat16, and slowly in float16."""
    return torch.bfloat16 if set(device_types) == {"cpu"} else torch.float16
