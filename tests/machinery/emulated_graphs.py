"""CUDA graphs on the CPU: torch's own code around captures, over graphs that record operators and run them again.

As on a GPU, a capture computes nothing. A replay runs no Python, reads and writes the memory that the operators had in
the capture, and torch counts none of its writes. What reads from the device is refused during a capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ATEN = torch.ops.aten
_READING = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.is_nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
}


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _same_memory(value: Any) -> Any:
    """Returns another tensor of the same memory, whose writes do not count as writes to the first."""
    if not isinstance(value, Tensor):
        return value
    alias = torch.empty(0, dtype=value.dtype)
    return alias.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function in _READING:
            _refuse()
        given = tree_map(_same_memory, (args, kwargs or {}))
        for value in tree_leaves(given):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **(kwargs or {}))
        self.operators.append((function, *given, tree_map(_same_memory, result)))
        return result

    def undo(self) -> None:
        """Gives all memory the values from before the capture, which computes nothing on a GPU."""
        for storage, before in self._before.values():
            storage.copy_(before)


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self._recorder = _Recorder()
        self._exits = contextlib.ExitStack()

    def capture_begin(self, *_: object, **__: object) -> None:
        self._begin()

    def _begin(self) -> None:
        if Graph.capturing is not None:
            _refuse()
        Graph.capturing = self
        patches = self._exits.enter_context(pytest.MonkeyPatch.context())
        for name in ("tolist", "numpy"):  # neither is an operator on the CPU
            patches.setattr(Tensor, name, _refuse)
        self._exits.enter_context(self._recorder)

    def capture_end(self) -> None:
        Graph.capturing = None
        self._exits.close()
        self._recorder.undo()

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, result in self._recorder.operators:
                again = function(*args, **kwargs)
                for before, now in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
                        before.copy_(now)

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class AcceleratorGraph(Graph):
    """In place of ``torch.accelerator.Graph``, which has a ``capture_begin`` of its own."""

    def capture_begin(self) -> None:
        self._begin()

    def __enter__(self) -> None:
        self.capture_begin()

    def __exit__(self, *_: object) -> None:
        self.capture_end()


class Stream:
    """In place of ``torch.cuda.Stream``: nothing runs later than it is asked for."""

    def wait_stream(self, other: Stream) -> None:
        del other


def _outside_of_captures(*_: object) -> None:
    if Graph.capturing is not None:
        _refuse()


def install(patches: pytest.MonkeyPatch) -> None:
    """Has the CPU capture graphs; ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` are torch's own."""

    def is_capturing() -> bool:
        return Graph.capturing is not None

    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": _outside_of_captures,
        "empty_cache": _outside_of_captures,
        "is_initialized": is_capturing,
        "is_current_stream_capturing": is_capturing,
    }.items():
        patches.setattr(torch.cuda, name, value)
    patches.setattr(torch.cuda.graphs, "CUDAGraph", Graph)
    patches.setattr(torch.accelerator, "Graph", AcceleratorGraph, raising=False)
    patches.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: (0, 0))
    patches.setattr(torch.cuda.graph, "default_capture_stream", None)
    patches.setattr(torch._C, "_host_emptyCache", _outside_of_captures, raising=False)
