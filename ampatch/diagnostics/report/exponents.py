"""Counts the elements of gradients by their exponents, and says what a half type loses of them at a loss scale.

The method of "Mixed Precision Training" (Micikevicius et al., 2018), figure 3: a histogram of exponents against the
type's range. Counts stay on the device until they are read. Must never write to a gradient.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ampatch.grouping import grouped

# Exponents of float32, the subnormal ones included. Before them the zeros are counted, behind them inf and NaN.
_LOWEST, _HIGHEST = -149, 127
_SMALLEST_NORMAL = -126
_BINS = _HIGHEST - _LOWEST + 3
#: Elements that are counted at once: float32 counts further numbers only up to this.
_CHUNK = 2**24
#: Gradients with more elements are counted one by one: there, adding to a few counts would take turns on a GPU.
_SMALL = 2**14
#: Groups of small gradients whose places in a table are kept: more than most steps have.
_KEPT = 16
#: Scales to each side of the present one.
_NEIGHBOURS = 4


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a half type, in exponents of 2.

    Attributes:
        zero: elements with smaller exponents are rounded to zero.
        normal: the smallest exponent at full precision.
        greatest: the greatest exponent.
    """

    zero: int
    normal: int
    greatest: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Range:
        """Returns the range of a type."""
        info = torch.finfo(dtype)
        # Half of the smallest subnormal number still rounds up to it, but for the exact half.
        return cls(_exponent(info.smallest_normal * info.eps) - 1, _exponent(info.smallest_normal), _exponent(info.max))

    def zone(self, exponent: float) -> str:
        """Returns where in the range a number of an exponent is: "zero", "subnormal", "normal" or "overflow"."""
        if exponent < self.zero:
            return "zero"
        if exponent < self.normal:
            return "subnormal"
        return "normal" if exponent <= self.greatest else "overflow"


@dataclass(slots=True)
class Histogram:
    """Elements of gradients by exponent.

    Attributes:
        zeros: number of elements that are zero.
        by_exponent: number of the others, by the greatest power of 2 that is not above their absolute value.
    """

    zeros: int = 0
    by_exponent: Counter[int] = field(default_factory=Counter)

    @property
    def elements(self) -> int:
        """Number of elements, without inf and NaN."""
        return self.zeros + self.nonzero

    @property
    def nonzero(self) -> int:
        """Number of elements that are neither zero nor inf nor NaN."""
        return sum(self.by_exponent.values())

    def add(self, zeros: int, by_exponent: Mapping[int, int]) -> None:
        """Adds the elements of another gradient."""
        self.zeros += zeros
        self.by_exponent.update(by_exponent)

    def lost(self, scale: float, half: Range) -> dict[str, float]:
        """Returns which shares of the elements other than zero a half type loses.

        Args:
            scale: the loss scale that they would be multiplied by.
            half: the type's range.

        Returns:
            "zero": rounded to zero; "subnormal": held with fewer bits than the type has; "overflow": inf.
        """
        shift, there, counts = math.log2(scale), self.nonzero or 1, Counter[str]()
        for exponent, elements in self.by_exponent.items():
            counts[half.zone(exponent + shift)] += elements
        return {name: counts[name] / there for name in ("zero", "subnormal", "overflow")}

    def best_scale(self, scale: float, half: Range) -> float:
        """Returns the scale at which a half type loses least and nothing overflows: the present one or a power of 2.

        Of several powers of 2 returns the nearest.

        Args:
            scale: the present loss scale.
            half: the type's range.
        """
        if not any(self.lost(scale, half).values()):
            return scale
        # One bit of room: a sum of two gradients may need it.
        highest = half.greatest - 1 - max(self.by_exponent)
        lowest = min(half.zero - max(self.by_exponent), highest)
        now = round(math.log2(scale))

        def cost(exponent: int) -> tuple[float, float, int]:
            lost = self.lost(2.0**exponent, half)
            return lost["zero"] + lost["subnormal"], lost["zero"], abs(exponent - now)

        return 2.0 ** min(range(lowest, highest + 1), key=cost)

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as plain data, the exponents in ascending order."""
        exponents = [{"exponent": key, "elements": self.by_exponent[key]} for key in sorted(self.by_exponent)]
        return {"exponents": exponents, "zeros": self.zeros, "elements": self.elements}


class GradientExponents:
    """The elements of several parameters' gradients by exponent, summed over steps.

    Attributes:
        seen: number of times that gradients were counted.
    """

    def __init__(self) -> None:
        self.seen = 0
        # By the names of the parameters and their device, a row for each: steps usually have the same parameters.
        self._tables: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}
        # Only some are kept: sparse gradients have other sizes in each step.
        self._rows = lru_cache(_KEPT)(_rows)

    def add(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Counts gradients, without a sync. Those of a step in which one is inf or NaN are left out.

        Args:
            gradients: names of parameters, and unscaled float32 gradients of any shape.
        """
        self.seen += 1
        by_device = grouped((each.device, (name, each)) for name, each in gradients if each.numel())
        for device, found in by_device.items():
            table = self._counted([gradient for _, gradient in found], device)
            table *= (table[:, -1] == 0).all()
            key = tuple(name for name, _ in found), device
            self._tables[key] = self._tables[key] + table if key in self._tables else table

    def read(self) -> dict[str, Histogram]:
        """Returns the histograms by the names of parameters; syncs once for each set of parameters and device."""
        found: dict[str, Histogram] = {}
        for (names, _), counts in self._tables.items():
            for name, row in zip(names, counts.tolist(), strict=True):
                by_exponent = {_LOWEST + index: int(count) for index, count in enumerate(row[1:-1]) if count}
                found.setdefault(name, Histogram()).add(int(row[0]), by_exponent)
        return found

    def _counted(self, gradients: list[Tensor], device: torch.device) -> Tensor:
        """Returns the numbers of zeros, of elements by exponent, and of inf and NaN: float64, a row for each gradient.

        Small gradients are counted together, as a kernel launch for each would take longer than the counting.
        """
        table = torch.zeros(len(gradients), _BINS, dtype=torch.float64, device=device)
        small: list[int] = []
        for place, gradient in enumerate(gradients):
            if gradient.numel() <= _SMALL:
                small.append(place)
                continue
            for values in gradient.flatten().split(_CHUNK):
                table[place] += _counted_on_host(values) if device.type == "cpu" else _histogram(values)
        at_once = _CHUNK // _SMALL or 1  # no more than a chunk's elements, however large they are
        for first in range(0, len(small), at_once):
            self._count_together(table, gradients, small[first : first + at_once])
        return table

    def _count_together(self, table: Tensor, gradients: list[Tensor], places: list[int]) -> None:
        rows = self._rows(tuple(places), tuple(gradients[place].numel() for place in places), table.device)
        _count(table.view(-1), _bins(torch.cat([gradients[place].flatten() for place in places])) + rows)


def as_dict(
    histograms: Mapping[str, Histogram], scale: float, half: torch.dtype, seen: int, overflowed_at: float = math.inf
) -> dict[str, Any]:
    """Returns what a half type loses of gradients as plain data: see the report's page in the guide.

    Args:
        histograms: the gradients, by the names of their parameters.
        scale: the present loss scale.
        half: the half type.
        seen: number of times that gradients were counted.
        overflowed_at: the least scale at which a step overflowed. Its gradients are not among those that were counted.
    """
    limits, everything = Range.of(half), Histogram()
    for histogram in histograms.values():
        everything.add(histogram.zeros, histogram.by_exponent)
    best = everything.best_scale(scale, limits)
    if best >= overflowed_at:
        best = max(scale, overflowed_at / 2)
    now = math.log2(scale)
    scales = sorted({2.0 ** (now + step) for step in range(-_NEIGHBOURS, _NEIGHBOURS + 1)} | {best})
    lost = everything.lost(scale, limits)
    return {
        "half": str(half).removeprefix("torch."),
        "scale": scale,
        "best_scale": best,
        "seen": seen,
        "lost": lost["zero"] + lost["subnormal"],
        "scales": [{"scale": each, **everything.lost(each, limits)} for each in scales],
        **everything.as_dict(),
        "parameters": [_parameter(name, each, each.lost(scale, limits)) for name, each in histograms.items()],
    }


def _parameter(name: str, histogram: Histogram, lost: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": name,
        **histogram.as_dict(),
        "zero": histogram.zeros / (histogram.elements or 1),
        "rounded_to_zero": lost["zero"],
        "subnormal": lost["subnormal"],
    }


def _exponent(number: float) -> int:
    return math.frexp(number)[1] - 1


def _histogram(values: Tensor) -> Tensor:
    """Returns a row of counts, without a sync."""
    bins = _bins(values)
    if torch.are_deterministic_algorithms_enabled():  # histc is faster on a GPU, and raises there
        return _count(torch.zeros(_BINS, dtype=torch.float64, device=values.device), bins.to(torch.int64))
    return torch.histc(bins.to(torch.float32), bins=_BINS, min=0, max=_BINS)


def _count(counts: Tensor, bins: Tensor) -> Tensor:
    """Adds 1 to the count at each place, and returns the counts."""
    return counts.scatter_add_(0, bins, torch.ones((), dtype=counts.dtype, device=counts.device).expand(len(bins)))


def _counted_on_host(values: Tensor) -> Tensor:
    """Returns what `_histogram` does of float32 values on the CPU, from their exponent's bits: ten times as fast."""
    upper = values.contiguous().view(torch.int16)[1 if sys.byteorder == "little" else 0 :: 2]
    bits = (upper >> 7).to(torch.uint8)  # drops the sign
    by_bits = torch.bincount(bits, minlength=256)
    counts = torch.zeros(_BINS, dtype=torch.float64, device="cpu")
    counts[_SMALLEST_NORMAL - _LOWEST + 1 : -1] = by_bits[1:255].to(torch.float64)
    counts[-1] = by_bits[255]
    counts[0] = len(values) - int(torch.count_nonzero(values))
    if counts[0] != by_bits[0]:  # there are subnormal values
        counts += _histogram(values[(bits == 0) & (values != 0)])
    return counts


def _rows(places: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns where the row of each element of some gradients begins in a table; copies from the host."""
    starts, lengths = (torch.tensor(each, device="cpu") for each in (places, sizes))
    return torch.repeat_interleave(starts * _BINS, lengths).to(device)


def _bins(values: Tensor) -> Tensor:
    """Returns the place of each value in a row of counts."""
    _, exponents = torch.frexp(values)
    # frexp's exponents are greater by 1, as its mantissas are below 1. Bin 0 is for zeros.
    bins = (exponents - _LOWEST).clamp_(1, _BINS - 2)
    return bins.masked_fill_(values == 0, 0).masked_fill_(~values.isfinite(), _BINS - 1)
