"""Compares half types with float32 on a device, behind `ampatch doctor --device-check`.

On some devices a half type is broken: GeForce GTX 16 cards compute NaN in float16 convolutions. Owns the work that is
compared, and the bound of its error. Must not need amp to be set up, nor change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ampatch.diagnostics import tables
from ampatch.errors import OptionError
from ampatch.half_types import HALF_TYPES, HalfType

#: Errors within this multiple of a type's rounding are no fault: those of inputs, sums and results add up.
_ROUNDINGS = 16.0

_Work = tuple[Callable[..., Tensor], tuple[Sequence[int], ...]]

#: What is compared: functions with the shapes of their arguments. Sizes are those that tensor cores take, and others.
_WORK: dict[str, tuple[_Work, ...]] = {
    "matrix products": (
        (torch.matmul, ((64, 128), (128, 64))),
        (torch.matmul, ((3, 33, 65), (3, 65, 17))),
        (F.linear, ((32, 64), (96, 64), (96,))),
    ),
    "convolutions": (
        (F.conv2d, ((2, 3, 33, 33), (16, 3, 3, 3), (16,))),
        (F.conv2d, ((2, 32, 16, 16), (64, 32, 3, 3), (64,))),
        (F.conv2d, ((2, 64, 16, 16), (64, 64, 1, 1))),
        (F.conv1d, ((2, 16, 50), (32, 16, 5))),
        (F.conv_transpose2d, ((2, 16, 8, 8), (16, 8, 2, 2))),
    ),
    "attention": (
        (F.scaled_dot_product_attention, ((2, 4, 32, 64),) * 3),
        (F.scaled_dot_product_attention, ((2, 2, 17, 24),) * 3),
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work in one half type.

    Attributes:
        half: the half type.
        work: what was computed.
        error: greatest relative error of a result or gradient, in the 2-norm; NaN if one is not finite.
        refused: torch's error, such as for a missing kernel; empty if there was none.
    """

    half: HalfType
    work: str
    error: float = 0.0
    refused: str = ""

    @property
    def is_safe(self) -> bool:
        """True if the error is rounding; False for NaN."""
        return not self.refused and self.error <= _ROUNDINGS * torch.finfo(self.half.dtype).eps

    @property
    def verdict(self) -> str:
        """Says in a few words how the type computes."""
        if self.refused:
            return f"torch raised: {self.refused}"
        if self.is_safe:
            return "as float32"
        return "wrong" if self.error < float("inf") else "inf or NaN"


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """The rows of one device."""

    device: torch.device
    rows: tuple[Row, ...]

    @property
    def safe(self) -> list[str]:
        """Returns the names of the half types in which everything is as in float32."""
        unsafe = {row.half.name for row in self.rows if not row.is_safe}
        return [half.name for half in HALF_TYPES.values() if half.name not in unsafe]

    def lines(self) -> Iterator[str]:
        """Yields the rows as a table, and what follows from them."""
        columns = (
            tables.Column("half type", lambda row: row.half.name),
            tables.Column("work", lambda row: row.work),
            tables.Column("error", lambda row: "-" if row.refused else f"{row.error:.2g}", is_number=True),
            tables.Column("verdict", lambda row: row.verdict),
        )
        title = f"Half types on {self.device}, beside float32"
        yield tables.printed(tables.table(title, columns, self.rows, len(self.rows)))
        told = " and ".join(f"half_dtype={name!r}" for name in self.safe)
        if told:
            yield f"Safe on {self.device}: {told}."
        else:
            yield f"No half type is safe on {self.device}. Type opt_level='O0', which trains in float32."


def check(name: str = "") -> DeviceCheck:
    """Computes in each half type on a device; takes seconds.

    Args:
        name: of the device, such as "cuda:1"; empty: the accelerator, or else the CPU.

    Raises:
        OptionError: torch cannot compute there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(name) if name else accelerator or torch.device("cpu")
        torch.ones((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"found {name!r} as a device, on which torch cannot compute ({reason}); expected one such as cuda:0 or "
            "cpu. A module to import comes before the option: ampatch doctor MODULE --device-check."
        ) from None
    return DeviceCheck(device, tuple(_row(half, work, device) for half in HALF_TYPES.values() for work in _WORK))


def _row(half: HalfType, name: str, device: torch.device) -> Row:
    errors = [0.0]
    for number, (function, shapes) in enumerate(_WORK[name]):
        generator = torch.Generator().manual_seed(number)
        tensors = [torch.randn(shape, generator=generator, device="cpu") / shape[-1] ** 0.5 for shape in shapes]
        rounded = [each.to(half.dtype) for each in tensors]
        try:
            found = _results(function, [each.to(device) for each in rounded])
        except (RuntimeError, NotImplementedError) as error:
            return Row(half, name, refused=str(error).partition("\n")[0])
        expected = _results(function, [each.float() for each in rounded])
        errors += [_error(one.float().cpu(), other) for one, other in zip(found, expected, strict=True)]
    return Row(half, name, max(errors, key=lambda error: (error != error, error)))


def _results(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the result and the gradients of its sum."""
    leaves = [each.requires_grad_() for each in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result))]


def _error(found: Tensor, expected: Tensor) -> float:
    size = torch.linalg.vector_norm(expected.double())
    return float(torch.linalg.vector_norm(found.double() - expected.double()) / size.clamp(min=1e-30))
