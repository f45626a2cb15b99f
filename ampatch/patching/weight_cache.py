"""Cast weights, so that a parameter is cast once however often it is used.

The cache may never be wrong. Constraints, and how they are kept:

- A cast made without grad carries no graph, and one made with grad must not outlive its iteration. So there are three
  kinds of store, and what is in one is never in use by way of another. The *iteration* store serves code that records
  gradients, and is dropped at the end of a ``scale_loss`` block and at every optimizer step. The *forward* store serves
  code that does not (``no_grad``, inference mode), belongs to a thread, and lives only inside the outermost forward of
  an adopted model. A *frozen* store serves such code too, in every thread and in no forward in particular, but only for
  the weights that the user said will not change, and until the block ends in which that holds.
- A weight may change under a cast. Whether an entry still counts is looked at on every use (`Store`), whether the cast
  itself was written to, through a view that a function returned, among the rest. An optimizer may write in ways that
  are not counted, so that its step ends what there is of the weights it updates; where a CUDA graph records the step
  nothing of them is kept any more, since nobody hears of its replays. Whoever takes ``p.data`` may write to it, and is
  told of (`forget`). A write through another view of the memory, in a frozen block or between two forwards with grad
  and no step between, is what no check can see; `clear` is for that.
- Nothing may be kept alive. A cast's graph holds its parameter, so a weak reference alone would never die: entries
  whose parameter no Python code holds any more are swept out as the store grows.
- Threads share stores, and there is no lock, which a fork could find held. Two that miss at once both cast, and the
  later cast is kept. One that was under way when a block ended writes to a store that nobody looks in any more.
- Tracers (torch.compile, torch.export, torch.jit.trace, make_fx, CUDA graph capture) must record the cast where it is
  used: while one is at work the cache is not consulted.

Only `torch.nn.Parameter` itself is cached: subclasses (sharded, gathered, lazy parameters) change in ways of their own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ampatch.casting.cast_store import Store
from ampatch.native import calls
from ampatch.tracing import is_capturing

# The modes of selective checkpointing: while it runs a region, and while it recomputes it.
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@dataclass(frozen=True, slots=True)
class CastCounts:
    """How much casting was done since amp was set up.

    Attributes:
        casts: tensors that were cast, weights included.
        cache_hits: uses of a weight that found it cast already.
    """

    casts: int
    cache_hits: int


@dataclass(frozen=True, slots=True, eq=False)
class _Frozen:
    """What one block of `WeightCache.frozen` keeps."""

    parameters: frozenset[int]  # ids; should one die and another take its id, the entries tell them apart
    store: Store = field(default_factory=calls.new_store)


class _Thread(threading.local):
    forward: Store | None = None  # the state borrows it, and may be in C++, which does not hear of the end of a thread
    opened_by: weakref.ref[object] | None = None  # the model whose forward it belongs to


class WeightCache:
    """Casts tensors and remembers the casts of parameters; counts both.

    Attributes:
        state: what is asked and noted on every cast, by wrappers that run in C++ too.
    """

    # Below this many entries a store is not worth sweeping.
    _SWEEP_FROM = 256

    def __init__(self, enabled: bool = True) -> None:
        self.state = calls.new_cache_state()
        self.state.sweep_at = self._SWEEP_FROM
        self._enabled = enabled
        self._iteration = calls.new_store()
        if enabled:
            self.state.iteration = self._iteration
        self._frozen: list[_Frozen] = []  # the oldest first
        self._thread = _Thread()
        self._replayed: set[int] = set()  # ids of parameters that a CUDA graph updates

    def counts(self) -> CastCounts:
        """Returns how much was cast so far."""
        return CastCounts(self.state.casts, self.state.hits)

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
        state = self.state
        store = self._store(tensor) if type(tensor) is Parameter else None
        if store is None:
            state.casts += 1
            return tensor.to(dtype)
        kept = store.find(tensor, dtype)
        if kept is not None:
            state.hits += 1
            return kept
        state.casts += 1
        cast = _with_version(tensor, dtype)
        if _can_be_kept(tensor, cast):
            # A transform of torch.func lets nobody ask for gradients.
            if cast.grad_fn is None and torch._C._functorch.peek_interpreter_stack() is None:
                # As its weight does, although nothing is recorded: torch's linear asks, and copies it for each row of
                # a batch otherwise.
                cast.requires_grad_(tensor.requires_grad)
            if len(store) >= state.sweep_at:
                self._sweep(store)
            if tensor.is_cuda and any(store is block.store for block in self._frozen):
                # Threads with streams of their own will read it, and only this stream knows when it is written.
                torch.cuda.current_stream(tensor.device).synchronize()
            store.keep(tensor, cast)
        return cast

    def clear(self) -> None:
        """Drops every cast, bar those of forwards that run in other threads."""
        self.end_iteration()
        for block in list(self._frozen):
            block.store.clear()

    def forget(self, parameter: Tensor) -> None:
        """Drops the casts of a parameter, bar those of forwards that run in other threads."""
        for store in (self._iteration, self.state.forward, *(block.store for block in list(self._frozen))):
            if store is not None:
                store.forget([id(parameter)])

    def keep_nothing(self) -> None:
        """From now on casts every time: for weights that are gathered for their layer's time, and let go after it."""
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
        """`end_iteration` by an update of weights, whose casts go from the frozen stores as well.

        Args:
            updated: gives the parameters. Where a CUDA graph records the update their casts are kept for a forward at
                most from now on, since nobody hears of a replay.
        """
        self.end_iteration()
        if is_capturing():
            self._replayed.update(map(id, updated()))
            if self._replayed:
                self.state.iteration = None  # from now on it depends on the weight
        if self._frozen:
            keys = [id(parameter) for parameter in updated()]
            for block in list(self._frozen):
                block.store.forget(keys)

    @contextlib.contextmanager
    def frozen(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Keeps the casts of these parameters until the block ends, for code that records no gradients.

        Where blocks overlap in parameters the one that began first keeps their casts.
        """
        # Compiled code keeps nothing by itself; what it leaves to Python is served.
        torch._dynamo.graph_break()
        block = _Frozen(frozenset(map(id, parameters)))
        self._frozen.append(block)
        self.state.has_frozen = True
        try:
            yield
        finally:
            self._frozen.remove(block)
            self.state.has_frozen = bool(self._frozen)

    def enter_forward(self, model: object) -> None:
        """Notes that a forward of an adopted model begins in this thread.

        Where the model that opened the store comes again, its last forward ended unseen (Ctrl-C runs no hooks), or it
        calls itself. Either way a fresh store is right.
        """
        if not self._enabled:
            return
        thread = self._thread
        opened_by = None if thread.opened_by is None else thread.opened_by()
        if opened_by is None or opened_by is model:
            self._serve_forward(calls.new_store())
            thread.opened_by = weakref.ref(model)

    def exit_forward(self, model: object) -> None:
        """It returned or raised. With the outermost one the casts made without grad go."""
        thread = self._thread
        if thread.opened_by is not None and thread.opened_by() is model:
            self._serve_forward(None)
            thread.opened_by = None

    def _serve_forward(self, store: Store | None) -> None:
        self.state.forward = store  # before the one that it has borrowed may go
        self._thread.forward = store

    def __len__(self) -> int:
        stores = [self._iteration, self.state.forward, *(block.store for block in self._frozen)]
        return sum(len(store) for store in stores if store is not None)

    def _store(self, parameter: Tensor) -> Store | None:
        """Returns the store that may be used here and now for a parameter; None under a tracer, or if there is none."""
        if not self._enabled or _get_tracing_state() is not None or (_len_torch_dispatch_stack() and _is_traced()):
            return None
        if parameter.is_cuda and is_capturing():
            return None
        changes_unseen = bool(self._replayed) and id(parameter) in self._replayed
        # In inference mode nothing is recorded, whatever enable_grad() says.
        if is_grad_enabled() and not is_inference_mode_enabled():
            return None if changes_unseen else self._iteration
        for block in self._frozen:
            if id(parameter) in block.parameters and not changes_unseen:
                return block.store
        return self.state.forward

    def _sweep(self, store: Store) -> None:
        """Drops entries whose parameter is held by nothing but the graph of its own cast.

        Where one is dropped that somebody could still reach, it is cast once more: no harm. Other threads may use and
        clear the same store meanwhile.
        """
        store.forget([key for key, parameter, cast in store.entries() if _abandoned(parameter, cast)])
        self.state.sweep_at = max(self._SWEEP_FROM, 2 * len(store))


def _is_traced() -> bool:
    """Returns whether a dispatch mode is at work that is not of selective checkpointing, which records no graph."""
    return not all(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def _with_version(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a cast that tells when it is written to, which one made in inference mode does not."""
    if _len_torch_dispatch_stack():
        # A selective checkpoint counts operators, and has to find as many where it recomputes, cast already or not.
        with _disable_current_modes():
            return _with_version(tensor, dtype)
    if not is_inference_mode_enabled():
        return tensor.to(dtype)
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(dtype)


def _can_be_kept(parameter: Tensor, cast: Tensor) -> bool:
    """Returns whether a cast means the same next time, and whether it can be told that the parameter has changed.

    Inference tensors have no version and sparse ones no storage; what a transform of `torch.func` has wrapped is dead
    when it returns.
    """
    return (
        parameter.layout is torch.strided
        and not parameter.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(cast)
    )


def _references(parameter: weakref.ref[Tensor]) -> int:
    return sys.getrefcount(parameter())


def _abandoned(parameter: weakref.ref[Tensor], cast: Tensor) -> bool:
    # Without a graph there is nothing to hold the parameter but those who use it.
    is_in_graph = cast.grad_fn is not None
    return parameter() is None or (is_in_graph and _references(parameter) <= _REFERENCES_OF_ABANDONED)


def _count_references_of_abandoned() -> int:
    """Measures the `_references` of a parameter that only a cast's graph holds, which is torch's affair."""
    with torch.inference_mode(False), torch.enable_grad():
        parameter = Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        cast = parameter.to(torch.bfloat16)
    reference: weakref.ref[Tensor] = weakref.ref(parameter)
    del parameter
    count = _references(reference)
    del cast
    return count


_REFERENCES_OF_ABANDONED = _count_references_of_abandoned()
