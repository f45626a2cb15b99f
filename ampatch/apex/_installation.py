"""How the modules of this package come to be what `import apex` gives, and how that is undone.

Owns what it puts into ``sys.modules`` and ``sys.meta_path``. Must not know what any of the modules does.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from email.message import EmailMessage
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from ampatch.apex import _not_replaced

logger = logging.getLogger("ampatch")

_PACKAGE = "ampatch.apex"

# Not imported but run, as `python -m` does, which wants a file.
_LAUNCHER = "apex.parallel.multiproc"

# Extensions of Apex's, which are modules of their own.
_EXTENSIONS = ("amp_C", "apex_C")


def install(force: bool = False) -> bool:
    """Has ``import apex`` give what ampatch has in its place; a second call does nothing.

    Processes that this one starts with ``multiprocessing`` and "spawn" run the script's top once more, and this with
    it. Others hear of it through ``ampatch run`` alone.

    Args:
        force: also where there is an Apex that has amp.

    Returns:
        Whether ampatch stands in. False: there is an Apex with amp, and it was left alone.
    """
    if _Process.standing_in is not None:
        return True
    real = _real_apex_with_amp()
    if real is not None and not force:
        logger.warning(
            "There is an Apex with amp in %s, which is left alone. To have ampatch in its place, type ampatch run "
            "--force, or ampatch.apex.install(force=True).",
            real,
        )
        return False
    _Process.standing_in = _StandingIn()
    return True


def uninstall() -> None:
    """Undoes `install`: ``import apex`` gives what it gave before. What was imported stays with who imported it."""
    if _Process.standing_in is not None:
        _Process.standing_in.end()
        _Process.standing_in = None


def _real_apex_with_amp() -> str | None:
    """Returns the folder of an Apex that can be imported and has amp; nothing is imported to find out."""
    for finder in sys.meta_path:
        found = finder.find_spec("apex", None) if hasattr(finder, "find_spec") else None
        if found is not None and found.origin is not None:  # which what waits for it under `ampatch run` has not
            has_amp = PathFinder.find_spec("apex.amp", found.submodule_search_locations) is not None
            return str(Path(found.origin).parent) if has_amp else None
    return None


class _StandingIn:
    """The modules in their places, and what says of all others of Apex's that they are not replaced."""

    def __init__(self) -> None:
        modules = dict(_modules())
        # A module that has one says more than this does.
        self._refusing = [module for module in modules.values() if "__getattr__" not in vars(module)]
        for name, module in modules.items():
            vars(module).setdefault("__getattr__", functools.partial(_refuse_attribute, name))
        self._displaced = {name: module for name, module in sys.modules.items() if _is_apex(name)}
        for name in self._displaced:
            del sys.modules[name]
        # First of all, since a finder of files would look into this package's own folder.
        self._finder = _Finder(modules)
        sys.meta_path.insert(0, self._finder)

    def end(self) -> None:
        for module in self._refusing:
            del vars(module)["__getattr__"]
        sys.meta_path.remove(self._finder)
        for name in [name for name in sys.modules if _is_apex(name)]:
            del sys.modules[name]
        sys.modules.update(self._displaced)


class _Process:
    """What belongs to the process, as ``sys.modules`` does."""

    standing_in: _StandingIn | None = None


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Yields every public module here that scripts import, with the name that Apex gave it."""
    package = importlib.import_module(_PACKAGE)
    yield "apex", package
    for found in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
        name = found.name.removeprefix(f"{_PACKAGE}.")
        alias = name if name in _EXTENSIONS else f"apex.{name}"
        if not name.startswith("_") and alias != _LAUNCHER:
            yield alias, importlib.import_module(found.name)


def _is_apex(name: str) -> bool:
    return name.partition(".")[0] in ("apex", *_EXTENSIONS)


def _refuse_attribute(module: str, name: str) -> object:
    full = f"{module}.{name}"
    raise AttributeError(f"module {module!r} has no attribute {name!r}: {_not_replaced.message(full)}")


_ALL = DistributionFinder.Context()


class _Finder(DistributionFinder, Loader):
    """Finds the modules, says of others of Apex's that they are not replaced, and answers who asks for its version."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - what a finder is called with
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == _LAUNCHER:
            return spec_from_file_location(fullname, Path(__file__).parent / "parallel" / "multiproc.py")
        if fullname in self._modules:
            return ModuleSpec(fullname, self, is_package=hasattr(self._modules[fullname], "__path__"))
        if fullname in sys.modules:  # and somebody reloads it
            return None
        # `from apex.amp import x` looks for x below the name that the module itself has.
        name = fullname.removeprefix("ampatch.")
        if name in _not_replaced.EXTENSIONS or (name.startswith("apex.") and not name.startswith("apex._")):
            # Without its name: where that is the one asked for, `from ... import` would say something else.
            raise ModuleNotFoundError(_not_replaced.message(name))
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves that to Python, which wants a new one."""

    def exec_module(self, module: ModuleType) -> None:  # noqa: ARG002
        """Puts the modules that there are into the place of the new one and of all below it."""
        # All at once: what is imported later Python sets as an attribute, where a package has an object of that name.
        sys.modules.update(self._modules)

    def find_distributions(self, context: DistributionFinder.Context = _ALL) -> Iterable[Distribution]:
        """Some ask for the version of the package to learn whether it is there."""
        return [_ApexDistribution()] if context.name == "apex" else []


class _ApexDistribution(Distribution):
    """As much of an installed package as can be asked for its version."""

    def read_text(self, filename: str) -> str | None:
        metadata = EmailMessage()
        metadata["Name"], metadata["Version"] = "apex", "0.1+ampatch"
        return str(metadata) if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)
