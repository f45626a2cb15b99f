"""Apex's kernels of layer and RMS normalization, for projects with their own autograd functions.

The functions compute in float32 or wider, and autograd records nothing. They compute statistics again in the backward
pass. Must not cast by the lists: a result has the same dtype as from Apex's kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.apex.normalization.fused_layer_norm import (
    Shape,
    fused_layer_norm,
    fused_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from ampatch.errors import OptionError
from ampatch.switch import WithoutCasts

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]


@WithoutCasts()
@torch.no_grad()
def forward(input: Tensor, normalized_shape: Shape, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normalized input, and the mean and the inverse standard deviation of each row."""
    return fused_layer_norm(input, normalized_shape, eps), *_statistics(input, normalized_shape, eps)


@WithoutCasts()
@torch.no_grad()
def forward_affine(
    input: Tensor, normalized_shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `forward` does, with the output times ``weight`` plus ``bias``, in the dtype of the input."""
    output, mean, invvar = forward_affine_mixed_dtypes(input, normalized_shape, weight, bias, eps)
    return output.to(input.dtype), mean, invvar


@WithoutCasts()
@torch.no_grad()
def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `forward_affine` does, with the output in the dtype of ``weight``."""
    output = mixed_dtype_fused_layer_norm_affine(input, weight, bias, normalized_shape, eps)
    return output, *_statistics(input, normalized_shape, eps)


@WithoutCasts()
@torch.no_grad()
def rms_forward(input: Tensor, normalized_shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the input divided by its root mean square, and the inverse of that for each row."""
    return fused_rms_norm(input, normalized_shape, eps), _inverse_rms(input, normalized_shape, eps)


@WithoutCasts()
@torch.no_grad()
def rms_forward_affine(input: Tensor, normalized_shape: Shape, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns what `rms_forward` does, with the output times ``weight``, in the dtype of the input."""
    output, invvar = rms_forward_affine_mixed_dtypes(input, normalized_shape, weight, eps)
    return output.to(input.dtype), invvar


@WithoutCasts()
@torch.no_grad()
def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns what `rms_forward_affine` does, with the output in the dtype of ``weight``."""
    output = mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)
    return output, _inverse_rms(input, normalized_shape, eps)


def backward(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the gradient of `forward`'s input; ignores ``mean`` and ``invvar``.

    Raises:
        OptionError: ``memory_efficient`` is set, in which case Apex passes the output as ``input``.
    """
    normalize = functools.partial(fused_layer_norm, normalized_shape=normalized_shape, eps=eps)
    return _gradients(normalize, grad_output, memory_efficient, input)[0]


def backward_affine(
    grad_output: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the gradients of the input, weight and bias of `forward_affine`; ignores ``mean`` and ``invvar``.

    Raises:
        OptionError: ``memory_efficient`` is set.
    """
    normalize = functools.partial(mixed_dtype_fused_layer_norm_affine, normalized_shape=normalized_shape, eps=eps)
    return _gradients(normalize, grad_output, memory_efficient, input, weight, bias)


def rms_backward(
    grad_output: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the gradient of `rms_forward`'s input; ignores ``invvar``.

    Raises:
        OptionError: ``memory_efficient`` is set.
    """
    normalize = functools.partial(fused_rms_norm, normalized_shape=normalized_shape, eps=eps)
    return _gradients(normalize, grad_output, memory_efficient, input)[0]


def rms_backward_affine(
    grad_output: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the gradients of the input and weight of `rms_forward_affine`; ignores ``invvar``.

    Raises:
        OptionError: ``memory_efficient`` is set.
    """
    normalize = functools.partial(mixed_dtype_fused_rms_norm_affine, normalized_shape=normalized_shape, eps=eps)
    return _gradients(normalize, grad_output, memory_efficient, input, weight)


@WithoutCasts()
def _gradients(
    normalize: Callable[..., Tensor], grad_output: Tensor, memory_efficient: bool, *inputs: Tensor
) -> tuple[Tensor, ...]:
    if memory_efficient:
        raise OptionError(
            "found memory_efficient=True; expected False: fused_layer_norm_cuda computes gradients from the input, not "
            "from the output. Type False, or FusedLayerNorm of apex.normalization."
        )
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in inputs]
        output = normalize(*leaves)
    return torch.autograd.grad(output, leaves, grad_output.to(output.dtype))


def _statistics(input: Tensor, normalized_shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_rows(input, normalized_shape), dim=1, correction=0)
    return mean, (variance + eps).rsqrt()


def _inverse_rms(input: Tensor, normalized_shape: Shape, eps: float) -> Tensor:
    return (_rows(input, normalized_shape).square().mean(dim=1) + eps).rsqrt()


def _rows(input: Tensor, normalized_shape: Shape) -> Tensor:
    """Returns the input in at least float32, as a matrix with a row for each mean."""
    size = normalized_shape if isinstance(normalized_shape, int) else math.prod(normalized_shape)
    return input.reshape(-1, size).to(torch.promote_types(input.dtype, torch.float32))
