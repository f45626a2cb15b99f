"""Gradients that stay scaled and unclipped until the step, where the optimizer's own kernel divides them.

Owns the divisor, and which tensors it applies to. Must not know the optimizer or the scale.
"""

from __future__ import annotations

from torch import Tensor

from ampatch.errors import warn
from ampatch.native import kernels


class DeferredUnscaling:
    """A division of gradients that is still to be done.

    Args:
        grads: gradients of any shape, dtype and device.
        divisor: 0-dimensional float32.

    Attributes:
        divisor: as given.
    """

    def __init__(self, grads: list[Tensor], divisor: Tensor) -> None:
        self.divisor = divisor
        self._noted = {id(grad): (grad, grad._version) for grad in grads}  # kept alive, so that the ids stay theirs

    def divide(self, there: list[Tensor]) -> None:
        """Divides in place those gradients that still exist.

        Args:
            there: the optimizer's present gradients. New ones, from a backward pass without a scale, stay unchanged.
        """
        kernels.multiply_([grad for grad in there if id(grad) in self._noted], self.divisor.reciprocal())

    def are(self, there: list[Tensor]) -> bool:
        """Returns True if all present gradients are among these.

        Args:
            there: the optimizer's present gradients.

        Warns:
            AmpWarning: user code has written to one of them.
        """
        noted = [(grad, self._noted[id(grad)][1]) for grad in there if id(grad) in self._noted]
        written = [grad for grad, version in noted if version != grad._version]
        # Syncs with the device only if a version counter has changed. Zeros count as cleared.
        if any(bool(kernels.values_of(grad.detach()).any()) for grad in written):
            warn(
                "gradients were changed after amp.clip_grad_norm_, which had left them scaled, for the optimizer's own "
                "kernel to unscale and clip. Call it last before optimizer.step(), or leave delay_unscale=True out of "
                "the block before."
            )
        return len(noted) == len(there)
