"""Files and mappings as YAML's own tree, in which every node has its line and its tag.

Must not build the object that a tag names: only scalars of plain kinds become values. Must not know of lists or
functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path as FilePath
from typing import Any

import yaml

from ampatch.cast_lists.spellings import EVERY_NAMESPACE
from ampatch.errors import AmpError

_TAG = "tag:yaml.org,2002:"
_KINDS: dict[type[yaml.Node], tuple[str, ...]] = {
    yaml.ScalarNode: ("str", "int", "float", "bool", "null"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}


class UnreadableError(Exception):
    """Raised if there is no tree to read: no file, bytes that are not text, invalid YAML, or values that YAML lacks."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def unexpanded(file: str) -> str:
    """Returns what to type for a missing path if it contains a shell variable, with a space in front; else empty."""
    if "$" not in file:
        return ""
    return (
        " Variables are not expanded in paths: the shell does that, outside of single quotes. Type the folder itself, "
        "`~` for your home, or in Python `os.path.expandvars(path)`."
    )


def text_of(file: str) -> str:
    """Returns the text of a user's file; raises `UnreadableError` if it cannot be read, or is not UTF-8."""
    try:
        content = FilePath(file).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        hint = unexpanded(file) if isinstance(error, FileNotFoundError) else ""
        raise UnreadableError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}.{hint}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError("this is not UTF-8; save the file in that encoding.", line) from None


def compose_own(file: Traversable) -> yaml.Node | None:
    """Returns the tree of a file of the package; uses libyaml if PyYAML has it, which is nine times as fast."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    node: yaml.Node | None = yaml.compose(file.read_text("utf-8"), Loader=loader)
    return node


def compose(text: str) -> yaml.Node | None:
    """Returns the tree of a user's document, None if it is empty; raises `UnreadableError` if it is not valid YAML."""
    try:
        # The loader in Python: its errors say more, and deep nesting raises, while libyaml crashes the process.
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        character = chr(error.character)
        line = text.count("\n", 0, text.index(character)) + 1
        raise UnreadableError(f"not valid YAML: the character {character!r} is not allowed.", line) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        began = f" that began in line {error.context_mark.line + 1}" if error.context_mark else ""
        context = f"{error.context}{began}: " if error.context else ""
        hint = " Indent with spaces, not with tabs." if r"'\t'" in str(error.problem) else ""
        hint = f' Put "{EVERY_NAMESPACE}" in quotes.' if str(error.context).endswith("an alias") else hint
        raise UnreadableError(f"not valid YAML: {context}{error.problem}.{hint}", line) from None
    return node


def node_of(value: object) -> yaml.Node:
    """Returns the tree that YAML would build for a value, without lines."""
    if isinstance(value, Mapping):
        return yaml.MappingNode(f"{_TAG}map", [(node_of(key), node_of(child)) for key, child in value.items()])
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(f"{_TAG}seq", [node_of(child) for child in value])
    with contextlib.suppress(yaml.representer.RepresenterError):
        node: yaml.Node = yaml.representer.SafeRepresenter().represent_data(value)
        if node.tag.removeprefix(_TAG) in _KINDS[yaml.ScalarNode]:
            return node
    raise UnreadableError(
        f"found {value!r}; expected text, numbers, lists and mappings: functions by name, half types as 'float16'."
    )


def kind_of(node: yaml.Node) -> str:
    """Returns the kind of plain data that a node is, such as "str" or "seq"; its tag if it is not plain data."""
    kind: str = node.tag.removeprefix(_TAG)
    return kind if kind in _KINDS[type(node)] else node.tag


def line_of(node: yaml.Node) -> int:
    """Returns the line in which a node begins; 0 for a node of a mapping in Python, which has no lines."""
    return node.start_mark.line + 1 if node.start_mark else 0


def items_of(node: yaml.Node, expected: str) -> list[yaml.Node]:
    """Returns the items of a list; raises `AmpError` if the node is not a list, or is empty."""
    if kind_of(node) == "seq" and node.value:
        return list(node.value)
    raise AmpError(f"found {described(node)}; expected {expected}.")


def scalar_of(node: yaml.Node) -> object:
    """Returns the value of a scalar; raises `AmpError` if the node is not a scalar of a plain kind."""
    with contextlib.suppress(ValueError, LookupError):  # text that does not fit its tag, such as !!int abc
        if kind_of(node) in _KINDS[yaml.ScalarNode]:
            return yaml.constructor.SafeConstructor().construct_object(node)
    raise AmpError(f"found {described(node)}; expected text, a number, true, false or null.")


def described(node: yaml.Node) -> str:
    """Returns a description of a node, for errors."""
    kind = kind_of(node)
    if kind in ("seq", "map"):
        return f"{'a' if node.value else 'an empty'} {'list' if kind == 'seq' else 'mapping'}"
    if kind == "null":
        return "nothing"
    if kind == "str":
        return repr(node.value)
    kind = kind.removeprefix(_TAG)
    if isinstance(node, yaml.ScalarNode) and kind.isalpha():
        return f"{node.value} (which YAML reads as {kind}; quote it if text is meant)"
    return f"the tag {node.tag.replace(_TAG, '!!')!r} (cast lists hold plain data only)"
