"""The cast lists as tables in Markdown, from the YAML files: every entry with its reason, beside what other systems do.

Must only read the lists; the reasons are the comments of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch

from ampatch.cast_lists import annotations, coverage
from ampatch.cast_lists.annotations import Entry
from ampatch.cast_lists.lists import PEERS, peer, shipped
from ampatch.cast_lists.paths import Path, function_key
from ampatch.cast_lists.rules import Rule, Treatment, typed_conditions, typed_need
from ampatch.opt_levels import HALF_DTYPES

#: The other systems of the tables, each with the half type that all of them have.
_COLUMNS = {"apex": "Apex", "torch_autocast_cuda": "autocast, CUDA", "torch_autocast_cpu": "autocast, CPU"}
_COMPARED = torch.float16
_NO_LIST = "-"


def sections() -> str:
    """Returns one section for each list: each reason of the file, with a table of the entries that it is for."""
    theirs = {name: _by_any_name(peer(name).for_half(_COMPARED)) for name in PEERS}
    entries = annotations.shipped_entries()
    parts = []
    for treatment in Treatment:
        own = [entry for entry in entries if entry.list_name == treatment.value]
        parts.append(
            f"## {treatment.value.capitalize()}\n\n[lists/{treatment.value}.yaml](../../lists/{treatment.value}.yaml)"
        )
        for reason, group in _by_reason(own):
            parts.append(f"{_escaped(reason)}\n\n{_table(group, theirs)}")
    return "\n\n".join(parts)


def _by_reason(entries: Iterable[Entry]) -> list[tuple[str, list[Entry]]]:
    """Returns the reasons in the order of the file, each with its entries."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.reason or "", []).append(entry)
    return list(groups.items())


def _table(entries: Iterable[Entry], theirs: Mapping[str, Mapping[object, Rule]]) -> str:
    """Returns a table with a row for each name; namespaces that agree in everything else share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        others = [_theirs(entry.path, theirs[name]) for name in _COLUMNS]
        rows.setdefault((entry.path.name, _conditions(entry), *others), []).append(entry.path.namespace)
    lines = [_row(["function", "of", "only", *_COLUMNS.values()]), "|---" * (3 + len(_COLUMNS)) + "|"]
    for (name, conditions, *others), namespaces in rows.items():
        lines.append(_row([f"`{name}`", ", ".join(f"`{each}`" for each in namespaces), conditions, *others]))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _theirs(path: Path, rules: Mapping[object, Rule]) -> str:
    rule = rules.get(path) or rules.get(function_key(path))
    return rule.treatment.value if rule else _NO_LIST


def _by_any_name(rules: Mapping[Path, Rule]) -> dict[object, Rule]:
    """Returns the rules by path, and by the key that all paths of a function share."""
    return {**{function_key(path): rule for path, rule in reversed(list(rules.items()))}, **rules}


def _conditions(entry: Entry) -> str:
    """Returns what limits an entry, and how it is applied."""
    limits = [] if len(entry.half_dtypes) == len(HALF_DTYPES) else list(entry.half_dtypes)
    limits += [f"torch from {entry.since}"] if entry.since else []
    limits += [f"torch before {entry.until}"] if entry.until else []
    rules = shipped().rules
    rule = next((rules[key] for name in entry.half_dtypes if (key := (entry.path, HALF_DTYPES[name])) in rules), None)
    if rule:
        limits += [f"`{typed_conditions(rule.when)}`".replace("|", "\\|")] if rule.when else []
        limits += [
            f"`{flag}`" for flag in [*(["via_dtype"] if rule.via_dtype else []), *typed_need(rule.needs_float32)]
        ]
    return "; ".join(limits)


def reviewed() -> str:
    """Returns one section for each reason why functions are in no list, with their names by namespace."""
    parts = []
    for reason, names in groupby(coverage.reviewed_names(), key=lambda pair: pair[0]):
        parts.append(f"### {reason.name}\n\n{_escaped(reason.why)}")
        parts.append("\n".join(_namespaces(path for _, path in names)))
    return "\n\n".join(parts)


def _namespaces(paths: Iterable[Path]) -> Iterator[str]:
    for namespace, group in groupby(sorted(paths), key=lambda path: path.namespace):
        every = "every namespace" if namespace == "*" else f"`{namespace}`"
        yield f"- {every}: {', '.join(f'`{path.name}`' for path in group)}"


def _escaped(text: str) -> str:
    """Returns a comment as Markdown: names with underscores, and stars, are no markup."""
    for mark in "*_<|[":
        text = text.replace(mark, f"\\{mark}")
    return text
