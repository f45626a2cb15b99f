"""Owns the initial cast lists of each namespace, and turns a script's edits of them into an overlay.

Must not read a list before `changes_of` is called: scripts also replace whole lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from ampatch.cast_lists.lists import peer, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import UNLISTED, Rule, Treatment
from ampatch.errors import OptionError, did_you_mean, warn

_TREATMENTS = {
    "FP16_FUNCS": Treatment.WHITELIST,
    "FP32_FUNCS": Treatment.BLACKLIST,
    "CASTS": Treatment.PROMOTE,
    "SEQUENCE_CASTS": Treatment.PROMOTE,
    "BANNED_FUNCS": Treatment.BANNED,
}

# Apex kept promoted functions that take a sequence in a list of their own.
_OF_SEQUENCES = ("cat", "stack")

# A Python function such as F.softmax calls the method of the same name. The method's rule would undo an edit of the
# function alone, so the edit applies to both.
_CALLED_BY_FUNCTIONAL = ("torch", "torch.Tensor")


def starting_lists(module: Any) -> dict[str, list[Any]]:
    """Returns the lists of a namespace by name, with the functions that ampatch or Apex lists.

    Apex's functions are included although torch now does their casts by itself, so that a script can remove them.
    """
    namespace = _namespace(module)
    rules = shipped().for_half(torch.float16)
    ours = _names_of(rules, namespace)
    theirs = {
        name: treatment
        for name, treatment in _names_of(peer("apex").for_half(torch.float16), namespace).items()
        if hasattr(module, name)
    }
    lists: dict[str, list[Any]] = {name: [] for name in _TREATMENTS}
    for function, treatment in {**theirs, **ours}.items():
        if treatment is Treatment.PROMOTE:
            lists["SEQUENCE_CASTS" if function in _OF_SEQUENCES else "CASTS"].append(function)
        elif treatment is Treatment.BANNED:
            lists["BANNED_FUNCS"].append((function, rules[Path(namespace, function)].instead or ""))
        else:
            lists["FP16_FUNCS" if treatment is Treatment.WHITELIST else "FP32_FUNCS"].append(function)
    return lists


def changes_of(modules: Iterable[ModuleType]) -> dict[str, dict[str, list[Any]]]:
    """Returns the edits of these modules' lists as an overlay; empty if there are none.

    Raises:
        OptionError: a script added a name to two lists, or an entry that is not a name.

    Warns:
        AmpWarning: torch has no function of that name.
    """
    edits = {_namespace(module.MODULE): _edits(module) for module in modules}
    rules = shipped().for_half(torch.float16)
    for function, entry in edits["torch.nn.functional"].items():
        for other in _CALLED_BY_FUNCTIONAL:
            if Path(other, function) in rules:
                edits[other].setdefault(function, entry)
    overlay: dict[str, dict[str, list[Any]]] = {}
    for namespace, functions in edits.items():
        for function, (listed, instead) in functions.items():
            item = {"name": function, "instead": instead} if instead else function
            overlay.setdefault(listed, {}).setdefault(namespace, []).append(item)
    return overlay


#: Name of one of ampatch's lists; for a banned function, also what to use instead.
_Entry = tuple[str, str | None]


def _edits(module: Any) -> dict[str, _Entry]:
    """Returns each function whose list has changed, with its current list."""
    edits: dict[str, _Entry] = {}
    started = {name: _functions(items) for name, items in starting_lists(module.MODULE).items()}
    for name, functions in started.items():
        edits.update((function, (UNLISTED, None)) for function in functions - _functions(getattr(module, name)))
    added: dict[str, str] = {}
    for name, functions in started.items():
        for item in getattr(module, name):
            function, instead = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
            if not isinstance(function, str):
                raise OptionError(f"{module.__name__}.{name} holds {item!r}; expected the name of a function.")
            if function not in functions:
                if added.setdefault(function, name) != name:
                    raise OptionError(
                        f"{function!r} was put into {module.__name__}.{added[function]} and into {name}; take it "
                        "out of one of them."
                    )
                if hasattr(module.MODULE, function):
                    edits[function] = (_TREATMENTS[name].value, instead)
                else:  # not an error, as in Apex: another torch may have it
                    hint = did_you_mean(function, dir(module.MODULE))
                    warn(f"{module.__name__}.{name} holds {function!r}, which this torch does not have.{hint}")
    return edits


def _functions(items: Iterable[Any]) -> set[Any]:
    """Returns the names in a list; an entry of a banned function is a pair of name and message."""
    return {item[0] if isinstance(item, tuple) and item else str(item) for item in items}


def _names_of(rules: Mapping[Path, Rule], namespace: str) -> dict[str, Treatment]:
    return {path.name: rule.treatment for path, rule in rules.items() if path.namespace == namespace}


def _namespace(module: Any) -> str:
    """Returns the dotted path of a module, or of a class of torch."""
    return str(module.__name__) if isinstance(module, ModuleType) else f"torch.{module.__name__}"
