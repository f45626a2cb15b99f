"""The types of the models' weights, arguments and results, at the levels that convert models.

Owns the record of converted weights. Must not know optimizers: `ampatch.parts.masters` does.
"""

from __future__ import annotations

import glob
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ampatch.errors import UsageError
from ampatch.parts.part import Part, Shared
from ampatch.patching import adopted_model, recurrent_weights
from ampatch.weights import conversion_plan, optimizer_state
from ampatch.weights.conversion import Conversion
from ampatch.weights.ruled_parts import ruled_parts


class Weights(Part):
    """The weights of models that are converted to the level's type.

    Attributes:
        conversion: the record of converted weights.
        modules: the modules of models with half weights.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.conversion = Conversion(self._is_of_model, watches_writes=self.settings.steps_in_float32)
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules among them that compute in float32

    def install(self) -> None:
        """Has torch report modules that user code adds to models with half weights."""
        if self.settings.has_half_weights:
            hook = self.while_active(self._take_in)
            self.ledger.on_undo(register_module_module_registration_hook(hook).remove)

    def mark(self) -> Callable[[], None]:
        """Returns a function that converts back what was converted since."""
        first, modules, guarded = self.conversion.mark(), set(self.modules), set(self._guarded)

        def convert_back() -> None:
            self.conversion.restore(since=first)
            self.conversion.forget_unclaimed()
            self.modules &= modules
            self._guarded &= guarded

        return convert_back

    def adopt_model(self, model: nn.Module, is_new: bool) -> None:
        """Converts the weights of a model, or of modules that a known one got, and casts its arguments and results.

        Raises:
            OptionError: its weights cannot be converted.
            UsageError: it is a part of another model, or has one as its part.
        """
        settings, dtype = self.settings, self.settings.properties.cast_model_type
        if is_new and settings.has_half_weights:
            self._check_is_no_part(model)
        if dtype is not None:
            self._convert(model, dtype)
        outputs = settings.cast_model_outputs
        if is_new and (dtype is not None or outputs is not None):
            self._hook_casts(model, None if settings.casts_in_half else dtype, outputs or torch.float32)

    def _check_is_no_part(self, model: nn.Module) -> None:
        for other in self.shared.adopted.models:
            if other is not model and (model in other.modules() or other in model.modules()):
                raise UsageError(
                    f"of the models that amp has, one ({type(model).__name__}) is a part of another, or has it as one "
                    f"({type(other).__name__}), so that its outputs would be float32 inside a half model. Hand in the "
                    "outer one only, after amp.deinitialize() if amp has the inner one already."
                )

    def _convert(self, model: nn.Module, dtype: torch.dtype) -> None:
        settings = self.settings
        keeps_norms = bool(settings.properties.keep_batchnorm_fp32)
        parts = ruled_parts(model, settings.lists.modules).values()
        kept = (*settings.keep_fp32, *(glob.escape(part.name) for part in parts if part.entry.is_float32))
        plan = conversion_plan.plan(model, dtype, keeps_norms, kept, settings.float32_outputs, settings.cast_buffers)
        self.conversion.convert(plan)
        recurrent_weights.flatten(model)
        for module, outputs in plan.guarded.items():
            if module not in self._guarded:
                self._guarded.add(module)
                self._hook_casts(module, torch.float32, outputs)
        if settings.has_half_weights:
            self._hook_state_dict(model)

    def _hook_casts(self, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype) -> None:
        settings = self.settings
        adopted_model.hook_casts(
            module,
            self.ledger,
            inputs,
            outputs,
            widens_copies=settings.steps_in_float32,
            labelled=settings.profile_casts,
        )

    def _hook_state_dict(self, model: nn.Module) -> None:
        new = [module for module in model.modules() if module not in self.modules]
        adopted_model.hook_state_dict(new, self.ledger, self.shared.hooks)
        self.modules.update(new)

    def _take_in(self, parent: nn.Module, _: str, module: nn.Module | None) -> None:
        if module is not None and parent in self.modules:
            self._hook_state_dict(module)

    def _is_of_model(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is a parameter or buffer of a converted model, even one added later."""
        return any(tensor is each for module in self.modules for _, each in conversion_plan.own_tensors(module))

    def explain(self, model: nn.Module, _: object, error: BaseException) -> None:
        """Explains an error about types that a forward with half weights raised."""
        if self.settings.has_half_weights:
            adopted_model.note_types(model, error, self.settings.properties.half_dtype, self.settings.keep_fp32)

    def restore(self) -> None:
        """Gives weights their types back, and casts the state of optimizers accordingly."""
        for module in list(self.modules):
            self.conversion.record_late(module)
        adopted = self.shared.adopted
        now = {id(p): p.dtype for record in adopted.records for p in record.gradients.updated.parameters()}
        self.conversion.restore()
        for optimizer in adopted.optimizers:
            optimizer_state.cast_state(optimizer, lambda parameter: now.get(id(parameter)))
        for model in adopted.models:
            recurrent_weights.flatten(model)
