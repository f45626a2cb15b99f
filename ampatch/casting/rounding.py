"""Rounds tensors to the numbers of a format, with torch's own operators: so a function computes as if in that format.

Owns the arithmetic, and the two nodes of autograd around an emulated call. One rounds an argument and passes its
gradient on; the other passes the result on and rounds its gradient. Must ask the format's row; must not know formats by
name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ampatch.formats import Format
from ampatch.switch import Switch

_EXPONENT_BITS = 0x7F800000  # of float32
_BLOCK = 32
_LARGEST = torch.finfo(torch.float32).max


def rounded(tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """Returns the values of a tensor rounded to a format, in a type that has all of its numbers.

    A finite value becomes the nearest number, or as the row says. NaN stays NaN. inf becomes NaN, or stays inf in a
    format that has it and does not saturate: so an overflow before the call is still seen after it. In a format with a
    scale, values are multiplied by it before they are rounded, and divided by it afterwards.

    Args:
        tensor: floating tensor of any shape.
        format: the format.
        dtype: type of the result.
    """
    with Switch.disabled():  # a list may name functions that are called here
        return _scaled(tensor.to(torch.float32), format).to(dtype)


def _scaled(values: Tensor, format: Format) -> Tensor:
    """Rounds float32 values with the format's scale."""
    if not values.numel():
        return values
    if format.scale == "block":
        return _in_blocks(values, format)
    if format.scale == "none":
        return _rounded(values, format)
    scale = scale_for(largest_of(values, format), format)
    return _rounded(values * scale, format).div_(scale)


def largest_of(values: Tensor, format: Format) -> Tensor:
    """Returns the largest magnitudes of values that share a scale.

    Args:
        values: float32 tensor of any shape, not empty.
        format: format with a scale for all of a tensor, or for each vector along the last dimension.

    Returns:
        A float32 tensor: without dimensions, or of the shape of ``values`` with a last dimension of 1. It is inf or NaN
        where values are.
    """
    is_of_rows = format.scale == "row" and values.dim() > 0
    largest: Tensor = torch.linalg.vector_norm(values, math.inf, -1 if is_of_rows else None, keepdim=is_of_rows)
    return largest


def scale_for(largest: Tensor, format: Format) -> Tensor:
    """Returns the scales that map magnitudes to the format's largest number; 1 for 0, inf and NaN."""
    scale = (format.largest / largest).clamp(max=_LARGEST)
    return torch.where(largest.isfinite() & (largest > 0), scale, 1.0)


def _in_blocks(values: Tensor, format: Format) -> Tensor:
    """Rounds each 32 values along the last dimension with a scale that is a power of two."""
    shape = values.shape
    rows = values.reshape(-1, shape[-1] if shape else 1)
    width = rows.shape[1]
    if width % _BLOCK:
        rows = torch.nn.functional.pad(rows, (0, -width % _BLOCK))
    blocks = rows.reshape(len(rows), -1, _BLOCK)
    power = _powers(torch.linalg.vector_norm(blocks, math.inf, -1, keepdim=True))
    # The scale is a number of E8M0: no less than 2**-127, and 1 for a block of zeros, or with inf or NaN.
    scale = (math.ldexp(1.0, format.most_exponent) / power).clamp(max=math.ldexp(1.0, 127))
    scale = torch.where(power.isfinite() & (power > 0), scale, 1.0)
    done = _rounded(blocks * scale, format).div_(scale)
    return done.reshape(len(rows), -1)[:, :width].reshape(shape)


def _powers(values: Tensor) -> Tensor:
    """Returns 2**floor(log2(abs(x))) for float32 values; 0 for zeros and subnormals, inf for inf and NaN."""
    return (values.contiguous().view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def _rounded(values: Tensor, format: Format) -> Tensor:
    """Rounds float32 values, without a scale."""
    # Between two powers of two, the numbers of a format are multiples of one step. Steps are powers of two, so the
    # quotient, which has at most 24 bits, and the product are exact. inf passes: it has the step of the largest number.
    least, most = math.ldexp(1.0, format.least_exponent), math.ldexp(1.0, format.most_exponent)
    step = _powers(values).clamp(least, most).mul_(math.ldexp(1.0, -format.mantissa))
    quotient = values / step
    if format.rounding == "nearest":
        quotient = quotient.round_()  # halves to even
    elif format.rounding == "zero":
        quotient = quotient.trunc_()
    else:
        below = quotient.floor()
        quotient = below + (torch.rand_like(quotient) < quotient - below)
    result = quotient.mul_(step)
    if format.specials == "zero":
        result.add_(0.0)  # -0 becomes 0
    largest = format.largest
    if format.overflow == "saturate" or format.rounding == "zero":
        # The difference is 0, and NaN for inf and NaN. Without it, saturation would hide an earlier overflow.
        bounded = result.clamp(-largest, largest).sub_(values - values)
        is_inf_kept = format.has_inf and format.overflow == "inf"
        return torch.where(values.isinf(), values, bounded) if is_inf_kept else bounded
    # All these products overflow, and no operator is given inf: so a trace names this call.
    return torch.where(result.abs() > largest, result * _LARGEST * (1.0 if format.has_inf else 0.0), result)


def as_argument(tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """Returns an argument of an emulated call, rounded as by `rounded`; its gradient passes unchanged."""
    result: Tensor = _Argument.apply(tensor, format, dtype)  # type: ignore[no-untyped-call]
    return result


def as_result(tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """Returns the result of an emulated call in ``dtype``; its gradient is rounded to the format."""
    result: Tensor = _Result.apply(tensor, format, dtype)  # type: ignore[no-untyped-call]
    return result


class _Argument(torch.autograd.Function):
    """A straight-through estimator (Bengio et al., Estimating or Propagating Gradients, 2013)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        """Returns the rounded values in ``dtype``."""
        return rounded(tensor, format, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - an interface
        """Notes the type of the gradient."""
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient in the argument's type."""
        return grad.to(ctx.dtype), None, None


class _Result(torch.autograd.Function):
    """Rounds the gradient that enters the backward pass of an emulated call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:  # noqa: ARG004 - for the gradient
        """Returns the values in ``dtype``, in memory of their own: autograd forbids to write to a view that it made."""
        return tensor.to(dtype, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - an interface
        """Notes the format, and the type that the call has computed in."""
        tensor, ctx.format, _ = inputs
        ctx.dtype = tensor.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Returns the rounded gradient in the type that the call has computed in."""
        # A second backward pass takes this rounding, too, as if it were none.
        round_ = as_argument if torch.is_grad_enabled() else rounded
        return round_(grad, ctx.format, ctx.dtype), None, None
