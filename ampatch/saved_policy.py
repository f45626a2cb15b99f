"""A saved policy beside that of the live session: is it one, and what differs, in words.

Owns the checks of a saved policy and the wording of the warning of `amp.load_state_dict`. Must never ask the session:
`ampatch.checkpoint_policy` has its policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from ampatch.cast_lists import patterns
from ampatch.cast_lists.paths import Path, find_owner_or
from ampatch.cast_lists.rules import UNLISTED
from ampatch.checkpoint_policy import BY_NAME, FORMAT, IN_ORDER, KEY, SHIPPED, Decided, digest
from ampatch.errors import OptionError
from ampatch.ledger import MISSING

#: What is decided under a name that a section lacks; about a function without a rule of its own, patterns decide.
_MISSING = {"patterns": ("no such pattern", ""), "modules": ("no such entry", ""), "decorated": ("not decorated", "")}

# As many lines as fit on a screen. The checkpoint has all rules.
_MOST_TOLD = 12


#: True if no edit of the user's takes part, as another ampatch or torch has other rules. Then a line: a name, what was
#: saved, an arrow, and what is live, each side with its file and line, or "shipped".
_Difference = tuple[bool, str]


def _check(saved: object) -> None:
    """Checks that a saved policy is what `effective` returned.

    Raises:
        OptionError: it is not.
    """
    if not isinstance(saved, Mapping):
        raise _fault(f"found {_shown(saved)}; expected a dict.")
    number = saved.get("format")
    if not isinstance(number, int) or number != FORMAT:  # a tensor compares by element
        raise _fault(f"its format is {_shown(number)}; expected {FORMAT}.")
    if not isinstance(saved.get("versions"), Mapping):
        raise _fault(f"its versions are {_shown(saved.get('versions'))}; expected a dict.")
    try:
        found = digest(saved)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _fault(f"it cannot be read ({type(error).__name__}: {error}).") from None
    if saved.get("sha256") != found:
        raise _fault(f"its sha256 is {_shown(saved.get('sha256'))}; its settings and rules have {found!r}.")


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Returns a line for each difference of two policies, saved -> present."""
    return [line for _, line in sorted(_differences(saved, present), key=itemgetter(0))]


def warnings(saved: Any, present: Mapping[str, Any]) -> list[str]:
    """Returns what to warn of if a saved policy differs from the live session's: one text, or none.

    Raises:
        OptionError: the saved policy is not what `effective` returned.
    """
    _check(saved)
    found = differences(saved, present)
    if not found:
        return []
    versions = [
        f"{name} {saved['versions'].get(name)} (here: {now})"
        for name, now in present["versions"].items()
        if now != saved["versions"].get(name)
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
        *(f"  {line}" for line in found[:_MOST_TOLD]),
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
    for section in (*IN_ORDER, *BY_NAME):
        yield from _differing(saved, present, section)


def _by_name(rows: list[list[str]]) -> dict[str, Decided]:
    return {name: (decision, source) for name, decision, source in rows}


def _differing(saved: Mapping[str, Any], present: Mapping[str, Any], section: str) -> Iterator[_Difference]:
    """Yields the differences of two policies in one section."""
    then, now = _by_name(saved[section]), _by_name(present[section])
    for name in sorted({**then, **now}):
        if section == "decorated" and name not in now and _is_unloaded(name):
            continue
        before, after = (
            then.get(name) or _missing(saved, section, name),
            now.get(name) or _missing(present, section, name),
        )
        if before[0] != after[0]:
            yield {before[1], after[1]} <= {SHIPPED, ""}, f"{name}: {_told(before)} -> {_told(after)}"
    was, is_now = [name for name in then if name in now], [name for name in now if name in then]
    if section in IN_ORDER and was != is_now:
        yield False, f"the order of {section}, of which the last decides: {', '.join(was)} -> {', '.join(is_now)}"


def _missing(policy: Mapping[str, Any], section: str, name: str) -> Decided:
    return _by_pattern(policy["patterns"], name) if section == "rules" else _MISSING[section]


def _by_pattern(rows: list[list[str]], name: str) -> Decided:
    """Returns what patterns decide about a function, by its name; the last one that matches counts."""
    path = Path.of(name)
    for pattern, decision, source in reversed(rows):
        if patterns.covers_by_name(Path.of(pattern), path):
            return decision, source
    return UNLISTED, ""


def _is_unloaded(name: str) -> bool:
    """Returns True if a function is in a module that is not imported yet; an import decorates it again."""
    return find_owner_or(Path.of(name.partition(".<locals>")[0]).namespace, MISSING) is None


def _told(decided: Decided) -> str:
    decision, source = decided
    return f"{decision} ({source})" if source else decision


def _fault(what: str) -> OptionError:
    return OptionError(
        f"the policy in the state dict is damaged, or from an ampatch that writes it otherwise: {what} Nothing was "
        f"loaded. To load the loss scales alone, type state_dict.pop({KEY!r}) first."
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
