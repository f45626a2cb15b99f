"""Rules as values: a list's entry for one function, and the check whether a function can be listed.

Must not read a file, nor patch a function.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import yaml

from ampatch.cast_lists import signatures
from ampatch.cast_lists.paths import Path, is_fixed
from ampatch.errors import did_you_mean
from ampatch.formats import Format


class Treatment(enum.Enum):
    """The way that amp treats the arguments of a function; the value is the name of the list."""

    WHITELIST = "whitelist"
    BLACKLIST = "blacklist"
    PROMOTE = "promote"
    BANNED = "banned"


UNLISTED = "unlisted"


#: Arguments, each with the values for which a rule applies.
When = tuple[tuple[str, tuple[object, ...]], ...]


#: The functions of torch whose products a device can make itself, by name.
MULTIPLYING = ("linear", "addmm", "matmul", "mm", "__matmul__", "__rmatmul__")


class Formats(NamedTuple):
    """The formats of a function: of its arguments, and of the gradients of its results."""

    format: Format
    grad: Format

    @property
    def are_devices(self) -> bool:
        """True if the device is to multiply in the formats."""
        return self.format.products == "device"

    def why_not_devices(self) -> str:
        """Returns why no device multiplies in the formats, although it is to; empty if it can, or is not to."""
        format, grad = self
        if not self.are_devices:
            return "only the gradients have it; give it to `format`" if grad.products == "device" else ""
        for other in self:  # the forward pass multiplies two such numbers, the backward pass one by a gradient
            if other.name not in format.multiplies:
                return f"no device multiplies {format.name} by {other.name}; expected {' or '.join(format.multiplies)}"
        if grad.scale != format.scale:
            return f"`format` has scale: {format.scale}, and `grad` has scale: {grad.scale}; give both the same one"
        return grad.why_no_device

    def fit(self, path: Path) -> bool:
        """Returns True if a function can compute in the formats: any can, if its products are emulated."""
        return not self.are_devices or (path.name in MULTIPLYING and path.namespace.partition(".")[0] == "torch")

    def __str__(self) -> str:
        return f"format {self.format}" + (f", grad {self.grad}" if self.grad != self.format else "")


@dataclass(frozen=True, slots=True)
class Rule:
    """A list's entry for one function.

    Attributes:
        path: path of the function.
        treatment: treatment of the list that the function is in.
        source: file and line, for messages. It changes nothing in the effect of a rule, so equality ignores it.
        when: conditions, all of which must hold; empty: the rule always applies.
        via_dtype: True if a blacklisted function computes in float32 by way of ``dtype=torch.float32``.
        needs_float32: device types on which torch has no half kernel of a blacklisted function, `EVERY_DEVICE` for all;
            there it is cast at O2, O3 and O5 as well. Empty: it has one.
        instead: advice to the user in the error of a banned function.
        formats: formats to which a whitelisted or blacklisted function's arguments, and the gradients of its results,
            are rounded; None: it computes in a type of torch.
        optional: True if a path that does not exist is skipped.
        overlay: number of the overlay that it comes from; 0: the shipped lists.
    """

    path: Path
    treatment: Treatment
    source: str = field(compare=False)
    when: When = ()
    via_dtype: bool = False
    needs_float32: tuple[str, ...] = ()
    instead: str | None = None
    formats: Formats | None = None
    optional: bool = field(default=False, compare=False)
    overlay: int = field(default=0, compare=False)

    @property
    def is_for_half_weights(self) -> bool:
        """True if the rule holds for models with half weights, too, to which the lists do not apply otherwise."""
        return bool(self.needs_float32) or self.formats is not None


EVERY_DEVICE = ("*",)


def typed_need(devices: Sequence[str]) -> list[str]:
    """Returns ``needs_float32`` as text, with the device types if it does not hold for all; empty if it is not set."""
    if not devices:
        return []
    return ["needs_float32" if tuple(devices) == EVERY_DEVICE else f"needs_float32 on {' and '.join(devices)}"]


def typed_options(
    when: When, via_dtype: bool, needs_float32: Sequence[str], formats: Formats | str | None = None
) -> list[str]:
    """Returns the options of a rule as texts."""
    conditions = [f"when {typed_conditions(when)}"] if when else []
    told = [] if formats is None else [str(formats)]
    return [*conditions, *(["via_dtype"] if via_dtype else []), *typed_need(needs_float32), *told]


#: A change: the rule that a path gets for a half dtype, or None if it is to have no rule.
Change = tuple[tuple[Path, torch.dtype], Rule | None]
#: The changes in a file.
Changes = Sequence[Change]


#: The key for rules of parts of a model, beside the names of the lists.
MODULES = "modules"

#: The value of an entry under `MODULES` for a part that computes in float32.
FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class ModuleRules:
    """An entry under ``modules``: parts of a model, and what they compute by.

    Attributes:
        name: name of a submodule, pattern of such names, or class, as in ``keep_fp32``.
        source: file and line, for messages. Equality ignores it.
        changes: changes to the session's lists while such a part runs; None: the part computes in float32.
        formats: formats of the functions on the whitelist there, if neither this overlay nor a later one gives them
            others; None: none.
        overlay: number of the overlay that it comes from.
    """

    name: str
    source: str = field(compare=False)
    changes: tuple[Change, ...] | None = None
    formats: Formats | None = None
    overlay: int = 0

    @property
    def effect(self) -> tuple[object, ...]:
        """The rules and formats by which such a part computes; for formats also the overlay."""
        return self.changes, self.formats, self.overlay if self.formats else 0

    def in_formats(self, rule: Rule) -> Rule:
        """Returns the rule of a function while such a part runs."""
        if self.formats is None or rule.treatment is not Treatment.WHITELIST:
            return rule
        if rule.formats is not None and rule.overlay >= self.overlay:
            return rule
        return replace(rule, formats=self.formats if self.formats.fit(rule.path) else None)

    @property
    def is_float32(self) -> bool:
        """True if the parts compute in float32, False if they have rules of their own."""
        return self.changes is None


def place(rule: Rule | None) -> str:
    """Returns where a function stands by its rule, as part of a sentence."""
    if rule is None:
        return "on no list"
    return "banned" if rule.treatment is Treatment.BANNED else f"in the {rule.treatment.value}"


def typed_conditions(when: When) -> str:
    """Returns conditions as text, the same one in whatever order the values were written.

    Values stand as in YAML, so that True differs from the string "True".
    """
    return ", ".join(sorted(f"{name}={'|'.join(sorted(set(map(_as_typed, values))))}" for name, values in when))


def _as_typed(value: object) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


def unlistable_reason(path: Path, owner: object, function: Any, rule: Rule | None = None) -> str | None:
    """Returns a sentence on why the object at a path cannot be listed, or not with a rule's options; None if it can."""
    if not isinstance(owner, (types.ModuleType, type)):
        return f"{path.namespace!r} is {type(owner).__name__!r}; expected a module or a class."
    if isinstance(owner, type) and is_fixed(owner):
        return f"{path.namespace!r} is a class in C, and cannot be patched; name a class in Python, as torch.Tensor is."
    if isinstance(function, type) and is_fixed(function):
        return f"{path} is a class, not a function."
    if isinstance(function, type):
        return f"{path} is a class, not a function; name a method of it, such as `{path}: [forward]`."
    if not callable(function):
        return f"{path} is {type(function).__name__!r}, not a function."
    when, via_dtype, formats = ((), False, None) if rule is None else (rule.when, rule.via_dtype, rule.formats)
    if formats is not None and not formats.fit(path):
        return f"`products: device` is for torch's {', '.join(MULTIPLYING)}; leave it out, and {path} is emulated."
    readable = signatures.parameter_names(function) if when or via_dtype else ()  # reading a signature takes long
    for argument, _ in when:
        if argument not in readable:
            known = f"expected {', '.join(readable)}.{did_you_mean(argument, readable)}" if readable else "none can."
            return f"`when` names the argument {argument!r}, which cannot be read from a call of {path}; {known}"
    if via_dtype and "dtype" not in readable:
        return f"{path} has no argument `dtype`; leave `via_dtype` out, and its arguments are cast instead."
    return None
