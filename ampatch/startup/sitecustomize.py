"""What every Python that `ampatch run` starts, and each that this one starts, does before anything else.

Python itself imports this, as the folder is on PYTHONPATH then. It waits for the script to import `apex`, or torch if
there is to be no GPU; until then it must import nothing that the script has not asked for, and never fail: it is
there in programs that know nothing of ampatch, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder

# As if nothing had been put there; processes that are started have it from PYTHONPATH.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not there yet, and takes time
sys.path[:] = [entry for entry in sys.path if entry != _HERE]


class _FirstMention:
    """Stands in for Apex when somebody looks for it, or for one of the extensions that it has beside it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name not in ("apex", "amp_C", "apex_C"):
            return None
        self._install()
        return importlib.util.find_spec(name)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        if context.name != "apex":
            return []
        self._install()
        import importlib.metadata

        return importlib.metadata.distributions(name="apex")

    def _install(self) -> None:
        sys.meta_path.remove(self)
        from ampatch import apex

        apex.install(force="AMPATCH_RUN_FORCE" in os.environ)


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
    sys.meta_path.insert(0, _FirstMention())
    if "AMPATCH_RUN_CPU" in os.environ:
        import wrapt

        wrapt.register_post_import_hook(_without_gpu, "torch")
_run_the_one_behind()
