"""Warns of a step with gradients that no loss scale was told of, and that no other scaler judges.

Owns the texts of this warning. Must change neither gradients nor scales.
"""

from __future__ import annotations

from ampatch.errors import warn
from ampatch.native import kernels
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.optimizer_gradients import GradientMark, OptimizerGradients
from ampatch.tracing import is_capturing
from ampatch.weights.optimizer_state import gradients_of

#: The warning about gradients that no scaler has checked; the placeholders name the step, and what to type.
NO_SCALE = (
    "{} that no amp.scale_loss was told of: small ones are lost in half precision, and nobody has looked whether "
    "others overflowed. Type: {}; or set loss_scale=1 if none is to be scaled."
)

#: What users of the core type for a backward pass with a scale.
SCALED_BACKWARD = (
    "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(), with every optimizer that gets "
    "gradients in it"
)


def is_judged(optimizer: object, uses_by_hand: int) -> bool:
    """Returns True if a scaler of the user's judges an optimizer's gradients.

    Args:
        optimizer: the optimizer: a GradScaler sets ``found_inf`` on it.
        uses_by_hand: `LossScaler.uses_by_hand` of an earlier moment, as an `amp.LossScaler` does not know optimizers.
    """
    return getattr(optimizer, "found_inf", None) is not None or LossScaler.uses_by_hand > uses_by_hand


class MissingScale:
    """Looks for gradients of one optimizer that came from no block.

    Args:
        gradients: the optimizer's gradients.
        warns: whether its losses are to be scaled.

    Attributes:
        warns: True until it has warned: a loop without ``amp.scale_loss`` lacks it in every step.
        has_other_scale: True if another scaler judges the gradients of the next step, so that it needs no warning.
        scaled_backward: what its user types for a backward pass with a scale; adapters of frameworks set it.
    """

    scaled_backward = SCALED_BACKWARD

    def __init__(self, gradients: OptimizerGradients, warns: bool) -> None:
        self.warns, self.has_other_scale = warns, False
        self._gradients = gradients
        self._uses_by_hand = LossScaler.uses_by_hand
        self._known: GradientMark | None = None  # gradients from before amp, or of the last step

    def note_existing(self) -> None:
        """Notes that the gradients that are there now need no scale."""
        self._known = GradientMark(self._gradients.updated)

    def look(self, before_closure: bool = False) -> None:
        """Warns once if the next step uses gradients that came from no block and no other scaler.

        Args:
            before_closure: whether a closure runs first, which may clear the gradients; then they are checked after it.
        """
        gradients, optimizer = self._gradients, self._gradients.updated.optimizer()
        is_known = self.has_other_scale or is_judged(optimizer, self._uses_by_hand) or bool(gradients.verdicts.pending)
        self.has_other_scale, self._uses_by_hand = False, LossScaler.uses_by_hand
        now, last, self._known = GradientMark(gradients.updated), self._known, None
        if now.grad() is None or is_capturing():  # nothing can be read from the device
            return
        is_known = is_known or now.is_still(last)
        if before_closure and not is_known:
            return
        grads = () if is_known else gradients_of(gradients.updated.model_parameters())
        if any(bool(kernels.values_of(each).any()) for each in grads):
            self.warns = False
            warn(NO_SCALE.format(f"this {type(optimizer).__name__} steps with gradients", self.scaled_backward))
        self._known = now
