"""Gradients that have a wider type than their parameter for a while, since half ones could overflow while scaled.

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
        fixes_type: whether later gradients of the parameter have its present type, also after ``model.float()``, and
            also if a function computes them in another one. False: they have the type in which they are computed.
            torch has no way back to the state before, in which they follow the parameter.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype, *, fixes_type: bool) -> None:
        grad = parameter.grad
        assert grad is not None
        self._parameter, self._own, self._before = parameter, parameter.dtype, grad.dtype
        allowed = parameter.grad_dtype
        self._allowed = allowed if fixes_type or allowed is not self._own else None
        _set_gradient(parameter, grad.to(dtype), dtype)

    def narrow(self) -> None:
        """Restores the type; if the parameter was converted meanwhile, the gradient gets the parameter's."""
        parameter, dtype, allowed = self._parameter, self._before, self._allowed
        if parameter.dtype is not self._own:  # as by amp.deinitialize inside the block
            dtype = parameter.dtype
            allowed = None if allowed is None else dtype
        _set_gradient(parameter, None if parameter.grad is None else parameter.grad.to(dtype), allowed)


def _set_gradient(parameter: Tensor, grad: Tensor | None, allowed: torch.dtype | None) -> None:
    """Replaces a gradient by one of another dtype: torch refuses to change ``grad_dtype`` while there is a gradient."""
    parameter.grad = None
    parameter.grad_dtype = allowed
    parameter.grad = grad
