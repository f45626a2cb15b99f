"""Half gradients that are float32 for as long as they are scaled, since scaled half gradients could overflow.

Owns how a gradient and its parameter's ``grad_dtype`` are changed and restored. Must not know scales.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WidenedGradient:
    """The gradient of one parameter, of another type than the parameter until `narrow` is called.

    Args:
        parameter: the parameter, with a gradient.
        dtype: the new type of the gradient.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        grad = parameter.grad
        assert grad is not None
        self._parameter, self._own, self._before = parameter, parameter.dtype, grad.dtype
        allowed = parameter.grad_dtype
        # The present type would stay fixed, and would be wrong after model.float(). None allows any type.
        self._allowed = None if allowed is self._own else allowed
        _set_gradient(parameter, grad.to(dtype), dtype)

    def narrow(self) -> None:
        """Restores the type; if the parameter was converted meanwhile, the gradient gets the parameter's."""
        parameter, is_same = self._parameter, self._parameter.dtype is self._own
        grad, dtype = parameter.grad, self._before if is_same else parameter.dtype
        _set_gradient(parameter, None if grad is None else grad.to(dtype), self._allowed if is_same else None)


def _set_gradient(parameter: Tensor, grad: Tensor | None, allowed: torch.dtype | None) -> None:
    """Replaces a gradient by one of another dtype: torch refuses to change ``grad_dtype`` while there is a gradient."""
    parameter.grad = None
    parameter.grad_dtype = allowed
    parameter.grad = grad
