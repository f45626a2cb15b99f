"""The ledger of what was installed on other people's objects, and how each piece is taken out again.

Knows neither torch's types nor precision. Whatever ampatch puts in another's place, to stay there until it is undone,
goes through a `PatchLedger`. What need not be undone does not: what is written for the length of one call and taken
back in it (``optimizer.found_inf``), what torch itself would have written there (``optimizer._opt_called``), and what
only tells torch.compile about objects of this package.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


#: What the ledger records where the owner itself had no such attribute: undoing then deletes, it does not assign.
MISSING = _Missing()


class RefusedError(TypeError):
    """An owner does not keep its attributes itself, so that undoing could not find them."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that was replaced.

    Attributes:
        owner: a weak reference, so that the ledger does not keep a dropped object alive.
        name: the attribute.
        before: what the owner's own ``__dict__`` held, or `MISSING`.
        installed: gives what was put there. A weak reference where there can be one: a bound method holds its owner.
    """

    owner: weakref.ref[object]
    name: str
    before: object
    installed: Callable[[], object]

    def take_out(self) -> bool:
        """Puts back what was there; False if somebody else replaced it by something new, which was left alone."""
        owner = self.owner()
        if owner is None:
            return True
        current = vars(owner).get(self.name, MISSING)
        if current is not self.installed():
            return current is self.before
        if self.before is MISSING:
            delattr(owner, self.name)
        else:
            setattr(owner, self.name, self.before)
        return True


@dataclass(frozen=True, slots=True)
class _Callback:
    """What takes out something that is no attribute."""

    owner: weakref.ref[object] | None
    undo: Callable[[], object]

    def take_out(self) -> bool:
        self.undo()
        return True


class PatchLedger:
    """Installs attributes and callbacks, and undoes them in reverse order. Forgets what belongs to a dead owner."""

    def __init__(self) -> None:
        self._steps: dict[int, Patch | _Callback] = {}
        self._numbers = itertools.count()

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The attributes in place, oldest first."""
        return tuple(step for step in list(self._steps.values()) if isinstance(step, Patch))

    def set(self, owner: object, name: str, value: object) -> None:
        """Replaces an attribute of ``owner``, recording what its own ``__dict__`` held.

        Raises:
            RefusedError: the owner does not keep its attributes itself; what it handed on was put back.
        """
        number = next(self._numbers)
        reference = self._reference(owner, number)
        before, reached = vars(owner).get(name, MISSING), getattr(owner, name, MISSING)
        # Noted before it is done, so that Ctrl-C leaves nothing behind that `undo` does not know of.
        self._steps[number] = Patch(reference, name, before, _weakly(value))
        try:
            setattr(owner, name, value)
            if vars(owner).get(name, MISSING) is not value:
                setattr(owner, name, reached)
                raise RefusedError(f"{type(owner).__name__!r} object does not keep the attribute {name!r} itself")
        except Exception:
            del self._steps[number]
            raise

    def on_undo(self, callback: Callable[[], object], owner: object = None) -> None:
        """Registers what takes out something that is no attribute, such as a hook.

        Args:
            callback: is called once.
            owner: the object without which the callback is for nothing, if there is one.
        """
        number = next(self._numbers)
        self._steps[number] = _Callback(None if owner is None else self._reference(owner, number), callback)

    def mark(self) -> int:
        """Returns a point in time for `undo`."""
        return next(self._numbers)

    def undo(self, since: int = 0) -> list[tuple[object, str]]:
        """Takes everything out, newest first; all of it, also where something raises.

        Args:
            since: a `mark`; what was installed before it stays.

        Returns:
            Owner and name of the attributes that somebody else replaced meanwhile, which were left as they are.
        """
        foreign: list[tuple[object, str]] = []
        numbers = [number for number in list(self._steps) if number >= since]
        try:
            while numbers:
                self._take_out(numbers[-1], foreign)
                numbers.pop()  # not before, so that Ctrl-C between the two leaves none out
        finally:
            with contextlib.ExitStack() as newest_first:  # where one raised: the rest, before the error goes on
                for number in numbers:
                    newest_first.callback(self._take_out, number, foreign)
        return foreign

    def _take_out(self, number: int, foreign: list[tuple[object, str]]) -> None:
        step = self._steps.pop(number, None)  # None: its owner died while this was going on
        if step is not None and not step.take_out() and isinstance(step, Patch):
            foreign.append((step.owner(), step.name))

    def _reference(self, owner: object, number: int) -> weakref.ref[object]:
        reference = _OwnerReference(owner, _forget)
        reference.steps, reference.number = self._steps, number
        return reference


class _OwnerReference(weakref.ref[object]):
    """A weak reference that knows a step of its owner: one object, where a callback with a closure would be five."""

    __slots__ = ("number", "steps")

    number: int
    steps: dict[int, Patch | _Callback]


def _forget(reference: _OwnerReference) -> None:
    """Takes the step of an owner that has died out of its ledger."""
    reference.steps.pop(reference.number, None)


def bindings(owners: Iterable[object], wanted: Mapping[int, object]) -> list[tuple[object, str, object]]:
    """Returns where ``owners`` hold one of the ``wanted`` objects, under any name.

    Reads ``__dict__`` only, and past ``__getattribute__``, so that no lazy module is made to load and no property runs.

    Args:
        owners: modules, or objects with a ``__dict__``.
        wanted: the objects to look for, by their ``id``.

    Returns:
        Triples of owner, attribute name and the object found.
    """
    found = []
    ids = frozenset(wanted)
    for owner in owners:
        attributes = object.__getattribute__(owner, "__dict__")
        # Most owners hold none of them, which one call tells without a step of Python for each value. The values are
        # copied: another thread may add some.
        if ids.isdisjoint(map(id, list(attributes.values()))):
            continue
        for name, value in attributes.copy().items():
            if id(value) in wanted and wanted[id(value)] is value:
                found.append((owner, name, value))
    return found


def rebind(owners: Iterable[object], wanted: Mapping[int, object], replacements: Mapping[int, object]) -> None:
    """Replaces the ``wanted`` objects wherever ``owners`` hold them, for good; ``replacements`` has the same keys."""
    for owner, name, value in bindings(owners, wanted):
        setattr(owner, name, replacements[id(value)])


def loaded_modules(*internal: str) -> list[types.ModuleType]:
    """Returns the modules loaded by now, without those of the packages named."""
    return [
        module
        for name, module in list(sys.modules.items())
        # Not isinstance(), which asks a lazy proxy for its class and so makes it import.
        if issubclass(type(module), types.ModuleType) and name.partition(".")[0] not in internal
    ]


def _weakly(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # None, numbers, builtins' wrappers: nothing that holds an owner
        return functools.partial(_same, value)


def _same(value: object) -> object:
    return value
