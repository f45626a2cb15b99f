"""Cast weights, so that a parameter is cast once however often it is used.

The cache may never be wrong. Constraints, and how they are kept:

- A cast made without grad carries no graph, and one made with grad must not outlive its iteration. So there are two
  stores: the *iteration* store serves code that records gradients, and is dropped at the end of a ``scale_loss`` block
  and at every optimizer step; the *forward* store serves code that does not (``no_grad``, inference mode), belongs to a
  thread, and lives only inside the outermost forward of an adopted model. Neither ever serves the other.
- A weight may change under a cast. An entry counts only while the parameter's version counter, its address and layout
  and its ``requires_grad`` are what they were, and the storage at that address still lives, since another one may take
  its place. Nor does it count once the cast itself was written to, through a view that a function returned. A change
  through ``.data`` that stays in the storage (``p.data.add_()``), between two forwards with grad and no step between,
  is what no check can see; `clear` is for that.
- Nothing may be kept alive. A cast's graph holds its parameter, so a weak reference alone would never die: entries
  whose parameter no Python code holds any more are swept out as the store grows.
- Tracers (torch.compile, torch.export, torch.jit.trace, make_fx, CUDA graph capture) must record the cast where it is
  used: while one is at work the cache is not consulted.

Only `torch.nn.Parameter` itself is cached: subclasses (sharded, gathered, lazy parameters) change in ways of their own.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class CastCounts:
    """How much casting was done since amp was set up.

    Attributes:
        casts: tensors that were cast, weights included.
        cache_hits: uses of a weight that found it cast already.
    """

    casts: int
    cache_hits: int


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
        """An entry for a cast just made."""
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
        """Whether it still is the cast of this parameter."""
        return (
            self.parameter() is parameter
            and self.address == parameter.data_ptr()
            and self.storage() is not None
            and self.layout == (parameter.dtype, parameter.shape, parameter.stride())
            and self.version == parameter._version
            and self.requires_grad == parameter.requires_grad
            and self.cast_version == self.cast._version
        )


# One store: the type cast to, then the parameter's id.
_Store = dict[torch.dtype, dict[int, _Entry]]


def _nothing() -> None:
    return None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.store: _Store | None = None  # the forward store
        self.opened_by: Callable[[], object] = _nothing  # the model whose forward it belongs to


class WeightCache:
    """Casts tensors and remembers the casts of parameters; counts both.

    Attributes:
        casts: tensors cast so far.
        hits: casts saved so far.
    """

    # Below this many entries a store is not worth sweeping.
    _SWEEP_FROM = 256

    def __init__(self, enabled: bool = True) -> None:
        self.casts = 0
        self.hits = 0
        self._enabled = enabled
        self._iteration: _Store = {}
        self._thread = _Thread()
        self._sweep_at = self._SWEEP_FROM
        self._capturing = torch.cuda.is_current_stream_capturing if torch.cuda.is_available() else _never

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor`` in ``dtype``; from the cache if it is a parameter that was cast before and has not changed since.

        Args:
            tensor: of any shape, in a castable type other than ``dtype``.
            dtype: the type to cast to.

        Returns:
            A tensor of the same shape, linked to ``tensor`` for backward as `Tensor.to` links it.
        """
        if is_compiling():
            return tensor.to(dtype)
        store = self._store() if type(tensor) is Parameter else None
        if store is None:
            self.casts += 1
            return tensor.to(dtype)
        entries = store.get(dtype)
        if entries is None:
            entries = store.setdefault(dtype, {})
        entry = entries.get(id(tensor))
        if entry is not None and entry.counts(tensor):
            self.hits += 1
            return entry.cast
        self.casts += 1
        cast = _with_version(tensor, dtype)
        if _can_be_kept(tensor, cast):
            if len(entries) >= self._sweep_at:
                self._sweep(entries)
            entries[id(tensor)] = _Entry.of(tensor, cast)
        return cast

    def clear(self) -> None:
        """Drops every cast of the iteration, and those of a forward that runs in this thread."""
        self._iteration.clear()
        self._sweep_at = self._SWEEP_FROM
        if self._thread.store is not None:
            self._thread.store.clear()

    def enter_forward(self, model: object) -> None:
        """A forward of an adopted model begins in this thread.

        Where the model that opened the store comes again, its last forward ended unseen (Ctrl-C runs no hooks), or it
        calls itself. Either way a fresh store is right.
        """
        thread = self._thread
        opened_by = thread.opened_by()
        if opened_by is None or opened_by is model:
            thread.store, thread.opened_by = {}, weakref.ref(model)

    def exit_forward(self, model: object) -> None:
        """It returned or raised. With the outermost one the casts made without grad go."""
        thread = self._thread
        if thread.opened_by() is model:
            thread.store, thread.opened_by = None, _nothing

    def __len__(self) -> int:
        stores = [self._iteration, self._thread.store or {}]
        return sum(len(entries) for store in stores for entries in store.values())

    def _store(self) -> _Store | None:
        """The store that may be used here and now; None under a tracer."""
        if not self._enabled or _get_tracing_state() is not None or _len_torch_dispatch_stack() or self._capturing():
            return None
        # In inference mode nothing is recorded, whatever enable_grad() says.
        records = is_grad_enabled() and not is_inference_mode_enabled()
        return self._iteration if records else self._thread.store

    def _sweep(self, entries: dict[int, _Entry]) -> None:
        """Drops entries whose parameter is held by nothing but the graph of its own cast.

        Where one is dropped that somebody could still reach, it is cast once more: no harm. Other threads may use and
        clear the same store meanwhile.
        """
        for key, entry in list(entries.items()):
            if _abandoned(entry.parameter):
                entries.pop(key, None)
        self._sweep_at = max(self._SWEEP_FROM, 2 * len(entries))


def _with_version(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that tells when it is written to, which one made in inference mode does not."""
    if not is_inference_mode_enabled():
        return tensor.to(dtype)
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(dtype)


def _can_be_kept(parameter: Tensor, cast: Tensor) -> bool:
    """Whether a cast means the same next time, and whether it can be told that the parameter has changed.

    Inference tensors have no version and sparse ones no storage; what a transform of `torch.func` has wrapped is dead
    when it returns.
    """
    return (
        parameter.layout is torch.strided
        and not parameter.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(cast)
    )


def _never() -> bool:
    return False


def _references(parameter: weakref.ref[Tensor]) -> int:
    return sys.getrefcount(parameter())


def _abandoned(parameter: weakref.ref[Tensor]) -> bool:
    return _references(parameter) <= _REFERENCES_OF_ABANDONED or parameter() is None


def _count_references_of_abandoned() -> int:
    """What `_references` says of a parameter that only a cast's graph holds, measured, since it is torch's affair."""
    with torch.inference_mode(False), torch.enable_grad():
        parameter = Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        cast = parameter.to(torch.bfloat16)
    reference: weakref.ref[Tensor] = weakref.ref(parameter)
    del parameter
    count = _references(reference)
    del cast
    return count


_REFERENCES_OF_ABANDONED = _count_references_of_abandoned()
