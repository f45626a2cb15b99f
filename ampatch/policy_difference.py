"""Reads the policy of a checkpoint, and says in which rules it differs from the live one.

Owns the checks of a saved policy and the wording of the warning. Must never change a session or a loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from ampatch import policy
from ampatch.cast_lists import patterns
from ampatch.cast_lists.paths import find_owner_or
from ampatch.cast_lists.rules import UNLISTED
from ampatch.errors import OptionError
from ampatch.ledger import MISSING

#: The key of the policy in the dict of `amp.state_dict`.
KEY = "policy"

#: What is decided under a name that a section lacks.
_MISSING = {"patterns": ("no such pattern", ""), "modules": ("no such entry", "")}

# As many lines as fit on a screen. The checkpoint has all rules.
_MOST_TOLD = 12


#: True if no edit of the user's takes part, as another ampatch or torch has other rules. Then a line: a name, what was
#: saved, an arrow, and what is live, each side with its file and line, or "shipped".
_Difference = tuple[bool, str]


def _check(saved: object) -> None:
    """Checks that a saved policy is what `policy.effective` returned.

    Raises:
        OptionError: it is not; the message names the part.
    """
    if not isinstance(saved, Mapping):
        raise _fault("", f"found {_shown(saved)}; expected a dict.")
    number = saved.get("format")
    if not isinstance(number, int) or number != policy.FORMAT:  # a tensor compares by element
        raise _fault("format", f"found {_shown(number)}; expected {policy.FORMAT}.")
    keys = ("format", "sha256", "versions", *policy.TABLES)
    for key in (*saved, *keys):
        if key not in keys:
            raise _fault(str(key), f"expected only {', '.join(keys)}.")
        if key not in saved:
            raise _fault(key, "it is missing.")
    _check_versions(saved["versions"])
    for table, columns in policy.TABLES.items():
        _check_table(saved[table], table, columns)
    try:
        found = policy.digest(saved)
    except (TypeError, ValueError, RecursionError) as error:
        raise _fault("settings", f"found values that are no plain data: {error}.") from None
    if saved["sha256"] != found:
        raise _fault("sha256", f"found {_shown(saved['sha256'])}; its settings and rules have {found!r}.")


def warnings(saved: Any, present: Mapping[str, Any]) -> list[str]:
    """Returns what to warn of if a saved policy differs from the live session's: one text, or none.

    Raises:
        OptionError: the saved policy is not what `policy.effective` returned; the message names the part.
    """
    _check(saved)
    found = sorted(_differences(saved, present), key=itemgetter(0))
    if not found:
        return []
    versions = [
        f"{name} {then} (here: {present['versions'][name]})"
        for name, then in saved["versions"].items()
        if then != present["versions"][name]
    ]
    by = f", by {' and '.join(versions)}" if versions else ""
    number = "1 difference" if len(found) == 1 else f"{len(found)} differences"
    more = len(found) - _MOST_TOLD
    remedy = (
        f"To train under the saved policy, give amp.initialize the former arguments: state_dict[{KEY!r}] has them "
        "under 'settings', and the text of its cast lists under 'overlays'."
    )
    lines = [
        f"this state was saved under another policy{by}, and this run keeps its own. {number}, saved -> here:",
        *(f"  {line}" for _, line in found[:_MOST_TOLD]),
        *([f"  and {more} more"] if more > 0 else []),
        remedy,
    ]
    return ["\n".join(lines)]


def _differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[_Difference]:
    """Yields the differences of two policies: of the settings, then of the rules."""
    then, now = dict(saved["settings"]), dict(present["settings"])
    for name, value in then.items():
        # A setting that one side lacks has no effect there, because of another setting that differs.
        if name in now and value != now[name]:
            yield False, f"{name}: {value!r} -> {now[name]!r}"
    # No half type: the side patches no function at all.
    reach = [(side.get("patch_torch_functions"), side.get("half_dtype") is None) for side in (then, now)]
    if reach[0] != reach[1]:
        return  # each rule would differ, as a level applies all of the lists, a few rules, or none
    for section in policy.IN_ORDER:
        yield from _differing_in_order(saved[section], present[section], section)
    yield from _rules(saved, present)
    yield from _decorated(_by_name(saved["decorated"]), _by_name(present["decorated"]))


_Decided = tuple[str, str]


def _by_name(rows: list[list[str]]) -> dict[str, _Decided]:
    return {name: (decision, source) for name, decision, source in rows}


def _differing_in_order(saved: list[list[str]], present: list[list[str]], section: str) -> Iterator[_Difference]:
    then, now = _by_name(saved), _by_name(present)
    for name in sorted({**then, **now}):
        yield from _compared(name, then.get(name, _MISSING[section]), now.get(name, _MISSING[section]))
    before, after = [name for name in then if name in now], [name for name in now if name in then]
    if before != after:
        yield False, f"the order of {section}, of which the last decides: {', '.join(before)} -> {', '.join(after)}"


def _rules(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[_Difference]:
    then, now = _by_name(saved["rules"]), _by_name(present["rules"])
    for name in sorted({**then, **now}):
        before = then[name] if name in then else _by_pattern(saved["patterns"], name)
        after = now[name] if name in now else _by_pattern(present["patterns"], name)
        yield from _compared(name, before, after)


def _by_pattern(rows: list[list[str]], name: str) -> _Decided:
    """Returns what patterns decide about a function, by its name; the last one that matches counts."""
    path = policy.path_of(name)
    for pattern, decision, source in reversed(rows):
        if patterns.covers_by_name(policy.path_of(pattern), path):
            return decision, source
    return UNLISTED, ""


def _decorated(then: Mapping[str, _Decided], now: Mapping[str, _Decided]) -> Iterator[_Difference]:
    for name in sorted({**then, **now}):
        if name in now or not _is_unloaded(name):
            yield from _compared(name, then.get(name, ("not decorated", "")), now.get(name, ("not decorated", "")))


def _is_unloaded(name: str) -> bool:
    """Returns True if a function is in a module that is not imported yet; an import decorates it again."""
    return find_owner_or(policy.path_of(name.partition(".<locals>")[0]).namespace, MISSING) is None


def _compared(name: str, then: _Decided, now: _Decided) -> Iterator[_Difference]:
    if then[0] != now[0]:
        yield {then[1], now[1]} <= {policy.SHIPPED, ""}, f"{name}: {_told(then)} -> {_told(now)}"


def _told(decided: _Decided) -> str:
    decision, source = decided
    return f"{decision} ({source})" if source else decision


def _check_versions(versions: object) -> None:
    for name in ("ampatch", "torch"):
        found = versions.get(name) if isinstance(versions, Mapping) else None
        if not isinstance(found, str):
            raise _fault("versions", f"found {_shown(versions)}; expected the versions of ampatch and torch as text.")


def _check_table(rows: object, table: str, columns: tuple[str, ...]) -> None:
    if not isinstance(rows, list):
        raise _fault(table, f"found {_shown(rows)}; expected a list.")
    for place, row in enumerate(rows):
        is_row = isinstance(row, (list, tuple)) and len(row) == len(columns)
        pairs = zip(columns, row, strict=True) if is_row else ()
        if not is_row or not all(isinstance(value, str) for column, value in pairs if column != "value"):
            raise _fault(f"{table}[{place}]", f"found {_shown(row)}; expected {', '.join(columns)}.")


def _fault(where: str, what: str) -> OptionError:
    return OptionError(
        f"the policy in the state dict is damaged, or from an ampatch that writes it otherwise. In "
        f"{KEY}{'.' if where else ''}{where}: {what} Nothing was loaded. To load the loss scales alone, type "
        f"state_dict.pop({KEY!r}) first."
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
