"""Chooses the implementation that this process uses: the requested one, or the best available one.

Owns how the choice is made, and that it is made only once. The calling module says which implementations there are. No
other module must read the environment variables of these choices.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from ampatch.errors import OptionError, did_you_mean

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
    """A choice between implementations, made once for this process.

    Args:
        variable: environment variable that is read if the caller names no choice.
        choices: valid choices, "auto" among them.
        choose: function that returns the implementation for a choice; raises `KernelError` if it is not available.
        announcement: format of the log line for a choice made at first use; its ``%s`` is `Chosen.why`.

    Attributes:
        chosen: implementation chosen so far; None before the first use.
    """

    def __init__(
        self, variable: str, choices: Collection[str], choose: Callable[[str], Chosen[_T]], announcement: str
    ) -> None:
        self.chosen: Chosen[_T] | None = None
        self._variable = variable
        self._choices = choices
        self._choose = choose
        self._announcement = announcement

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
        self.chosen = self._choose(checked(self._variable, self._choices, choice))
        return self.chosen

    def current(self) -> Chosen[_T]:
        """Returns the implementation in use; chooses it on first use, and then logs it unless it is compiled."""
        if self.chosen is not None:
            return self.chosen
        chosen = self.select()
        if chosen.compiled is None:
            logger.info(self._announcement, chosen.why)
        return chosen
