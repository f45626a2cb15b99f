"""Dotted paths: from ``torch.nn.functional`` to the object, without importing anything.

Owns the rules of how a namespace is found. Must never import a module on a user's behalf: what is not imported yet is
reported as such, and patched when it is.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass

from ampatch.errors import AmpError, did_you_mean


class PathError(AmpError, LookupError):
    """A namespace or a name that does not exist; the message says which, and what is near."""


@dataclass(frozen=True, slots=True, order=True)
class Path:
    """A function's place: the dotted path of the module or class that owns it, and its name there."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def find_owner(namespace: str) -> object | None:
    """Returns the module or class that a namespace stands for.

    Returns:
        The object, or None where the namespace lies in a module that is there but not imported yet.

    Raises:
        PathError: no such module or class, as far as can be told without importing.
    """
    parts = namespace.split(".")
    if sys.modules.get(parts[0]) is None:
        if _importable(parts[0]):
            return None
        loaded = [module for module in sys.modules if not module.startswith("_") and "." not in module]
        raise PathError(f"there is no module {parts[0]!r} (is it installed?).{did_you_mean(parts[0], loaded)}")
    owner: object = sys.modules[parts[0]]
    for index in range(1, len(parts)):
        above, path = ".".join(parts[:index]), ".".join(parts[: index + 1])
        if sys.modules.get(path) is not None:
            owner = sys.modules[path]
        # Asked before getattr, at which a package that imports its modules on demand would do so.
        elif above in sys.modules and parts[index] not in vars(owner) and _importable(path):
            return None
        else:
            owner = _attribute(owner, parts[index], above)
    return owner


def find(path: Path) -> object | None:
    """Returns the function at a path as it is without amp; None where its namespace is not imported yet.

    Raises:
        PathError: the namespace or the name does not exist.
    """
    owner = find_owner(path.namespace)
    if owner is None:
        return None
    # While amp is on, two names of one function hold two wrappers.
    return beneath(_attribute(owner, path.name, path.namespace))


def is_wrapper(value: object) -> bool:
    """Returns whether it is a function patched by amp, and not a proxy around one, which would answer for it.

    Only a function's own globals tell whose it is: what functools.wraps copies would name wrappers that others put
    around amp's as well.
    """
    # Not isinstance(), to which proxies answer as well. One called in C++ is of a class derived from functions.
    is_function = issubclass(type(value), types.FunctionType)
    return is_function and value.__globals__.get("__name__") == "ampatch.patching.wrappers"  # type: ignore[attr-defined]


def beneath(value: object) -> object:
    """Returns what a function patched by amp calls; anything else as it is."""
    while is_wrapper(value):
        value = vars(value)["__wrapped__"]
    return value


def identity(path: Path) -> object:
    """Returns what all paths of one function share: the function; or the path, if its module is not imported."""
    try:
        function = find(path)
    except PathError:
        return path
    return path if function is None or function.__hash__ is None else function


def _attribute(owner: object, name: str, namespace: str) -> object:
    try:
        found: object = getattr(owner, name)
    except (AttributeError, ImportError):
        public = [known for known in dir(owner) if name.startswith("_") or not known.startswith("_")]
        raise PathError(f"{namespace!r} has no {name!r}.{did_you_mean(name, public)}") from None
    return found


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
