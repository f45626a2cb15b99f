"""What edits of cast lists come to: in what two lists differ, which edits another function undoes, what they leave out.

Owns the sentences that tell a user so. Only computes: it must never change a list or torch, nor call a listed function.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ampatch.cast_lists.lists import MAPPING, CastLists, shipped
from ampatch.cast_lists.paths import Path, PathError, find, identity
from ampatch.cast_lists.rules import UNLISTED, Rule, Treatment, typed_conditions
from ampatch.cast_lists.spellings import EVERY, NAMESPACES, called_by, spellings
from ampatch.opt_levels import HALF_DTYPES

_MOST_TOLD = 3


@dataclass(frozen=True, slots=True)
class Edit:
    """What a user decided for one function, in a list or by registering it.

    Attributes:
        path: the function's place.
        function: the function itself, without amp; None while its module is not imported.
        rule: what counts for it now; None: it is to be on no list.
    """

    path: Path
    function: object
    rule: Rule | None


def difference(live: CastLists, asked: CastLists) -> list[str]:
    """Says, for a message, what two lists have otherwise: a few functions, then how many more there are."""
    told: dict[str, None] = {}
    for path in sorted({path for path, _ in {**live.rules, **asked.rules}}):
        pairs = {
            dtype: (live.rules.get((path, dtype)), asked.rules.get((path, dtype))) for dtype in HALF_DTYPES.values()
        }
        differing = {dtype: _told(*pair) for dtype, pair in pairs.items() if pair[0] != pair[1]}
        everywhere = len(differing) == len(pairs) and len(set(differing.values())) == 1
        for dtype, how in differing.items():
            told[f"{path} {how}" if everywhere else f"{path} {how} in {str(dtype).removeprefix('torch.')}"] = None
    return _first(list(told))


def undone(
    lists: CastLists, half_dtypes: Iterable[torch.dtype] = HALF_DTYPES.values(), registered: Iterable[Edit] = ()
) -> dict[Path, str]:
    """Names the functions of torch's whose edit is undone by what they call, which is treated otherwise.

    ``torch.nn.functional.softmax`` calls the method: whitelisted alone, it hands the method half tensors, which are
    cast to float32 there, and float32 input has only lost digits. Functions of others are passed over: a method that
    they call need not be a tensor's. So is what they call where a rule has conditions, which may hold for no such call.

    Args:
        lists: the rules in force, edits included.
        half_dtypes: the half types to look at.
        registered: functions that count more than the lists.

    Returns:
        A sentence for each, with what to type.
    """
    told: dict[Path, str] = {}
    called = functools.cache(called_by)
    for half_dtype in half_dtypes:
        edits = [edit for edit in (*_edits(lists, half_dtype), *registered) if _is_of_torch(edit)]
        if not edits:
            continue  # nearly always, and to look up every function takes milliseconds
        before = _by_function(shipped().for_half(half_dtype))
        now = _by_function(lists.for_half(half_dtype))
        now |= {id(edit.function): edit.rule for edit in registered if edit.rule is not None}
        for edit in edits:
            rule, caller = edit.rule, before.get(id(edit.function))
            undoing = [
                now[callee]
                for callee in called(edit.function)
                if _undoes(now.get(callee), rule) and not _undoes(before.get(callee), caller)
            ]
            if undoing:
                told[edit.path] = _told_undone(edit, undoing)
    return told


def undone_in_brief(lists: CastLists, half_dtype: torch.dtype, registered: Sequence[Edit]) -> str | None:
    """Says for a warning which edits are undone: of the first one all, of the others where to read on; None: of none.

    Args:
        lists: the rules in force, edits included.
        half_dtype: the half type to look at.
        registered: functions that count more than the lists.
    """
    told = undone(lists, [half_dtype], registered)
    if not told:
        return None
    (_, first), *others = told.items()
    if not others:
        return first
    # The command reads each file alone, and knows nothing of mappings and of functions that were registered.
    if len(lists.files) == 1 and lists.files[0] != MAPPING and not registered:
        verb = "is" if len(others) == 1 else "are"
        command = f"ampatch lists check {shlex.quote(lists.files[0])}"
        return f"{first} {len(others)} more {verb} undone so: `{command}` tells of each."
    return f"{first} Undone in this way too: {_enumerated([str(path) for path, _ in others])}."


def left_out(lists: CastLists) -> list[str]:
    """Names the spellings that edits of torch's functions leave as they are, in a sentence for each edit.

    Args:
        lists: the rules in force, edits included. Those of them that are `undone` are left to that.
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
                if id(identity(path)) not in touched and _treatment(rules.get(path)) is not _treatment(edit.rule)
            ]
            if others:
                several = _enumerated(list(map(str, others)))
                stays = f"{several} {'stays as it is' if len(others) == 1 else 'stay as they are'}"
                told[edit.path] = f"{_opening(edit)}, but {stays}. {_every_spelling(edit)}"
    return list(filter(None, told.values()))


def _edits(lists: CastLists, half_dtype: torch.dtype) -> list[Edit]:
    """In what the lists differ from the shipped ones."""
    if lists is shipped():
        return []
    before, now = shipped().for_half(half_dtype), lists.for_half(half_dtype)
    edited = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    return [Edit(path, _function(path), now.get(path)) for path in sorted(edited)]


def _by_function(rules: Mapping[Path, Rule]) -> dict[int, Rule]:
    return {id(identity(path)): rule for path, rule in rules.items()}


def _function(path: Path) -> object:
    try:
        return find(path)
    except PathError:
        return None


def _is_of_torch(edit: Edit) -> bool:
    return str(getattr(edit.function, "__module__", None)).partition(".")[0] == "torch"


def _undoes(callee: Rule | None, caller: Rule | None) -> bool:
    """Tells whether arguments that were cast for a caller are cast otherwise for a function that it calls."""
    if callee is None or callee.when:
        return False
    if caller is not None and caller.treatment in (callee.treatment, Treatment.BANNED):
        return False
    # To the widest of types that are equal by then.
    return caller is None or callee.treatment is not Treatment.PROMOTE


def _told_undone(edit: Edit, undoing: Sequence[Rule]) -> str:
    called = _enumerated([f"{rule.path} ({_place(rule)})" for rule in undoing])
    if any(rule.path.name == edit.path.name for rule in undoing):
        remedy = _every_spelling(edit)
    else:
        names: dict[str, list[str]] = {}
        for rule in undoing:
            names.setdefault(rule.path.namespace, []).append(rule.path.name)
        entries = ", ".join(f"{namespace}: [{', '.join(each)}]" for namespace, each in names.items())
        remedy = (
            f"Type `{_list(edit.rule)}: {{{entries}}}` to move these too, for whoever calls them, or call "
            f"{edit.path.name} in a block of amp.disable_casts()."
        )
    return f"{_opening(edit)}, but calls what undoes that: {called}. {remedy}"


def _every_spelling(edit: Edit) -> str:
    return f'Type `{_list(edit.rule)}: {{"{EVERY}": [{edit.path.name}]}}` for every spelling.'


def _opening(edit: Edit) -> str:
    source = "" if edit.rule is None else f"{edit.rule.source}: "
    return f"{source}{edit.path} is {_place(edit.rule)} now"


def _treatment(rule: Rule | None) -> Treatment | None:
    return None if rule is None else rule.treatment


def _list(rule: Rule | None) -> str:
    return UNLISTED if rule is None else rule.treatment.value


def _place(rule: Rule | None) -> str:
    if rule is None:
        return "on no list"
    return "banned" if rule.treatment is Treatment.BANNED else f"in the {rule.treatment.value}"


def _first(several: list[str]) -> list[str]:
    more = len(several) - _MOST_TOLD
    return several if more <= 0 else [*several[:_MOST_TOLD], f"and {more} more"]


def _enumerated(several: list[str]) -> str:
    *others, last = _first(several)
    return f"{', '.join(others)}{', ' if last.startswith('and ') else ' and '}{last}" if others else last


def _told(live: Rule | None, asked: Rule | None) -> str:
    there, here = _place_by(live), _place_by(asked)
    if live is not None and asked is not None and replace(live, instead=asked.instead) == asked:
        here = "there too, with another `instead`"
    return f"is {there} (this call: {here})"


def _place_by(rule: Rule | None) -> str:
    """Says where a rule puts its function, and by which file and line."""
    if rule is None:
        return _place(rule)
    options = [
        *(["when " + typed_conditions(rule.when)] if rule.when else []),
        *(["via_dtype"] if rule.via_dtype else []),
    ]
    return " ".join([_place(rule), *options, f"by {rule.source}"])
