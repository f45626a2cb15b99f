"""Puts wrappers in place of functions that have a rule or were registered.

Owns the places where code finds a function: its namespace, names under which other modules imported it before, and
modules that are imported later. Must install through the ledger only. Must not know how wrappers cast.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import wrapt
from torch import Tensor, nn

from ampatch import compilers
from ampatch.cast_lists.list_edits import Edit
from ampatch.cast_lists.lists import PEERS, CastLists, peer
from ampatch.cast_lists.paths import Path, PathError, find_owner, prefixes
from ampatch.cast_lists.rules import Rule, Treatment, place, unlistable_reason
from ampatch.cast_lists.spellings import called_by, is_in_place
from ampatch.errors import AmpWarning, did_you_mean
from ampatch.function_wrapper import FunctionWrapper, unwrapped
from ampatch.ledger import PatchLedger, RefusedError, bindings, loaded_modules
from ampatch.native.calls import Accelerator
from ampatch.patching import beside_half_weights, thread_rules
from ampatch.patching.adapters import UNCHANGED, Adapter, Adapters, Function, InHalf, is_looked_up
from ampatch.patching.container_functions import replace_in_containers
from ampatch.patching.function_places import bound_methods, rebound, swept_modules
from ampatch.patching.thread_rules import Token
from ampatch.patching.wrappers import FunctionInHalf, HalfModelFunction, PatchedFunction, Reason, overridable
from ampatch.switch import Switch, is_in_half
from ampatch.torch_private.operators import LINEAR

_W = TypeVar("_W", bound=PatchedFunction)

# The rule of a function in each part of a model, and the session's under None; None for no rule.
_RulesByToken = Mapping[Token | None, Rule | None]


@dataclass(frozen=True, slots=True)
class Registration:
    """A function that the user registered before ``initialize``; it takes precedence over the lists.

    Attributes:
        owner: module or class that holds the function.
        name: name of the function there.
        treatment: treatment of the function's arguments.
        dtype: half type to cast to instead of the session's, for the whitelist; None for the session's.
    """

    owner: object
    name: str
    treatment: Treatment
    dtype: torch.dtype | None = None

    @property
    def path(self) -> Path:
        """Path of the function, for messages."""
        return Path(getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", repr(self.owner))), self.name)

    @property
    def rule(self) -> Rule:
        """Rule of the function, apart from the half type."""
        return Rule(self.path, self.treatment, "registered")

    def as_edit(self) -> Edit:
        """Returns the registration as an edit of the lists, for warnings about edits."""
        return Edit(self.path, unwrapped(getattr(self.owner, self.name)), self.rule)


class Wrappers:
    """The wrappers that one session has made, and the names that are bound to them.

    Args:
        ledger: records every name that is bound.
    """

    def __init__(self, ledger: PatchLedger) -> None:
        self._ledger = ledger
        # Wrappers of functions in modules, by the original's id: one for each function, however many names it has.
        self._of_functions: dict[int, FunctionWrapper] = {}
        # The latest wrapper of each method, by the original's id.
        self._of_methods: dict[int, FunctionWrapper] = {}
        # All wrappers, those of methods included, by their own id.
        self._installed: dict[int, FunctionWrapper] = {}

    def __len__(self) -> int:
        """Returns the number of functions that are wrapped, each counted once however many names it has."""
        return len(self._installed)

    def add(self, original: Function, wrapper: FunctionWrapper, *, is_method: bool) -> None:
        """Remembers a new wrapper of a function."""
        self._installed[id(wrapper)] = _alive[id(wrapper)] = wrapper
        (self._of_methods if is_method else self._of_functions)[id(original)] = wrapper

    def of_function(self, original: object) -> FunctionWrapper | None:
        """Returns the wrapper of a function in a module; None if it has none."""
        return self._of_functions.get(id(original))

    def original_of(self, function: object) -> object:
        """Returns the original of a wrapper of this session, and any other object unchanged."""
        return unwrapped(function) if self._installed.get(id(function)) is function else function

    def rebind(self, owners: Collection[object]) -> None:
        """Binds names in ``owners`` that still hold an original to its wrapper.

        Does the same for names that still hold a wrapper of an earlier session; without a rule they get the original. A
        method that was bound earlier, as in ``relu = Relu.apply``, is bound again.
        """
        kept = {key: wrapper for key, wrapper in list(_alive.items()) if key not in self._installed}
        wanted = {key: wrapper.original for key, wrapper in (self._of_methods | self._of_functions).items()}
        for owner, name, found in bindings(owners, {**wanted, **kept}):
            original = unwrapped(found)
            wrapper = self._of(original)
            # An owner that does not store its attributes itself, or that nobody may write to, keeps what it has.
            with contextlib.suppress(AttributeError, RefusedError):
                if original is not found:
                    setattr(owner, name, original)
                if wrapper is not None:
                    self._ledger.set(owner, name, wrapper)
        for owner, name, method in bound_methods(owners, self._of_methods):
            with contextlib.suppress(AttributeError, RefusedError):
                bound = rebound(method)
                if bound is not method:
                    self._ledger.set(owner, name, bound)

    def rebind_model(self, model: nn.Module) -> None:
        """Rebinds the names in a model's modules, and functions in their containers, closures and traced graphs.

        Also changes those in the Python modules that define the modules' classes, such as tables of activations.
        """
        modules = list(model.modules())
        self.rebind(modules)
        homes = {base.__module__ for kind in set(map(type, modules)) for base in kind.__mro__}
        of_users = (name for name in homes & sys.modules.keys() if name.partition(".")[0] not in _NOT_USERS)
        for holder in (*modules, *map(sys.modules.__getitem__, of_users)):
            if replace_in_containers(holder, self._replacement_of):
                self._ledger.on_undo(functools.partial(_restore, weakref.ref(holder)), holder)

    def _replacement_of(self, value: object) -> object:
        """Returns the wrapper of a function, and any other value unchanged; binds a method again, as `rebind` does.

        For a wrapper of an earlier session, returns this session's wrapper of its original, or else the original.
        """
        if type(value) is types.MethodType:
            return rebound(value)
        original = unwrapped(value)
        return self._of(original) or original

    def _of(self, value: object) -> FunctionWrapper | None:
        return self._of_functions.get(id(value)) or self._of_methods.get(id(value))

    def release(self, owners: Iterable[object]) -> None:
        """Puts the originals back where ``owners`` and modules still hold wrappers. Call it after the ledger's undo.

        The session drops its wrappers first. If no wrapper is alive after that, no module holds one, and this skips the
        search.
        """
        dropped = list(self._installed)
        self._of_functions.clear()
        self._of_methods.clear()
        self._installed.clear()
        kept = {key: wrapper for key in dropped if (wrapper := _alive.get(key)) is not None}
        if kept:
            for owner, name, held in bindings([*loaded_modules("ampatch"), *owners], kept):
                with contextlib.suppress(AttributeError):  # as in `rebind`; what it keeps calls the original
                    setattr(owner, name, unwrapped(held))
            self._installed.update(kept)


@dataclass(eq=False)
class FunctionPatches:
    """The functions that one session has patched.

    Args:
        ledger: records everything installed.
        adapters: maker of the adapters.
        accelerator: object that makes wrappers run in C++, if C++ is in use.
        switch: switch of the session.
        for_half_models: True for models with half weights: applies only the rules of functions that need float32, and
            casts tensors that meet a half weight.

    Attributes:
        wrappers: the wrappers of these functions.
        fuses_linear: True if linear layers that the lists cast to half may become one node.
    """

    ledger: PatchLedger
    adapters: Adapters
    accelerator: Accelerator
    switch: Switch
    for_half_models: bool = False

    def __post_init__(self) -> None:
        self.fuses_linear = False
        self.wrappers = Wrappers(self.ledger)
        # Rules of modules that are not imported yet, by namespace.
        self._later: dict[str, list[Rule]] = {}
        # The lists whose patterns match functions of modules that are imported later.
        self._lists = CastLists({})
        self._lists_of_parts: Mapping[Token, CastLists] = {}
        # The rules of functions that parts of a model treat differently than the session does, by path.
        self._differing: dict[Path, _RulesByToken] = {}
        # What models with half weights do about functions that demand arguments of one type, by the original's id.
        self._half_functions: dict[int, tuple[Path, InHalf]] = {}

    def install(
        self,
        lists: CastLists,
        registered: Iterable[Registration],
        lists_of_parts: Mapping[Token, CastLists] = types.MappingProxyType({}),
    ) -> None:
        """Patches every function that has a rule or was registered. Modules not imported yet are patched on import.

        Args:
            lists: the rules in force, with the patterns that imports may match.
            registered: the functions that the user registered.
            lists_of_parts: the lists of parts of a model that have rules of their own.

        Raises:
            CastListError: a rule has a condition on an argument that its function does not have.
        """
        # The first patch of a function stays, under every name of the function. So registrations come before the lists,
        # and later registrations before earlier ones.
        for known in reversed(list(registered)):
            adapter = functools.partial(self.adapters.for_registration, known.rule, known.dtype)
            reason = _reason(known.path, f"registered for the {known.treatment.value}")
            self._patch(known.owner, known.name, adapter, reason, treatments=[known.treatment])
        owner_of = functools.cache(find_owner)
        half = self.adapters.half_dtype
        rules = lists.for_half(half)
        # A function keeps its first patch. So functions that only parts list come last: they may have other names here.
        of_parts = {token: each.for_half(half) for token, each in lists_of_parts.items()}
        only_in_parts = self._note_differing(rules, of_parts)
        in_half = list(beside_half_weights.functions()) if self.for_half_models else []
        for path, treatment in in_half:
            self._half_functions[id(getattr(owner_of(path.namespace), path.name))] = path, treatment
        for rule in filter(self._applies_anywhere, [*rules.values(), *only_in_parts]):
            owner = owner_of(rule.path.namespace)
            if owner is None:
                self._later.setdefault(rule.path.namespace, []).append(rule)
            else:
                self._patch_rule(owner, rule)
        for path in () if self.for_half_models else _cast_by_autocast(self.adapters.device_types) - rules.keys():
            owner = owner_of(path.namespace)
            if id(getattr(owner, path.name, None)) in overridable():  # unless another library has replaced it
                self._patch(owner, path.name, lambda _: UNCHANGED, _reason_of(path, None))
        for path, treatment in in_half:
            adapter = functools.partial(self.adapters.in_half, treatment, path)
            self._patch(owner_of(path.namespace), path.name, adapter, _reason_in_half(path))
        self.wrappers.rebind(swept_modules())
        self._lists, self._lists_of_parts = lists, lists_of_parts
        packages = {namespace.partition(".")[0] for namespace in self._later}
        packages.update(*(each.packages() for each in (lists, *lists_of_parts.values())))
        if packages:
            finder = _Announcer(packages, self.patch_imported)
            sys.meta_path.insert(0, finder)
            self.ledger.on_undo(finder.remove)

    def add_tables(self, tables: Sequence[Tensor]) -> bool:
        """Gives sums of half activations and tables a half result from now on, in models with half weights.

        Returns:
            True if it has patched addition: then names in models must be bound again.
        """
        known = self.adapters.tables
        new = [table for table in tables if not any(each() is table for each in known)]
        is_first = bool(new) and not known
        if is_first:
            for path in beside_half_weights.ADDITION:
                adapter = functools.partial(self.adapters.in_half, InHalf.ADD_TABLE, path)
                self._patch(find_owner(path.namespace), path.name, adapter, _reason_in_half(path))
            self.wrappers.rebind(swept_modules())
            compilers.trace_additions(self.ledger, is_in_half, is_looked_up, known)
            compilers.forget_compiled()
        known.extend(map(weakref.ref, new))
        return is_first

    def _note_differing(
        self, rules: Mapping[Path, Rule | None], of_parts: Mapping[Token, Mapping[Path, Rule | None]]
    ) -> list[Rule]:
        """Notes the functions that parts treat differently; returns a part's rule for each that the session lacks."""
        new = []
        for path in dict.fromkeys(path for each in of_parts.values() for path in (*rules, *each)):
            here = rules.get(path)
            found: _RulesByToken = {None: here, **{token: each.get(path) for token, each in of_parts.items()}}
            differing = {token: rule for token, rule in found.items() if token is None or rule != here}
            if len(differing) > 1:
                self._differing[path] = differing
                if here is None:
                    new += [rule for rule in differing.values() if rule is not None][:1]
        return new

    def in_half(self, original: Function) -> tuple[Path, InHalf] | None:
        """Returns how a function's arguments get one type in models with half weights; None if they stay as they are.

        Args:
            original: the function without amp.
        """
        return self._half_functions.get(id(original))

    def applies(self, rule: Rule) -> bool:
        """Returns True if the session patches the function of a rule."""
        # An in-place function on a half tensor cannot store a float32 result; torch's own error says so.
        return not self.for_half_models or (rule.is_for_half_weights and not is_in_place(rule.path.name))

    def _applies_anywhere(self, rule: Rule) -> bool:
        """Returns True if the session or a part of a model patches the function of a rule."""
        return any(each is not None and self.applies(each) for each in self._rules_of(rule).values())

    def patch_imported(self, module: object) -> None:
        """Patches the functions of modules that were imported since `install`.

        Args:
            module: module whose import has just ended.

        Warns:
            AmpWarning: a rule's function is missing from its module, or does not fit the rule.
        """
        if not self.switch.active:
            return
        by_pattern = self._patch_matched(module)
        for namespace in list(self._later):
            if _is_being_imported(namespace, but=module):
                continue
            try:
                owner = find_owner(namespace)
            except PathError as error:
                source = self._later.pop(namespace)[0].source
                warnings.warn(f"{source}: {error}", AmpWarning, stacklevel=2)
                continue
            if owner is not None:  # None: only a parent package was imported
                for rule in self._later.pop(namespace):
                    if rule.path not in by_pattern:
                        self._patch_imported_rule(owner, rule)
                self.wrappers.rebind(swept_modules())

    def _patch_matched(self, module: object) -> Mapping[Path, Rule | None]:
        """Patches the functions of a module that patterns match; returns the rule of each, None for no rule."""
        every = [self._lists, *self._lists_of_parts.values()]
        if not any(each.waiting for each in every) or not isinstance(module, types.ModuleType):
            return {}
        matched = sorted(set().union(*(each.matched_in(module) for each in every)))
        if not matched:
            return {}
        found, *others = [each.late_rules(self.adapters.half_dtype, module, matched) for each in every]
        only_in_parts = self._note_differing(found, dict(zip(self._lists_of_parts, others, strict=True)))
        listed = filter(None, (*found.values(), *only_in_parts))
        rules = list(filter(self._applies_anywhere, listed))
        for rule in rules:
            self._patch_imported_rule(find_owner(rule.path.namespace), rule)
        if rules:
            self.wrappers.rebind(swept_modules())
        return found

    def _patch_imported_rule(self, owner: object, rule: Rule) -> None:
        """Patches a function that could not be checked when the list was read; warns, so that the import succeeds."""
        name = rule.path.name
        if not hasattr(owner, name):
            if not rule.optional:
                missing = f"{rule.path.namespace!r} was imported and has no {name!r}.{did_you_mean(name, dir(owner))}"
                warnings.warn(f"{rule.source}: {missing}", AmpWarning, stacklevel=2)
            return
        for each in filter(None, self._rules_of(rule).values()):
            unfit = unlistable_reason(rule.path, owner, getattr(owner, name), each)
            if unfit is not None:
                warnings.warn(f"{each.source}: {unfit}", AmpWarning, stacklevel=2)
                return
        self._patch_rule(owner, rule)

    def _rules_of(self, rule: Rule) -> _RulesByToken:
        """Returns all rules of a function, given one of them."""
        return self._differing.get(rule.path, {None: rule})

    def _patch_rule(self, owner: object, rule: Rule) -> None:
        path, rules = rule.path, self._rules_of(rule)

        def reason_in_force() -> str:
            token = thread_rules.in_force()
            in_part = token in rules
            return _reason_of(path, rules[token if in_part else None], " in this part of the model" if in_part else "")

        reason = reason_in_force() if len(rules) == 1 else reason_in_force
        treatments = [None if each is None else each.treatment for each in rules.values()]
        adapter = functools.partial(self._by_rules, rules)
        self._patch(owner, path.name, adapter, reason, rule.needs_float32, treatments)

    def _by_rules(self, rules: _RulesByToken, original: Function) -> Adapter:
        """Returns the adapter of a function under its rules."""

        def by(rule: Rule | None) -> Adapter:
            if rule is not None and self.applies(rule):
                return self.adapters.for_rule(rule, original)
            in_half = self.in_half(original)
            if in_half is None:
                return UNCHANGED
            path, treatment = in_half
            return self.adapters.in_half(treatment, path, original)

        adapters = {token: by(rule) for token, rule in rules.items()}
        of_session = adapters[None]
        if len(rules) == 1:
            return of_session
        of_parts = {token: each for token, each in adapters.items() if token is not None}
        return Adapter.choosing(thread_rules.choosing(of_session, of_parts), *adapters.values())

    def _patch(
        self,
        owner: object,
        name: str,
        make_adapter: Callable[[Function], Adapter],
        reason: Reason,
        needs_float32: Sequence[str] = (),
        treatments: Sequence[Treatment | None] = (None,),
    ) -> None:
        held = inspect.getattr_static(owner, name, None)  # unbound, so that a staticmethod stays one
        kind = type(held) if isinstance(held, (staticmethod, classmethod)) else None
        found = held.__func__ if isinstance(held, (staticmethod, classmethod)) else getattr(owner, name)
        original: Function = self.wrappers.original_of(found)  # type: ignore[assignment]
        if found is not original and name in vars(owner):
            return  # patched already: registered, or under another name in its owner
        is_class = isinstance(owner, type)
        wrapper = None if is_class else self.wrappers.of_function(original)
        if wrapper is None:
            # Under this name pickle finds the wrapper while it is installed, and the original otherwise.
            if isinstance(owner, type):
                module, qualified = owner.__module__, f"{owner.__qualname__}.{name}"
            else:
                module, qualified = getattr(owner, "__name__", getattr(original, "__module__", "")), name
            adapter = make_adapter(original)
            if name in _WRITING or module.partition(".")[0] != "torch":
                adapter = replace(adapter, plain_cast=None, may_write=True)
            known_as = Path(f"{module}.{qualified}".removesuffix(f".{name}"), name)
            need_block = (_needs_block(original, known_as, treatment) for treatment in treatments)
            needs_block = not self.for_half_models and any(need_block)
            wrapper = self._wrapper(original, adapter, reason, needs_float32, needs_block)
            wrapper.__module__, wrapper.__qualname__ = module, qualified
            self.wrappers.add(original, wrapper, is_method=is_class)
        self.ledger.set(owner, name, wrapper if kind is None else kind(wrapper))

    def _wrapper(
        self, original: Function, adapter: Adapter, reason: Reason, needs_float32: Sequence[str], needs_block: bool
    ) -> PatchedFunction:
        """Returns a new wrapper of a function."""
        if not self.for_half_models:
            self.fuses_linear |= adapter.call is not None
            if needs_block and isinstance(original, types.FunctionType):
                adapter = replace(adapter, plain_cast=None)
            return self._accelerated(PatchedFunction, original, adapter, reason, needs_block)
        if not needs_float32:
            return self._accelerated(FunctionInHalf, original, adapter, reason)
        otherwise, in_half = None, self.in_half(original)
        if in_half is not None:
            path, treatment = in_half
            beside = self.adapters.in_half(treatment, path, original)
            otherwise = self._accelerated(FunctionInHalf, original, beside, _reason_in_half(path))
        kind = HalfModelFunction.derived()
        return kind(original, adapter, self.switch, reason, frozenset(needs_float32), otherwise)

    def _accelerated(
        self, kind: type[_W], original: Function, adapter: Adapter, reason: Reason, needs_block: bool = False
    ) -> _W:
        """Returns a wrapper of a class, whose calls C++ runs if it can."""
        plain_cast = adapter.plain_cast
        derived = kind.derived() if plain_cast is None else self.accelerator.class_of(kind)
        made = derived(original, adapter, self.switch, reason, needs_block)
        if plain_cast is not None:
            self.accelerator.accelerate(made, plain_cast, str(reason))  # only parts' rules have a function for a reason
        return made


@functools.cache
def _lists_of_autocast(kind: str) -> Mapping[Path, Treatment]:
    """Returns what torch's autocast does to which functions on devices of a type."""
    name = f"torch_autocast_{kind}"
    return {path: rule.treatment for path, rule in peer(name).for_half(torch.float16).items()} if name in PEERS else {}


def _cast_by_autocast(kinds: Iterable[str]) -> set[Path]:
    return {
        path for kind in kinds for path, known in _lists_of_autocast(kind).items() if known is not Treatment.PROMOTE
    }


# Functions of torch that multiply matrices inside C++, beside those of torch.linalg.
_MULTIPLYING = frozenset(
    {"chain_matmul", "corrcoef", "cov", "einsum", "matrix_exp", "matrix_power", "pinverse", "tensordot"}
)


@functools.cache
def _multiplies(function: Function) -> bool:
    """Returns True if a function of torch in Python calls a linear layer's function."""
    return id(LINEAR) in called_by(function)


def _needs_block(original: Function, path: Path, treatment: Treatment | None) -> bool:
    """Returns True if a function must run in a region without casts, whatever its arguments are cast to."""
    known = {_lists_of_autocast(kind).get(path) for kind in ("cpu", "cuda")} - {None, Treatment.PROMOTE, treatment}
    if isinstance(original, types.FunctionType):
        if treatment is Treatment.BLACKLIST:  # all of it runs in float32
            return id(original) not in overridable() or path.name in _MULTIPLYING or _multiplies(original)
        return treatment is None and bool(known)
    if treatment is not Treatment.BLACKLIST:
        return bool(known)
    return bool(known) or path.namespace == "torch.linalg" or path.name in _MULTIPLYING


# Functions of torch that may write to an argument although their name does not say so: with max_norm=.
_WRITING = frozenset({"embedding", "embedding_bag"})

# Packages whose containers are not user code.
_NOT_USERS = frozenset({"torch", "ampatch", "builtins", "abc", "typing"})

# All wrappers that are alive, including those of earlier sessions, by their id.
_alive: weakref.WeakValueDictionary[int, FunctionWrapper] = weakref.WeakValueDictionary()


def _restore(reference: weakref.ref[object]) -> None:
    """Puts originals back where a holder's containers and closures, or its traced graph, have wrappers."""
    holder = reference()
    if holder is not None:
        replace_in_containers(holder, _without_wrapper)


def _without_wrapper(value: object) -> object:
    if type(value) is types.MethodType:
        function: Any = unwrapped(value.__func__)
        return value if function is value.__func__ else types.MethodType(function, value.__self__)
    return unwrapped(value)


class _Announcer:
    """Tells a live session about each imported module of some packages; it is first in ``sys.meta_path``.

    Finds no module itself. The names of a package's modules are not known before they are imported.

    Args:
        packages: names of the packages.
        imported: called with each of their modules, once its import has ended.
    """

    def __init__(self, packages: Collection[str], imported: Callable[[types.ModuleType], None]) -> None:
        self._packages, self._imported = packages, imported
        # The modules with a hook. wrapt's hooks cannot be removed, and each runs once.
        self._hooked: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - an interface
        """Registers the hook; returns None, so that the finders behind this one find the module."""
        if name.partition(".")[0] in self._packages and name not in self._hooked:
            self._hooked.add(name)
            wrapt.register_post_import_hook(self._tell, name)

    def _tell(self, module: types.ModuleType) -> None:
        self._hooked.discard(module.__name__)
        self._imported(module)

    def remove(self) -> None:
        """Takes itself out of ``sys.meta_path``, where other code may have removed it."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


def _is_being_imported(namespace: str, but: object) -> bool:
    """Returns True if a namespace's module is still being imported. ``but`` is a module known to be complete."""
    module = next((sys.modules[name] for name in reversed(prefixes(namespace)) if name in sys.modules), None)
    spec = getattr(module, "__spec__", None)
    # Compares specs, since a module may have put another object in its own place, and given it its spec.
    return spec is not getattr(but, "__spec__", None) and bool(getattr(spec, "_initializing", False))


def _reason(path: Path, listed: str) -> str:
    return f"ampatch: {path} is {listed}."


def _reason_in_half(path: Path) -> str:
    return f"ampatch: {path} casts floating arguments beside half ones, in models with half weights."


def _reason_of(path: Path, rule: Rule | None, where: str = "") -> str:
    source = "" if rule is None else f" ({rule.source})"
    return _reason(path, f"{place(rule)}{where}{source}")
