"""The errors and warnings of ampatch, and how they word a near miss.

Every error says what was found, what was expected and what to type. Nothing here may import another module of the
package.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass


class AmpError(Exception):
    """Base of every error that ampatch raises on purpose."""


class OptionError(AmpError, ValueError):
    """An argument has a value that is not allowed, or that contradicts another."""


class UsageError(AmpError, RuntimeError):
    """A call came out of order: too early, twice, or on something that was never handed to ``amp.initialize``."""


class BannedFunctionError(AmpError, NotImplementedError):
    """A banned function, or the in-place form of a blacklisted one, was given a half tensor."""


class LossScaleError(AmpError, RuntimeError):
    """Gradients still overflow although the loss scale has reached its floor."""


class ScalerOptionError(OptionError, AssertionError):
    """An argument of a `GradScaler` is not allowed; an AssertionError too, as of torch's class."""


class ScalerUsageError(UsageError, AssertionError):
    """A call of a `GradScaler` came out of order: a RuntimeError and an AssertionError, as of torch's class."""


class KernelError(AmpError, RuntimeError):
    """The compiled extension was asked for, and cannot be built or loaded."""


class IntegrationError(AmpError, ImportError):
    """A library that ampatch integrates with is not installed, or is too old."""


class AmpWarning(UserWarning):
    """Something that is left as it is, and that the user should know of."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a cast list: where it stands and what it is."""

    source: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"


class CastListError(AmpError, ValueError):
    """Cast lists with faults in them. Nothing was patched.

    Attributes:
        faults: every fault found, in the order of the lines.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(self.faults)  # what a pickle makes it of again, on its way out of a worker process

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Returns a sentence naming the candidates closest to ``name``, with a space in front; empty if none is close."""
    near = difflib.get_close_matches(str(name), list(candidates), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(candidate) for candidate in near)}?" if near else ""


_NOT_THE_USERS = ("ampatch", "contextlib", "functools", "torch")


def warn(message: str) -> None:
    """Warns, of the line outside of ampatch and torch that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, AmpWarning, stacklevel=level)
