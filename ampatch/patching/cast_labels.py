"""Labels casts in ``torch.profiler`` with the kind of value that was cast, the function, and the type.

Only a session with ``profile_casts=True`` calls this module. Must never label where a tracer or a mode would record or
count the label, because torch treats a label as an operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.profiler import record_function

from ampatch.casting.nested import CASTABLE, tensors_in
from ampatch.compilers import traced_within_others
from ampatch.patching.recurrent_weights import Layout
from ampatch.patching.weight_cache import WeightCache
from ampatch.torch_private.modes import get_tracing_state, len_dispatch_stack

_R = TypeVar("_R")


class _Thread(threading.local):
    function: str = "a function"


_thread = _Thread()


def named(adapt: Callable[..., _R], function: str) -> Callable[..., _R]:
    """Returns an adapter, or what makes calls, that sets the function's name for the labels of `LabellingCache`."""

    def adapt_named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _R:
        if is_compiling():
            return adapt(args, kwargs)
        before, _thread.function = _thread.function, function
        try:
            return adapt(args, kwargs)
        finally:
            _thread.function = before

    return adapt_named


class LabellingCache(WeightCache):
    """A weight cache that labels every cast. A cache hit gets no label."""

    def kept(self, tensor: Tensor, dtype: torch.dtype | None, make: Callable[[], Tensor]) -> Tensor:
        """Casts as `WeightCache.kept` does, under a label."""
        if is_compiling() or dtype is None or self._has(tensor, dtype):
            return super().kept(tensor, dtype, make)
        with _label("weight" if isinstance(tensor, Parameter) else "argument", _thread.function, dtype):
            return super().kept(tensor, dtype, make)

    def cast_together(
        self, weights: Sequence[Tensor], dtype: torch.dtype, layout_of: Callable[[], Layout]
    ) -> list[Tensor]:
        """Casts as `WeightCache.cast_together` does, under one label."""
        if all(self._has(weight, dtype) for weight in weights):
            return super().cast_together(weights, dtype, layout_of)
        with _label("weights", _thread.function, dtype):
            return super().cast_together(weights, dtype, layout_of)

    def _has(self, tensor: Tensor, dtype: torch.dtype) -> bool:
        store = self._store(tensor) if type(tensor) is Parameter else None
        return store is not None and store.find(tensor, dtype) is not None


@traced_within_others
def under_label(what: str, hook: Callable[..., Any], dtype: torch.dtype, module: nn.Module, *given: Any) -> Any:
    """Calls a casting hook around a forward, under a label. A function of this module, so that models can be pickled.

    Args:
        what: "arguments" or "result".
        hook: the hook.
        dtype: type that it casts to, its first argument.
        module: the module.
        given: the other arguments of the hook; the last two have what it casts, or the last one.
    """
    values = given if what == "arguments" else given[-1]
    if is_compiling() or not any(each.dtype in CASTABLE and each.dtype is not dtype for each in tensors_in(values)):
        return hook(dtype, module, *given)
    with _label(what, type(module).__name__, dtype):
        return hook(dtype, module, *given)


def _label(what: str, function: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    if get_tracing_state() is not None or len_dispatch_stack():
        return nullcontext()
    return record_function(f"ampatch: cast {what} of {function} to {str(dtype).removeprefix('torch.')}")
