"""Announces writes to tensors that torch does not count: through ``Tensor.data``, by collectives, and by swaps.

A write through ``Tensor.data`` does not change the tensor's version counter. Collectives that write to their argument,
such as `torch.distributed.broadcast`, do not change it either. The cast cache and the masters use version counters, and
would miss these writes. While the patches of this module are installed, reading or setting ``data`` announces the
tensor, since a write may come next. A patched collective announces its tensor, and increments the version counter of a
parameter. `torch.utils.swap_tensors` announces both tensors, as if their ``data`` had been set.

Writes through other views of the memory (numpy, DLPack, a storage) are not seen. Must not know who uses the
announcements.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ampatch.ledger import PatchLedger
from ampatch.torch_private.modes import is_functorch_wrapped_tensor
from ampatch.torch_private.tensors import DATA, storage_id, storage_use_count

#: A tensor at one moment: itself, and its version counter.
Moment = tuple[Tensor | None, int]

_ALONE = 2  # uses of a storage by one tensor, and by its Python object

_ORDINARY = frozenset({Tensor, nn.Parameter})

# Collectives that write to one of their arguments, with that argument's name.
_COLLECTIVES = {"all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "recv": "tensor", "irecv": "tensor"}


class OnAccess(Protocol):
    """A function that is told of a tensor that may be written to uncounted."""

    def __call__(self, tensor: Tensor, data: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Notes it.

        Args:
            tensor: any tensor.
            data: its ``data``, when that was read or set; None after a collective has written to the tensor.
            is_read: whether ``data`` was read.

        Returns:
            What the user gets of ``data`` instead; None: as it is.
        """


def data_of(tensor: Tensor) -> Tensor:
    """Returns ``tensor.data`` without announcing it."""
    return DATA.__get__(tensor)  # type: ignore[no-any-return]


class GivenData:
    """What ``data`` gives of some memory: always one tensor or views of it, whose version counter counts all writes.

    Args:
        data: what reading or setting ``data`` has given first.
    """

    __slots__ = ("_data", "_version")

    def __init__(self, data: Tensor) -> None:
        self._data, self._version = data.detach(), data._version

    def of(self, tensor: Tensor) -> Tensor:
        """Returns what to give as ``data`` of a tensor in the same storage."""
        return self._data.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()

    def is_written(self) -> bool:
        """Returns True if user code has written to what was given since the last call."""
        before, self._version = self._version, self._data._version
        return self._version != before

    def has_type(self, dtype: torch.dtype) -> bool:
        """Returns True if tensors given have this type."""
        return self._data.dtype is dtype


def has_memory(tensor: Tensor) -> bool:
    """Returns True if a tensor is a plain dense Tensor or Parameter, whose memory has an address."""
    return (
        type(tensor) in _ORDINARY
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_functorch_wrapped_tensor(tensor)
    )


def names_of_one_memory(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Returns the names of two parameters, one of them trained, that begin at the same address; None without any."""
    first: dict[tuple[torch.device, int], tuple[str, Tensor]] = {}
    for name, tensor in named:
        if has_memory(tensor) and tensor.numel() and tensor.data_ptr():  # 0 on the device 'meta'
            before, other = first.setdefault((tensor.device, tensor.data_ptr()), (name, tensor))
            if other is not tensor and (other.requires_grad or tensor.requires_grad):
                return before, name
    return None


def is_shared(tensor: Tensor) -> bool:
    """Returns True if another tensor has the memory of this one."""
    storage = tensor.untyped_storage()  # counts as one itself
    return int(storage_use_count(storage_id(storage))) > _ALONE


def moment_of(tensor: Tensor | None) -> Moment:
    """Returns a tensor and its version counter, for `is_since`."""
    return tensor, -1 if tensor is None else tensor._version


def is_since(moment: Moment, tensor: Tensor | None) -> bool:
    """Returns True if a tensor is the one of an earlier moment, and torch has counted no write to it since."""
    return moment[0] is tensor and (tensor is None or moment[1] == tensor._version)


def announce(ledger: PatchLedger, on_access: OnAccess) -> None:
    """Patches torch to call ``on_access`` with every tensor that may be written to uncounted; the ledger records it."""

    def get(tensor: Tensor) -> Tensor:
        data: Tensor = DATA.__get__(tensor)
        given = None if torch.compiler.is_compiling() else on_access(tensor, data, is_read=True)
        return data if given is None else given

    def set_(tensor: Tensor, value: Tensor) -> None:
        DATA.__set__(tensor, value)
        if not torch.compiler.is_compiling():
            on_access(tensor, value, is_read=False)

    swap: Any = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        swap(t1, t2)
        for tensor in (t1, t2):
            on_access(tensor, data_of(tensor), is_read=False)

    ledger.set(Tensor, "data", property(get, set_))
    ledger.set(torch.utils, "swap_tensors", swap_tensors)
    if dist.is_available():
        for name, argument in _COLLECTIVES.items():
            original = getattr(dist, name)
            counted = _counting(original, argument, on_access)
            for owner in (dist, dist.distributed_c10d):
                if getattr(owner, name) is original:
                    ledger.set(owner, name, counted)


def _counting(collective: Callable[..., Any], argument: str, on_access: OnAccess) -> Callable[..., Any]:
    place = list(inspect.signature(collective).parameters).index(argument)

    @functools.wraps(collective)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        written = args[place] if len(args) > place else kwargs.get(argument)
        if isinstance(written, Tensor) and not torch.compiler.is_compiling():
            # Only for parameters: to count writes to other tensors could break graphs that are valid without amp.
            if isinstance(written, nn.Parameter) and not written.is_inference():
                increment_version(written)
            on_access(written, None, is_read=False)
        return result

    return counted
