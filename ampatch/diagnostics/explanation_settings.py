"""The settings that an explanation is about: cast lists, registered functions, and the live session.

Owns which of them count, and how the report states them. Must never change the session, nor decide about a function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from ampatch.cast_lists.annotations import Entry, user_entries
from ampatch.cast_lists.lists import CastLists, shipped
from ampatch.cast_lists.paths import Path, identity
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.opt_levels import dtype_name
from ampatch.patching import adopted_model, casting_mode
from ampatch.runtime import runtime
from ampatch.session import Session


class Settings:
    """The lists, registrations and session that decide.

    Args:
        lists: cast lists to explain instead of the session; None for the live session, or else the shipped lists.
        half_dtypes: half dtypes to explain; at least one.

    Attributes:
        lists: cast lists. Inside of a part of a model that has rules of its own, the lists of that part.
        half_dtypes: half dtypes to explain.
        registered: registered functions; later ones take precedence.
        live: live session; None if there is none, or if other lists were asked about.
        listed: paths of all listed functions, as keys.
    """

    def __init__(self, lists: CastLists | None, half_dtypes: tuple[torch.dtype, ...]) -> None:
        self.live = runtime.live if lists is None else None
        settings = None if self.live is None else self.live.settings
        in_force = lists if lists is not None else shipped() if settings is None else settings.lists
        self._of_session = in_force
        part = None if self.live is None else self.live.part_in_force()
        #: Name of the entry for a part of a model by which this thread computes now; None: by the session's lists.
        self.part = None if part is None else part[0]
        self.lists = (in_force if part is None else part[1]).expanded()
        self.half_dtypes = half_dtypes
        self.registered = tuple(runtime.registered) if self.live is None else self.live.registered
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
        return torch.bfloat16 if adopted_model.all_device_types() == {"cpu"} else torch.float16

    @property
    def patches(self) -> bool:
        """True if functions are patched, or would be: False at an opt level that leaves them."""
        return self.live is None or self.live.patches_any

    def applies(self, rule: Rule | None) -> bool:
        """Returns True if a rule is applied at the session's opt level, or would be."""
        return rule is not None and (self.live is None or self.live.applies(rule))

    @property
    def allows_banned(self) -> bool:
        """True if banned functions run in float32 instead of raising."""
        return self.live is not None and self.live.settings.allow_banned

    def notes_on_parts(self, paths: Iterable[Path]) -> Iterator[str]:
        """Yields a sentence for each entry for parts of a model that treats functions otherwise than the session."""
        live, paths = self.live, sorted(paths)
        if live is not None and not live.patches_functions:
            return
        rules = self._of_session.expanded().rules if self._of_session.modules else {}
        for entry in self._of_session.modules:
            where = f"In submodules that {entry.name!r} matches ({entry.source})"
            if entry.is_float32:
                yield f"{where} nothing is cast, and inputs are float32."
                continue
            own = self._of_session.of_module(entry).expanded().rules
            told: dict[str, None] = {}
            for half in self.half_dtypes:
                for path in paths:
                    here, there = rules.get((path, half)), own.get((path, half))
                    if here != there:
                        only = f" in {dtype_name(half)}" if len(self.half_dtypes) == 1 else ""
                        told[f"{path} is {_place(there)}{only}"] = None
            if told:
                yield f"{where} {', '.join(told)}."

    def as_plain_data(self) -> dict[str, Any]:
        """Returns the settings as plain data; dtypes are names."""
        live = self.live
        return {
            "is_on": live is not None,
            "opt_level": None if live is None else live.settings.properties.opt_level,
            "half_dtype": dtype_name(self.half_dtype),
            "patches_functions": None if live is None else live.patches_functions,
            "allow_banned": self.allows_banned,
            "casts_here": live is not None and live.patches_functions and not live.switch.is_off(),
            "cast_lists": list(self.lists.files),
            "modules": {entry.name: entry.source for entry in self._of_session.modules},
        }

    def sentences(self) -> Iterator[str]:
        """Yields sentences that say whether and how amp is on."""
        live, named = self.live, " and ".join(["the shipped lists", *self.lists.files])
        if live is None:
            off = "amp is off (enabled=False)" if runtime.disabled else "amp is off"
            half = f" in {dtype_name(self.half_dtypes[0])}" if len(self.half_dtypes) == 1 else ""
            yield f"{off}; this is what {named} would do{half}."
        else:
            properties = live.settings.properties
            yield f"amp is on at {properties.opt_level} in {dtype_name(properties.half_dtype)}, with {named}."
            if not live.patches_functions:
                yield _at_other_levels(live)
            elif live.switch.is_off():
                yield "Casts are off here."
            elif self.part is not None:
                yield f"Here the rules of modules {self.part} apply."
        if casting_mode.thread.mode is not None:
            yield "In this forward of an amp.convert_model copy the copy's own lists decide instead."

    def listed_among(self, functions: Iterable[object]) -> list[Path]:
        """Returns one listed path for each function that is on a list, sorted."""
        return sorted({self._listed[id(function)] for function in functions if id(function) in self._listed})

    @cached_property
    def _listed(self) -> dict[int, Path]:
        """The first listed path of each listed function, by the function's id."""
        # `identity` may return the path itself, which `listed` keeps alive, so that no other object takes its id.
        return {id(identity(path)): path for path in reversed(self.listed)}


def _place(rule: Rule | None) -> str:
    if rule is None:
        return "on no list"
    kind = "banned" if rule.treatment is Treatment.BANNED else f"in the {rule.treatment.value}"
    return f"{kind} ({rule.source})"


def _at_other_levels(live: Session) -> str:
    """Returns a sentence on what is applied at a level that does not patch functions by the lists."""
    level = live.settings.properties.opt_level
    if not live.patches_any:
        return f"{level} patches no functions, so none of this is applied."
    return f"{level} applies only what is marked needs_float32, and beside a half weight other arguments become half."
