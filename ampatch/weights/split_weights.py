"""Bfloat16 parameters with int16 remainders: the two together are a float32 value, bit for bit.

Remainders are known from Split SGD of Intel's extension for PyTorch, and from ``store_param_remainders`` of Apex's
distributed Adam.

Owns the remainders, and notices writes to the parameters, whose values then count alone. The values tell, as torch does
not count every write. Must know neither optimizers nor when they step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ampatch.errors import warn
from ampatch.grouping import grouped
from ampatch.native import kernels
from ampatch.tracing import is_capturing
from ampatch.weights.kept_values import check_as_converted

_MOST_TIMES = 3  # that user code may write between steps before it is warned


class SplitWeight:
    """The float32 value of one bfloat16 parameter.

    Takes the place of `ampatch.weights.kept_values.Kept`, which keeps float32 values as a tensor.

    Args:
        half: the parameter; held weakly.
        full: its float32 value, of the same shape and strides.

    Attributes:
        remainder: what the parameter lacks, int16.
        fingerprint: of the parameter when the remainder last was its own: 1-dimensional, 1 element.
    """

    __slots__ = ("_half", "fingerprint", "remainder")

    dtype = torch.bfloat16

    def __init__(self, half: Tensor, full: Tensor) -> None:
        self._half = weakref.ref(half)
        self.remainder = torch.empty_like(half, dtype=torch.int16, requires_grad=False)
        self.set(half, full)

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.remainder.shape

    @torch.no_grad()
    def set(self, half: Tensor, full: Tensor) -> None:
        """Writes a float32 value to the parameter and the remainder."""
        kernels.split([full.detach()], [half.detach()], [self.remainder])
        self.fingerprint = fingerprint_of(half)

    def take_gradient(self) -> None:
        """Returns None: a float32 value that is no tensor has no gradient."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def synchronise(self, half: Tensor) -> bool:
        """Drops the remainder if user code has written to the parameter; returns True if it has.

        Raises:
            UsageError: the parameter was given another type or shape.
        """
        check_as_converted(half, self.dtype, self.remainder.shape)
        if self.is_in_sync(half):
            return False
        if self.has_layout_of(half):
            self.remainder.zero_()  # in place, as a CUDA graph may have its address
        else:
            self.remainder = torch.zeros_like(half, dtype=torch.int16, requires_grad=False)
        self.fingerprint = fingerprint_of(half)
        return True

    def is_in_sync(self, half: Tensor) -> bool:
        """Returns True if the remainder is still the parameter's own; syncs with the device."""
        if half.dtype is not self.dtype:
            return False
        self._follow(half)
        return self.has_fingerprint_of(half)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _follow(self, half: Tensor) -> None:
        """Lays the remainder out as a parameter that was moved, or given another layout, but not written to."""
        if self.has_layout_of(half):
            return
        as_before = torch.empty_like(self.remainder, dtype=self.dtype, device=half.device).copy_(half)
        if self.has_fingerprint_of(as_before):
            self.remainder = torch.empty_like(half, dtype=torch.int16, requires_grad=False).copy_(self.remainder)
            self.fingerprint = fingerprint_of(half)

    def has_layout_of(self, half: Tensor) -> bool:
        """Returns True if the remainder is laid out as the parameter is now."""
        return (self.remainder.device, self.remainder.stride()) == (half.device, half.stride())

    def has_fingerprint_of(self, half: Tensor) -> bool:
        """Returns True if the remainder is that of a bfloat16 tensor's values; syncs with the device."""
        return torch.equal(fingerprint_of(half), self.fingerprint.to(half.device))

    @property
    def full(self) -> Tensor:
        """The float32 value, with what user code has written to the parameter: a new tensor; syncs with the device.

        A step decides on the remainder: until then user code may take back what it has written.
        """
        half = self._half()
        assert half is not None
        return half.detach().float() if half.dtype is self.dtype and not self.is_in_sync(half) else self.values(half)

    @torch.no_grad()
    def values(self, tensor: Tensor) -> Tensor:
        """Returns the float32 value of the parameter, also after the user converted it to a wider type.

        Elements that were written since count as they are, and a parameter that stands for its master, too.
        """
        half = tensor.detach().to(self.dtype)
        is_other = tensor.dtype is not self.dtype
        dtype = torch.promote_types(torch.float32, tensor.dtype)
        if is_other and not self.has_fingerprint_of(half):
            return tensor.detach().to(dtype)
        full = torch.empty_like(half, dtype=torch.float32)
        kernels.join([half], [self.remainder.to(half.device)], [full])
        return torch.where(half.to(tensor.dtype) == tensor, full.to(dtype), tensor.to(dtype)) if is_other else full

    @torch.no_grad()
    def load(self, half: Tensor, values: Tensor) -> None:
        """Takes loaded values, except where the parameter holds something else than them, rounded.

        Args:
            half: the parameter, after the load.
            values: the values that were loaded into it, before rounding.
        """
        if values.shape == (1,) and half.dim() == 0:  # old versions of torch saved scalars in this shape
            values = values[0]
        if values.shape == half.shape and half.dtype is self.dtype:
            full, values = half.detach().float(), values.to(half.device)
            self.set(half, torch.where(values.to(self.dtype) == half, values.float(), full))


class Split:
    """Masters of which an int16 remainder is left beside each parameter: the two are the master, bit for bit.

    Args:
        name_of: function that returns a parameter's name, for messages.
    """

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        self._splits: dict[int, tuple[Tensor, SplitWeight]] = {}  # by id of the parameter: itself, and its remainder
        self._filled: list[tuple[Tensor, SplitWeight]] = []  # those that have elements
        self._times_written = 0  # looks that found writes

    def add(self, half: Tensor, split: SplitWeight | None) -> None:
        """Adds a parameter, which has its remainder."""
        assert split is not None
        self._splits[id(half)] = half, split
        if half.numel():
            self._filled.append((half, split))

    def clear(self) -> None:
        """Forgets all parameters."""
        self._splits.clear()
        self._filled.clear()

    def full_of(self, half: Tensor) -> Tensor:
        """Returns a parameter's float32 value, as a new tensor."""
        return self._splits[id(half)][1].full

    def set(self, half: Tensor, full: Tensor) -> None:
        """Gives a parameter a float32 value."""
        self._splits[id(half)][1].set(half, full.to(half.device).float())

    def join(self, halves: list[Tensor], masters: list[Tensor]) -> None:
        """Puts masters together."""
        kernels.join(halves, [self._splits[id(half)][1].remainder for half in halves], masters)

    def write(self, masters: list[Tensor], memory: list[Tensor], halves: list[Tensor], *, to_nearest: bool) -> None:  # noqa: ARG002
        """Writes masters to their parameters and remainders."""
        pairs = [self._splits[id(half)] for half in halves]
        try:
            kernels.split(masters, memory, [split.remainder for _, split in pairs])
        finally:  # also after Ctrl-C: otherwise the remainders would seem to be of other values
            for some in _by_device(pairs):
                prints = kernels.fingerprints([half for half, _ in some])
                for (_, split), own in zip(some, prints.split(1), strict=True):
                    split.fingerprint = own

    def rounded(self, master: Tensor) -> Tensor:
        """Returns what `write` writes of a master."""
        half = torch.empty_like(master, dtype=torch.bfloat16)
        kernels.split([master], [half], [torch.empty_like(half, dtype=torch.int16)])
        return half

    # What user code writes to parameters

    def note_one(self, half: Tensor) -> None:
        """Does nothing: a parameter that was loaded has its remainder."""

    def take_writes(self) -> None:
        """Drops the remainders of parameters that user code has written to; syncs with each device.

        Raises:
            UsageError: a parameter was given another type.

        Warns:
            AmpWarning: user code writes to parameters again and again.
        """
        if is_capturing():  # nothing can be read from the device; it was looked at before the capture
            return
        differing = [some for some in _by_device(self._filled) if _differ(some)]
        written = [half for some in differing for half, split in some if split.synchronise(half)]
        self._times_written += bool(written)
        if written and self._times_written == _MOST_TIMES:
            warn(
                f"user code writes to weights between steps, such as {self._name_of(written[0])}, again and again. A "
                "split weight then loses what bfloat16 cannot hold of its updates. Type True in the place of 'split', "
                "which keeps the masters; or load values by load_state_dict."
            )


def _differ(pairs: list[tuple[Tensor, SplitWeight]]) -> bool:
    """Returns True if a remainder is no longer that of its parameter, of parameters on one device; reads it once."""
    if not all(split.has_layout_of(half) for half, split in pairs):
        return True
    now = kernels.fingerprints([half.detach() for half, _ in pairs])
    return not torch.equal(now, torch.cat([split.fingerprint.to(now.device) for _, split in pairs]))


def _by_device(pairs: Iterable[tuple[Tensor, SplitWeight]]) -> Iterable[list[tuple[Tensor, SplitWeight]]]:
    """Returns the parameters that have elements, with their remainders, by device."""
    return grouped((half.device, (half, split)) for half, split in pairs if half.numel()).values()


def fingerprint_of(half: Tensor) -> Tensor:
    """Returns a hash of a parameter's elements: 1-dimensional, 1 element."""
    values = half.detach()
    return kernels.fingerprints([values]) if values.numel() else torch.zeros(1, dtype=torch.float64, device=half.device)
