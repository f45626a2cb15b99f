"""What a training calls in half: functions with their lists, and the FLOPs of each by type.

Owns the choice of the functions that a search may move to float32. Must never change a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ampatch.cast_lists.coverage import reason_of
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path, find_or
from ampatch.cast_lists.rules import Treatment
from ampatch.cast_lists.spellings import is_in_place, spelled
from ampatch.casting.nested import tensors_in
from ampatch.diagnostics.recorder.functions import name_of
from ampatch.diagnostics.report.calls import CallRecorder
from ampatch.diagnostics.report.rows import Row
from ampatch.diagnostics.tune.result import blacklist
from ampatch.errors import CastListError
from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.torch_private.autograd import current_node
from ampatch.torch_private.operators import FLASH_ATTENTION, PACKET

#: Reasons of ``lists/reviewed.yaml`` for which a function does the same in half as in float32, or is no arithmetic.
_HARMLESS = (
    *("compares", "exact", "views", "makes", "converts", "fixed_type", "integers", "reads", "bookkeeping"),
    *("removed", "symbols", "settings", "quantized", "draws"),
)
#: Why a cast list cannot move a function: by the rule that decides about it, or for what it does.
_FIXED = {
    "decorated": "an amp decorator fixes its type",
    "registered": "it was registered, and a registration takes precedence over cast lists",
    "in place": "a blacklisted in-place function raises on half tensors",
}


@dataclass(frozen=True, slots=True)
class Observed:
    """What a training called. The values are those that JSON has.

    Attributes:
        rules: functions that it called with half tensors, and that a cast list can move to float32: the list that each
            is in by its path; None for no list. A function of several spellings has the path that was called first.
        flops: their FLOPs in half, in forward passes.
        half_flops: FLOPs of forward passes in half.
        all_flops: all FLOPs that were counted.
        notes: what could not be observed or moved, as sentences.
        is_disturbed: True if the training ran otherwise than unwatched, as compiled code does. Its metric counts for
            nothing then.
    """

    rules: dict[str, str | None]
    flops: dict[str, int]
    half_flops: int = 0
    all_flops: int = 0
    notes: list[str] = field(default_factory=list)
    is_disturbed: bool = False

    def with_functions(self, other: Observed) -> Observed:
        """Returns this with the functions of another training too."""
        known = {each for path in self.rules for each in spelled(path)}
        new = {path: rule for path, rule in other.rules.items() if path not in known}
        return replace(self, rules=new | self.rules, flops={path: other.flops[path] for path in new} | self.flops)

    def share(self, kept: frozenset[str] = frozenset()) -> float | None:
        """Returns the share of the FLOPs in half once some functions run in float32; None if no FLOPs were counted."""
        lost = sum(self.flops.get(path, 0) for path in kept)
        return (self.half_flops - lost) / self.all_flops if self.all_flops else None


class TrainingRecorder(CallRecorder):
    """Records what a training and its evaluation call, with FLOPs by function and type.

    Args:
        lists: the cast lists of the training.

    Attributes:
        counts_flops: False once the training has ended: the FLOPs of the evaluation do not count.
    """

    def __init__(self, lists: CastLists) -> None:
        super().__init__()
        self._lists = lists
        self.counts_flops = True
        self._flops: Counter[tuple[Any, bool]] = Counter()

    def operator(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and counts its FLOPs in a forward pass; those of a backward pass are in proportion."""
        result, row = super().operator(op, args, kwargs), self.thread.call.row
        count = _formulas().get(getattr(op, PACKET, None)) if self.counts_flops and current_node() is None else None
        if count is not None:
            with torch.DisableTorchFunction():
                is_half = any(each.dtype in HALVES for each in tensors_in(args))
                self._flops[row and row.function, is_half] += int(count(*args, **kwargs, out_val=result))
        return result

    def observed(self) -> Observed:
        """Returns what was recorded."""
        rows = grouped((row.function, row) for row in self._rows.read() if not isinstance(row.function, str))
        # The session's lists, also for functions that parts treat otherwise: these are what a search changes.
        rules = {} if self._rulings is None else self._rulings.of(rows, of_parts=False)
        rules |= dict.fromkeys(self._decorated & set(rows), "decorated")
        half = sum(count for (_, is_half), count in self._flops.items() if is_half)
        notes = list(self.missed)
        observed = Observed({}, {}, half, sum(self._flops.values()), notes, bool(self.missed))
        for function, of_function in rows.items():
            rule, path = rules.get(function), name_of(function)
            if rule not in _FIXED and _meets_half(of_function, "whitelist"):
                notes += self._held_by_parts(path)
            if rule in ("blacklist", "banned") or not _meets_half(of_function, rule):
                continue
            if rule not in _FIXED:
                if not self._is_movable(path, function):
                    continue
                rule = "in place" if is_in_place(Path.of(path).name) else rule
            if rule in _FIXED:
                notes.append(f"{path} stays as it is: {_FIXED[rule]}.")
                continue
            unit = next((known for known in observed.rules if path in spelled(known)), path)
            observed.rules[unit] = "whitelist" if observed.rules.get(unit) == "whitelist" else rule
            observed.flops[unit] = observed.flops.get(unit, 0) + self._flops[function, True]
        return observed

    def _held_by_parts(self, name: str) -> Iterator[str]:
        """Yields a sentence for each part of a model whose own rules a search cannot change to float32."""
        lists = self._blacklisting(name)
        if lists is None or self._rulings is None:
            return
        path = Path.of(name)
        for entry in lists.modules:
            rule = lists.of_module(entry).for_half(self._rulings.half_dtype).get(path)
            if rule is None or rule.treatment is not Treatment.BLACKLIST:
                yield (
                    f"{name} stays as it is in submodules that {entry.name!r} matches ({entry.source}): the rules of "
                    "that entry come before those of the list that is searched. Change it there to try it in float32."
                )

    def _is_movable(self, name: str, function: Any) -> bool:
        """Returns True if a cast list can name a function, and it does not do the same in half as in float32."""
        path = Path.of(name)
        reason = reason_of(path)
        is_harmless = reason is not None and reason.name in _HARMLESS
        return find_or(path) is function and not is_harmless and self._blacklisting(name) is not None

    def _blacklisting(self, name: str) -> CastLists | None:
        """Returns the lists with a function on the blacklist; None if none can be there, such as a property."""
        try:
            return self._lists.overlaid(blacklist([name]))
        except CastListError:
            return None


def _meets_half(rows: list[Row], rule: str | None) -> bool:
    if rule == "whitelist" and any(row.casts or row.cache_hits for row in rows):
        return True
    return any(dtype in HALVES for row in rows for types in row.types for side in types for dtype in side)


@cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    """Returns torch's formulas for FLOPs, with those of attention on the CPU, which torch leaves out."""
    aten = torch.ops.aten
    on_cpu = {getattr(aten, cpu): flop_registry[getattr(aten, other)] for cpu, other in FLASH_ATTENTION.items()}
    return {**on_cpu, **flop_registry}
