"""What every Python that `ampatch run` starts, and each that this one starts, does before anything else.

Python itself imports this, as the folder is on PYTHONPATH then. It waits for the script to import `apex`, or torch if
there is to be no GPU; until then it must import nothing that the script has not asked for, and never fail: it is
there in programs that know nothing of ampatch, too. So it is in words that older Pythons understand.
"""

import importlib.util
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution, DistributionFinder
    from types import ModuleType, TracebackType

# As if nothing had been put there; processes that are started have it from PYTHONPATH.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes time to import
sys.path[:] = [entry for entry in sys.path if entry != _HERE]

_KEEPS_ON_CPU = "AMPATCH_RUN_CPU" in os.environ


class _FirstImport:
    """Stands in for Apex when somebody imports it, or one of the extensions that it has beside it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._installer: "int | None" = None  # a thread

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":  # noqa: ARG002
        # Only said to be there: while it is looked for, Python lets no other thread import anything.
        if name not in ("apex", "amp_C", "apex_C") or self._installer == threading.get_ident():
            return None
        return ModuleSpec(name, self, is_package=name == "apex")  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves that to Python, which wants a new one."""

    def exec_module(self, module: "ModuleType") -> None:
        """Has what there is imported in the place of the new one."""
        del sys.modules[module.__name__]
        self._install()
        importlib.import_module(module.__name__)

    def find_distributions(self, context: "DistributionFinder.Context") -> "Iterable[Distribution]":
        """Some ask for Apex's version before they import it."""
        if context.name != "apex" or self._installer == threading.get_ident():
            return []
        self._install()
        import importlib.metadata

        return importlib.metadata.distributions(name="apex")

    def _install(self) -> None:
        with self._lock:
            if self not in sys.meta_path:  # by another thread
                return
            self._installer = threading.get_ident()
            try:
                from ampatch import apex

                stands_in = apex.install(force="AMPATCH_RUN_FORCE" in os.environ)
                if stands_in and not _KEEPS_ON_CPU:
                    from ampatch.cli import no_gpu

                    no_gpu.watch_torch()
                sys.meta_path.remove(self)
            finally:
                self._installer = None


def _without_gpu(_: object) -> None:
    from ampatch import cuda_on_cpu

    cuda_on_cpu.stand_in()


def _explain_errors() -> None:
    """Has errors that nobody catches say how to do without a GPU, where one was asked for and there is none."""
    in_main, in_thread = sys.excepthook, threading.excepthook

    def explain(error: "BaseException | None") -> None:
        if "torch" in sys.modules and error is not None:
            from ampatch.cli import no_gpu

            no_gpu.explain(error)

    def excepthook(kind: "type[BaseException]", error: BaseException, traceback: "TracebackType | None") -> None:
        explain(error)
        in_main(kind, error, traceback)

    def excepthook_of_thread(args: "threading.ExceptHookArgs") -> None:
        explain(args.exc_value)
        in_thread(args)

    sys.excepthook, threading.excepthook = excepthook, excepthook_of_thread


def _run_the_one_behind() -> None:
    """Runs the module of this name that Python would have imported without this one: the system's, or the user's."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# In the Python of another environment neither may be there.
_IS_THERE = bool(importlib.util.find_spec("ampatch") and importlib.util.find_spec("wrapt"))
if _IS_THERE:
    sys.meta_path.insert(0, _FirstImport())
    if _KEEPS_ON_CPU:
        import wrapt

        wrapt.register_post_import_hook(_without_gpu, "torch")
_run_the_one_behind()
if _IS_THERE and not _KEEPS_ON_CPU:  # last, around what that one has set
    _explain_errors()
