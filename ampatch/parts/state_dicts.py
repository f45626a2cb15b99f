"""State dicts of models with half weights: they hold float32 values, and loading gives these to the masters.

Owns what a module is loading. Torch calls it through the hooks in `ampatch.runtime`, which a model pickles with.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.errors import UsageError
from ampatch.parts.masters import Masters
from ampatch.parts.part import Shared
from ampatch.parts.weights import Weights
from ampatch.weights.conversion_plan import own_tensors


class StateDicts:
    """The work of the hooks on every module of a converted model when it is saved or loaded."""

    def __init__(self, shared: Shared, weights: Weights, masters: Masters) -> None:
        self._switch, self._conversion, self._masters = shared.switch, weights.conversion, masters
        # Modules inside ``load_state_dict``, with the state dict and the prefix of their names in it.
        self._loading: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, Any], str]] = weakref.WeakKeyDictionary()
        # The key under which a half tensor was saved last, and the float32 values there.
        self._saved: MutableMapping[Tensor, tuple[str, weakref.ref[Tensor]]] = WeakTensorKeyDictionary()

    def after_save(self, module: nn.Module, saved: dict[str, Any], prefix: str) -> None:
        """Saves float32 values, with the masters' bits, for half tensors."""
        with self._switch.suspended():
            for name, tensor in own_tensors(module):
                full = self._in_this_dict(tensor, saved)
                full = self._masters.float32_of(module, name, tensor) if full is None else full
                if full is not None:
                    for key in _keys_of(tensor, prefix + name, prefix, saved):
                        saved[key] = full if saved[key] is tensor else full.detach()  # itself with keep_vars=True
                        self._saved[tensor] = key, weakref.ref(saved[key])

    def _in_this_dict(self, tensor: Tensor, saved: dict[str, Any]) -> Tensor | None:
        """Returns what a state dict already has for a half tensor: a tied weight is one tensor under all its keys."""
        key, reference = self._saved.get(tensor, ("", None))
        full: Tensor | None = None if reference is None else reference()
        return full if saved.get(key) is full else None

    def before_load(self, module: nn.Module, saved: dict[str, Any], prefix: str, assigns: bool) -> None:
        """Notes what a module is about to load; makes missing masters first.

        Raises:
            UsageError: ``assigns``, and the module has converted tensors.
        """
        if assigns and self._conversion.has_any_of(module):  # or it is a copy
            raise UsageError(
                "load_state_dict(assign=True) would replace the half parameters that amp converted. Leave assign out, "
                "or type amp.deinitialize() first."
            )
        if not prefix:
            self._masters.complete()
        self._loading[module] = (saved, prefix)

    def after_load(self, module: nn.Module) -> None:
        """Gives masters the unrounded values, by the names that the user's hooks gave them."""
        saved, prefix = self._loading.pop(module, ({}, ""))
        with self._switch.suspended():
            for name, tensor in own_tensors(module):
                value = saved.get(prefix + name)
                if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta":
                    self._conversion.load(tensor, value)


def _keys_of(tensor: Tensor, expected: str, prefix: str, saved: dict[str, Any]) -> list[str]:
    """Returns the keys of a tensor in a state dict: its own name, or names that the user's hooks have given it."""
    candidates = [expected] if expected in saved else [key for key in saved if key.startswith(prefix)]
    return [key for key in candidates if _is_alias(saved[key], tensor)]


def _is_alias(value: object, tensor: Tensor) -> bool:
    """Returns True if a value is the tensor itself or a view of all of it, so that no user hook has changed it."""
    return (
        isinstance(value, Tensor)
        and (value.dtype, value.shape, value.layout) == (tensor.dtype, tensor.shape, tensor.layout)
        and value.data_ptr() == tensor.data_ptr()
        and value.stride() == tensor.stride()
    )
