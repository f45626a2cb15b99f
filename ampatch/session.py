"""The session: the one owner of all state between ``amp.initialize`` and ``amp.deinitialize``.

It holds the ledger of patches, the cache of cast weights, the switch, the loss scalers, and the adopted models and
optimizers. Must not know whether it is the live session: `ampatch.runtime` does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampatch import compilers, distributed
from ampatch.cast_lists import list_edits
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule
from ampatch.casting import write_back
from ampatch.casting.cast_errors import note_half
from ampatch.distributed import Ranks
from ampatch.errors import OptionError, UsageError, warn
from ampatch.ledger import PatchLedger
from ampatch.native.calls import Accelerator
from ampatch.opt_levels import HALVES
from ampatch.patching import (
    adopted_model,
    autocast_checks,
    cuda_graphs,
    half_functions,
    peft_methods,
    recurrent_weights,
    replaced_forward,
    thread_rules,
)
from ampatch.patching.adapters import Adapters
from ampatch.patching.adopted_forward import Recorder, Regions
from ampatch.patching.adopted_model import Hooks
from ampatch.patching.cast_labels import LabellingCache
from ampatch.patching.function_patches import FunctionPatches, Registration
from ampatch.patching.fused_linear import LinearCalls
from ampatch.patching.module_rules import give_rules, tokens_of
from ampatch.patching.weight_cache import WeightCache
from ampatch.scaling import clipping, unscaled_losses
from ampatch.scaling.kept_buffers import KeptBuffers
from ampatch.scaling.loss_scaler import LossScaler, has_reacted, read_states
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.optimizer_step import (
    AdoptedOptimizer,
    OptimizerLike,
    SkipCount,
    check_not_stepping,
    check_optimizer,
)
from ampatch.scaling.overflows import OverflowHandler, Tracer
from ampatch.scaling.scaled_block import Blocks, ScaledBlock
from ampatch.scaling.scaled_leaves import ScaledLeaves
from ampatch.scaling.unadopted_optimizers import UnadoptedOptimizers
from ampatch.settings import LiveSettings, Settings
from ampatch.switch import Switch, is_in_half
from ampatch.torch_private.compilers import has_compiled
from ampatch.torch_private.distributed import is_joining
from ampatch.torch_private.modules import FORWARD_HOOKS
from ampatch.torch_private.optimizers import UNSCALE_GRADS, WRAPPED_BY_SCHEDULER
from ampatch.weights import conversion_plan, copies, optimizer_state, untracked_writes
from ampatch.weights.conversion import Conversion
from ampatch.weights.master_gradients import MasterGradients, Pair
from ampatch.weights.master_weights import MasterWeights, dropping_sums
from ampatch.weights.replaced_parameters import ReplacedParameters
from ampatch.weights.ruled_parts import ruled_parts

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger("ampatch")

_MOST_WRAPPERS = 8  # of nested optimizers; a limit, since they could form a ring


class SessionTracer(Tracer, Recorder, Protocol):
    """A tracer of a session's steps."""

    def install(self, ledger: PatchLedger) -> None:
        """Begins to watch; the ledger records how to undo that."""


def _with_casts_off(method: Callable[Concatenate[Session, _P], _T]) -> Callable[Concatenate[Session, _P], _T]:
    """Returns a method during which casts are off, so that cast lists never apply to amp's own arithmetic."""

    @functools.wraps(method)
    def run(session: Session, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with session.switch.suspended():
            return method(session, *args, **kwargs)

    return run


class Session:
    """Everything that amp has installed, and its state.

    Args:
        settings: the settings of the session.
        device_types: device types of the tensors to cast; `adopt` adds those of its models.
        hooks: the hooks for models and wrappers.

    Attributes:
        settings: as given.
        registered: the functions that the user had registered when the session was installed.
        has_masters: True if half weights get float32 masters.
        has_half_weights: True if models are converted to a half type.
        device_types: device types of the tensors to cast.
        verbose: True if skipped steps of optimizers adopted from now on are logged.
        switch: whether casts are on.
        cache: casts of weights.
        ledger: the record of all patches.
        scalers: one for each loss, of the optimizers that were adopted last.
        overflows: what happens after a skipped step; a tracer is set here.
        skip_counts: numbers of skipped steps, one for each optimizer that was adopted, deleted ones included.
        conversion: the record of converted weights.
        loading: modules inside ``load_state_dict``, with the state dict and the prefix of their names in it.
        adapters: functions that cast the arguments of decorated functions, by kind.
        lists_of_parts: the lists of the parts of models that have rules of their own, by token.
        ranks: the ranks that may share gradients.
        leaves: leaves that see scaled gradients.
        kept_buffers: the buffers of models before a step; None if no step can be skipped.
    """

    def __init__(self, settings: Settings, device_types: Iterable[str], hooks: Hooks) -> None:
        self.settings = settings
        self.registered: tuple[Registration, ...] = ()
        self.has_masters = bool(settings.properties.master_weights)
        self.has_half_weights = settings.properties.cast_model_type in HALVES
        self._hooks = hooks
        self.verbose = True
        self.switch = Switch(self.patches_functions)
        cache_type = LabellingCache if settings.profile_casts else WeightCache
        # Functions that need float32 get casts of half weights, which optimizers write to without notice.
        self.cache = cache_type(settings.enable_caching and self.patches_functions)
        self.ledger = PatchLedger()
        self.scalers = self._new_scalers()
        self.device_types = set(device_types)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: dict[int, AdoptedOptimizer] = {}  # by id, since some optimizers are not hashable
        self._is_scaled = not all(scaler.is_one for scaler in self.scalers)
        # The masters found in each model so far.
        self._masters = weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[MasterWeights], ...]]()
        self.ranks = Ranks()
        may_skip = (settings.scale_policy.dynamic or settings.check_finite) and not settings.adopts_on_use
        self.kept_buffers = KeptBuffers(self.ledger) if may_skip else None
        self.conversion = Conversion(self._is_of_model, watches_writes=self.has_masters)
        self.leaves = ScaledLeaves()
        self._unadopted = UnadoptedOptimizers(
            self._optimizers,
            self.switch,
            self.cache,
            lambda: None if settings.adopts_on_use else self.parameter_ids(),
            self.conversion.without_master.forget,
            self.leaves.have,
            is_scaled=self._is_scaled,
            has_masters=self.has_masters,
        )
        self._converted: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of models with half weights
        self._replaced = ReplacedParameters(
            self.conversion, self._converted, lambda: self.optimizers, self.parameter_names
        )
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules among them that compute in float32
        self._blocks = Blocks(
            self.ranks,
            self.cache,
            self.switch,
            self._prepare_block,
            self._optimizers,
            self.leaves,
            settings.check_finite,
        )
        self._moving: list[tuple[MasterGradients, list[Pair]]] = []  # in the forward pass that runs, see there
        self.overflows = OverflowHandler(settings.on_overflow)
        self.skip_counts: list[SkipCount] = []
        self.loading: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, Any], str]] = weakref.WeakKeyDictionary()
        self._adapters = Adapters(
            settings.properties.half_dtype,
            self.cache,
            self.device_types,
            allow_banned=settings.allow_banned,
            labelled=settings.profile_casts,
            linear=LinearCalls() if settings.fused_linear else None,
            hears_regions=self.patches_functions,
            for_models=self.casts_for_models,
        )
        self._regions = Regions(self.switch, settings.properties.half_dtype, self.device_types, self.casts_in_half)
        self._regions.before_part = None if self.kept_buffers is None else self.kept_buffers.before_part
        self.adapters = self._adapters.by_kind()
        self._accelerator = Accelerator(self.cache.state, self.cache.cast, self.switch, self.device_types)
        lists = settings.lists
        self._tokens = tokens_of([entry for entry in lists.modules if not entry.is_float32])
        self.lists_of_parts = {token: lists.of_module(entry) for entry, token in self._tokens.items()}
        self._functions = FunctionPatches(
            self.ledger,
            self._adapters,
            self._accelerator,
            self.switch,
            for_half_models=not self.patches_functions,
        )

    @property
    def patches_functions(self) -> bool:
        """True if torch's functions cast by the lists in this session."""
        return self.settings.properties.patch_torch_functions

    @property
    def casts_for_models(self) -> bool:
        """True if the whitelist casts for the work of adopted models only, and not in the whole process."""
        return self.patches_functions and not self.settings.adopts_on_use

    @property
    def casts_in_half(self) -> bool:
        """True if functions cast what meets a half weight, and nothing by the lists but what needs float32."""
        return self.has_half_weights and not self.patches_functions

    @property
    def patches_any(self) -> bool:
        """True if some functions are patched: by the lists, or for models with half weights."""
        return self.patches_functions or self.has_half_weights

    def rules(self) -> dict[Path, Rule]:
        """Returns the rules that this session applies, by path."""
        if not self.patches_any:
            return {}
        rules = self.settings.lists.for_half(self.settings.properties.half_dtype)
        return {path: rule for path, rule in rules.items() if self.applies(rule)}

    def part_in_force(self) -> tuple[str, CastLists] | None:
        """Returns the part of a model whose rules this thread computes by, and its lists; None: the session's."""
        token = thread_rules.in_force()
        entries = [f"{entry.name!r} ({entry.source})" for entry, each in self._tokens.items() if each is token]
        return (" or ".join(entries), self.lists_of_parts[token]) if entries else None

    def applies(self, rule: Rule) -> bool:
        """Returns True if this session applies a rule: at O2, O3 and O5 only those of functions that need float32."""
        return self.patches_any and self._functions.applies(rule)

    def install(self, registered: Sequence[Registration]) -> None:
        """Patches torch as the settings say, patches registered functions, and turns casts on."""
        self.registered = tuple(registered)
        self.ledger.set(DistributedDataParallel, "__init__", self._seeing_wrappers(DistributedDataParallel.__init__))
        let_unscale = self._while_active(Session.let_unscale)
        self.ledger.before(*UNSCALE_GRADS, lambda _, optimizer, *__, **___: let_unscale(optimizer))
        if self.has_masters:
            in_use = self._while_active(lambda session: session._masters_of(None))
            self.ledger.set(nn.Module, "zero_grad", dropping_sums(nn.Module.zero_grad, lambda: in_use() or ()))
        if self.patches_any:
            self._patch_functions()
        if self.has_masters:
            copies.widen(self.ledger, self._while_active(lambda session, tensor: session.conversion.full_of(tensor)))
        if self.has_half_weights:
            handle = register_module_module_registration_hook(self._while_active(Session._take_in))
            self.ledger.on_undo(handle.remove)
        if self.has_masters:
            note = self._while_active(lambda session, *registered: session._replaced.note(*registered))
            self.ledger.on_undo(register_module_parameter_registration_hook(note).remove)
            self._replaced.watch_optimizers(self.ledger)
        if self._is_scaled:
            clipping.watch(self.ledger, self._while_active(Session._check_clipped))
        if self._is_scaled or self.patches_any:
            explain = self._while_active(Session._explain_backward)
            unscaled_losses.watch(self.ledger, self._while_active(lambda session: session._blocks), explain)
        if self._is_scaled or self.has_masters or self.patches_functions:
            self.ledger.on_undo(register_optimizer_step_pre_hook(self._unadopted.before_step).remove)
        if self.has_masters or self.patches_functions:
            untracked_writes.announce(self.ledger, self._while_active(Session.note_write))
        before_capture = self._while_active(Session._prepare_capture)
        cuda_graphs.announce(self.ledger, before_capture)
        cuda_graphs.accept_adopted_models(self.ledger, before_capture)
        self.switch.active = True

    def has_made_half(self) -> bool:
        """Returns True if a tensor may be half because of amp."""
        # Casts in compiled code do not count.
        return self.has_half_weights or self.cache.counts().casts > 0 or has_compiled()

    def _explain_backward(self, error: BaseException) -> None:
        if self.has_made_half():
            cure = "opt_level='O1', " if self.has_half_weights else ""  # with half weights, all results are half again
            note_half(error, self.settings.properties.half_dtype, f"{cure}keep_fp32=nn.BatchNorm1d")

    def _patch_functions(self) -> None:
        hooks = self._hooks
        compilers.build_torch_tables()
        as_without_amp = functools.partial(adopted_model.as_without_amp, (hooks.before_forward, hooks.after_forward))
        compilers.prepare_for_patches(self.ledger, self._functions.original_of, as_without_amp)
        replaced_forward.follow_copies(self.ledger)
        if not self.patches_functions:
            self._functions.install(self.settings.lists, ())
            autocast_checks.accept_any_float(self.ledger, lambda: self.switch.active and is_in_half())
        else:
            self._warn_of_undone_edits()
            self._functions.install(self.settings.lists, self.registered, self.lists_of_parts)
            autocast_checks.patch_autocast_checks(self.ledger, self.switch)
            half_dtype = self.settings.properties.half_dtype
            autocast_checks.hear_regions(self.ledger, half_dtype, self.device_types, self.casts_for_models)
            self.ledger.on_undo(register_optimizer_step_post_hook(self._unadopted.after_step).remove)
        if self.casts_for_models or self.casts_in_half:
            self._regions.install(self.ledger)
        state_of_reentrant = self._regions.state_of_checkpoint if self.casts_for_models else None
        # The backward pass that follows needs the casts of a recomputed region, and holds them itself.
        self.switch.patch_checkpoint(self.ledger, self.cache.end_iteration, state_of_reentrant)
        self.switch.patch_data_parallel(self.ledger)
        compilers.forget_compiled()

    def check_fuses_linear(self) -> None:
        """Raises `OptionError` if no linear layer can become one node, by the lists or by what was patched."""
        if not self._functions.fuses_linear:
            raise OptionError(
                "fused_linear=True has no effect here: no list casts torch.nn.functional.linear to half, or it was "
                "registered or replaced by another library. Leave fused_linear out, or put linear on the whitelist."
            )

    def _warn_of_undone_edits(self) -> None:
        edits = [known.as_edit() for known in self.registered]
        half_dtype = self.settings.properties.half_dtype
        told = list_edits.undone_edits_in_brief(self.settings.lists, half_dtype, edits)
        if told:
            warn(told)
        in_modules = list_edits.undone_in_modules(self.settings.lists, [half_dtype], edits)
        if in_modules:
            more = f" {len(in_modules) - 1} more like this." if len(in_modules) > 1 else ""
            warn(f"{in_modules[0]}{more}")

    @_with_casts_off
    def note_write(self, tensor: Tensor, data: Tensor | None = None, *, is_read: bool = False) -> Tensor | None:
        """Notes that user code may write to a tensor in a way that torch does not count; see `untracked_writes`."""
        if isinstance(tensor, nn.Parameter):
            self.cache.forget(tensor)
        if not self.has_masters or not untracked_writes.has_memory(tensor):
            return None
        hears = (self.conversion.without_master.hear, *(each.masters.hear for each in list(self._optimizers.values())))
        given = [hear(tensor, data, is_read=is_read) for hear in hears]
        return next((each for each in given if each is not None), None)

    @_with_casts_off
    def _prepare_capture(self) -> bool:
        """Does what cannot be done while a CUDA graph is captured, or would be missing from its replays.

        Autograd graphs of kept casts belong to other streams, which a capture must not wait for. Writes to weights are
        found by reading from the device.

        Returns:
            True; `_while_active` returns None in its place once the session has ended.
        """
        self.cache.end_iteration()
        self._settle_replaced()
        self._settle_written()
        for adopted in list(self._optimizers.values()):
            if self.has_masters:
                adopted.masters.synchronise()
        return True

    def take_down(self) -> None:
        """Undoes everything, newest first. Wrappers that user code kept call the originals from now on.

        Warns:
            AmpWarning: another library has patched on top, and its patches stay; or gradients were still scaled.
        """
        self.switch.active = False
        cut_off = self.ranks.replicates and self.ranks.are_replicated(self.conversion.converted())
        dropped: list[AdoptedOptimizer] = []
        foreign: list[tuple[object, str]] = []

        def let_go(adopted: AdoptedOptimizer) -> None:
            if adopted.release():
                dropped.append(adopted)

        def undo() -> None:
            foreign.extend(patch for patch in self.ledger.undo() if not _is_wrapped_by_scheduler(*patch))

        with contextlib.ExitStack() as whatever_raises:  # from the last to the first
            whatever_raises.callback(self.cache.clear)
            whatever_raises.callback(write_back.drop_interrupted)
            whatever_raises.callback(self._restore_weights)
            if self.patches_any:
                modules = (module for model in self._models for module in model.modules())
                whatever_raises.callback(self._functions.release, modules)
            whatever_raises.callback(undo)
            for adopted in list(self._optimizers.values()):
                whatever_raises.callback(let_go, adopted)
            whatever_raises.callback(self._settle_replaced)
        if cut_off:
            warn(
                "the weights of a model that is in a DistributedDataParallel have the types back that they had before "
                "amp.initialize, and it no longer reduces their gradients. Wrap the model anew before training goes on."
            )
        if foreign:
            names = ", ".join(
                sorted(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name in foreign)
            )
            warn(
                f"another library has replaced functions that amp had patched, and its replacements stay: {names}. To "
                "remove them, undo that library's patches before amp.deinitialize()."
            )
        if dropped:
            warn(
                "gradients that were still scaled, after amp.scale_loss(..., delay_unscale=True), are None now. To "
                "keep them, call amp.unscale_(optimizer) before amp.deinitialize()."
            )

    # Models and optimizers

    def _new_scalers(self) -> tuple[LossScaler, ...]:
        return tuple(LossScaler.from_policy(self.settings.scale_policy) for _ in range(self.settings.num_losses))

    def all_scalers(self) -> tuple[LossScaler, ...]:
        """Returns the scalers of all optimizers that exist, those of the optimizers that were adopted last first."""
        others = [scaler for adopted in list(self._optimizers.values()) for scaler in adopted.scalers]
        return tuple(dict.fromkeys((*self.scalers, *others)))

    def _begin_scales(self, optimizers: Collection[OptimizerLike]) -> None:
        """Makes new scalers for new optimizers, if other optimizers have used those that are there.

        Under `amp.init`, which adopts optimizers one by one, those that exist at the same time have the same scalers.
        """
        if optimizers and any(map(has_reacted, self.scalers)):
            gc.collect()  # an adopted optimizer is in a reference cycle
            if not (self.settings.adopts_on_use and self._optimizers):
                self.scalers = self._new_scalers()

    @_with_casts_off
    def adopt(self, models: Collection[nn.Module], optimizers: Collection[OptimizerLike]) -> None:
        """Adopts models and optimizers; after an error none of them is adopted."""
        self._settle_replaced(optimizers)  # which may have parameters that replaced others
        mark, first, device_types = self.ledger.mark(), self.conversion.mark(), set(self.device_types)
        known_models, known_optimizers = set(self._models), set(self._optimizers)
        known_counts, known_scalers = len(self.skip_counts), self.scalers
        converted, guarded = set(self._converted), set(self._guarded)
        try:
            for model in models:
                self.adopt_model(model)
            self._find_wrappers()
            self._begin_scales(optimizers)
            for optimizer in optimizers:
                self.adopt_optimizer(optimizer)
            self._warn_of_frozen(optimizers)
        except BaseException:
            self.ledger.undo(since=mark)
            self.conversion.restore(since=first)
            self.conversion.forget_unclaimed()
            self._models &= known_models
            self._converted &= converted
            self._guarded &= guarded
            for key in set(self._optimizers) - known_optimizers:
                del self._optimizers[key]
            del self.skip_counts[known_counts:]
            self.scalers = known_scalers
            self.device_types &= device_types
            self._accelerator.set_device_types(self.device_types)
            raise
        for model in models:
            self._regions.add(model)
        tables = [table for model in models for table in half_functions.tables(model)] if self.casts_in_half else []
        if self._functions.add_tables(tables):
            for model in self._models:
                self._functions.rebind_model(model)
        # Last, since rounding cannot be undone.
        self.conversion.forget_unclaimed()
        for adopted in list(self._optimizers.values()):
            adopted.masters.search_replaced(self._replaced)
        for optimizer in optimizers:
            mastered = self.adopted(optimizer).masters.ids()
            optimizer_state.cast_state(optimizer, self.conversion.dtype_before, but=mastered)

    def adopt_model(self, model: nn.Module) -> None:
        """Adopts a model: converts its weights, hooks its forward pass, replaces functions that it keeps.

        Raises:
            OptionError: its weights cannot be converted.
        """
        self.device_types |= adopted_model.device_types(model)
        self._accelerator.set_device_types(self.device_types)
        is_new = model not in self._models
        if is_new:
            _check_not_graphed(model)
        if is_new and self.has_half_weights:
            self._check_is_no_part(model)
        self._models.add(model)
        if self.kept_buffers is not None:
            self.kept_buffers.add(model)
        self._convert_weights(model)  # of a known model: modules that were added to it since
        if self.patches_any:
            self._functions.rebind_model(model)
            if self.patches_functions:
                self._give_rules(model)
            self._regions.run_forward(model, self.ledger)
        if is_new:
            self._hook(model)
        peft_methods.adapt(model, self.ledger, self.switch)

    def _give_rules(self, model: nn.Module) -> None:
        """Has the parts of a model in float32 or with rules of their own compute so; ``keep_fp32`` comes first."""
        kept = conversion_plan.kept_modules(model, self.settings.keep_fp32)
        parts: dict[nn.Module, tuple[str, str, thread_rules.Token | None]]
        parts = {module: (name, "keep_fp32", None) for module, name in kept.items()}
        for module, part in ruled_parts(model, self.settings.lists.modules).items():
            parts.setdefault(module, (part.name, part.asked, self._tokens.get(part.entry)))
        give_rules(parts, self.ledger, self.switch)

    def _check_is_no_part(self, model: nn.Module) -> None:
        for other in self._models:
            if model in other.modules() or other in model.modules():
                raise UsageError(
                    f"of the models that amp has, one ({type(model).__name__}) is a part of another, or has it as one "
                    f"({type(other).__name__}), so that its outputs would be float32 inside a half model. Hand in the "
                    "outer one only, after amp.deinitialize() if amp has the inner one already."
                )

    def _convert_weights(self, model: nn.Module) -> None:
        settings, dtype = self.settings, self.settings.properties.cast_model_type
        if dtype is None:
            return
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
        if self.has_half_weights:
            self._hook_state_dict(model)

    def _hook_casts(self, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype) -> None:
        adopted_model.hook_casts(
            module, self.ledger, inputs, outputs, widens_copies=self.has_masters, labelled=self.settings.profile_casts
        )

    def _hook_state_dict(self, model: nn.Module) -> None:
        new = [module for module in model.modules() if module not in self._converted]
        adopted_model.hook_state_dict(new, self.ledger, self._hooks)
        self._converted.update(new)

    def _take_in(self, parent: nn.Module, _: str, module: nn.Module | None) -> None:
        """Hooks the state dict of a module that user code adds to a converted model."""
        if module is not None and parent in self._converted:
            self._hook_state_dict(module)

    def _hook(self, model: nn.Module) -> None:
        """Hooks the model's forward pass, for casts and for the cache."""
        dtype, outputs = self.settings.properties.cast_model_type, self.settings.cast_model_outputs
        if dtype is not None or outputs is not None:
            self._hook_casts(model, None if self.casts_in_half else dtype, outputs or torch.float32)
        if dtype is not None or self.patches_functions:
            adopted_model.hook_forward(model, self.ledger, self._hooks.before_forward, self._hooks.after_forward)
        if self.has_half_weights or self.patches_functions:
            adopted_model.warn_of_slow_half(model, self.settings.properties.half_dtype)
        if self.patches_functions:
            scripted = adopted_model.scripted_parts(model)
            if scripted:
                warn(
                    f"TorchScript has compiled {', '.join(scripted)}: amp casts nothing in there. torch's autocast "
                    "does, in the model's forward, by lists of its own. Use the Python code that it was made of."
                )
            exported = adopted_model.exported_parts(model)
            if exported:
                warn(
                    f"torch.export has made {', '.join(exported)}; the graphs call operators below torch's functions: "
                    "only torch's autocast casts in there, by lists of its own. Hand the module that was exported to "
                    "amp.initialize, and export it afterwards, which records the casts."
                )
            # The graph of a cast holds its weight, and so would keep the weights of a deleted model alive.
            self.ledger.on_undo(weakref.finalize(model, self.cache.end_iteration).detach, model)

    def _find_wrappers(self) -> None:
        """Finds wrappers in all models: earlier ones may have been sharded since."""
        for model in self._models:
            for wrapper in self.ranks.find_wrappers(model):
                self._hear_forwards_of(wrapper)
        if self.ranks.gathers_weights:
            self.cache.disable()

    def _is_of_model(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is a parameter or buffer of a converted model, even one added later."""
        return any(tensor is each for module in self._converted for _, each in conversion_plan.own_tensors(module))

    def _restore_weights(self) -> None:
        """Restores the dtypes of weights, and casts the state of optimizers accordingly."""
        for module in list(self._converted):
            self.conversion.record_late(module)
        now = {id(p): p.dtype for each in list(self._optimizers.values()) for p in each.gradients.parameters()}
        self.conversion.restore()
        for optimizer in self.optimizers:
            optimizer_state.cast_state(optimizer, lambda parameter: now.get(id(parameter)))
        for model in self._models:
            recurrent_weights.flatten(model)

    def adopt_optimizer(self, optimizer: OptimizerLike) -> None:
        """Adopts an optimizer: replaces its ``step`` by one that can skip, and makes masters of half weights.

        Raises:
            OptionError: its ``step`` cannot be replaced.
            UsageError: a parameter is in two optimizers that would each have a master of it.
        """
        settings = self.settings
        self._replaced.follow(optimizer)
        for adopted in list(self._optimizers.values()):
            if any(adopted.masters.is_master(parameter) for parameter in optimizer_state.parameters_of(optimizer)):
                raise UsageError(
                    f"this {type(optimizer).__name__} updates float32 masters that belong to another optimizer. Hand "
                    "only one of the two to amp.initialize: the outer one, if one is wrapped around the other."
                )
        wanted = bool(settings.properties.master_weights) and settings.properties.cast_model_type in HALVES
        try:
            masters = MasterWeights(optimizer, self.conversion, wanted, self._name_of)
            adopted = AdoptedOptimizer(
                OptimizerGradients(
                    optimizer, masters, self.ranks, self._optimizers, counts_non_finite=self.overflows.reports
                ),
                self.switch,
                self.cache,
                self.scalers,
                dynamic=settings.scale_policy.dynamic,
                exact_hooks=settings.exact_hooks,
                announce=self.verbose,
                on_overflow=self.overflows,
                kept_buffers=self.kept_buffers,
                checks_by=self.scalers[0] if settings.check_finite else None,
                prepare_masters=self._while_active(Session._prepare_masters),
            )
            adopted.install(self.ledger)
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"the step of this {type(optimizer).__name__} cannot be replaced on the object ({error}); expected an "
                "optimizer that keeps its own attributes. Hand in the optimizer inside it, if there is one."
            ) from error
        self._warn_of_half_updates(optimizer)
        self._optimizers[id(optimizer)] = adopted
        self.skip_counts.append(adopted.skips)
        finalizer = weakref.finalize(optimizer, _forget_optimizer, self._optimizers, id(optimizer))
        self.ledger.on_undo(finalizer.detach, optimizer)

    def _warn_of_half_updates(self, optimizer: OptimizerLike) -> None:
        """Warns if an optimizer updates half weights at a level that leaves weights as they are."""
        if self.settings.properties.cast_model_type is not None:
            return
        for parameter in optimizer_state.parameters_of(optimizer):
            if parameter.dtype in HALVES and parameter.requires_grad:
                eps = _eps_lost_in(parameter.dtype, optimizer)
                lost = "small updates are lost."
                if eps is not None:
                    lost += (
                        f" In {parameter.dtype}, its eps of {eps:g} is zero: where the square of a gradient is zero "
                        "as well, it divides by zero, and weights become NaN or infinite."
                    )
                warn(
                    f"the {type(optimizer).__name__} updates half weights, such as {self._name_of(parameter)} "
                    f"({parameter.dtype}), and opt_level={self.settings.properties.opt_level!r} makes no float32 "
                    f"masters: {lost} Make these weights float32 before the optimizer "
                    "(weight.data = weight.data.float()), or use opt_level='O2'."
                )
                return

    def _warn_of_frozen(self, optimizers: Iterable[OptimizerLike]) -> None:
        """Warns of optimizers that have frozen parameters only, if no optimizer has those that are to be trained."""
        updated = {id(each) for known in list(self._optimizers.values()) for each in known.gradients.model_parameters()}
        trained = [each for model in self._models for each in model.parameters() if each.requires_grad]
        for optimizer in optimizers:
            parameters = list(optimizer_state.parameters_of(optimizer))
            if not parameters or any(each.requires_grad for each in parameters):
                continue
            if trained and updated.isdisjoint(map(id, trained)):
                warn(
                    f"the {type(optimizer).__name__} updates {len(parameters)} parameters, all of which are frozen, "
                    f"and no optimizer has those that require gradients, such as {self._name_of(trained[0])}. Was it "
                    "made before get_peft_model, or before the model was frozen? Make it after: optimizer = "
                    f"torch.optim.{type(optimizer).__name__}([each for each in model.parameters() if "
                    "each.requires_grad], lr=...)."
                )

    def has_adopted(self, optimizer: object) -> bool:
        """Returns True if the session has adopted the optimizer, or one inside it."""
        return self._find(optimizer) is not None

    def _find(self, optimizer: Any) -> AdoptedOptimizer | None:
        """Returns the record of an optimizer, or of the one inside it if a framework wraps it; None if unknown."""
        for _ in range(_MOST_WRAPPERS):
            adopted = self._optimizers.get(id(optimizer))
            if adopted is not None:
                return adopted
            optimizer = getattr(optimizer, "optimizer", None)
        return None

    def adopted(self, optimizer: object) -> AdoptedOptimizer:
        """Returns the record of an optimizer.

        Raises:
            UsageError: it was never passed to ``amp.initialize``.
        """
        adopted = self._find(optimizer)
        if adopted is None:
            check_optimizer(optimizer)
            raise UsageError(
                f"this {type(optimizer).__name__} was never handed to amp.initialize, or only with enabled=False while "
                "amp was on for another model. Type: model, optimizer = "
                "amp.initialize(model, optimizer, ...), and use the optimizer that it returns."
            )
        return adopted

    @property
    def models(self) -> list[nn.Module]:
        """The adopted models that still exist."""
        return list(self._models)

    def trace_with(self, tracer: SessionTracer) -> None:
        """Has a tracer note the steps until the session is taken down, or `note_forwards` ends that."""
        self.overflows.tracer = tracer
        tracer.install(self.ledger)
        self.note_forwards(tracer)

    def note_forwards(self, recorder: Recorder | None) -> None:
        """Has the outermost forward passes noted; None ends that."""
        self._regions.recorder = recorder

    def named_modules(self) -> dict[int, str]:
        """Returns the names of all modules of the adopted models, by the module's id."""
        return {id(module): name for model in list(self._models) for name, module in model.named_modules()}

    @property
    def optimizers(self) -> list[OptimizerLike]:
        """The adopted optimizers that still exist."""
        found = (adopted.optimizer for adopted in list(self._optimizers.values()))
        return [optimizer for optimizer in found if optimizer is not None]

    def parameter_ids(self) -> set[int]:
        """Returns the ids of all parameters of the adopted models, and of their masters."""
        updated = {id(p) for each in list(self._optimizers.values()) for p in each.gradients.parameters()}
        return updated | set(adopted_model.named_parameters(self._models))

    @_with_casts_off
    def synchronise_weights(self, model: nn.Module | None = None) -> None:
        """Copies writes to half weights or to their masters from one to the other.

        Args:
            model: limits this to optimizers that update its parameters, since other optimizers may be in a step in
                another thread; None: all optimizers.
        """
        self._settle_replaced()
        self._settle_written()
        if self.has_masters:
            for masters in self._masters_of(model):
                masters.synchronise()

    def _masters_of(self, model: nn.Module | None) -> set[MasterWeights]:
        """Returns the masters of a model's parameters, one object per optimizer.

        Remembers them, since inside `torch.func.functional_call` a model has other parameters.
        """
        if model is None:
            return {adopted.masters for adopted in list(self._optimizers.values())}
        remembered = (reference() for reference in self._masters.get(model, ()))
        found = {masters for masters in remembered if masters is not None}
        if len(found) < len(self._optimizers):  # otherwise all are known
            found |= self.conversion.owners_of(model.parameters())
            self._masters[model] = tuple(map(weakref.ref, found))
        return found

    def _settle_replaced(self, given: Iterable[OptimizerLike] = ()) -> None:
        """Decides on the half parameters that user code has replaced in the models; see `ReplacedParameters.settle`."""
        if self._replaced.settle(given):
            for adopted in list(self._optimizers.values()):
                adopted.masters.make_missing()
            if not given:  # otherwise their masters are still to be made
                self.conversion.forget_unclaimed()

    def _settle_written(self) -> None:
        """Makes half weights without a master float32 that were written to, and tells of them."""
        self.conversion.without_master.check_left()
        widened = self.conversion.take_back()
        if widened:
            others = f" and {len(widened) - 1} more" if widened[1:] else ""
            logger.info(
                "%s%s: user code writes to weights that no optimizer of amp updates. They are float32 from now on, as "
                "half weights would lose small updates.",
                self._name_of(widened[0]),
                others,
            )

    def float32_of(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
        """Returns what is saved of a half tensor, and of a float32 copy that replaced one; None: the tensor itself."""
        full = self.conversion.float32_of(module, name, tensor)
        return self._replaced.float32_of(module, name, tensor) if full is None else full

    def _prepare_masters(self, masters: MasterWeights) -> None:
        """Gives an optimizer that is about to step the masters of what the models have now."""
        masters.search_replaced(self._replaced)
        self._settle_replaced()
        self._settle_written()
        self._replaced.tell()

    @_with_casts_off
    def complete_masters(self) -> None:
        """Makes missing masters of half parameters, such as unfrozen ones."""
        for adopted in list(self._optimizers.values()):
            adopted.masters.make_missing()

    def as_plain_data(self) -> LiveSettings:
        """Returns what `amp.settings` describes; syncs with the device, to read the loss scales."""
        return LiveSettings(
            is_on=True,
            disabled=False,
            **self.settings.as_plain_data(),
            loss_scales=[scaler.state.loss_scale for scaler in self.scalers],
            device_types=sorted(self.device_types),
            num_models=len(self.models),
            num_optimizers=len(self.optimizers),
            casts_here=self.patches_functions and not self.switch.is_off(),
        )

    def parameter_names(self) -> dict[int, str]:
        """Returns the names of all parameters of the adopted models, by the parameter's id."""
        return adopted_model.named_parameters(self._models)

    def _name_of(self, parameter: Tensor) -> str:
        return self.parameter_names().get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")

    # Losses

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
        return ScaledBlock(self._blocks, loss, optimizers, loss_id, **delays)

    def _prepare_block(
        self, loss: Any, optimizers: Sequence[OptimizerLike], loss_id: int
    ) -> tuple[LossScaler, list[AdoptedOptimizer]]:
        """Returns a loss's scaler, moved to its device, and the optimizers' records; adopts new ones for `amp.init`."""
        self.scaler(loss_id)  # raises if there is none
        if self.settings.adopts_on_use:
            new = {id(each): check_optimizer(each) for each in optimizers if not self.has_adopted(each)}
            if new:
                for each in new.values():
                    check_not_stepping(each)
                self.adopt([], list(new.values()))
        adopted = list(map(self.adopted, optimizers))
        for known in adopted:
            if known.masters.are_in_place:
                raise UsageError(
                    f"this amp.scale_loss stands in the step of its {type(known.optimizer).__name__}, where the "
                    "optimizer's parameters are its float32 masters, and not the model's half weights. Hand the "
                    "backward pass to the step as a closure: optimizer.step(closure)."
                )
        scaler = adopted[0].scalers[loss_id]
        scaler.to_device_of(loss)
        return scaler, adopted

    @_with_casts_off
    def judge(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Replaces the pending verdicts of a loss by one from other code, which has unscaled or reduced the gradients.

        The verdicts found here no longer count, since other ranks may have found others.

        Args:
            scaler: the scaler of the loss.
            found_inf: 0-dimensional float32, not 0 after an overflow; the scale reacts, and no step is skipped for it.
        """
        everyone = list(self._optimizers.values())
        concerned = [each for each in everyone if any(use.scaler is scaler for use in each.gradients.pending)]
        for adopted in concerned or everyone:
            pending = adopted.gradients.pending
            adopted.gradients.pending = [scale_use for scale_use in pending if scale_use.scaler is not scaler]
            adopted.note_other_scale()
        scaler.forget()
        scaler.update_by(found_inf)

    @_with_casts_off
    def _check_clipped(self, grads: Sequence[Tensor]) -> None:
        """Warns if gradients that torch is about to clip are scaled."""
        for adopted in list(self._optimizers.values()):
            adopted.gradients.check_not_scaled_when_clipped(grads)

    def updated(self, optimizer: OptimizerLike, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns those of a model's parameters that an optimizer updates, with what it updates in their place.

        Args:
            optimizer: an adopted optimizer.
            parameters: parameters of a model, or masters.

        Returns:
            Pairs of the model's parameter and its master, in the optimizer's order; twice the parameter if it has none.
        """
        wanted, own = set(map(id, parameters)), self.adopted(optimizer).gradients.model_parameters()
        pairs = zip(own, self.master_params(optimizer), strict=True)
        return [(each, full) for each, full in pairs if id(each) in wanted or id(full) in wanted]

    @_with_casts_off
    def master_params(self, optimizer: OptimizerLike) -> Iterator[Tensor]:
        """Returns the parameters that an optimizer updates, up to date, with their gradients."""
        gradients = self.adopted(optimizer).gradients
        self._settle_replaced()
        gradients.synchronise(weights_too=True)
        return gradients.parameters()

    @_with_casts_off
    def gradients_are_finite(self, optimizer: OptimizerLike) -> Tensor:
        """Returns whether the gradients of an optimizer are finite; see `OptimizerGradients.are_finite`."""
        return self.adopted(optimizer).gradients.are_finite()

    @_with_casts_off
    def clip_grad_norm_(self, optimizer: OptimizerLike, max_norm: float) -> Tensor:
        """Clips the gradients of an optimizer; see `clipping.clip`."""
        return clipping.clip(self.adopted(optimizer), max_norm)

    @_with_casts_off
    def unscale_(self, optimizer: OptimizerLike) -> None:
        """Unscales the gradients of an optimizer; see `clipping.unscale`."""
        clipping.unscale(self.adopted(optimizer))

    # Numbers

    @_with_casts_off
    def stats(self) -> dict[str, int | float]:
        """Returns the numbers of ``amp.stats``; reads each device once."""
        states = read_states(self.scalers)
        for adopted in list(self._optimizers.values()):
            adopted.read_verdicts()
        counts = self.cache.counts()
        uses = counts.casts + counts.cache_hits
        numbers: dict[str, int | float] = {}
        for index, (scaler, state) in enumerate(zip(self.scalers, states, strict=True)):
            suffix = f"/{index}" if len(self.scalers) > 1 else ""
            numbers[f"loss_scale{suffix}"] = state.loss_scale
            numbers[f"clean_steps{suffix}"] = state.unskipped
            numbers[f"overflows{suffix}"] = scaler.overflows
        numbers["skipped_steps"] = sum(count.skipped for count in self.skip_counts)
        if len(self.skip_counts) > 1:
            numbers |= {f"skipped_steps/{index}": count.skipped for index, count in enumerate(self.skip_counts)}
        return {
            **numbers,
            "casts": counts.casts,
            "cache_hits": counts.cache_hits,
            "cache_hit_rate": counts.cache_hits / uses if uses else 0.0,
            "cached_bytes": self.cache.nbytes(),
            "patched_functions": self._functions.count,
        }

    # Inference

    def frozen_weights(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Returns the block behind ``amp.frozen_weights``.

        Raises:
            UsageError: the session has adopted neither the model, nor a part of it, nor a model around it.
        """
        # amp.init adopts no models.
        if not self.settings.adopts_on_use and not any(
            adopted in model.modules() or model in adopted.modules() for adopted in self.models
        ):
            raise UsageError(
                f"this {type(model).__name__} was never handed to amp.initialize, or is a copy of one that was. Type: "
                "model = amp.initialize(model, ...), and use the model that it returns, or a wrapper around it."
            )
        return self.cache.frozen(model.parameters()) if self.patches_functions else contextlib.nullcontext()

    # Parts of torch that work beside amp

    def _seeing_wrappers(self, original: Callable[..., None]) -> Callable[..., None]:
        """Returns a `DistributedDataParallel.__init__` that reports new wrappers to this session."""
        signature, active = inspect.signature(original), self._while_active(lambda session: session)

        @functools.wraps(original)
        def __init__(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            session = active()
            if session is None:
                original(wrapper, *args, **kwargs)
                return
            session.synchronise_weights()
            original(wrapper, *args, **kwargs)
            session.conversion.without_master.note_kept()  # the wrapper has sent the weights of rank 0 as they are
            session._follow_wrapper(wrapper, signature.bind(wrapper, *args, **kwargs).arguments.get("init_sync", True))

        return __init__

    @_with_casts_off
    def _follow_wrapper(self, wrapper: DistributedDataParallel, has_sent_weights: bool) -> None:
        """Notes that DDP has wrapped a model, and broadcasts masters and scales from rank 0.

        Args:
            wrapper: the wrapper.
            has_sent_weights: whether DDP has broadcast the half weights; it knows no masters.
        """
        self.ranks.add(wrapper)
        self._hear_forwards_of(wrapper)
        if not has_sent_weights:
            return
        for tensor in distributed.broadcast_tensors(wrapper):
            full = self.conversion.kept_float32_values(tensor)
            if full is not None:
                distributed.broadcast_from_rank_0(full, wrapper)
                self.conversion.note(tensor)
        if self.settings.scale_policy.dynamic:  # rank 0 alone may have loaded a checkpoint
            device = next(wrapper.parameters()).device
            for tensor in [tensor for scaler in self.scalers for tensor in scaler.tensors_on(device)]:
                distributed.broadcast_from_rank_0(tensor, wrapper)

    def _hear_forwards_of(self, wrapper: DistributedDataParallel) -> None:
        hook = self._hooks.after_replicated_forward
        if hook not in getattr(wrapper, FORWARD_HOOKS).values():
            self.ledger.on_undo(wrapper.register_forward_hook(hook).remove, wrapper)
            if self.has_masters and wrapper.gradient_as_bucket_view:
                before = wrapper.register_forward_pre_hook(self._hooks.before_replicated_forward)
                self.ledger.on_undo(before.remove, wrapper)

    def expect_moved_gradients(self, wrapper: DistributedDataParallel) -> None:
        """Prepares for a forward pass in which DDP may replace gradients by equal ones: the user has not."""
        self._moving = []
        if distributed.is_about_to_move_gradients(wrapper):
            ids = frozenset(map(id, wrapper.parameters()))
            for adopted in list(self._optimizers.values()):
                gradients = adopted.masters.gradients
                self._moving.append((gradients, gradients.kept(ids)))

    def note_replicated_forward(self, wrapper: DistributedDataParallel) -> None:
        """Notes a forward pass of a wrapper: its settings then decide whether the backward pass reduces gradients.

        Raises:
            UsageError: it runs inside ``join()``, where ranks without data skip the backward passes of the others.
        """
        if is_joining(wrapper) and (self.has_masters or self.settings.scale_policy.dynamic):
            raise UsageError(
                "under DistributedDataParallel.join() processes that have run out of data do without the passes that "
                "the others still make, so that their loss scales and float32 masters would go apart. Give all of them "
                "the same number of batches (drop_last=True), or use opt_level='O1' with a static loss_scale."
            )
        self.ranks.add(wrapper)
        moving, self._moving = self._moving, []
        for gradients, pairs in moving:
            gradients.note_moved(pairs)

    def let_unscale(self, optimizer: OptimizerLike) -> None:
        """Prepares for a `GradScaler`, torch's or ampatch's, that is about to unscale an optimizer's gradients.

        Raises:
            UsageError: amp has them, or has scaled them too.
        """
        adopted = self._optimizers.get(id(optimizer))
        if adopted is None:
            self._unadopted.exempt(optimizer)
            return
        if adopted.masters or any(use.found_inf is not None for use in adopted.gradients.pending):
            raise UsageError(
                f"a GradScaler cannot unscale for this {type(optimizer).__name__}: amp.scale_loss does, and has it "
                "skip where gradients overflow. Leave the GradScaler out: with amp.scale_loss(loss, optimizer) as "
                "scaled_loss: scaled_loss.backward(), and then optimizer.step()."
            )
        adopted.note_other_scale()

    def _while_active(self, method: Callable[Concatenate[Session, _P], _T]) -> Callable[_P, _T | None]:
        """Binds a method weakly, for code that may keep it; it returns None once the session is taken down."""
        reference = weakref.ref(self)

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            session = reference()
            return method(session, *args, **kwargs) if session is not None and session.switch.active else None

        return call


def _check_not_graphed(model: nn.Module) -> None:
    """Raises if the forward of a model, or of a part of it, is a CUDA graph, to which amp could not add casts."""
    for name, module in model.named_modules():
        if cuda_graphs.is_graphed(module):
            raise OptionError(
                f"torch.cuda.make_graphed_callables has made {f'its {name!r}' if name else 'the model'} a CUDA graph, "
                "which computes in the types in which it was captured. Call amp.initialize first, and "
                "torch.cuda.make_graphed_callables on what it returns."
            )


def _eps_lost_in(dtype: torch.dtype, optimizer: OptimizerLike) -> float | None:
    """Returns an optimizer's eps that is zero in a half type, as Adam's 1e-8 is in float16; None if there is none."""
    given = {group["eps"] for group in optimizer.param_groups if isinstance(group.get("eps"), float)}
    return next((eps for eps in given if eps and not torch.tensor(eps, dtype=dtype, device="cpu")), None)


def _is_wrapped_by_scheduler(owner: object, name: str) -> bool:
    """Returns True if an attribute is an optimizer's step that an LR scheduler has wrapped on top of amp's."""
    return hasattr(getattr(owner, name, None), WRAPPED_BY_SCHEDULER)


def _forget_optimizer(optimizers: dict[int, AdoptedOptimizer], key: int) -> None:
    """Forgets an adopted optimizer that was deleted."""
    adopted = optimizers.pop(key, None)
    if adopted is not None:
        adopted.gradients.optimizer_died()
