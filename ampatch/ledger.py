"""The ledger of what ampatch installs on objects of torch, of users and of other libraries, and how to undo it.

Must know neither torch's types nor precision. Every patch that stays until it is undone must go through a
`PatchLedger`. Writes that need no undo are not recorded: values that one call writes and removes again
(``optimizer.found_inf``), and values that torch itself would write (``optimizer._opt_called``). Nor are marks that only
tell torch.compile about objects of ampatch.
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
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


#: Recorded if the owner itself had no such attribute: undo then deletes the attribute instead of assigning it.
MISSING = _Missing()


class RefusedError(TypeError):
    """Raised if an owner does not store an attribute itself, so that undo could not find it."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute.

    Attributes:
        owner: weak reference to the patched object, so that the ledger does not keep it alive.
        name: name of the attribute.
        before: previous value in the owner's own ``__dict__``, or `MISSING`.
        installed: returns the installed value. A weak reference if possible, as a bound method keeps its owner alive.
    """

    owner: weakref.ref[object]
    name: str
    before: object
    installed: Callable[[], object]

    def take_out(self) -> bool:
        """Restores the previous value; returns False if other code has installed a new one, which stays."""
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
    """A function that undoes something other than an attribute."""

    owner: weakref.ref[object] | None
    undo: Callable[[], object]

    def take_out(self) -> bool:
        self.undo()
        return True


class PatchLedger:
    """Installs attributes and registers callbacks, and undoes them in reverse order. Forgets those of dead owners."""

    def __init__(self) -> None:
        self._steps: dict[int, Patch | _Callback] = {}
        self._numbers = itertools.count()

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Replaced attributes, oldest first."""
        return tuple(step for step in list(self._steps.values()) if isinstance(step, Patch))

    def set(self, owner: object, name: str, value: object) -> None:
        """Replaces an attribute of ``owner``, and records the value that the owner's own ``__dict__`` held.

        Raises:
            RefusedError: the owner does not store the attribute itself. If it forwarded the new value to another
                object, the previous value is restored.
        """
        number = next(self._numbers)
        reference = self._reference(owner, number)
        before, reached = vars(owner).get(name, MISSING), getattr(owner, name, MISSING)
        # Recorded before the assignment, so that after Ctrl-C `undo` knows of every assignment.
        self._steps[number] = Patch(reference, name, before, _weakly(value))
        try:
            setattr(owner, name, value)
            if vars(owner).get(name, MISSING) is not value:
                setattr(owner, name, reached)
                raise RefusedError(f"{type(owner).__name__!r} object does not keep the attribute {name!r} itself")
        except Exception:
            del self._steps[number]
            raise

    def before(self, owner: object, name: str, first: Callable[..., object]) -> None:
        """Has a function call another one with the same arguments first, which may raise.

        Args:
            owner: module or class that holds the function.
            name: its name there.
            first: the other function; its result is ignored.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def following(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return original(*args, **kwargs)

        self.set(owner, name, following)

    def on_undo(self, callback: Callable[[], object], owner: object = None) -> None:
        """Registers a function that undoes something other than an attribute, such as a hook.

        Args:
            callback: function without arguments; `undo` calls it once.
            owner: object after whose death the callback need not run, if there is one.
        """
        number = next(self._numbers)
        self._steps[number] = _Callback(None if owner is None else self._reference(owner, number), callback)

    def mark(self) -> int:
        """Returns a point in time to pass to `undo`."""
        return next(self._numbers)

    def undo(self, since: int = 0) -> list[tuple[object, str]]:
        """Undoes everything, newest first; if one undo raises, the others still run.

        Args:
            since: result of `mark`; everything installed before it stays.

        Returns:
            Owner and name of each attribute that other code has replaced since; these attributes are left unchanged.
        """
        foreign: list[tuple[object, str]] = []
        numbers = [number for number in list(self._steps) if number >= since]
        try:
            while numbers:
                self._take_out(numbers[-1], foreign)
                numbers.pop()  # after the undo, so that Ctrl-C between the two skips none
        finally:
            with contextlib.ExitStack() as newest_first:  # if one raised: the rest, before the error propagates
                for number in numbers:
                    newest_first.callback(self._take_out, number, foreign)
        return foreign

    def _take_out(self, number: int, foreign: list[tuple[object, str]]) -> None:
        step = self._steps.pop(number, None)  # None: its owner died meanwhile
        if step is not None and not step.take_out() and isinstance(step, Patch):
            foreign.append((step.owner(), step.name))

    def _reference(self, owner: object, number: int) -> weakref.ref[object]:
        """Returns a weak reference; when the owner dies, its step leaves the ledger."""
        return weakref.ref(owner, functools.partial(_forget, self._steps, number))


def _forget(steps: dict[int, Patch | _Callback], number: int, _: object) -> None:
    steps.pop(number, None)


def bindings(owners: Iterable[object], wanted: Mapping[int, object]) -> list[tuple[object, str, object]]:
    """Returns the places where ``owners`` hold one of the ``wanted`` objects, under any name.

    Reads only ``__dict__``, and bypasses ``__getattribute__``: no lazy module loads, and no property runs.

    Args:
        owners: modules, or objects with a ``__dict__``.
        wanted: objects to look for, by their ``id``.

    Returns:
        Triples of owner, attribute name and the object found.
    """
    found = []
    ids = frozenset(wanted)
    for owner in owners:
        attributes = object.__getattribute__(owner, "__dict__")
        # Most owners hold none of them: one call finds that out without a Python step per value. The values are
        # copied, as another thread may add some.
        if ids.isdisjoint(map(id, list(attributes.values()))):
            continue
        for name, value in attributes.copy().items():
            if id(value) in wanted and wanted[id(value)] is value:
                found.append((owner, name, value))
    return found


def loaded_modules(*internal: str) -> list[types.ModuleType]:
    """Returns the loaded modules, except those of the packages ``internal``."""
    return [
        module
        for name, module in list(sys.modules.items())
        # Not isinstance(): it reads the class of a lazy proxy, and the proxy imports its module to answer.
        if issubclass(type(module), types.ModuleType) and name.partition(".")[0] not in internal
    ]


def _weakly(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # None, numbers, builtins' wrappers: none of them holds an owner
        return lambda: value
