"""Rounding to formats: the numbers of each, ties, overflow, scales, and values that are no numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampatch.casting.rounding import rounded
from ampatch.errors import AmpError
from ampatch.formats import FORMATS, Format, chosen, named

PLAIN = {"scale": "none", "rounding": "nearest"}
EVERY_HALF = [
    torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype) for dtype in (torch.float16, torch.bfloat16)
]
OF_TORCH = [row for row in FORMATS.values() if row.dtype not in (None, torch.float32)]
# Formats that ml_dtypes has, by its names for them.
OF_ML_DTYPES = {
    "float8_e3m4": named("e3m4"),
    "float8_e4m3": named("e4m3"),
    "float8_e4m3fn": FORMATS["float8_e4m3"],
    "float8_e4m3fnuz": FORMATS["float8_e4m3fnuz"],
    "float8_e5m2": named("e5m2"),
    "float8_e5m2fnuz": FORMATS["float8_e5m2fnuz"],
    "float6_e3m2fn": FORMATS["float6_e3m2"],
    "float6_e2m3fn": FORMATS["float6_e2m3"],
    "float4_e2m1fn": FORMATS["float4_e2m1"],
    "bfloat16": FORMATS["bfloat16"],
}
BY_BITS = ["e2m1", "e2m5", "e3m2", "e3m9", "e4m7", "e5m1", "e5m4", "e6m9", "e7m3", "e8m1", "e8m10", "e8m12"]


def differing(values: Tensor, found: Tensor, expected: Tensor) -> list[tuple[float, float, float]]:
    """Returns values whose roundings differ, in a number or in the sign of a zero; NaN equals NaN."""
    same = (found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan())
    return [
        (a.item(), b.item(), c.item()) for a, b, c in zip(values[~same], found[~same], expected[~same], strict=True)
    ]


def numbers_of(row: Format) -> list[float]:
    """Returns the finite numbers from 0 on, built from their codes."""
    most = 2**row.exponent - (row.specials == "inf")
    found = [
        math.ldexp(code + (exponent > 0) * 2**row.mantissa, max(exponent, 1) - row.bias - row.mantissa)
        for exponent, code in itertools.product(range(most), range(2**row.mantissa))
    ]
    return found[:-1] if row.specials == "nan" else found


@pytest.mark.parametrize("values", EVERY_HALF, ids=lambda values: dtype_name(values.dtype))
@pytest.mark.parametrize("row", OF_TORCH, ids=str)
def test_every_half_is_rounded_as_by_torchs_cast(row, values) -> None:
    wide = values.float()
    # Of the values that e4m3 has no numbers for, some versions of torch make NaN, others the largest number.
    within = wide.abs() <= (464 if row.dtype is torch.float8_e4m3fn else math.inf)
    values = values[within | wide.isnan()]
    row = replace(row, overflow="inf", **PLAIN)
    assert differing(values, rounded(values, row, torch.float32), values.to(row.dtype).float()) == []


@pytest.mark.parametrize("name", OF_ML_DTYPES)
def test_values_are_rounded_as_by_ml_dtypes(name) -> None:
    row = replace(OF_ML_DTYPES[name], overflow="inf", **PLAIN)
    bits = torch.arange(-(2**31), 2**31, 65537 * 3, dtype=torch.int64).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), *(half.float() for half in EVERY_HALF)])
    if row.specials == "none":  # there ml_dtypes saturates, and amp leaves what is no number for later checks
        row, values = replace(row, overflow="saturate"), values[values.isfinite()]
    with np.errstate(all="ignore"):  # it warns of NaN and of what lies beyond the largest number
        expected = torch.from_numpy(values.numpy().astype(getattr(ml_dtypes, name)).astype(np.float32))
    assert differing(values, rounded(values, row, torch.float32), expected) == []


@pytest.mark.parametrize("name", [*BY_BITS, "tensorfloat32", "float6_e2m3", "float4_e2m1", "float8_e4m3"])
def test_a_value_becomes_the_nearest_of_the_numbers_that_the_codes_stand_for(name) -> None:
    row = replace(named(name), overflow="saturate", **PLAIN)
    numbers = torch.tensor(numbers_of(row), dtype=torch.float64)
    assert (numbers[1], numbers[-1]) == (row.least, row.largest)
    values = torch.cat([torch.randn(20_000) * scale for scale in (row.least, 1.0, row.largest / 8)])
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    magnitudes = torch.cat([values.abs(), ties, numbers.float()]).double()
    above = torch.searchsorted(numbers, magnitudes).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    to_low, to_high = magnitudes - low, high - magnitudes
    is_even = (above - 1) % 2 == 0  # codes count upwards, so the even one of two neighbours has the even mantissa
    expected = torch.where((to_low < to_high) | ((to_low == to_high) & is_even), low, high)
    for sign in (1, -1):
        found = rounded((sign * magnitudes).float(), row, torch.float32).double()
        assert differing(magnitudes, found, sign * expected) == []


@pytest.mark.parametrize(
    ("name", "beyond", "infinite"),
    [
        ("e4m3", math.inf, math.inf),
        ("float4_e2m1", math.nan, math.nan),
        ("float8_e4m3", math.nan, math.nan),
        ("float8_e4m3fnuz", math.nan, math.nan),
    ],
)
def test_what_lies_beyond_the_largest_number_saturates_or_does_not(name, beyond, infinite) -> None:
    row, given_ = replace(named(name), **PLAIN), torch.tensor([1e9, -1e9, math.inf, math.nan])
    saturating = rounded(given_, replace(row, overflow="saturate"), torch.float32)
    assert torch.equal(saturating[:2], torch.tensor([row.largest, -row.largest]))
    # inf before the call is inf or NaN in it: saturation must not hide that a step has overflown.
    assert torch.equal(saturating[2:].isfinite(), torch.tensor([False, False]))
    other = rounded(given_, replace(row, overflow="inf"), torch.float32)
    expected = torch.tensor([beyond, -beyond, infinite, math.nan])
    assert torch.equal(other.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.parametrize("name", ["e3m2", "float8_e4m3", "e8m3"])
def test_stochastic_rounding_has_the_value_for_its_mean(name) -> None:
    row = replace(named(name), scale="none", rounding="stochastic")
    torch.manual_seed(0)
    for value in (1.3, -0.71, row.least * 0.3, row.least * 2.9, row.largest * 0.99 / 4):
        drawn = rounded(torch.full((200_000,), value), row, torch.float32).double()
        neighbours = drawn.unique()
        step = (neighbours.max() - neighbours.min()).item()
        assert len(neighbours) <= 2
        assert abs(drawn.mean().item() - np.float32(value)) <= 5 * step / 2 / math.sqrt(200_000)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(["e3m2", "e5m10", "float8_e4m3"]))
def test_rounding_toward_zero_takes_the_last_number_on_the_way(value, name) -> None:
    row = replace(named(name), scale="none", rounding="zero")
    found = rounded(torch.tensor(value), row, torch.float64).item()
    below = [number for number in numbers_of(row) if number <= abs(value)] if row.mantissa < 4 else None
    assert found * value >= 0
    if below is not None:
        assert abs(found) == below[-1]
    else:
        assert abs(found) <= abs(value)
        assert found == rounded(torch.tensor(found), row, torch.float64).item()


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
def test_a_scale_brings_the_largest_value_to_the_largest_number(scale) -> None:
    row = replace(named("float8_e4m3"), scale=scale)
    torch.manual_seed(0)
    values = torch.randn(6, 70) * torch.logspace(-6, 6, 6)[:, None]
    found = rounded(values, row, torch.float32)
    of = {"tensor": values.view(1, -1), "row": values, "block": torch.nn.functional.pad(values, (0, 26)).view(-1, 32)}
    spread, largest = of[scale], of[scale].abs().amax(-1, keepdim=True)
    factor = row.largest / largest if scale != "block" else torch.exp2(8 - largest.log2().floor())
    plain = replace(row, scale="none")
    expected = rounded(spread * factor, plain, torch.float32) / factor
    expected = expected.view(6, -1)[:, :70] if scale == "block" else expected.view(6, 70)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", ["none", "tensor", "row", "block"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (33,), (2, 3, 5)])
def test_a_result_has_the_shape_and_type_that_it_is_to_have(scale, shape) -> None:
    row = replace(named("float8_e5m2"), scale=scale)
    found = rounded(torch.ones(shape, dtype=torch.bfloat16), row, torch.float32)
    assert (found.shape, found.dtype) == (shape, torch.float32)
    assert torch.equal(found, torch.ones(shape))


@pytest.mark.parametrize("scale", ["none", "tensor", "row", "block"])
def test_zeros_stay_and_what_is_no_number_is_seen(scale) -> None:
    row = replace(named("float8_e4m3"), scale=scale)
    assert torch.equal(rounded(torch.zeros(4, 40), row, torch.float32), torch.zeros(4, 40))
    values = torch.ones(4, 40)
    values[1, 3], values[2, 5] = math.inf, math.nan
    found = rounded(values, row, torch.float32)
    assert found.isfinite().logical_not().nonzero().tolist() == [[1, 3], [2, 5]]
    assert torch.equal(found[0], values[0])


def test_a_strided_tensor_is_rounded_as_its_copy_is() -> None:
    values = torch.randn(8, 6).t()[::2]
    for name in ("e3m4", "float8_e4m3", "float4_e2m1"):
        assert torch.equal(
            rounded(values, named(name), torch.float32), rounded(values.contiguous(), named(name), torch.float32)
        )


def test_a_format_knows_the_types_that_have_all_of_its_numbers() -> None:
    within = {
        name: [dtype_name(dtype) for dtype in (torch.float16, torch.bfloat16) if named(name).is_within(dtype)]
        for name in ("e3m4", "e5m2", "e5m10", "e8m7", "e6m3", "e8m10", "e2m1", "float8_e4m3")
    }
    assert within == {
        "e3m4": ["float16", "bfloat16"],
        "e5m2": ["float16", "bfloat16"],
        "e5m10": ["float16"],
        "e8m7": ["bfloat16"],
        "e6m3": ["bfloat16"],
        "e8m10": [],
        "e2m1": ["float16", "bfloat16"],
        "float8_e4m3": [],  # its scale is float32
    }


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("float8_e4m4", "Did you mean 'float8_e4m3'"),
        ("e1m3", "expected 2 to 8 bits of exponent and 1 to 23 of mantissa"),
        ("e9m3", "expected 2 to 8 bits"),
        ("e4m0", "1 to 23 of mantissa"),
        ("int8", "expected one of float32, tensorfloat32"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(typed, message) -> None:
    with pytest.raises(AmpError) as caught:
        named(typed)
    assert message in str(caught.value)


def test_a_format_is_shown_as_it_is_typed() -> None:
    assert str(named("e3m4")) == "e3m4"
    row = chosen({"name": "float8_e4m3", "scale": "row", "rounding": "stochastic"})
    assert str(row) == "{name: float8_e4m3, rounding: stochastic, scale: row}"
    assert (row.scale, row.rounding, row.overflow) == ("row", "stochastic", "saturate")


@pytest.mark.parametrize("name", ["float16", "e4m3"])
def test_inf_stays_inf_where_the_format_has_it_and_does_not_saturate(name) -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 1e30, 1.5])
    largest = named(name).largest
    for rounding, beyond in (("nearest", math.inf), ("zero", largest)):
        found = rounded(values, replace(named(name), rounding=rounding), torch.float32)
        assert torch.equal(found.nan_to_num(7.0, 9e30, -9e30), torch.tensor([9e30, -9e30, 7.0, min(beyond, 9e30), 1.5]))
