"""Makes amp obey regions of torch.autocast: the session's around the forward of a model, and the user's everywhere.

Also patches the places where torch would raise, or bypass the patched functions, because autocast is off. Installs
through the ledger while a session is live. Must not know lists or rules.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.backends.mha
from torch import Tensor, nn

from ampatch.casting.nested import CASTABLE
from ampatch.compilers import traced_within_others
from ampatch.ledger import PatchLedger
from ampatch.switch import KINDS, Switch, enter_block, forget_regions, leave_block, state, turn_on, was_made_in_region
from ampatch.torch_private.autograd import sequence_number
from ampatch.torch_private.modules import FASTPATH, FLAT_WEIGHTS

# Modules of torch that carry the state of autocast to the user's code. The switch carries whether that state is a
# region.
_CARRIERS = ("torch.utils.checkpoint", "torch.nn.parallel.parallel_apply")


def _carries_state(frame: types.FrameType, is_on: bool) -> bool:
    """Returns True if torch itself enters a block to continue in the state of other code, which may not be a region."""
    home = frame.f_globals.get("__name__")
    if home == torch.autocast.__module__ and frame.f_code.co_name == "decorate_bwd" and not is_on:  # custom_bwd
        return not was_made_in_region(sequence_number(frame.f_locals["args"][0]))
    return home in _CARRIERS


def follow_autocast_regions(ledger: PatchLedger, dtype: torch.dtype, kinds: Set[str], for_models: bool) -> None:
    """Patches `torch.autocast`, so that its regions are regions for amp too, even those that turn autocast off.

    Args:
        ledger: records the patches.
        dtype: half type to cast to outside of regions.
        kinds: device types whose tensors are cast outside of regions; the set may grow.
        for_models: True to cast outside of regions only in calls that belong to a model.
    """
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    @traced_within_others
    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        before = state()
        result = enter(self)
        enter_block(self, before)
        is_heard = self.device in (kinds if for_models else KINDS)
        if is_heard and not _carries_state(sys._getframe(1), self._enabled):
            # A block says nothing about other device types.
            turn_on(dtype, () if before[0] or for_models else kinds - {self.device})
        return result

    @traced_within_others
    @functools.wraps(leave)
    def leaving(self: Any, *error: Any) -> Any:
        return leave_block(self, lambda: leave(self, *error))

    ledger.on_undo(forget_regions)
    ledger.set(torch.autocast, "__enter__", entering)
    ledger.set(torch.autocast, "__exit__", leaving)


def patch_autocast_checks(ledger: PatchLedger, switch: Switch) -> None:
    """Lets RNN modules accept input of any floating type, and keeps attention on the path that the lists reach."""
    accept_any_float(ledger, lambda: switch.active and not switch.is_off())
    # In eval mode, MultiheadAttention and the transformer layers would otherwise run as one C++ function. It calls no
    # function that could be cast, and fails on mixed types. autocast does the same on CUDA.
    ledger.set(torch.backends.mha, FASTPATH, False)


def accept_any_float(ledger: PatchLedger, casts: Callable[[], bool]) -> None:
    """Makes `RNNBase.check_input` ignore the input's type where casts decide about it later.

    torch's own check raises if that type differs from the weights', before torch calls a function that casts both.

    Args:
        ledger: records the patch.
        casts: returns True where casts follow.
    """
    original = nn.RNNBase.check_input

    @functools.wraps(original)
    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        if casts():
            input = of_the_weights_type(self, input)
        original(self, input, batch_sizes)

    ledger.set(nn.RNNBase, "check_input", check_input)


def of_the_weights_type(module: nn.RNNBase, input: Tensor) -> Tensor:
    """Returns a tensor of the input's shape and the weights' type, so that a check of it ignores the input's type.

    Returns the input itself if the types are equal, or if one of them is not castable.
    """
    dtype = getattr(module, FLAT_WEIGHTS)[0].dtype
    if input.dtype is dtype or not {input.dtype, dtype} <= CASTABLE:
        return input
    return torch.empty(input.shape, dtype=dtype, device="meta")  # uses no memory
