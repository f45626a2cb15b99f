"""O0-O6 as a table, and the overrides of its values.

Owns only values and checks. Must not touch a model, an optimizer or torch's functions.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch

from ampatch.errors import OptionError, UnknownOptionError, did_you_mean
from ampatch.half_types import HALF_DTYPES, HALF_TYPES, HALVES, needs_scale

# The names that an argument accepts for a dtype: torch's own names first, then those of other libraries.
_DTYPE_NAMES = {
    **HALF_DTYPES,
    "float32": torch.float32,
    "float64": torch.float64,
    "float": torch.float,
    "double": torch.double,
    "fp32": torch.float32,
    "fp64": torch.float64,
    **{alias: row.dtype for row in HALF_TYPES.values() for alias in row.aliases},
}

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True, slots=True)
class Properties:
    """The values of an opt level, with its half dtype and the overrides applied.

    Attributes:
        opt_level: "O0" to "O6".
        half_dtype: half dtype of casts and weights.
        cast_model_type: dtype that the model's weights are converted to; None leaves them unchanged.
        patch_torch_functions: True if torch's functions cast by the lists.
        keep_batchnorm_fp32: True if batch norm stays in float32; None if the level does not convert weights to half.
        master_weights: True if the optimizer updates float32 masters; "split" or "stochastic" if these exist only while
            it steps; None if the level leaves weights unchanged.
        loss_scale: a fixed loss scale, or "dynamic".
    """

    opt_level: str
    half_dtype: torch.dtype
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | str | None
    loss_scale: LossScale

    @property
    def casts_float32_weights(self) -> bool:
        """True if the lists cast weights that are float32: there a linear layer may become one node."""
        return self.patch_torch_functions and self.cast_model_type not in HALVES

    @property
    def master_bytes(self) -> int:
        """Bytes of what each half weight has beside itself between steps: a float32 master, or a remainder."""
        return {True: 4, "split": 2}.get(self.master_weights or False, 0)


#: The arguments of ``amp.initialize`` that are fields of `Properties`.
ARGUMENTS = tuple(field.name for field in fields(Properties))


@dataclass(frozen=True, slots=True)
class Level:
    """A row of the table. ``weights`` is "half", "float32", "bfloat16", or None to leave weights unchanged."""

    weights: str | None
    patched: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale
    half_dtype: torch.dtype | None = None  # None: the caller's choice
    lists: str | None = None  # a file of lists that is laid over the others

    @property
    def converts(self) -> bool:
        """True if weights become half."""
        return self.weights not in (None, "float32")


#: What ``master_weights`` may be beside a flag: masters exist only while the optimizer steps.
TEMPORARY = ("split", "stochastic")

# Names and values are Apex's. O4 and O5 are O1 and O2 in bfloat16, named as in ROCm's Apex. O6, which neither has, is
# O5 with float8 products.
LEVELS = {
    "O0": Level("float32", False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level("half", False, True, True, "dynamic"),
    "O3": Level("half", False, False, False, 1.0),
    "O4": Level(None, True, None, None, 1.0, torch.bfloat16),
    "O5": Level("bfloat16", False, True, True, 1.0, torch.bfloat16),
    "O6": Level("bfloat16", False, True, True, 1.0, torch.bfloat16, "float8.yaml"),
}

# The overrides allowed if the level leaves the weights unchanged. Any other value contradicts the level.
_UNCHANGED_WEIGHTS_ALLOW = {
    "cast_model_type": (None, torch.float32),
    "master_weights": (None, False),
    "keep_batchnorm_fp32": (None,),
}


def resolve(opt_level: str, half_dtype: torch.dtype, **overrides: object) -> Properties:
    """Returns the properties of a level with the overrides applied.

    Args:
        opt_level: "O0" to "O6", with the letter O.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; O4, O5 and O6 ignore it and use bfloat16.
        overrides: the caller's values in place of the level's, by the names in `OVERRIDES`; None keeps the level's.

    Raises:
        OptionError: the level is unknown, a value is of the wrong kind, or an override contradicts the level.
    """
    level = LEVELS[check_opt_level(opt_level)]
    half = level.half_dtype or half_dtype
    weights = {None: None, "half": half, "float32": torch.float32, "bfloat16": torch.bfloat16}[level.weights]
    default_scale: LossScale = level.loss_scale if needs_scale(half) else 1.0
    properties = Properties(
        opt_level, half, weights, level.patched, level.keep_batchnorm_fp32, level.master_weights, default_scale
    )
    asked = {name: OVERRIDES[name](value) for name, value in overrides.items() if value is not None}
    if level.weights is None:
        for name, allowed in _UNCHANGED_WEIGHTS_ALLOW.items():
            if asked.get(name) not in allowed:
                is_half = level.half_dtype is None and overrides[name] not in TEMPORARY
                converting = "O2" if is_half else "O5"
                raise OptionError(
                    f"{name}={overrides[name]!r} contradicts opt_level={opt_level!r}, which leaves the "
                    f"model's weights as they are. Leave {name} out, or use opt_level={converting!r}, which "
                    f"converts them."
                )
    found = replace(properties, **asked)
    if level.lists is not None and not (found.patch_torch_functions or found.cast_model_type in HALVES):
        raise OptionError(
            f"cast_model_type={overrides['cast_model_type']!r} contradicts opt_level={opt_level!r}, whose lists need "
            "half weights. Leave it out, or type patch_torch_functions=True as well."
        )
    kept = (torch.bfloat16, None) if found.master_weights == "stochastic" else (torch.bfloat16,)
    if found.master_weights in TEMPORARY and found.cast_model_type not in kept:
        made = found.cast_model_type
        what = "weights as they are" if made is None else f"{dtype_name(made)} weights"
        raise OptionError(
            f"master_weights={found.master_weights!r} contradicts opt_level={opt_level!r} with {what}; expected "
            "bfloat16 weights, made by amp. Type opt_level='O5', without cast_model_type."
        )
    return found


def check_opt_level(opt_level: object) -> str:
    """Returns ``opt_level`` unchanged if it is an opt level.

    Raises:
        OptionError: it is not an opt level.
    """
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return opt_level
    digit = re.fullmatch(r"[0o]?(\d)", str(opt_level))  # 1, "1", "01" (with a zero) or "o1"
    if digit and f"O{digit[1]}" in LEVELS:
        hint = f" It starts with the capital letter O: type opt_level='O{digit[1]}'."
    else:
        hint = did_you_mean(opt_level, LEVELS)
    raise OptionError(f"opt_level is {opt_level!r}; expected one of {', '.join(LEVELS)}.{hint}")


def check_half_dtype(half_dtype: object, name: str = "half_dtype") -> torch.dtype:
    """Returns the half dtype, given as a dtype or by name ("float16", "torch.float16", "half", "fp16").

    Raises:
        OptionError: the value is not a half dtype.
    """
    return check_dtype(name, half_dtype, HALVES, "torch.float16 or torch.bfloat16, or its name")


def check_model_type(dtype: object) -> torch.dtype | None:
    """Returns the dtype for a model's weights, given as a dtype or by its name; False, as in Apex, gives None.

    Raises:
        OptionError: the value is not None, False, float32 or a half dtype.
    """
    if dtype is False or dtype is None:
        return None
    expected = "torch.float32, torch.float16 or torch.bfloat16, or its name, or None for the level's own"
    return check_dtype("cast_model_type", dtype, {torch.float32, *HALVES}, expected)


def check_output_type(dtype: object) -> torch.dtype | None:
    """Returns the dtype for a model's outputs, given as a dtype or by its name; None stays None.

    Raises:
        OptionError: the value is not None or a floating dtype of at least 16 bits.
    """
    expected = "a floating type such as torch.float32, or its name, or None for the level's own"
    return None if dtype is None else check_dtype("cast_model_outputs", dtype, _DTYPE_NAMES.values(), expected)


def check_dtype(name: str, given: object, allowed: Collection[torch.dtype], expected: str) -> torch.dtype:
    """Returns a dtype, given as a dtype or by its name.

    Args:
        name: name of the argument.
        given: what the user gave.
        allowed: the dtypes that it may be.
        expected: what the error says of these.

    Raises:
        OptionError: it is none of these.
    """
    found = dtype_of(given)
    if isinstance(found, torch.dtype) and found in allowed:
        return found
    hint = ""
    if isinstance(given, str) and found is given:  # no dtype at all
        names = [name for name, dtype in _DTYPE_NAMES.items() if dtype in allowed]
        hint = did_you_mean(given.removeprefix("torch.").lower(), names)
    raise OptionError(f"{name} is {given!r}; expected {expected}.{hint}")


def dtype_of(value: object) -> object:
    """Returns the dtype that a string names, with or without "torch." in front; any other value unchanged."""
    return _DTYPE_NAMES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without "torch." in front."""
    return str(dtype).removeprefix("torch.")


def check_flag(name: str, value: object) -> bool | None:
    """Returns a flag as True, False or None; scripts also pass the strings "True" and "False".

    Raises:
        OptionError: the value is none of these.
    """
    flags = {True: True, False: False, None: None, "True": True, "False": False}
    if (value is None or isinstance(value, (bool, str))) and value in flags:
        return flags[value]
    found = textwrap.shorten(repr(value), 80)  # of a model, for instance
    level = f" amp.initialize takes an opt level by its name: opt_level={value!r}." if str(value) in LEVELS else ""
    raise OptionError(f"{name} is {found}; expected True, False or None (or the strings 'True' and 'False').{level}")


def check_master_weights(value: object) -> bool | str | None:
    """Returns a checked ``master_weights``: a flag as `check_flag` returns it, or one of `TEMPORARY`.

    Raises:
        OptionError: the value is none of these.
    """
    if isinstance(value, str) and value in TEMPORARY:
        return value
    with contextlib.suppress(OptionError):
        return check_flag("master_weights", value)
    raise OptionError(
        f"master_weights is {value!r}; expected True, False, None, 'split' or 'stochastic'."
        f"{did_you_mean(value, TEMPORARY)}"
    )


def state_type(given: object, master_weights: object) -> str:
    """Returns the name of the type of an optimizer's state between steps.

    Raises:
        OptionError: it is another type, or masters do not exist only while the optimizer steps.
    """
    allowed = (torch.float32, torch.bfloat16)
    dtype = check_dtype("optimizer_state", given, allowed, "torch.float32 or torch.bfloat16, or its name")
    if dtype is torch.bfloat16 and master_weights not in TEMPORARY:
        raise OptionError(
            f"optimizer_state={given!r} needs masters that exist only while the optimizer steps, as state is widened "
            f"together with the weights; found {master_weights!r}. Type master_weights='stochastic' (or 'split') in "
            "amp.initialize with opt_level='O5'; in MixedPrecision, masters='stochastic'."
        )
    return dtype_name(dtype)


def as_flag(name: str, value: object) -> bool:
    """Returns a flag as bool: a number, what else defines its truth, or a string as `check_flag` takes it.

    bool("no") is True, and so is bool of any object, such as a scheduler in the place of ``enabled``.
    """
    return bool(value if hasattr(type(value), "__bool__") else check_flag(name, value))


def check_verbosity(verbosity: object) -> bool:
    """Returns True if a verbosity asks for messages: a number above 0, or True.

    Raises:
        OptionError: it is no whole number.
    """
    if isinstance(verbosity, Integral):
        return int(verbosity) > 0
    raise OptionError(f"verbosity is {verbosity!r}; expected a whole number: 0 is silent, 1 logs skipped steps.")


def check_count(name: str, value: object, least: int = 1) -> int:
    """Returns a whole number unchanged.

    Raises:
        OptionError: it is something else, or less than ``least``, or more than an int32 holds.
    """
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
        return value
    below = ", below 2**31" if isinstance(value, int) and value >= 2**31 else ""
    raise OptionError(f"{name} is {value!r}; expected a whole number of at least {least}{below}.")


def check_limit(name: str, value: Any, otherwise: str = "") -> float:
    """Returns a number from 0 on, perhaps infinite, or a tensor with one, as a float.

    Args:
        name: name of the argument.
        value: what the user gave.
        otherwise: what else it may be, for the error.

    Raises:
        OptionError: it is something else.
    """
    number = math.nan
    if not isinstance(value, (bool, str)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if number >= 0:
        return number
    raise OptionError(f"{name} is {value!r}; expected a number from 0 on, such as 1.0{otherwise}.")


def check_loss_scale(loss_scale: object) -> LossScale:
    """Returns the loss scale as a positive finite float, or "dynamic".

    Raises:
        OptionError: the value is neither.
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


#: The arguments that replace a value of the level, each with its check.
OVERRIDES: dict[str, Callable[[object], Any]] = {
    "cast_model_type": check_model_type,
    "patch_torch_functions": functools.partial(check_flag, "patch_torch_functions"),
    "keep_batchnorm_fp32": functools.partial(check_flag, "keep_batchnorm_fp32"),
    "master_weights": check_master_weights,
    "loss_scale": check_loss_scale,
}


def hint(name: str, known: Collection[str]) -> str:
    """Returns the end of an error about an unknown name: similar names, or all known ones.

    Args:
        name: name that is not known.
        known: names that are.
    """
    return did_you_mean(name, known) or f" Expected one of {', '.join(known)}."


def check_names(given: Iterable[str], known: Collection[str], whose: str) -> None:
    """Raises if a name is not known.

    Args:
        given: names that the user gave.
        known: names that are known.
        whose: the beginning of the error, such as "prepare got".

    Raises:
        UnknownOptionError: one is not.
    """
    for name in given:
        if name not in known:
            raise UnknownOptionError(f"{whose} the unknown argument {name!r}.{hint(name, known)}")


def difference(live: Properties, asked: Properties) -> dict[str, tuple[object, object]]:
    """Returns the arguments in which two sets of properties differ.

    Leaves out an argument whose values are both the defaults of their levels: then the level or half dtype differs.

    Args:
        live: properties of the live session.
        asked: properties that another call asks for.

    Returns:
        The values in ``live`` and in ``asked``, by the name of the argument; empty if nothing differs.
    """
    differing = {name: (getattr(live, name), getattr(asked, name)) for name in ARGUMENTS}
    own = [resolve(each.opt_level, each.half_dtype) for each in (live, asked)]
    return {
        name: values
        for name, values in differing.items()
        if values[0] != values[1]
        and (name in ("opt_level", "half_dtype") or values != tuple(getattr(each, name) for each in own))
    }
