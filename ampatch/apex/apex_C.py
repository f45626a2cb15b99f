"""Apex's flattening of tensors into one, which is torch's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the elements of dense tensors of one dtype, one tensor after the other.

    Args:
        tensors: of any shapes.

    Returns:
        A 1-dimensional copy; of a single tensor a view, where its memory is contiguous.
    """
    return _flatten_dense_tensors(tuple(tensors))  # type: ignore[no-any-return]


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors that `flatten` made one of.

    Args:
        flat: 1-dimensional, with as many elements as all tensors together.
        tensors: whose shapes they are to have.

    Returns:
        Views of ``flat``.
    """
    return _unflatten_dense_tensors(flat, tuple(tensors))  # type: ignore[no-any-return]
