"""Reads lists from YAML's tree into changes of rules, and names every fault with file and line.

Resolves names, to tell a misspelt one. Must not import a module on a list's behalf.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import yaml
from torch.torch_version import TorchVersion

from ampatch.cast_lists import signatures
from ampatch.cast_lists.paths import Path, PathError, find, find_owner, identity
from ampatch.cast_lists.rules import UNLISTED, Changes, Rule, Treatment, When, why_unfit
from ampatch.cast_lists.spellings import EVERY, NAMESPACES, known_names, spellings
from ampatch.cast_lists.yaml_tree import described, items_of, kind_of, line_of, scalar_of
from ampatch.errors import AmpError, CastListError, Fault, did_you_mean
from ampatch.opt_levels import HALF_DTYPES


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
        """Returns whether two names that each stand for several paths decide the same for one that they share."""
        return (
            self.entry.namespace == other.entry.namespace == EVERY
            and self.entry != other.entry
            and not self.disagrees(other)
        )

    def disagrees(self, other: _Listing) -> bool:
        """Returns whether the two, of one function, put it in different lists, or in one with different options."""
        rules = [None if each.rule is None else replace(each.rule, path=self.path) for each in (self, other)]
        return self.name != other.name or rules[0] != rules[1]


class Reading:
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
        line = where if isinstance(where, int) else line_of(where)
        self._faults.append((line, Fault(self._at(line), message)))

    def changes(self) -> Changes:
        """Returns what was found.

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
        """Yields the pairs of a mapping whose keys are text, each key once. Nothing at all is an empty mapping."""
        if node is None or kind_of(node) == "null":
            return
        if kind_of(node) != "map":
            self.fault(node, f"found {described(node)}; expected {expected}.")
            return
        seen: set[str] = set()
        for key, value in node.value:
            if kind_of(key) != "str":
                self.fault(key, f"found {described(key)} as a key; expected {expected}.")
            elif key.value in seen:
                self.fault(key, f"the key {key.value!r} stands here a second time; keep one.")
            else:
                seen.add(key.value)
                yield key, value

    def _flat(self, node: yaml.Node, seen: list[yaml.Node]) -> Iterator[yaml.Node]:
        """Yields the entries of a list and of lists in it; ``seen`` are those met before under the same namespace."""
        if node in seen:
            self.fault(node, "aliases put this list into itself, or under one namespace twice; take them out.")
        elif kind_of(node) == "seq":
            seen.append(node)
            for item in node.value:
                if kind_of(item) == "seq":
                    yield from self._flat(item, seen)
                else:
                    yield item
        elif kind_of(node) != "null":
            self.fault(node, f"found {described(node)}; expected a list of names, such as [mm, bmm].")

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
        """Returns the paths that an entry names; none, and notes a fault, for a name without spellings."""
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
        rule = None if treatment is None else Rule(path, treatment, self._at(line_of(node)), **options)
        listing = _Listing(path, entry, UNLISTED if treatment is None else treatment.value, line_of(node), rule)
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
        """Returns the keys of an entry, checked and turned into values; None where there was a fault."""
        if kind_of(node) not in ("str", "map"):
            expected = "a function's name, or a mapping such as {name: exp, dtypes: [float16]}"
            self.fault(node, f"found {described(node)}; expected {expected}.")
            return None
        faults = len(self._faults)
        options: dict[str, Any] = {}
        pairs: Iterable[tuple[yaml.ScalarNode, yaml.Node]] = self._pairs(node, "names of options")
        for key, value in pairs if kind_of(node) == "map" else [(yaml.ScalarNode("", "name"), node)]:
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
        """Returns whether there is such a function, or may be once its module is imported; notes a fault if not."""
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
    """Returns the options of an entry for all spellings, as one of them can have them: the way to float32 differs."""
    if not options.get("via_dtype") or "dtype" in signatures.parameter_names(find(path)):  # type: ignore[arg-type]
        return options
    return {**options, "via_dtype": False}


def _in_force(since: TorchVersion | None, until: TorchVersion | None) -> bool:
    """Returns whether the running torch is one that an entry is for."""
    return (since is None or torch.__version__ >= since) and (until is None or torch.__version__ < until)


def _elsewhere(path: Path) -> str | None:
    """Returns what to type for a name that is right, under a namespace that is not; None if there is nothing to say."""
    prefix, _, name = path.name.rpartition(".")
    for namespace in [prefix, f"{path.namespace}.{prefix}", *NAMESPACES]:
        with contextlib.suppress(PathError):
            if callable(find(Path(namespace, name))):
                return f"{path.namespace!r} has no {path.name!r}; type `{namespace}: [{name}]`."
    return None


# The options of an entry. Each reads a node, or raises an `AmpError` with what was found and what was expected.


def _read_text(node: yaml.Node) -> str:
    if kind_of(node) == "str" and node.value:
        return str(node.value)
    raise AmpError(f"found {described(node)}; expected text.")


def _read_flag(node: yaml.Node) -> bool:
    if kind_of(node) == "bool":
        return bool(scalar_of(node))
    raise AmpError(f"found {described(node)}; expected true or false.")


def _read_dtypes(node: yaml.Node) -> tuple[torch.dtype, ...]:
    names = items_of(node, "a list of half types, such as [float16]")
    for name in names:
        if kind_of(name) != "str" or name.value not in HALF_DTYPES:
            hint = did_you_mean(name.value, HALF_DTYPES)
            raise AmpError(f"found {described(name)}; expected {' or '.join(HALF_DTYPES)}.{hint}")
    return tuple(dict.fromkeys(HALF_DTYPES[name.value] for name in names))


def _read_when(node: yaml.Node) -> When:
    expected = "arguments with lists of values, such as {mode: [bicubic, area]}"
    if kind_of(node) != "map" or not node.value:
        raise AmpError(f"found {described(node)}; expected {expected}.")
    when: dict[str, tuple[object, ...]] = {}
    for argument, values in node.value:
        if kind_of(argument) != "str":
            raise AmpError(f"found {described(argument)} as an argument; expected {expected}.")
        if argument.value in when:
            raise AmpError(f"the argument {argument.value!r} stands there a second time; keep one.")
        when[argument.value] = tuple(scalar_of(value) for value in items_of(values, expected))
    return tuple(sorted(when.items(), key=operator.itemgetter(0)))


def _read_version(node: yaml.Node) -> TorchVersion:
    if kind_of(node) == "str" and re.fullmatch(r"\d+(\.\d+)*", node.value):
        return TorchVersion(node.value)
    # YAML reads 2.10 as the number 2.1.
    hint = " Without the quotes it is a number." if kind_of(node) in ("int", "float") else ""
    raise AmpError(f"found {described(node)}; expected a torch version in quotes, such as '2.10'.{hint}")


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
