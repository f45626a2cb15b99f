"""Announces writes to tensors that torch does not count: through ``Tensor.data``, and by collectives.

A write through ``Tensor.data`` does not change the tensor's version counter. Collectives that write to their argument,
such as `torch.distributed.broadcast`, do not change it either. The cast cache and the masters use version counters, and
would miss these writes. While the patches of this module are installed, reading or setting ``data`` announces the
tensor, since a write may come next. A patched collective announces its tensor, and increments the version counter of a
parameter.

Writes through other views of the memory (numpy, DLPack, a storage) are not seen. Must not know who uses the
announcements.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ampatch.ledger import PatchLedger
from ampatch.native import calls

_DATA: Any = torch._C.TensorBase.__dict__["data"]

# For `map` over a list of tensors: a line of Python for each tensor takes several times as long.
_VERSION = operator.attrgetter("_version")

_ORDINARY = frozenset({Tensor, nn.Parameter})

# Collectives that write to one of their arguments, with that argument's name.
_COLLECTIVES = {"all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "recv": "tensor", "irecv": "tensor"}


def data_of(tensor: Tensor) -> Tensor:
    """Returns ``tensor.data`` without announcing it."""
    return _DATA.__get__(tensor)  # type: ignore[no-any-return]


def has_memory(tensor: Tensor) -> bool:
    """Returns True if a tensor is a plain dense Tensor or Parameter, whose memory has an address."""
    return (
        type(tensor) in _ORDINARY
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def moments_of(tensors: list[Tensor]) -> tuple[list[int], list[int]]:
    """Returns the version counters and the addresses of tensors, which change with each write that torch counts."""
    compiled = calls.compiled()
    found = None if compiled is None else compiled.moments_of(tensors)
    return (list(map(_VERSION, tensors)), list(map(Tensor.data_ptr, tensors))) if found is None else found


def announce(ledger: PatchLedger, hear: Callable[[Tensor, Tensor | None], object]) -> None:
    """Patches torch to call ``hear`` with every tensor that may be written to uncounted.

    Args:
        ledger: records the patches.
        hear: function to call when ``data`` is read, with the result; and with None when it was set, or a collective
            has written.
    """

    def get(tensor: Tensor) -> Tensor:
        data: Tensor = _DATA.__get__(tensor)
        if not torch.compiler.is_compiling():
            hear(tensor, data)
        return data

    def set_(tensor: Tensor, value: Tensor) -> None:
        _DATA.__set__(tensor, value)
        if not torch.compiler.is_compiling():
            hear(tensor, None)

    ledger.set(Tensor, "data", property(get, set_))
    if dist.is_available():
        for name, argument in _COLLECTIVES.items():
            original = getattr(dist, name)
            counted = _counting(original, argument, hear)
            for owner in (dist, dist.distributed_c10d):
                if getattr(owner, name) is original:
                    ledger.set(owner, name, counted)


def _counting(
    collective: Callable[..., Any], argument: str, hear: Callable[[Tensor, Tensor | None], object]
) -> Callable[..., Any]:
    place = list(inspect.signature(collective).parameters).index(argument)

    @functools.wraps(collective)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        written = args[place] if len(args) > place else kwargs.get(argument)
        if isinstance(written, Tensor) and not torch.compiler.is_compiling():
            # Only for parameters: to count writes to other tensors could break graphs that are valid without amp.
            if isinstance(written, nn.Parameter) and not written.is_inference():
                increment_version(written)
            hear(written, None)
        return result

    return counted
