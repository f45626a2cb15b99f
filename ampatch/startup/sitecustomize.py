"""What every Python that `ampatch run` starts, and each that this one starts, does before anything else.

Python itself imports this, as the folder is on PYTHONPATH then. It waits for the script to import `apex`, or torch if
there is to be no GPU; until then it must import nothing that the script has not asked for, and never fail: it is
there in programs that know nothing of ampatch, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# As if nothing had been put there; processes that are started have it from PYTHONPATH.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not there yet, and takes time
sys.path[:] = [entry for entry in sys.path if entry != _HERE]


class _FirstImport:
    """Stands in for Apex when somebody imports it, or one of the extensions that it has beside it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name not in ("apex", "amp_C", "apex_C"):
            return None
        sys.meta_path.remove(self)
        from ampatch import apex

        apex.install(force="AMPATCH_RUN_FORCE" in os.environ)
        # Until it is loaded: of a module that is there already Python would take the spec, and make a second one by it.
        found = sys.modules.pop(name, None)
        return None if found is None else ModuleSpec(name, _Found(found))


class _Found(Loader):
    """Loads what is there already: Python puts an empty module in its place, and asks for that to be filled."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:  # noqa: ARG002
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module


def _without_gpu(_: ModuleType) -> None:
    from ampatch import cuda_on_cpu

    cuda_on_cpu.stand_in()


def _run_the_one_behind() -> None:
    """The module of this name that Python would have imported without this one: the system's, or the user's."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# In the Python of another environment neither may be there.
if importlib.util.find_spec("ampatch") and importlib.util.find_spec("wrapt"):
    sys.meta_path.insert(0, _FirstImport())
    if "AMPATCH_RUN_CPU" in os.environ:
        import wrapt

        wrapt.register_post_import_hook(_without_gpu, "torch")
_run_the_one_behind()
