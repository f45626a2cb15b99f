"""Describes where else a function is bound, and whether amp casts calls by way of each place.

Owns the sentences about these places. `ampatch.patching.function_places` searches for them. Must only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ampatch.diagnostics.explanation_report import BoundPlace
from ampatch.diagnostics.explanation_rulings import Rulings
from ampatch.diagnostics.explanation_subjects import Subject
from ampatch.diagnostics.shown_names import shown_path
from ampatch.function_wrapper import is_wrapper
from ampatch.patching import function_places
from ampatch.patching.function_places import Kind

_IF_OFF = {
    Kind.MODULE: (True, "would be patched"),
    Kind.MODEL: (True, "would be patched if the model is passed to amp.initialize"),
    Kind.MODEL_CONTAINER: (True, "would be patched if the model is passed to amp.initialize"),
    Kind.CONTAINER: (False, "would stay uncast, unless the module defines a class of a model passed to amp"),
    Kind.CLASS: (False, "would stay uncast"),
    Kind.FUNCTION: (False, "would stay uncast"),
}
_KEPT = {
    Kind.MODULE: "keeps the uncast function: bound since, or the module refuses changes",
    Kind.MODEL: "keeps the uncast function: the model was not passed to amp.initialize",
    Kind.MODEL_CONTAINER: "keeps the uncast function: the model was not passed to amp.initialize",
    Kind.CONTAINER: "keeps the uncast function: in a container that amp does not search",
    Kind.CLASS: "keeps the uncast function: amp does not replace it in classes",
    Kind.FUNCTION: "keeps the uncast function: amp cannot replace it there",
}


def bound_places(subject: Subject, rulings: Rulings) -> Iterator[BoundPlace]:
    """Yields the places that hold the function; none if amp does not patch it.

    Args:
        subject: function that was asked about.
        rulings: what decides about functions.
    """
    settings = rulings.settings
    half_dtypes = settings.half_dtypes if settings.live is None else (settings.half_dtype,)
    wanted: dict[int, object] = {}
    paths: dict[int, str] = {}
    for spelled in subject.asked if settings.patches else ():
        if spelled.function is None or not rulings.is_patched(spelled, *half_dtypes):
            continue
        held = spelled.held()
        for value in (spelled.function, held) if is_wrapper(held) else (spelled.function,):
            wanted[id(value)] = value
            paths.setdefault(id(value), spelled.text)
    own = {(id(each.owner), each.path.name) for each in subject.spelled if each.owner is not None}
    told: set[tuple[int, str, Kind]] = set()
    for place in function_places.places(wanted) if wanted else ():
        key = id(place.owner), place.name, place.kind
        if key in told or (key[:2] in own and place.kind in (Kind.MODULE, Kind.CLASS)):
            continue
        told.add(key)  # a module may be loaded under several names
        casts, note = _IF_OFF[place.kind]
        if settings.live is not None:
            casts = is_wrapper(place.held)
            note = "patched" if casts else _KEPT[place.kind]
        yield BoundPlace(_where(place), paths[id(place.held)], place.kind.value, casts, note)


def _where(place: function_places.Place) -> str:
    owner: Any = place.owner
    if place.kind is Kind.FUNCTION:
        code = owner.__code__
        return f"{place.name} of {code.co_qualname} ({shown_path(code.co_filename)}:{code.co_firstlineno})"
    if place.kind in (Kind.MODEL, Kind.MODEL_CONTAINER):
        return f"{type(owner).__name__}.{place.name}"
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{place.name}"
    return f"{object.__getattribute__(owner, '__dict__').get('__name__')}.{place.name}"
