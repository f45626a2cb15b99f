"""Says what decides about a function: a registration, a rule of the lists or a decorator, and what that replaces.

Owns which lists, registrations and session count, and their order of precedence: the order in which patches are
installed. Must never patch a function, change the session, nor search for a function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ampatch.cast_lists import coverage
from ampatch.cast_lists.annotations import Entry, entry_of, shipped_entries, unlisting, user_entries
from ampatch.cast_lists.lists import CastLists, shipped
from ampatch.cast_lists.paths import Path, find_or, find_owner, identity
from ampatch.cast_lists.rules import UNLISTED, Rule, Treatment
from ampatch.diagnostics.explain.result import Overridden, Ruling, Spelling
from ampatch.function_wrapper import is_wrapper, unwrapped
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES, default_half
from ampatch.opt_levels import dtype_name
from ampatch.patching import adopted_model, function_places
from ampatch.patching.function_patches import Registration
from ampatch.runtime import decoration_of, runtime


@dataclass(frozen=True, slots=True)
class Located:
    """A path with the owner and the function that it leads to.

    Attributes:
        path: the path.
        owner: module or class that holds the function; None if its module is not imported.
        function: the function without amp; None if its module is not imported.
        asked: True if it is the function that was asked about, rather than another spelling of it.
        bound_to: the module whose forward it is; of a class, an instance without attributes. None for other functions.
    """

    path: Path
    owner: object
    function: Any
    asked: bool = False
    bound_to: nn.Module | None = None

    def held(self) -> Any:
        """Returns what the owner holds by this name now: the function, or a wrapper of it."""
        return attribute(self.owner, self.path.name)


def located(path: Path, asked: bool = False) -> Located:
    """Returns what a path leads to; without a function if its module is not imported, or lacks the name."""
    function = find_or(path)  # optional entries may lead nowhere
    return Located(path, None if function is None else find_owner(path.namespace), function, asked)


def attribute(owner: object, name: str) -> Any:
    """Returns an attribute of a module or class, the function itself if it is a class method; None without one."""
    found = getattr(owner, name, None)
    return getattr(found, "__func__", found)


class Rulings:
    """What decides about functions.

    Args:
        lists: cast lists to explain instead of the session; None for the live session, or else the shipped lists.
        half_dtypes: half dtypes to explain; at least one.

    Attributes:
        live: live session; None if there is none, or if other lists were asked about.
        of_session: the cast lists of the session, or those that were asked about.
        part: name of the entry for a part of a model by which this thread computes now; None: by the session's lists.
        lists: the cast lists that decide: those of that part, or else of the session.
        half_dtypes: half dtypes to explain.
        registered: registered functions; later ones take precedence.
        listed: paths of all listed functions, as keys.
    """

    def __init__(self, lists: CastLists | None, half_dtypes: tuple[torch.dtype, ...]) -> None:
        self.live = live = runtime.live if lists is None else None
        self.of_session = lists if lists is not None else shipped() if live is None else live.settings.lists
        part = None if live is None else live.casts.part_in_force()
        self.part = None if part is None else part[0]
        self.lists = (self.of_session if part is None else part[1]).expanded()
        self.half_dtypes = half_dtypes
        self.registered = tuple(runtime.registered) if live is None else live.casts.registered
        self.listed = dict.fromkeys(path for path, _ in self.lists.rules)

    @cached_property
    def user_entries(self) -> list[Entry]:
        """The entries of the user's files."""
        return user_entries(self.lists)

    @property
    def half_dtype(self) -> torch.dtype:
        """The half dtype of the live session, or the one that it would have by default."""
        if self.live is not None:
            return self.live.settings.properties.half_dtype
        if len(self.half_dtypes) == 1:
            return self.half_dtypes[0]
        return default_half(adopted_model.all_device_types())

    @property
    def allows_banned(self) -> bool:
        """True if banned functions run in float32 instead of raising."""
        return self.live is not None and self.live.settings.allow_banned

    def listed_among(self, functions: Iterable[object]) -> list[Path]:
        """Returns one listed path for each function that is on a list, sorted."""
        return sorted({self._listed[id(function)] for function in functions if id(function) in self._listed})

    @cached_property
    def _listed(self) -> dict[int, Path]:
        """The first listed path of each listed function, by the function's id."""
        # `identity` may return the path itself, which `listed` keeps alive, so that no other object takes its id.
        return {id(identity(path)): path for path in reversed(self.listed)}

    def spelling(self, spelled: Located) -> Spelling:
        """Returns a spelling for the report, with a note if a patch that should be in place is not."""
        note = None
        if self.live is not None and spelled.owner is not None and not is_wrapper(spelled.held()):
            is_missing = self.is_patched(spelled, self.half_dtype)
            note = "not patched now: something else is in place of amp's patch" if is_missing else None
        return Spelling(str(spelled.path), spelled.asked, self.of(spelled), note)

    def of(self, spelled: Located) -> tuple[Ruling, ...]:
        """Returns what decides about a function, equal rulings for several half dtypes as one."""
        groups = grouped((self._ruling(spelled, half), dtype_name(half)) for half in self.half_dtypes)
        return tuple(replace(ruling, half_dtypes=tuple(names)) for ruling, names in groups.items())

    def is_patched(self, spelled: Located, *half_dtypes: torch.dtype) -> bool:
        """Returns True if amp patches a function for any of some half dtypes, or would."""
        if self.registration(spelled) is not None and (self.live is None or self.live.settings.patches_functions):
            return True
        return any(self.applies(self.rule(spelled, half_dtype)) for half_dtype in half_dtypes)

    def applies(self, rule: Rule | None) -> bool:
        """Returns True if a rule is applied at the session's opt level, or would be."""
        return rule is not None and (self.live is None or self.live.casts.applies(rule))

    def registration(self, spelled: Located) -> Registration | None:
        """Returns the registration that decides about a function."""
        for known in reversed(self.registered):
            found = unwrapped(attribute(known.owner, known.name))
            if found is None or found is not spelled.function:
                continue
            if not isinstance(known.owner, type) or _inherits(spelled, known.owner, known.name):
                return known
        return None

    def rule(self, spelled: Located, half_dtype: torch.dtype, lists: CastLists | None = None) -> Rule | None:
        """Returns a function's rule in some lists; None for those that decide."""
        rules = (self.lists if lists is None else lists).rules
        found = rules.get((spelled.path, half_dtype))
        if found is not None or spelled.path in self.listed or spelled.function is None:
            return found
        listed = self.listed_among([spelled.function])
        return rules.get((listed[0], half_dtype)) if listed and _follows(spelled, listed[0]) else None

    def _ruling(self, spelled: Located, half_dtype: torch.dtype) -> Ruling:
        known, kind, rule = self.registration(spelled), decoration_of(spelled.function), self.rule(spelled, half_dtype)
        if known is not None:
            casts_to = None if known.dtype is None else dtype_name(known.dtype)
            return Ruling((), known.treatment.value, "registered", casts_to=casts_to, overrides=_overridden(rule))
        if rule is None and kind is not None:
            is_half = kind in HALF_DTYPES
            treatment = Treatment.WHITELIST.value if is_half else kind
            return Ruling((), treatment, "decorated", casts_to=kind if is_half else None)
        before = self.rule(spelled, half_dtype, shipped())
        return self._without_rule(spelled, half_dtype, before) if rule is None else self._by_rule(rule, before)

    def _by_rule(self, rule: Rule, before: Rule | None) -> Ruling:
        is_shipped = rule is before  # not equality: a user's file may have the name of a shipped one
        entry = entry_of(rule, shipped_entries() if is_shipped else self.user_entries)
        known = {name: getattr(rule, name) for name in ("source", "when", "via_dtype", "needs_float32", "instead")}
        if rule.formats is not None:
            known["formats"] = str(rule.formats)
        if entry is not None:
            known |= {name: getattr(entry, name) for name in ("since", "until", "reason")}
        return Ruling((), rule.treatment.value, overrides=None if is_shipped else _overridden(before), **known)

    def _without_rule(self, spelled: Located, half_dtype: torch.dtype, before: Rule | None) -> Ruling:
        if before is None:
            reviewed = coverage.reason_of(spelled.path)
            if reviewed is None:
                return Ruling((), UNLISTED)
            return Ruling((), UNLISTED, f"{coverage.FILE} ({reviewed.name})", reason=reviewed.why)
        entry = unlisting(spelled.path, dtype_name(half_dtype), self.user_entries)
        source, reason = ("cast_lists", None) if entry is None else (entry.source, entry.reason)
        return Ruling((), UNLISTED, source, reason=reason, overrides=_overridden(before))


def _follows(spelled: Located, listed: Path) -> bool:
    """Returns True if a name that holds a listed function is patched with it."""
    if isinstance(spelled.owner, type):
        return _inherits(spelled, find_owner(listed.namespace), listed.name)
    return any(spelled.owner is module for module in function_places.swept_modules())


def _inherits(spelled: Located, owner: object, name: str) -> bool:
    """Returns True if a spelling is a class's method by this name, or the same method of an heir."""
    if not isinstance(owner, type) or not isinstance(spelled.owner, type):
        return False
    return issubclass(spelled.owner, owner) and spelled.path.name == name


def _overridden(rule: Rule | None) -> Overridden | None:
    return None if rule is None else Overridden(rule.treatment.value, rule.source)
