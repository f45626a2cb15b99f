"""Casts in torch's functions: by the lists at O1 and O4, and of what meets a half weight at O2, O3 and O5.

Owns the wrappers of functions, the regions in which they cast, and the rules of parts of models. Must not change a
weight.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from ampatch import compilers
from ampatch.cast_lists import list_edits
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule
from ampatch.casting.cast_errors import note_half
from ampatch.casting.nested import tensors_in
from ampatch.errors import OptionError, UsageError, warn
from ampatch.native.calls import Accelerator
from ampatch.parts.part import Part, Shared
from ampatch.patching import (
    adopted_model,
    autocast_checks,
    beside_half_weights,
    peft_methods,
    replaced_forward,
    thread_rules,
)
from ampatch.patching.adapters import Adapters, InHalf
from ampatch.patching.adopted_forward import Regions
from ampatch.patching.function_patches import FunctionPatches, Registration
from ampatch.patching.fused_linear import LinearCalls
from ampatch.patching.module_rules import give_rules, tokens_of
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.switch import is_in_half
from ampatch.torch_private.compilers import has_compiled
from ampatch.weights import conversion_plan
from ampatch.weights.ruled_parts import ruled_parts


class Casts(Part):
    """The casts of a session.

    Args:
        shared: what all parts share.
        registered: the functions that the user had registered when the session began.

    Attributes:
        registered: the argument.
        regions: the regions in which functions cast.
        adapters: functions that cast the arguments of decorated functions, by kind.
        lists_of_parts: the lists of the parts of models that have rules of their own, by token.
    """

    def __init__(self, shared: Shared, registered: Sequence[Registration]) -> None:
        super().__init__(shared)
        settings, half, kinds = self.settings, self.settings.properties.half_dtype, shared.device_types
        self.registered = tuple(registered)
        made = Adapters(
            half,
            shared.cache,
            kinds,
            allow_banned=settings.allow_banned,
            labelled=settings.profile_casts,
            linear=LinearCalls() if settings.fused_linear else None,
            hears_regions=settings.patches_functions,
            for_models=settings.casts_for_models,
        )
        self.regions = Regions(shared.switch, half, kinds, settings.casts_in_half)
        self.adapters = made.by_kind()
        self._accelerator = Accelerator(shared.cache.state, shared.cache.cast, shared.switch, kinds)
        lists = settings.lists
        self._tokens = tokens_of([entry for entry in lists.modules if not entry.is_float32])
        self.lists_of_parts = {token: lists.of_module(entry) for entry, token in self._tokens.items()}
        self._functions = FunctionPatches(
            self.ledger, made, self._accelerator, shared.switch, for_half_models=not settings.patches_functions
        )

    def install(self) -> None:
        """Patches torch's functions, and what of torch asks whether autocast is on."""
        settings, hooks, switch, ledger = self.settings, self.shared.hooks, self.shared.switch, self.ledger
        if not settings.patches_any:
            return
        compilers.build_torch_tables()
        as_without_amp = functools.partial(adopted_model.as_without_amp, (hooks.before_forward, hooks.after_forward))
        compilers.prepare_for_patches(ledger, self._functions.wrappers.original_of, as_without_amp)
        replaced_forward.follow_copies(ledger)
        if not settings.patches_functions:
            self._functions.install(settings.lists, (), self.lists_of_parts)
            autocast_checks.accept_any_float(ledger, lambda: switch.active and is_in_half())
        else:
            self._warn_of_undone_edits()
            self._functions.install(settings.lists, self.registered, self.lists_of_parts)
            autocast_checks.patch_autocast_checks(ledger, switch)
            autocast_checks.follow_autocast_regions(
                ledger, settings.properties.half_dtype, self.shared.device_types, settings.casts_for_models
            )
        if settings.casts_for_models or settings.casts_in_half:
            self.regions.install(ledger)
        state_of_reentrant = self.regions.state_of_checkpoint if settings.casts_for_models else None
        # The backward pass that follows needs the casts of a recomputed region, and holds them itself.
        switch.patch_checkpoint(ledger, self.shared.cache.end_iteration, state_of_reentrant)
        switch.patch_data_parallel(ledger)
        compilers.forget_compiled()

    def _warn_of_undone_edits(self) -> None:
        edits = [known.as_edit() for known in self.registered]
        lists, half_dtype = self.settings.lists, self.settings.properties.half_dtype
        told = list_edits.undone_edits_in_brief(lists, half_dtype, edits)
        if told:
            warn(told)
        in_modules = list_edits.undone_in_modules(lists, [half_dtype], edits)
        if in_modules:
            more = f" {len(in_modules) - 1} more like this." if len(in_modules) > 1 else ""
            warn(f"{in_modules[0]}{more}")

    def check_fuses_linear(self) -> None:
        """Raises `OptionError` if no linear layer can become one node, by the lists or by what was patched."""
        if not self._functions.fuses_linear:
            raise OptionError(
                "fused_linear=True has no effect here: no list casts torch.nn.functional.linear to half, or it was "
                "registered or replaced by another library. Leave fused_linear out, or put linear on the whitelist."
            )

    def mark(self) -> Callable[[], None]:
        """Returns a function that forgets the device types of models that were adopted since."""
        kinds = set(self.shared.device_types)

        def forget() -> None:
            self.shared.device_types.intersection_update(kinds)
            self._accelerator.set_device_types(self.shared.device_types)

        return forget

    def adopt_model(self, model: nn.Module, is_new: bool) -> None:
        """Replaces functions that a model keeps, and runs its forward in a region."""
        self.shared.device_types.update(adopted_model.device_types(model))
        self._accelerator.set_device_types(self.shared.device_types)
        if self.settings.patches_any:
            self._functions.wrappers.rebind_model(model)
            self._give_rules(model)
            self.regions.run_forward(model, self.ledger)
            if is_new:
                adopted_model.warn_of_slow_half(model, self.settings.properties.half_dtype)
        if is_new and self.settings.patches_functions:
            adopted_model.warn_of_graphs(model)
            # The graph of a cast holds its weight, and so would keep the weights of a deleted model alive.
            self.ledger.on_undo(weakref.finalize(model, self.shared.cache.end_iteration).detach, model)
        peft_methods.adapt(model, self.ledger, self.shared.switch)

    def _give_rules(self, model: nn.Module) -> None:
        """Has the parts of a model in float32 or with rules of their own compute so; ``keep_fp32`` comes first."""
        kept = conversion_plan.kept_modules(model, self.settings.keep_fp32)
        parts: dict[nn.Module, tuple[str, str, thread_rules.Token | None]]
        parts = {module: (name, "keep_fp32", None) for module, name in kept.items()}
        for module, part in ruled_parts(model, self.settings.lists.modules).items():
            parts.setdefault(module, (part.name, part.asked, self._tokens.get(part.entry)))
        if not self.settings.patches_functions:  # there the weights of parts in float32 are float32
            parts = {module: told for module, told in parts.items() if told[2] is not None}
        give_rules(parts, self.ledger, self.shared.switch)

    def finish(self, models: Collection[nn.Module], _: Collection[OptimizerLike]) -> None:
        """Takes in the parts of models, and functions that half tables need."""
        for model in models:
            self.regions.add(model)
        if self.settings.casts_in_half:
            tables = [table for model in models for table in beside_half_weights.tables(model)]
            if self._functions.add_tables(tables):
                for model in self.shared.adopted.models:
                    self._functions.wrappers.rebind_model(model)

    def explain(self, _: nn.Module, inputs: object, error: BaseException) -> None:
        """Says of an error in a forward that casts may have caused it; not if the user's own input was half."""
        half = self.settings.properties.half_dtype
        is_own = not self.settings.has_half_weights and half in {tensor.dtype for tensor in tensors_in(inputs)}
        if self.has_made_half() and not is_own:
            note_half(error, half)

    def explain_backward(self, error: BaseException) -> None:
        """Says of an error in a backward pass that casts may have caused it."""
        if self.has_made_half():
            # With half weights, all results are half again.
            cure = "opt_level='O1', " if self.settings.has_half_weights else ""
            note_half(error, self.settings.properties.half_dtype, f"{cure}keep_fp32=nn.BatchNorm1d")

    def has_made_half(self) -> bool:
        """Returns True if a tensor may be half because of amp."""
        # Casts in compiled code do not count.
        return self.settings.has_half_weights or self.shared.cache.counts().casts > 0 or has_compiled()

    def rules(self) -> dict[Path, Rule]:
        """Returns the rules that this session applies, by path."""
        rules = self.settings.lists.for_half(self.settings.properties.half_dtype)
        return {path: rule for path, rule in rules.items() if self.applies(rule)}

    def applies(self, rule: Rule) -> bool:
        """Returns True if this session applies a rule: at O2, O3 and O5 only those of functions that need float32."""
        return self.settings.patches_any and self._functions.applies(rule)

    def in_half(self, function: Callable[..., Any]) -> tuple[Path, InHalf] | None:
        """Returns how a function's arguments get one type with half weights; None if they stay as they are."""
        return self._functions.in_half(function)

    def part_in_force(self) -> tuple[str, CastLists] | None:
        """Returns the part of a model whose rules this thread computes by, and its lists; None: the session's."""
        token = thread_rules.in_force()
        entries = [f"{entry.name!r} ({entry.source})" for entry, each in self._tokens.items() if each is token]
        return (" or ".join(entries), self.lists_of_parts[token]) if entries else None

    def frozen_weights(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Returns the block behind ``amp.frozen_weights``.

        Raises:
            UsageError: the session has adopted neither the model, nor a part of it, nor a model around it.
        """
        # amp.init adopts no models.
        if not self.settings.adopts_on_use and not any(
            adopted in model.modules() or model in adopted.modules() for adopted in self.shared.adopted.models
        ):
            raise UsageError(
                f"this {type(model).__name__} was never handed to amp.initialize, or is a copy of one that was. Type: "
                "model = amp.initialize(model, ...), and use the model that it returns, or a wrapper around it."
            )
        if not self.settings.patches_functions:
            return contextlib.nullcontext()
        return self.shared.cache.frozen(model.parameters())

    def stats(self) -> dict[str, int | float]:
        """Returns the numbers of casts and of patched functions."""
        counts = self.shared.cache.counts()
        uses = counts.casts + counts.cache_hits
        return {
            "casts": counts.casts,
            "cache_hits": counts.cache_hits,
            "cache_hit_rate": counts.cache_hits / uses if uses else 0.0,
            "cached_bytes": self.shared.cache.nbytes(),
            "patched_functions": len(self._functions.wrappers),
        }

    def restore(self) -> None:
        """Puts functions back that models and modules took over from wrappers."""
        if self.settings.patches_any:
            modules = (module for model in self.shared.adopted.models for module in model.modules())
            self._functions.wrappers.release(modules)
