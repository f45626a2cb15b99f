"""Checks arguments of the public functions against each other, and against models and optimizers.

A check of a single value is in the module that owns the value, such as `ampatch.opt_levels`. Must change nothing.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ampatch import distributed, opt_levels
from ampatch.cast_lists import list_edits, rules
from ampatch.cast_lists.lists import CastLists, Overlay, shipped
from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES, default_half
from ampatch.interfaces.mixed_precision import mixed_precision_within
from ampatch.opt_levels import Properties, as_flag
from ampatch.patching import adopted_model
from ampatch.runtime import runtime
from ampatch.session import Session
from ampatch.weights import conversion_plan, untracked_writes
from ampatch.weights.optimizer_state import parameters_of

_F = TypeVar("_F")


def checks_names(function: _F) -> _F:
    """Decorates a function: a call with an unknown argument raises `OptionError`, which suggests the closest name."""
    known: Any = inspect.signature(function).parameters  # type: ignore[arg-type]

    @functools.wraps(function)  # type: ignore[arg-type]
    def checked(*args: Any, **kwargs: Any) -> Any:
        opt_levels.check_names(kwargs, known, f"amp.{checked.__name__} got")
        return function(*args, **kwargs)  # type: ignore[operator]

    return checked  # type: ignore[return-value]


def half_dtype_of(
    given: torch.dtype | str | None,
    alias: torch.dtype | str | None,
    alias_name: str,
    opt_level: str,
    models: Iterable[nn.Module],
) -> torch.dtype:
    """Returns the requested half dtype; else the live session's, the one of weights that are half, the device's."""
    checked = None if given is None else opt_levels.check_half_dtype(given)
    if alias is not None:
        also = opt_levels.check_half_dtype(alias, alias_name)
        if checked is not None and checked is not also:
            raise OptionError(f"half_dtype={checked} and {alias_name}={also} say different things; give one of them.")
        checked = also
    if checked is not None:
        level = opt_levels.LEVELS[opt_levels.check_opt_level(opt_level)]
        if level.half_dtype not in (None, checked):
            raise OptionError(
                f"half_dtype={checked} contradicts opt_level={opt_level!r}, which is {level.half_dtype}. Leave "
                f"half_dtype out, or use opt_level={'O1' if opt_level == 'O4' else 'O2'!r}."
            )
        return checked
    live = runtime.live
    if live is not None and not runtime.may_replace:
        return live.settings.properties.half_dtype
    halves = {parameter.dtype for model in models for parameter in model.parameters()} & HALVES
    if len(halves) == 1:
        return halves.pop()
    return default_half(adopted_model.device_types_of(models))


def lists_of(overlay: Overlay | None, opt_level: str | None = None) -> CastLists:
    """Returns the shipped lists, those of a level, with a user's changes laid over them."""
    return shipped(opt_level) if overlay is None else shipped(opt_level).overlaid(overlay)


def check_have_effect(lists: CastLists, properties: Properties) -> None:
    """Raises if a user's lists have no effect at a level that patches no functions by the lists.

    Raises:
        OptionError: the level converts no weights, and the lists change rules or a part has a format. Or it converts
            weights, and no entry has a format or is for functions that need float32. Or it converts weights, and an
            entry under ``modules`` has rules of its own.
    """
    level = properties.opt_level
    before = shipped(level)
    converts = properties.cast_model_type in HALVES
    has_formats = any(entry.formats for entry in lists.modules)
    if converts:
        own = _without_effect(lists, before)
        if isinstance(own, rules.Rule):
            raise OptionError(
                f"cast_lists contradicts opt_level={level!r}: {own.source} has {own.path} {rules.place(own)}, and "
                "this level applies no lists. To take its format away, put it in the whitelist; for float32, name the "
                "parts of the model in keep_fp32."
            )
        if own is not None:
            raise OptionError(
                f"cast_lists contradicts opt_level={level!r}: {own.source} has an entry for {own.name!r} that this "
                f"level cannot follow: it applies only {rules.FLOAT32} and formats to parts. Leave other rules out, or "
                "type opt_level='O1'."
            )
    of_session = [replace(each, modules=()) for each in (before, lists)]
    only_parts = lists.modules != before.modules and not list_edits.difference(*of_session)
    if only_parts and (converts or not has_formats):
        return  # parts in float32 are in float32 here, too; without half weights, other parts have nothing to change
    if not converts:
        raise OptionError(
            f"cast_lists contradicts opt_level={level!r}, which does not patch torch's functions. Leave cast_lists "
            "out, use opt_level='O1', or give amp.initialize patch_torch_functions=True."
        )
    if lists.at_every_level() == before.at_every_level():
        raise OptionError(
            f"cast_lists contradicts opt_level={level!r}, which applies only entries with needs_float32 or format, and "
            "these lists change none of those beside `modules`. Leave cast_lists out, use opt_level='O1', or give "
            "amp.initialize patch_torch_functions=True."
        )


def _without_effect(lists: CastLists, before: CastLists) -> rules.Rule | rules.ModuleRules | None:
    """Returns a rule or an entry for parts that has no effect on models with half weights; None if all have one.

    An entry has one if it says float32, or gives functions a format or takes it away. An empty entry has one if it
    takes a part out of another entry. No function becomes a float32 one there.
    """
    known = [before.rules, lists.rules, *(dict(entry.changes or ()) for entry in lists.modules)]
    formatted = {key for each in known for key, rule in each.items() if rule is not None and rule.formats}
    has_formats, replaced = any(entry.formats for entry in lists.modules), {entry.name for entry in before.modules}

    def stays_half(rule: rules.Rule | None) -> bool:
        return rule is None or rule.treatment is rules.Treatment.WHITELIST or rule.is_for_half_weights

    for key, rule in lists.rules.items():
        if key in formatted and rule != before.rules.get(key) and not stays_half(rule):
            return rule
    for entry in lists.modules:
        has_effect = has_formats or entry.name in replaced
        if entry.changes:
            changed = dict(entry.changes)
            reaches = has_formats or not formatted.isdisjoint(changed)
            has_effect = reaches and all(map(stays_half, changed.values()))
        if not (has_effect or entry.is_float32):
            return entry
    return None


def kept_in_float32(argument: str, given: object, properties: Properties) -> conversion_plan.KeepFloat32:
    """Returns names, patterns and classes of submodules that an argument keeps in float32."""
    kept = conversion_plan.check_keep_fp32(given, argument)
    if kept and _leaves_weights(properties):
        raise OptionError(f"{argument} contradicts {_LEAVES_WEIGHTS}")
    if kept and not (properties.patch_torch_functions or properties.cast_model_type in HALVES):
        raise OptionError(
            f"{argument} contradicts opt_level={properties.opt_level!r}, which computes in float32 everywhere. Leave "
            f"{argument} out, or use opt_level='O1' or 'O2'."
        )
    return kept


def cast_buffers_of(given: object, properties: Properties) -> conversion_plan.CastBuffers:
    """Returns the buffers that become half."""
    wanted = conversion_plan.check_cast_buffers(given)
    if wanted and _leaves_weights(properties):
        raise OptionError(f"cast_buffers contradicts {_LEAVES_WEIGHTS}")
    if wanted and properties.cast_model_type not in HALVES:
        raise OptionError(
            f"cast_buffers contradicts opt_level={properties.opt_level!r}, which makes no weights half. Leave "
            "cast_buffers out, or use opt_level='O2'."
        )
    return wanted


_LEAVES_WEIGHTS = "cast_model_type=False, which leaves all weights and buffers as they are. Leave one of the two out."


def _leaves_weights(properties: Properties) -> bool:
    """Returns True if ``cast_model_type=False`` is given at a level that makes weights half."""
    converts = opt_levels.LEVELS[properties.opt_level].converts
    return converts and properties.cast_model_type is None and not properties.patch_torch_functions


def fuses_linear(fused_linear: object, properties: Properties) -> bool:
    """Returns whether linear layers become one node: as requested, otherwise if lists cast float32 weights."""
    if fused_linear is None:
        return properties.casts_float32_weights
    if as_flag("fused_linear", fused_linear) and not properties.casts_float32_weights:
        raise OptionError(
            f"fused_linear=True contradicts opt_level={properties.opt_level!r}, at which no list casts float32 weights "
            "of linear layers. Leave fused_linear out, or use opt_level='O1'."
        )
    return as_flag("fused_linear", fused_linear)


def check_optimizers(
    optimizers: list[Any], models: list[nn.Module], live: Session | None, outgoing: Session | None
) -> None:
    """Raises if an optimizer was passed before, or updates no parameter of these models or of known ones.

    One that updates tensors of no model may stand beside one that updates parameters of these.
    """
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for session in (live, outgoing):  # an optimizer of the outgoing session still updates its masters
        known |= session.adopted.parameter_ids() if session is not None else set()
    every = [*optimizers, *(live.adopted.optimizers if live is not None else ())]
    has_models = any(id(parameter) in known for each in every for parameter in parameters_of(each))
    for index, optimizer in enumerate(optimizers):
        if any(optimizer is other for other in optimizers[:index]) or (
            live is not None and live.adopted.has(optimizer)
        ):
            raise UsageError(
                f"this {type(optimizer).__name__} was handed to amp.initialize before. Hand it in once, or type "
                f"amp.deinitialize() first."
            )
        parameters = list(parameters_of(optimizer))
        # A plain tensor, such as a temperature, is the parameter of no model. But copies of weights are plain, too.
        may_be_others = not has_models or any(isinstance(each, nn.Parameter) for each in parameters)
        if parameters and may_be_others and not any(id(parameter) in known for parameter in parameters):
            raise OptionError(
                f"the {type(optimizer).__name__} updates {len(parameters)} parameters, and none of them is the "
                f"model's. Was it made for another model, or before the model was rebuilt? Make it after: optimizer = "
                "torch.optim.SGD(model.parameters(), lr=0.1). If they are of no model, as a learned temperature is, "
                "make them torch.zeros(1, requires_grad=True), no nn.Parameter, and hand this optimizer in beside the "
                "model's: amp.initialize(model, [optimizer, other])."
            )


def check_whole(optimizers: list[Any], models: list[nn.Module], properties: Properties) -> None:
    """Raises if weights are sharded or tied by memory: they can be neither converted nor given masters."""
    instead = "Use opt_level='O1' (or 'O4')"
    parameters = {id(each): each for model in models for each in model.parameters()}
    if distributed.is_sharded(itertools.chain(parameters.values(), *map(parameters_of, optimizers))):
        raise OptionError(
            f"the model's parameters are sharded over ranks, and opt_level={properties.opt_level!r} would convert "
            f"them, which neither FSDP nor tensor parallelism expects. {instead}. To save memory, let FSDP gather the "
            "weights in half (MixedPrecisionPolicy)."
        )
    if any(id(each) in parameters for wrapper in distributed.replicating_wrappers() for each in wrapper.parameters()):
        raise OptionError(
            f"the model is in a DistributedDataParallel already, which would no longer reduce the gradients of weights "
            f"that opt_level={properties.opt_level!r} converts. Call amp.initialize first, then wrap the model."
        )
    if properties.master_weights in opt_levels.TEMPORARY:
        tied = untracked_writes.names_of_one_memory(each for model in models for each in model.named_parameters())
        if tied is not None:
            raise OptionError(
                f"{tied[0]!r} and {tied[1]!r} are two Parameters that share memory, and master_weights="
                f"{properties.master_weights!r} would give each of them a weight of its own; expected one Parameter. "
                f"Type model.{tied[1]} = model.{tied[0]} before you make the optimizer, which ties them."
            )
    for optimizer in optimizers:
        if properties.master_weights and mixed_precision_within(optimizer) is not None:
            raise OptionError(
                f"the {type(optimizer).__name__} has masters of its own, by a MixedPrecision, and opt_level="
                f"{properties.opt_level!r} would give it others. Leave MixedPrecision out, or type "
                "master_weights=False."
            )
