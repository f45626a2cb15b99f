"""Finds the entry under ``modules`` in the cast lists that decides about a submodule of a model.

Owns the order of precedence of entries, and the check that each has an effect. Must never change a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ampatch.cast_lists.rules import ModuleRules
from ampatch.errors import CastListError, Fault
from ampatch.weights.conversion_plan import KeepFloat32, callable_roots, kept_modules, matches, near_names


@dataclass(frozen=True, slots=True)
class RuledPart:
    """A submodule that has a forward, and the entry that decides about it.

    Attributes:
        name: a name of the submodule in the model.
        entry: the entry.
    """

    name: str
    entry: ModuleRules

    @property
    def asked(self) -> str:
        """The entry, for messages."""
        return f"{self.entry.source}: modules has {self.entry.name!r}, which"


def ruled_parts(model: nn.Module, entries: Sequence[ModuleRules]) -> dict[nn.Module, RuledPart]:
    """Returns the submodules that entries decide about.

    An entry that is the submodule's own name comes before patterns and classes; of several, the last one decides. A
    container without a forward, such as ``ModuleList``, stands for its children, and an entry that matches a child
    itself comes first.
    """
    found: dict[nn.Module, tuple[tuple[bool, bool, int], RuledPart]] = {}
    for name, module in model.named_modules(remove_duplicate=False) if entries else ():
        for place, entry in enumerate(entries):
            if name and matches(entry.name, name, module):
                for root in callable_roots(module):
                    rank = (root is module, entry.name == name, place)
                    if root not in found or rank > found[root][0]:
                        found[root] = rank, RuledPart(name, entry)
    return {module: part for module, (_, part) in found.items()}


def check_entries(models: Iterable[nn.Module], entries: Sequence[ModuleRules], keep_fp32: KeepFloat32 = ()) -> None:
    """Raises `CastListError` with a fault for each entry that has no effect on any of the models.

    Such an entry matches no submodule; or it has rules of its own, and matches only submodules that compute in float32
    for another reason, where nothing is cast.

    Args:
        models: all models of the session.
        entries: the entries.
        keep_fp32: names, patterns and classes of submodules that compute in float32 anyway.
    """
    if not entries:
        return
    models = list(models)
    named = [(name, module) for model in models for name, module in model.named_modules(remove_duplicate=False) if name]
    parts = [(model, ruled_parts(model, entries)) for model in models]
    faults = []
    for entry in entries:
        if not any(matches(entry.name, name, module) for name, module in named):
            near = near_names(entry.name, named)
            if any(matches(entry.name, "", model) for model in models):
                near = " It is the class of the model itself, whose rules stand on top of the file."
            faults.append(
                Fault(entry.source, f"modules has {entry.name!r}, which matches no submodule of the model.{near}")
            )
        elif (why := _why_never(entry, parts, keep_fp32)) is not None:
            faults.append(Fault(entry.source, f"modules has rules for {entry.name!r}, which never apply: {why}"))
    if faults:
        raise CastListError(faults)


def _why_never(
    entry: ModuleRules, models: Sequence[tuple[nn.Module, dict[nn.Module, RuledPart]]], keep_fp32: KeepFloat32
) -> str | None:
    """Returns why an entry's rules never apply; None if they do, or if other entries decide about all its matches.

    Args:
        entry: the entry.
        models: each model with its `ruled_parts`.
        keep_fp32: names, patterns and classes of submodules that compute in float32 anyway.
    """
    why = None
    for model, parts in models if not entry.is_float32 else ():
        by = {module: f"{part.entry.name!r} ({part.entry.source})" for module, part in parts.items()}
        float32 = {module: by[module] for module, part in parts.items() if part.entry.is_float32}
        float32 |= dict.fromkeys(kept_modules(model, keep_fp32), "keep_fp32")
        for name, module in model.named_modules(remove_duplicate=False):
            if module not in parts or parts[module].entry is not entry:
                continue
            steps = name.split(".")
            around = (model.get_submodule(".".join(steps[:count])) for count in range(1, len(steps) + 1))
            reason = next((float32[each] for each in around if each in float32), None)
            if reason is None:
                return None
            why = (
                f"{reason} has {name!r} compute in float32, and nothing is cast in there. Take one of the two out, or "
                "name the parts that are to compute in float32 without this one."
            )
    return why
