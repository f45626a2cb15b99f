"""O0 to O5, what may be laid over them, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from torch import nn

from ampatch import amp
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
from ampatch.runtime import runtime

FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32

# level: weights, functions patched, batch norm kept, master weights, loss scale; in float16.
TABLE = {
    "O0": (FLOAT32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (FLOAT16, False, True, True, "dynamic"),
    "O3": (FLOAT16, False, False, False, 1.0),
}
# And in bfloat16, whose range needs no scale; O4 and O5 have no other half type.
BFLOAT16_TABLE = {
    "O0": (FLOAT32, False, None, False, 1.0),
    "O1": (None, True, None, None, 1.0),
    "O2": (BFLOAT16, False, True, True, 1.0),
    "O3": (BFLOAT16, False, False, False, 1.0),
    "O4": (None, True, None, None, 1.0),
    "O5": (BFLOAT16, False, True, True, 1.0),
}


def resolved(opt_level: str, half_dtype: torch.dtype = FLOAT16, **overrides: object) -> Properties:
    return resolve(opt_level, half_dtype, **overrides)


class TestTheTable:
    @pytest.mark.parametrize("level", TABLE)
    def test_a_level_in_float16(self, level: str) -> None:
        assert resolved(level, FLOAT16) == Properties(level, FLOAT16, *TABLE[level])

    @pytest.mark.parametrize("level", BFLOAT16_TABLE)
    def test_a_level_in_bfloat16(self, level: str) -> None:
        assert resolved(level, BFLOAT16) == Properties(level, BFLOAT16, *BFLOAT16_TABLE[level])

    @pytest.mark.parametrize("level", ["O4", "O5"])
    def test_the_levels_of_rocm_are_bfloat16_whatever_is_given(self, level: str) -> None:
        assert resolved(level, FLOAT16) == resolved(level, BFLOAT16)

    def test_it_has_no_other_level(self) -> None:
        assert set(LEVELS) == set(TABLE) | set(BFLOAT16_TABLE)


class TestOverrides:
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(
        ("level", "override"),
        [
            ("O0", {"loss_scale": 128.0}),
            ("O1", {"loss_scale": 128.0}),
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
            ("O5", {"loss_scale": "dynamic"}),
            ("O5", {"master_weights": False}),
        ],
        ids=str,
    )
    def test_one_value_is_replaced_and_the_others_stay(
        self, level: str, override: dict[str, object], half_dtype: torch.dtype
    ) -> None:
        assert resolved(level, half_dtype, **override) == replace(resolved(level, half_dtype), **override)

    def test_none_leaves_the_level_as_it_is(self) -> None:
        nothing = dict.fromkeys(OVERRIDES)
        assert resolved("O2", **nothing) == resolved("O2")

    def test_what_scripts_hand_over_as_text_means_the_same(self) -> None:
        as_text = resolved("O2", keep_batchnorm_fp32="False", loss_scale="128.0")
        assert as_text == resolved("O2", keep_batchnorm_fp32=False, loss_scale=128.0)
        assert resolved("O3", keep_batchnorm_fp32="True").keep_batchnorm_fp32 is True


CONTRADICTIONS = [
    ("cast_model_type", FLOAT16),
    ("cast_model_type", BFLOAT16),
    ("master_weights", True),
    ("keep_batchnorm_fp32", True),
    ("keep_batchnorm_fp32", False),
    ("keep_batchnorm_fp32", "True"),
    ("keep_batchnorm_fp32", "False"),
]


class TestContradictions:
    @pytest.mark.parametrize(("level", "instead"), [("O1", "O2"), ("O4", "O5")])
    @pytest.mark.parametrize(("name", "value"), CONTRADICTIONS, ids=str)
    def test_the_error_names_both_sides_and_a_way_out(self, level: str, instead: str, name: str, value: object) -> None:
        with pytest.raises(OptionError) as refused:
            resolved(level, **{name: value})

        assert str(refused.value) == (
            f"{name}={value!r} contradicts opt_level={level!r}, which leaves the model's weights as they are. "
            f"Leave {name} out, or use opt_level={instead!r}, which converts them."
        )

    @pytest.mark.parametrize(("name", "value"), CONTRADICTIONS, ids=str)
    def test_nothing_was_changed(self, name: str, value: object) -> None:
        model = nn.BatchNorm1d(2)
        weight = model.weight

        with pytest.raises(OptionError, match=name):
            amp.initialize(model, opt_level="O1", **{name: value})

        assert runtime.live is None
        assert model.weight is weight
        assert not model._forward_hooks


class TestTheNameOfALevel:
    @pytest.mark.parametrize("level", sorted(LEVELS))
    def test_is_itself(self, level: str) -> None:
        assert check_opt_level(level) == level

    @pytest.mark.parametrize(
        ("found", "meant"), [("01", "O1"), ("o1", "O1"), ("1", "O1"), (1, "O1"), (0, "O0"), ("00", "O0"), ("05", "O5")]
    )
    def test_with_a_zero_a_small_o_or_none_is_told_to_type_the_letter(self, found: object, meant: str) -> None:
        with pytest.raises(OptionError) as refused:
            check_opt_level(found)

        assert str(refused.value) == (
            f"opt_level is {found!r}; expected one of O0, O1, O2, O3, O4, O5. It starts with the capital letter O: "
            f"type opt_level={meant!r}."
        )

    @pytest.mark.parametrize(
        "found", [None, True, 1.0, "", "6", "O6", "-1", -1, "O1 ", "fp16", ["O1"], FLOAT16], ids=repr
    )
    def test_that_is_no_level_is_refused(self, found: object) -> None:
        with pytest.raises(OptionError) as refused:
            check_opt_level(found)

        assert str(refused.value).startswith(f"opt_level is {found!r}; expected one of O0, O1, O2, O3, O4, O5.")
        assert "capital" not in str(refused.value)


NO_NUMBERS = ["", "dynamc", "Dynamic", "auto", None, [1.0], 1j, b"128", torch.ones(2), np.ones(2), Decimal("NaN")]
NO_LOSS_SCALES = [-1, 0, 0.0, math.nan, math.inf, -math.inf, "-1", "0", "nan", "inf", 10**400, True, False, *NO_NUMBERS]


class TestTheLossScale:
    @pytest.mark.parametrize(
        ("given", "scale"),
        [
            ("dynamic", "dynamic"),
            (1, 1.0),
            (0.5, 0.5),
            ("128", 128.0),
            ("1e3", 1000.0),
            (2**16, 65536.0),
            (np.float32(8), 8.0),
            (Fraction(1, 2), 0.5),
        ],
        ids=repr,
    )
    def test_is_a_number_or_text_that_holds_one_or_dynamic(self, given: object, scale: object) -> None:
        checked = check_loss_scale(given)
        assert checked == scale
        assert type(checked) is type(scale)

    @pytest.mark.parametrize(
        "found",
        NO_LOSS_SCALES,
        ids=repr,
    )
    def test_that_is_none_of_these_is_refused(self, found: object) -> None:
        with pytest.raises(OptionError) as refused:
            check_loss_scale(found)

        assert str(refused.value).startswith(
            f"loss_scale is {found!r}; expected a positive finite number, or 'dynamic'."
        )

    @pytest.mark.parametrize("found", ["dynamc", "Dynamic", "dynamics"])
    def test_misspelt_is_told_what_to_type(self, found: str) -> None:
        with pytest.raises(OptionError, match="Did you mean 'dynamic'"):
            check_loss_scale(found)


class TestFlagsAndTypes:
    @pytest.mark.parametrize(
        ("given", "flag"), [(True, True), (False, False), (None, None), ("True", True), ("False", False)], ids=repr
    )
    def test_a_flag(self, given: object, flag: bool | None) -> None:
        assert check_flag("master_weights", given) is flag

    @pytest.mark.parametrize("found", [0, 1, "true", "yes", "", "None", [], FLOAT16], ids=repr)
    def test_anything_else_is_no_flag(self, found: object) -> None:
        with pytest.raises(OptionError) as refused:
            check_flag("master_weights", found)

        assert str(refused.value) == (
            f"master_weights is {found!r}; expected True, False or None (or the strings 'True' and 'False')."
        )

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_a_half_type(self, half_dtype: torch.dtype) -> None:
        assert check_half_dtype(half_dtype) is half_dtype

    @pytest.mark.parametrize(
        "found",
        [FLOAT32, torch.float64, torch.int8, "float32", "int8", "torch.", "", None, True, np.float16],
        ids=repr,
    )
    def test_anything_else_is_no_half_type(self, found: object) -> None:
        with pytest.raises(
            OptionError, match=r"; expected torch\.float16 or torch\.bfloat16, or its name\."
        ) as refused:
            check_half_dtype(found, "patch_type")

        assert str(refused.value).startswith(f"patch_type is {found!r};")

    @pytest.mark.parametrize("dtype", [None, FLOAT32, FLOAT16, BFLOAT16], ids=repr)
    def test_a_model_type(self, dtype: torch.dtype | None) -> None:
        assert check_model_type(dtype) is dtype

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "half", "float"])
    def test_a_type_goes_by_torchs_own_names(self, name: str) -> None:
        assert check_model_type(name) is check_model_type(f"torch.{name}") is getattr(torch, name)

    @pytest.mark.parametrize("found", [torch.float64, torch.int32, "float64", True], ids=repr)
    def test_anything_else_is_no_model_type(self, found: object) -> None:
        with pytest.raises(OptionError) as refused:
            check_model_type(found)

        assert str(refused.value) == (
            f"cast_model_type is {found!r}; expected torch.float32, torch.float16 or torch.bfloat16, or its name, "
            "or None for the level's own."
        )

    @pytest.mark.parametrize("name", ["patch_torch_functions", "keep_batchnorm_fp32", "master_weights"])
    def test_each_flag_is_checked_by_name(self, name: str) -> None:
        with pytest.raises(OptionError, match=f"{name} is 'maybe'"):
            resolved("O2", **{name: "maybe"})


class TestTheDifference:
    def test_names_what_differs_and_nothing_else(self) -> None:
        assert difference(resolved("O1"), resolved("O1", loss_scale=128.0)) == {"loss_scale": ("dynamic", 128.0)}
        assert difference(resolved("O2", FLOAT16), resolved("O2", FLOAT16)) == {}

    def test_leaves_out_what_follows_from_the_level_or_the_half_type(self) -> None:
        assert difference(resolved("O1"), resolved("O2")) == {"opt_level": ("O1", "O2")}
        assert difference(resolved("O2", FLOAT16), resolved("O2", BFLOAT16)) == {"half_dtype": (FLOAT16, BFLOAT16)}

    def test_tells_an_override_beside_another_level(self) -> None:
        assert difference(resolved("O1"), resolved("O2", loss_scale=1.0)) == {
            "opt_level": ("O1", "O2"),
            "loss_scale": ("dynamic", 1.0),
        }
