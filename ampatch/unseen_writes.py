"""Ways to write to a tensor that torch does not count: told of, where Python goes past here.

A write through ``Tensor.data`` leaves the tensor's version as it was, and so do the collectives of `torch.distributed`
that write into their argument. Whoever asks versions whether a weight has changed would not hear of them. While these
patches are in place the collectives count their write, and whoever reads or sets ``data`` is announced: it may be
written to next.

What neither sees are views of memory: numpy, DLPack, a tensor's storage. Must not know what becomes of it.
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

from ampatch.patching import PatchLedger

_DATA: Any = torch._C.TensorBase.__dict__["data"]

# The collectives that write into what they are given, by the name of that argument.
_COLLECTIVES = {"all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "recv": "tensor", "irecv": "tensor"}


def data_of(tensor: Tensor) -> Tensor:
    """``tensor.data``, which nobody is told of."""
    return _DATA.__get__(tensor)  # type: ignore[no-any-return]


def announce(ledger: PatchLedger, hear: Callable[[Tensor], object]) -> None:
    """Has ``hear`` be told of tensors that somebody may write to unseen.

    Args:
        ledger: takes note of what is installed.
        hear: called with the tensor, before a write by way of ``data``, after one by a collective.
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
            # Of other tensors a write that is counted now and not without amp would break graphs.
            if isinstance(written, nn.Parameter) and not written.is_inference():
                increment_version(written)
            hear(written)
        return result

    return counted
