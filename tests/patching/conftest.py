"""Fixtures of tests that run with calls of patched functions in Python and in C++."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name


@pytest.fixture(params=["python", "compiled"])
def calls_in_both(request: pytest.FixtureRequest, select_calls: Callable[[str], None]) -> None:
    """Runs a test with calls in Python, and with calls in C++."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    select_calls(request.param)


@pytest.fixture(params=HALF_DTYPES, ids=dtype_name)
def half(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
