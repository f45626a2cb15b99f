"""The effective policy: all that decides in which type a function computes, as plain data with a hash.

`amp.state_dict(include_policy=True)` saves it. Owns its format and its canonical form. Must never change a session or a
loss scale, nor decide what a rule does.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from ampatch.cast_lists import patterns
from ampatch.cast_lists.annotations import unlisting, user_entries
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, find_owner_or, function_key
from ampatch.cast_lists.rules import FLOAT32, UNLISTED, Rule, Treatment, typed_options
from ampatch.function_wrapper import unwrapped
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES, HALVES
from ampatch.opt_levels import dtype_name
from ampatch.patching.function_patches import Registration
from ampatch.runtime import decorated
from ampatch.session import Session
from ampatch.settings import SCALE_ARGUMENTS
from ampatch.version import __version__
from ampatch.weights.conversion_plan import KeepFloat32

#: The key of the policy in the dict of `amp.state_dict`.
KEY = "policy"

#: The number of the format. Raise it if a reader of today would misread what is written tomorrow.
FORMAT = 1

#: Sections whose rows are sorted by name, and those whose rows stand in the order in which they apply.
BY_NAME, IN_ORDER = ("rules", "decorated"), ("patterns", "modules")

#: The source of a rule that comes with ampatch.
SHIPPED = "shipped"

#: What is decided about a function, such as "whitelist", and the file and line that say so.
Decided = tuple[str, str]


def effective(session: Session) -> dict[str, Any]:
    """Returns the effective policy of a session as plain data: text, numbers, booleans, None, lists and dicts.

    Tables are lists of rows, since ``torch.distributed.checkpoint`` loads only dicts with the same keys.

    Returns:
        A dict with "format", "sha256" (see `digest`), "versions" of ampatch and torch, and lists of rows:

        - "settings": the arguments of ``amp.initialize`` that have an effect, each with its value.
        - "rules": each function that a list names or that was registered.
        - "patterns": each pattern. If several match a function, the last decides.
        - "modules": each rule of parts of a model, in an order in which the last decides.
        - "decorated": each decorated function. All rows of rules have a name, a decision and its source.
        - "overlays": the user's lists, each with its text.
    """
    in_order = _patterns(session)
    policy = {
        "format": FORMAT,
        "sha256": "",
        "versions": {"ampatch": __version__, "torch": torch.__version__},
        "settings": list(_settings(session).items()),
        "rules": _rows(_rules(session, [path for path, _ in in_order])),
        "decorated": _rows(_decorated(session)),
        "patterns": [[str(path), *decided] for path, decided in in_order],
        "modules": list(_of_modules(session)),
        "overlays": list(zip(session.settings.lists.files, session.settings.lists.texts, strict=True)),
    }
    plain: dict[str, Any] = json.loads(json.dumps(policy, allow_nan=False))  # torch's version is no plain str
    return {**plain, "sha256": digest(plain)}


def digest(policy: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a policy's canonical form, as hexadecimal digits.

    The form is JSON of the settings and of the names and decisions of all rules. Sources, versions and overlays are not
    in it, so that it stays the same if a file is reordered or moved.
    """
    pattern_paths = [Path.of(name) for name, _, _ in policy["patterns"]]
    form: dict[str, Any] = {
        "format": policy["format"],
        # A file format may turn 2.0 into 2.
        "settings": sorted([name, _whole(value)] for name, value in policy["settings"]),
        **{section: sorted([name, decision] for name, decision, _ in policy[section]) for section in BY_NAME},
        **{section: [[name, decision] for name, decision, _ in policy[section]] for section in IN_ORDER},
    }
    # A function that was taken off all lists is like one that was never listed, unless a pattern would list it.
    form["rules"] = [
        [name, decision]
        for name, decision in form["rules"]
        if decision != UNLISTED or is_covered(Path.of(name), pattern_paths)
    ]
    return hashlib.sha256(json.dumps(form, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_covered(path: Path, pattern_paths: Iterable[Path]) -> bool:
    """Returns True if one of the patterns matches a path by its text."""
    return any(patterns.covers_by_name(pattern, path) for pattern in pattern_paths)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rows(decided: Mapping[Any, Decided]) -> list[list[str]]:
    return sorted([str(name), *each] for name, each in decided.items())


def _settings(session: Session) -> dict[str, Any]:
    """Returns the arguments that have an effect in a session."""
    settings, properties, scale = session.settings, session.settings.properties, session.settings.scale_policy
    weights, outputs = properties.cast_model_type, settings.cast_model_outputs
    if outputs is None and weights is not None:
        outputs = torch.float32
    told = {
        "opt_level": properties.opt_level,
        "half_dtype": dtype_name(properties.half_dtype) if session.settings.patches_any else None,
        "patch_torch_functions": properties.patch_torch_functions,
        "cast_model_type": None if weights is None else dtype_name(weights),
        "keep_batchnorm_fp32": bool(properties.keep_batchnorm_fp32),
        "keep_fp32": _names(settings.keep_fp32),
        "master_weights": properties.master_weights or False,
        "cast_model_outputs": None if outputs is None else dtype_name(outputs),
        "allow_banned": settings.allow_banned,
        "loss_scale": properties.loss_scale,
    }
    # These are left out without a value, so that the hashes of older policies stay.
    buffers = settings.cast_buffers
    optional: dict[str, Any] = {
        "fused_linear": settings.fused_linear,
        "float32_outputs": _names(settings.float32_outputs),
        "optimizer_state": settings.optimizer_state if settings.optimizer_state != "float32" else None,
        "cast_buffers": buffers if isinstance(buffers, bool) else sorted(buffers),
    }
    told |= {name: value for name, value in optional.items() if value}
    if not scale.dynamic:
        return {**told, "check_finite": settings.check_finite}  # a dynamic scale always checks
    return {**told, **{name: _finite(getattr(scale, name)) for name in SCALE_ARGUMENTS}}


def _names(kept: KeepFloat32) -> list[str]:
    """Returns names, patterns and classes as sorted text: a set of names has another order in each process."""
    return sorted({one if isinstance(one, str) else _full_name(one) for one in kept})


def _rules(session: Session, pattern_paths: Sequence[Path]) -> dict[Path, Decided]:
    """Returns what is decided about each function that a list names, or that was registered."""
    if not session.settings.patches_any:
        return {}
    lists, half_dtype = session.settings.lists, session.settings.properties.half_dtype
    in_force, before = lists.for_half(half_dtype), shipped().for_half(half_dtype)
    named = {*lists.named, *before, *(path for path, _ in lists.rules)}
    named |= {path for changes in lists.waiting for (path, _), _ in changes if not patterns.is_pattern(path)}
    ids_shipped = {id(rule) for rule in before.values()}  # not equality: a user's file may have a shipped one's name
    found: dict[Path, Decided] = {}
    removed: list[Path] = []
    for path in named:
        waits = bool(lists.waiting) and find_owner_or(path.namespace) is None
        rule = _by_text(session, path) if waits else in_force.get(path)
        was = before.get(path)
        if rule is not None and session.casts.applies(rule):
            found[path] = _decision(rule, session), SHIPPED if id(rule) in ids_shipped else rule.source
        elif rule is None and (is_covered(path, pattern_paths) or (was is not None and session.casts.applies(was))):
            removed.append(path)
    entries = user_entries(lists) if removed else []
    for path in removed:
        entry = unlisting(path, dtype_name(half_dtype), entries)
        found[path] = UNLISTED, "cast_lists" if entry is None else entry.source
    if session.settings.patches_functions:
        _register(found, session.casts.registered, half_dtype)
    return _under_shipped_names(found)


def _under_shipped_names(found: dict[Path, Decided]) -> dict[Path, Decided]:
    """Leaves out further names of shipped functions, which the user's files or registrations may spell otherwise."""
    names = set(shipped().named)
    others = [path for path in found if path not in names]
    functions = {function_key(path) for path in names} if others else set()
    left_out = [
        path
        for path in others
        if function_key(path) in functions and isinstance(find_owner_or(path.namespace), types.ModuleType)
    ]
    return {path: decided for path, decided in found.items() if path not in left_out}


def _by_text(session: Session, path: Path) -> Rule | None:
    """Returns the rule of a function whose module is not imported yet, by the texts of patterns."""
    lists, half_dtype = session.settings.lists, session.settings.properties.half_dtype
    rule = lists.rules.get((path, half_dtype))
    for changes in lists.waiting:
        in_file = {named: change for (named, dtype), change in changes if dtype is half_dtype}
        covering = [each for each in in_file if patterns.is_pattern(each) and patterns.covers_by_name(each, path)]
        deciding = path if path in in_file else covering[-1] if covering else None
        rule = rule if deciding is None else in_file[deciding]
    return rule


def _register(found: dict[Path, Decided], registered: Sequence[Registration], half_dtype: torch.dtype) -> None:
    """Puts registrations in place of the rules of their functions; the last registration of a function decides."""
    by_function = grouped((function_key(path), path) for path in found)
    for known in registered:
        home = Path(_full_name(known.owner), known.name)
        function = unwrapped(getattr(known.owner, known.name, None))
        # Each class has a wrapper of its own; a function in modules has one for all its names.
        paths = [] if isinstance(known.owner, type) else by_function.setdefault(id(function), [])
        paths += [home] if home not in paths else []
        found.update(dict.fromkeys(paths, (_casting(known.treatment.value, known.dtype, half_dtype), "registered")))


def _decorated(session: Session) -> dict[str, Decided]:
    if not session.settings.patches_functions:
        return {}
    half_dtype = session.settings.properties.half_dtype
    found = {}
    for name, kinds in decorated().items():
        texts = [
            _casting(Treatment.WHITELIST.value, HALF_DTYPES[kind], half_dtype) if kind in HALF_DTYPES else kind
            for kind in kinds
        ]
        found[_of_main(name)] = " and ".join(dict.fromkeys(texts)), "decorated"  # several: two functions of one name
    return found


def _casting(treatment: str, dtype: torch.dtype | None, half_dtype: torch.dtype) -> str:
    return treatment if dtype in (None, half_dtype) else f"{treatment} to {dtype_name(dtype)}"


def _patterns(session: Session) -> list[tuple[Path, Decided]]:
    """Returns what each pattern decides, in an order that depends only on the decisions."""
    if not session.settings.patches_any:
        return []
    rules: dict[Path, Rule | None] = {}
    for changes in session.settings.lists.waiting:
        for (path, dtype), rule in changes:
            if dtype is session.settings.properties.half_dtype and patterns.is_pattern(path):
                rules.pop(path, None)  # the later one decides, at its place
                rules[path] = rule
    return _in_order(
        [
            (path, (UNLISTED, "cast_lists") if rule is None else (_decision(rule, session), rule.source))
            for path, rule in rules.items()
            if rule is None or session.casts.applies(rule)
        ]
    )


def _of_modules(session: Session) -> Iterator[list[str]]:
    """Yields a row for each rule of each entry for parts of a model; one for an entry that has no rules."""
    half_dtype, properties = session.settings.properties.half_dtype, session.settings.properties
    if not session.settings.patches_functions and properties.cast_model_type not in HALVES:
        return
    lists, with_formats = session.settings.lists, set()
    if any(entry.formats for entry in lists.modules):
        with_formats = {path for path, rule in lists.for_half(half_dtype).items() if rule.formats is not None}
    for entry in lists.modules:
        if entry.changes is None:
            yield [entry.name, FLOAT32, entry.source]
            continue
        changes = [(path, rule) for (path, dtype), rule in entry.changes if dtype is half_dtype]
        # Functions decide before patterns wherever they stand; the order of patterns counts.
        functions = sorted((each for each in changes if not patterns.is_pattern(each[0])), key=itemgetter(0))
        for path, rule in (*functions, *(each for each in changes if patterns.is_pattern(each[0]))):
            decision, source = (UNLISTED, entry.source) if rule is None else (_decision(rule, session), rule.source)
            yield [f"{entry.name}: {path}", decision, source]
        if entry.formats is not None:
            yield [entry.name, str(entry.formats), entry.source]
            rules = lists.of_module(entry).for_half(half_dtype)
            # Which of two formats holds depends on the order of the files.
            for path in sorted((with_formats & rules.keys()) - dict(changes).keys()):
                yield [f"{entry.name}: {path}", str(rules[path].formats), entry.source]
        elif not changes:
            yield [entry.name, "the session's rules", entry.source]


def _in_order(waiting: list[tuple[Path, Decided]]) -> list[tuple[Path, Decided]]:
    """Sorts patterns by name as far as that changes nothing.

    Two patterns keep their order if they decide differently and may match the same function.
    """
    found = []
    while waiting:
        free = [
            (path, decided)
            for place, (path, decided) in enumerate(waiting)
            if not any(decided[0] != before[0] and patterns.may_share(path, other) for other, before in waiting[:place])
        ]
        found.append(min(free))
        waiting = [each for each in waiting if each != found[-1]]
    return found


def _decision(rule: Rule, session: Session) -> str:
    """Returns the list and the options of a rule, without those that have no effect in the session.

    Left out are the advice in a banned function's error, and ``needs_float32`` if the level patches by the lists.
    """
    need = () if session.settings.patches_functions else sorted(rule.needs_float32)
    return " ".join([rule.treatment.value, *typed_options(rule.when, rule.via_dtype, need, rule.formats)])


def _full_name(owner: object) -> str:
    """Returns the dotted name of a module or class."""
    if isinstance(owner, type):
        return _of_main(f"{owner.__module__}.{owner.__qualname__}")
    return _of_main(str(getattr(owner, "__name__", type(owner).__name__)))


def _of_main(name: str) -> str:
    """Returns a name with the script's module as ``__main__``; spawned processes call it ``__mp_main__``."""
    first, dot, rest = name.partition(".")
    return f"__main__{dot}{rest}" if first == "__mp_main__" else name


def _finite(value: float) -> float | str:
    """Returns a number, or the text "inf": JSON has no infinity."""
    return value if math.isfinite(value) else str(value)
