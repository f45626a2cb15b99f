"""`ampatch run --report` and `--trace-overflow`: what begins when the script has imported torch.

Owns which processes watch a script, and where each writes its report. Must not import torch before the script does, and
must never change how the script ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampatch.diagnostics import json_files
from ampatch.errors import OptionError, UsageError

if TYPE_CHECKING:
    from ampatch.diagnostics.overflow.script import ScriptTracer
    from ampatch.diagnostics.report.report import Report

#: The environment variables of the options: the report's file, and whether overflows are traced; and the process that
#: watches the script, which `startup/sitecustomize.py` looks for.
FILE = "AMPATCH_RUN_REPORT"
TRACE = "AMPATCH_TRACE_OVERFLOW"  # read by ampatch.scaling.overflows as well, which imports torch
REPORTER = "AMPATCH_RUN_REPORTER"
#: The variables in which launchers tell a process its rank, in the order in which they count.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
_SUFFIXES = (*json_files.PAGES, ".json")


def variables(path: str | None, traces: bool) -> dict[str, str]:
    """Returns the environment variables with which this process, once it runs the script, watches it.

    Args:
        path: the file of the report; None for none.
        traces: whether skipped steps are to be traced.

    Raises:
        OptionError: the file's name has another ending, or it cannot be written.
    """
    wanted = {TRACE: "1"} if traces else {}
    if path is not None:
        file = json_files.checked_path(path, _SUFFIXES, "Name a page, such as report.html, or a JSON file.")
        wanted[FILE] = str(file.absolute())
    return {**wanted, REPORTER: _named(_rank())} if wanted else {}


def watchers() -> Iterator[Callable[[object], None]]:
    """Yields functions to call once torch has been imported."""
    if not _watches_here():
        return
    if FILE in os.environ:
        yield ScriptReport(os.environ[FILE]).begin
    if TRACE in os.environ:
        yield functools.partial(_begin_trace, os.getpid())


def _rank() -> str | None:
    """Returns the rank of this process by its launcher's environment variables; None without a launcher."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


def _watches_here() -> bool:
    """Returns True if this process watches: it runs the script, or is a rank that the script, a launcher, started.

    Processes that a rank starts have its rank in their environment, and do not.
    """
    pid, _, reporters_rank = os.environ.get(REPORTER, "").partition(" ")
    if pid == str(os.getpid()):
        return True
    own = _rank()
    if own is None or own == reporters_rank or "multiprocessing" in " ".join(sys.orig_argv[1:3]):
        return False
    os.environ[REPORTER] = _named(own)
    return True


def _named(rank: str | None) -> str:
    return f"{os.getpid()} {rank or ''}"


class ScriptReport:
    """The report of the script that this process runs.

    Args:
        path: the file that rank 0 writes.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._process = os.getpid()
        self._began = time.time()
        self._report: Report | None = None
        atexit.register(self.write)

    def begin(self, _: object = None) -> None:
        """Opens the report; called when torch has been imported.

        Raises:
            UsageError: a module of ampatch that the report needs is being imported right now.
        """
        module = _imported("--report", "report.calls", "report.steps", "report.report")
        # Torch has registered functions for the exit meanwhile, and the last to be registered runs first.
        atexit.unregister(self.write)
        atexit.register(self.write)
        self._report = module.Report().__enter__()

    def write(self) -> None:
        """Ends the report, writes it, and tells its path on stderr; called at the end of the process."""
        if os.getpid() != self._process:  # a fork that ended as a script does
            return
        report = self._report
        if report is None:
            _say("--report: no report, as the script did not import torch.")
            return
        with contextlib.suppress(Exception):  # torch may have lost its devices; what was recorded is left
            report.__exit__(None, None, None)
        number, path = _rank_now(), self._path
        if number not in (None, "0"):
            path = path.with_suffix(f".rank{number}{path.suffix}")
        try:
            data = report.to_dict()
            if not data["cost"]["operators"] and path.exists() and path.stat().st_mtime > self._began:
                return  # a launcher, whose rank 0 has written its report
            _say(f"--report: wrote {_written(report, path)}")
        except Exception as error:  # noqa: BLE001 - the script has ended, and a traceback would seem to be its own
            _say(f"error: the report could not be written: {type(error).__name__}: {error}")
        finally:
            _end_by_interrupt()


def _begin_trace(process: int, _: object) -> None:
    """Begins to note forward passes; called when torch has been imported.

    Raises:
        UsageError: a module of ampatch that the trace needs is being imported right now.
    """
    module = _imported("--trace-overflow", "overflow.script")
    atexit.register(_end_trace, process, module.begun())


def _end_trace(process: int, tracer: ScriptTracer) -> None:
    """Says on stderr if nothing in the script could skip a step; called at the end of the process."""
    if os.getpid() == process and tracer.has_run_forward and not tracer.may_skip:
        _say(
            "--trace-overflow: nothing was traced, as no step could be skipped: the script has neither called "
            "amp.initialize, nor stepped with a torch.amp.GradScaler that is enabled."
        )


def _imported(option: str, *names: str) -> Any:
    """Imports modules of the diagnostics; returns the last one.

    Raises:
        UsageError: ampatch itself is being imported.
    """
    try:
        return [importlib.import_module(f"ampatch.diagnostics.{name}") for name in names][-1]
    except ImportError as error:
        raise UsageError(
            f"ampatch run {option} cannot begin while ampatch itself is imported ({error}). Type `import torch` above "
            "the imports of ampatch."
        ) from error


def _end_by_interrupt() -> None:
    """Has Python end itself by SIGINT if the user has interrupted the script.

    Python forgets that it was going to when any code compiles text, as the classes of an imported module may do. It
    learns it again from compiled text that is interrupted.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _rank_now() -> str | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return _rank()


def _written(report: Report, path: Path) -> Path:
    """Writes a report, into the folder for temporary files if its own cannot be written any more."""
    write = report.save if path.suffix.lower() == ".json" else report.to_html
    try:
        write(path)
    except (OSError, OptionError) as error:
        _say(f"error: {error}")
        path = Path(tempfile.mkdtemp(prefix="ampatch-report-")) / path.name
        write(path)
    return path


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(f"ampatch: {line}", file=sys.stderr, flush=True)
