"""Runs at the start of every Python that `ampatch run` starts, and of every Python that this one starts.

Python imports this module by itself, since `ampatch run` put its folder on PYTHONPATH. The module acts when the script
imports `apex`, or torch with `--cpu`, `--report` or `--trace-overflow`; until then it must import nothing that the
script has not asked for. It must never fail: programs that do not use ampatch import it too. For the same reason its
syntax must suit older Pythons.
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

# The script must not see this folder on sys.path. Child processes still get it from PYTHONPATH.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes time to import
sys.path[:] = [entry for entry in sys.path if entry != _HERE]

_KEEPS_ON_CPU = "AMPATCH_RUN_CPU" in os.environ


class _FirstImport:
    """Import finder that installs ampatch.apex on the first import of Apex or of one of its extensions."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._installer: "int | None" = None  # id of the thread that installs

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":  # noqa: ARG002
        # Must not install yet: during this search Python's import lock blocks the imports of all other threads.
        if name not in ("apex", "amp_C", "apex_C") or self._installer == threading.get_ident():
            return None
        return ModuleSpec(name, self, is_package=name == "apex")  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python makes a new module, as the import protocol requires."""

    def exec_module(self, module: "ModuleType") -> None:
        """Installs ampatch.apex, and imports the module of that name in place of the new one."""
        del sys.modules[module.__name__]
        self._install()
        importlib.import_module(module.__name__)

    def find_distributions(self, context: "DistributionFinder.Context") -> "Iterable[Distribution]":
        """Returns the distribution of Apex, since some scripts ask for its version before they import it."""
        if context.name != "apex" or self._installer == threading.get_ident():
            return []
        self._install()
        import importlib.metadata

        return importlib.metadata.distributions(name="apex")

    def _install(self) -> None:
        with self._lock:
            if self not in sys.meta_path:  # another thread has installed it
                return
            self._installer = threading.get_ident()
            try:
                from ampatch import apex

                stands_in = apex.install(force="AMPATCH_RUN_FORCE" in os.environ)
                if stands_in and not _KEEPS_ON_CPU:
                    from ampatch.cli import no_gpu

                    no_gpu.add_hint_to_torch_errors()
                sys.meta_path.remove(self)
            finally:
                self._installer = None


def _keep_on_cpu(_: object) -> None:
    from ampatch import cuda_on_cpu

    cuda_on_cpu.stand_in()


def _watch() -> None:
    """Has this process watch the script from the import of torch on, if it is the one that is to."""
    try:
        from ampatch.cli.script_report import watchers
    except ImportError:  # another environment, with an older ampatch
        return
    import wrapt

    for begin in watchers():
        wrapt.register_post_import_hook(begin, "torch")


def _explain_errors() -> None:
    """Patches the hooks for uncaught errors: errors of scripts that find no GPU get a hint at `ampatch run --cpu`."""
    in_main, in_thread = sys.excepthook, threading.excepthook

    def add_hint(error: "BaseException | None") -> None:
        if "torch" in sys.modules and error is not None:
            from ampatch.cli import no_gpu

            no_gpu.add_hint(error)

    def excepthook(kind: "type[BaseException]", error: BaseException, traceback: "TracebackType | None") -> None:
        add_hint(error)
        in_main(kind, error, traceback)

    def excepthook_of_thread(args: "threading.ExceptHookArgs") -> None:
        add_hint(args.exc_value)
        in_thread(args)

    sys.excepthook, threading.excepthook = excepthook, excepthook_of_thread


def _run_shadowed_sitecustomize() -> None:
    """Runs the `sitecustomize` that Python would have imported without this one: the system's or the user's."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# The Python of another environment might have neither of the two.
_IS_THERE = bool(importlib.util.find_spec("ampatch") and importlib.util.find_spec("wrapt"))
if _IS_THERE:
    sys.meta_path.insert(0, _FirstImport())
    if _KEEPS_ON_CPU:
        import wrapt

        wrapt.register_post_import_hook(_keep_on_cpu, "torch")
    if "AMPATCH_RUN_REPORTER" in os.environ:
        _watch()
_run_shadowed_sitecustomize()
if _IS_THERE and not _KEEPS_ON_CPU:  # last, to wrap hooks that the other sitecustomize has set
    _explain_errors()
