"""``clip_grad_norm_`` with a float32 norm. The norm of many half gradients exceeds float16, and torch's is then inf."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ampatch.half_types import HALVES

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips gradients by their total norm, in place.

    Args:
        parameters: a parameter, or several, of any floating or complex dtype.
        max_norm: the greatest norm that the gradients keep.
        norm_type: the norm's p, such as 2 or ``math.inf``.
        error_if_nonfinite: True to raise if the norm is inf or NaN.

    Returns:
        The total norm before clipping: 0-dimensional, of at least float32.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [each.grad.detach() for each in given if each.grad is not None]
    wide = [grad.float() if grad.dtype in HALVES else grad for grad in grads]
    norm = get_total_norm(wide, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(given, max_norm, norm)
    return norm
