"""The modules of a report: the types that went in and came out, and the memory of their results and weights.

Owns what was seen of each module. Must never change a module.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Container, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.diagnostics.recorder.operands import bytes_of
from ampatch.half_types import HALVES
from ampatch.opt_levels import dtype_name

_ByType = Counter[torch.dtype]


@dataclass(slots=True, eq=False)
class _Root:
    """A module that ran inside of no other.

    Attributes:
        reference: the module.
        class_name: its class.
        names: names of the modules in it, by id.
    """

    reference: weakref.ref[nn.Module]
    class_name: str
    names: dict[int, str]


@dataclass(slots=True, eq=False)
class _Module:
    """What was seen of one module; see the report's dict for its fields."""

    class_name: str
    root: _Root
    name: str
    sessions: int = -1  # as `Modules` had it when the weights were counted
    weight_bytes: _ByType = field(default_factory=Counter)
    given: _ByType = field(default_factory=Counter)
    returned: _ByType = field(default_factory=Counter)
    operators: _ByType = field(default_factory=Counter)
    activation_bytes: _ByType = field(default_factory=Counter)
    half_bytes: int = 0
    cast_bytes: int = 0

    def saved_bytes(self, master_bytes: int) -> int:
        """Returns the bytes that half types saved against float32, less those of the casts."""
        # Of weights, two bytes for each element.
        by_weights = _in_half(self.weight_bytes) * (2 - master_bytes) // 2
        return self.half_bytes - self.cast_bytes + by_weights


@dataclass(slots=True, eq=False)
class Forward:
    """One forward pass of a module.

    Attributes:
        module: what is known of the module.
        bytes: bytes of its results.
        cast_bytes: bytes that amp's casts have written in it.
    """

    module: _Module
    bytes: _ByType = field(default_factory=Counter)
    cast_bytes: int = 0

    def note_results(self, results: list[Tensor], is_new_memory: bool) -> None:
        """Counts an operator's results."""
        for each in results:
            self.module.operators[each.dtype] += 1
            if is_new_memory:
                self.bytes[each.dtype] += each.nbytes


class Modules:
    """The modules that ran while a report was open.

    Attributes:
        last: the forward pass that began or ended last.
        count: number of forward passes so far.
        sessions: number of sessions so far, each of which may have made weights half.
    """

    def __init__(self) -> None:
        self.last: Forward | None = None
        self.count = self.sessions = 0
        # A dead module's reference differs from that of a new one at its address.
        self._modules: dict[weakref.ref[nn.Module], _Module] = {}
        # The first of several modules that share a weight: sums count it once.
        self._owners: MutableMapping[Tensor, _Module] = WeakTensorKeyDictionary()

    def enter(self, module: nn.Module, outermost: Forward | None, given: list[Tensor]) -> Forward:
        """Notes that a module's forward pass begins.

        Args:
            module: the module.
            outermost: the forward pass of the outermost module that runs; None if that is this one.
            given: tensors among its arguments.
        """
        key, class_name = weakref.ref(module), type(module).__name__
        root = None if outermost is None else outermost.module.root
        known = self._modules.get(key)
        if known is None:
            root = root or _Root(key, class_name, _names_in(module))
            known = self._modules[key] = _Module(class_name, root, _name_in(root, module))
        elif root is not None and len(root.names) > len(known.root.names):  # it ran outside of its model before
            known.root, known.name = root, _name_in(root, module)
        known.given.update([each.dtype for each in given])
        self.count += 1
        self.last = Forward(known)
        return self.last

    def leave(self, module: nn.Module, ended: Forward, given: list[Tensor], returned: list[Tensor]) -> None:
        """Notes that a module's forward pass has ended, whether it returned or raised.

        Args:
            module: the module.
            ended: what `enter` returned.
            given: tensors among its keyword arguments, which `enter` cannot see.
            returned: tensors in its result.
        """
        known = ended.module
        if ended.bytes.total() > known.activation_bytes.total():
            known.activation_bytes = ended.bytes
        half_bytes = _in_half(ended.bytes)
        if half_bytes - ended.cast_bytes > known.half_bytes - known.cast_bytes or not known.half_bytes:
            known.half_bytes, known.cast_bytes = half_bytes, ended.cast_bytes
        if known.sessions != self.sessions:
            known.sessions, known.weight_bytes = self.sessions, self._own_bytes(module, known)
        known.given.update([each.dtype for each in given])
        known.returned.update([each.dtype for each in returned])
        self.last = ended

    def _own_bytes(self, module: nn.Module, known: _Module) -> _ByType:
        sizes = _ByType()
        for parameter in module._parameters.values():
            if parameter is None or is_lazy(parameter):
                continue
            if self._owners.setdefault(parameter, known) is known:
                sizes[parameter.dtype] += bytes_of(parameter)
        return sizes

    def names(self) -> dict[_Module, str]:
        """Returns the names of the modules that were seen."""
        prefixes = self._prefixes()
        return {
            known: ".".join(part for part in (prefixes[known.root], known.name) if part)
            for known in self._modules.values()
        }

    def as_dicts(self, master_bytes: int) -> list[dict[str, Any]]:
        """Returns the modules as plain data, first those with the most bytes.

        Args:
            master_bytes: bytes of what each half weight has beside itself.
        """
        seen = {name: known for known, name in self.names().items()}
        outermost = self._prefixes().values()
        rows = [
            {
                "name": name,
                "class": known.class_name,
                "parent": _parent(name, seen, outermost),
                "in": _plain(known.given),
                "out": _plain(known.returned),
                "operators": _plain(known.operators),
                "activation_bytes": _plain(known.activation_bytes),
                "weight_bytes": _plain(known.weight_bytes),
                "saved_bytes": known.saved_bytes(master_bytes),
            }
            for name, known in seen.items()
        ]
        return sorted(rows, key=lambda row: -sum(row["activation_bytes"].values()) - sum(row["weight_bytes"].values()))

    def _prefixes(self) -> dict[_Root, str]:
        """Returns what names of modules begin with, by the outermost module: the greatest model has no prefix."""
        roots = list(dict.fromkeys(known.root for known in self._modules.values()))
        greatest = max(roots, key=lambda root: len(root.names), default=None)
        prefixes: dict[_Root, str] = {}
        for root in roots:
            prefix, number = root.class_name, 1
            while prefix in prefixes.values():
                number += 1
                prefix = f"{root.class_name}{number}"
            prefixes[root] = "" if root is greatest else prefix
        return prefixes


def _names_in(root: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in root.named_modules()}


def _name_in(root: _Root, module: nn.Module) -> str:
    """Returns a module's name in the outermost one; its class if that does not hold it."""
    if id(module) not in root.names:  # added since
        outermost = root.reference()
        root.names = {} if outermost is None else _names_in(outermost)
    return root.names.get(id(module), type(module).__name__)


def _parent(name: str, seen: Container[str], outermost: Collection[str]) -> str | None:
    """Returns the nearest name above that was seen; None for an outermost module."""
    while name not in outermost:
        name = name.rpartition(".")[0]
        if name in seen:
            return name
    return None


def _in_half(sizes: _ByType) -> int:
    return sum(sizes[dtype] for dtype in HALVES)


def _plain(counts: _ByType) -> dict[str, int]:
    return {dtype_name(dtype): count for dtype, count in counts.most_common()}
