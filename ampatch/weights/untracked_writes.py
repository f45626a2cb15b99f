"""Announces writes to tensors that torch does not count: by way of ``Tensor.data``, and by collectives.

A write through ``Tensor.data`` leaves the tensor's version counter as it was. So do collectives that write into their
argument, such as `torch.distributed.broadcast`. The cache of casts and the masters go by versions, and would miss these
writes. While the patches of this module are in place, reading or setting ``data`` announces the tensor, since a write
may come next, and a collective increments the version of a parameter.

Views of memory (numpy, DLPack, a storage) stay unseen. Must not know what the announcement is for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ampatch.ledger import PatchLedger

_DATA: Any = torch._C.TensorBase.__dict__["data"]

_ORDINARY = frozenset({Tensor, nn.Parameter})

# The collectives that write into what they are given, by the name of that argument.
_COLLECTIVES = {"all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "recv": "tensor", "irecv": "tensor"}


def data_of(tensor: Tensor) -> Tensor:
    """Returns ``tensor.data`` without announcing it."""
    return _DATA.__get__(tensor)  # type: ignore[no-any-return]


def has_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor is an ordinary one, with memory of its own that has an address."""
    return (
        type(tensor) in _ORDINARY
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def announce(ledger: PatchLedger, hear: Callable[[Tensor], object]) -> None:
    """Calls ``hear`` with every tensor that the user may write to uncounted.

    Args:
        ledger: records the patches.
        hear: called before a write by way of ``data``, and after one by a collective.
    """

    def get(tensor: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            hear(tensor)
        return _DATA.__get__(tensor)  # type: ignore[no-any-return]

    def set_(tensor: Tensor, value: Tensor) -> None:
        _DATA.__set__(tensor, value)
        if not torch.compiler.is_compiling():
            hear(tensor)

    ledger.set(Tensor, "data", property(get, set_))
    if dist.is_available():
        for name, argument in _COLLECTIVES.items():
            original = getattr(dist, name)
            counted = _counting(original, argument, hear)
            for owner in (dist, dist.distributed_c10d):
                if getattr(owner, name) is original:
                    ledger.set(owner, name, counted)


def _counting(collective: Callable[..., Any], argument: str, hear: Callable[[Tensor], object]) -> Callable[..., Any]:
    place = list(inspect.signature(collective).parameters).index(argument)

    @functools.wraps(collective)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        written = args[place] if len(args) > place else kwargs.get(argument)
        if isinstance(written, Tensor) and not torch.compiler.is_compiling():
            # Counting writes to other tensors could break graphs that are sound without amp.
            if isinstance(written, nn.Parameter) and not written.is_inference():
                increment_version(written)
            hear(written)
        return result

    return counted
