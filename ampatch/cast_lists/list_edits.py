"""Effects of edits of cast lists: differences of two lists, edits that another function undoes, spellings left out.

Owns the sentences that report them to the user. Must never change a list or torch, nor call a listed function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ampatch.cast_lists.lists import CastLists, shipped
from ampatch.cast_lists.paths import Path, find_or, identity
from ampatch.cast_lists.rules import FLOAT32, UNLISTED, ModuleRules, Rule, Treatment, place, typed_options
from ampatch.cast_lists.spellings import EVERY_NAMESPACE, NAMESPACES, called_by, spellings
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES

_MOST_TOLD = 3

#: The rules of one path in two lists, each by half dtype.
Sides = tuple[list[Rule | None], list[Rule | None]]


@dataclass(frozen=True, slots=True)
class Edit:
    """A user's decision about one function, in a list or by registering it.

    Attributes:
        path: path of the function.
        function: the function itself, without amp; None while its module is not imported.
        rule: rule that applies to it now; None: the function is on no list.
    """

    path: Path
    function: object
    rule: Rule | None


def differing(
    before: CastLists, after: CastLists, half_dtypes: Sequence[torch.dtype], matched: bool = False
) -> dict[Path, Sides]:
    """Returns the paths whose rules differ between two lists, sorted, each with both sides' rules by half dtype.

    Args:
        before: lists.
        after: other lists.
        half_dtypes: half dtypes to compare in.
        matched: True adds the patterns that match a loaded function.
    """
    mine, theirs = before.told(matched), after.told(matched)
    found = {}
    for path in sorted({path for path, _ in {**mine, **theirs}}):
        here, there = ([side.get((path, dtype)) for dtype in half_dtypes] for side in (mine, theirs))
        if here != there:
            found[path] = here, there
    return found


def difference(live: CastLists, asked: CastLists) -> list[str]:
    """Returns, for a message, how two lists differ: a few functions, then the number of the others."""
    told: dict[str, None] = {}
    for path, sides in differing(live, asked, list(HALF_DTYPES.values()), matched=True).items():
        pairs = zip(HALF_DTYPES, *sides, strict=True)
        by_dtype = {name: _told(here, there) for name, here, there in pairs if here != there}
        everywhere = len(by_dtype) == len(HALF_DTYPES) and len(set(by_dtype.values())) == 1
        for name, how in by_dtype.items():
            told[f"{path} {how}" if everywhere else f"{path} {how} in {name}"] = None
    if live.modules != asked.modules:  # their order counts, as the last one decides
        told[f"modules has {_entries(live)} (this call: {_entries(asked)})"] = None
    return _first(list(told))


def _entries(lists: CastLists) -> str:
    told = [f"{_kind(each)} for {each.name!r} by {each.source}" for each in lists.modules]
    return _enumerated(told) if told else "no entry"


def _kind(entry: ModuleRules) -> str:
    if entry.is_float32:
        return FLOAT32
    return "rules" if entry.formats is None else str(entry.formats)


def undone_in_modules(
    lists: CastLists, half_dtypes: Iterable[torch.dtype] = HALF_DTYPES.values(), registered: Sequence[Edit] = ()
) -> list[str]:
    """Returns a sentence for each edit that an entry for parts of a model makes, and that a called function undoes.

    Args:
        lists: rules in force, edits included.
        half_dtypes: half dtypes to check.
        registered: registered functions; they take precedence over the lists.
    """
    return in_modules(lists, lambda each: undone(each, half_dtypes, registered).values())


def in_modules(lists: CastLists, told: Callable[[CastLists], Iterable[str]]) -> list[str]:
    """Returns the sentences about the lists of each entry that has rules, without those about the lists themselves."""
    known = set(told(replace(lists, modules=()))) if lists.modules else set()
    return [
        f"in modules {entry.name!r}: {sentence}"
        for entry in lists.modules
        for sentence in (() if entry.is_float32 else told(lists.of_module(entry)))
        if sentence not in known
    ]


def undone(
    lists: CastLists, half_dtypes: Iterable[torch.dtype] = HALF_DTYPES.values(), registered: Iterable[Edit] = ()
) -> dict[Path, str]:
    """Returns a sentence for each function of torch whose edit is undone by a function that it calls.

    ``torch.nn.functional.softmax`` calls the method. If the user whitelists the function alone, it passes half tensors
    to the method, which casts them to float32: float32 input has only lost digits. Functions of other libraries are
    skipped, as a method that they call need not be a tensor's. Called functions whose rule has conditions are skipped,
    as these conditions need not hold in such a call.

    Args:
        lists: rules in force, edits included.
        half_dtypes: half dtypes to check.
        registered: registered functions; they take precedence over the lists.

    Returns:
        The sentences by path, each with the text to type.
    """
    told: dict[Path, str] = {}
    called: dict[int, dict[int, object]] = {}  # by id: a bound method of pybind11 has no hash
    for half_dtype in half_dtypes:
        edits = [edit for edit in (*_edits(lists, half_dtype), *registered) if _is_of_torch(edit)]
        if not edits:
            continue  # the usual case; to look up every function takes milliseconds
        before = _by_function(shipped().for_half(half_dtype))
        now = _by_function(lists.for_half(half_dtype))
        now |= {id(edit.function): edit.rule for edit in registered if edit.rule is not None}
        for edit in edits:
            if id(edit.function) not in called:
                called[id(edit.function)] = called_by(edit.function)
            rule, caller = edit.rule, before.get(id(edit.function))
            undoing = [
                now[callee]
                for callee in called[id(edit.function)]
                if _undoes(now.get(callee), rule) and not _undoes(before.get(callee), caller)
            ]
            if undoing:
                told[edit.path] = _told_undone(edit, undoing)
    return told


def undone_edits_in_brief(lists: CastLists, half_dtype: torch.dtype, registered: Sequence[Edit]) -> str | None:
    """Returns a warning about undone edits: the first one in full, the others by name; None if none is undone.

    Args:
        lists: rules in force, edits included.
        half_dtype: half dtype to check.
        registered: registered functions; they take precedence over the lists.
    """
    told = undone(lists, [half_dtype], registered)
    if not told:
        return None
    (_, first), *others = told.items()
    if not others:
        return first
    return f"{first} Also undone in this way: {_enumerated([str(path) for path, _ in others])}."


def left_out(lists: CastLists) -> list[str]:
    """Returns a sentence for each edit that leaves other spellings of a torch function unchanged.

    Args:
        lists: rules in force, edits included. Edits that `undone` reports are skipped.
    """
    told: dict[Path, str] = dict.fromkeys(undone(lists), "")
    spelled = functools.cache(spellings)
    for half_dtype in HALF_DTYPES.values():
        rules = lists.for_half(half_dtype)
        edits = _edits(lists, half_dtype)
        touched = {id(edit.function) for edit in edits}
        for edit in edits:
            if edit.path.namespace not in NAMESPACES or edit.path in told:
                continue
            others = [
                path
                for path in spelled(edit.path.name)
                if id(identity(path)) not in touched and _list(rules.get(path)) != _list(edit.rule)
            ]
            if others:
                several = _enumerated(list(map(str, others)))
                stays = f"{several} {'stays as it is' if len(others) == 1 else 'stay as they are'}"
                told[edit.path] = f"{_opening(edit)}, but {stays}. {_every_spelling(edit)}"
    return list(filter(None, told.values()))


def _edits(lists: CastLists, half_dtype: torch.dtype) -> list[Edit]:
    """Returns the rules in which the lists differ from the shipped ones, as edits."""
    if lists is shipped():
        return []
    before, now = shipped().for_half(half_dtype), lists.for_half(half_dtype)
    edited = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    return [Edit(path, find_or(path), now.get(path)) for path in sorted(edited)]


def _by_function(rules: Mapping[Path, Rule]) -> dict[int, Rule]:
    return {id(identity(path)): rule for path, rule in rules.items()}


def _is_of_torch(edit: Edit) -> bool:
    return str(getattr(edit.function, "__module__", None)).partition(".")[0] == "torch"


def _undoes(callee: Rule | None, caller: Rule | None) -> bool:
    """Returns True if the callee's rule changes arguments that the caller's rule has cast or left unchanged."""
    if callee is None or callee.when:
        return False
    if caller is not None and caller.treatment in (callee.treatment, Treatment.BANNED):
        return False
    # After the caller's cast the dtypes are equal, and promotion casts to the widest of them: nothing is undone.
    return caller is None or callee.treatment is not Treatment.PROMOTE


def _told_undone(edit: Edit, undoing: Sequence[Rule]) -> str:
    called = _enumerated([f"{rule.path} ({place(rule)})" for rule in undoing])
    if any(rule.path.name == edit.path.name for rule in undoing):
        remedy = _every_spelling(edit)
    else:
        names = grouped((rule.path.namespace, rule.path.name) for rule in undoing)
        entries = ", ".join(f"{namespace}: [{', '.join(each)}]" for namespace, each in names.items())
        remedy = (
            f"Type `{_list(edit.rule)}: {{{entries}}}` to move these too, for all their callers, or call "
            f"{edit.path.name} in a block of amp.disable_casts()."
        )
    return f"{_opening(edit)}, but it calls functions that undo this: {called}. {remedy}"


def _every_spelling(edit: Edit) -> str:
    return f'Type `{_list(edit.rule)}: {{"{EVERY_NAMESPACE}": [{edit.path.name}]}}` for every spelling.'


def _opening(edit: Edit) -> str:
    source = "" if edit.rule is None else f"{edit.rule.source}: "
    return f"{source}{edit.path} is {place(edit.rule)} now"


def _list(rule: Rule | None) -> str:
    return UNLISTED if rule is None else rule.treatment.value


def _first(several: list[str]) -> list[str]:
    more = len(several) - _MOST_TOLD
    return several if more <= 0 else [*several[:_MOST_TOLD], f"and {more} more"]


def _enumerated(several: list[str]) -> str:
    *others, last = _first(several)
    return f"{', '.join(others)}{', ' if last.startswith('and ') else ' and '}{last}" if others else last


def options_of(rule: Rule) -> list[str]:
    """Returns all options of a rule as texts."""
    return typed_options(rule.when, rule.via_dtype, rule.needs_float32, rule.formats)


def _told(live: Rule | None, asked: Rule | None) -> str:
    there, here = _place_by(live), _place_by(asked)
    if live is not None and asked is not None and replace(live, instead=asked.instead) == asked:
        here = "there too, with another `instead`"
    return f"is {there} (this call: {here})"


def _place_by(rule: Rule | None) -> str:
    """Returns the list that a rule puts its function in, with the rule's options, file and line."""
    options = [] if rule is None else [*options_of(rule), f"by {rule.source}"]
    return " ".join([place(rule), *options])
