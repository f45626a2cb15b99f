"""Finds writes that torch counts, by the version counters and the addresses of tensors at an earlier moment.

Must not know what the tensors are. `ampatch.weights.untracked_writes` announces writes that torch does not count.
"""

from __future__ import annotations

import operator

from torch import Tensor

from ampatch.native import calls
from ampatch.weights.untracked_writes import data_of

# For `map` over a list of tensors: a line of Python for each tensor takes several times as long.
_VERSION = operator.attrgetter("_version")


def moments_of(tensors: list[Tensor]) -> tuple[list[int], list[int]]:
    """Returns the version counters and the addresses of tensors, which change with each write that torch counts."""
    compiled = calls.compiled()
    found = None if compiled is None else compiled.moments_of(tensors)
    return (list(map(_VERSION, tensors)), list(map(Tensor.data_ptr, tensors))) if found is None else found


class Mark:
    """A tensor's address and version counter at one moment, to detect later writes that torch counts."""

    __slots__ = ("_data", "_place", "_versions", "address")

    def __init__(self, tensor: Tensor) -> None:
        # Keeps the memory alive, so that torch cannot reuse its address for other data.
        self._data = data_of(tensor)
        self.address = tensor.data_ptr()
        self._versions, self._place = [tensor._version], 0

    @property
    def version(self) -> int:
        """Version counter at that moment."""
        return self._versions[self._place]

    def share(self, versions: list[int], place: int) -> None:
        """From now on keeps the version in a list, so that its owner renews many versions together."""
        versions[place] = self.version
        self._versions, self._place = versions, place

    def is_now(self, tensor: Tensor) -> bool:
        """Returns True if the version counter and the address are unchanged."""
        return tensor._version == self.version and tensor.data_ptr() == self.address

    def renew(self, tensor: Tensor) -> None:
        """Records the present version counter and memory."""
        if tensor.data_ptr() != self.address:
            self._data, self.address = data_of(tensor), tensor.data_ptr()
        self._versions[self._place] = tensor._version


class Marks:
    """Marks of many tensors, renewed and compared together.

    Code that has written to one tensor may also renew the mark of that tensor alone.

    Args:
        marks: one mark for each tensor.
        tensors: the tensors, in the same order.
    """

    __slots__ = ("_addresses", "_marks", "_tensors", "_versions")

    def __init__(self, marks: list[Mark], tensors: list[Tensor]) -> None:
        self._marks, self._tensors = marks, tensors
        self._versions = [0] * len(marks)  # each mark reads and renews its own
        self._addresses: list[int] = []
        for place, mark in enumerate(marks):
            mark.share(self._versions, place)

    def are_now(self, count: int | None = None) -> bool:
        """Returns True if no version counter and no address of the first tensors has changed since `renew`.

        Args:
            count: how many tensors; None: all.
        """
        return moments_of(self._tensors[:count]) == (self._versions[:count], self._addresses[:count])

    def renew(self) -> bool:
        """Records the present versions and addresses; returns True if the address of any tensor changed."""
        before = self._addresses
        self._versions[:], self._addresses = moments_of(self._tensors)
        if self._addresses == before:
            return False
        for mark, tensor in zip(self._marks, self._tensors, strict=True):
            mark.renew(tensor)
        return True
