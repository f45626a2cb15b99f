"""The float32 masters of all optimizers, and the half weights that user code replaces or writes to.

Owns the search for weights that were replaced or written to. One optimizer's masters are
`ampatch.weights.master_weights`. Must not know whether a step is skipped.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ampatch import tracing
from ampatch.errors import UsageError
from ampatch.half_types import HALVES
from ampatch.parts.optimizer_warnings import warn_of_half_data
from ampatch.parts.part import Part, Shared, with_casts_off
from ampatch.parts.weights import Weights
from ampatch.patching import cuda_graphs
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.weights import copies, optimizer_state, untracked_writes
from ampatch.weights.master_weights import MasterWeights
from ampatch.weights.replaced_parameters import ReplacedParameters
from ampatch.weights.temporary_masters import TemporaryMasters

logger = logging.getLogger("ampatch")


class Masters(Part):
    """The masters of a session; without `Settings.has_masters` there are none, and most methods do nothing.

    Args:
        shared: what all parts share.
        weights: the half weights.
    """

    def __init__(self, shared: Shared, weights: Weights) -> None:
        super().__init__(shared)
        adopted = shared.adopted
        if self.settings.has_half_weights or self.settings.steps_in_float32:
            self.before_forward = self._before_forward
        self._conversion = weights.conversion
        self._replaced = ReplacedParameters(
            weights.conversion, weights.modules, lambda: adopted.optimizers, adopted.parameter_names
        )
        self._warns_of_half_data = not self.settings.steps_in_float32  # once: a loss may do so in each step
        # The masters found in each model so far.
        self._of_models = weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[MasterWeights], ...]]()

    def install(self) -> None:
        """Has torch report what concerns masters: copies, cleared gradients, replaced weights, uncounted writes."""
        settings, ledger = self.settings, self.ledger
        if settings.has_masters:
            self._follow_zero_grad()
            note = self.while_active(self._replaced.note)
            ledger.on_undo(register_module_parameter_registration_hook(note).remove)
            self._replaced.watch_optimizers(ledger)
        if settings.steps_in_float32:
            copies.copy_as_float32(ledger, self.while_active(self._conversion.full_of))
        if settings.steps_in_float32 or settings.patches_functions:
            untracked_writes.announce(ledger, self.while_active(self._note_write))
        before_capture = self.while_active(self._before_capture)
        cuda_graphs.announce(ledger, before_capture)
        cuda_graphs.accept_adopted_models(ledger, before_capture)

    def _follow_zero_grad(self) -> None:
        """Has `torch.nn.Module.zero_grad` drop the masters' sums of the module's parameters, too.

        Inside a block the half gradients are zeros, and masters hold the sums of earlier blocks. Writing zeros onto
        zeros leaves no trace, so amp would miss ``zero_grad(set_to_none=False)`` without the wrapper.
        """
        original, in_use = nn.Module.zero_grad, self.while_active(self._all)

        @functools.wraps(original)
        def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            for masters in in_use() or ():
                masters.have_cleared = False
                masters.gradients.drop_sums(set(map(id, module.parameters())))

        self.ledger.set(nn.Module, "zero_grad", zero_grad)

    def begin_for(self, optimizer: OptimizerLike) -> MasterWeights:
        """Returns the masters of an optimizer that is about to be adopted; their `install` makes them.

        Puts parameters that the optimizer has back into the models, if amp took them out before it had them.

        Raises:
            UsageError: it updates masters of another optimizer.
        """
        self._replaced.follow(optimizer)
        updated = list(optimizer_state.parameters_of(optimizer))
        for masters in self._all():
            if any(masters.parameter_of(each) is not each for each in updated):
                raise UsageError(
                    f"this {type(optimizer).__name__} updates float32 masters that belong to another optimizer. Hand "
                    "only one of the two to amp.initialize: the outer one, if one is wrapped around the other."
                )
        if self.settings.properties.cast_model_type is not None or self.settings.steps_in_float32:
            optimizer_state.give_up_buckets(optimizer)
        adopted, key = self.shared.adopted, id(optimizer)

        def take_in() -> None:
            adopted.by_id[key].gradients.synchronise(weights_too=True)

        return MasterWeights(optimizer, self._conversion, self.settings.has_masters, adopted.name_of, take_in)

    def temporary_for(self, optimizer: OptimizerLike) -> TemporaryMasters | None:
        """Returns the masters that an optimizer about to be adopted gets for each step; None if it gets none."""
        kind, narrow = self.settings.temporary_masters, self.settings.optimizer_state == "bfloat16"
        if kind is None:
            return None
        return TemporaryMasters(optimizer, self._conversion, kind, narrow, self.shared.adopted.name_of)

    def prepare(self, optimizers: Collection[OptimizerLike]) -> None:
        """Decides on the parameters that were replaced; new optimizers may have those that replaced them."""
        self.decide_replaced(optimizers)

    def finish(self, _: Collection[nn.Module], optimizers: Collection[OptimizerLike]) -> None:
        """Drops float32 values that no optimizer needs, and gives the optimizers' state the type of what they update.

        Rounding cannot be undone.
        """
        self._conversion.forget_unclaimed()
        for masters in self._all():
            self._replaced.search(masters)
        for optimizer in optimizers:
            mastered = self.shared.adopted.record_of(optimizer).exchange.ids()
            optimizer_state.cast_state(optimizer, self._conversion.dtype_before, but=mastered)

    def release(self) -> None:
        """Decides on the parameters that were replaced, while there are masters."""
        self.decide_replaced()

    def _before_forward(self, model: nn.Module) -> None:
        if tracing.is_recording():
            return
        with self.shared.switch.suspended():
            self._take_in()
            if self.settings.has_masters:
                for masters in self._of_model(model):  # other optimizers may be in a step in another thread
                    if not masters.are_in_place:
                        masters.values.show_masters()

    @with_casts_off
    def synchronise(self) -> None:
        """Copies writes to half weights or to their masters from one to the other."""
        self._take_in()
        for masters in self._all():
            masters.synchronise()

    def _take_in(self) -> None:
        """Takes in what user code has done to half weights: replaced them, or written to some without a master."""
        self.decide_replaced()
        self._widen_written()

    def _before_capture(self) -> bool:
        """Does what cannot be done while a CUDA graph is captured, or would be missing from its replays.

        Autograd graphs of kept casts belong to other streams, which a capture must not wait for. Writes to weights are
        found by reading from the device.

        Returns:
            True; `while_active` returns None in its place once the session has ended.
        """
        self.shared.cache.end_iteration()
        self.synchronise()
        self.complete()
        return True

    @with_casts_off
    def complete(self) -> None:
        """Makes missing masters of half parameters, such as unfrozen ones."""
        for record in self.shared.adopted.records:
            record.exchange.make_missing()

    def before_step(self, masters: MasterWeights) -> None:
        """Gives an optimizer that is about to step the masters of what the models have now."""
        self._replaced.search(masters)
        self._take_in()
        self._replaced.warn_of_put_back()

    def float32_of(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
        """Returns what is saved of a half tensor, and of a float32 copy that replaced one; None: the tensor itself."""
        full = self._conversion.float32_of(module, name, tensor)
        return self._replaced.float32_of(module, name, tensor) if full is None else full

    def _all(self) -> list[MasterWeights]:
        return [record.masters for record in self.shared.adopted.records]

    def _of_model(self, model: nn.Module) -> set[MasterWeights]:
        """Returns the masters of a model's parameters, one object per optimizer.

        Remembers them, since inside `torch.func.functional_call` a model has other parameters.
        """
        remembered = (reference() for reference in self._of_models.get(model, ()))
        found = {masters for masters in remembered if masters is not None}
        if len(found) < len(self.shared.adopted.by_id):  # otherwise all are known
            ids = set(map(id, model.parameters()))
            found |= {masters for masters in self._all() if not ids.isdisjoint(masters.ids())}
            self._of_models[model] = tuple(map(weakref.ref, found))
        return found

    def decide_replaced(self, given: Iterable[OptimizerLike] = ()) -> None:
        """Decides on the half parameters that user code has replaced in the models; see `ReplacedParameters.decide`."""
        if self._replaced.decide(given):
            for masters in self._all():
                masters.make_missing()
            if not given:  # otherwise their masters are still to be made
                self._conversion.forget_unclaimed()

    def _widen_written(self) -> None:
        """Makes half weights without a master float32 that were written to, and tells of them."""
        without_master = self._conversion.without_master
        without_master.check_left()
        widened = without_master.widen_written()
        if widened:
            others = f" and {len(widened) - 1} more" if widened[1:] else ""
            logger.info(
                "%s%s: user code writes to weights that no optimizer of amp updates. They are float32 from now on, as "
                "half weights would lose small updates.",
                self.shared.adopted.name_of(widened[0]),
                others,
            )

    @with_casts_off
    def _note_write(self, tensor: Tensor, data: Tensor | None = None, *, is_read: bool = False) -> Tensor | None:
        """Notes that user code may write to a tensor in a way that torch does not count; see `untracked_writes`."""
        if isinstance(tensor, nn.Parameter):
            self.shared.cache.forget(tensor)
            if self._warns_of_half_data and data is not None and not is_read and data.dtype in HALVES:
                level = self.settings.properties.opt_level
                self._warns_of_half_data = not warn_of_half_data(tensor, self.shared.adopted, level)
        if not self.settings.steps_in_float32 or not untracked_writes.has_memory(tensor):
            return None
        exchanges = (record.exchange.on_access for record in self.shared.adopted.records)
        accesses = (self._conversion.without_master.on_access, *exchanges)
        given = [on_access(tensor, data, is_read=is_read) for on_access in accesses]
        return next((each for each in given if each is not None), None)
