"""Patterns of namespaces and names: the functions of loaded modules that ``torchvision.ops.*: [nms]`` stands for.

Owns what a pattern matches. Must never import a module, nor know of lists. Modules that are not imported yet are
read as text, to find misspelled patterns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path as FilePath

from ampatch.cast_lists.paths import Path, PathError, find_owner, is_fixed
from ampatch.cast_lists.spellings import EVERY_NAMESPACE
from ampatch.errors import did_you_mean
from ampatch.function_wrapper import unwrapped

_SIGNS = re.compile(r"[*?\[]")


def is_pattern(path: Path) -> bool:
    """Returns True if a path stands for all functions that it matches; `EVERY_NAMESPACE` alone is no pattern."""
    return path.namespace != EVERY_NAMESPACE and bool(_SIGNS.search(path.namespace) or _SIGNS.search(path.name))


def package_of(pattern: Path) -> str:
    """Returns the name of the top-level package of a pattern; empty if it begins with ``*``, ``?`` or ``[``."""
    return _stem(pattern.namespace).partition(".")[0]


def functions(pattern: Path, within: Iterable[types.ModuleType] | None = None) -> list[Path]:
    """Returns the paths of the functions that a pattern matches, sorted.

    ``*`` and ``?`` match dots too, so that ``torchvision.ops.*`` is torchvision.ops and all modules and classes below
    it, at any depth. Three kinds of functions are left out:

    - functions that a matched module imports from outside of the part before the first wildcard;
    - private functions, unless the pattern has an underscore there;
    - methods that a class inherits from a class written in Python.

    Args:
        pattern: namespace and name, either of which may be a pattern.
        within: modules to search; None: all loaded ones.
    """
    found = set()
    for namespace, owner in _owners(pattern.namespace, within):
        known = vars(owner) if not isinstance(owner, type) else dir(owner)
        names = [pattern.name] if not _SIGNS.search(pattern.name) else _names(known, pattern.name)
        for name in names:
            if name not in known or not _is_own_function(owner, name, _stem(pattern.namespace)):
                continue
            if not isinstance(owner, type) or not _inherits(owner, name):
                found.add(Path(namespace, name))
    return sorted(found)


def covers_by_name(pattern: Path, path: Path) -> bool:
    """Returns True if a pattern matches a path by its text alone.

    Looks up nothing, so the answer is the same whichever modules are loaded. `functions` says what a pattern matches.
    """
    return _matches(path.namespace, pattern.namespace) and bool(_names([path.name], pattern.name))


def may_share(one: Path, other: Path) -> bool:
    """Returns False if two patterns cannot match the same function: other packages, or names that begin or end apart.

    Namespaces of one package do not count: torch.conv2d is torch.nn.functional.conv2d.
    """
    names = one.name, other.name
    starts = sorted((_SIGNS.split(name, maxsplit=1)[0] for name in names), key=len)
    ends = sorted((re.split(r"[*?\]]", name)[-1] for name in names), key=len)
    return package_of(one) == package_of(other) and starts[1].startswith(starts[0]) and ends[1].endswith(ends[0])


def unmatched_reason(pattern: Path) -> str | None:
    """Returns a sentence on why a pattern can match no function, not even one of a module that is not imported yet.

    Returns None if it matches one, or if a module that is not imported yet has such a name in its source.
    """
    package = package_of(pattern)
    if not package:
        return (
            f"found {pattern.namespace!r}; expected a pattern that begins with a package's name, such as 'torch.nn.*'."
        )
    try:
        find_owner(_stem(pattern.namespace))
    except PathError as error:
        return str(error)
    if functions(pattern):
        return None
    sources = list(_unloaded(pattern.namespace))
    if any(text is None or _has_word(text, pattern.name) for text in sources):
        return None
    owners = dict(_owners(pattern.namespace))
    if not owners and not sources:
        modules = [module for module in sys.modules if module.partition(".")[0] == package]
        return f"no module or class matches {pattern.namespace!r}.{did_you_mean(pattern.namespace, modules)}"
    defined = [found for text in sources for found in re.findall(r"^\s*def (\w+)", text or "", re.MULTILINE)]
    for owner in owners.values():
        defined += [name for name in vars(owner) if _is_own_function(owner, name, _stem(pattern.namespace))]
    foreign = [
        f"{namespace}.{pattern.name} is imported from {_module_of(vars(owner)[pattern.name])}; list it there."
        for namespace, owner in owners.items()
        if callable(vars(owner).get(pattern.name)) and not isinstance(vars(owner)[pattern.name], type)
    ]
    near = f" {foreign[0]}" if foreign else did_you_mean(_SIGNS.sub("", pattern.name), sorted(set(defined)))
    return f"{pattern.namespace!r} has no function {pattern.name!r}.{near}"


def _stem(namespace: str) -> str:
    """Returns the parts of a namespace before the first that is a pattern."""
    parts = namespace.split(".")
    return ".".join(parts[: next((index for index, part in enumerate(parts) if _SIGNS.search(part)), len(parts))])


def _matches(path: str, namespace: str) -> bool:
    """Returns True if a dotted path matches the pattern of a namespace; ``package.*`` matches ``package`` too."""
    stem = _stem(namespace)
    below = path[len(stem) :].split(".")
    if any(part.startswith("_") for part in below) and "._" not in namespace[len(stem) :]:
        return False
    return _fits(path, namespace)


def _fits(path: str, namespace: str) -> bool:
    return fnmatchcase(path, namespace) or (namespace.endswith(".*") and fnmatchcase(path, namespace[:-2]))


def _names(known: Iterable[str], pattern: str) -> list[str]:
    is_private = pattern.startswith("_")
    return [name for name in list(known) if fnmatchcase(name, pattern) and (is_private or not name.startswith("_"))]


def _owners(namespace: str, within: Iterable[types.ModuleType] | None = None) -> Iterator[tuple[str, object]]:
    """Yields the loaded modules and classes that match a namespace, with their dotted paths."""
    stem, package = _stem(namespace), _stem(namespace).partition(".")[0]
    chosen = None if within is None else {id(module) for module in within}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != package or not _touch(path, stem) or not hasattr(module, "__dict__"):
            continue
        if chosen is not None and id(module) not in chosen:
            continue
        if _matches(path, namespace):
            yield path, module
        yield from _classes(path, module, namespace, set())


def _classes(path: str, owner: object, namespace: str, seen: set[int]) -> Iterator[tuple[str, type]]:
    stem = _stem(namespace)
    for name, value in list(vars(owner).items()):
        # Not isinstance(), which asks the object itself: some of torch's warn then.
        if not issubclass(type(value), type) or id(value) in seen or is_fixed(value):
            continue
        inner, home = f"{path}.{name}", f"{value.__module__}.{value.__qualname__}"
        if not _touch(inner, stem) or not _touch(home, stem):
            continue
        if _matches(inner, namespace) and (inner == home or not _matches(home, namespace)):
            yield inner, value
        if inner == home:
            yield from _classes(inner, value, namespace, {*seen, id(value)})


def _touch(path: str, stem: str) -> bool:
    """Returns True if one of two dotted paths is the other, or lies below it."""
    return path == stem or path.startswith(f"{stem}.") or stem.startswith(f"{path}.")


def _is_own_function(owner: object, name: str, stem: str) -> bool:
    """Returns True if an attribute is a function that was defined below the stem of a pattern, rather than imported.

    Functions in C name modules that users never see, so that the package decides for them.
    """
    try:
        value = unwrapped(getattr(owner, name, None))
    except Exception:  # noqa: BLE001 - a property of a metaclass may raise anything
        return False
    if isinstance(value, (type, types.ModuleType)) or not inspect.isroutine(value):
        return False
    module = _module_of(value)
    if isinstance(value, types.FunctionType) and not isinstance(owner, type):
        return module is None or module == stem or module.startswith(f"{stem}.")
    return module is None or module.partition(".")[0] == stem.partition(".")[0]


def _module_of(value: object) -> str | None:
    """Returns the module in which a function was defined; None if it does not say."""
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    return module if isinstance(module, str) else None


def _inherits(owner: type, name: str) -> bool:
    """Returns True if a class has a method from a base class in Python, which can be patched itself."""
    return name not in vars(owner) and not all(map(is_fixed, owner.__mro__[1:]))


def _unloaded(namespace: str) -> Iterator[str | None]:
    """Yields the sources of modules that are not imported, if they may match; None for one that cannot be read.

    A private module may match, because another one can import its functions. So may one whose last part names a class.
    """
    owner = namespace.rpartition(".")[0]
    stem, package = _stem(namespace), _stem(namespace).partition(".")[0]
    folders, origin = _places(package)
    if origin is not None and package not in sys.modules:
        yield _text(origin)
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix not in (".py", ".so", ".pyd"):
                continue
            parts = file.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *(part.partition(".")[0] for part in parts if part != "__init__")))
            if (
                module not in sys.modules
                and _touch(module, stem)
                and (_fits(module, namespace) or _fits(module, owner))
            ):
                yield _text(file)


def _places(package: str) -> tuple[list[FilePath], FilePath | None]:
    """Returns the folders of a package, and the file of its own module, without an import."""
    module = sys.modules.get(package)
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = getattr(module, "__spec__", None) or importlib.util.find_spec(package)
    folders = getattr(module, "__path__", None) or getattr(spec, "submodule_search_locations", None) or ()
    origin = getattr(spec, "origin", None)
    return list(map(FilePath, folders)), FilePath(origin) if origin else None


def _text(file: FilePath) -> str | None:
    try:
        return file.read_text("utf-8") if file.suffix == ".py" else None
    except (OSError, UnicodeDecodeError):
        return None


def _has_word(text: str, pattern: str) -> bool:
    return any(fnmatchcase(word, pattern) for word in set(re.findall(r"\w+", text)))
