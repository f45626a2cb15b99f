"""Patches PEFT's methods that read what amp has changed (half prompts to save, gradients after a step), and merges.

Owns these patches, on the classes that define the methods. Must not import PEFT: a model has the methods or not.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ampatch.errors import UsageError
from ampatch.ledger import PatchLedger
from ampatch.switch import Switch

_ENCODER = "prompt_encoder"


def adapt(model: nn.Module, ledger: PatchLedger, switch: Switch) -> None:
    """Patches the methods of a model and of its submodules, if PEFT has made it.

    Args:
        model: an adopted model.
        ledger: records the patches.
        switch: switch of the session; it turns casts off while prompts are computed. Once it is inactive, the methods
            act like the original ones.
    """
    for kind in {type(module) for module in model.modules()}:
        for owner in [each for each in kind.__mro__ if each.__module__.startswith("peft.")]:
            for name, make in _METHODS.items():
                method = vars(owner).get(name)
                if method is not None and not hasattr(method, "_is_of_ampatch"):
                    replacement: Any = functools.wraps(method)(make(method, switch))
                    replacement._is_of_ampatch = True
                    ledger.set(owner, name, replacement)


def _in_float32(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """Returns a method that computes prompts for saving with float32 weights.

    For prompt learning, PEFT does not save weights, but the prompts that its prompt encoder computes from them.
    """

    def get_prompt_embedding_to_save(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        encoder = model._modules.get(_ENCODER)
        if encoder is None or not switch.active:
            return original(model, *args, **kwargs)
        with switch.suspended():
            # A deep copy of a converted module has the masters' values (`ampatch.weights.copies`).
            model._modules[_ENCODER] = copy.deepcopy(encoder)
            try:
                return original(model, *args, **kwargs)
            finally:
                model._modules[_ENCODER] = encoder

    return get_prompt_embedding_to_save


def _with_gradients(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """Returns AdaLoRA's method that reads gradients after a step; it raises if amp has cleared them."""

    def update_and_allocate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(model, *args, **kwargs)
        except TypeError as error:
            if switch.active and all(each.grad is None for each in model.parameters()):
                raise UsageError(
                    "AdaLoRA's update_and_allocate reads gradients, and there are none. With float32 masters "
                    "(opt_level='O2' or 'O5') optimizer.step() sets them to None. Type opt_level='O1', or 'O4' for "
                    "bfloat16, and call update_and_allocate before optimizer.zero_grad()."
                ) from error
            raise

    return update_and_allocate


def _exactly(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """Returns a method that adds adapters to weights: PEFT multiplies them while gradients are recorded."""

    def merge(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with switch.suspended():
            return original(module, *args, **kwargs)

    return merge


_METHODS: dict[str, Callable[[Callable[..., Any], Switch], Any]] = {
    "get_prompt_embedding_to_save": _in_float32,
    "update_and_allocate": _with_gradients,
    "merge": _exactly,
    "unmerge": _exactly,
}
