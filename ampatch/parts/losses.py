"""Loss scales, the blocks that scale by them, and the steps that may be skipped for them.

Owns the scalers of the losses, and makes the records of adopted optimizers. Must not change a weight; what user code
does with gradients is in `ampatch.parts.gradients`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampatch.errors import OptionError, UsageError
from ampatch.parts.casts import Casts
from ampatch.parts.masters import Masters
from ampatch.parts.part import Part, Shared
from ampatch.parts.weights import Weights
from ampatch.scaling import unscaled_losses
from ampatch.scaling.kept_buffers import KeptBuffers
from ampatch.scaling.loss_scaler import LossScaler, has_reacted, read_states
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.optimizer_step import AdoptedOptimizer
from ampatch.scaling.overflows import OverflowHandler, SkippedSteps
from ampatch.scaling.scaled_block import Blocks, ScaledBlock
from ampatch.scaling.scaled_leaves import ScaledLeaves
from ampatch.scaling.unadopted_optimizers import UnadoptedOptimizers
from ampatch.scaling.users_optimizer import OptimizerLike, check_not_stepping, check_optimizer


class Losses(Part):
    """The losses of a session.

    Args:
        shared: what all parts share.
        weights: the half weights.
        masters: their masters.
        casts: the casts that may have caused an error in a backward pass.
        adopt: adopts optimizers in the block of a loss, under `amp.init`.

    Attributes:
        scalers: one for each loss, of the optimizers that were adopted last.
        blocks: what all blocks share.
        unadopted: optimizers that step while amp is on, and that it has not adopted.
        leaves: leaves that see scaled gradients.
        overflows: what happens after a skipped step; a tracer is set here.
        kept_buffers: the buffers of models before a step; None if no step can be skipped.
        verbose: True if skipped steps of optimizers adopted from now on are logged.
    """

    def __init__(
        self,
        shared: Shared,
        weights: Weights,
        masters: Masters,
        casts: Casts,
        adopt: Callable[[Collection[nn.Module], Collection[OptimizerLike]], None],
    ) -> None:
        super().__init__(shared)
        settings, adopted = self.settings, shared.adopted
        self._masters, self._casts, self._adopt = masters, casts, adopt
        self.verbose = True
        self.scalers = self._new_scalers()
        self._is_scaled = not all(scaler.is_one for scaler in self.scalers)
        self._checks_steps = self._is_scaled or settings.steps_in_float32 or settings.patches_functions
        may_skip = (settings.scale_policy.dynamic or settings.check_finite) and not settings.adopts_on_use
        self.kept_buffers = KeptBuffers() if may_skip else None
        if self.kept_buffers is not None:
            self.before_forward, self.after_forward = self.kept_buffers.before_forward, self.kept_buffers.after_forward
        self.leaves = ScaledLeaves()
        self.unadopted = UnadoptedOptimizers(
            adopted.by_id,
            shared.switch,
            shared.cache,
            lambda: None if settings.adopts_on_use else adopted.parameter_ids(),
            weights.conversion.without_master.forget,
            self.leaves.have,
            is_scaled=self._is_scaled,
            has_masters=settings.steps_in_float32,
        )
        self.overflows = OverflowHandler(settings.on_overflow)
        self.blocks = Blocks(
            shared.ranks,
            shared.cache,
            shared.switch,
            self._prepare_block,
            adopted.by_id,
            self.leaves,
            self.overflows,
            settings.check_finite,
        )
        self._skips: list[SkippedSteps] = []  # one for each optimizer that was adopted, deleted ones included

    def _new_scalers(self) -> tuple[LossScaler, ...]:
        return tuple(LossScaler.from_policy(self.settings.scale_policy) for _ in range(self.settings.num_losses))

    def install(self) -> None:
        """Has torch report backward passes and steps of optimizers that amp has not adopted."""
        settings = self.settings
        if self.kept_buffers is not None:
            self.kept_buffers.install(self.ledger)
        if self._is_scaled or settings.patches_any:
            explain = self._casts.while_active(self._casts.explain_backward)
            unscaled_losses.watch(self.ledger, self.while_active(self._blocks_now), explain)
        if self._checks_steps:
            self.ledger.on_undo(register_optimizer_step_pre_hook(self.unadopted.before_step).remove)
        if settings.patches_functions:
            self.ledger.on_undo(register_optimizer_step_post_hook(self.unadopted.after_step).remove)

    def _blocks_now(self) -> Blocks:
        return self.blocks

    def mark(self) -> Callable[[], None]:
        """Returns a function that restores the scalers, and forgets counts of skipped steps that were added since."""
        scalers, count = self.scalers, len(self._skips)

        def forget() -> None:
            self.scalers = scalers
            del self._skips[count:]

        return forget

    def adopt_model(self, model: nn.Module, _: bool) -> None:
        """Keeps the buffers of a model from now on."""
        if self.kept_buffers is not None:
            self.kept_buffers.add(model)

    def begin_scales(self, optimizers: Collection[OptimizerLike]) -> None:
        """Makes new scalers for new optimizers, if other optimizers have used those that are there.

        Under `amp.init`, which adopts optimizers one by one, those that exist at the same time have the same scalers.
        """
        if optimizers and any(map(has_reacted, self.scalers)):
            gc.collect()  # an adopted optimizer is in a reference cycle
            if not (self.settings.adopts_on_use and self.shared.adopted.by_id):
                self.scalers = self._new_scalers()

    def adopt_optimizer(self, optimizer: OptimizerLike) -> None:
        """Adopts an optimizer: replaces its ``step`` by one that can skip, and makes masters of half weights.

        Raises:
            OptionError: its ``step`` cannot be replaced.
            UsageError: a parameter is in two optimizers that would each have a master of it.
        """
        shared, settings, adopted = self.shared, self.settings, self.shared.adopted
        try:
            masters = self._masters.begin_for(optimizer)
            record = AdoptedOptimizer(
                OptimizerGradients(
                    optimizer,
                    masters,
                    shared.ranks,
                    adopted.by_id,
                    counts_non_finite=self.overflows.reports,
                ),
                shared.switch,
                shared.cache,
                self.scalers,
                exact_hooks=settings.exact_hooks,
                announce=self.verbose,
                on_overflow=self.overflows,
                kept_buffers=self.kept_buffers,
                checks_by=self.scalers[0] if settings.check_finite else None,
                prepare_masters=self._masters.while_active(self._masters.before_step),
                temporary=self._masters.temporary_for(optimizer),
            )
            record.install(self.ledger)
            if self._checks_steps:
                self.unadopted.watch_inherited_step(type(optimizer), self.ledger)
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"the step of this {type(optimizer).__name__} cannot be replaced on the object ({error}); expected an "
                "optimizer that keeps its own attributes. Hand in the optimizer inside it, if there is one."
            ) from error
        adopted.by_id[id(optimizer)] = record
        self._skips.append(record.outcomes.skips)
        finalizer = weakref.finalize(optimizer, adopted.forget_optimizer, id(optimizer))
        self.ledger.on_undo(finalizer.detach, optimizer)

    def all_scalers(self) -> tuple[LossScaler, ...]:
        """Returns the scalers of all optimizers that exist, those of the optimizers that were adopted last first."""
        others = [scaler for record in self.shared.adopted.records for scaler in record.scalers]
        return tuple(dict.fromkeys((*self.scalers, *others)))

    def scaler(self, loss_id: int) -> LossScaler:
        """Returns the scaler of a loss.

        Raises:
            OptionError: ``loss_id`` is out of range.
        """
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise OptionError(
                f"loss_id is {loss_id!r}, and there are {len(self.scalers)} losses, numbered from 0. Type "
                "amp.initialize(..., num_losses=N) for N of them."
            )
        return self.scalers[loss_id]

    def scale_loss(
        self, loss: Any, optimizers: Sequence[OptimizerLike], loss_id: int, **delays: bool
    ) -> ScaledBlock[Any]:
        """Returns the block of ``amp.scale_loss``; ``delays`` are ``delay_unscale`` and ``delay_overflow_check``."""
        return ScaledBlock(self.blocks, loss, optimizers, loss_id, **delays)

    def _prepare_block(
        self, loss: Any, optimizers: Sequence[OptimizerLike], loss_id: int
    ) -> tuple[LossScaler, list[AdoptedOptimizer]]:
        """Returns a loss's scaler, moved to its device, and the optimizers' records; adopts new ones for `amp.init`."""
        self.scaler(loss_id)  # raises if there is none
        adopted = self.shared.adopted
        if self.settings.adopts_on_use:
            new = {id(each): check_optimizer(each) for each in optimizers if not adopted.has(each)}
            if new:
                for each in new.values():
                    check_not_stepping(each)
                self._adopt([], list(new.values()))
        records = list(map(adopted.record_of, optimizers))
        for record in records:
            if record.exchange.are_in_place:
                raise UsageError(
                    f"this amp.scale_loss stands in the step of its {type(record.optimizer).__name__}, where the "
                    "optimizer's parameters are its float32 masters, and not the model's half weights. Hand the "
                    "backward pass to the step as a closure: optimizer.step(closure)."
                )
        scaler = records[0].scalers[loss_id]
        scaler.to_device_of(loss)
        return scaler, records

    def stats(self) -> dict[str, int | float]:
        """Returns the loss scales and the numbers of skipped steps; reads each device once."""
        states = read_states(self.scalers)
        for record in self.shared.adopted.records:
            record.outcomes.read()
        numbers: dict[str, int | float] = {}
        for index, (scaler, state) in enumerate(zip(self.scalers, states, strict=True)):
            suffix = f"/{index}" if len(self.scalers) > 1 else ""
            numbers[f"loss_scale{suffix}"] = state.loss_scale
            numbers[f"clean_steps{suffix}"] = state.unskipped
            numbers[f"overflows{suffix}"] = scaler.overflows
        numbers["skipped_steps"] = sum(count.total for count in self._skips)
        if len(self._skips) > 1:
            numbers |= {f"skipped_steps/{index}": count.total for index, count in enumerate(self._skips)}
        return numbers
