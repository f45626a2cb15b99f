"""Reads from the files of the lists what a rule does not hold: reasons in comments, and limits to versions of torch.

YAML's tree has no comments, so they are read from the lines around an entry. Must never change a list or a rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml

from ampatch.cast_lists import patterns
from ampatch.cast_lists.lists import MAPPING, CastLists
from ampatch.cast_lists.paths import Path, identity
from ampatch.cast_lists.reader import LISTS, Reading, is_in_force
from ampatch.cast_lists.rules import MODULES, UNLISTED, Rule, Treatment
from ampatch.cast_lists.spellings import EVERY_NAMESPACE, spellings
from ampatch.cast_lists.yaml_tree import compose, kind_of, line_of
from ampatch.opt_levels import dtype_name


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a list, as it stands in its file.

    Attributes:
        source: file and line.
        list_name: name of the list.
        path: path as it is written; its namespace may be `EVERY_NAMESPACE`.
        half_dtypes: names of the half dtypes that it is for.
        since: first version of torch that it is for, if it names one.
        until: first version of torch that it is no longer for, if it names one.
        reason: comment on the entry or on its group; None if there is none.
    """

    source: str
    list_name: str
    path: Path
    half_dtypes: tuple[str, ...]
    since: str | None
    until: str | None
    reason: str | None

    @property
    def is_in_force(self) -> bool:
        """True if the entry is for the installed version of torch."""
        return is_in_force(self.since, self.until)

    def covers(self, path: Path) -> bool:
        """Returns True if the entry decides about the function at a path."""
        if self.path.namespace == EVERY_NAMESPACE:
            return path in spellings(self.path.name)
        if patterns.is_pattern(self.path):
            return path in (self.path, *patterns.functions(self.path))
        return self.path == path or identity(self.path) is identity(path)


def user_entries(lists: CastLists) -> list[Entry]:
    """Returns the entries of the files that were laid over the shipped lists, the last file first.

    They are those of the texts that made the lists, even if a file has changed since. A mapping has none here.
    """
    overlays = list(zip(lists.files, lists.texts, strict=True))
    return [entry for file, text in reversed(overlays) if file != MAPPING for entry in _entries_of_user(file, text)]


def entry_of(rule: Rule, entries: Iterable[Entry]) -> Entry | None:
    """Returns the entry that a rule comes from; None if that was in a mapping."""
    made = (rule.source, rule.treatment.value)
    return next((each for each in entries if (each.source, each.list_name) == made and each.covers(rule.path)), None)


def unlisting(path: Path, half_dtype: str, entries: Iterable[Entry]) -> Entry | None:
    """Returns the entry that took a function off all lists, for the half dtype of a name; None if none did."""
    removals = (each for each in entries if each.list_name == UNLISTED and half_dtype in each.half_dtypes)
    return next((each for each in removals if each.is_in_force and each.covers(path)), None)


@functools.cache
def shipped_entries() -> tuple[Entry, ...]:
    """Returns the entries of the shipped lists, for all versions of torch."""
    found: list[Entry] = []
    for treatment in Treatment:
        name = f"{treatment.value}.yaml"
        text = (files("ampatch.lists") / name).read_text("utf-8")
        found += _entries(name, text, {treatment.value: compose(text)})
    return tuple(found)


def _entries_of_user(file: str, text: str) -> list[Entry]:
    node = compose(text)
    lists = {} if node is None or kind_of(node) != "map" else {key.value: value for key, value in node.value}
    lists.pop(MODULES, None)  # its entries are rules of parts of a model, not of the session
    return _entries(file, text, lists)


def _entries(file: str, text: str, lists: Mapping[str, yaml.Node | None]) -> list[Entry]:
    comments, reading, found = Comments(text), Reading(file), []
    for name, tree in lists.items():
        for each in reading.entries(tree, LISTS[name]):
            line = line_of(each.node)  # an alias has the node, and so the line, of its anchor
            dtypes, reason = tuple(map(dtype_name, each.dtypes)), comments.reason(line)
            found.append(Entry(f"{file}:{line}", name, each.path, dtypes, each.since, each.until, reason))
    return found


@dataclass(frozen=True, slots=True)
class _Line:
    """A line with content: its column, whether it begins with a key or a dash, and the comment at its end.

    ``opens`` is True if the line ends by opening a list or a mapping, so that its comment is about that.
    """

    column: int
    starts: str
    comment: str | None
    opens: bool


class Comments:
    """The comments of a YAML document, by the lines that they are about.

    Args:
        text: a document that is valid YAML.
    """

    def __init__(self, text: str) -> None:
        lasts: dict[int, yaml.Token] = {}
        inside: set[int] = set()
        keys: set[int] = set()
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            start, end = token.start_mark, token.end_mark
            if isinstance(token, yaml.KeyToken):
                keys.add(start.index)
            if start.index < end.index:
                lasts[end.line] = token
                inside.update(range(start.line + 1, end.line + 1))
        self._lines: dict[int, _Line] = {}
        self._alone: dict[int, tuple[int, str]] = {}  # comments that have a line for themselves: column and text
        self._first: int | None = None  # the line of the first key, without the marks that may open a document
        offset = 0
        for number, whole in enumerate(text.splitlines(keepends=True)):
            line, stripped = whole.rstrip(), whole.strip()
            column = len(line) - len(line.lstrip())
            if number not in lasts and number not in inside and stripped.startswith("#"):
                self._alone[number + 1] = column, stripped
            elif stripped:
                rest = line[lasts[number].end_mark.column :].strip() if number in lasts else ""
                first = offset + column
                if self._first is None and not stripped.startswith(("%", "---")):
                    self._first = number + 1
                self._lines[number + 1] = _Line(
                    column,
                    "item" if stripped.startswith("- ") or stripped == "-" else "key" if first in keys else "content",
                    rest if rest.startswith("#") else None,
                    isinstance(lasts.get(number), _OPENING),
                )
            offset += len(whole)

    def reason(self, line: int) -> str | None:
        """Returns the comment on an entry that begins in a line, or else on its group; None if there is none.

        The nearest comment counts: first at the end of the line, then directly above it. Next come those above earlier
        items of the same list, if no blank line lies between. Last come those on the list, mapping or key around it. A
        comment above the first key is about the file, such as its name, and counts for no entry.

        Args:
            line: number of the line, from 1 on.
        """
        at: int | None = line if line in self._lines else None
        is_within = True  # at the entry itself, or at what holds it, rather than at an item before it
        while at is not None:
            here = self._lines[at]
            if is_within and here.comment is not None and (at == line or here.opens):
                return _told([here.comment])
            above = self._block_above(at, here.column) if at != self._first else []
            if above:
                return _told(above)
            at, is_within = self._next(at)
        return None

    def _block_above(self, line: int, column: int) -> list[str]:
        """Returns the comment lines directly above a line, without those that are indented deeper."""
        block = []
        while (found := self._alone.get(line - 1)) is not None and found[0] <= column:
            block.append(found[1])
            line -= 1
        return block[::-1]

    def _next(self, line: int) -> tuple[int | None, bool]:
        """Returns the line whose comment also counts, and True if it holds this line rather than precedes it."""
        here, is_apart = self._lines[line], self._lines[line].starts == "key"
        for number in range(line - 1, 0, -1):
            above = self._lines.get(number)
            if above is None:
                is_apart = is_apart or number not in self._alone  # blank: the group ends
                continue
            if above.column > here.column:
                continue
            if above.column < here.column or (here.starts == "item" and above.starts == "key"):
                return number, True
            if not is_apart:
                return number, False
        return None, False


_OPENING = (
    yaml.ValueToken,
    yaml.AnchorToken,
    yaml.BlockEntryToken,
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
)


def _told(lines: Sequence[str]) -> str | None:
    return " ".join(" ".join(line.lstrip("#") for line in lines).split()) or None
