"""Patches the places where torch would raise, or bypass the patched functions, because autocast is off.

Installs through the ledger while a session is live. Must not know lists or rules.
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


def patch_autocast_checks(ledger: PatchLedger, switch: Switch) -> None:
    """Lets RNN modules accept input of any floating type, and keeps attention on the path that the lists reach."""
    ledger.set(nn.RNNBase, "check_input", _check_input_of_any_float(switch))
    # In eval mode, MultiheadAttention and the transformer layers would otherwise run as one C++ function. It calls no
    # function that could be cast, and fails on mixed types. autocast does the same on CUDA.
    ledger.set(torch.backends.mha, "_is_fastpath_enabled", False)


def _check_input_of_any_float(switch: Switch) -> Any:
    """Returns an `RNNBase.check_input` that ignores the input's type, which the cast lists decide later.

    torch's own raises if that type differs from the weights', before torch calls any function that casts both.
    """
    original = nn.RNNBase.check_input

    @functools.wraps(original)
    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        if switch.active and not switch.is_off():
            input = of_the_weights_type(self, input)
        original(self, input, batch_sizes)

    return check_input


def of_the_weights_type(module: nn.RNNBase, input: Tensor) -> Tensor:
    """Returns a tensor of the input's shape and the weights' type, so that a check of it ignores the input's type.

    Returns the input itself if the types are equal, or if one of them is not castable.
    """
    dtype = module._flat_weights[0].dtype  # type: ignore[union-attr]
    if input.dtype is dtype or not {input.dtype, dtype} <= CASTABLE:
        return input
    return torch.empty(input.shape, dtype=dtype, device="meta")  # uses no memory
