"""Apex's functions that flatten tensors into one tensor; torch does the work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ampatch.torch_private.tensors import flatten_dense_tensors, unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the elements of all tensors in one tensor, one after the other.

    Args:
        tensors: dense tensors of one dtype and any shapes.

    Returns:
        A 1-dimensional copy; for a single contiguous tensor, a view.
    """
    return flatten_dense_tensors(tuple(tensors))  # type: ignore[no-any-return]


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Splits a flat tensor into tensors; the inverse of `flatten`.

    Args:
        flat: 1-dimensional tensor with as many elements as ``tensors`` together.
        tensors: tensors whose shapes the result gets.

    Returns:
        Views of ``flat``.
    """
    return unflatten_dense_tensors(flat, tuple(tensors))  # type: ignore[no-any-return]
