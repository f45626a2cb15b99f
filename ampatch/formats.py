"""The number formats as a table: what code asks of a format stands in its row.

A format that torch knows, and one that no device computes in, are rows alike: `ampatch.casting.rounding` rounds to any
of them. A new format is a row here. Must not touch a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampatch.errors import AmpError, did_you_mean

#: What the highest codes of a format stand for. "inf": the highest exponent is for inf and NaN, as in IEEE 754. "nan":
#: the highest code is NaN, and there is no inf. "zero": NaN is the code of -0, and there is neither -0 nor inf. "none":
#: all codes are numbers.
SPECIALS = ("inf", "nan", "zero", "none")

#: How a value between two numbers of a format is rounded.
ROUNDINGS = ("nearest", "stochastic", "zero")

#: What a finite value beyond the largest number becomes: the largest number, or inf (NaN in a format without inf).
OVERFLOWS = ("saturate", "inf")

#: Who multiplies numbers of a format: float32 or half products of rounded values, or the device's own products.
PRODUCTS = ("emulated", "device")

#: Which values share a scale: none have one, all of a tensor, each vector along the last dimension, or 32 of such one.
SCALES = ("none", "tensor", "row", "block")


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table.

    Attributes:
        name: name in cast lists.
        exponent: number of exponent bits.
        mantissa: number of mantissa bits, without the implicit one.
        specials: what the highest codes stand for; one of `SPECIALS`.
        rounding: how values are rounded; one of `ROUNDINGS`.
        overflow: what values beyond the largest number become; one of `OVERFLOWS`.
        scale: which values share a scale; one of `SCALES`. The scale of a block is a power of two, as in the
            Microscaling formats of the Open Compute Project (version 1.0, section 6.3); the others are float32.
        dtype: torch's dtype with these numbers; None if it has none.
        computes: True if torch's functions compute in that dtype.
        multiplies: formats by whose numbers torch can multiply those of this one, with scales; by name.
        products: who makes products of its numbers; one of `PRODUCTS`.
    """

    name: str
    exponent: int
    mantissa: int
    specials: str = "inf"
    rounding: str = "nearest"
    overflow: str = "inf"
    scale: str = "none"
    dtype: torch.dtype | None = None
    computes: bool = False
    multiplies: tuple[str, ...] = ()
    products: str = "emulated"

    @property
    def bias(self) -> int:
        """The number that is subtracted from an exponent's code; one more than in IEEE 754 if NaN is the code of -0."""
        return (1 << (self.exponent - 1)) - (self.specials != "zero")

    @property
    def least_exponent(self) -> int:
        """The exponent of the smallest normal number; subnormal numbers have it, too."""
        return 1 - self.bias

    @property
    def most_exponent(self) -> int:
        """The exponent of the largest number."""
        return (1 << self.exponent) - 1 - (self.specials == "inf") - self.bias

    @property
    def largest(self) -> float:
        """The largest number."""
        steps = 2 ** (self.mantissa + 1) - 1 - (self.specials == "nan")
        return math.ldexp(steps, self.most_exponent - self.mantissa)

    @property
    def least(self) -> float:
        """The smallest positive number, which is subnormal."""
        return math.ldexp(1.0, self.least_exponent - self.mantissa)

    @property
    def is_torchs(self) -> bool:
        """True if torch's functions compute in the format, as it is."""
        return self.computes and self == FORMATS[self.name]

    @property
    def has_inf(self) -> bool:
        """True if inf is a number of the format."""
        return self.specials == "inf"

    @property
    def why_no_device(self) -> str:
        """Why no device multiplies numbers of this row, as part of a sentence; empty if some devices do."""
        if not self.multiplies:
            able = " or ".join(row.name for row in FORMATS.values() if row.name in row.multiplies)
            return f"no device of torch's multiplies {self.name}; expected {able}"
        wanted = {"rounding": ("nearest",), "overflow": ("saturate",), "scale": ("tensor", "row")}
        for choice, values in wanted.items():
            if getattr(self, choice) not in values:
                return f"found {choice}: {getattr(self, choice)} with it; expected {' or '.join(values)}"
        return ""

    def is_within(self, dtype: torch.dtype) -> bool:
        """Returns True if a type of torch has all numbers of the format, with whatever scale amp gives them."""
        info = torch.finfo(dtype)
        return (
            self.scale == "none"
            and math.ldexp(1.0, -self.mantissa) >= info.eps
            and self.least >= info.smallest_normal * info.eps
            and self.largest <= info.max
        )

    def __str__(self) -> str:
        """Returns the name, and what differs from the row of that name, as cast lists have it."""
        row = named(self.name)
        changed = [f"{each}: {getattr(self, each)}" for each in CHOICES if getattr(self, each) != getattr(row, each)]
        return f"{{{', '.join([f'name: {self.name}', *changed])}}}" if changed else self.name


#: The values of a row that a cast list can choose, each with what it can be.
CHOICES = {"rounding": ROUNDINGS, "overflow": OVERFLOWS, "scale": SCALES, "products": PRODUCTS}

_SCALED: dict[str, Any] = {"overflow": "saturate", "scale": "tensor"}
_IN_BLOCKS: dict[str, Any] = {"specials": "none", "overflow": "saturate", "scale": "block"}

# The float8 formats: Micikevicius et al., FP8 Formats for Deep Learning, 2022; those with NaN for -0: Noune et al.,
# 8-bit Numerical Formats for Deep Neural Networks, 2022. Those of six and four bits: OCP Microscaling Formats, 2023.
_ROWS = (
    Format("float32", 8, 23, dtype=torch.float32, computes=True),
    Format("tensorfloat32", 8, 10),
    Format("bfloat16", 8, 7, dtype=torch.bfloat16, computes=True),
    Format("float16", 5, 10, dtype=torch.float16, computes=True),
    Format(
        "float8_e4m3",
        4,
        3,
        "nan",
        dtype=torch.float8_e4m3fn,
        multiplies=("float8_e4m3", "float8_e5m2"),
        **_SCALED,
    ),
    Format("float8_e5m2", 5, 2, dtype=torch.float8_e5m2, multiplies=("float8_e4m3",), **_SCALED),
    Format("float8_e4m3fnuz", 4, 3, "zero", dtype=torch.float8_e4m3fnuz, **_SCALED),
    Format("float8_e5m2fnuz", 5, 2, "zero", dtype=torch.float8_e5m2fnuz, **_SCALED),
    Format("float6_e3m2", 3, 2, **_IN_BLOCKS),
    Format("float6_e2m3", 2, 3, **_IN_BLOCKS),
    Format("float4_e2m1", 2, 1, **_IN_BLOCKS),
)

#: The rows that have names of their own, by name.
FORMATS = {row.name: row for row in _ROWS}

#: What `named` takes beside the names in `FORMATS`, for messages.
BY_BITS = "e and m with their numbers of bits, such as e3m4"

_BITS = re.compile(r"e(\d+)m(\d+)")


def named(name: str) -> Format:
    """Returns the row of a name: one of `FORMATS`, or one such as "e3m4", with inf and NaN as in IEEE 754.

    Raises:
        AmpError: there is no such row.
    """
    if name in FORMATS:
        return FORMATS[name]
    bits = _BITS.fullmatch(name)
    if bits is None:
        hint = did_you_mean(name, FORMATS)
        raise AmpError(f"found {name!r}; expected one of {', '.join(FORMATS)}, or {BY_BITS}.{hint}")
    exponent, mantissa = map(int, bits.groups())
    if not (2 <= exponent <= 8 and 1 <= mantissa <= 23):
        raise AmpError(f"found {name!r}; expected 2 to 8 bits of exponent and 1 to 23 of mantissa, as float32 has.")
    return Format(name, exponent, mantissa)


def chosen(given: Mapping[str, str]) -> Format:
    """Returns the row with a name, and with other values for some of `CHOICES`.

    Raises:
        AmpError: there is no name, or no such row; or a choice is unknown, or has an unknown value.
    """
    if "name" not in given:
        raise AmpError("found a mapping without `name`; expected one such as {name: float8_e4m3, scale: row}.")
    choices = {name: value for name, value in given.items() if name != "name"}
    for name, value in choices.items():
        if name not in CHOICES:
            raise AmpError(f"found the key {name!r}; expected name, {', '.join(CHOICES)}.{did_you_mean(name, CHOICES)}")
        if value not in CHOICES[name]:
            hint = did_you_mean(value, CHOICES[name])
            raise AmpError(f"found {value!r} for {name}; expected one of {', '.join(CHOICES[name])}.{hint}")
    row = replace(named(given["name"]), **choices)  # type: ignore[arg-type]
    if row.products == "device" and row.why_no_device:
        raise AmpError(f"products: device, but {row.why_no_device}; or leave products out, and they are emulated.")
    return row
