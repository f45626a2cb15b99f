"""Optimizers that amp has adopted, inside the wrappers of Hugging Face Accelerate.

Owns what Accelerate's classes are told about such optimizers: skipped steps, and the parameters whose gradients are to
be clipped. Must not know a training loop: adapters of Accelerate and of what is built on it share this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ampatch import amp
from ampatch.errors import IntegrationError
from ampatch.integrations.shared_patches import SharedPatches
from ampatch.ledger import PatchLedger
from ampatch.runtime import runtime

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise IntegrationError(
        f"this adapter of ampatch needs accelerate, but {error.name} is missing. Type pip install 'accelerate>=1.15'."
    ) from error


def bare(optimizer: Any) -> Any:
    """Returns the optimizer inside of Accelerate's wrappers; any other optimizer unchanged."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def updated(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns what the adopted optimizers update in place of the given parameters: masters in place of half ones."""
    session = runtime.live
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if session is None:
        return given
    masters: dict[int, Tensor] = {}
    for optimizer in session.optimizers:
        full = list(amp.master_params(optimizer))
        masters |= zip(map(id, session.adopted(optimizer).gradients.model_parameters()), full, strict=True)
    return [masters.get(id(each), each) for each in given]


def _install(ledger: PatchLedger) -> None:
    ledger.set(AcceleratedOptimizer, "step_was_skipped", property(_step_was_skipped))
    ledger.set(Accelerator, "clip_grad_norm_", _of_updated(Accelerator.clip_grad_norm_))
    ledger.set(Accelerator, "clip_grad_value_", _of_updated(Accelerator.clip_grad_value_))


#: Within `adopted_optimizers.installed()`, ``optimizer_step_was_skipped`` is right for adopted optimizers, and
#: ``accelerator.clip_grad_norm_`` and ``clip_grad_value_`` clip the gradients that they step with.
adopted_optimizers = SharedPatches(_install)


def _step_was_skipped(optimizer: AcceleratedOptimizer) -> bool:
    session = runtime.live
    if session is not None and session.has_adopted(optimizer):
        return amp.step_was_skipped(optimizer)
    return bool(optimizer._is_overflow)


def _of_updated(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(accelerator: Accelerator, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return original(accelerator, updated(parameters), *args, **kwargs)

    return clip
