"""Bfloat16 parameters with int16 remainders: the two together are a float32 value, bit for bit.

Remainders are known from Split SGD of Intel's extension for PyTorch, and from ``store_param_remainders`` of Apex's
distributed Adam.

Owns a parameter's remainder, and notices writes to the parameter, whose values then count alone. Must know neither
optimizers nor when they step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.errors import UsageError
from ampatch.native import kernels


class SplitWeight:
    """The float32 value of one bfloat16 parameter.

    Takes the place of `ampatch.weights.kept_values.Kept`, which keeps float32 values as a tensor.

    Args:
        half: the parameter; held weakly.
        full: its float32 value, of the same shape and strides.

    Attributes:
        remainder: what the parameter lacks, int16.
        fingerprint: of the parameter when the remainder last was its own: 1-dimensional, 1 element.
        moment: the parameter's version counter and address at that moment.
        may_be_written: True if user code can write to the parameter in ways that torch does not count.
        is_unannounced: True if nothing tells whether it can.
    """

    __slots__ = ("_half", "fingerprint", "is_unannounced", "may_be_written", "moment", "remainder")

    dtype = torch.bfloat16

    def __init__(self, half: Tensor, full: Tensor) -> None:
        self._half = weakref.ref(half)
        self.remainder = torch.empty_like(half, dtype=torch.int16, requires_grad=False)
        self.may_be_written = self.is_unannounced = False
        self.set(half, full)

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.remainder.shape

    @torch.no_grad()
    def set(self, half: Tensor, full: Tensor) -> None:
        """Writes a float32 value to the parameter and the remainder."""
        kernels.split([full.detach()], [half.detach()], [self.remainder])
        self.note(half)

    def take_gradient(self) -> None:
        """Returns None: a float32 value that is no tensor has no gradient."""

    def note(self, half: Tensor, fingerprint: Tensor | None = None) -> None:
        """Records that the remainder is the parameter's own; ``fingerprint`` is the parameter's, if it is known."""
        self.moment = half._version, half.data_ptr()
        self.fingerprint = fingerprint_of(half) if fingerprint is None else fingerprint

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
        if (self.remainder.device, self.remainder.stride()) == (half.device, half.stride()):
            self.remainder.zero_()  # in place, as a CUDA graph may have its address
        else:
            self.remainder = torch.zeros_like(half, dtype=torch.int16, requires_grad=False)
        self.note(half)
        return True

    def is_in_sync(self, half: Tensor) -> bool:
        """Returns True if the parameter has the values that it had at `note`; may sync with the device."""
        if not self.may_be_written and self.moment == (half._version, half.data_ptr()):
            return True
        if half.dtype is not self.dtype:
            return False
        self._follow(half)
        is_same = self.has_fingerprint_of(half)
        if is_same:
            self.note(half)
        return is_same

    @torch.inference_mode(False)
    @torch.no_grad()
    def _follow(self, half: Tensor) -> None:
        """Lays the remainder out as a parameter that was moved, or given another layout, but not written to."""
        if (self.remainder.device, self.remainder.stride()) == (half.device, half.stride()):
            return
        as_before = torch.empty_like(self.remainder, dtype=self.dtype, device=half.device).copy_(half)
        if self.has_fingerprint_of(as_before):
            self.remainder = torch.empty_like(half, dtype=torch.int16, requires_grad=False).copy_(self.remainder)
            self.fingerprint = fingerprint_of(half)

    def has_fingerprint_of(self, half: Tensor) -> bool:
        """Returns True if a bfloat16 tensor has the values that the parameter had at `note`; syncs with the device."""
        return torch.equal(fingerprint_of(half), self.fingerprint.to(half.device))

    @property
    def full(self) -> Tensor:
        """The float32 value: a new tensor."""
        half = self._half()
        assert half is not None
        return self.values(half)

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


def fingerprint_of(half: Tensor) -> Tensor:
    """Returns a hash of a parameter's elements: 1-dimensional, 1 element."""
    values = half.detach()
    return kernels.fingerprints([values]) if values.numel() else torch.zeros(1, dtype=torch.float64, device=half.device)
