"""The gradients of adopted optimizers between a block and a step, as user code and other libraries use them.

Must keep no state: `ampatch.scaling.optimizer_gradients` has an optimizer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from ampatch.errors import UsageError, warn
from ampatch.parts.losses import Losses
from ampatch.parts.masters import Masters
from ampatch.parts.part import Part, Shared, with_casts_off
from ampatch.scaling import clipping
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.optimizer_step import AdoptedOptimizer
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.torch_private.optimizers import UNSCALE_GRADS


class Gradients(Part):
    """The gradients of a session's optimizers, as user code meets them.

    Args:
        shared: what all parts share.
        masters: the masters, which may have the gradients.
        losses: the losses, which may have scaled them.
    """

    def __init__(self, shared: Shared, masters: Masters, losses: Losses) -> None:
        super().__init__(shared)
        self._masters, self._losses = masters, losses
        self._record_of = shared.adopted.record_of

    def install(self) -> None:
        """Has torch's GradScaler ask before it unscales, and torch's clipping warn of scaled gradients."""
        before_scaler_unscales = self.while_active(self.before_scaler_unscales)

        def before(_: object, optimizer: OptimizerLike, *__: object, **___: object) -> None:
            before_scaler_unscales(optimizer)

        self.ledger.before(*UNSCALE_GRADS, before)
        if not all(scaler.is_one for scaler in self._losses.scalers):
            clipping.watch(self.ledger, self.while_active(self._check_clipped))

    @with_casts_off
    def _check_clipped(self, grads: Sequence[Tensor]) -> None:
        """Warns if gradients that torch is about to clip are scaled."""
        for record in self.shared.adopted.records:
            clipping.warn_of_scaled(record.gradients, grads)

    def before_scaler_unscales(self, optimizer: OptimizerLike) -> None:
        """Prepares for a `GradScaler`, torch's or ampatch's, that is about to unscale an optimizer's gradients.

        Raises:
            UsageError: amp has them, or has scaled them too.
        """
        record = self.shared.adopted.by_id.get(id(optimizer))
        if record is None:
            self._losses.unadopted.exempt(optimizer)
            return
        if record.masters or any(use.found_inf is not None for use in record.gradients.verdicts.pending):
            raise UsageError(
                f"a GradScaler cannot unscale for this {type(optimizer).__name__}: amp.scale_loss does, and has it "
                "skip where gradients overflow. Leave the GradScaler out: with amp.scale_loss(loss, optimizer) as "
                "scaled_loss: scaled_loss.backward(), and then optimizer.step()."
            )
        record.missing_scale.has_other_scale = True

    @with_casts_off
    def replace_verdicts(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Replaces the pending verdicts of a loss by one from other code, which has unscaled or reduced the gradients.

        The verdicts found here no longer count, since other ranks may have found others.

        Args:
            scaler: the scaler of the loss.
            found_inf: 0-dimensional float32, not 0 after an overflow; the scale reacts, and no step is skipped for it.
        """
        everyone = self.shared.adopted.records
        concerned = [each for each in everyone if any(use.scaler is scaler for use in each.gradients.verdicts.pending)]
        for record in concerned or everyone:
            verdicts = record.gradients.verdicts
            verdicts.pending = [scale_use for scale_use in verdicts.pending if scale_use.scaler is not scaler]
            record.missing_scale.has_other_scale = True
        scaler.forget()
        scaler.update_by(found_inf)

    def updated(self, optimizer: OptimizerLike, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns those of a model's parameters that an optimizer updates, with what it updates in their place.

        Args:
            optimizer: an adopted optimizer.
            parameters: parameters of a model, or masters.

        Returns:
            Pairs of the model's parameter and its master, in the optimizer's order; twice the parameter if it has none.
        """
        wanted, own = set(map(id, parameters)), self._record_of(optimizer).gradients.updated.model_parameters()
        pairs = zip(own, self.master_params(optimizer), strict=True)
        return [(each, full) for each, full in pairs if id(each) in wanted or id(full) in wanted]

    @with_casts_off
    def master_params(self, optimizer: OptimizerLike) -> Iterator[Tensor]:
        """Returns the parameters that an optimizer updates, up to date, with their gradients."""
        gradients = self._record_of(optimizer).gradients
        self._masters.decide_replaced()
        gradients.synchronise(weights_too=True)
        return gradients.updated.parameters()

    @with_casts_off
    def are_finite(self, optimizer: OptimizerLike) -> Tensor:
        """Returns whether the gradients of an optimizer are finite; see `OptimizerGradients.are_finite`."""
        return self._record_of(optimizer).gradients.are_finite()

    @with_casts_off
    def clip(self, optimizer: OptimizerLike, max_norm: float) -> Tensor:
        """Clips the gradients of an optimizer; see `clipping.clip`."""
        return clipping.clip(self._record_of(optimizer), max_norm)

    @with_casts_off
    def unscale(self, optimizer: OptimizerLike) -> None:
        """Unscales the gradients of an optimizer; see `clipping.unscale`."""
        clipping.unscale(self._record_of(optimizer))

    def release(self) -> None:
        """Ends what steps and blocks have pending; gradients that are still scaled become None.

        Warns:
            AmpWarning: there were such gradients.
        """
        dropped: list[bool] = []

        def let_go(record: AdoptedOptimizer) -> None:
            dropped.append(record.release())

        with contextlib.ExitStack() as whatever_raises:
            for record in self.shared.adopted.records:
                whatever_raises.callback(let_go, record)
        if any(dropped):
            warn(
                "gradients that were still scaled, after amp.scale_loss(..., delay_unscale=True), are None now. To "
                "keep them, call amp.unscale_(optimizer) before amp.deinitialize()."
            )
