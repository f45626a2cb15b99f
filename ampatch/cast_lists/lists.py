"""The cast lists in force, as a frozen value: the shipped lists with users' changes laid over them.

The format is described in ``docs/reference/cast_list_format.md``. Must not patch anything, nor import a module because
a list names it.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from os import PathLike, fspath

import torch
import yaml

from ampatch.cast_lists import patterns
from ampatch.cast_lists.paths import Path, function_key
from ampatch.cast_lists.reader import Reading, fitting_rule, unfit_reason
from ampatch.cast_lists.rules import Change, Changes, ModuleRules, Rule, Treatment
from ampatch.cast_lists.yaml_tree import UnreadableError, compose, compose_own, node_of, text_of
from ampatch.errors import OptionError
from ampatch.grouping import grouped
from ampatch.opt_levels import LEVELS

#: Stands among the names of files for an overlay that is a mapping.
MAPPING = "a mapping"

#: Values of `cast_lists=`: a file ("~" is the user's home), a mapping of the same form, or a sequence of these.
Overlay = str | PathLike[str] | Mapping[str, object] | Sequence["str | PathLike[str] | Mapping[str, object]"]


@dataclass(frozen=True, slots=True)
class CastLists:
    """The rules in force for each half dtype. Immutable; a change returns a new value.

    Attributes:
        rules: rules by path and half dtype, except those of patterns and of files after the first that has a pattern.
        named: every path that was ever listed, so that a function that was unlisted comes back under all its names.
        files: overlays in their order: paths of files, and `MAPPING` for each mapping.
        texts: the YAML of each overlay, as it was read; that of a mapping has the same meaning.
        waiting: changes of each file from the first on that has a pattern; `expanded` applies them.
        modules: the entries for parts of a model, those of later overlays last; each name once.
        part: the entry for parts of a model whose lists these are; None: the session's.
    """

    rules: Mapping[tuple[Path, torch.dtype], Rule]
    named: tuple[Path, ...] = field(default=(), compare=False)
    files: tuple[str, ...] = field(default=(), compare=False)
    texts: tuple[str, ...] = field(default=(), compare=False)
    waiting: tuple[Changes, ...] = ()
    modules: tuple[ModuleRules, ...] = ()
    part: ModuleRules | None = None

    def __repr__(self) -> str:
        rules = f"{len(self.rules)} rules"  # a number only: all rules would be unreadable
        parts = f", {len(self.modules)} entries for modules" if self.modules else ""
        return f"CastLists({', '.join(['shipped lists', *self.files])}: {rules}{parts})"

    def for_half(self, half_dtype: torch.dtype) -> dict[Path, Rule]:
        """Returns the rules for one half dtype, by path."""
        return {path: rule for (path, dtype), rule in self.expanded().rules.items() if dtype is half_dtype}

    def expanded(self, within: Sequence[types.ModuleType] | None = None) -> CastLists:
        """Returns these lists with a rule for each loaded function that a pattern matches.

        In a file, an entry that names a function comes before all patterns; otherwise the last pattern decides. The
        result depends on the modules that are loaded now, so lists are compared unexpanded.

        Args:
            within: modules whose functions are looked for; None: all loaded ones.
        """
        lists = self
        for changes in self.waiting:
            lists = lists._with(_expanded(changes, within))
        if self.part is not None:
            lists = replace(lists, rules={key: self.part.in_formats(rule) for key, rule in lists.rules.items()})
        return replace(lists, waiting=(), part=None) if lists is not self else self

    @property
    def patterns(self) -> dict[tuple[Path, torch.dtype], Rule]:
        """Returns the rules of patterns, by the pattern and the half dtype; later files replace earlier ones."""
        rules = {key: rule for changes in self.waiting for key, rule in changes if patterns.is_pattern(key[0])}
        return {key: rule for key, rule in rules.items() if rule is not None}

    def matched_in(self, module: types.ModuleType) -> set[Path]:
        """Returns the functions in one module that patterns match."""
        found = [path for changes in self.waiting for (path, _), _ in changes if patterns.is_pattern(path)]
        return {path for pattern in found for path in patterns.functions(pattern, [module])}

    def late_rules(
        self, half_dtype: torch.dtype, module: types.ModuleType, matched: Iterable[Path]
    ) -> dict[Path, Rule | None]:
        """Returns what is decided about some functions in one module; None: the function is on no list."""
        rules = self.expanded([module]).rules
        return {path: rules.get((path, half_dtype)) for path in matched}

    def told(self, matched: bool = True) -> dict[tuple[Path, torch.dtype], Rule]:
        """Returns the rules of all loaded functions, and those of patterns under the pattern itself.

        Args:
            matched: False leaves out the patterns that match a loaded function.
        """
        shown = {key: rule for key, rule in self.patterns.items() if matched or not patterns.functions(key[0])}
        return {**self.expanded().rules, **shown}

    def at_every_level(self) -> dict[tuple[Path, torch.dtype], Rule]:
        """Returns the rules that hold where others do not, for half weights; those of patterns included."""
        return {key: rule for key, rule in self.told().items() if rule.is_for_half_weights}

    def number_formats(self) -> list[str]:
        """Returns the formats that these lists name, for the whole model or for parts of it; each once."""
        in_parts = [rule for entry in self.modules for _, rule in entry.changes or ()]
        known = [each.formats for each in [*self.told().values(), *in_parts, *self.modules] if each is not None]
        rounding = [each for each in known if each is not None and not all(row.is_torchs for row in each)]
        return list(dict.fromkeys(map(str, rounding)))

    def packages(self) -> set[str]:
        """Returns the top-level packages that patterns are about."""
        return {patterns.package_of(path) for path, _ in self.patterns}

    def overlaid(self, overlay: Overlay) -> CastLists:
        """Returns these lists with a user's changes laid over them.

        Args:
            overlay: path of a YAML file ("~" is the user's home), a mapping of the same form, or a sequence of these.
                Later parts of a sequence are laid over earlier ones.

        Raises:
            CastListError: the overlay has faults.
            OptionError: the overlay is neither a path, nor a mapping, nor a sequence of these.
        """
        several = isinstance(overlay, Sequence) and not isinstance(overlay, (str, bytes, PathLike))
        lists = self
        for part in overlay if several else [overlay]:  # type: ignore[union-attr]
            lists = lists._overlaid(*_read_overlay(part, len(lists.files) + 1))
        return lists

    def _overlaid(self, source: str, text: str, changes: Changes, modules: Sequence[ModuleRules]) -> CastLists:
        named = {entry.name for entry in modules}
        return replace(
            self._laid_over(changes),
            files=(*self.files, source),
            texts=(*self.texts, text),
            modules=(*(entry for entry in self.modules if entry.name not in named), *modules),
        )

    def modules_of_user(self, opt_level: str) -> list[ModuleRules]:
        """Returns the entries for parts of a model that the user has written, not those of the level's file."""
        return [entry for entry in self.modules if entry not in shipped(opt_level).modules]

    def of_module(self, entry: ModuleRules) -> CastLists:
        """Returns the lists of a part that has rules of its own: these lists, with its changes laid over them."""
        return replace(self, modules=(), part=entry)._laid_over(entry.changes or ())

    def _laid_over(self, changes: Changes) -> CastLists:
        if self.waiting or any(patterns.is_pattern(path) for (path, _), _ in changes):
            return replace(self, waiting=(*self.waiting, tuple(changes)))
        return self._with(changes)

    def _with(self, changes: Changes) -> CastLists:
        """Applies changes. An entry moves its function under all its listed names (``F.conv2d``, ``torch.conv2d``)."""
        rules = dict(self.rules)
        changed = {key for key, _ in changes}
        named = tuple(dict.fromkeys([*self.named, *(path for path, _ in rules), *(path for (path, _), _ in changes)]))
        functions = {path: function_key(path) for path in named}
        aliases = grouped((function, path) for path, function in functions.items())
        for (path, dtype), rule in changes:
            for alias in aliases[functions[path]]:
                if alias == path or (alias, dtype) not in changed:
                    rules.pop((alias, dtype), None)
                    if rule is not None:
                        rules[alias, dtype] = rule if alias == rule.path else replace(rule, path=alias)
        return replace(self, rules=types.MappingProxyType(rules), named=named)


def _expanded(changes: Changes, within: Sequence[types.ModuleType] | None) -> Changes:
    """Returns the changes of a file with the functions that its patterns match in place of the patterns."""
    plain = [change for change in changes if not patterns.is_pattern(change[0][0])]
    named = {(function_key(path), dtype) for (path, dtype), _ in plain}
    found: dict[tuple[object, torch.dtype], list[Change]] = {}
    for (pattern, dtype), rule in changes:
        if not patterns.is_pattern(pattern):
            continue
        matched = patterns.functions(pattern, within)
        fitting = [path for path in matched if rule is None or unfit_reason(rule, path) is None]
        for function, paths in grouped((function_key(path), path) for path in fitting).items():
            if (function, dtype) not in named:
                made = [((path, dtype), None if rule is None else fitting_rule(rule, path)) for path in paths]
                found[function, dtype] = made
    return [*plain, *(change for made in found.values() for change in made)]


@functools.cache
def shipped(level: str | None = None) -> CastLists:
    """Returns the lists that come with ampatch, with the level's own file laid over them if it has one."""
    if level is not None:
        name = LEVELS[level].lists
        if name is None:
            return shipped()
        parsed, file = Reading(name, overlay=1), files("ampatch.lists") / name
        parsed.add_overlay(compose_own(file))
        return shipped()._overlaid(name, file.read_text("utf-8"), parsed.changes(), parsed.modules)
    parsed = Reading()
    for treatment in Treatment:
        parsed.source = f"{treatment.value}.yaml"
        parsed.add_list(compose_own(files("ampatch.lists") / parsed.source), treatment)
    return CastLists({})._with(parsed.changes())


PEERS = ("apex", "torch_autocast_cuda", "torch_autocast_cpu")


@functools.cache
def peer(name: str) -> CastLists:
    """Returns the lists of another system, one of `PEERS`. Looks up no names, as the installed torch may lack some."""
    parsed = Reading(f"{name}.yaml", resolve=False)
    parsed.add_overlay(compose_own(files("ampatch.lists") / "peers" / parsed.source))
    return CastLists(types.MappingProxyType({key: rule for key, rule in parsed.changes() if rule is not None}))


def _read_overlay(overlay: object, number: int) -> tuple[str, str, Changes, list[ModuleRules]]:
    """Returns the name of an overlay for messages, its text, its changes, and its entries for parts of a model."""
    if isinstance(overlay, Mapping):
        parsed = Reading("cast_lists", overlay=number)
    elif isinstance(overlay, (str, PathLike)) and fspath(overlay):
        file = os.path.expanduser(os.fsdecode(overlay))  # noqa: PTH111 - Path's raises for an unknown user
        parsed = Reading(file, overlay=number)
    else:
        raise OptionError(f"cast_lists holds {overlay!r}; expected the path of a YAML file, or a mapping.")
    text = ""
    try:
        if isinstance(overlay, Mapping):
            node: yaml.Node | None = node_of(overlay)
            text = yaml.serialize(node, allow_unicode=True)
        else:
            text = text_of(parsed.source)
            node = compose(text)
        parsed.add_overlay(node)
    except UnreadableError as error:
        parsed.fault(error.line, str(error))
    except RecursionError:
        parsed.fault(0, "it is nested too deeply, or contains itself.")
    return MAPPING if isinstance(overlay, Mapping) else parsed.source, text, parsed.changes(), parsed.modules
