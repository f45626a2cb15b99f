"""Dotted paths: finds the object that ``torch.nn.functional`` names, without importing anything.

Owns the rules for finding a namespace. Must never import a module for the user: a module that is not imported yet is
reported as such, and patched once the user's code imports it.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from dataclasses import dataclass

from ampatch.errors import AmpError, did_you_mean
from ampatch.function_wrapper import unwrapped


class PathError(AmpError, LookupError):
    """Raised if a namespace or a name does not exist; the message says which, and suggests close names."""


@dataclass(frozen=True, slots=True, order=True)
class Path:
    """The path of a function: the dotted path of the module or class that owns it, and its name there."""

    namespace: str
    name: str

    @classmethod
    def of(cls, dotted: str) -> Path:
        """Returns the path that a text with dots is."""
        namespace, _, name = dotted.rpartition(".")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def prefixes(dotted: str | None) -> list[str]:
    """Returns a name with dots and all that it begins with, the shortest first: "a", "a.b" and "a.b.c"."""
    return list(itertools.accumulate(dotted.split("."), "{}.{}".format)) if dotted else []


def find_owner(namespace: str) -> object | None:
    """Returns the module or class that a namespace names.

    Returns:
        The object, or None if the namespace lies in an installed module that is not imported yet.

    Raises:
        PathError: there is no such module or class, as far as can be checked without importing.
    """
    parts = namespace.split(".")
    if sys.modules.get(parts[0]) is None:
        if is_importable(parts[0]):
            return None
        loaded = [module for module in sys.modules if not module.startswith("_") and "." not in module]
        raise PathError(f"there is no module {parts[0]!r} (is it installed?).{did_you_mean(parts[0], loaded)}")
    owner: object = sys.modules[parts[0]]
    for index in range(1, len(parts)):
        above, path = ".".join(parts[:index]), ".".join(parts[: index + 1])
        if sys.modules.get(path) is not None:
            owner = sys.modules[path]
        # Checked before getattr, which makes a package with lazy imports import the module.
        elif above in sys.modules and parts[index] not in vars(owner) and is_importable(path):
            return None
        else:
            owner = _attribute(owner, parts[index], above)
    return owner


def find_owner_or(namespace: str, default: object = None) -> object | None:
    """Returns what `find_owner` does, or ``default`` if the module or class does not exist."""
    try:
        return find_owner(namespace)
    except PathError:
        return default


def find(path: Path) -> object | None:
    """Returns the function at a path as it is without amp; None if its namespace is not imported yet.

    Raises:
        PathError: the namespace or the name does not exist.
    """
    owner = find_owner(path.namespace)
    if owner is None:
        return None
    # While amp is on, two names of one function hold two different wrappers.
    return unwrapped(_attribute(owner, path.name, path.namespace))


def find_or(path: Path, default: object = None) -> object | None:
    """Returns what `find` does, or ``default`` if the namespace or the name does not exist."""
    try:
        return find(path)
    except PathError:
        return default


def is_fixed(kind: type) -> bool:
    """Returns True if a class is one in C, whose attributes cannot be set."""
    return bool(kind.__flags__ & _IMMUTABLE)


def identity(path: Path) -> object:
    """Returns the object that all paths of a function share: the function, or the path if it cannot be looked up.

    The path identifies a function that is not imported, does not exist or is not hashable. It also identifies a class
    method, since each look-up binds that anew. Compare results with ``is``, or use `function_key`:
    ``torch.spmm == torch.mm`` is True, but a patch of one does not reach the other.
    """
    function = find_or(path)
    is_bound_anew = isinstance(function, types.MethodType) and find_or(path) is not function
    return path if function is None or function.__hash__ is None or is_bound_anew else function


def function_key(path: Path) -> Path | int:
    """Returns a key for dicts that is the same for all paths of one object, and for no other object."""
    found = identity(path)
    return found if isinstance(found, Path) else id(found)


def _attribute(owner: object, name: str, namespace: str) -> object:
    try:
        return getattr(owner, name)
    except (AttributeError, ImportError):
        public = [known for known in dir(owner) if name.startswith("_") or not known.startswith("_")]
        raise PathError(f"{namespace!r} has no {name!r}.{did_you_mean(name, public)}") from None


# Py_TPFLAGS_IMMUTABLETYPE: setting an attribute of such a class raises TypeError.
_IMMUTABLE = 1 << 8


def is_importable(module: str) -> bool:
    """Returns True if there is a module of that name; imports the packages that it is in, and not itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
