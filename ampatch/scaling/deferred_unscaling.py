"""Gradients that stay scaled and unclipped until the step, where the optimizer's own kernel divides them.

Owns the divisor, and which tensors it applies to. Must not know the optimizer or the scale.
"""

from __future__ import annotations

import operator

from torch import Tensor

from ampatch.errors import warn
from ampatch.native import kernels

_VERSION = operator.attrgetter("_version")


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
        self._grads = grads
        self._versions = list(map(_VERSION, grads))

    def divide(self, there: list[Tensor]) -> None:
        """Divides in place those gradients that still exist.

        Args:
            there: the optimizer's present gradients. New ones, from a backward pass without a scale, stay unchanged.
        """
        ids = set(map(id, there))
        kernels.multiply_([grad for grad in self._grads if id(grad) in ids], self.divisor.reciprocal())

    def are(self, there: list[Tensor]) -> bool:
        """Returns True if all present gradients are among these.

        Args:
            there: the optimizer's present gradients.

        Warns:
            AmpWarning: user code has written to one of them.
        """
        is_same = len(there) == len(self._grads) and all(map(operator.is_, there, self._grads))
        if is_same and list(map(_VERSION, there)) == self._versions:  # nearly every step
            return True
        versions = dict(zip(map(id, self._grads), self._versions, strict=True))
        written = [grad for grad in there if versions.get(id(grad), grad._version) != grad._version]
        # Syncs with the device only if a version counter has changed. Zeros count as cleared.
        if any(bool(kernels.values_of(grad.detach()).any()) for grad in written):
            warn(
                "gradients were changed after amp.clip_grad_norm_, which had left them scaled, for the optimizer's own "
                "kernel to unscale and clip. Call it last before optimizer.step(), or leave delay_unscale=True out of "
                "the block before."
            )
        return all(id(grad) in versions for grad in there)
