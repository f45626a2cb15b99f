"""Makes ``import apex`` give the modules of this package, and undoes it.

Owns the entries that it puts into ``sys.modules`` and ``sys.meta_path``. Must not know what the modules do.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType

from ampatch.apex import _not_replaced

logger = logging.getLogger("ampatch")

_PACKAGE = "ampatch.apex"

# Users run this module by `python -m`, which needs a file, and do not import it.
_LAUNCHER = "apex.parallel.multiproc"

# Apex's extensions that are top-level modules.
_EXTENSIONS = ("amp_C", "apex_C", "fused_layer_norm_cuda")


def install(force: bool = False) -> bool:
    """Makes ``import apex`` give ampatch's modules; a second call does nothing.

    Processes started with ``multiprocessing`` and "spawn" run the top of the script again, and so call this function
    too. In other child processes, only ``ampatch run`` installs the modules.

    Args:
        force: True to replace even an Apex that has amp.

    Returns:
        True if ampatch replaces Apex. False if there is an Apex with amp, which stays in place; a warning is logged.
    """
    if _Process.undo is not None:
        return True
    real = _real_apex_with_amp()
    if real is not None and not force:
        logger.warning(
            "There is an Apex with amp in %s, which stays in place. To use ampatch instead, type ampatch run --force, "
            "or ampatch.apex.install(force=True).",
            real,
        )
        return False
    _Process.undo = _stand_in()
    return True


def uninstall() -> None:
    """Undoes `install`: ``import apex`` gives what it gave before. Modules that scripts hold already stay usable."""
    if _Process.undo is not None:
        _Process.undo.close()
        _Process.undo = None


def _real_apex_with_amp() -> str | None:
    """Returns the folder of an importable Apex with amp, or None; imports nothing to find out."""
    for finder in sys.meta_path:
        found = finder.find_spec("apex", None) if hasattr(finder, "find_spec") else None
        if found is not None and found.origin is not None:  # the finder of `ampatch run` gives no origin
            has_amp = PathFinder.find_spec("apex.amp", found.submodule_search_locations) is not None
            return str(Path(found.origin).parent) if has_amp else None
    return None


def _stand_in() -> ExitStack:
    """Installs the modules, and the finder that raises for Apex's other modules; returns a stack that undoes both."""
    undo, modules = ExitStack(), dict(_modules())
    for name, module in modules.items():
        if "__getattr__" not in vars(module):  # a module's own `__getattr__` stays: its message says more
            vars(module)["__getattr__"] = functools.partial(_refuse_attribute, name)
            undo.callback(vars(module).pop, "__getattr__")
    undo.callback(sys.modules.update, _taken_out())
    undo.callback(_taken_out)
    # First in the list. Otherwise Python's path finder would search this package's own folder.
    finder = _Finder(modules)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    return undo


def _taken_out() -> dict[str, ModuleType]:
    """Takes Apex's modules out of ``sys.modules``, and returns them."""
    found = [name for name in sys.modules if name.partition(".")[0] in ("apex", *_EXTENSIONS)]
    return {name: sys.modules.pop(name) for name in found}


class _Process:
    """State of this process, which has one ``sys.modules``."""

    undo: ExitStack | None = None  # not None while ampatch replaces Apex


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Yields Apex's name and the module, for every public module of this package that scripts import."""
    package = importlib.import_module(_PACKAGE)
    yield "apex", package
    for found in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
        name = found.name.removeprefix(f"{_PACKAGE}.")
        alias = name if name in _EXTENSIONS else f"apex.{name}"
        if not name.startswith("_") and alias != _LAUNCHER:
            yield alias, importlib.import_module(found.name)


def _refuse_attribute(module: str, name: str) -> object:
    full = f"{module}.{name}"
    raise AttributeError(f"module {module!r} has no attribute {name!r}: {_not_replaced.message(full)}")


def _is_query() -> bool:
    """Returns True if a finder's caller only asks for a module, by `importlib.util.find_spec`, and imports nothing.

    In this way, scripts ask whether a module exists, and they expect None if it does not.
    """
    # From here up: the finder, the import system's search through all finders, and the function that asked for it.
    frame: FrameType | None = sys._getframe()
    for _ in range(3):
        frame = frame and frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


_ALL = DistributionFinder.Context()


class _Finder(DistributionFinder, Loader):
    """Finds the modules, raises for other modules of Apex, and provides the metadata with Apex's version."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _LAUNCHER:
            return spec_from_file_location(fullname, Path(__file__).parent / "parallel" / "multiproc.py")
        if fullname in self._modules:
            return ModuleSpec(fullname, self, is_package=hasattr(self._modules[fullname], "__path__"))
        if fullname in sys.modules:  # importlib.reload() asks for it again
            return None
        # `from apex.amp import x` asks for "ampatch.apex.amp.x", since Python takes the module's own name.
        name = fullname.removeprefix("ampatch.")
        is_apex = name in _not_replaced.EXTENSIONS or (name.startswith("apex.") and not name.startswith("apex._"))
        if is_apex and not _is_query():
            # Without `name=`: `from ... import` would replace an error with the requested name by one of its own.
            raise ModuleNotFoundError(_not_replaced.message(name))
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts the existing modules into ``sys.modules``, in place of the new module and of all below it."""
        # All at once: a submodule that Python imports later becomes an attribute of its package. There it could replace
        # an object of the same name.
        sys.modules.update(self._modules)

    def find_distributions(self, context: DistributionFinder.Context = _ALL) -> Iterable[Distribution]:
        """Returns a distribution for "apex": some scripts ask for its version to check whether it is installed."""
        return [_ApexDistribution()] if context.name == "apex" else []


class _ApexDistribution(Distribution):
    """An installed package with just enough metadata to give its version."""

    def read_text(self, filename: str) -> str | None:
        return "Name: apex\nVersion: 0.1+ampatch\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)
