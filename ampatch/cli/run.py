"""`ampatch run`: runs a script written for Apex in a plain Python that imports ampatch in Apex's place.

The process replaces itself with that Python (execve). So the script's arguments, ``__main__``, tracebacks, signals and
exit status are the same as without ampatch. Only environment variables differ, and processes that the script starts
inherit them: PYTHONPATH names the folder of a `sitecustomize` that Python imports at start. Must not touch torch or the
script.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from ampatch.cli import script_report
from ampatch.errors import OptionError

_STARTUP = str(Path(__file__).parent / "startup")

# Environment variables that the sitecustomize in that folder reads.
_FORCE = "AMPATCH_RUN_FORCE"
_CPU = "AMPATCH_RUN_CPU"


def run(wanted: argparse.Namespace) -> NoReturn:
    """Replaces this process with ``python target arguments...``, or ``python -m target arguments...``.

    Args:
        wanted: the parsed command line: ``target``, a script or a module; its ``arguments``; and the options.

    Raises:
        OptionError: the report's file cannot be written; this Python was started with an option that ignores the
            environment or start-up modules; or the new Python would not find ampatch.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise OptionError(
            "python was started with -E, -I or -S, with which it cannot replace Apex by ampatch. Leave that option "
            "out; or type `import ampatch.apex; ampatch.apex.install()` at the top of the script."
        )
    if not _is_installed():
        raise OptionError(
            "python finds ampatch only in the current folder, and would not find it from the script's. Install it into "
            "this environment: pip install . in its folder."
        )
    variables = script_report.variables(wanted.report, wanted.trace_overflow)
    if wanted.cpu and _CPU not in os.environ and os.environ.get("RANK", "0") == "0":
        print("ampatch: --cpu: whatever the script sends to a GPU stays on the CPU.", file=sys.stderr, flush=True)
    program = [*(["-m"] if wanted.is_module else []), wanted.target, *wanted.arguments]
    flags = {_FORCE: wanted.force, _CPU: wanted.cpu}
    variables |= {name: "1" for name, is_set in flags.items() if is_set}
    command = [sys.executable, *_options(sys.orig_argv, sys.argv), *program]
    os.execve(sys.executable, command, _environment(os.environ, variables))


def _is_installed() -> bool:
    """Returns True if Python finds ampatch without sys.path[0], the folder of the script or the current one.

    With -P or PYTHONSAFEPATH Python adds no such folder: sys.path[0] is the first one of PYTHONPATH then.
    """
    path = sys.path if sys.flags.safe_path else sys.path[1:]
    return any(
        finder.find_spec("ampatch", path if finder is PathFinder else None) is not None
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )


def _environment(environment: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of the new Python, given those of this one and those to set."""
    before = environment.get("PYTHONPATH")
    others = [entry for entry in before.split(os.pathsep) if entry != _STARTUP] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([_STARTUP, *others]), **wanted}


def _options(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Returns the interpreter options that this process was started with, such as ``-u`` by torchrun.

    Args:
        command: ``sys.orig_argv``.
        arguments: ``sys.argv``.
    """
    own = len(arguments) - 1  # arguments[0] is the script or module
    *options, last = command[1 : len(command) - own] or [""]
    if "-c" in options:
        return options[: options.index("-c")]
    if options and (flags := re.fullmatch(r"-([A-Za-z]*)m", options[-1])):  # -m ampatch, and -um ampatch
        return options[:-1] + ([f"-{flags[1]}"] if flags[1] else [])
    if flags := re.fullmatch(r"-([A-Za-z]*?)m.+", last):  # -mampatch
        return options + ([f"-{flags[1]}"] if flags[1] else [])
    return options
