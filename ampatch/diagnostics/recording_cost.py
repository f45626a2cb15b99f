"""Measures what recording a report costs for each operator, on steps of a tiny model.

Owns that model. Must never draw a random number, nor be seen by modes and observers of other code.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from ampatch.diagnostics import mode_stacks
from ampatch.runtime import runtime
from ampatch.switch import WithoutCasts

_ROUNDS, _STEPS = 5, 3


def seconds_per_operator(recording: Callable[[], AbstractContextManager[Callable[[], int]]]) -> float:
    """Returns how much longer an operator takes while it is recorded, in seconds.

    Takes a few milliseconds. No mode of other code is on meanwhile, and no cast list applies.

    Args:
        recording: returns a block that records this thread, and gives a function that counts the recorded operators.
    """
    # Without a session there are no casts, and turning them off would import torch's compiler.
    off = contextlib.nullcontext() if runtime.live is None else WithoutCasts()
    with mode_stacks.without_modes(), off, torch.inference_mode(False), torch.enable_grad():
        weights = [torch.ones(4, 4, device="cpu", requires_grad=True) for _ in range(4)]
        x = torch.ones(2, 4, device="cpu")
        plain = min(_seconds(weights, x) for _ in range(_ROUNDS))
        with recording() as operators:
            recorded = min(_seconds(weights, x) for _ in range(_ROUNDS))
        return max(0.0, recorded - plain) / (operators() / _ROUNDS or 1)


def _seconds(weights: list[Tensor], x: Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(_STEPS):
        hidden = x
        for weight in weights:
            hidden = F.gelu(F.linear(hidden, weight)) + hidden
        hidden.sum().backward()
    return time.perf_counter() - begin
