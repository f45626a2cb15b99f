"""Sorts the functions of torch: those in a list, those in none with the reason, and those that have neither.

Owns the reader of ``lists/reviewed.yaml`` and the question which names of torch need a decision. Must not call a
function of torch, nor change a list.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
import yaml
from torch import overrides

from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path, find_owner, function_key
from ampatch.cast_lists.reader import Reading, is_in_force
from ampatch.cast_lists.rules import Treatment
from ampatch.cast_lists.spellings import EVERY_NAMESPACE, NAMESPACES, spellings
from ampatch.cast_lists.yaml_tree import compose_own
from ampatch.function_wrapper import unwrapped
from ampatch.grouping import grouped

#: File of the package that holds the reasons.
FILE = "reviewed.yaml"

#: Public from torch 2.15 on.
_OF_OPTIMIZERS = "torch.foreach"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why functions are in no list.

    Attributes:
        name: its name, such as "views".
        why: the reason as a sentence.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was decided about each callable of torch.

    Attributes:
        torch_version: the installed version of torch, whose callables these are.
        listed: paths of each list. A path in two lists, for one half dtype each, is in both.
        reviewed: paths of each reason. None of them is in a list.
        undecided: paths that have neither a list nor a reason.
    """

    torch_version: str
    listed: Mapping[Treatment, Sequence[Path]]
    reviewed: Mapping[Reason, Sequence[Path]]
    undecided: tuple[Path, ...]

    def counts(self) -> dict[str, int]:
        """Returns the numbers of callables that are listed, reviewed and undecided."""
        return {
            "listed": len({path for paths in self.listed.values() for path in paths}),
            "reviewed": sum(map(len, self.reviewed.values())),
            "undecided": len(self.undecided),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, as ``json.dumps`` takes it: the counts first, and paths as text."""
        return {
            "torch": self.torch_version,
            "counts": self.counts(),
            "undecided": list(map(str, self.undecided)),
            "listed": {treatment.value: list(map(str, paths)) for treatment, paths in self.listed.items()},
            "reviewed": {
                reason.name: {"why": reason.why, "functions": list(map(str, paths))}
                for reason, paths in self.reviewed.items()
            },
        }


def coverage(lists: CastLists) -> Coverage:
    """Returns what was decided about each callable of the installed torch.

    A function counts as listed under all its paths if it is listed under one: ``torch.conv2d`` is
    ``torch.nn.functional.conv2d``. Only the same object counts, since a patch reaches no other: ``torch.spmm`` equals
    ``torch.mm``, and is another object.

    Args:
        lists: rules to look for, usually the shipped ones.
    """
    treatments = grouped((function_key(path), rule.treatment) for (path, _), rule in lists.rules.items())
    listed: dict[Treatment, list[Path]] = {treatment: [] for treatment in Treatment}
    reasons: dict[Reason, list[Path]] = {reason: [] for reason in _read()}
    undecided: list[Path] = []
    for path, value in callables().items():
        found = set(treatments.get(id(value), ()))
        for treatment in found:
            listed[treatment].append(path)
        if not found:
            reason = reason_of(path)
            (reasons[reason] if reason else undecided).append(path)
    return Coverage(torch.__version__, listed, reasons, tuple(undecided))


def reason_of(path: Path) -> Reason | None:
    """Returns the reason why the function at a path is in no list, by any of its paths; None if there is none."""
    by_path, by_function = _reasons()
    return by_path.get(path) or by_function.get(function_key(path))


def reviewed_names() -> list[tuple[Reason, Path]]:
    """Returns the names in the file in their order, each with its reason; a namespace may be `EVERY_NAMESPACE`."""
    return [(reason, path) for reason, paths in _read().items() for path in paths]


def callables() -> dict[Path, object]:
    """Returns the callables of the installed torch that need a decision, by path, sorted by namespace and name.

    These are all that torch lets classes of tensors override, the properties of tensors among them, and all other
    public functions of torch in the namespaces. Private functions are reached through public ones. Those that update
    lists of tensors are left out: they are for optimizers.
    """
    overridable = {unwrapped(each) for group in overrides.get_overridable_functions().values() for each in group}
    found: dict[Path, object] = {}
    reached = set()
    for namespace in NAMESPACES:
        owner = find_owner(namespace)
        for name in dir(owner):
            value = unwrapped(getattr(owner, name))
            # Of a property torch overrides `__get__`.
            function = value if callable(value) else getattr(value, "__get__", None)
            is_hashable = getattr(function, "__hash__", None) is not None
            if is_hashable and (function in overridable or _is_public_function(name, value)):
                found[Path(namespace, name)] = value
                reached.add(function)
    # Those in namespaces that this module does not know, and properties that amp replaces while it is on.
    for function in overridable - reached:
        name = overrides.resolve_name(function) or repr(function)
        namespace, _, attribute = name.removesuffix(".__get__").rpartition(".")
        if namespace != _OF_OPTIMIZERS:
            found[Path(namespace, attribute)] = function
    return dict(sorted(found.items()))


def _is_public_function(name: str, value: object) -> bool:
    """Returns True for a function of torch; builtins have no module, and a namespace imports some of other packages."""
    module = getattr(value, "__module__", None) or "torch"
    is_function = callable(value) and not isinstance(value, (type, types.ModuleType))
    return is_function and not name.startswith("_") and module.split(".")[0] == "torch"


@functools.cache
def _read() -> Mapping[Reason, tuple[Path, ...]]:
    """Returns the names of the file in their order, by reason."""
    tree: Any = compose_own(files("ampatch.lists") / FILE)
    found = {}
    for name, keys in tree.value:
        (_, why), *lists = keys.value
        entries = Reading(FILE).entries(yaml.MappingNode(keys.tag, lists, keys.start_mark), None)
        paths = tuple(each.path for each in entries if is_in_force(each.since, each.until))
        found[Reason(name.value, why.value)] = paths
    return found


@functools.cache
def _reasons() -> tuple[Mapping[Path, Reason], Mapping[Path | int, Reason]]:
    """Returns the reason of each path, and of each function, so that it counts under paths that are not named."""
    by_path: dict[Path, Reason] = {}
    for reason, path in reviewed_names():
        for each in spellings(path.name) if path.namespace == EVERY_NAMESPACE else [path]:
            by_path.setdefault(each, reason)
    return by_path, {function_key(path): reason for path, reason in by_path.items()}
