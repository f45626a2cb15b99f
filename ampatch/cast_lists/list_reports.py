"""Cast lists as lines of text: the rules in force, the changes in a user's file, the differences to another system.

Owns the wording of `ampatch lists`. Must never print, read a file, or change a list or torch.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from ampatch.cast_lists import list_edits, patterns
from ampatch.cast_lists.coverage import Coverage, reason_of
from ampatch.cast_lists.list_edits import options_of
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path, find_or, function_key, is_importable
from ampatch.cast_lists.rules import FLOAT32, UNLISTED, Rule, Treatment, typed_options
from ampatch.cast_lists.spellings import NAMESPACES, method_of_operator
from ampatch.errors import OptionError, did_you_mean, one_line
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES
from ampatch.opt_levels import dtype_name

BOTH = tuple(HALF_DTYPES.values())

_NO_LIST = "-"
# Result of a lookup if torch, or another installed package, has no such name.
_ABSENT = object()

_T = TypeVar("_T")
_Decision = tuple[Treatment, tuple[str, ...]]


def policy(lists: CastLists, half_dtypes: Sequence[torch.dtype] = BOTH, names: Sequence[str] = ()) -> list[str]:
    """Returns the rules in force, one line each, sorted by namespace and name.

    Args:
        lists: rules to show.
        half_dtypes: half dtypes to show. A rule that is the same for all of them is one line; any other line names its
            half dtype.
        names: functions and namespaces to show; empty: all. A function is given by its name (``softmax``, in all
            namespaces), or by its path or the end of one (``functional.softmax``). A namespace is given by its path
            (``torch.fft``). Patterns (``*_loss``) and operators (``@``) work too; ``*`` is the pattern for all. If a
            function is listed under other paths than the given one, these are shown.

    Returns:
        Lines of four aligned columns: path, list, the file and line of the rule, and its conditions if it has any.
        After them a line for each given function that is on no list. Last, with the name of the part in front, the
        rules of parts of a model that differ.

    Raises:
        OptionError: no function has one of the names; the message suggests close names.
    """
    in_force = lists.told(matched=False)
    listed = sorted({path for path, _ in in_force})
    wanted, notes = _selected(names, listed) if names else (set(listed), [])
    rows: list[list[str]] = []
    for path in sorted(wanted):
        rules = [in_force.get((path, dtype)) for dtype in half_dtypes]
        waits = f"matches nothing yet: import {patterns.package_of(path)} or its modules first"
        rows += _rows([str(path)], rules, half_dtypes, [waits] if patterns.is_pattern(path) else [])
    return [*_aligned(rows), *notes, *_policy_of_modules(lists, half_dtypes, names)]


def _rows(
    start: Sequence[str], rules: Iterable[Rule | None], half_dtypes: Sequence[torch.dtype], also: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Yields a row for each different rule. Equal ones from two lines of a file stay two: the user finds both lines."""
    for (rule, source), dtypes in _dtypes_of([(rule, rule.source) if rule else None for rule in rules], half_dtypes):
        conditions = [*_only(dtypes, half_dtypes), *options_of(rule), *also]
        yield [*start, rule.treatment.value, source, "; ".join(conditions)]


def _policy_of_modules(lists: CastLists, half_dtypes: Sequence[torch.dtype], names: Sequence[str] = ()) -> list[str]:
    """Returns the rules of parts of a model as lines with a heading; with names, those of these functions only."""
    rows = []
    for entry in lists.modules:
        if entry.is_float32:
            rows.append([entry.name, "everything", FLOAT32, entry.source, ""])
            continue
        if entry.formats is not None:
            rows.append([entry.name, "the whitelist", str(entry.formats), entry.source, ""])
        own = lists.of_module(replace(entry, formats=None))
        for path, (here, there) in list_edits.differing(lists, own, half_dtypes).items():
            if names and not _selected(names, [path])[0]:
                continue
            rows += _rows([entry.name, str(path)], there, half_dtypes)
            taken_out = [dtype for dtype, old, new in zip(half_dtypes, here, there, strict=True) if old and not new]
            if taken_out:
                only = "; ".join(_only(taken_out, half_dtypes))
                rows.append([entry.name, str(path), UNLISTED, entry.source, only])
        if not (entry.changes or entry.formats or names):
            rows.append([entry.name, "-", "no change", entry.source, ""])
    return ["In parts of a model:", *_aligned(rows)] if rows else []


def _selected(names: Sequence[str], listed: Sequence[Path]) -> tuple[set[Path], list[str]]:
    """Returns the listed paths that the names select, and a sentence for each function without a rule."""
    selected: set[Path] = set()
    notes: list[str] = []
    for given in names:
        # "*" is an operator too, but the pattern that fits everything is what a reader of lists asks for.
        operator = None if given == "*" else method_of_operator(given)
        # Most scripts import it as F.
        name = str(operator or re.sub(r"^F\.", "torch.nn.functional.", given))
        matching = {path for path in listed if _goes_by(path, name)} or _same_function(name, listed)
        selected |= matching
        if not matching:
            notes.append(_unlisted(name, listed))
    return selected, notes


def _goes_by(path: Path, name: str) -> bool:
    if any(sign in name for sign in "*?["):
        return fnmatchcase(path.name, name) or fnmatchcase(str(path), name)
    return f".{path}".endswith(f".{name}") or path.namespace == name or path.namespace.startswith(f"{name}.")


def _same_function(name: str, listed: Sequence[Path]) -> set[Path]:
    """Returns the listed paths of the function at ``name``, which is another path of it."""
    function = function_key(Path.of(name))
    return {path for path in listed if function_key(path) == function}


def _unlisted(name: str, listed: Sequence[Path]) -> str:
    """Returns a sentence about a function without a rule.

    Raises:
        OptionError: there is no such function.
    """
    namespace, _, attribute = name.rpartition(".")
    for each in [namespace] if "." in name else NAMESPACES:
        if each and attribute and callable(find_or(Path(each, attribute))):
            reason = reason_of(Path(each, attribute))
            why = f" {reason.why}" if reason else ""
            return f"{each}.{attribute} is on no list: amp leaves its arguments as they are.{why}"
    known = {path.name for path in listed} | {path.namespace for path in listed}
    near = did_you_mean(name, [*map(str, listed), *known] if namespace else known)
    package = namespace.partition(".")[0]
    if package and package not in sys.modules and is_importable(package):
        near = f" {package!r} is not imported here: if {namespace} has the function, add --import {namespace}."
    raise OptionError(
        f"{name!r} is on no list, and there is no function of that name; expected a function's name, its path, a "
        f"namespace, a pattern or an operator, such as softmax, torch.softmax, torch.fft, '*softmax' or '@'.{near}"
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """The report on a cast-list file that could be read without faults.

    Attributes:
        lines: one line for each undone change, and for each change that leaves out other spellings of its function.
            The last line counts the paths that the file changes, and those of them that could not be checked.
        warns: True if a change is undone. A spelling that is left out does not count, as the user may intend that.
    """

    lines: list[str]
    warns: bool


def checked(file: str, before: CastLists, after: CastLists) -> Checked:
    """Returns the report on a cast-list file that could be read; it may warn that calls undo a change.

    Args:
        file: name of the file.
        before: lists without the file.
        after: lists with the file.
    """
    undone = [*list_edits.undone(after).values(), *list_edits.undone_in_modules(after)]
    changed = list_edits.differing(before, after, BOTH)
    unseen = sum(find_or(path, _ABSENT) is None for path in changed)
    note = f" ({unseen} not looked up, being in modules that are not imported yet)" if unseen else ""
    how = "is undone by calls inside the function" if len(undone) == 1 else "are undone by calls inside the functions"
    sound = f"can be read, but {len(undone)} of its changes {how}" if undone else "is sound"
    are = "is" if len(changed) == 1 else "are"
    count = len(after.modules)
    effects = [f"changes how {_paths(len(changed))} {are} treated{note}"] if changed else []
    if count:
        effects.append(f"has {count} {'entry' if count == 1 else 'entries'} for parts of a model")
    nothing = "changes nothing, as it has no entries, or only such as the shipped lists have"
    verdict = f"{file} {sound}: it {', and '.join(effects) or nothing}."
    lines = [*undone, *list_edits.left_out(after), *list_edits.in_modules(after, list_edits.left_out), verdict]
    return Checked(list(map(one_line, lines)), bool(undone))


def difference(theirs: CastLists, ours: CastLists, name: str, half_dtypes: Sequence[torch.dtype] = BOTH) -> list[str]:
    """Returns the differences to another system's lists, one line per path, sorted by namespace and name.

    A difference is another list, another condition, or a list on one side only, in any of ``half_dtypes``. The
    mechanism of a rule (``via_dtype``) and the text of its error do not count, nor does a name that the installed torch
    lacks.

    Functions are compared, not spellings. A function that a system lists under one name (``torch.conv2d``) counts as
    listed under all (``torch.nn.functional.conv2d`` is the same object). A user's file also moves it under all. A
    function and the method of the same name are two functions. A composition and its parts are separate functions
    too. If one side lists ``cross_entropy`` and the other the operators below it, each path is a difference, although a
    model may see none.

    Args:
        theirs: the other system's lists.
        ours: lists to compare them with.
        name: name of the other system in the text.
        half_dtypes: half dtypes to compare in.

    Returns:
        A legend; lines of three aligned columns: path, their list, our list (``-`` for none), with the conditions of
        each in parentheses. Then a line that counts them. Without a difference, that line alone.
    """
    sides = [[_by_any_name(lists.for_half(dtype)) for dtype in half_dtypes] for lists in (theirs, ours)]

    def decisions(path: Path) -> list[list[_Decision | None]]:
        return [[_decision(rules.get(path) or rules.get(function_key(path))) for rules in side] for side in sides]

    listed = {path for path, _ in {**theirs.rules, **ours.rules} if find_or(path, _ABSENT) is not _ABSENT}
    found = {path: decisions(path) for path in sorted(listed)}
    kinds = ("listed by both", f"by {name} (left) only", "by ampatch (right) only")
    return _compared(found, half_dtypes, (f"in {name}", "in ampatch"), kinds)


def changes(before: CastLists, after: CastLists, file: str, half_dtypes: Sequence[torch.dtype] = BOTH) -> list[str]:
    """Returns the changes in a file, one line per path, sorted by namespace and name.

    Unlike in `difference`, every option of an entry counts, and a function has a line for each of its paths.

    Args:
        before: lists without the file.
        after: lists with the file.
        file: name of the file.
        half_dtypes: half dtypes to compare in.

    Returns:
        A legend; lines of three aligned columns: path, list before, list after (``-`` for none), with the conditions
        of each in parentheses. Then a line that counts them. Without a change, that line alone. Last, with the name of
        the part in front, the rules of parts of a model that differ, as in `policy`.
    """
    differing = list_edits.differing(before, after, half_dtypes).items()
    found = {path: [list(map(_full_decision, side)) for side in sides] for path, sides in differing}
    columns = ("in the shipped lists", f"with {file} laid over them")
    compared = _compared(found, half_dtypes, columns, ("moved or changed", "taken out", "new"))
    return [*compared, *_policy_of_modules(after, half_dtypes)]


def covered(found: Coverage) -> list[str]:
    """Returns the decisions about torch's callables as lines: counts, then undecided callables, then all names.

    Args:
        found: decisions to show.

    Returns:
        First a line with the numbers of callables that are listed, reviewed and undecided. Then a line for each list
        and each reason, with its number of callables, and a line for each undecided callable. Last, for each list and
        reason, its name and its functions by namespace.
    """
    listed = {treatment.value: paths for treatment, paths in found.listed.items()}
    reviewed = {reason.name: paths for reason, paths in found.reviewed.items()}
    counts = found.counts()
    number = f"torch {found.torch_version} has {sum(counts.values())} functions and properties of tensors"
    parts = f"{counts['listed']} in a list, {counts['reviewed']} in none for a reason, {counts['undecided']} undecided"
    lines = [
        f"{number}: {parts}.",
        *(["", _UNDECIDED, *(f"  {path}" for path in found.undecided)] if found.undecided else []),
        "",
        *_aligned([name, str(len(paths)), ""] for name, paths in listed.items()),
        "",
        *_aligned([reason.name, str(len(paths)), reason.why] for reason, paths in found.reviewed.items()),
    ]
    for name, paths in {**listed, **reviewed}.items():
        names = grouped((path.namespace, path.name) for path in paths)
        lines += ["", f"{name}:", *(f"  {namespace}: {', '.join(each)}" for namespace, each in names.items())]
    return lines


_UNDECIDED = "Neither a list nor a reason names these. amp leaves their arguments as they are; name them in cast_lists:"


def _compared(
    decisions: Mapping[Path, Sequence[Sequence[_Decision | None]]],
    half_dtypes: Sequence[torch.dtype],
    columns: tuple[str, str],
    kinds: tuple[str, str, str],
) -> list[str]:
    """Returns a legend, a row for each path whose two sides differ, and their number; without one, that number alone.

    Args:
        decisions: the decisions of both sides about each path, by half dtype.
        half_dtypes: the half dtypes.
        columns: where each side has its list, for the legend.
        kinds: what rows are that both sides list, the first alone, or the second alone.
    """
    differing = {path: sides for path, sides in decisions.items() if sides[0] != sides[1]}
    counted = f"{_paths(len(differing))} treated differently in {' and '.join(map(dtype_name, half_dtypes))}"
    if not differing:
        return [f"{counted}."]
    legend = f"Columns: function; its list {columns[0]}; its list {columns[1]} ({_NO_LIST}: none)."
    rows = [[str(path), *(_cell(side, half_dtypes) for side in sides)] for path, sides in differing.items()]
    listed_by = Counter((any(left), any(right)) for left, right in differing.values())
    numbers = [listed_by[by] for by in ((True, True), (True, False), (False, True))]
    told = ", ".join(f"{number} {kind}" for number, kind in zip(numbers, kinds, strict=True))
    return [one_line(legend), *_aligned(rows), f"{counted}: {told}."]


def _decision(rule: Rule | None) -> _Decision | None:
    """Returns the parts of a rule that other systems have too."""
    return None if rule is None else (rule.treatment, tuple(typed_options(rule.when, False, ())))


def _full_decision(rule: Rule | None) -> _Decision | None:
    """Returns all parts of a rule that matter to ampatch."""
    if rule is None:
        return None
    return rule.treatment, (*options_of(rule), *([f"instead: {rule.instead}"] if rule.instead else []))


def _by_any_name(rules: dict[Path, Rule]) -> dict[object, Rule]:
    """Returns the rules by path, and by the `function_key` that all paths of a function share."""
    found: dict[object, Rule] = {}
    for path, rule in rules.items():
        found[path] = rule
        found.setdefault(function_key(path), rule)
    return found


def _cell(decisions: Iterable[_Decision | None], half_dtypes: Sequence[torch.dtype]) -> str:
    """Returns the lists of a function, each with its conditions; two if they differ by half dtype."""
    cells = []
    for (treatment, options), dtypes in _dtypes_of(decisions, half_dtypes):
        conditions = "; ".join([*_only(dtypes, half_dtypes), *options])
        cells.append(f"{treatment.value} ({conditions})" if conditions else treatment.value)
    return ", ".join(cells) or _NO_LIST


def _dtypes_of(
    values: Iterable[_T | None], half_dtypes: Sequence[torch.dtype]
) -> Iterable[tuple[_T, list[torch.dtype]]]:
    """Returns each value that is not None, with the half dtypes that it is for."""
    pairs = zip(values, half_dtypes, strict=True)
    return grouped((value, dtype) for value, dtype in pairs if value is not None).items()


def _only(dtypes: Sequence[torch.dtype], asked: Sequence[torch.dtype]) -> list[str]:
    """Returns the half dtypes, unless they are all that were asked about."""
    return [] if len(dtypes) == len(asked) else [f"{dtype_name(dtype)} only" for dtype in dtypes]


def _paths(count: int) -> str:
    return "1 path" if count == 1 else f"{count} paths"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns rows as lines, every column except the last padded to its widest cell."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
