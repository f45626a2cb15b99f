"""Reads lists from a YAML tree into changes of rules, and reports every fault with its file and line.

Looks up names, to find misspelled ones. Must not import a module because a list names it.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from torch.torch_version import TorchVersion

from ampatch.cast_lists import patterns, rules, signatures
from ampatch.cast_lists.paths import Path, PathError, find, find_or, find_owner, function_key
from ampatch.cast_lists.rules import (
    FLOAT32,
    MODULES,
    UNLISTED,
    Change,
    Changes,
    Formats,
    ModuleRules,
    Rule,
    Treatment,
    When,
)
from ampatch.cast_lists.spellings import EVERY_NAMESPACE, NAMESPACES, is_in_place, known_names, spellings
from ampatch.cast_lists.yaml_tree import described, items_of, kind_of, line_of, scalar_of
from ampatch.errors import AmpError, CastListError, Fault, did_you_mean
from ampatch.formats import BY_BITS, CHOICES, FORMATS, Format, chosen, named
from ampatch.half_types import HALF_DTYPES

#: What a list holds, for messages.
_NAMESPACES = "namespaces with lists of names, such as `torch: [mm, bmm]`"


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a list.

    Attributes:
        path: path as the user wrote it; a pattern, or one under `EVERY_NAMESPACE`, stands for several.
        treatment: what the list does to functions; None: they are to be on no list.
        dtypes: half dtypes that the entry is for.
        options: what its rules have beside path and treatment.
        node: where it stands.
        namespace: where its namespace stands.
        since: first version of torch that it is for, if it names one.
        until: first version of torch that it is no longer for, if it names one.
    """

    path: Path
    treatment: Treatment | None
    dtypes: tuple[torch.dtype, ...]
    options: Mapping[str, Any]
    node: yaml.Node
    namespace: yaml.ScalarNode
    since: str | None
    until: str | None

    @property
    def is_optional(self) -> bool:
        """True if functions that do not exist are skipped."""
        return bool(self.options.get("optional"))

    @property
    def is_for_all(self) -> bool:
        """True if it is for every spelling of a function."""
        return self.path.namespace == EVERY_NAMESPACE

    @property
    def typed(self) -> str:
        """The entry as text."""
        name = UNLISTED if self.treatment is None else self.treatment.value
        namespace = f'"{EVERY_NAMESPACE}"' if self.is_for_all else self.path.namespace
        return f"`{name}: {{{namespace}: [{self.path.name}]}}`"


@dataclass(frozen=True, slots=True)
class _Listing:
    """A path in a list: the path of a function, the entry, and the rule; None: the function is to be on no list."""

    path: Path
    entry: _Entry
    rule: Rule | None

    def repeats(self, other: _Listing) -> bool:
        """Returns True if two entries for every spelling, of different names, agree on a path that they share."""
        mine, others = self.entry, other.entry
        return mine.is_for_all and others.is_for_all and mine.path != others.path and not self.disagrees(other)

    def disagrees(self, other: _Listing) -> bool:
        """Returns True if two listings of one function differ in their list, or in their options."""
        mine, others = (each.rule and replace(each.rule, path=self.path) for each in (self, other))
        return mine != others


class Reading:
    """The changes and the faults found so far in one reading.

    Serves one reading only. A fault is recorded and reading goes on, so that the user sees all faults at once.

    Args:
        source: file, for messages.
        resolve: True to look up names.
        overlay: number of the overlay that is read; 0: the shipped lists.
    """

    def __init__(self, source: str = "", resolve: bool = True, overlay: int = 0) -> None:
        self.source, self._overlay = source, overlay
        self._resolve = resolve
        self._changes: list[Change] = []
        self._faults: list[tuple[int, Fault]] = []
        # The first listing of each function (under any of its names), to find a later listing that disagrees.
        self._first: dict[tuple[object, torch.dtype], _Listing] = {}
        self._listed: dict[tuple[Path, torch.dtype], _Listing] = {}
        self._missing: set[yaml.Node] = set()  # namespaces that have a fault
        #: The entries for parts of a model.
        self.modules: list[ModuleRules] = []

    def fault(self, where: yaml.Node | int, message: str) -> None:
        """Records a fault at a node, or at a line; line 0 is the whole file."""
        line = where if isinstance(where, int) else line_of(where)
        self._faults.append((line, Fault(self._at(line), message)))

    def changes(self) -> Changes:
        """Returns the changes found.

        Raises:
            CastListError: there are faults; they are sorted by line.
        """
        if self._faults:
            raise CastListError(fault for _, fault in sorted(self._faults, key=lambda found: found[0]))
        return self._changes

    def add_overlay(self, node: yaml.Node | None) -> None:
        """Reads a user's file: a mapping from names of lists to their contents."""
        known = [*LISTS, MODULES]
        for name, value in self._pairs(node, "names of lists on top, such as `whitelist: {torch: [mm, bmm]}`"):
            if name.value == MODULES:
                self._add_modules(value)
            elif name.value in LISTS:
                self.add_list(value, LISTS[name.value], list_name=name.value)
            else:
                expected = f"expected one of {', '.join(known)} on top.{did_you_mean(name.value, known)}"
                self.fault(name, f"unknown list {name.value!r}; {expected}")

    def _add_modules(self, node: yaml.Node) -> None:
        """Reads the entries for parts of a model: a mapping from names to ``float32``, or to lists."""
        expected = f'names of submodules, patterns or classes under {MODULES}, such as `"decoder.head*": {FLOAT32}`'
        for name, value in self._pairs(node, expected):
            changes = formats = None
            if not name.value:
                self.fault(name, f"found an empty name; expected {expected}.")
            elif kind_of(value) == "map":
                changes, formats = self._changes_of(name, value)
            elif kind_of(value) != "str" or value.value != FLOAT32:
                # Without lines of its own, an empty value is said to be where the name is.
                self.fault(name if kind_of(value) == "null" else value, _no_rules(name.value, value))
            self.modules.append(ModuleRules(name.value, self._at(line_of(name)), changes, formats, self._overlay))

    def _changes_of(self, name: yaml.ScalarNode, node: yaml.Node) -> tuple[tuple[Change, ...], Formats | None]:
        """Returns the changes that an entry makes for its parts, and the formats that they compute in.

        A plain list of names stands for every spelling.
        """
        inside = Reading(self.source, self._resolve, self._overlay)
        expected = f"names of lists, such as {name.value!r}: {{blacklist: [softmax]}}"
        options: dict[str, Any] = {}
        for list_name, value in inside._pairs(node, expected):
            if list_name.value in _FORMATS:
                inside._read(list_name.value, value, options)
                continue
            if list_name.value not in LISTS:
                known = [*LISTS, *_FORMATS]
                hint = did_you_mean(list_name.value, known)
                inside.fault(list_name, f"unknown list {list_name.value!r}; expected one of {', '.join(known)}.{hint}")
                continue
            every = yaml.ScalarNode("tag:yaml.org,2002:str", EVERY_NAMESPACE, value.start_mark, value.end_mark)
            listed = value
            if kind_of(value) == "seq":
                listed = yaml.MappingNode("tag:yaml.org,2002:map", [(every, value)], value.start_mark, value.end_mark)
            inside.add_list(listed, LISTS[list_name.value], f"a list of names, such as [mm, bmm], or {_NAMESPACES}")
        _join_formats(inside, node, options, Treatment.WHITELIST)
        self._faults += inside._faults
        return tuple(inside._changes), options.get("formats")

    def add_list(
        self,
        node: yaml.Node | None,
        treatment: Treatment | None,
        expected: str = _NAMESPACES,
        list_name: str | None = None,
    ) -> None:
        """Reads a list: a mapping from namespaces to names. ``treatment=None`` unlists the functions.

        Args:
            node: the list.
            treatment: what the list does to its functions.
            expected: what the node is to be, for the fault if it is something else.
            list_name: name of the list in the user's file; None for a list without that key.
        """
        if node is not None and list_name is not None and kind_of(node) not in ("map", "null"):
            hint = _with_namespaces(list_name, node)
            self.fault(node, f"found {described(node)}; expected {expected}, under {list_name!r}.{hint}")
            return
        for entry in self.entries(node, treatment, expected):
            if is_in_force(entry.since, entry.until):
                self._add_entry(entry)

    def entries(
        self, node: yaml.Node | None, treatment: Treatment | None, expected: str = _NAMESPACES
    ) -> Iterator[_Entry]:
        """Yields the entries of a list whose own keys have no fault, for all versions of torch; see `add_list`."""
        for namespace, names in self._pairs(node, expected):
            for each in self._flat(names, []):
                options = self._options(each, treatment)
                if options is not None:
                    limits = options.pop("since", None), options.pop("until", None)
                    dtypes = options.pop("dtypes", tuple(HALF_DTYPES.values()))
                    path = Path(namespace.value, options.pop("name"))
                    yield _Entry(path, treatment, dtypes, options, each, namespace, *limits)

    def _at(self, line: int) -> str:
        return f"{self.source}:{line}" if line else self.source

    def _pairs(self, node: yaml.Node | None, expected: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """Yields the pairs of a mapping with text as keys, each key once. None and null count as an empty mapping."""
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
        """Yields the entries of a list and of lists in it; ``seen`` are the lists read before under the namespace."""
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

    def _add_entry(self, entry: _Entry) -> None:
        if patterns.is_pattern(entry.path):
            self._add_pattern(entry)
            return
        faults = len(self._faults)
        for path in self._paths(entry):
            rule = self._rule(path, entry)
            if rule is not None and entry.is_for_all:
                rule = fitting_rule(rule, path)
            if not self._resolve or self._exists(path, entry, rule):
                self._add_path(_Listing(path, entry, rule))
            if len(self._faults) > faults:
                return  # one fault for all spellings

    def _rule(self, path: Path, entry: _Entry) -> Rule | None:
        if entry.treatment is None:
            return None
        return Rule(path, entry.treatment, self._at(line_of(entry.node)), overlay=self._overlay, **entry.options)

    def _add_pattern(self, entry: _Entry) -> None:
        """Adds an entry that stands for all functions that a pattern matches; `CastLists.expanded` looks them up."""
        pattern, namespace = entry.path, entry.namespace
        if patterns.package_of(pattern) == "ampatch":
            self.fault(namespace, f"found {namespace.value!r}; amp casts no calls of its own functions. Leave it out.")
            return
        unmatched = patterns.unmatched_reason(pattern)
        if unmatched is not None:
            if not patterns.package_of(pattern):
                self.fault(namespace, unmatched)
            elif not entry.is_optional:
                self.fault(entry.node, unmatched + _MAY_LACK)
            return
        rule = self._rule(pattern, entry)
        for path in patterns.functions(pattern):
            unfit = None if rule is None else unfit_reason(rule, path)
            if unfit is not None:
                self.fault(entry.node, f"{pattern} matches {path}: {unfit}")
                return
        self._changes += [((pattern, dtype), rule) for dtype in entry.dtypes]

    def _paths(self, entry: _Entry) -> list[Path]:
        """Returns the paths that an entry names; records a fault for a pattern, or for a required name without any."""
        if not entry.is_for_all:
            return [entry.path]
        name = entry.path.name
        found = spellings(name)
        if any(sign in name for sign in "*?["):
            self.fault(entry.node, _no_pattern(name))  # even if it is optional: no torch has such a name
        elif not found and not entry.is_optional:
            where = f"in any of {', '.join(NAMESPACES)}; `{EVERY_NAMESPACE!r}` means these"
            self.fault(entry.node, f"no function is named {name!r} {where}.{did_you_mean(name, _public_names())}")
        return found

    def _add_path(self, listing: _Listing) -> None:
        path = listing.path
        function = function_key(path) if self._resolve else path
        for dtype in listing.entry.dtypes:
            first = self._first.setdefault((function, dtype), listing)
            again = self._listed.setdefault((path, dtype), listing)
            if listing.repeats(again):
                continue  # such as mul and multiply: the operator * is a spelling of both
            clash = _clash(listing, first, again)
            if clash is not None:
                self.fault(listing.entry.node, clash)
                return
            self._changes.append(((path, dtype), listing.rule))

    def _options(self, node: yaml.Node, treatment: Treatment | None) -> dict[str, Any] | None:
        """Returns the keys of an entry with their checked values; None if there was a fault."""
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
                self.fault(key, f"{key.value!r} has no effect here; only entries of {names} take it.")
            else:
                self._read(key.value, value, options)
        _join_formats(self, node, options, treatment)
        if "name" not in options and len(self._faults) == faults:
            self.fault(node, "an entry without `name`; expected one such as {name: exp, dtypes: [float16]}.")
        return options if len(self._faults) == faults else None

    def _read(self, key: str, value: yaml.Node, options: dict[str, Any]) -> None:
        """Reads the value of an option into ``options``, or records a fault."""
        try:
            options[key] = _OPTIONS[key].read(value)
        except AmpError as error:
            self.fault(value, f"{key}: {error}")

    def _exists(self, path: Path, entry: _Entry, rule: Rule | None) -> bool:
        """Returns True if a function exists and can be listed so, or if its module is not imported yet.

        Otherwise records a fault, unless the function is missing and the entry optional.
        """
        try:
            owner = find_owner(path.namespace)
        except PathError as error:
            if not entry.is_optional:
                may_lack = f"{error} Mark its entries `optional: true` if it may be missing."
                self._fault_once(entry.namespace, _no_namespace(path) or may_lack)
            return False
        if owner is None:
            return True
        if not isinstance(owner, (types.ModuleType, type)) and (mistaken := _no_namespace(path)) is not None:
            self._fault_once(entry.namespace, mistaken)
            return False
        try:
            unfit = rules.unlistable_reason(path, owner, find(path), rule)
        except PathError as error:
            if entry.is_optional:
                return False
            unfit = _elsewhere(path) or f"{error}{_MAY_LACK}"
        if unfit:
            self.fault(entry.node, unfit)
        return not unfit

    def _fault_once(self, namespace: yaml.Node, message: str) -> None:
        """Records a fault of a namespace, and not one for each of its names."""
        if namespace not in self._missing:
            self._missing.add(namespace)
            self.fault(namespace, message)


def _join_formats(reading: Reading, node: yaml.Node, options: dict[str, Any], treatment: Treatment | None) -> None:
    """Replaces ``format`` and ``grad`` by ``formats``; gradients have the format of arguments if none is named."""
    found = {key: options.pop(key) for key in _FORMATS if key in options}
    if "format" in found:
        options["formats"] = formats = Formats(found["format"], found.get("grad", found["format"]))
        reason = formats.why_not_devices()
        if formats.are_devices and treatment is Treatment.BLACKLIST:
            reason = "blacklisted functions compute in float32; put the entry in the whitelist"
        if reason:
            reading.fault(node, f"`products: device`, but {reason}.")
    elif found:
        reading.fault(node, "`grad` without `format`: name the format of the arguments too, such as format: float32.")


#: What each list does to its functions; None: they are to be on no list.
LISTS: dict[str, Treatment | None] = {**{treatment.value: treatment for treatment in Treatment}, UNLISTED: None}


def _no_rules(name: str, value: yaml.Node) -> str:
    """Returns the fault for an entry that says neither float32 nor lists."""
    hint = ""
    if kind_of(value) == "str":
        is_half = value.value in HALF_DTYPES
        whitelisting = " To have functions compute in half in there, whitelist them: {whitelist: [softmax]}."
        hint = whitelisting if is_half else did_you_mean(value.value, [FLOAT32, *LISTS])
    return (
        f"found {described(value)} for {name!r}; expected {FLOAT32}, or lists of its own, such as "
        f"{{blacklist: [softmax]}}.{hint}"
    )


# Torch's namespaces by their ends, as scripts import them.
_FULL = {
    "F": "torch.nn.functional",
    **{each.removeprefix("torch."): each for each in NAMESPACES if each != "torch"},
    "functional": "torch.nn.functional",
}

_MAY_LACK = " Mark the entry `optional: true` if it may be missing."


def _public_names() -> list[str]:
    return sorted(name for name in known_names() if not name.startswith("_"))


def _no_pattern(pattern: str) -> str:
    """Returns the fault for a pattern under `EVERY_NAMESPACE`, with what to type instead, or the closest names."""
    found = f"found the pattern {pattern!r}; expected a function's name under {EVERY_NAMESPACE!r}."
    homes = [namespace for namespace in NAMESPACES if patterns.functions(Path(namespace, pattern))]
    if not homes:
        return found + did_you_mean(re.sub(r"[*?\[\]]", "", pattern), _public_names())
    # A list without namespaces, under `modules`, stands for `EVERY_NAMESPACE` too: there the key is yet to be typed.
    typed = ", ".join(f'{namespace}: ["{pattern}"]' for namespace in homes)
    return f"{found} Patterns stand under a namespace: type `{{{typed}}}`."


def _with_namespaces(list_name: str, node: yaml.Node) -> str:
    """Returns what to type for a list of names without namespaces, with a space in front; empty for other nodes."""
    given = node.value if kind_of(node) == "seq" else [node]
    if not given or any(kind_of(each) != "str" or not re.fullmatch(r"\w+(\.\w+)*", each.value) for each in given):
        return ""
    lists: dict[str, list[str]] = {}
    for each in given:
        namespace, _, name = each.value.rpartition(".")
        lists.setdefault(_FULL.get(namespace, namespace) or f'"{EVERY_NAMESPACE}"', []).append(name)
    typed = ", ".join(f"{namespace}: [{', '.join(names)}]" for namespace, names in lists.items())
    every = (
        f', where "{EVERY_NAMESPACE}" stands for every namespace of torch' if any('"' in each for each in lists) else ""
    )
    return f" Type `{list_name}: {{{typed}}}`{every}."


def _no_namespace(path: Path) -> str | None:
    """Returns the fault for a namespace that is a function, or the end of one of torch's; None if it is neither."""
    given = path.namespace
    owner, _, function = given.rpartition(".")
    homes = [each.namespace for each in spellings(function) if not owner or each.namespace in (owner, _FULL.get(owner))]
    if given in _FULL:
        kind, typed = "no module or class of that name is loaded", f"{_FULL[given]}: [{path.name}]"
    elif homes:
        swapped = path.name if path.name in homes else _FULL.get(path.name, "")
        home = next((each for each in (_FULL.get(owner, owner), swapped) if each in homes), f'"{EVERY_NAMESPACE}"')
        kind, typed = "it is a function's name", f"{home}: [{function}]"
    else:
        return None
    return f"found {given!r} in the place of a namespace; {kind}. Type `{typed}`."


def _clash(listing: _Listing, first: _Listing, again: _Listing) -> str | None:
    """Returns the fault for a listing that contradicts or repeats an earlier one; None if it does not.

    Args:
        listing: the listing.
        first: the first one of its function, under any of its paths; it may be the listing itself.
        again: the first one of its path; it may be the listing itself.
    """
    earlier = first if again is listing else again
    if again is listing and not listing.disagrees(earlier):
        return None
    mine, others = listing.entry, earlier.entry
    line = line_of(others.node)
    where = f" in line {line}" if line else ""
    is_same_list = mine.treatment is others.treatment
    options = ", which has other options," if is_same_list and listing.disagrees(earlier) else ""
    same = "" if listing.path == earlier.path else f", which is the same function as {earlier.path}"
    hint = f', or type namespaces in the place of "{EVERY_NAMESPACE}"' if mine.is_for_all or others.is_for_all else ""
    return (
        f"{mine.typed} here and {others.typed}{where}{options} both stand for {listing.path}{same}; keep one "
        f"of them{hint}."
    )


def unfit_reason(rule: Rule, path: Path) -> str | None:
    """Returns a sentence on why the rule of a pattern does not fit a function that it matches; None if it does."""
    return rules.unlistable_reason(path, find_owner(path.namespace), find(path), fitting_rule(rule, path))


def fitting_rule(rule: Rule, path: Path) -> Rule:
    """Returns the rule of a pattern, or of every spelling, for one function: without what that cannot have.

    That is ``via_dtype`` if it has no argument ``dtype``, and the device's format in place: it computes without one.
    """
    is_of_device = rule.formats is not None and rule.formats.are_devices
    formats = None if is_of_device and is_in_place(path.name) else rule.formats
    function: Any = find(path) if rule.via_dtype else None
    via_dtype = rule.via_dtype and "dtype" in signatures.parameter_names(function)
    return replace(rule, path=path, formats=formats, via_dtype=via_dtype)


def is_in_force(since: str | None, until: str | None) -> bool:
    """Returns True if an entry is for the installed version of torch."""
    return (since is None or torch.__version__ >= since) and (until is None or torch.__version__ < until)


def _elsewhere(path: Path) -> str | None:
    """Returns the fault for a name in a wrong namespace, with the right one; None if no namespace has the name."""
    prefix, _, name = path.name.rpartition(".")
    for namespace in [prefix, f"{path.namespace}.{prefix}", *NAMESPACES]:
        if callable(find_or(Path(namespace, name))):
            return f"{path.namespace!r} has no {path.name!r}; type `{namespace}: [{name}]`."
    return None


# The readers of an entry's options. Each returns the value of a node, or raises an `AmpError` that says what was found
# and what was expected.


def _read_text(node: yaml.Node) -> str:
    if kind_of(node) == "str" and node.value:
        return str(node.value)
    raise AmpError(f"found {described(node)}; expected text.")


def _read_flag(node: yaml.Node) -> bool:
    if kind_of(node) == "bool":
        return bool(scalar_of(node))
    raise AmpError(f"found {described(node)}; expected true or false.")


def _read_need(node: yaml.Node) -> tuple[str, ...]:
    if kind_of(node) == "bool":
        return rules.EVERY_DEVICE if scalar_of(node) else ()
    expected = "true, or a list of device types, such as [cpu]"
    if kind_of(node) != "seq" or not node.value:
        raise AmpError(f"found {described(node)}; expected {expected}.")
    for item in node.value:
        try:
            torch.device(item.value if kind_of(item) == "str" and item.value.isalpha() else "")
        except RuntimeError:
            hint = did_you_mean(item.value, ("cpu", "cuda", "mps", "xpu")) if kind_of(item) == "str" else ""
            raise AmpError(f"found {described(item)}; expected {expected}.{hint}") from None
    return tuple(dict.fromkeys(item.value for item in node.value))


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


def _read_format(node: yaml.Node) -> Format:
    choices = ", ".join(CHOICES)
    if kind_of(node) == "str":
        return named(node.value)
    if kind_of(node) != "map":
        expected = f"one of {', '.join(FORMATS)}, {BY_BITS}, or a mapping with name, {choices}"
        raise AmpError(f"found {described(node)}; expected {expected}.")
    given: dict[str, str] = {}
    for key, value in node.value:
        if kind_of(key) != "str" or kind_of(value) != "str" or key.value in given:
            found = f"{described(key)}: {described(value)}"
            raise AmpError(f"found {found}; expected name, {choices}, each once and with text.")
        given[key.value] = value.value
    return chosen(given)


@dataclass(frozen=True, slots=True)
class _Option:
    """A key that an entry can have: its reader, and the lists in which it has a meaning (None is `UNLISTED`)."""

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
    "needs_float32": _Option(_read_need, (Treatment.BLACKLIST,)),
    "instead": _Option(_read_text, (Treatment.BANNED,)),
    "format": _Option(_read_format, (Treatment.WHITELIST, Treatment.BLACKLIST)),
    "grad": _Option(_read_format, (Treatment.WHITELIST, Treatment.BLACKLIST)),
}
# Those that a part of a model can have beside lists.
_FORMATS = ("format", "grad")
