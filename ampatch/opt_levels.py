"""O0-O5 as a table, and the overrides laid over a row of it.

Only values and checks: nothing here touches a model, an optimizer or torch's functions.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Literal

import torch

from ampatch.errors import OptionError, did_you_mean

HALF_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
HALVES = frozenset(HALF_DTYPES.values())

# What a type may be called where an argument takes one: torch's own names first, then those that other libraries use.
# "half" is float16, as torch.half is, whatever the half type of the session.
_DTYPE_NAMES = {
    **HALF_DTYPES,
    "float32": torch.float32,
    "float64": torch.float64,
    "half": torch.half,
    "float": torch.float,
    "double": torch.double,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True, slots=True)
class Properties:
    """What an opt level, its half dtype and the overrides come to.

    Attributes:
        opt_level: "O0" to "O5".
        half_dtype: the half type of casts and weights.
        cast_model_type: the type that the model's weights are converted to; None leaves them.
        patch_torch_functions: whether torch's functions cast by the lists.
        keep_batchnorm_fp32: whether batch norm stays in float32; None where the level does not convert weights.
        master_weights: whether the optimizer updates float32 copies; None where the level does not convert weights.
        loss_scale: a fixed scale, or "dynamic".
    """

    opt_level: str
    half_dtype: torch.dtype
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale


@dataclass(frozen=True, slots=True)
class _Level:
    """A row of the table. ``weights`` is "half", "float32", "bfloat16" or None for unchanged."""

    weights: str | None
    patched: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale
    half_dtype: torch.dtype | None = None  # None: the caller's choice


# The names and values of Apex's table. O4 and O5 are O1 and O2 in bfloat16, under the names that ROCm's Apex gave them.
LEVELS = {
    "O0": _Level("float32", False, None, False, 1.0),
    "O1": _Level(None, True, None, None, "dynamic"),
    "O2": _Level("half", False, True, True, "dynamic"),
    "O3": _Level("half", False, False, False, 1.0),
    "O4": _Level(None, True, None, None, 1.0, torch.bfloat16),
    "O5": _Level("bfloat16", False, True, True, 1.0, torch.bfloat16),
}

# What may be overridden where the level leaves the weights alone. Anything else contradicts the level.
_UNCHANGED_WEIGHTS_ALLOW = {
    "cast_model_type": (None, torch.float32),
    "master_weights": (None, False),
    "keep_batchnorm_fp32": (None,),
}


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a caller asked for beyond the level; None leaves the level's own value."""

    cast_model_type: torch.dtype | str | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | str | None = None
    master_weights: bool | None = None
    loss_scale: float | str | None = None


def resolve(opt_level: str, half_dtype: torch.dtype, overrides: Overrides) -> Properties:
    """Returns the properties of a level with overrides laid over it.

    Args:
        opt_level: "O0" to "O5", with the letter O.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; O4 and O5 take bfloat16 whatever is given.
        overrides: what the caller asked for beyond the level.

    Raises:
        OptionError: an unknown level, a value of the wrong kind, or an override that contradicts the level.
    """
    level = LEVELS[check_opt_level(opt_level)]
    half = level.half_dtype or half_dtype
    weights = {None: None, "half": half, "float32": torch.float32, "bfloat16": torch.bfloat16}[level.weights]
    # bfloat16 has float32's range: its gradients neither overflow nor vanish for want of a scale.
    default_scale: LossScale = 1.0 if half is torch.bfloat16 else level.loss_scale
    properties = Properties(
        opt_level, half, weights, level.patched, level.keep_batchnorm_fp32, level.master_weights, default_scale
    )
    asked = {
        "cast_model_type": check_model_type(overrides.cast_model_type),
        "patch_torch_functions": check_flag("patch_torch_functions", overrides.patch_torch_functions),
        "keep_batchnorm_fp32": check_flag("keep_batchnorm_fp32", overrides.keep_batchnorm_fp32),
        "master_weights": check_flag("master_weights", overrides.master_weights),
        "loss_scale": None if overrides.loss_scale is None else check_loss_scale(overrides.loss_scale),
    }
    if level.weights is None:
        for name, allowed in _UNCHANGED_WEIGHTS_ALLOW.items():
            if asked[name] not in allowed:
                converting = "O2" if level.half_dtype is None else "O5"
                raise OptionError(
                    f"{name}={getattr(overrides, name)!r} contradicts opt_level={opt_level!r}, which leaves the "
                    f"model's weights as they are. Leave {name} out, or use opt_level={converting!r}, which "
                    f"converts them."
                )
    return replace(properties, **{name: value for name, value in asked.items() if value is not None})  # type: ignore[arg-type]


def check_opt_level(opt_level: object) -> str:
    """``opt_level`` itself if it is one.

    Raises:
        OptionError: it is not.
    """
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return opt_level
    digit = re.fullmatch(r"[0o]?([0-5])", str(opt_level))  # 1, "1", "01" with a zero, "o1"
    if digit:
        hint = f" It starts with the capital letter O: type opt_level='O{digit[1]}'."
    else:
        hint = did_you_mean(opt_level, LEVELS)
    raise OptionError(f"opt_level is {opt_level!r}; expected one of {', '.join(LEVELS)}.{hint}")


def check_half_dtype(half_dtype: object, name: str = "half_dtype") -> torch.dtype:
    """Returns the half type that is given: a dtype, or its name ("float16", "torch.float16", "half", "fp16").

    Raises:
        OptionError: it is none.
    """
    found = dtype_of(half_dtype)
    if isinstance(found, torch.dtype) and found in HALVES:
        return found
    hint = _near_dtypes(half_dtype, HALVES)
    raise OptionError(f"{name} is {half_dtype!r}; expected torch.float16 or torch.bfloat16, or its name.{hint}")


def check_model_type(dtype: object) -> torch.dtype | None:
    """Returns the type that a model can be cast to: a dtype, its name, or None.

    Raises:
        OptionError: it is none of these.
    """
    found, allowed = dtype_of(dtype), {torch.float32, *HALVES}
    if found is None or (isinstance(found, torch.dtype) and found in allowed):
        return found
    raise OptionError(
        f"cast_model_type is {dtype!r}; expected torch.float32, torch.float16 or torch.bfloat16, or its name, or None "
        f"for the level's own.{_near_dtypes(dtype, allowed)}"
    )


def check_output_type(dtype: object) -> torch.dtype | None:
    """Returns the type that a model's outputs can be cast to: a dtype, its name, or None.

    Raises:
        OptionError: it is none of these.
    """
    found = dtype_of(dtype)
    if found is None or (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1):
        return found
    raise OptionError(
        f"cast_model_outputs is {dtype!r}; expected a floating type such as torch.float32, or its name, or None for "
        f"the level's own.{_near_dtypes(dtype, _DTYPE_NAMES.values())}"
    )


def dtype_of(value: object) -> object:
    """Returns the dtype that a text names, with or without "torch." in front; anything else as it is."""
    return _DTYPE_NAMES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def _near_dtypes(given: object, allowed: Collection[torch.dtype]) -> str:
    """Returns the allowed names near a misspelt one; nothing is near to what is no text, or names a type rightly."""
    if not isinstance(given, str) or dtype_of(given) is not given:
        return ""
    names = [name for name, dtype in _DTYPE_NAMES.items() if dtype in allowed]
    return did_you_mean(given.removeprefix("torch.").lower(), names)


def check_flag(name: str, value: object) -> bool | None:
    """True, False or None from a flag, which scripts also give as the strings "True" and "False".

    Raises:
        OptionError: anything else.
    """
    flags = {True: True, False: False, None: None, "True": True, "False": False}
    if (value is None or isinstance(value, (bool, str))) and value in flags:
        return flags[value]
    raise OptionError(f"{name} is {value!r}; expected True, False or None (or the strings 'True' and 'False').")


def check_loss_scale(loss_scale: object) -> LossScale:
    """Returns a positive finite float, or "dynamic".

    Raises:
        OptionError: anything else.
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return "dynamic"
    if not isinstance(loss_scale, bool) and isinstance(loss_scale, (Real, str)):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(loss_scale)
            if math.isfinite(number) and number > 0:
                return number
    hint = did_you_mean(loss_scale, ["dynamic"])
    raise OptionError(f"loss_scale is {loss_scale!r}; expected a positive finite number, or 'dynamic'.{hint}")


def difference(live: Properties, asked: Properties) -> dict[str, tuple[object, object]]:
    """Returns the arguments that tell two sets of properties apart, without those that only follow from others.

    Args:
        live: one.
        asked: the other.

    Returns:
        The values in ``live`` and in ``asked`` by the name of the argument; empty if nothing differs.
    """
    names = [field.name for field in fields(Properties)]
    differing = {name: (getattr(live, name), getattr(asked, name)) for name in names}
    own = [resolve(each.opt_level, each.half_dtype, Overrides()) for each in (live, asked)]
    return {
        name: values
        for name, values in differing.items()
        if values[0] != values[1]
        and (name in ("opt_level", "half_dtype") or values != tuple(getattr(each, name) for each in own))
    }
