"""Few digits, on which the demo trains fast: a plugin for pytest, loaded by the tests that use them.

Other processes of a test import it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ampatch.demo import digits


@contextmanager
def few() -> Iterator[None]:
    """Leaves the demo every ninth digit inside the block: an epoch has 5 steps."""
    left = digits.load()[torch.arange(0, 1797, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load", lambda: left)
        yield


@pytest.fixture
def few_digits() -> Iterator[None]:
    """Runs a test inside `few`."""
    with few():
        yield
