"""Which of several implementations this process uses: the one asked for, or the best that is there.

Owns how a choice is made, and that it is made once. What there is to choose from is said by those who have it, and no
other module may look at the environment for it.
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
    """An implementation.

    Attributes:
        compiled: the compiled one; None: what does without.
        why: which it is and why, for people.
    """

    compiled: _T | None
    why: str


class Selection(Generic[_T]):
    """A choice for this process.

    Args:
        variable: the environment variable that is asked where the caller does not say.
        choices: what may be asked for, "auto" among them.
        choose: gives the implementation that was asked for; raises `KernelError` where it is not there.
        announcement: what is logged of a choice that nobody made, with a place for which it is.

    Attributes:
        chosen: None, as long as nobody needed it.
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
        """Chooses from now on.

        Args:
            choice: one of the choices; None: what the environment says, or "auto".

        Returns:
            What was chosen.

        Raises:
            OptionError: it is none of them.
            KernelError: it is not there.
        """
        asked = os.environ.get(self._variable, "auto") if choice is None else choice
        if asked not in self._choices:
            raise OptionError(
                f"{self._variable} is {asked!r}; expected {', '.join(self._choices)}."
                f"{did_you_mean(asked, self._choices)}"
            )
        self.chosen = self._choose(asked)
        return self.chosen

    def current(self) -> Chosen[_T]:
        """Returns what was chosen; chooses now, if nobody has."""
        if self.chosen is not None:
            return self.chosen
        chosen = self.select()
        if chosen.compiled is None:
            logger.info(self._announcement, chosen.why)
        return chosen
