"""The state of the process, to be restored later: its random number generators, and the settings of torch and amp.

Owns which generators and which settings these are.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ampatch.runtime import runtime
from ampatch.torch_private.devices import current_device

#: What a training may change in torch and amp: how to read each setting, and how to write it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (current_device, torch.set_default_device),
    (
        torch.get_deterministic_debug_mode,
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    *(
        (partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name))
        for name in ("deterministic", "benchmark", "allow_tf32")
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: runtime.disabled, partial(setattr, runtime, "disabled")),
)


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


class ProcessState(RandomState):
    """The random numbers and the settings of torch and amp at the time it was made."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = [(read, write, read()) for read, write in _SETTINGS]

    def restore(self) -> None:
        """Restores all of it; writes what has changed only, as some settings take long."""
        for read, write, value in self._settings:
            if read() != value:
                write(value)
        super().restore()


def seed_all(seed: int) -> None:
    """Seeds these generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
