"""What `amp.explain` returns, as frozen values, and their text.

Owns the wording of the report and its plain data. Must never look up a function, a rule or the session.
"""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ampatch.cast_lists.rules import UNLISTED, When, typed_options
from ampatch.cast_lists.spellings import is_in_place
from ampatch.opt_levels import dtype_name
from ampatch.patching.predictions import Prediction

_WRAP = functools.partial(textwrap.wrap, width=96, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class Overridden:
    """A rule that another one replaces: its list, and its file and line."""

    treatment: str
    source: str

    def __str__(self) -> str:
        return f"{self.treatment} ({self.source})"


@dataclass(frozen=True, slots=True)
class Ruling:
    """What decides about a function, for some half dtypes.

    Attributes:
        half_dtypes: names of the half dtypes.
        treatment: "whitelist", "blacklist", "promote", "banned" or "unlisted".
        source: file and line of the rule; "registered" or "decorated". For a function of torch that is in no list on
            purpose, the file of reasons, and the name of its reason. None for all other functions without a rule.
        when: conditions on arguments; all must hold.
        via_dtype: True if ``dtype=torch.float32`` is passed instead of a cast.
        needs_float32: device types on which torch has no half kernel, "*" for all; empty if it has one on all.
        formats: formats of arguments and of gradients, in words, if calls are rounded to them; None otherwise.
        casts_to: name of the half dtype to cast to, if it differs from the session's.
        instead: advice in the error of a banned function.
        since: first version of torch that the rule is for.
        until: first version of torch that the rule is no longer for.
        reason: comment on the entry, or on its group, in the file; or the reason why the function is in no list.
        overrides: rule that this one replaces; None if it replaces none.
    """

    half_dtypes: tuple[str, ...]
    treatment: str
    source: str | None = None
    when: When = ()
    via_dtype: bool = False
    needs_float32: tuple[str, ...] = ()
    formats: str | None = None
    casts_to: str | None = None
    instead: str | None = None
    since: str | None = None
    until: str | None = None
    reason: str | None = None
    overrides: Overridden | None = None

    @property
    def conditions(self) -> list[str]:
        """Conditions and options, each in words."""
        limits = {"to": self.casts_to, "from torch": self.since, "before torch": self.until}
        options = typed_options(self.when, self.via_dtype, self.needs_float32, self.formats)
        return [*options, *(f"{word} {limit}" for word, limit in limits.items() if limit)]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One path of the function.

    Attributes:
        path: dotted path.
        asked: True if it is the function that was asked about, rather than another spelling of it.
        rulings: what decides about it; one, or one for each half dtype.
        note: something unusual about the path; None if there is nothing.
    """

    path: str
    asked: bool
    rulings: tuple[Ruling, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A listed function that another function calls inside.

    Attributes:
        caller: path of the function that calls it.
        path: its own path.
        rulings: what decides about it.
        operator: the operator that calls it if an operand is a tensor, such as "@"; None for a call by name.
    """

    caller: str
    path: str
    rulings: tuple[Ruling, ...]
    operator: str | None = None

    @property
    def is_certain(self) -> bool:
        """False if it is called on tensors only, and the code does not show that there is one.

        A name that torch's own code looks up on an object is nearly always a tensor's method.
        """
        is_method = self.path.startswith("torch.Tensor.") and not self.caller.startswith("torch.")
        return self.operator is None and not is_method

    @property
    def text(self) -> str:
        """The path, with the operator."""
        return self.path if self.operator is None else f"{self.path} ({self.operator})"


@dataclass(frozen=True, slots=True)
class BoundPlace:
    """A place that holds the function.

    Attributes:
        where: description of the place.
        path: path of the function that it holds.
        kind: kind of the place.
        casts: True if the arguments of calls by way of it are cast, or would be if amp were set up. Functions that it
            calls inside follow their own rules in any case.
        note: condition, or what is wrong.
    """

    where: str
    path: str
    kind: str
    casts: bool
    note: str

    def __str__(self) -> str:
        return f"{self.where}: {self.path}, {self.note}"


@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """What a call would do with its arguments.

    Attributes:
        path: function that is called.
        half_dtype: half dtype of the casts.
        prediction: the tensors among the arguments, and the error that the call would raise.
    """

    path: str
    half_dtype: str
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Explanation:
    """What amp does to a function; prints as text.

    Attributes:
        asked: the function or the name that was asked about, as text.
        policy: the settings that were applied, as plain data.
        state: whether and how amp is on, as sentences.
        spellings: all paths of the function.
        calls: listed functions that it calls inside, as far as its code shows.
        places: places that hold the function. Not searched if nothing is patched.
        call: what a call with the given arguments would do; None without arguments.
        notes: sentences on edits that other functions undo, and on rules for other versions of torch.
    """

    asked: str
    policy: Mapping[str, Any] = field(repr=False)
    state: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    calls: tuple[Called, ...]
    places: tuple[BoundPlace, ...]
    call: ExplainedCall | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, True, False, None, lists and dicts. Dtypes are names."""
        return asdict(replace(self, policy=dict(self.policy)), dict_factory=_plain)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text."""
        yield self.asked
        yield from _wrapped(" ".join(self.state))
        # Forwards of modules are on no list; what they call says in which type they compute.
        shown = [
            each
            for each in self.spellings
            if not (self.calls and each.path.endswith(".forward") and _is_unlisted(each))
        ]
        sections: dict[str, Iterable[str]] = {
            f"This call, in {self.policy['half_dtype']}": _call_lines(self.call),
            "Spellings": _spelling_lines(shown),
            "Lists": _meaning_lines(shown, bool(self.policy["allow_banned"])),
            "Reasons in the lists": _reason_lines([*self.spellings, *self.calls]),
            "Listed functions that it calls inside, as far as its code shows": _called_lines(self.calls),
            "Where else it is bound": _place_lines(self.places, bool(self.calls)),
            "Notes": itertools.chain.from_iterable(_wrapped(note, "  ") for note in self.notes),
        }
        for heading, lines in sections.items():
            rest = list(lines)
            if rest:
                yield from ["", heading, *rest]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


# As plain data


def _plain(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a dataclass as plain data; those of a prediction are fields of its call."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name == "prediction":
            found |= value
        elif name == "when":
            found[name] = {argument: list(values) for argument, values in value}
        elif isinstance(value, torch.dtype):
            found[name] = dtype_name(value)
        else:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


# As text


def _is_unlisted(spelling: Spelling) -> bool:
    return all(each.treatment == UNLISTED for each in spelling.rulings)


def _call_lines(call: ExplainedCall | None) -> Iterator[str]:
    if call is None:
        return
    predicted = call.prediction
    if predicted.error is not None:
        yield from _wrapped(f"It would raise BannedFunctionError: {predicted.error}", "  ")
    if not predicted.arguments:
        yield f"  {call.path} gets no tensor."
    rows = []
    for each in predicted.arguments:
        before, after = dtype_name(each.before), dtype_name(each.after)
        rounded = ", rounded" if each.why is None else ""
        change = f"{before}{rounded}" if before == after else f"{before} -> {after}"
        rows.append([f"  {each.name}", change, each.why or ""])
    yield from _aligned(rows)


def _spelling_lines(several: Sequence[Spelling]) -> Iterator[str]:
    marks = len({spelling.asked for spelling in several}) > 1
    rows = []
    for spelling in several:
        path = f"{'* ' if marks and spelling.asked else '  '}{spelling.path}"
        rows += _rows(path, spelling.rulings)
        if spelling.note:
            rows.append(["", "", spelling.note])
    yield from _aligned(rows)
    if marks:
        yield "  * the function that was asked about"


def _rows(path: str, rulings: Sequence[Ruling]) -> list[list[str]]:
    """Returns a row for each ruling, and one more for each ruling that overrides another."""
    rows = []
    for ruling in rulings:
        half = f"{' and '.join(ruling.half_dtypes)}: " if len(rulings) > 1 else ""
        details = filter(None, [ruling.source, *ruling.conditions])
        rows.append([path, f"{half}{ruling.treatment}", "; ".join(details)])
        if ruling.overrides is not None:
            rows.append(["", "", f"instead of {ruling.overrides}"])
        path = ""
    return rows


_MEANING = {
    "whitelist": "float32 arguments, and those of the other half type, are cast to the half type",
    "blacklist": "half arguments are cast to float32",
    "promote": "floating arguments of different types are cast to the widest of them",
    "banned": "a half argument is an error",
    "unlisted": "arguments stay as they are",
}


def _meaning_lines(several: Sequence[Spelling], allow_banned: bool) -> Iterator[str]:
    meanings = {**_MEANING, "banned": "computed in float32, by allow_banned=True"} if allow_banned else _MEANING
    found = [(spelling.path, ruling) for spelling in several for ruling in spelling.rulings]
    treatments = {ruling.treatment for _, ruling in found}
    yield from _aligned([f"  {name}", "", meaning] for name, meaning in meanings.items() if name in treatments)
    if any(ruling.via_dtype for _, ruling in found):
        yield from _wrapped("via_dtype: the function gets dtype=float32 and the half tensor; its kernel casts.", "  ")
    if any(ruling.needs_float32 for _, ruling in found):
        at_levels = "At O2, O3 and O5 it is cast as well, and half arguments give half results."
        yield from _wrapped(f"needs_float32: torch has no half kernel. {at_levels}", "  ")
    if any(ruling.formats for _, ruling in found):
        how = "arguments are rounded to the format, and gradients of results to grad; biases and masks are cast."
        yield from _wrapped(f"format: {how}", "  ")
    if any("products: device" in (ruling.formats or "") for _, ruling in found):
        how = "the device multiplies in the format; what it refuses computes as without one, and amp warns."
        yield from _wrapped(f"products: {how}", "  ")
    in_place = {ruling.treatment for path, ruling in found if is_in_place(path.rpartition(".")[2])} - {UNLISTED}
    if in_place:
        yield from _wrapped("In place, the tensor that is written to decides; others are cast to its type.", "  ")
    if "blacklist" in in_place:
        yield from _wrapped("A blacklisted in-place form on a half tensor is an error.", "  ")


def _reason_lines(several: Sequence[Spelling | Called]) -> Iterator[str]:
    told: dict[str, str] = {}
    for ruling in itertools.chain.from_iterable(each.rulings for each in several):
        if ruling.reason and ruling.source and ruling.source not in told:
            told[ruling.source] = ruling.reason
    for source, reason in told.items():
        yield f"  {source}"
        yield from _wrapped(reason, "    ")


def _called_lines(calls: Sequence[Called]) -> Iterator[str]:
    for caller, group in itertools.groupby(calls, lambda called: called.caller):
        yield f"  {caller} calls"
        yield from _aligned(row for called in group for row in _rows(f"    {called.text}", called.rulings))
    if not all(called.is_certain for called in calls):
        yield "  The code does not show types: operators and methods count where they are used on a tensor."


def _place_lines(places: Sequence[BoundPlace], calls_others: bool) -> Iterator[str]:
    for place, count in Counter(places).items():
        yield from _wrapped(f"{place}{f' ({count} times)' if count > 1 else ''}", "  ", "    ")
    if calls_others and not all(place.casts for place in places):
        yield "  An uncast function still calls patched functions inside: see above."


def _aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields rows of three cells as lines in columns; the last cell is wrapped, and empty columns are left out."""
    cells = list(rows)
    first, second = (max((len(row[column]) for row in cells), default=0) for column in (0, 1))
    for one, two, text in cells:
        start = f"{one.ljust(first)}  {two.ljust(second)}  " if second else f"{one.ljust(first)}  "
        yield from (line.rstrip() for line in _wrapped(text, start, " " * len(start)) or [start])


def _wrapped(text: str, indent: str = "", later: str | None = None) -> list[str]:
    return _WRAP(text, initial_indent=indent, subsequent_indent=indent if later is None else later)
