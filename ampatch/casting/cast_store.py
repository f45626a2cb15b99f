"""Stores the casts of weights, and holds the state of the cache. csrc/calls/ does the same in C++.

Owns the check whether a stored cast is still valid. Must not decide which store serves which code: the cache in
`ampatch.patching.weight_cache` decides that. Both implementations must do the same: the tests run with both.
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
    storage: weakref.ref[torch.UntypedStorage]
    state: tuple[object, ...]
    cast: Tensor
    cast_version: int
    stream: int | None  # the CUDA stream that it is valid on; None: any

    def counts(self, parameter: Tensor) -> bool:
        """Returns True if the entry is still valid for this parameter."""
        return (
            self.parameter() is parameter
            and self.storage() is not None
            and self.state == _state_of(parameter)
            and self.cast_version == self.cast._version
            and (self.stream is None or self.stream == _current_stream(parameter))
        )


def _state_of(parameter: Tensor) -> tuple[object, ...]:
    """Returns what must stay the same for a cast to be valid: address, version counter, layout and requires_grad."""
    layout = parameter.dtype, parameter.shape, parameter.stride()
    return parameter.data_ptr(), parameter._version, parameter.requires_grad, *layout


def _current_stream(parameter: Tensor) -> int | None:
    """Returns the current CUDA stream of this thread, on the device of a parameter; None on devices without streams."""
    return torch.cuda.current_stream(parameter.device).cuda_stream if parameter.is_cuda else None


class Store:
    """Casts of parameters, by parameter and dtype.

    An entry is valid only while the parameter's version counter, address, layout and ``requires_grad`` are unchanged.
    The storage at that address must still live, as a new storage could take its place. The cast itself must not have
    been written to. On a GPU it is valid only on the stream that made it: another stream might read it before it is
    written, or after its memory is reused. A parameter is found by its id. If it dies and another one gets that id, a
    weak reference tells the two apart.
    """

    def __init__(self) -> None:
        self._entries: dict[torch.dtype, dict[int, _Entry]] = {}

    def find(self, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns the cast of a parameter to a dtype; None if there is no valid one."""
        entries = self._entries.get(dtype)
        entry = None if entries is None else entries.get(id(parameter))
        return entry.cast if entry is not None and entry.counts(parameter) else None

    def keep(self, parameter: Tensor, cast: Tensor, on_any_stream: bool = False) -> None:
        """Stores a new cast, and drops an older one of the parameter to that dtype.

        Args:
            parameter: strided tensor; not an inference tensor.
            cast: cast of it; neither an inference tensor nor one that a transform of `torch.func` has wrapped.
            on_any_stream: True if the caller has waited for the cast, and keeps its memory until all streams are done.
        """
        stream = None if on_any_stream else _current_stream(parameter)
        storage = weakref.ref(parameter.untyped_storage())
        entry = _Entry(weakref.ref(parameter), storage, _state_of(parameter), cast, cast._version, stream)
        self._entries.setdefault(cast.dtype, {})[id(parameter)] = entry

    def forget(self, ids: Iterable[int]) -> None:
        """Drops all casts of the parameters with these ids."""
        for key in ids:
            for entries in list(self._entries.values()):
                entries.pop(key, None)

    def clear(self) -> None:
        """Drops all casts."""
        self._entries.clear()

    def entries(self) -> list[tuple[int, weakref.ref[Tensor], Tensor]]:
        """Returns, for each cast, the parameter's id, a weak reference to the parameter, and the cast."""
        by_id = [item for entries in list(self._entries.values()) for item in list(entries.items())]
        return [(key, entry.parameter, entry.cast) for key, entry in by_id]

    def __len__(self) -> int:
        return sum(len(entries) for entries in list(self._entries.values()))


class _Thread(threading.local):
    forward: Store | None = None


class CacheState:
    """State that each cast reads and updates.

    Attributes:
        casts: number of tensors cast so far.
        hits: number of casts saved so far.
        iteration: store for code that records gradients; None if the cache must choose one for each weight.
        frozen: ids of parameters and the store for their casts, for code that records no gradients; oldest first. None
            if the cache must choose a store for each weight.
        sweep_at: number of entries from which a store is swept before the next one is added.
    """

    def __init__(self) -> None:
        self.casts = 0
        self.hits = 0
        self.iteration: Store | None = None
        self.frozen: tuple[tuple[frozenset[int], Store], ...] | None = ()
        self.sweep_at = 0
        self._thread = _Thread()

    @property
    def forward(self) -> Store | None:
        """Store of this thread for code that records no gradients; None outside forward passes.

        The caller that sets it must keep it alive until that caller sets another one, or the thread has ended.
        """
        return self._thread.forward

    @forward.setter
    def forward(self, store: Store | None) -> None:
        self._thread.forward = store
