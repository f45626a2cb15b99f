"""Patched functions: from rules and registrations to wrappers in their places, names bound earlier included.

Owns the knowledge of where a function can be reached from: its namespace, names that other modules imported it under,
modules that are imported later. Installs through the ledger only; how arguments are cast is the wrappers' affair.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import wrapt
from torch import fx, nn

from ampatch.cast_lists.list_edits import Edit
from ampatch.cast_lists.paths import Path, PathError, beneath, find_owner
from ampatch.cast_lists.rules import Rule, Treatment, why_unfit
from ampatch.errors import AmpWarning, did_you_mean
from ampatch.ledger import MISSING, PatchLedger, RefusedError, bindings, loaded_modules, rebind
from ampatch.native.calls import Accelerator
from ampatch.patching.adapters import Adapter, Adapters, Function
from ampatch.patching.kept_functions import Replacement, replace_kept
from ampatch.patching.wrappers import wrap
from ampatch.switch import Switch


@dataclass(frozen=True, slots=True)
class Registration:
    """A function that the user registered before ``initialize``; it takes precedence over the lists.

    Attributes:
        owner: a module, or a class.
        name: the function's name there.
        treatment: what happens to its arguments.
        dtype: a half type to cast to instead of the session's, for the whitelist.
    """

    owner: object
    name: str
    treatment: Treatment
    dtype: torch.dtype | None = None

    @property
    def path(self) -> Path:
        """Where it is, for messages."""
        return Path(getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", repr(self.owner))), self.name)

    def as_edit(self) -> Edit:
        """Returns the same as an edit of the lists, for what is told of edits."""
        rule = Rule(self.path, self.treatment, "registered")
        return Edit(self.path, beneath(getattr(self.owner, self.name)), rule)


class FunctionPatches:
    """The functions that one session has patched.

    Args:
        ledger: takes note of everything installed.
        adapters: turn rules into adapters.
        accelerator: has wrappers run in C++, where that is in use.
        switch: the session's.
    """

    def __init__(self, ledger: PatchLedger, adapters: Adapters, accelerator: Accelerator, switch: Switch) -> None:
        self._ledger = ledger
        self._adapters = adapters
        self._accelerator = accelerator
        self._switch = switch
        # The one wrapper of each function that stands in modules, by the original's id, under whatever names it stands.
        self._wrappers: dict[int, Function] = {}
        # Of methods the last one that it has got, by the original's id.
        self._methods: dict[int, Function] = {}
        # The original of every wrapper, those of methods included, by the wrapper's id.
        self._originals: dict[int, tuple[Function, Function]] = {}
        # Rules of modules that are not imported yet.
        self._later: dict[str, list[Rule]] = {}

    def install(self, rules: Iterable[Rule], registered: Iterable[Registration]) -> None:
        """Patches every function that has a rule or was registered; those of modules not imported yet when they are.

        Raises:
            CastListError: a rule is limited by an argument that its function does not have.
        """
        # What is patched first stays, so that a registration counts more than the lists and than an earlier one, under
        # every name of the function.
        for known in reversed(list(registered)):
            adapter = functools.partial(self._adapters.for_registration, known.path, known.treatment, known.dtype)
            reason = _reason(known.path, f"registered for the {known.treatment.value}")
            self._patch(known.owner, known.name, adapter, reason)
        owner_of = functools.cache(find_owner)
        for rule in rules:
            owner = owner_of(rule.path.namespace)
            if owner is None:
                self._later.setdefault(rule.path.namespace, []).append(rule)
            else:
                self._patch_rule(owner, rule)
        self._rebind_modules()
        for namespace in self._later:
            _watch(namespace, self)

    def rebind(self, owners: Iterable[object]) -> None:
        """Binds names that ``owners`` bound to an original before it was patched to its wrapper.

        So are names that they bound to a wrapper of an earlier session, and kept since.
        """
        kept: dict[int, Function] = {
            id(wrapper): wrapper for wrapper in list(_original_of) if id(wrapper) not in self._originals
        }
        wanted = {key: self._originals[id(wrapper)][1] for key, wrapper in (self._methods | self._wrappers).items()}
        for owner, name, found in bindings(owners, {**wanted, **kept}):
            original = found
            if id(found) in kept:
                original = _original_of[kept[id(found)]]
                setattr(owner, name, original)
            wrapper = self._wrapper_of(original)
            if wrapper is not None:
                # An owner that keeps its attributes elsewhere keeps the original.
                with contextlib.suppress(AttributeError, RefusedError):
                    self._ledger.set(owner, name, wrapper)

    def rebind_model(self, model: nn.Module) -> None:
        """Does what `rebind` does for a model's modules, and for what these keep in containers and partials.

        So are containers in the Python modules of their classes changed, such as tables of activations.
        """
        modules = list(model.modules())
        self.rebind(modules)
        homes = {base.__module__ for kind in set(map(type, modules)) for base in kind.__mro__}
        of_users = [
            sys.modules[name] for name in homes & sys.modules.keys() if name.partition(".")[0] not in _NOT_USERS
        ]
        for holder in (*modules, *of_users):
            if replace_kept(holder, self._replacement_of):
                self._ledger.on_undo(functools.partial(_restore_kept, weakref.ref(holder)), holder)
            if isinstance(holder, fx.GraphModule) and _retarget(holder, self._replacement_of):
                self._ledger.on_undo(functools.partial(_restore_graph, weakref.ref(holder)), holder)

    def _replacement_of(self, value: object) -> object | None:
        """Returns the wrapper of a function; for a wrapper of an earlier session that one of this, or the original."""
        wrapper = self._wrapper_of(value)
        if wrapper is not None or id(value) in self._originals:
            return wrapper
        original = _original(value)
        return None if original is None else self._wrapper_of(original) or original

    def _wrapper_of(self, value: object) -> object | None:
        wrapper = self._wrappers.get(id(value)) or self._methods.get(id(value))
        return wrapper if wrapper is not None and self._originals[id(wrapper)][1] is value else None

    def release(self, owners: Iterable[object]) -> None:
        """After the ledger was undone: ``owners`` and modules that took a wrapper from its place get the original.

        The session lets go of its wrappers first. If none of them is alive then, no module holds one, and the search
        is left out.
        """
        released = [(weakref.ref(wrapper), original) for wrapper, original in self._originals.values()]
        self._wrappers.clear()
        self._methods.clear()
        self._originals.clear()
        for reference, original in released:
            wrapper = reference()
            if wrapper is not None:
                self._originals[id(wrapper)] = (wrapper, original)
        if self._originals:
            wrappers: dict[int, object] = {key: wrapper for key, (wrapper, _) in self._originals.items()}
            originals: dict[int, object] = {key: original for key, (_, original) in self._originals.items()}
            rebind([*loaded_modules("ampatch"), *owners], wrappers, originals)

    def original_of(self, function: object) -> object:
        """Returns the original of a wrapper; anything else as it is."""
        wrapper, original = self._originals.get(id(function), (function, function))
        return original if wrapper is function else function

    def patch_imported(self, module: object) -> None:
        """Patches the functions of modules that were imported since.

        Args:
            module: the one whose import has just ended.

        Warns:
            AmpWarning: a module lacks what its rule names.
        """
        if not self._switch.active:
            return
        for namespace in list(self._later):
            if _is_being_imported(namespace, but=module):
                continue
            try:
                owner = find_owner(namespace)
            except PathError as error:
                source = self._later.pop(namespace)[0].source
                warnings.warn(f"{source}: {error}", AmpWarning, stacklevel=2)
                continue
            if owner is not None:  # else it was only a package above it
                for rule in self._later.pop(namespace):
                    self._patch_imported_rule(owner, rule)
                self._rebind_modules()

    def _rebind_modules(self) -> None:
        # What torch's own modules hold is torch's affair, but in torch.functional users find some of its functions too.
        self.rebind([torch.functional, *loaded_modules("torch", "ampatch")])

    def _patch_imported_rule(self, owner: object, rule: Rule) -> None:
        """Patches what could not be checked when the list was read; an import is no place to raise for it."""
        name = rule.path.name
        unfit: str | None
        if hasattr(owner, name):
            unfit = why_unfit(rule.path, owner, getattr(owner, name), rule.when, rule.via_dtype)
        elif rule.optional:
            return
        else:
            unfit = f"{rule.path.namespace!r} was imported and has no {name!r}.{did_you_mean(name, dir(owner))}"
        if unfit is None:
            self._patch_rule(owner, rule)
        else:
            warnings.warn(f"{rule.source}: {unfit}", AmpWarning, stacklevel=2)

    def _patch_rule(self, owner: object, rule: Rule) -> None:
        adapter = functools.partial(self._adapters.for_rule, rule)
        kind = "banned" if rule.treatment is Treatment.BANNED else f"in the {rule.treatment.value}"
        reason = _reason(rule.path, f"{kind} ({rule.source})")
        self._patch(owner, rule.path.name, adapter, reason)

    def _patch(self, owner: object, name: str, make_adapter: Callable[[Function], Adapter], reason: str) -> None:
        held = _own_attribute(owner, name)
        kind = type(held) if isinstance(held, (staticmethod, classmethod)) else None
        found = held.__func__ if isinstance(held, (staticmethod, classmethod)) else getattr(owner, name)
        original: Function = self.original_of(found)  # type: ignore[assignment]
        if found is not original and name in vars(owner):
            return  # patched already: registered, or under another name of its owner
        is_class = isinstance(owner, type)
        wrapper = None if is_class else self._wrappers.get(id(original))
        if wrapper is None:
            adapter = make_adapter(original)
            wrapper = wrap(original, adapter, self._switch, reason)
            # Where a pickle finds the wrapper while it is installed, and the original where it is not.
            if isinstance(owner, type):
                wrapper.__module__, wrapper.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
            else:
                wrapper.__module__, wrapper.__qualname__ = getattr(owner, "__name__", wrapper.__module__), name
            wrapper = self._accelerator.accelerate(wrapper, original, adapter.plainly, reason)
            self._originals[id(wrapper)] = (wrapper, original)
            _original_of[wrapper] = original
            (self._methods if is_class else self._wrappers)[id(original)] = wrapper
        self._ledger.set(owner, name, wrapper if kind is None else kind(wrapper))


# Packages whose tables are not the users'.
_NOT_USERS = frozenset({"torch", "ampatch", "builtins", "abc", "typing"})

# The originals of all wrappers that anybody still has, those of earlier sessions included.
_original_of: weakref.WeakKeyDictionary[Function, Function] = weakref.WeakKeyDictionary()

# wrapt's hooks on imports cannot be removed, and are used up by the import. Here: the modules that have one now.
_hooked: set[str] = set()
_waiting: weakref.WeakSet[FunctionPatches] = weakref.WeakSet()


def _original(value: object) -> object | None:
    """Returns the original of any session's wrapper; None of anything else."""
    return _original_of.get(value) if isinstance(value, types.FunctionType) else None


def _retarget(module: fx.GraphModule, replacement_of: Replacement) -> bool:
    """Replaces the functions that a traced graph calls; returns whether there were any."""
    has_changed = False
    for node in module.graph.nodes:
        target = replacement_of(node.target) if node.op == "call_function" else None
        if target is not None:
            node.target, has_changed = target, True
    if has_changed:
        module.recompile()
    return has_changed


def _restore_graph(reference: weakref.ref[fx.GraphModule]) -> None:
    module = reference()
    if module is not None:
        _retarget(module, _original)


def _restore_kept(reference: weakref.ref[object]) -> None:
    holder = reference()
    if holder is not None:
        replace_kept(holder, _original)


def _watch(namespace: str, patches: FunctionPatches) -> None:
    """Has patches told whenever a module is imported that a namespace may lie in."""
    _waiting.add(patches)
    parts = namespace.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if module not in _hooked:
            _hooked.add(module)
            wrapt.register_post_import_hook(_imported, module)


def _imported(module: types.ModuleType) -> None:
    _hooked.discard(module.__name__)
    for patches in list(_waiting):
        patches.patch_imported(module)


def _is_being_imported(namespace: str, but: object) -> bool:
    """Returns whether a namespace's module is still being imported. ``but`` is known to be complete."""
    parts = namespace.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    module = next((sys.modules[name] for name in prefixes if name in sys.modules), None)
    spec = getattr(module, "__spec__", None)
    # Told by the spec: a module may have put another object in its own place, and given it this.
    return spec is not getattr(but, "__spec__", None) and bool(getattr(spec, "_initializing", False))


def _own_attribute(owner: object, name: str) -> object:
    """Returns what an owner holds under a name, without binding: a staticmethod stays one."""
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        held: object = vars(holder).get(name, MISSING)
        if held is not MISSING:
            return held
    return MISSING


def _reason(path: Path, listed: str) -> str:
    return f"ampatch: {path} is {listed}."
