"""Keeps casts of weights, so that a parameter is cast only once, however often it is used.

The cache must never return a wrong cast. Constraints, and how the code keeps them:

- Grad mode: a cast made without grad has no graph, and a cast made with grad must not outlive its iteration. So there
  are three kinds of store, and a cast from one is never used in place of a cast from another.
  The *iteration* store serves code that records gradients. It is cleared at the end of a ``scale_loss`` block and at
  every optimizer step.
  The *forward* store serves code that records none (``no_grad``, inference mode). It belongs to one thread, and exists
  only inside the outermost forward of an adopted model.
  A *frozen* store also serves code that records none, in every thread and outside of forwards. It holds only weights
  that the user declared unchanging, and exists until the `WeightCache.frozen` block ends.
- Changed weights: every use checks whether an entry is still valid (`Store`). An in-place write to the cast itself,
  through a view that a function returned, also invalidates it.
  An optimizer may write without raising the version counter, so its step drops the casts of the weights that it
  updates. If a CUDA graph records the step, their casts are kept for one forward at most from then on, because the
  cache cannot see replays. Code that reads ``p.data`` may write to it, so reading calls `WeightCache.forget`.
  Two kinds of writes through another view of the memory pass unseen: in a frozen block, and between two forwards with
  grad that have no step between them. After these, users call `WeightCache.clear`.
- Lifetimes: the cache must keep no parameter alive. A cast's graph holds its parameter, so a weak reference alone would
  never die. As a store grows, it drops the entries whose parameter no Python code holds any more.
- Streams: a cast of the iteration or of a forward is valid on the CUDA stream that made it. In a frozen block, the host
  waits for each new cast, and the end of the block waits for all streams of its device.
- Threads: they share stores without a lock, because a fork could copy a lock that is held. If two threads miss at once,
  both cast, and the later cast is kept. A cast that is still running when a block ends goes to a store no longer in
  use.
- Tracers (torch.compile, torch.export, torch.jit.trace, make_fx, CUDA graph capture) must record the cast at each use,
  so the cache is not consulted under a tracer.

Only `torch.nn.Parameter` itself is cached: subclasses (sharded, gathered, lazy parameters) change in their own ways.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_compiling
from torch.nn import Parameter

from ampatch.casting import cast_observers
from ampatch.casting.cast_store import Store
from ampatch.casting.nested import CASTABLE, with_versions
from ampatch.native import calls
from ampatch.patching.emulation import Casts
from ampatch.patching.recurrent_weights import Layout
from ampatch.torch_private import modes
from ampatch.torch_private.modes import len_dispatch_stack
from ampatch.tracing import is_capturing, is_traced

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Numbers of casts since amp was set up.

    Attributes:
        casts: number of casts, including casts of weights.
        cache_hits: number of uses of a weight that needed no new cast.
    """

    casts: int
    cache_hits: int


class _Frozen(NamedTuple):
    """The casts kept during one `WeightCache.frozen` block."""

    parameters: frozenset[int]  # ids; if a parameter dies and another gets its id, the entries tell them apart
    store: Store


class _Thread(threading.local):
    forward: Store | None = None  # owned here; the state borrows it, since C++ cannot see a thread end
    opened_by: weakref.ref[object] | None = None  # the model whose forward the store belongs to


class WeightCache(Casts):
    """Casts tensors and keeps the casts of parameters; counts casts and hits.

    Attributes:
        state: counts and current stores, which wrappers in C++ also read and update on every cast.
    """

    # Stores with fewer entries are not swept.
    _SWEEP_FROM = 256

    def __init__(self, enabled: bool = True) -> None:
        self.state = calls.new_cache_state()
        self.state.sweep_at = self._SWEEP_FROM
        self._enabled = enabled
        self._iteration = calls.new_store()
        if enabled:
            self.state.iteration = self._iteration
        self._frozen: list[_Frozen] = []  # oldest first
        self._thread = _Thread()
        self._replayed: set[int] = set()  # ids of parameters that a CUDA graph updates

    def counts(self) -> CastCounts:
        """Returns the numbers of casts and hits so far."""
        return CastCounts(self.state.casts, self.state.hits)

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Casts a tensor; uses the kept cast of a parameter that has not changed since.

        Args:
            tensor: tensor of any shape, in a castable type other than ``dtype``.
            dtype: type to cast to.

        Returns:
            A tensor of the same shape in ``dtype``, linked to ``tensor`` in the graph as by `Tensor.to`.
        """
        return self.kept(tensor, dtype, lambda: tensor.to(dtype))

    def kept(self, tensor: Tensor, dtype: torch.dtype | None, make: Callable[[], Tensor]) -> Tensor:
        """Returns ``make()``; for a parameter that has not changed since, the kept result for ``dtype``.

        With None in place of a type, nothing is kept.
        """
        if is_compiling():
            return make()
        store = self._store(tensor) if dtype is not None and type(tensor) is Parameter else None
        state = self.state
        # Observers compare values. A float8 operand is packed with its scales, so its numbers are not values.
        observer = cast_observers.observer if dtype is None or dtype in CASTABLE else None
        if store is None or dtype is None:
            state.casts += 1
            return make() if observer is None else observer.cast(tensor, make)
        kept = store.find(tensor, dtype)
        if kept is not None:
            state.hits += 1
            if observer is not None:
                observer.hit([kept])
            return kept
        state.casts += 1

        def with_version() -> Tensor:
            return _with_version(make)

        cast = with_version() if observer is None else observer.cast(tensor, with_version)
        self._keep(store, tensor, cast)
        return cast

    def cast_together(
        self, weights: Sequence[Tensor], dtype: torch.dtype, layout_of: Callable[[], Layout]
    ) -> list[Tensor]:
        """Casts the weights of a recurrent layer into one buffer; uses the kept casts if none has changed since.

        Each cast is kept as by `cast`. If another layer shares a weight, the last cast is kept, and the first layer
        casts all its weights again when it runs again.

        Args:
            weights: strided tensors of castable types, at least one of another type than ``dtype``, on one device.
            dtype: type to cast to.
            layout_of: function that returns the layout of the buffer.

        Returns:
            The casts, in the order of the weights. Under tracers and transforms, each has memory of its own.
        """
        if is_traced() or modes.peek_interpreter_stack() is not None:
            return super().cast_together(weights, dtype, layout_of)
        layout, state = layout_of(), self.state
        stores = [self._store(weight) if type(weight) is Parameter else None for weight in weights]
        found = (
            None if store is None else store.find(weight, dtype) for store, weight in zip(stores, weights, strict=True)
        )
        kept = [cast for cast in found if cast is not None]
        if len(kept) == len(weights) and layout.holds(kept):
            state.hits += len(kept)
            cast_observers.hit(kept)
            return kept
        state.casts += len(weights)
        casts = cast_observers.cast(weights[0], lambda: _with_version(lambda: layout.cast(weights, dtype)))
        for store, weight, cast in zip(stores, weights, casts, strict=True):
            if store is not None:
                self._keep(store, weight, cast)
        return casts

    def _keep(self, store: Store, tensor: Tensor, cast: Tensor) -> None:
        """Keeps a new cast, if it stays usable."""
        if not _can_be_kept(tensor, cast):
            return
        # Under a transform of torch.func, requires_grad_ raises.
        if cast.grad_fn is None and modes.peek_interpreter_stack() is None:
            # The cast requires grad like its weight, although no graph is recorded. Otherwise torch's linear, which
            # checks this, copies the weight for each row of a batch.
            cast.requires_grad_(tensor.requires_grad)
        if len(store) >= self.state.sweep_at:
            # If a parameter is still reachable, dropping its entry only costs another cast. Other threads may use and
            # clear the store meanwhile.
            store.forget([key for key, parameter, cast in store.entries() if _abandoned(parameter, cast)])
            self.state.sweep_at = max(self._SWEEP_FROM, 2 * len(store))
        is_frozen = any(store is block.store for block in self._frozen)
        if is_frozen and tensor.is_cuda:
            # Threads on other streams will read the cast, and only this stream knows when it is written.
            torch.cuda.current_stream(tensor.device).synchronize()
        store.keep(tensor, cast, is_frozen)

    def nbytes(self) -> int:
        """Returns the memory of the kept casts in bytes, without those of forwards that run in other threads."""
        return sum(cast.nbytes for store in self._stores() for _, _, cast in store.entries())

    def clear(self) -> None:
        """Drops every cast, except casts of forwards that run in other threads."""
        self.end_iteration()
        for block in list(self._frozen):
            block.store.clear()

    def forget(self, parameter: Tensor) -> None:
        """Drops the casts of a parameter, except casts of forwards that run in other threads."""
        for store in self._stores():
            store.forget([id(parameter)])

    def disable(self) -> None:
        """Stops keeping casts for good, because weights are gathered before their layer runs and freed after it."""
        self._enabled = False
        self.state.iteration = None
        self._serve_forward(None)
        self.clear()

    def end_iteration(self) -> None:
        """Drops the casts of the iteration and of a forward that runs in this thread."""
        state = self.state
        self._iteration.clear()
        state.sweep_at = self._SWEEP_FROM
        if state.forward is not None:
            state.forward.clear()

    def end_iteration_of(self, updated: Callable[[], Iterable[Tensor]]) -> None:
        """Ends the iteration because weights were updated; drops their casts from the frozen stores as well.

        If a CUDA graph records the update, their casts are kept for one forward at most from now on, because the cache
        cannot see replays.

        Args:
            updated: function that returns the updated parameters.
        """
        self.end_iteration()
        if is_capturing():
            self._replayed.update(map(id, updated()))
            if self._replayed:
                # From now on `_store` decides for each weight.
                self.state.iteration = self.state.frozen = None
        if self._frozen:
            keys = [id(parameter) for parameter in updated()]
            for block in list(self._frozen):
                block.store.forget(keys)

    @contextlib.contextmanager
    def frozen(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Keeps the casts of these parameters until the block ends, for code that records no gradients.

        If blocks overlap in parameters, the block that began first keeps their casts.
        """
        # Compiled code keeps no casts, but the code that it leaves to Python does.
        from ampatch.torch_private.tracers import graph_break

        graph_break()
        block = _Frozen(frozenset(map(id, parameters)), calls.new_store())
        self._frozen.append(block)
        self._serve_frozen()
        try:
            yield
        finally:
            self._frozen.remove(block)
            self._serve_frozen()
            _wait_for_readers(block.store)

    def enter_forward(self, model: object) -> None:
        """Notes that a forward of an adopted model begins in this thread.

        If the model that opened the store enters again, its last forward ended without hooks (Ctrl-C), or the model
        calls itself. In both cases a new store is right.
        """
        if not self._enabled:
            return
        thread = self._thread
        opened_by = None if thread.opened_by is None else thread.opened_by()
        if opened_by is None or opened_by is model:
            self._serve_forward(calls.new_store())
            thread.opened_by = weakref.ref(model)

    def exit_forward(self, model: object) -> None:
        """Notes that a forward returned or raised; the end of the outermost one drops the casts made without grad."""
        thread = self._thread
        if thread.opened_by is not None and thread.opened_by() is model:
            self._serve_forward(None)
            thread.opened_by = None

    def _serve_frozen(self) -> None:
        self.state.frozen = None if self._replayed else tuple(self._frozen)

    def _serve_forward(self, store: Store | None) -> None:
        self.state.forward = store  # first, since the next line may free the store that the state borrowed
        self._thread.forward = store

    def __len__(self) -> int:
        return sum(map(len, self._stores()))

    def _stores(self) -> list[Store]:
        """Returns all stores, except those of forwards that run in other threads."""
        stores = [self._iteration, self.state.forward, *(block.store for block in list(self._frozen))]
        return [store for store in stores if store is not None]

    def _store(self, parameter: Tensor) -> Store | None:
        """Returns the store to use for a parameter here and now; None under a tracer, or if there is none."""
        if not self._enabled or is_traced():
            return None
        if parameter.is_cuda and is_capturing():
            # The graph of an earlier cast holds the gradient's node of another stream, which torch would reuse.
            self.forget(parameter)
            return None
        changes_unseen = bool(self._replayed) and id(parameter) in self._replayed
        # In inference mode autograd records nothing, even under enable_grad().
        if is_grad_enabled() and not is_inference_mode_enabled():
            return None if changes_unseen else self._iteration
        for block in self._frozen:
            if id(parameter) in block.parameters and not changes_unseen:
                return block.store
        return self.state.forward


def _wait_for_readers(store: Store) -> None:
    """Waits until no stream reads casts of a frozen block: their memory is about to be used again on another stream."""
    devices = {cast.device for _, _, cast in store.entries() if cast.is_cuda}
    for device in () if is_capturing() else devices:
        torch.cuda.synchronize(device)


def _with_version(make: Callable[[], _T]) -> _T:
    """Returns new casts with version counters, hidden from selective checkpoints."""
    if len_dispatch_stack():
        # A selective checkpoint counts operators. It must find the same number when it recomputes, even on a cache hit.
        with modes.without_dispatch_modes():
            return _with_version(make)
    return with_versions(make) if is_inference_mode_enabled() else make()


def _can_be_kept(parameter: Tensor, cast: Tensor) -> bool:
    """Returns True if a cast stays usable, and if changes of the parameter can be detected.

    Inference tensors have no version counter, and sparse tensors have no storage. A tensor that a transform of
    `torch.func` has wrapped is dead after the transform.
    """
    return (
        parameter.layout is torch.strided
        and not parameter.is_inference()
        and not modes.is_functorch_wrapped_tensor(cast)
    )


def _references(parameter: weakref.ref[Tensor]) -> int:
    return sys.getrefcount(parameter())


def _abandoned(parameter: weakref.ref[Tensor], cast: Tensor) -> bool:
    # Without a graph, the cast does not hold the parameter.
    is_in_graph = cast.grad_fn is not None
    return parameter() is None or (is_in_graph and _references(parameter) <= _REFERENCES_OF_ABANDONED)


def _count_references_of_abandoned() -> int:
    """Measures the `_references` of a parameter that only a cast's graph holds, since the number depends on torch."""
    with torch.inference_mode(False), torch.enable_grad():
        parameter = Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        cast = parameter.to(torch.bfloat16)
    reference: weakref.ref[Tensor] = weakref.ref(parameter)
    del parameter
    count = _references(reference)
    del cast
    return count


_REFERENCES_OF_ABANDONED = _count_references_of_abandoned()
