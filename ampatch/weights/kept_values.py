"""The float32 values of a half tensor, kept as a tensor, and marks that detect the writes to either that torch counts.

Owns which of the two counts after user code has written to one of them. Must not know optimizers, nor which tensors
have float32 values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ampatch.errors import UsageError
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

    def renew_versions(self) -> None:
        """Records the present versions: `are_now` is False only if an address has changed since `renew`, or changes."""
        self._versions[:], _ = moments_of(self._tensors)


class Kept:
    """The float32 values of a half tensor, and marks that detect writes to either.

    Args:
        half: the half tensor, which equals the rounded values.
        full: the values; the master if an optimizer updates the parameter.
        dtype: type of the tensor since the conversion.

    Attributes:
        full: the argument ``full``.
        half_mark: mark of the half tensor when it last was ``full``, rounded.
        full_mark: mark of ``full`` at that moment.
    """

    __slots__ = ("dtype", "full", "full_mark", "half_mark")

    def __init__(self, half: Tensor, full: Tensor, dtype: torch.dtype) -> None:
        self.full, self.dtype = full, dtype
        self.half_mark, self.full_mark = Mark(half), Mark(full)

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.full.shape

    def note(self, half: Tensor) -> None:
        """Records that the half tensor now equals the rounded float32 values."""
        self.half_mark.renew(half)
        self.full_mark.renew(self.full)

    def set(self, half: Tensor, full: Tensor) -> None:
        """Takes float32 values that the half tensor equals, rounded: the kept ones, to which code has written."""
        assert full is self.full
        self.note(half)

    def take_gradient(self) -> Tensor | None:
        """Returns the gradient of the float32 values, which have none from then on."""
        grad, self.full.grad = self.full.grad, None
        return grad

    def is_in_sync(self, half: Tensor) -> bool:
        """Returns True if torch has counted no write to either tensor since `note`, and the type is unchanged."""
        return self.half_mark.is_now(half) and self.full_mark.is_now(self.full) and half.dtype is self.dtype

    def may_be_edited(self, half: Tensor) -> bool:
        """Returns True if a half tensor is where it was at `note`, and torch has counted no write to ``full`` since."""
        return not self.was_updated and half.data_ptr() == self.half_mark.address and half.dtype is self.dtype

    @property
    def was_updated(self) -> bool:
        """True if torch has counted a write to the float32 values since `note`."""
        return not self.full_mark.is_now(self.full)

    @torch.no_grad()
    def synchronise(self, half: Tensor) -> None:
        """Copies user writes since `note` from the half tensor to the float32 values, or the other way round.

        If torch has counted a write to the float32 values, and none to the half tensor, the float32 values count.
        Otherwise the half tensor counts. A float32 value that still rounds to its half element keeps all its bits.

        Raises:
            UsageError: the half tensor was given another type or shape.
        """
        check_as_converted(half, self.dtype, self.full.shape)
        if self.full.device != half.device:
            self.full.data = data_of(self.full).to(half.device)
        if self.was_updated and self.half_mark.is_now(half):
            half.copy_(self.full)
        elif self.half_mark.address != half.data_ptr():
            # The half tensor has other memory now. A state dict saved before must keep its values, as in plain torch,
            # so `full` gets other memory too.
            self.full.data = self.values(half)
        else:
            self.full.copy_(self.values(half))
        self.note(half)

    @torch.no_grad()
    def values(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's values; takes an element from ``full`` if that still rounds to the tensor's element.

        Args:
            tensor: the half tensor, also after the user converted it to another type; has the shape of ``full``.

        Returns:
            A tensor of the wider type of the two, at least float32.
        """
        return unrounded(tensor, self.full, [self.dtype])

    @torch.no_grad()
    def load(self, half: Tensor, values: Tensor) -> None:
        """Copies loaded values to ``full``, except where the half tensor holds something else than them, rounded.

        Args:
            half: the half tensor, after the load.
            values: the values that were loaded into it, before rounding.
        """
        if values.shape == (1,) and half.dim() == 0:  # old versions of torch saved scalars in this shape
            values = values[0]
        if values.shape == half.shape == self.full.shape and half.dtype is self.dtype:
            values = values.to(half.device)
            was_loaded = values.to(half.dtype).view(torch.int16) == half.view(torch.int16)
            self.full.copy_(torch.where(was_loaded, values.float(), self.values(half)))
            self.note(half)


@torch.no_grad()
def unrounded(tensor: Tensor, full: Tensor, dtypes: Iterable[torch.dtype]) -> Tensor:
    """Returns a tensor's values; takes an element from ``full`` if that rounds to the tensor's element.

    Args:
        tensor: the rounded values, some of which user code may have changed; of any type now.
        full: the values before they were rounded, of the same shape.
        dtypes: the types that they may have been rounded to.

    Returns:
        A tensor of the wider type of the two.
    """
    full = full.to(tensor.device)
    dtype = torch.promote_types(full.dtype, tensor.dtype)
    is_same = torch.stack([full.to(each).to(tensor.dtype) == tensor for each in dtypes]).any(dim=0)
    return torch.where(is_same, full.to(dtype), tensor.to(dtype))


def check_as_converted(
    half: Tensor, dtype: torch.dtype, shape: torch.Size, name_of: Callable[[Tensor], str] | None = None
) -> None:
    """Raises `UsageError` if a half tensor has another type or shape than when amp began to keep what it lacks."""
    if half.dtype is not dtype or half.shape != shape:
        name = "" if name_of is None else f"{name_of(half)}: "
        raise UsageError(
            f"{name}a half tensor of shape {tuple(shape)} became {half.dtype} of shape {tuple(half.shape)} "
            "after amp.initialize, which keeps float32 values of it. Type amp.deinitialize() before converting a "
            "model, and amp.initialize afterwards."
        )
