"""Gradients that are left scaled and unclipped until a step, for the optimizer's own kernel to divide them.

Owns what they are to be divided by, and which tensors they were. Must not know the optimizer or the scale.
"""

from __future__ import annotations

from torch import Tensor

from ampatch.errors import warn
from ampatch.native import kernels


class DeferredUnscaling:
    """A division that is still to be done.

    Args:
        grads: what is to be divided; of any shape, dtype and device.
        divisor: 0-dimensional float32.
    """

    def __init__(self, grads: list[Tensor], divisor: Tensor) -> None:
        self.divisor = divisor
        self._grads = [(grad, grad._version) for grad in grads]

    def divide(self, there: list[Tensor]) -> None:
        """Divides those that are still there in place; others have come since, of a backward without a scale."""
        ids = set(map(id, there))
        kernels.multiply_([grad for grad, _ in self._grads if id(grad) in ids], self.divisor.reciprocal())

    def are(self, there: list[Tensor]) -> bool:
        """Returns whether what is there now is nothing but these.

        Warns:
            AmpWarning: somebody has written to one of them.
        """
        versions = {id(grad): version for grad, version in self._grads}
        written = [grad for grad in there if versions.get(id(grad), grad._version) != grad._version]
        # Asked of the device only where somebody has written to gradients. Zeros are cleared ones.
        if any(bool(kernels.values_of(grad.detach()).any()) for grad in written):
            warn(
                "gradients were changed after amp.clip_grad_norm_, which had left them scaled, for the optimizer's own "
                "kernel to unscale and clip. Call it last before optimizer.step(), or leave delay_unscale=True out of "
                "the block before."
            )
        return all(id(grad) in versions for grad in there)
