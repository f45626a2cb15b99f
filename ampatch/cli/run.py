"""`ampatch run`: a script that was written for Apex, in a plain Python that finds ampatch in Apex's place.

The process becomes that Python, so that the script's arguments, ``__main__``, tracebacks, signals and exit status are
what they would be without ampatch. What is different stands in the environment, and so reaches the processes that the
script starts: a folder whose module Python imports by itself. Must not touch torch, nor the script.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from ampatch.errors import OptionError

_STARTUP = str(Path(__file__).parent / "startup")

# What the module in that folder goes by.
_FORCE = "AMPATCH_RUN_FORCE"
_CPU = "AMPATCH_RUN_CPU"


def run(target: str, arguments: Sequence[str], *, is_module: bool, force: bool, cpu: bool) -> NoReturn:
    """Becomes ``python target arguments...``, or ``python -m target arguments...``.

    Args:
        target: a script, or a module.
        arguments: the script's own.
        is_module: which of the two it is.
        force: whether to stand in for an Apex that has amp, too.
        cpu: whether what the script sends to a GPU stays on the CPU.

    Raises:
        OptionError: this Python was told to heed neither the environment nor its own start-up modules; or would not
            find ampatch again.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise OptionError(
            "python was started with -E, -I or -S, with which it does not find what stands in for Apex. Leave that "
            "out; or type `import ampatch.apex; ampatch.apex.install()` at the top of the script."
        )
    if not _is_installed():
        raise OptionError(
            "ampatch is found in the current folder alone, and would not be from where the script is. Install it into "
            "this environment: pip install . in its folder."
        )
    if cpu and _CPU not in os.environ and os.environ.get("RANK", "0") == "0":
        print("ampatch: --cpu: what the script sends to a GPU stays on the CPU.", file=sys.stderr, flush=True)
    command = [sys.executable, *_options(sys.orig_argv, sys.argv), *(["-m"] if is_module else []), target, *arguments]
    os.execve(sys.executable, command, _environment(os.environ, force=force, cpu=cpu))


def _is_installed() -> bool:
    """Returns whether ampatch is found without the first folder of the path: the script's, or the current one."""
    return any(
        finder.find_spec("ampatch", sys.path[1:] if finder is PathFinder else None) is not None
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )


def _environment(environment: Mapping[str, str], *, force: bool, cpu: bool) -> dict[str, str]:
    """Returns the environment of the new Python, given that of this one."""
    before = environment.get("PYTHONPATH")
    others = [entry for entry in before.split(os.pathsep) if entry != _STARTUP] if before else []
    path = os.pathsep.join([_STARTUP, *others])
    wanted = {_FORCE: force, _CPU: cpu}
    return {**environment, "PYTHONPATH": path, **{name: "1" for name, is_wanted in wanted.items() if is_wanted}}


def _options(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Returns the interpreter's own options that this process was started with, such as ``-u`` by torchrun.

    Args:
        command: ``sys.orig_argv``.
        arguments: ``sys.argv``.
    """
    own = len(arguments) - 1  # behind the name of the script or module
    *options, last = command[1 : len(command) - own] or [""]
    if "-c" in options:
        return options[: options.index("-c")]
    if options and (flags := re.fullmatch(r"-([A-Za-z]*)m", options[-1])):  # -m ampatch, and -um ampatch
        return options[:-1] + ([f"-{flags[1]}"] if flags[1] else [])
    if flags := re.fullmatch(r"-([A-Za-z]*?)m.+", last):  # -mampatch
        return options + ([f"-{flags[1]}"] if flags[1] else [])
    return options
