"""Few digits, on which the demo trains fast: a plugin for pytest, loaded by the tests that use them.

Other processes of a test import it, too.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ampatch import demo
from ampatch.demo import digits


@contextmanager
def few() -> Iterator[None]:
    """Leaves the demo every ninth digit inside the block, on the CPU by default: an epoch has 5 steps."""
    left = digits.load()[torch.arange(0, 1797, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load", lambda: left)
        patch.setattr(demo, "_default_device", lambda: "cpu")
        yield


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, steps: int, times: int) -> None:
    """Presses Ctrl-C once or several times, that many steps from now."""
    after_step, left = demo._after_step, [steps]

    def press(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        after_step(*arguments)

    monkeypatch.setattr(demo, "_after_step", press)


@pytest.fixture
def few_digits() -> Iterator[None]:
    """Runs a test inside `few`."""
    with few():
        yield
