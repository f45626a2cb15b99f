"""Makes deep copies and weight averages of a converted model float32.

A half copy loses small updates: a half average of weights with decay 0.999 would never leave its first value. So a
deep copy of a converted module, or of an optimizer, gets the masters' float32 values, and
`torch.optim.swa_utils.AveragedModel` averages the masters. Must not know how optimizers have masters.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ampatch.ledger import PatchLedger
from ampatch.weights.optimizer_state import parameters_of

#: Returns the float32 values of a tensor that was narrowed; None for any other tensor.
FullOf = Callable[[Tensor], Tensor | None]


def copy_as_float32(ledger: PatchLedger, full_of: FullOf) -> None:
    """Patches deep copies of modules and `AveragedModel` to use float32 values.

    Args:
        ledger: records the patches.
        full_of: function that returns the float32 values of a tensor, or None.
    """
    ledger.set(nn.Module, "__deepcopy__", _copying(_tensors_of, full_of))
    ledger.set(torch.optim.Optimizer, "__deepcopy__", _copying(parameters_of, full_of))
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


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yields parameters and buffers; not by `parameters`, which users override."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _copying(tensors_of: Callable[[Any], Iterable[Tensor]], full_of: FullOf) -> Callable[..., Any]:
    def __deepcopy__(whole: Any, memo: dict[int, Any]) -> Any:  # noqa: N807
        _within.wholes += 1
        try:
            # First, so that copying finds them made: classes of parameters may have a `__deepcopy__` of their own.
            for tensor in tensors_of(whole):
                full = None if id(tensor) in memo else full_of(tensor)
                if full is not None:
                    memo[id(tensor)] = _wide_copy(tensor, full.detach(), memo)
            # As `copy.deepcopy` copies an object whose class has no `__deepcopy__`.
            return copy._reconstruct(whole, memo, *whole.__reduce_ex__(4))  # type: ignore[attr-defined]
        finally:
            _within.wholes -= 1

    return __deepcopy__


def _wide_copy(tensor: Tensor, full: Tensor, memo: dict[int, Any]) -> Tensor:
    """Returns a copy of a half tensor with float32 values; its class copies it, if that is not torch's own."""
    if type(tensor) in (Tensor, nn.Parameter):
        values = full.clone(memory_format=torch.preserve_format)
        return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    wide = full.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
    wide.__dict__.update(vars(tensor))
    return copy.deepcopy(wide, memo)


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
