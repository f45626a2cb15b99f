"""Chooses the implementation that this process uses: the requested one, or the compiled one if it is available.

Makes each choice only once. The calling module names the two implementations. No other module may read the environment
variables of these choices.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ampatch.errors import KernelError, OptionError, did_you_mean

logger = logging.getLogger("ampatch")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chosen(Generic[_T]):
    """The implementation that was chosen.

    Attributes:
        compiled: compiled implementation; None for the one that needs no compiled code.
        why: readable name of the implementation, and why it was chosen.
    """

    compiled: _T | None
    why: str


class NotBuiltError(KernelError):
    """Raised if there is no compiled implementation; the message says what is missing, and where."""


def checked(variable: str, choices: Collection[str], choice: str | None = None) -> str:
    """Returns a valid choice.

    Args:
        variable: environment variable that is read if the caller names no choice.
        choices: valid choices, "auto" among them.
        choice: what the caller asks for; None for the value of the variable, "auto" by default.

    Raises:
        OptionError: the choice is not a valid one.
    """
    asked = os.environ.get(variable, "auto") if choice is None else choice
    if asked not in choices:
        raise OptionError(f"{variable} is {asked!r}; expected {', '.join(choices)}.{did_you_mean(asked, choices)}")
    return asked


class Selection(Generic[_T]):
    """A choice between a compiled implementation and a plain one, made once for this process.

    Args:
        variable: environment variable that is read if the caller names no choice.
        choices: "auto", and the values for the compiled implementation and for the plain one.
        plain: readable name of the plain implementation.
        load: function that returns the compiled implementation; raises `KernelError` if it is not available.
        announcement: format of the log line for a choice made at first use; its ``%s`` is `Chosen.why`.

    Attributes:
        chosen: implementation chosen so far; None before the first use.
    """

    def __init__(
        self, variable: str, choices: Sequence[str], plain: str, load: Callable[[], Chosen[_T]], announcement: str
    ) -> None:
        self.chosen: Chosen[_T] | None = None
        self._variable, self._choices = variable, choices
        self._plain, self._load, self._announcement = plain, load, announcement

    def select(self, choice: str | None = None) -> Chosen[_T]:
        """Chooses the implementation to use from now on.

        Args:
            choice: one of the choices; None for the value of the environment variable, "auto" by default.

        Returns:
            Implementation that was chosen.

        Raises:
            OptionError: the choice is not a valid one.
            KernelError: the implementation is not available.
        """
        self.chosen = self._for(checked(self._variable, self._choices, choice))
        return self.chosen

    def _for(self, asked: str) -> Chosen[_T]:
        if asked == self._choices[-1]:
            return Chosen(None, f"{self._plain}, as {self._variable}={asked} asks for")
        try:
            return self._load()
        except NotBuiltError as error:
            if asked == "auto":
                return Chosen(None, f"{self._plain}, as {error}. `ampatch build` compiles it")
            raise KernelError(
                f"{self._variable}={asked} asks for compiled code, and {error}. Type `ampatch build`; or leave the "
                f"variable out, to go on with {self._plain}."
            ) from None
        except KernelError as error:
            if asked != "auto":
                raise
            return Chosen(None, f"{self._plain}, as {error}")

    def current(self) -> Chosen[_T]:
        """Returns the implementation in use; chooses it on first use, and then logs it unless it is compiled."""
        if self.chosen is not None:
            return self.chosen
        chosen = self.select()
        if chosen.compiled is None:
            logger.info(self._announcement, chosen.why)
        return chosen
