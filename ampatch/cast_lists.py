"""The cast lists: YAML read into a frozen value, users' changes laid over it, every fault named with file and line.

The format is described in ``docs/design/architecture.md``. Reading resolves names, to tell a misspelt one, but nothing
here patches anything or imports a module on a list's behalf.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from importlib.resources.abc import Traversable
from os import PathLike, fspath
from pathlib import Path as FilePath
from typing import Any

import torch
import yaml
from torch.torch_version import TorchVersion

from ampatch import signatures
from ampatch.errors import AmpError, CastListError, Fault, OptionError, did_you_mean
from ampatch.opt_levels import HALF_DTYPES
from ampatch.paths import Path, PathError, find, find_owner, identity
from ampatch.spellings import EVERY, NAMESPACES, known_names, spellings


class Treatment(enum.Enum):
    """What happens to the arguments of a function; the value is the name of its list."""

    WHITELIST = "whitelist"
    BLACKLIST = "blacklist"
    PROMOTE = "promote"
    BANNED = "banned"


UNLISTED = "unlisted"

#: What an overlay that is no file is called, among the names of files.
MAPPING = "a mapping"

#: What `cast_lists=` takes: a file, several laid one over the other, or the same as a mapping. "~" is the user's home.
Overlay = str | PathLike[str] | Mapping[str, object] | Sequence["str | PathLike[str] | Mapping[str, object]"]


#: Arguments, each with the values for which a rule applies.
When = tuple[tuple[str, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a list says of one function.

    Attributes:
        path: the function's place.
        treatment: the list it stands in.
        source: file and line, for people. What a rule does, and so whether two are equal, does not depend on it.
        when: all of these have to hold; empty: it always applies.
        via_dtype: whether a blacklisted function computes in float32 by being passed ``dtype=torch.float32``.
        instead: what the error of a banned function tells the user to do.
        optional: whether a path that does not exist is passed over.
    """

    path: Path
    treatment: Treatment
    source: str = field(compare=False)
    when: When = ()
    via_dtype: bool = False
    instead: str | None = None
    optional: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class CastLists:
    """The rules in force, for each half dtype apart. Immutable; changes give a new one.

    Attributes:
        rules: (path, half dtype) to rule.
        named: every path that was ever listed, so that a function that was unlisted comes back under all its names.
        files: the overlays, in their order: paths of files, and `MAPPING` for each that is none.
    """

    rules: Mapping[tuple[Path, torch.dtype], Rule]
    named: tuple[Path, ...] = field(default=(), compare=False)
    files: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        rules = f"{len(self.rules)} rules"  # all of which nobody could read
        return f"CastLists({', '.join(['shipped lists', *self.files])}: {rules})"

    def for_half(self, half_dtype: torch.dtype) -> dict[Path, Rule]:
        """The rules that apply under one half dtype, by path."""
        return {path: rule for (path, dtype), rule in self.rules.items() if dtype is half_dtype}

    def overlaid(self, overlay: Overlay) -> CastLists:
        """These lists with a user's changes laid over them.

        Args:
            overlay: the path of a YAML file, in which "~" is the user's home, a mapping of the same form, or a sequence
                of these, laid in their order.

        Raises:
            CastListError: anything is wrong with the overlay.
            OptionError: the overlay is of no kind that can be read.
        """
        several = isinstance(overlay, Sequence) and not isinstance(overlay, (str, bytes, PathLike))
        lists = self
        for part in overlay if several else [overlay]:  # type: ignore[union-attr]
            source, changes = _read_overlay(part)
            lists = replace(lists._with(changes), files=(*lists.files, source))
        return lists

    def _with(self, changes: Changes) -> CastLists:
        """Naming a function moves it, under whichever of its names it is listed (``F.conv2d`` is ``torch.conv2d``)."""
        rules = dict(self.rules)
        changed = {key for key, _ in changes}
        named = tuple(dict.fromkeys([*self.named, *(path for path, _ in rules), *(path for (path, _), _ in changes)]))
        functions = {path: identity(path) for path in named}
        aliases: dict[object, list[Path]] = {}
        for path, function in functions.items():
            aliases.setdefault(function, []).append(path)
        for (path, dtype), rule in changes:
            for alias in aliases[functions[path]]:
                if alias == path or (alias, dtype) not in changed:
                    rules.pop((alias, dtype), None)
                    if rule is not None:
                        rules[alias, dtype] = rule if alias == rule.path else replace(rule, path=alias)
        return CastLists(types.MappingProxyType(rules), named)


#: What a file says: the rule that a path gets for a half dtype, or None where it is to have none.
Changes = Sequence[tuple[tuple[Path, torch.dtype], Rule | None]]


@functools.cache
def shipped() -> CastLists:
    """The lists that come with ampatch."""
    parsed = _Parsed()
    for treatment in Treatment:
        parsed.source = f"{treatment.value}.yaml"
        parsed.add_list(_compose_own(files("ampatch.lists") / parsed.source), treatment)
    return CastLists({})._with(parsed.changes())


PEERS = ("apex", "torch_autocast_cuda", "torch_autocast_cpu")


@functools.cache
def peer(name: str) -> CastLists:
    """What another system casts: one of `PEERS`. Its names are not looked up: today's torch may lack some."""
    parsed = _Parsed(f"{name}.yaml", resolve=False)
    parsed.add_overlay(_compose_own(files("ampatch.lists") / "peers" / parsed.source))
    return CastLists(types.MappingProxyType({key: rule for key, rule in parsed.changes() if rule is not None}))


def _read_overlay(overlay: object) -> tuple[str, Changes]:
    """The name of an overlay for people, and what it says."""
    if isinstance(overlay, Mapping):
        parsed = _Parsed("cast_lists")
    elif isinstance(overlay, (str, PathLike)) and fspath(overlay):
        parsed = _Parsed(os.path.expanduser(os.fsdecode(overlay)))  # noqa: PTH111 - Path's raises for an unknown user
    else:
        raise OptionError(f"cast_lists holds {overlay!r}; expected the path of a YAML file, or a mapping.")
    try:
        parsed.add_overlay(_node(overlay) if isinstance(overlay, Mapping) else _compose(_text_of(parsed.source)))
    except _UnreadableError as error:
        parsed.fault(error.line, str(error))
    except RecursionError:
        parsed.fault(0, "it is nested too deeply, or contains itself.")
    return MAPPING if isinstance(overlay, Mapping) else parsed.source, parsed.changes()


def typed_conditions(when: When) -> str:
    """Conditions on arguments, with the values as they stand in the YAML file, so that True is told from the string."""
    return ", ".join(f"{name}={'|'.join(map(_as_typed, values))}" for name, values in when)


def _as_typed(value: object) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


@dataclass(frozen=True, slots=True)
class _Listing:
    """That a path stands in a list, and with which rule.

    Attributes:
        path: the path.
        entry: what the user wrote, which stands for several paths where the namespace is `EVERY`.
        name: the list's.
        line: of the file; 0 in a mapping, which has none.
        rule: what the entry says; None: the path is to be on no list.
    """

    path: Path
    entry: Path
    name: str
    line: int
    rule: Rule | None

    @property
    def is_derived(self) -> bool:
        """Whether the path's name is another one than the user wrote, such as ``__mul__`` for ``mul``."""
        return self.path.name != self.entry.name

    def repeats(self, other: _Listing) -> bool:
        """Whether two names that each stand for several paths decide the same for one that they share."""
        return (
            self.entry.namespace == other.entry.namespace == EVERY
            and self.entry != other.entry
            and not self.disagrees(other)
        )

    def disagrees(self, other: _Listing) -> bool:
        """Whether the two, of one function, put it in different lists, or in one with different options."""
        rules = [None if each.rule is None else replace(each.rule, path=self.path) for each in (self, other)]
        return self.name != other.name or rules[0] != rules[1]


class _Parsed:
    """What was read so far: the changes found, and the faults met on the way.

    Lives for one reading only. A fault is noted and reading goes on, so that a user sees all of them at once.
    """

    def __init__(self, source: str = "", resolve: bool = True) -> None:
        self.source = source
        self._resolve = resolve
        self._changes: list[tuple[tuple[Path, torch.dtype], Rule | None]] = []
        self._faults: list[tuple[int, Fault]] = []
        # What a function (under any of its names) was first listed as, to tell a second listing that disagrees.
        self._first: dict[tuple[object, torch.dtype], _Listing] = {}
        self._listed: dict[tuple[Path, torch.dtype], _Listing] = {}
        self._missing: set[yaml.Node] = set()  # namespaces: each is one fault, and not one for each of its names

    def fault(self, where: yaml.Node | int, message: str) -> None:
        """Notes a fault at a node, or at a line; 0 is the file as a whole."""
        line = where if isinstance(where, int) else _line(where)
        self._faults.append((line, Fault(self._at(line), message)))

    def changes(self) -> Changes:
        """What was found.

        Raises:
            CastListError: there are faults; they are in the order of their lines.
        """
        if self._faults:
            raise CastListError(fault for _, fault in sorted(self._faults, key=lambda found: found[0]))
        return self._changes

    def add_overlay(self, node: yaml.Node | None) -> None:
        """Reads a user's file: names of lists to what they hold."""
        known = [treatment.value for treatment in Treatment] + [UNLISTED]
        for name, value in self._pairs(node, "names of lists on top, such as `whitelist: {torch: [mm, bmm]}`"):
            if name.value in known:
                self.add_list(value, None if name.value == UNLISTED else Treatment(name.value))
            else:
                expected = f"expected one of {', '.join(known)} on top.{did_you_mean(name.value, known)}"
                self.fault(name, f"unknown list {name.value!r}; {expected}")

    def add_list(self, node: yaml.Node | None, treatment: Treatment | None) -> None:
        """Reads a list: namespaces to names. Without a treatment, the functions are taken out of their lists."""
        for namespace, names in self._pairs(node, "namespaces with lists of names, such as `torch: [mm, bmm]`"):
            for entry in self._flat(names, []):
                self._add_entry(entry, namespace, treatment)

    def _at(self, line: int) -> str:
        return f"{self.source}:{line}" if line else self.source

    def _pairs(self, node: yaml.Node | None, expected: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """The pairs of a mapping whose keys are text, each key once. Nothing at all is an empty mapping."""
        if node is None or _kind(node) == "null":
            return
        if _kind(node) != "map":
            self.fault(node, f"found {_describe(node)}; expected {expected}.")
            return
        seen: set[str] = set()
        for key, value in node.value:
            if _kind(key) != "str":
                self.fault(key, f"found {_describe(key)} as a key; expected {expected}.")
            elif key.value in seen:
                self.fault(key, f"the key {key.value!r} stands here a second time; keep one.")
            else:
                seen.add(key.value)
                yield key, value

    def _flat(self, node: yaml.Node, seen: list[yaml.Node]) -> Iterator[yaml.Node]:
        """The entries of a list, and of the lists in it; ``seen`` are those met before under the same namespace."""
        if node in seen:
            self.fault(node, "aliases put this list into itself, or under one namespace twice; take them out.")
        elif _kind(node) == "seq":
            seen.append(node)
            for item in node.value:
                if _kind(item) == "seq":
                    yield from self._flat(item, seen)
                else:
                    yield item
        elif _kind(node) != "null":
            self.fault(node, f"found {_describe(node)}; expected a list of names, such as [mm, bmm].")

    def _add_entry(self, node: yaml.Node, namespace: yaml.ScalarNode, treatment: Treatment | None) -> None:
        options = self._options(node, treatment)
        if options is None or not _in_force(options.pop("since", None), options.pop("until", None)):
            return
        dtypes = options.pop("dtypes", tuple(HALF_DTYPES.values()))
        faults = len(self._faults)
        entry = Path(namespace.value, options.pop("name"))
        for path in self._paths(namespace, entry.name, node, options.get("optional", False)):
            fitting = options if namespace.value != EVERY else _fitting(options, path)
            if not self._resolve or self._exists(path, fitting, node, namespace):
                self._add_path(path, entry, treatment, dtypes, fitting, node)
            if len(self._faults) > faults:
                return  # of all spellings one is enough to be told of

    def _paths(self, namespace: yaml.ScalarNode, name: str, node: yaml.Node, optional: bool) -> list[Path]:
        """What an entry names; nothing, and a fault, for a name that is to stand for all its spellings and has none."""
        if namespace.value != EVERY:
            return [Path(namespace.value, name)]
        found = spellings(name)
        if any(sign in name for sign in "*?["):
            self.fault(node, _no_pattern(name))  # even where it is optional: no torch has such a name
        elif not found and not optional:
            namespaces = ", ".join(NAMESPACES)
            near = did_you_mean(name, _public_names())
            self.fault(node, f"no function is named {name!r} in any of {namespaces}; `{EVERY!r}` means these.{near}")
        return found

    def _add_path(
        self,
        path: Path,
        entry: Path,
        treatment: Treatment | None,
        dtypes: Iterable[torch.dtype],
        options: Mapping[str, Any],
        node: yaml.Node,
    ) -> None:
        rule = None if treatment is None else Rule(path, treatment, self._at(_line(node)), **options)
        listing = _Listing(path, entry, UNLISTED if treatment is None else treatment.value, _line(node), rule)
        function = identity(path) if self._resolve else path
        for dtype in dtypes:
            first = self._first.setdefault((function, dtype), listing)
            again = self._listed.setdefault((path, dtype), listing)
            if listing.repeats(again):
                continue  # as of mul and multiply, both of which the operator belongs to
            earlier = first if again is listing else again
            clash = again is not listing or listing.disagrees(earlier)
            if clash and (listing.is_derived or earlier.is_derived):
                self.fault(node, _shared(listing, earlier))
                return
            if first.name != listing.name:
                same = "" if first.path == path else f", which is the same function as {first.path},"
                where = f" in line {first.line}" if first.line else ""
                stands = f"stands in {listing.name!r} here and in {first.name!r}{where}"
                self.fault(node, f"{path}{same} {stands}; keep one of them.")
                return
            if again is not listing:
                where = f", first in line {again.line}" if again.line else ""
                self.fault(node, f"{path} stands in {listing.name!r} a second time{where}; keep one.")
                return
            expected = rule if first is listing or first.rule is None else replace(first.rule, path=path)
            if rule is not None and expected != rule:
                where = f" in line {first.line}" if first.line else ""
                self.fault(
                    node,
                    f"{path} is the same function as {first.path}, which has other options{where}; expected the same.",
                )
                return
            self._changes.append(((path, dtype), rule))

    def _options(self, node: yaml.Node, treatment: Treatment | None) -> dict[str, Any] | None:
        """The keys of an entry, checked and turned into values; None where there was a fault."""
        if _kind(node) not in ("str", "map"):
            expected = "a function's name, or a mapping such as {name: exp, dtypes: [float16]}"
            self.fault(node, f"found {_describe(node)}; expected {expected}.")
            return None
        faults = len(self._faults)
        options: dict[str, Any] = {}
        pairs: Iterable[tuple[yaml.ScalarNode, yaml.Node]] = self._pairs(node, "names of options")
        for key, value in pairs if _kind(node) == "map" else [(yaml.ScalarNode("", "name"), node)]:
            option = _OPTIONS.get(key.value)
            if option is None:
                known = [name for name, option in _OPTIONS.items() if treatment in option.lists]
                hint = did_you_mean(key.value, known)
                self.fault(key, f"unknown key {key.value!r}; expected {', '.join(known)}.{hint}")
            elif treatment not in option.lists:
                names = ", ".join(repr(listed.value) for listed in option.lists if listed is not None)
                self.fault(key, f"{key.value!r} means nothing here; it is for entries of {names}.")
            else:
                try:
                    options[key.value] = option.read(value)
                except AmpError as error:
                    self.fault(value, f"{key.value}: {error}")
        if "name" not in options and len(self._faults) == faults:
            self.fault(node, "an entry without `name`; expected one such as {name: exp, dtypes: [float16]}.")
        return options if len(self._faults) == faults else None

    def _exists(self, path: Path, options: Mapping[str, Any], node: yaml.Node, namespace: yaml.ScalarNode) -> bool:
        """Whether there is such a function, or may be once its module is imported; if not, a fault was noted."""
        optional = options.get("optional", False)
        if EVERY in path.namespace:
            if namespace not in self._missing:
                self._missing.add(namespace)
                self.fault(namespace, f"found {path.namespace!r}; `{EVERY!r}` stands alone, for every spelling.")
            return False
        try:
            owner = find_owner(path.namespace)
        except PathError as error:
            if not optional and namespace not in self._missing:
                self._missing.add(namespace)
                self.fault(namespace, f"{error} Mark its entries `optional: true` if it may be missing.")
            return False
        if owner is None:
            return True
        try:
            unfit = why_unfit(path, owner, find(path), options.get("when", ()), options.get("via_dtype", False))
        except PathError as error:
            if optional:
                return False
            unfit = _elsewhere(path) or f"{error} Mark the entry `optional: true` if it may be missing."
        if unfit:
            self.fault(node, unfit)
        return not unfit


# Of the names that a pattern fits, for whoever has to type them out: those of the losses all stand in one message.
_MOST_NAMED = 24


def _public_names() -> list[str]:
    return sorted(name for name in known_names() if not name.startswith("_"))


def _no_pattern(pattern: str) -> str:
    """Says that a pattern is no name, and which names to type for it: those that it fits, or the nearest."""
    fitting = [name for name in _public_names() if fnmatchcase(name, pattern)]
    if fitting:
        more = f", and {len(fitting) - _MOST_NAMED} more" if len(fitting) > _MOST_NAMED else ""
        near = f" It would fit {', '.join(fitting[:_MOST_NAMED])}{more}."
    else:
        near = did_you_mean(re.sub(r"[*?\[\]]", "", pattern), _public_names())
    expected = "a function's name: patterns are not taken; type each name out."
    return f"found the pattern {pattern!r}; expected {expected}{near}"


def _shared(listing: _Listing, earlier: _Listing) -> str:
    """Says that two entries stand for one path, which at least one of them does not name."""
    where = f" in line {earlier.line}" if earlier.line else ""
    options = ", which has other options," if listing.name == earlier.name and listing.disagrees(earlier) else ""
    return (
        f"{_typed(listing)} here and {_typed(earlier)}{where}{options} both stand for {listing.path}; keep one of "
        f'them, or type namespaces in the place of "{EVERY}".'
    )


def _typed(listing: _Listing) -> str:
    namespace = f'"{EVERY}"' if listing.entry.namespace == EVERY else listing.entry.namespace
    return f"`{listing.name}: {{{namespace}: [{listing.entry.name}]}}`"


def _fitting(options: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The options of an entry for all spellings, as one of them can have them: the way to float32 differs."""
    if not options.get("via_dtype") or "dtype" in signatures.parameter_names(find(path)):  # type: ignore[arg-type]
        return options
    return {**options, "via_dtype": False}


def _in_force(since: TorchVersion | None, until: TorchVersion | None) -> bool:
    """Whether the running torch is one that an entry is for."""
    return (since is None or torch.__version__ >= since) and (until is None or torch.__version__ < until)


def why_unfit(path: Path, owner: object, function: Any, when: When = (), via_dtype: bool = False) -> str | None:
    """Why what stands at a path cannot be listed so, in a sentence; None if it can."""
    if not isinstance(owner, (types.ModuleType, type)):
        return f"{path.namespace!r} is {type(owner).__name__!r}; expected a module or a class."
    if isinstance(owner, type) and owner.__flags__ & _IMMUTABLE:
        return f"{path.namespace!r} is a class in C, and cannot be patched; name a class in Python, as torch.Tensor is."
    if isinstance(function, type) and function.__flags__ & _IMMUTABLE:
        return f"{path} is a class, not a function."
    if isinstance(function, type):
        return f"{path} is a class, not a function; name a method of it, such as `{path}: [forward]`."
    if not callable(function):
        return f"{path} is {type(function).__name__!r}, not a function."
    if not when and not via_dtype:
        return None
    readable = signatures.parameter_names(function)
    for argument, _ in when:
        if argument not in readable:
            known = f"expected {', '.join(readable)}.{did_you_mean(argument, readable)}" if readable else "none can."
            return f"`when` names the argument {argument!r}, which cannot be told from a call of {path}; {known}"
    if via_dtype and "dtype" not in readable:
        return f"{path} has no argument `dtype`; leave `via_dtype` out, and its arguments are cast instead."
    return None


# Py_TPFLAGS_IMMUTABLETYPE: setting an attribute of such a class raises TypeError.
_IMMUTABLE = 1 << 8


def _elsewhere(path: Path) -> str | None:
    """What to type for a name that is right, under a namespace that is not; None if there is nothing to say."""
    prefix, _, name = path.name.rpartition(".")
    for namespace in [prefix, f"{path.namespace}.{prefix}", *NAMESPACES]:
        with contextlib.suppress(PathError):
            if callable(find(Path(namespace, name))):
                return f"{path.namespace!r} has no {path.name!r}; type `{namespace}: [{name}]`."
    return None


# The options of an entry. Each reads a node, or raises an `AmpError` with what was found and what was expected.


def _read_text(node: yaml.Node) -> str:
    if _kind(node) == "str" and node.value:
        return str(node.value)
    raise AmpError(f"found {_describe(node)}; expected text.")


def _read_flag(node: yaml.Node) -> bool:
    if _kind(node) == "bool":
        return bool(_scalar(node))
    raise AmpError(f"found {_describe(node)}; expected true or false.")


def _read_dtypes(node: yaml.Node) -> tuple[torch.dtype, ...]:
    names = _items(node, "a list of half types, such as [float16]")
    for name in names:
        if _kind(name) != "str" or name.value not in HALF_DTYPES:
            hint = did_you_mean(name.value, HALF_DTYPES)
            raise AmpError(f"found {_describe(name)}; expected {' or '.join(HALF_DTYPES)}.{hint}")
    return tuple(dict.fromkeys(HALF_DTYPES[name.value] for name in names))


def _read_when(node: yaml.Node) -> When:
    expected = "arguments with lists of values, such as {mode: [bicubic, area]}"
    if _kind(node) != "map" or not node.value:
        raise AmpError(f"found {_describe(node)}; expected {expected}.")
    when: dict[str, tuple[object, ...]] = {}
    for argument, values in node.value:
        if _kind(argument) != "str":
            raise AmpError(f"found {_describe(argument)} as an argument; expected {expected}.")
        if argument.value in when:
            raise AmpError(f"the argument {argument.value!r} stands there a second time; keep one.")
        when[argument.value] = tuple(_scalar(value) for value in _items(values, expected))
    return tuple(sorted(when.items(), key=operator.itemgetter(0)))


def _read_version(node: yaml.Node) -> TorchVersion:
    if _kind(node) == "str" and re.fullmatch(r"\d+(\.\d+)*", node.value):
        return TorchVersion(node.value)
    # YAML reads 2.10 as the number 2.1.
    hint = " Without the quotes it is a number." if _kind(node) in ("int", "float") else ""
    raise AmpError(f"found {_describe(node)}; expected a torch version in quotes, such as '2.10'.{hint}")


@dataclass(frozen=True, slots=True)
class _Option:
    """A key that an entry may have: how it is read, and in which lists it means anything (None is `UNLISTED`)."""

    read: Callable[[yaml.Node], object]
    lists: tuple[Treatment | None, ...] = (*Treatment, None)


_OPTIONS = {
    "name": _Option(_read_text),
    "dtypes": _Option(_read_dtypes),
    "when": _Option(_read_when, tuple(Treatment)),
    "since": _Option(_read_version),
    "until": _Option(_read_version),
    "optional": _Option(_read_flag),
    "via_dtype": _Option(_read_flag, (Treatment.BLACKLIST,)),
    "instead": _Option(_read_text, (Treatment.BANNED,)),
}


# From a file or a mapping to nodes: YAML's own tree, in which every piece knows its line and its tag. What a tag stands
# for is never built: only scalars of these kinds become values.

_TAG = "tag:yaml.org,2002:"
_KINDS: dict[type[yaml.Node], tuple[str, ...]] = {
    yaml.ScalarNode: ("str", "int", "float", "bool", "null"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}


class _UnreadableError(Exception):
    """There is no tree to read: no file, bytes that are no text, text that is no YAML, values that YAML lacks."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def unexpanded(file: str) -> str:
    """Says what to type for a path that is not there, with a space in front, if it has variables of the shell's."""
    if "$" not in file:
        return ""
    return (
        " Variables are not expanded in paths: the shell does that, outside of single quotes. Type the folder itself, "
        "`~` for your home, or in Python `os.path.expandvars(path)`."
    )


def _text_of(file: str) -> str:
    try:
        content = FilePath(file).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        hint = unexpanded(file) if isinstance(error, FileNotFoundError) else ""
        raise _UnreadableError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}.{hint}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _UnreadableError("this is not UTF-8; save the file in that encoding.", line) from None


def _compose_own(file: Traversable) -> yaml.Node | None:
    """Reads a file of the package into YAML's tree, by libyaml where PyYAML has it, which is nine times as fast."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    node: yaml.Node | None = yaml.compose(file.read_text("utf-8"), Loader=loader)
    return node


def _compose(text: str) -> yaml.Node | None:
    """The tree of a user's document; None if it is empty."""
    try:
        # In Python, not libyaml: its errors say more, and deep nesting raises where that one crashes the process.
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        character = chr(error.character)
        line = text.count("\n", 0, text.index(character)) + 1
        raise _UnreadableError(f"not valid YAML: the character {character!r} is not allowed.", line) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        began = f" that began in line {error.context_mark.line + 1}" if error.context_mark else ""
        context = f"{error.context}{began}: " if error.context else ""
        hint = " Indent with spaces, not with tabs." if r"'\t'" in str(error.problem) else ""
        hint = f' Put "{EVERY}" in quotes.' if str(error.context).endswith("an alias") else hint
        raise _UnreadableError(f"not valid YAML: {context}{error.problem}.{hint}", line) from None
    return node


def _node(value: object) -> yaml.Node:
    """The tree that YAML would give for a value, without lines."""
    if isinstance(value, Mapping):
        return yaml.MappingNode(f"{_TAG}map", [(_node(key), _node(child)) for key, child in value.items()])
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(f"{_TAG}seq", [_node(child) for child in value])
    with contextlib.suppress(yaml.representer.RepresenterError):
        node: yaml.Node = yaml.representer.SafeRepresenter().represent_data(value)
        if node.tag.removeprefix(_TAG) in _KINDS[yaml.ScalarNode]:
            return node
    raise _UnreadableError(
        f"found {value!r}; expected text, numbers, lists and mappings: functions by name, half types as 'float16'."
    )


def _kind(node: yaml.Node) -> str:
    """What plain data a node is, such as "str" or "seq"; its tag if it is none."""
    kind: str = node.tag.removeprefix(_TAG)
    return kind if kind in _KINDS[type(node)] else node.tag


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1 if node.start_mark else 0


def _items(node: yaml.Node, expected: str) -> list[yaml.Node]:
    if _kind(node) == "seq" and node.value:
        return list(node.value)
    raise AmpError(f"found {_describe(node)}; expected {expected}.")


def _scalar(node: yaml.Node) -> object:
    with contextlib.suppress(ValueError, LookupError):  # text under a tag that it is not of, such as !!int abc
        if _kind(node) in _KINDS[yaml.ScalarNode]:
            return yaml.constructor.SafeConstructor().construct_object(node)
    raise AmpError(f"found {_describe(node)}; expected text, a number, true, false or null.")


def _describe(node: yaml.Node) -> str:
    kind = _kind(node)
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
