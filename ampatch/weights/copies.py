"""Makes deep copies and weight averages of a converted model float32.

A half copy loses small updates: a half average of weights with decay 0.999 would never leave its first value. So a
deep copy of a converted module, or of an optimizer, gets the masters' float32 values, and
`torch.optim.swa_utils.AveragedModel` averages the masters. Must not know how optimizers have masters.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ampatch.ledger import PatchLedger

#: Returns the float32 values of a tensor that was narrowed; None for any other tensor.
FullOf = Callable[[Tensor], Tensor | None]


def copy_as_float32(ledger: PatchLedger, full_of: FullOf) -> None:
    """Patches deep copies of modules and `AveragedModel` to use float32 values.

    Args:
        ledger: records the patches.
        full_of: function that returns the float32 values of a tensor, or None.
    """
    for whole in (nn.Module, torch.optim.Optimizer):
        ledger.set(whole, "__deepcopy__", _copying)
    for kind in (nn.Parameter, Tensor):
        ledger.set(kind, "__deepcopy__", _widening(kind.__deepcopy__, full_of))
    original: Any = AveragedModel.update_parameters

    @functools.wraps(original)
    def update_parameters(averaged: AveragedModel, model: nn.Module) -> Any:
        return original(averaged, Full(model, full_of))

    ledger.set(AveragedModel, "update_parameters", update_parameters)


class _Within(threading.local):
    """Number of modules and optimizers that this thread is copying; a tensor outside of any is copied as it is."""

    wholes = 0


_within = _Within()


def is_copying() -> bool:
    """Returns True while this thread makes a deep copy of a module or an optimizer."""
    return _within.wholes > 0


def _copying(whole: Any, memo: dict[int, Any]) -> Any:
    _within.wholes += 1
    try:
        # As `copy.deepcopy` copies an object whose class has no `__deepcopy__`.
        return copy._reconstruct(whole, memo, *whole.__reduce_ex__(4))  # type: ignore[attr-defined]
    finally:
        _within.wholes -= 1


def _widening(original: Callable[..., Any], full_of: FullOf) -> Callable[..., Any]:
    @functools.wraps(original)
    def __deepcopy__(tensor: Tensor, memo: dict[int, Any]) -> Any:  # noqa: N807
        full = full_of(tensor) if is_copying() and id(tensor) not in memo else None
        if full is None:
            return original(tensor, memo)
        values = full.detach().clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        return memo[id(tensor)]

    return __deepcopy__


class Full:
    """A view of a model whose parameters and buffers are float32, for code that averages weights.

    Args:
        model: module with half weights.
        full_of: function that returns the float32 values of a tensor, or None.
    """

    def __init__(self, model: nn.Module, full_of: FullOf) -> None:
        self._model = model
        self._full_of = full_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self) -> Iterator[Tensor]:
        """Iterates over the parameters; a master in place of a half one."""
        return map(self._full, self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Iterates over the buffers."""
        return map(self._full, self._model.buffers())

    def _full(self, tensor: Tensor) -> Tensor:
        full = self._full_of(tensor)
        return tensor if full is None else full
