"""Tests the table of O0 to O5, arguments that override it, and the checks of these arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import HALF_DTYPES, dtype_name

from ampatch.errors import OptionError
from ampatch.opt_levels import (
    LEVELS,
    OVERRIDES,
    Properties,
    check_flag,
    check_half_dtype,
    check_loss_scale,
    check_model_type,
    check_opt_level,
    difference,
    resolve,
)

FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32

check_master_weights = functools.partial(check_flag, "master_weights")

# By level and half type: weights, functions patched, batch norm kept, master weights, loss scale.
TABLE = {
    ("O0", FLOAT16): (FLOAT32, False, None, False, 1.0),
    ("O1", FLOAT16): (None, True, None, None, "dynamic"),
    ("O2", FLOAT16): (FLOAT16, False, True, True, "dynamic"),
    ("O3", FLOAT16): (FLOAT16, False, False, False, 1.0),
    # The range of bfloat16 needs no scale.
    ("O0", BFLOAT16): (FLOAT32, False, None, False, 1.0),
    ("O1", BFLOAT16): (None, True, None, None, 1.0),
    ("O2", BFLOAT16): (BFLOAT16, False, True, True, 1.0),
    ("O3", BFLOAT16): (BFLOAT16, False, False, False, 1.0),
    ("O4", BFLOAT16): (None, True, None, None, 1.0),
    ("O5", BFLOAT16): (BFLOAT16, False, True, True, 1.0),
    ("O6", BFLOAT16): (BFLOAT16, False, True, True, 1.0),
}


class TestLevels:
    @pytest.mark.parametrize(("level", "half_dtype"), TABLE)
    def test_level_has_the_properties_of_the_table(self, level, half_dtype):
        assert resolve(level, half_dtype) == Properties(level, half_dtype, *TABLE[level, half_dtype])

    def test_table_has_every_level_and_o4_to_o6_are_always_bfloat16(self):
        assert set(LEVELS) == {level for level, _ in TABLE}
        for level in ("O4", "O5", "O6"):
            assert resolve(level, FLOAT16) == resolve(level, BFLOAT16)

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(
        ("level", "override"),
        [
            ("O0", {"loss_scale": 128.0}),
            ("O0", {"keep_batchnorm_fp32": True}),
            ("O1", {"loss_scale": "dynamic"}),
            ("O1", {"patch_torch_functions": False}),
            ("O1", {"cast_model_type": FLOAT32}),
            ("O1", {"master_weights": False}),  # what O1 does
            ("O2", {"patch_torch_functions": True}),  # unlike Apex
            ("O2", {"keep_batchnorm_fp32": False}),
            ("O2", {"master_weights": False}),
            ("O2", {"cast_model_type": BFLOAT16}),
            ("O3", {"keep_batchnorm_fp32": True}),
            ("O4", {"loss_scale": "dynamic"}),
            ("O5", {"master_weights": False}),
        ],
        ids=str,
    )
    def test_override_replaces_one_property(self, level, override, half_dtype):
        assert resolve(level, half_dtype, **override) == replace(resolve(level, half_dtype), **override)

    def test_none_overrides_nothing_and_text_means_what_it_says(self):
        assert resolve("O2", FLOAT16, **dict.fromkeys(OVERRIDES)) == resolve("O2", FLOAT16)
        from_text = resolve("O2", FLOAT16, keep_batchnorm_fp32="False", loss_scale="128.0")
        assert from_text == resolve("O2", FLOAT16, keep_batchnorm_fp32=False, loss_scale=128.0)
        assert resolve("O3", FLOAT16, keep_batchnorm_fp32="True").keep_batchnorm_fp32 is True

    @pytest.mark.parametrize(("level", "instead"), [("O1", "O2"), ("O4", "O5")])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("cast_model_type", FLOAT16),
            ("cast_model_type", BFLOAT16),
            ("master_weights", True),
            ("keep_batchnorm_fp32", True),
            ("keep_batchnorm_fp32", False),
            ("keep_batchnorm_fp32", "True"),
            ("keep_batchnorm_fp32", "False"),
        ],
        ids=str,
    )
    def test_error_for_an_override_that_contradicts_the_level(self, level, instead, name, value):
        assert refused(resolve, level, FLOAT16, **{name: value}) == (
            f"{name}={value!r} contradicts opt_level={level!r}, which leaves the model's weights as they are. "
            f"Leave {name} out, or use opt_level={instead!r}, which converts them."
        )

    @pytest.mark.parametrize("name", ["patch_torch_functions", "keep_batchnorm_fp32", "master_weights"])
    def test_flags_are_checked_by_name(self, name):
        assert refused(resolve, "O2", FLOAT16, **{name: "maybe"}).startswith(f"{name} is 'maybe'")


def refused(check: Callable[..., object], *arguments: object, **options: object) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(OptionError) as caught:
        check(*arguments, **options)
    return str(caught.value)


NO_NUMBERS = ["", "dynamc", "Dynamic", "auto", None, [1.0], 1j, b"128", torch.ones(2), np.ones(2), Decimal("NaN")]


class TestChecks:
    @pytest.mark.parametrize(
        ("check", "given", "expected"),
        [
            *((check_opt_level, level, level) for level in LEVELS),
            (check_loss_scale, "dynamic", "dynamic"),
            (check_loss_scale, 1, 1.0),
            (check_loss_scale, 0.5, 0.5),
            (check_loss_scale, "128", 128.0),
            (check_loss_scale, "1e3", 1000.0),
            (check_loss_scale, 2**16, 65536.0),
            (check_loss_scale, np.float32(8), 8.0),
            (check_loss_scale, Fraction(1, 2), 0.5),
            *((check_master_weights, flag, flag) for flag in (True, False, None)),
            (check_master_weights, "True", True),
            (check_master_weights, "False", False),
            *((check_half_dtype, name, FLOAT16) for name in (FLOAT16, "float16", "torch.float16", "half", "fp16")),
            *((check_half_dtype, name, BFLOAT16) for name in (BFLOAT16, "bfloat16", "torch.bfloat16", "bf16")),
            *((check_model_type, dtype, dtype) for dtype in (None, FLOAT32, FLOAT16, BFLOAT16)),
            *((check_model_type, name, FLOAT16) for name in ("float16", "torch.half")),
            *((check_model_type, name, FLOAT32) for name in ("float32", "torch.float")),
            (check_model_type, "bfloat16", BFLOAT16),
        ],
        ids=lambda value: getattr(value, "__name__", None if callable(value) else repr(value)),
    )
    def test_value_that_is_taken(self, check, given, expected):
        checked = check(given)
        assert checked == expected
        assert type(checked) is type(expected)

    @pytest.mark.parametrize(
        ("found", "meant"), [("01", "O1"), ("o1", "O1"), ("1", "O1"), (1, "O1"), (0, "O0"), ("00", "O0"), ("05", "O5")]
    )
    def test_error_for_a_level_without_the_letter_o_says_what_to_type(self, found, meant):
        assert refused(check_opt_level, found) == (
            f"opt_level is {found!r}; expected one of O0, O1, O2, O3, O4, O5, O6. It starts with the capital letter O: "
            f"type opt_level={meant!r}."
        )

    @pytest.mark.parametrize(
        "found", [None, True, 1.0, "", "7", "O7", "-1", -1, "O1 ", "fp16", ["O1"], FLOAT16], ids=repr
    )
    def test_error_for_another_level_has_no_suggestion(self, found):
        message = refused(check_opt_level, found)
        assert message.startswith(f"opt_level is {found!r}; expected one of O0, O1, O2, O3, O4, O5, O6.")
        assert "capital" not in message

    @pytest.mark.parametrize(
        "found",
        [-1, 0, 0.0, math.nan, math.inf, -math.inf, "-1", "0", "nan", "inf", 10**400, True, False, *NO_NUMBERS],
        ids=repr,
    )
    def test_error_for_a_loss_scale_that_is_no_positive_number(self, found):
        message = f"loss_scale is {found!r}; expected a positive finite number, or 'dynamic'."
        assert refused(check_loss_scale, found).startswith(message)

    @pytest.mark.parametrize("found", ["dynamc", "Dynamic", "dynamics"])
    def test_error_for_a_misspelt_dynamic_suggests_it(self, found):
        assert "Did you mean 'dynamic'" in refused(check_loss_scale, found)

    @pytest.mark.parametrize("found", [0, 1, "true", "yes", "", "None", [], FLOAT16], ids=repr)
    def test_error_for_no_flag(self, found):
        assert refused(check_master_weights, found) == (
            f"master_weights is {found!r}; expected True, False or None (or the strings 'True' and 'False')."
        )

    @pytest.mark.parametrize(
        "found",
        [FLOAT32, torch.float64, torch.int8, "float32", "int8", "torch.", "", None, True, np.float16],
        ids=repr,
    )
    def test_error_for_no_half_type(self, found):
        message = refused(check_half_dtype, found, "patch_type")
        assert message.startswith(f"patch_type is {found!r};")
        assert "; expected torch.float16 or torch.bfloat16, or its name." in message

    @pytest.mark.parametrize("found", [torch.float64, torch.int32, "float64", True], ids=repr)
    def test_error_for_no_model_type(self, found):
        assert refused(check_model_type, found) == (
            f"cast_model_type is {found!r}; expected torch.float32, torch.float16 or torch.bfloat16, or its name, "
            "or None for the level's own."
        )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("O2", FLOAT16), ("O2", FLOAT16, {}), {}),
        (("O1", FLOAT16), ("O1", FLOAT16, {"loss_scale": 128.0}), {"loss_scale": ("dynamic", 128.0)}),
        (("O1", FLOAT16), ("O2", FLOAT16, {}), {"opt_level": ("O1", "O2")}),
        (("O2", FLOAT16), ("O2", BFLOAT16, {}), {"half_dtype": (FLOAT16, BFLOAT16)}),
        (
            ("O1", FLOAT16),
            ("O2", FLOAT16, {"loss_scale": 1.0}),
            {"opt_level": ("O1", "O2"), "loss_scale": ("dynamic", 1.0)},
        ),
    ],
    ids=["none", "override", "level", "half-type", "level-and-override"],
)
def test_difference_leaves_out_what_follows_from_level_and_half_type(one, other, expected):
    level, half_dtype, overrides = other
    assert difference(resolve(*one), resolve(level, half_dtype, **overrides)) == expected
