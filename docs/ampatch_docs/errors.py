"""The page of errors as Markdown: every message of the code, with the cause and the cure that errors.yaml has for it.

A check of an argument needs no entry there, since its text says what is expected. Must not import ampatch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from ampatch_docs.messages import CLOSE, OPEN, PACKAGE, Message, Sources

DOCS = Path(__file__).parents[1]

#: Messages that pass on the text of another one, by the place that raises them; the texts stand elsewhere on the page.
PASSED_ON = {
    ("public/tools.py", "_side"),
    ("cast_lists/lists.py", "_read_overlay"),
    ("cast_lists/reader.py", "Reading._add_pattern"),
    ("cast_lists/reader.py", "Reading._read"),
    ("patching/emulation.py", "Emulation.adapt"),
    ("cast_lists/reader.py", "Reading.changes"),
    ("casting/cast_errors.py", "add_note"),
    ("cli/commands.py", "_naming"),
    ("cli/users_errors.py", "in_one_error"),
    ("interfaces/grad_scaler.py", "GradScaler.__init__"),
    ("interfaces/grad_scaler.py", "GradScaler.update"),
    ("parts/casts.py", "Casts._warn_of_undone_edits"),
    ("patching/adapters.py", "Adapters.for_rule"),
    ("patching/function_patches.py", "FunctionPatches.patch_imported"),
    ("patching/function_patches.py", "FunctionPatches._patch_imported_rule"),
    ("patching/wrappers.py", "explain"),
    ("scaling/loss_scaler.py", "load_states"),
    ("weights/master_gradients.py", "ShownGradients.warn_if_arrived"),
    ("weights/master_values.py", "MasterValues._check_as_converted"),
    ("weights/ruled_parts.py", "check_entries"),
}
#: Classes whose messages say what an argument was, and what is expected instead.
_CHECKS = {"OptionError", "ScalerOptionError", "UnsupportedOptionError", "CastListError", "AmpError", "PathError"}
#: Classes that users do not see, each with the one that it reaches them as.
_SEEN_AS = {"AmpError": "CastListError", "PathError": "CastListError"}
#: A field, or a piece of code, which Markdown must not read otherwise.
_PIECES = re.compile(f"(`[^`]*`|{OPEN}[^{CLOSE}]*{CLOSE})")


@dataclass(frozen=True, slots=True)
class Entry:
    """What the page says about one or several messages that have the same cause.

    Attributes:
        has: pieces of the messages.
        torch: errors of torch itself: the class, and the text with ``*`` around the names of fields.
        see: pages of the guide, by the names of their files.
    """

    title: str
    cause: str
    cure: str
    see: tuple[str, ...]
    has: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()

    def matches(self, message: Message) -> bool:
        """Returns True if the message has one of the pieces."""
        return any(piece in message.plain for piece in self.has)


@dataclass(frozen=True, slots=True)
class Section:
    """A situation, with its entries.

    Attributes:
        files: modules, functions and folders whose checks of arguments stand in this section: ``public/tools.py:tune``.
        also: messages that are not found in the code, since it puts them together.
    """

    title: str
    intro: str
    files: tuple[str, ...]
    entries: tuple[Entry, ...]
    also: tuple[Message, ...]

    def holds(self, message: Message) -> bool:
        """Returns True for a check of an argument by one of its modules."""
        places = (message.file, f"{message.file}:{message.place}")
        is_here = any(name in places or (name.endswith("/") and message.file.startswith(name)) for name in self.files)
        return is_here and is_check(message)


def is_check(message: Message) -> bool:
    """Returns True if a message says what is expected of an argument."""
    return message.kind in _CHECKS and "expected" in message.text


@cache
def sections_of_file() -> tuple[Section, ...]:
    """Returns the sections of errors.yaml."""
    given = yaml.safe_load((Path(__file__).parent / "errors.yaml").read_text(encoding="utf-8"))
    return tuple(_section(each) for each in given)


def _section(given: dict[str, object]) -> Section:
    entries = [Entry(**{key: tuple(value) if isinstance(value, list) else value for key, value in each.items()})
               for each in given["entries"]]  # fmt: skip
    also = [Message(each["file"], "", each["kind"], _marked(each["text"])) for each in given.get("also", ())]
    return Section(given["title"], given.get("intro", ""), tuple(given["files"]), tuple(entries), tuple(also))


def _marked(text: str) -> str:
    return re.sub(r"\*([\w :.]+)\*", rf"{OPEN}\1{CLOSE}", text)


@cache
def found() -> tuple[Message, ...]:
    """Returns the messages that are found in the code."""
    return tuple(Sources().messages())


@cache
def messages() -> tuple[Message, ...]:
    """Returns every message that has words of its own: those found in the code, and those that errors.yaml adds."""
    own = [message for message in found() if message.has_words]
    return (*own, *(message for section in sections_of_file() for message in section.also))


def text() -> str:
    """Returns the page's sections."""
    return "\n\n".join(part for section in sections_of_file() for part in _told(section))


def classes() -> str:
    """Returns a table of the classes that users may catch, with their bases and the first sentence about each."""
    rows = ["| class | base classes | meaning |", "|---|---|---|"]
    for name, node in Sources().classes.items():
        if name in _public():
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            told = (ast.get_docstring(node) or "").partition("\n")[0].replace("``", "`")
            rows.append(f"| {{py:exc}}`{name} <ampatch.amp.{name}>` | {bases} | {told} |")
    return "\n".join(rows)


def _public() -> set[str]:
    for node in ast.parse((PACKAGE / "amp.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _told(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    if section.intro:
        yield section.intro.strip()
    for entry in section.entries:
        yield f"### {entry.title}"
        yield "\n".join([*map(_of_torch, entry.torch), *_bullets(filter(entry.matches, messages()))])
        yield f"**Cause.** {entry.cause}"
        yield f"**Cure.** {entry.cure} {_links(entry.see)}"
    claimed = [entry for each in sections_of_file() for entry in each.entries]
    checks = [each for each in messages() if section.holds(each) and not any(entry.matches(each) for entry in claimed)]
    if checks:
        yield f"### Values that are not allowed: {section.title[0].lower()}{section.title[1:]}"
        yield "These messages name the argument, what was found, and what to pass instead."
        yield "\n".join(_bullets(checks))


def _of_torch(told: str) -> str:
    kind, _, text = told.partition(": ")
    return f"- `{kind}` of torch: {_shown(_marked(text))}"


def _bullets(some: Iterable[Message]) -> Iterator[str]:
    """Yields the messages as a list, and below each what may stand in its fields; the list has each of them once."""
    kinds: dict[str, dict[str, None]] = {}
    fields: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {}
    for message in some:
        kinds.setdefault(message.text, {})[_SEEN_AS.get(message.kind, message.kind)] = None
        fields[message.text] = message.fields
    told = set()
    for text, classes in kinds.items():
        yield f"- {' or '.join(f'`{name}`' for name in classes)}: {_shown(text)}"
        for field in fields[text]:
            if field[1] not in told:
                told.add(field[1])
                yield f"  - *{field[0]}*: {'; or '.join(_shown(each) for each in field[1])}"


def _shown(text: str) -> str:
    """Returns a message as Markdown: fields in italics, code as it stands, and nothing else as markup."""
    parts = []
    for piece in _PIECES.split(text):
        if piece.startswith(OPEN):
            parts.append(f"*{piece[1:-1]}*" if piece[1:-1] != "..." else "…")
        elif piece.startswith("`"):
            parts.append(piece.replace(OPEN, "").replace(CLOSE, ""))
        else:
            parts.append(re.sub(r"([*_<>|\[\]])", r"\\\1", piece))
    return "".join(parts).replace("**", "* *")


def _links(pages: Iterable[str]) -> str:
    links = [f"[{_title(page)}](../guide/{page}.md)" for page in pages]
    return f"See {', '.join(links)}."


def _title(page: str) -> str:
    return (DOCS / "guide" / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
