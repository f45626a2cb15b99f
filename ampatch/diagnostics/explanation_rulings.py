"""Says what decides about a function: a registration, a rule of the lists or a decorator, and what that replaces.

Owns their order of precedence, which is the order in which patches are installed. Must never patch a function, nor
search for one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ampatch.cast_lists import coverage
from ampatch.cast_lists.annotations import entry_of, shipped_entries, unlisting
from ampatch.cast_lists.lists import CastLists, shipped
from ampatch.cast_lists.paths import Path, find_owner
from ampatch.cast_lists.rules import UNLISTED, Rule, Treatment
from ampatch.diagnostics.explanation_report import Overridden, Ruling, Spelling
from ampatch.diagnostics.explanation_settings import Settings
from ampatch.diagnostics.explanation_subjects import Located, attribute
from ampatch.function_wrapper import is_wrapper, unwrapped
from ampatch.opt_levels import HALF_DTYPES, dtype_name
from ampatch.patching import function_places
from ampatch.patching.function_patches import Registration
from ampatch.runtime import decoration_of


class Rulings:
    """What decides about functions under some settings.

    Attributes:
        settings: lists, registrations and session that decide.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def spelling(self, spelled: Located) -> Spelling:
        """Returns a spelling for the report."""
        return Spelling(spelled.text, spelled.asked, self.of(spelled), self._note(spelled))

    def of(self, spelled: Located) -> tuple[Ruling, ...]:
        """Returns what decides about a function, equal rulings for several half dtypes as one."""
        known, kind = self.registration(spelled), decoration_of(spelled.function)
        groups: dict[Ruling, list[str]] = {}
        for half_dtype in self.settings.half_dtypes:
            rule = self.rule(spelled, half_dtype)
            if known is not None:
                ruling = _by_registration(known, rule)
            elif rule is not None:
                ruling = self._by_rule(spelled, half_dtype, rule)
            elif kind is not None:
                ruling = _by_decoration(kind)
            else:
                ruling = self._without_rule(spelled, half_dtype)
            groups.setdefault(ruling, []).append(dtype_name(half_dtype))
        return tuple(replace(ruling, half_dtypes=tuple(names)) for ruling, names in groups.items())

    def is_patched(self, spelled: Located, *half_dtypes: torch.dtype) -> bool:
        """Returns True if amp patches a function for any of some half dtypes, or would."""
        live = self.settings.live
        if self.registration(spelled) is not None and (live is None or live.patches_functions):
            return True
        return any(self.settings.applies(self.rule(spelled, half_dtype)) for half_dtype in half_dtypes)

    def registration(self, spelled: Located) -> Registration | None:
        """Returns the registration that decides about a function."""
        for known in reversed(self.settings.registered):
            if isinstance(known.owner, type):
                heir = isinstance(spelled.owner, type) and issubclass(spelled.owner, known.owner)
                if not heir or known.name != spelled.path.name:
                    continue
            found = unwrapped(attribute(known.owner, known.name))
            if found is spelled.function and found is not None:
                return known
        return None

    def rule(self, spelled: Located, half_dtype: torch.dtype, lists: CastLists | None = None) -> Rule | None:
        """Returns a function's rule in some lists; None for those of the settings."""
        rules = (self.settings.lists if lists is None else lists).rules
        found = rules.get((spelled.path, half_dtype))
        if found is not None or spelled.path in self.settings.listed or spelled.function is None:
            return found
        listed = self.settings.listed_among([spelled.function])
        return rules.get((listed[0], half_dtype)) if listed and _follows(spelled, listed[0]) else None

    def _note(self, spelled: Located) -> str | None:
        """Returns a note if a patch that should be in place is not."""
        settings = self.settings
        if settings.live is None or not settings.patches or spelled.owner is None or is_wrapper(spelled.held()):
            return None
        if not self.is_patched(spelled, settings.half_dtype):
            return None
        return "not patched now: something else is in place of amp's patch"

    def _by_rule(self, spelled: Located, half_dtype: torch.dtype, rule: Rule) -> Ruling:
        before = self.rule(spelled, half_dtype, shipped())
        is_shipped = rule is before  # not equality: a user's file may have the name of a shipped one
        entry = entry_of(rule, shipped_entries() if is_shipped else self.settings.user_entries)
        return Ruling(
            (),
            rule.treatment.value,
            rule.source,
            rule.when,
            rule.via_dtype,
            needs_float32=rule.needs_float32,
            instead=rule.instead,
            since=None if entry is None else entry.since,
            until=None if entry is None else entry.until,
            reason=None if entry is None else entry.reason,
            overrides=None if is_shipped else _overridden(before),
        )

    def _without_rule(self, spelled: Located, half_dtype: torch.dtype) -> Ruling:
        before = self.rule(spelled, half_dtype, shipped())
        if before is None:
            reviewed = coverage.reason_of(spelled.path)
            if reviewed is None:
                return Ruling((), UNLISTED)
            return Ruling((), UNLISTED, f"{coverage.FILE} ({reviewed.name})", reason=reviewed.why)
        entry = unlisting(spelled.path, dtype_name(half_dtype), self.settings.user_entries)
        source, reason = ("cast_lists", None) if entry is None else (entry.source, entry.reason)
        return Ruling((), UNLISTED, source, reason=reason, overrides=_overridden(before))


def _follows(spelled: Located, listed: Path) -> bool:
    """Returns True if a name that holds a listed function is patched with it."""
    if isinstance(spelled.owner, type):  # it inherits the method
        owner = find_owner(listed.namespace)
        return isinstance(owner, type) and issubclass(spelled.owner, owner) and listed.name == spelled.path.name
    return any(spelled.owner is module for module in function_places.swept_modules())


def _by_registration(known: Registration, rule: Rule | None) -> Ruling:
    casts_to = None if known.dtype is None else dtype_name(known.dtype)
    return Ruling((), known.treatment.value, "registered", casts_to=casts_to, overrides=_overridden(rule))


def _by_decoration(kind: str) -> Ruling:
    if kind in HALF_DTYPES:
        return Ruling((), Treatment.WHITELIST.value, "decorated", casts_to=kind)
    return Ruling((), kind, "decorated")


def _overridden(rule: Rule | None) -> Overridden | None:
    return None if rule is None else Overridden(rule.treatment.value, rule.source)
