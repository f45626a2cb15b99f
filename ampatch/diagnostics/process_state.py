"""The state of the process's random number generators, to be restored later. Owns which generators these are."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


class RandomState:
    """The state of the random number generators of torch, Python and numpy at the time it was made."""

    def __init__(self) -> None:
        self._states: list[tuple[Callable[[Any], object], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        if torch.cuda.is_initialized():
            self._states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._states.append((numpy.random.set_state, numpy.random.get_state()))

    def restore(self) -> None:
        """Restores it."""
        for restore, state in self._states:
            restore(state)
