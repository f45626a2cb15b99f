"""The errors and warnings of ampatch, their text as lines, and the wording of "Did you mean ...?" hints.

Every error says what was found, what was expected and what to type. Must not import another module of the package.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class AmpError(Exception):
    """Base class of every error that ampatch raises on purpose."""


class OptionError(AmpError, ValueError):
    """Raised if the value of an argument is not allowed, or contradicts another argument."""


class UnknownOptionError(OptionError, TypeError):
    """Raised if a function has no argument of a name; a TypeError too, as Python raises that."""


class UsageError(AmpError, RuntimeError):
    """Raised if a call is out of order: too early, twice, or on an object that was not passed to ``amp.initialize``."""


class BannedFunctionError(AmpError, NotImplementedError):
    """Raised if a banned function, or the in-place form of a blacklisted one, gets a half tensor."""


class LossScaleError(AmpError, RuntimeError):
    """Raised if gradients still overflow although the loss scale has reached its floor.

    Attributes:
        overflow: the skipped step as an `Overflow`; None if the code that raised has none.
    """

    def __init__(self, message: str, overflow: Any = None) -> None:
        super().__init__(message)
        self.overflow = overflow


class GradientOverflowError(AmpError, ArithmeticError):
    """Raised by a step that was skipped after an overflow, with ``on_overflow="raise"``.

    Weights, masters and optimizer state are as they were before the step, so a loop may catch it and go on.

    Attributes:
        overflow: the skipped step as an `Overflow`.
    """

    def __init__(self, message: str, overflow: Any = None) -> None:
        super().__init__(message)
        self.overflow = overflow


class ScalerOptionError(OptionError, AssertionError):
    """Raised if an argument of a `GradScaler` is not allowed; an AssertionError too, as torch's class raises that."""


class ScalerUsageError(UsageError, AssertionError):
    """Raised if a call of a `GradScaler` is out of order.

    Both a RuntimeError and an AssertionError, as torch's class raises these.
    """


class KernelError(AmpError, RuntimeError):
    """Raised if the user asks for the compiled extension, and it cannot be built or loaded."""


class IntegrationError(AmpError, ImportError):
    """Raised if a library that ampatch integrates with is not installed, or is too old."""


class AmpWarning(UserWarning):
    """Warning about something that ampatch does not change and that the user should know."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in a cast list: its file and line, and a message."""

    source: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"


class CastListError(AmpError, ValueError):
    """Raised if cast lists have faults; nothing was patched.

    Attributes:
        faults: every fault found, in the order of the lines.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(self.faults)  # unpickling calls the class with these, on the way out of a worker process

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))


def faults(error: AmpError) -> list[str]:
    """Returns the text of an error, one line per fault, even if the fault quotes several lines."""
    parts: Iterable[object] = error.faults if isinstance(error, CastListError) else [error]
    return [one_line(str(part)) for part in parts]


def one_line(text: str) -> str:
    """Returns a text without the ends of its lines and what indents them."""
    return " ".join(line.strip() for line in text.splitlines())


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Returns a hint with the candidates closest to ``name``, with a space in front; empty if none is close."""
    near = difflib.get_close_matches(str(name), list(candidates), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(candidate) for candidate in near)}?" if near else ""


def in_every_layer(name: str) -> str:
    """Returns the pattern of a module's name in all layers: "layers.0.norm" becomes "layers.*.norm"."""
    parts = name.split(".")
    following = [*parts[1:], "0"]
    return ".".join(
        "*" if part.isdigit() and not after.isdigit() else part for part, after in zip(parts, following, strict=True)
    )


_INTERNAL_PACKAGES = ("ampatch", "contextlib", "functools", "torch")


def warn(message: str) -> None:
    """Warns with an `AmpWarning` that points at the nearest caller outside ampatch and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, AmpWarning, stacklevel=level)
