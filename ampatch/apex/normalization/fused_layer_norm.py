"""Apex's layer and RMS normalization, built on torch's functions, which have fused kernels too.

Must not cast unless torch's functions need it. Under O1 amp casts, since these modules call torch's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampatch.errors import OptionError

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Applies layer normalization (Ba, Kiros and Hinton, 2016) without parameters.

    Args:
        input: tensor of shape (*, *normalized_shape).
        normalized_shape: last dimensions of ``input``, over which mean and variance are taken.
        eps: term added to the variance.
        memory_efficient: ignored.

    Returns:
        A tensor like ``input``; float32 under O1.
    """
    return F.layer_norm(input, _as_list(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Applies `fused_layer_norm`, multiplies by ``weight``, and adds ``bias``.

    Args:
        input: tensor of shape (*, *normalized_shape).
        weight: tensor of shape ``normalized_shape``.
        bias: tensor like ``weight``, or None.
        normalized_shape: last dimensions of ``input``, over which mean and variance are taken.
        eps: term added to the variance.
        memory_efficient: ignored.

    Returns:
        A tensor like ``input``; float32 under O1.
    """
    return F.layer_norm(input, _as_list(normalized_shape), weight, bias, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Applies `fused_layer_norm_affine` to an input of any floating-point dtype; the result has the weight's dtype.

    Args:
        input: floating-point tensor of shape (*, *normalized_shape).
        weight: tensor of shape ``normalized_shape``.
        bias: tensor like ``weight``, or None.
        normalized_shape: last dimensions of ``input``, over which mean and variance are taken.
        eps: term added to the variance.
        memory_efficient: ignored.

    Returns:
        A tensor of the shape of ``input`` and the dtype of ``weight``, under O1 too.
    """
    input, wide_weight, wide_bias = _promoted(input, weight, bias)
    return F.layer_norm(input, _as_list(normalized_shape), wide_weight, wide_bias, eps).to(weight.dtype)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Applies RMS normalization (Zhang and Sennrich, 2019) without parameters.

    Args:
        input: tensor of shape (*, *normalized_shape).
        normalized_shape: last dimensions of ``input``, over which the mean of squares is taken.
        eps: term added to that mean; None for the machine epsilon.
        memory_efficient: ignored.

    Returns:
        A tensor like ``input``; float32 under O1.
    """
    return F.rms_norm(input, _as_list(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Applies `fused_rms_norm`, and multiplies by ``weight``.

    Args:
        input: tensor of shape (*, *normalized_shape).
        weight: tensor of shape ``normalized_shape``.
        normalized_shape: last dimensions of ``input``, over which the mean of squares is taken.
        eps: term added to that mean; None for the machine epsilon.
        memory_efficient: ignored.

    Returns:
        A tensor like ``input``; float32 under O1.
    """
    return F.rms_norm(input, _as_list(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Applies `fused_rms_norm_affine` to an input of any floating-point dtype; the result has the weight's dtype.

    Args:
        input: floating-point tensor of shape (*, *normalized_shape).
        weight: tensor of shape ``normalized_shape``.
        normalized_shape: last dimensions of ``input``, over which the mean of squares is taken.
        eps: term added to that mean; None for the machine epsilon.
        memory_efficient: ignored.

    Returns:
        A tensor of the shape of ``input`` and the dtype of ``weight``, under O1 too.
    """
    input, wide_weight, _ = _promoted(input, weight, None)
    return F.rms_norm(input, _as_list(normalized_shape), wide_weight, eps).to(weight.dtype)


# Apex's autograd functions. Projects call `apply`, and some inspect the arguments of `forward`.


class FusedLayerNormFunction:
    """`fused_layer_norm`, as the ``apply`` of an autograd function."""

    apply = forward = staticmethod(fused_layer_norm)


class FusedLayerNormAffineFunction:
    """`fused_layer_norm_affine`, as the ``apply`` of an autograd function."""

    apply = forward = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction:
    """`mixed_dtype_fused_layer_norm_affine`, as the ``apply`` of an autograd function."""

    apply = forward = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormFunction:
    """`fused_rms_norm`, as the ``apply`` of an autograd function."""

    apply = forward = staticmethod(fused_rms_norm)


class FusedRMSNormAffineFunction:
    """`fused_rms_norm_affine`, as the ``apply`` of an autograd function."""

    apply = forward = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction:
    """`mixed_dtype_fused_rms_norm_affine`, as the ``apply`` of an autograd function."""

    apply = forward = staticmethod(mixed_dtype_fused_rms_norm_affine)


# Modules


class _WithApexArguments(nn.Module):
    """Base of the layers, with Apex's constructor; torch's layer comes after it among the bases."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_as_list(normalized_shape), eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_WithApexArguments, nn.LayerNorm):
    """`torch.nn.LayerNorm` with Apex's arguments.

    Args:
        normalized_shape: last dimensions of inputs, over which mean and variance are taken.
        eps: term added to the variance.
        elementwise_affine: True to have a weight and a bias of shape ``normalized_shape``.
        memory_efficient: ignored.
    """


class FusedRMSNorm(_WithApexArguments, nn.RMSNorm):
    """`torch.nn.RMSNorm` with Apex's arguments.

    Args:
        normalized_shape: last dimensions of inputs, over which the mean of squares is taken.
        eps: term added to that mean; None for the machine epsilon.
        elementwise_affine: True to have a weight of shape ``normalized_shape``.
        memory_efficient: ignored.
    """


class _AlwaysAffine(nn.Module):
    """Base of the layers whose outputs have the dtype of their parameters, so that they always have parameters."""

    def __init__(self, normalized_shape: Shape, eps: float | None = 1e-5, **options: Any) -> None:
        if not options.get("elementwise_affine", True):
            name = type(self).__name__
            raise OptionError(
                f"{name} found elementwise_affine=False; expected True, since its outputs have the dtype of its "
                f"parameters. Use {name.removeprefix('Mixed')}."
            )
        super().__init__(normalized_shape, eps, **options)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """`FusedLayerNorm` for inputs of any dtype, with outputs in the dtype of its parameters; it always has parameters.

    Args:
        normalized_shape: last dimensions of inputs, over which mean and variance are taken.
        eps: term added to the variance.
        options: ``memory_efficient``, and ``elementwise_affine``, which must be True.

    Raises:
        OptionError: ``elementwise_affine`` is False.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input, in the dtype of the parameters."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """`FusedRMSNorm` for inputs of any dtype, with outputs in the dtype of its weight; it always has a weight.

    Args:
        normalized_shape: last dimensions of inputs, over which the mean of squares is taken.
        eps: term added to that mean; None for the machine epsilon.
        options: ``memory_efficient``, and ``elementwise_affine``, which must be True.

    Raises:
        OptionError: ``elementwise_affine`` is False.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input, in the dtype of the weight."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps)


def _promoted(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns all tensors in one dtype, as torch's GPU kernels need: their own, or at least float32 if they differ."""
    if input.dtype is weight.dtype:
        return input, weight, bias
    dtype = torch.promote_types(torch.promote_types(input.dtype, weight.dtype), torch.float32)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _as_list(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)
