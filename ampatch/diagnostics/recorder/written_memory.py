"""Remembers what operators wrote to which bytes of which storage, through views, parts and functions in place.

Must never keep the memory of a tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampatch.diagnostics.recorder.records import Values
from ampatch.torch_private.tensors import storage_id


class Region(NamedTuple):
    """Bytes of a storage, from the first to behind the last; ``is_dense`` if a tensor has all of them."""

    first: int
    end: int
    is_dense: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """Returns the bytes that a tensor has."""
        if not tensor.numel():
            return cls(0, 0, is_dense=True)
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((int(size) - 1) * int(stride) for size, stride in sizes)
        first, width = int(tensor.storage_offset()), tensor.itemsize
        return cls(first * width, (first + count) * width, is_dense=count == tensor.numel())

    def covers(self, other: Region) -> bool:
        """Returns True if this one has every byte of the other one."""
        return self.is_dense and self.first <= other.first and other.end <= self.end


class WrittenMemory:
    """The values that were written to each storage, and those that were read before anything wrote to it."""

    def __init__(self) -> None:
        # The weak reference keeps the address of the storage object from being used again, but not its memory.
        self._storages: dict[int, tuple[StorageWeakRef, list[tuple[Region, Values]]]] = {}

    def write(self, tensor: Tensor, values: Values) -> None:
        """Notes what a tensor holds now, and forgets what it covers."""
        region = Region.of(tensor)
        storage = tensor.untyped_storage()
        _, writes = self._storages.setdefault(_key(tensor), (StorageWeakRef(storage), []))
        writes[:] = [each for each in writes if not region.covers(each[0])]
        writes.append((region, values))

    def read(self, tensor: Tensor, measure: Callable[[tuple[Values, ...]], Values]) -> Values:
        """Returns what a tensor holds.

        Args:
            tensor: the tensor.
            measure: returns new values, given the results of operators that lie in the same bytes. It is called unless
                the last of them was written with this type to exactly these bytes.
        """
        region = Region.of(tensor)
        _, writes = self._storages.get(_key(tensor), (None, []))
        earlier = [each for each in writes if each[0].first < region.end and region.first < each[0].end]
        if earlier and region.is_dense and earlier[-1][0] == region and earlier[-1][1].dtype is tensor.dtype:
            return earlier[-1][1]
        values = measure(tuple(each for _, each in earlier if each.writer is not None))
        if not earlier:
            self.write(tensor, values)
        return values

    def drop(self, tensor: Tensor) -> None:
        """Forgets a tensor's storage, after a write that was not watched."""
        self._storages.pop(_key(tensor), None)


def _key(tensor: Tensor) -> int:
    # Not the address of the memory, which torch gives to other tensors.
    return storage_id(tensor.untyped_storage())
