"""Casts of weights in a store, and the state of what was cast: the plain Python of what csrc/calls/ has in C++.

Owns when a kept cast still counts. Which store serves whom is the cache's affair. Either implementation must do what
the other does: the tests run with both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Entry:
    parameter: weakref.ref[Tensor]
    address: int
    storage: weakref.ref[torch.UntypedStorage]
    layout: tuple[torch.dtype, torch.Size, tuple[int, ...]]
    version: int
    requires_grad: bool
    cast: Tensor
    cast_version: int

    @classmethod
    def of(cls, parameter: Tensor, cast: Tensor) -> _Entry:
        """Returns an entry for a cast just made."""
        return cls(
            weakref.ref(parameter),
            parameter.data_ptr(),
            weakref.ref(parameter.untyped_storage()),
            (parameter.dtype, parameter.shape, parameter.stride()),
            parameter._version,
            parameter.requires_grad,
            cast,
            cast._version,
        )

    def counts(self, parameter: Tensor) -> bool:
        """Returns whether it still is the cast of this parameter."""
        return (
            self.parameter() is parameter
            and self.address == parameter.data_ptr()
            and self.storage() is not None
            and self.layout == (parameter.dtype, parameter.shape, parameter.stride())
            and self.version == parameter._version
            and self.requires_grad == parameter.requires_grad
            and self.cast_version == self.cast._version
        )


class Store:
    """Casts of parameters, by parameter and type.

    An entry counts only while the parameter's version counter, its address and layout and its ``requires_grad`` are
    what they were, and the storage at that address still lives, since another one may take its place; and while the
    cast itself was not written to. A parameter is told by its id: should it die and another take that, they are told
    apart by a weak reference.
    """

    def __init__(self) -> None:
        self._entries: dict[torch.dtype, dict[int, _Entry]] = {}

    def find(self, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the cast of a parameter to a type, if there is one that counts."""
        entries = self._entries.get(dtype)
        entry = None if entries is None else entries.get(id(parameter))
        return entry.cast if entry is not None and entry.counts(parameter) else None

    def keep(self, parameter: Tensor, cast: Tensor) -> None:
        """Keeps a cast just made, in the place of an older one to that type.

        Args:
            parameter: strided, and no inference tensor.
            cast: neither an inference tensor nor one that a transform of `torch.func` has wrapped.
        """
        self._entries.setdefault(cast.dtype, {})[id(parameter)] = _Entry.of(parameter, cast)

    def forget(self, ids: Iterable[int]) -> None:
        """Drops what there is of these parameters."""
        for key in ids:
            for entries in list(self._entries.values()):
                entries.pop(key, None)

    def clear(self) -> None:
        """Drops everything."""
        self._entries.clear()

    def entries(self) -> list[tuple[int, weakref.ref[Tensor], Tensor]]:
        """Returns the id of each parameter, a weak reference to it, and a cast."""
        by_id = [item for entries in list(self._entries.values()) for item in list(entries.items())]
        return [(key, entry.parameter, entry.cast) for key, entry in by_id]

    def __len__(self) -> int:
        return sum(len(entries) for entries in list(self._entries.values()))


class _Thread(threading.local):
    forward: Store | None = None


class CacheState:
    """What is asked and noted on every cast.

    Attributes:
        casts: tensors cast so far.
        hits: casts saved so far.
        iteration: the store for code that records gradients; None where the cache has to be asked.
        has_frozen: whether some weights are kept in a store of their own for code that does not.
        sweep_at: from this many entries on a store is swept before the next one.
    """

    def __init__(self) -> None:
        self.casts = 0
        self.hits = 0
        self.iteration: Store | None = None
        self.has_frozen = False
        self.sweep_at = 0
        self._thread = _Thread()

    @property
    def forward(self) -> Store | None:
        """The store of this thread for code that records no gradients; None outside of forwards.

        Whoever sets it keeps it alive until it sets another one, or the thread has ended.
        """
        return self._thread.forward

    @forward.setter
    def forward(self, store: Store | None) -> None:
        self._thread.forward = store
