"""Explains what amp does to one function: `explain`, behind ``amp.explain`` and ``ampatch explain``.

Owns the order of the answer, and what it says of one call. Must never call the function, cast an argument, or change
the session. `ampatch.patching.predictions` predicts the casts.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ampatch.cast_lists import list_edits
from ampatch.cast_lists.annotations import shipped_entries
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.rules import EVERY_DEVICE
from ampatch.cast_lists.spellings import called_by, operators_in
from ampatch.diagnostics.explanation_places import bound_places
from ampatch.diagnostics.explanation_report import Called, ExplainedCall, Explanation
from ampatch.diagnostics.explanation_rulings import Rulings
from ampatch.diagnostics.explanation_settings import Settings
from ampatch.diagnostics.explanation_subjects import Finder, Subject, located
from ampatch.errors import OptionError
from ampatch.opt_levels import HALF_DTYPES, dtype_name
from ampatch.patching import adopted_model
from ampatch.patching.predictions import Prediction, Predictor, unchanged


def explain(
    target: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    lists: CastLists | None = None,
    half_dtypes: Sequence[torch.dtype] = (),
) -> Explanation:
    """Returns what amp does to a function.

    Args:
        target: the function, its name or its path, or an operator ("@").
        args: arguments of a call, by position. The call is not made.
        kwargs: arguments of the call, by keyword.
        lists: cast lists; None for those of the live session, or else the shipped ones.
        half_dtypes: half dtypes to explain; empty for both.

    Raises:
        OptionError: ``target`` is no function, and no name of one.
    """
    settings = Settings(lists, tuple(half_dtypes) or tuple(HALF_DTYPES.values()))
    rulings = Rulings(settings)
    subject = Finder(settings).subject(target)
    has_call = bool(args or kwargs) or any(isinstance(value, Tensor) for value in subject.args)
    args, kwargs = (*subject.args, *args), {**subject.kwargs, **(kwargs or {})}
    return Explanation(
        subject.text,
        types.MappingProxyType(settings.as_plain_data()),
        (*settings.sentences(), *subject.sentences),
        tuple(map(rulings.spelling, subject.spelled)),
        tuple(_called(subject, rulings)),
        tuple(bound_places(subject, rulings)),
        _explained_call(subject, rulings, args, kwargs) if has_call else None,
        tuple(_notes(subject, settings)),
    )


def _called(subject: Subject, rulings: Rulings) -> Iterator[Called]:
    seen: set[int] = set()
    for spelled in subject.asked:
        function = subject.undecorated(spelled)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        for path in rulings.settings.listed_among(called_by(function).values()):
            yield Called(spelled.text, str(path), rulings.of(located(path)))
        for symbol, methods in operators_in(function).items():
            listed = [path for method in methods for path in rulings.settings.listed_among([method])]
            # The method of the right operand is told only if another rule decides about it.
            by_ruling = {rulings.of(located(path)): path for path in reversed(listed)}
            for ruling, path in reversed(by_ruling.items()):
                yield Called(spelled.text, str(path), ruling, symbol)


def _notes(subject: Subject, settings: Settings) -> Iterator[str]:
    """Yields sentences on undone edits, on rules of parts of a model, and on entries for other versions of torch."""
    paths = {spelled.path for spelled in subject.spelled}
    registered = [known.as_edit() for known in settings.registered]
    undone = list_edits.undone(settings.lists, settings.half_dtypes, registered)
    yield from (sentence for path, sentence in undone.items() if path in paths)
    yield from settings.notes_on_parts(paths)
    for entry in (*settings.user_entries, *shipped_entries()):
        if not entry.is_in_force and any(entry.covers(path) for path in paths):
            limits = [f"from torch {entry.since} on"] if entry.since else []
            limits += [f"before torch {entry.until}"] if entry.until else []
            yield (
                f"{entry.source} has {entry.path} in {entry.list_name!r} {' and '.join(limits)}; this is torch "
                f"{torch.__version__}."
            )


def _explained_call(subject: Subject, rulings: Rulings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExplainedCall:
    if subject.primary.function is None:
        raise OptionError(f"{subject.primary.text} cannot be explained with arguments before its module is imported.")
    why = _why_nothing(subject, rulings)
    if why is None:
        prediction = _predicted(subject, rulings, args, kwargs)
    else:
        prediction = unchanged(subject.undecorated(subject.primary), args, kwargs, why)
    return ExplainedCall(subject.primary.text, dtype_name(rulings.settings.half_dtype), prediction)


def _why_nothing(subject: Subject, rulings: Rulings) -> str | None:
    """Returns why a call casts nothing, whatever its arguments are; None if the arguments decide."""
    live = rulings.settings.live
    if live is not None and not live.patches_functions:
        rule = rulings.rule(subject.primary, rulings.settings.half_dtype)
        if not rulings.settings.applies(rule):
            only = " but those that need float32" if live.patches_any else ""
            return f"{live.settings.properties.opt_level} patches no functions{only}"
        if rule is not None and rule.needs_float32 != EVERY_DEVICE and live.device_types.isdisjoint(rule.needs_float32):
            return f"torch has a half kernel for it on {' and '.join(sorted(live.device_types))}"
    if live is not None and live.switch.is_off():
        return "casts are off here"
    if subject.is_bypass:
        return "this object is the function without amp"
    if subject.decoration is None and not rulings.is_patched(subject.primary, rulings.settings.half_dtype):
        return "the function is on no list"
    return None


def _predicted(subject: Subject, rulings: Rulings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prediction:
    """Predicts a call by what decides first: the registration, the rule, or the decorator."""
    settings = rulings.settings
    device_types = adopted_model.all_device_types() if settings.live is None else settings.live.device_types
    predictor = Predictor(settings.half_dtype, device_types, settings.allows_banned)
    spelled = subject.primary
    known = rulings.registration(spelled)
    if known is not None:
        return predictor.by_registration(known.path, known.treatment, known.dtype, spelled.function, args, kwargs)
    rule = rulings.rule(spelled, settings.half_dtype)
    if rule is not None:
        return predictor.by_rule(rule, spelled.function, args, kwargs)
    return predictor.by_decoration(str(subject.decoration), subject.undecorated(spelled), args, kwargs)
