"""Few digits, on which the demo trains fast: a plugin for pytest, loaded by the tests that use them.

Tests and their processes import it, too: PYTEST_DONT_REWRITE keeps pytest from warning of that.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ampatch import demo
from ampatch.demo import digits
from ampatch.demo.progress import Progress

STEPS_OF_A_RUN = 10  # of two epochs
CHECKPOINT = "ampatch-demo.pt"


@contextmanager
def few() -> Iterator[None]:
    """Leaves the demo every ninth digit inside the block, on the CPU by default: an epoch has 5 steps."""
    left = digits.load()[torch.arange(0, 1797, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load", lambda: left)
        patch.setattr(demo, "_default_device", lambda: "cpu")
        yield


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, steps: int, times: int = 1) -> None:
    """Presses Ctrl-C once or several times, that many steps from now."""
    step, left = Progress.step, [steps]

    def press(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        step(*arguments)

    monkeypatch.setattr(Progress, "step", press)


def results(path: str | Path = "results.json") -> list[dict[str, Any]]:
    """Returns the results of a JSON report without their times, which no two runs have in common."""
    entries = json.loads(Path(path).read_text())
    return [{key: value for key, value in entry.items() if key != "ms_per_step"} for entry in entries]


@pytest.fixture
def ctrl_c_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test in a folder of its own, where Ctrl-C raises as it does at a terminal, whoever started pytest."""
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def few_digits() -> Iterator[None]:
    """Runs a test inside `few`."""
    with few():
        yield
