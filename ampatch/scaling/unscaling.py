"""The gradients of one use of a loss scale: scales those that exist, unscales all, and finds overflows on all ranks.

Must not know where the backward pass began or ended: a block calls it, and so do clipping and ``amp.unscale_``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from ampatch.distributed import Ranks
from ampatch.native import kernels
from ampatch.scaling import step_observers
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.scale_use import ScaleUse
from ampatch.tracing import is_capturing
from ampatch.weights.optimizer_state import gradients_of, has_gradients


class Unscaling:
    """Unscales the gradients of one use of a scale.

    Args:
        scale_use: the use of a scale.
        gradients: those multiplied by it, one for each optimizer.
        ranks: the ranks that may share them.
    """

    def __init__(self, scale_use: ScaleUse, gradients: Sequence[OptimizerGradients], ranks: Ranks) -> None:
        self.scale_use = scale_use
        self.gradients = gradients
        self._ranks = ranks

    def scale_existing(self, gradients: Sequence[OptimizerGradients], but: Collection[int]) -> None:
        """Scales the gradients that a backward pass is going to add to; does nothing at a scale of 1.

        Args:
            gradients: those that are not scaled yet, by optimizer.
            but: ids of parameters whose gradients are scaled.
        """
        concerned = () if self.scale_use.is_one else gradients
        found = [each for each in concerned if has_gradients(each.updated.parameters())]
        for each in found:
            each.make_float32(but=but)
        if found:
            # By the snapshot: gradients with a graph remember the factor, and the scaler's own tensor changes.
            kernels.multiply_(without_masters(found, but=but), self.scale_use.scale)

    def run(self, judged: Iterable[Tensor] | None = None) -> None:
        """Unscales, and finds overflows.

        Args:
            judged: parameters over whose ranks the verdict is agreed on; None: the model's that are unscaled.
        """
        try:
            self.tell_observers()
            found_inf = self._unscale()
            if found_inf is not None:
                self._ranks.reduce_overflow_(found_inf, self.model_parameters() if judged is None else judged)
            self.note_unscaled(found_inf)
        except BaseException:
            self.abandon()
            raise

    def tell_observers(self) -> None:
        """Shows the gradients to all observers before they are unscaled."""
        for observer in step_observers.observers:
            observer.unscaling(self.scale_use, self.gradients)

    def note_unscaled(self, found_inf: Tensor | None) -> None:
        """Notes that the gradients are unscaled: the verdict decides on the next steps, and the scale reacts there.

        Args:
            found_inf: 0-dimensional float32, not 0 if a gradient on any rank is inf or NaN; ignored under a static
                scale.
        """
        if self.scale_use.scaler.dynamic and found_inf is not None:
            self.scale_use.found_inf = found_inf
            self.scale_use.is_captured = is_capturing()
        self.scale_use.is_shared = len(self.gradients) > 1
        for each in self.gradients:
            each.note_unscaled()
            each.verdicts.add(self.scale_use)

    def abandon(self) -> None:
        """Drops all gradients and verdicts, after an error: none is left half unscaled."""
        for each in self.gradients:
            each.drop()
            each.verdicts.forget()

    def model_parameters(self) -> Iterator[Tensor]:
        """Yields the model's parameters that the optimizers update, or have masters of."""
        for each in self.gradients:
            yield from each.updated.model_parameters()

    def _unscale(self) -> Tensor | None:
        """Unscales in place.

        Returns:
            The verdict of this rank, 0-dimensional float32; None under a static scale, which looks for no overflow.
        """
        masters = []
        for each in self.gradients:
            if each.masters.wanted:
                masters.append(each.masters.gradients)
                each.masters.gradients.note_cleared()
        scale, found_inf = self.scale_use.scale, None
        if self.scale_use.scaler.dynamic:
            found_inf = kernels.unscale_by_(without_masters(self.gradients), scale)
        elif not self.scale_use.is_one:
            kernels.multiply_(without_masters(self.gradients), scale.reciprocal())
        if masters:
            inv_scale = None if self.scale_use.is_one else scale.reciprocal()
            for gradients in masters:
                gradients.unscale_to_masters(inv_scale, found_inf)
        return found_inf


def without_masters(gradients: Sequence[OptimizerGradients], but: Collection[int] = ()) -> list[Tensor]:
    """Returns the gradients that are scaled and unscaled in place: those of parameters without a master.

    Args:
        gradients: by optimizer.
        but: ids of parameters to leave out.
    """
    if len(gradients) == 1 and not but and not gradients[0].masters.wanted:
        return gradients_of(gradients[0].updated.model_parameters())
    return gradients_of(
        [
            parameter
            for each in gradients
            for parameter in each.masters.parameters_without_master(each.updated.model_parameters())
            if id(parameter) not in but
        ]
    )
