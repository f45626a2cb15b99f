"""The places where torch asks whether autocast is on, and where casting the arguments of functions is not enough.

Each is opened through the ledger while a session is live. Knows nothing of lists or rules.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.backends.mha
from torch import Tensor, nn

from ampatch.casting.nested import CASTABLE
from ampatch.ledger import PatchLedger
from ampatch.switch import Switch


def open_gates(ledger: PatchLedger, switch: Switch) -> None:
    """Lets RNN modules take half input, and keeps attention on the path that the lists reach."""
    ledger.set(nn.RNNBase, "check_input", _check_input_of_any_float(switch))
    # In eval mode MultiheadAttention and the transformer layers would otherwise run as one C++ function, which calls
    # nothing that could be cast and fails on mixed types. On CUDA autocast does the same.
    ledger.set(torch.backends.mha, "_is_fastpath_enabled", False)


def _check_input_of_any_float(switch: Switch) -> Any:
    """Returns a `RNNBase.check_input` that leaves it to the lists what type the input gets.

    torch's own raises where it is not that of the weights, before anything is called that would cast both.
    """
    original = nn.RNNBase.check_input

    @functools.wraps(original)
    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        if switch.active and not switch.is_off():
            input = of_the_weights_type(self, input)
        original(self, input, batch_sizes)

    return check_input


def of_the_weights_type(module: nn.RNNBase, input: Tensor) -> Tensor:
    """Returns a tensor of an input's shape, for a check of it that is not to be about its type."""
    dtype = module._flat_weights[0].dtype  # type: ignore[union-attr]
    if input.dtype is dtype or not {input.dtype, dtype} <= CASTABLE:
        return input
    return torch.empty(input.shape, dtype=dtype, device="meta")  # which holds no memory
