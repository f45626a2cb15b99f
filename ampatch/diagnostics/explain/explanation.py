"""Explains what amp does to one function: `explain`, behind ``amp.explain`` and ``ampatch explain``.

Owns the order of the answer, and what it says of the session, of one call, and of the places that hold the function.
`ampatch.patching.predictions` predicts the casts, and `ampatch.patching.function_places` searches for places. Must
never call the function, cast an argument, or change the session.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampatch.cast_lists import list_edits
from ampatch.cast_lists.annotations import shipped_entries
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import EVERY_DEVICE, ModuleRules, Rule, Treatment
from ampatch.cast_lists.spellings import called_by, operators_in
from ampatch.casting.nested import tensors_of_call
from ampatch.diagnostics.explain.result import BoundPlace, Called, ExplainedCall, Explanation
from ampatch.diagnostics.explain.rulings import Rulings, located
from ampatch.diagnostics.explain.subjects import Subject, subject_of
from ampatch.diagnostics.shown_names import shown_path
from ampatch.errors import OptionError
from ampatch.function_wrapper import is_wrapper
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES, HALVES
from ampatch.opt_levels import dtype_name
from ampatch.patching import adopted_model, casting_mode, function_places
from ampatch.patching.function_places import Kind
from ampatch.patching.predictions import Prediction, Predictor, unchanged
from ampatch.runtime import runtime
from ampatch.session import Session


def explain(
    target: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    lists: CastLists | None = None,
    half_dtypes: Sequence[torch.dtype] = (),
) -> Explanation:
    """Returns what amp does to a function, or to the functions that a module calls.

    Args:
        target: the function, its name or its path, or an operator ("@"); or a module or its class.
        args: arguments of a call, by position. The call is not made.
        kwargs: arguments of the call, by keyword.
        lists: cast lists; None for those of the live session, or else the shipped ones.
        half_dtypes: half dtypes to explain; empty for both.

    Raises:
        OptionError: ``target`` is none of these, or a module with arguments.
    """
    rulings = Rulings(lists, tuple(half_dtypes) or tuple(HALF_DTYPES.values()))
    subject = subject_of(target, rulings)
    has_call = bool(args or kwargs) or any(isinstance(value, Tensor) for value in subject.args)
    if has_call and subject.is_module:
        raise OptionError(
            f"found arguments for {subject.text}, a module; expected none, since a module is explained by "
            "the functions that it calls. Pass them to one of these, or watch a step with amp.report."
        )
    args, kwargs = (*subject.args, *args), {**subject.kwargs, **(kwargs or {})}
    calls = tuple(dict.fromkeys(_called(subject, rulings)))
    return Explanation(
        subject.text,
        types.MappingProxyType(_policy(rulings)),
        (*_state(rulings), *subject.sentences),
        tuple(dict.fromkeys(map(rulings.spelling, subject.spelled))),
        calls,
        tuple(_bound_places(subject, rulings)),
        _explained_call(subject, rulings, args, kwargs) if has_call else None,
        tuple(_notes(subject, rulings, calls)),
    )


def _policy(rulings: Rulings) -> dict[str, Any]:
    """Returns the settings as plain data; dtypes are names."""
    live = rulings.live
    return {
        "is_on": live is not None,
        "opt_level": None if live is None else live.settings.properties.opt_level,
        "half_dtype": dtype_name(rulings.half_dtype),
        "patches_functions": None if live is None else live.settings.patches_functions,
        "allow_banned": rulings.allows_banned,
        "casts_here": live is not None and live.settings.patches_functions and not live.switch.is_off(),
        "cast_lists": list(rulings.lists.files),
        "modules": {entry.name: entry.source for entry in rulings.of_session.modules},
    }


def _state(rulings: Rulings) -> Iterator[str]:
    """Yields sentences that say whether and how amp is on."""
    live, named = rulings.live, " and ".join(["the shipped lists", *rulings.lists.files])
    if live is None:
        off = "amp is off (enabled=False)" if runtime.disabled else "amp is off"
        yield f"{off}; this is what {named} would do{_in_one_half(rulings)}."
    else:
        level = live.settings.properties.opt_level
        yield f"amp is on at {level} in {dtype_name(rulings.half_dtype)}, with {named}."
        if not live.settings.patches_any:
            yield f"{level} patches no functions, so none of this is applied."
        elif not live.settings.patches_functions:
            marked = f"{level} applies only what is marked needs_float32 or has a format"
            yield f"{marked}, and beside a half weight other arguments become half."
            if live.switch.is_off():
                yield "Casts are off here, but beside half weights."
        elif live.switch.is_off():
            yield "Casts are off here."
        if rulings.part is not None and not live.switch.is_off():
            yield f"Here the rules of modules {rulings.part} apply."
    if casting_mode.thread.mode is not None:
        yield "In this forward of an amp.convert_model copy the copy's own lists decide instead."


def _called(subject: Subject, rulings: Rulings) -> Iterator[Called]:
    waiting = [(str(each.path), subject.code_of(each)) for each in subject.asked]
    seen: set[int] = set()
    for caller, function in waiting:  # which grows meanwhile
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        named = called_by(function)
        for path in rulings.listed_among(named.values()):
            yield Called(caller, str(path), rulings.of(located(path)))
        for symbol, methods in operators_in(function).items():
            listed = [path for method in methods for path in rulings.listed_among([method])]
            # The method of the right operand is told only if another rule decides about it.
            by_ruling = {rulings.of(located(path)): path for path in reversed(listed)}
            for ruling, path in reversed(by_ruling.items()):
                yield Called(caller, str(path), ruling, symbol)
        unlisted: Iterator[Any] = (each for each in named.values() if not rulings.listed_among([each]))
        followed = (each for each in unlisted if _is_followed(each, function))
        waiting += ((f"{each.__module__}.{each.__qualname__}", each) for each in followed)


def _is_followed(called: Any, caller: Any) -> bool:
    """Returns True for functions of other modules whose code says more: torch.nn.functional's, and the user's own."""
    if not isinstance(called, types.FunctionType) or called.__module__ == caller.__module__:
        return False  # `called_by` has read those of the same module
    home, own = (str(each.__module__).partition(".")[0] for each in (called, caller))
    return called.__module__ == F.__name__ or home == own != "torch"


def _notes(subject: Subject, rulings: Rulings, calls: Sequence[Called]) -> Iterator[str]:
    """Yields sentences on undone edits, on rules of parts of a model, and on entries for other versions of torch."""
    if subject.is_module and not calls:
        yield "Its code names no listed function. Code does not show everything: amp.report watches what a step calls."
    paths = {spelled.path for spelled in subject.spelled}
    registered = [known.as_edit() for known in rulings.registered]
    undone = list_edits.undone(rulings.lists, rulings.half_dtypes, registered)
    yield from (sentence for path, sentence in undone.items() if path in paths)
    yield from _notes_on_parts(rulings, sorted(paths))
    for entry in (*rulings.user_entries, *shipped_entries()):
        if not entry.is_in_force and any(entry.covers(path) for path in paths):
            limits = [f"from torch {entry.since} on"] if entry.since else []
            limits += [f"before torch {entry.until}"] if entry.until else []
            yield (
                f"{entry.source} has {entry.path} in {entry.list_name!r} {' and '.join(limits)}; this is torch "
                f"{torch.__version__}."
            )


def _notes_on_parts(rulings: Rulings, paths: Sequence[Path]) -> Iterator[str]:
    """Yields a sentence for entries for parts of a model that treat functions alike, and not as the session does."""
    lists = rulings.of_session
    if not lists.modules or (rulings.live is not None and not rulings.live.settings.patches_any):
        return
    rules = lists.expanded().rules
    found: list[tuple[str, ModuleRules]] = []
    for entry in lists.modules:
        if entry.is_float32:
            found.append(("nothing is cast, and inputs are float32", entry))
            continue
        own = lists.of_module(entry).expanded().rules
        keys = [(path, half) for half in rulings.half_dtypes for path in paths]
        pairs = [(key[0], rules.get(key), own.get(key)) for key in keys if rules.get(key) != own.get(key)]
        changed = [(path, new) for path, old, new in pairs if rulings.applies(old) or rulings.applies(new)]
        told = dict.fromkeys(f"{path} is {_place(rule)}{_in_one_half(rulings)}" for path, rule in changed)
        if told:
            found.append((", ".join(told), entry))
    for sentence, (first, *others) in grouped(found).items():
        names = " or ".join(repr(entry.name) for entry in (first, *others))
        source = f"from {first.source} on" if others else first.source
        yield f"In submodules that {names} matches ({source}) {sentence}."


def _in_one_half(rulings: Rulings) -> str:
    return f" in {dtype_name(rulings.half_dtypes[0])}" if len(rulings.half_dtypes) == 1 else ""


def _place(rule: Rule | None) -> str:
    if rule is None:
        return "on no list"
    kind = "banned" if rule.treatment is Treatment.BANNED else f"in the {rule.treatment.value}"
    return f"{kind} ({rule.source}{'' if rule.formats is None else f'; {rule.formats}'})"


def _explained_call(subject: Subject, rulings: Rulings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExplainedCall:
    if subject.primary.function is None:
        raise OptionError(f"{subject.primary.path} cannot be explained with arguments before its module is imported.")
    prediction = _predicted(subject, rulings, args, kwargs)
    return ExplainedCall(str(subject.primary.path), dtype_name(rulings.half_dtype), prediction)


def _predicted(subject: Subject, rulings: Rulings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prediction:
    """Predicts a call by what decides first: the session, the registration, the rule, or the decorator."""
    live, spelled = rulings.live, subject.primary
    function = subject.undecorated(spelled)
    if live is not None and not live.settings.patches_any:
        return unchanged(function, args, kwargs, f"{live.settings.properties.opt_level} patches no functions")
    if live is not None and live.settings.patches_functions and live.switch.is_off():
        return unchanged(function, args, kwargs, "casts are off here")
    if subject.is_bypass:
        return unchanged(function, args, kwargs, "this object is the function without amp")
    if live is not None and not live.settings.patches_functions:
        return _predicted_with_half_weights(subject, rulings, live, args, kwargs)
    device_types = adopted_model.all_device_types() if live is None else live.device_types
    predictor = Predictor(rulings.half_dtype, device_types, rulings.allows_banned)
    known = rulings.registration(spelled)
    if known is not None:
        return predictor.by_registration(known, spelled.function, args, kwargs)
    rule = rulings.rule(spelled, rulings.half_dtype)
    if rule is not None:
        return predictor.by_rule(rule, spelled.function, args, kwargs)
    if subject.decoration is not None:
        return predictor.by_decoration(subject.decoration, function, args, kwargs)
    return unchanged(function, args, kwargs, "the function is on no list")


def _predicted_with_half_weights(
    subject: Subject, rulings: Rulings, live: Session, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Prediction:
    """Predicts a call at O2, O3 and O5, by the order of `HalfModelFunction`: the rule, then the half arguments."""
    function, is_off = subject.undecorated(subject.primary), live.switch.is_off()
    predictor = Predictor(rulings.half_dtype, live.device_types, for_half_models=True)
    rule = rulings.rule(subject.primary, rulings.half_dtype)
    why = f"{live.settings.properties.opt_level} patches no functions but those that need float32"
    if rule is not None and rulings.applies(rule):
        kinds = {tensor.device.type for tensor in tensors_of_call(args, kwargs) if tensor.dtype in HALVES}
        # Without needs_float32 it has a format, which is for all devices.
        needing = kinds if rule.needs_float32 in ((), EVERY_DEVICE) else kinds.intersection(rule.needs_float32)
        if needing and not is_off:
            return predictor.by_rule(rule, function, args, kwargs)
        why = "no argument is half" if not kinds else f"torch has a half kernel for it on {' and '.join(sorted(kinds))}"
    in_half = live.casts.in_half(function)
    if in_half is not None:
        return predictor.beside_half(*in_half, function, args, kwargs)
    return unchanged(function, args, kwargs, "casts are off here" if is_off else why)


# Where else the function is bound

#: What to say of the kinds of places that amp patches: before amp is on, and if they keep the function then.
_PATCHED = {
    Kind.MODULE: ("", "bound since, or the module refuses changes"),
    Kind.MODEL: (" if the model is passed to amp.initialize", "the model was not passed to amp.initialize"),
    Kind.MODEL_CONTAINER: (" if the model is passed to amp.initialize", "the model was not passed to amp.initialize"),
}


def _bound_places(subject: Subject, rulings: Rulings) -> Iterator[BoundPlace]:
    """Yields the places that hold the function; none if amp does not patch it."""
    half_dtypes = rulings.half_dtypes if rulings.live is None else (rulings.half_dtype,)
    wanted: dict[int, object] = {}
    paths: dict[int, str] = {}
    for spelled in subject.asked:
        if spelled.function is None or not rulings.is_patched(spelled, *half_dtypes):
            continue
        held = spelled.held()
        for value in (spelled.function, held) if is_wrapper(held) else (spelled.function,):
            wanted[id(value)] = value
            paths.setdefault(id(value), str(spelled.path))
    own = {(id(each.owner), each.path.name) for each in subject.spelled if each.owner is not None}
    told: set[tuple[int, str, Kind]] = set()
    for place in function_places.places(wanted) if wanted else ():
        key = id(place.owner), place.name, place.kind
        if key in told or (key[:2] in own and place.kind in (Kind.MODULE, Kind.CLASS)):
            continue
        told.add(key)  # a module may be loaded under several names
        condition, why_kept = _PATCHED.get(place.kind, ("", "amp cannot replace it there"))
        if rulings.live is None:
            casts = place.kind in _PATCHED
            note = f"would be patched{condition}" if casts else "would stay uncast"
            note += ", unless the module defines a class of a model passed to amp" * (place.kind is Kind.CONTAINER)
        else:
            casts = is_wrapper(place.held)
            note = "patched" if casts else f"keeps the uncast function: {why_kept}"
        yield BoundPlace(_where(place), paths[id(place.held)], place.kind.value, casts, note)


def _where(place: function_places.Place) -> str:
    owner: Any = place.owner
    if place.kind is Kind.FUNCTION:
        code = owner.__code__
        return f"{place.name} of {code.co_qualname} ({shown_path(code.co_filename)}:{code.co_firstlineno})"
    if place.kind in (Kind.MODEL, Kind.MODEL_CONTAINER):
        return f"{type(owner).__name__}.{place.name}"
    return f"{function_places.name_of(owner)}.{place.name}"
