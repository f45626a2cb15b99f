"""Modules that compute in float32 although torch's functions are patched: ``keep_fp32`` at O1 and O4.

Owns the forward that replaces a module's own: it casts half arguments to float32, and runs with casts off. Must never
cast a result: functions outside of the module cast it by their own rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampatch.casting import write_back
from ampatch.casting.nested import cast_floating
from ampatch.errors import OptionError
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import HALVES
from ampatch.patching.replaced_forward import Block, ReplacedForward, check_replaceable, own_forward
from ampatch.switch import Switch, WithoutCasts


def keep_in_float32(modules: Mapping[nn.Module, tuple[str, str]], ledger: PatchLedger, switch: Switch) -> None:
    """Makes modules compute in float32 while the session casts.

    Args:
        modules: modules that have a forward, each with its name and the option that names it, both for messages.
            Modules that are already kept are skipped.
        ledger: records the changes.
        switch: switch of the session.

    Raises:
        OptionError: TorchScript has compiled one of them, its weights are half, or its forward is an asynchronous
            generator.
    """
    for module, (name, asked) in modules.items():
        own = own_forward(module, switch)
        if own is not None:
            check_replaceable(module, name, asked)
            _check_not_half(module, name, asked)
            ledger.set(module, "forward", _ForwardInFloat32(module, own, switch))


def _check_not_half(module: nn.Module, name: str, asked: str) -> None:
    half = next((each for each, parameter in module.named_parameters() if parameter.dtype in HALVES), None)
    if half is not None:
        raise OptionError(
            f"{asked} matches {name!r}, whose {half!r} is half, and this opt level leaves weights as they are. "
            f"Convert it first: model.get_submodule({name!r}).float()."
        )


class _ForwardInFloat32(ReplacedForward):
    """The forward of a module that computes in float32 until its session ends."""

    def block(self) -> Block:
        """Returns a block without casts."""
        return WithoutCasts() if self.switch is None else self.switch.disabled()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward on float32 arguments."""
        given = cast_floating((args, kwargs), torch.float32)
        return write_back.call(self.in_block, (args, kwargs), given, self.module)
