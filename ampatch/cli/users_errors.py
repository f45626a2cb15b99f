"""Words an exception that the user's own code raised as one error, for commands that run this code.

The error has the exception, the user's file and line, and a command that shows the whole traceback. Must never be used
for exceptions of ampatch's own code: their tracebacks are needed to mend it.
"""

from __future__ import annotations

import shlex
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary

from ampatch.errors import OptionError

#: Packages between the command and the user's code.
_BETWEEN = ("ampatch", "importlib", "torch")
_FOLDERS_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})


def in_one_error(told: str, error: BaseException, code: str, otherwise: str = "") -> OptionError:
    """Returns an error that says what the user's code raised, and where.

    Args:
        told: what happened, with the exception.
        error: the exception.
        code: Python that raises it without ampatch.
        otherwise: what to type if no line of the user's code raised it; by default the code as well.
    """
    line, told = _users_line(error), told.removesuffix(".")
    if line is None and otherwise:
        return OptionError(f"{told}. {otherwise}")
    place = "" if line is None else f", at {_shown(line.filename)}:{line.lineno}: {line.line}"
    notes = [note.removeprefix("ampatch: ") for note in getattr(error, "__notes__", ()) if note.startswith("ampatch: ")]
    return OptionError(" ".join([f"{told}{place}.", *notes, f"For its traceback, type: python -c {shlex.quote(code)}"]))


def _users_line(error: BaseException) -> FrameSummary | None:
    """Returns the innermost line of the user's files, else of a package other than torch; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return FrameSummary(error.filename, error.lineno, "", line=error.text or "")
    lines = [
        FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN
    ]
    own = [line for line in lines if not _is_installed(Path(line.filename))]
    return next(reversed(own or lines), None)


def _is_installed(file: Path) -> bool:
    """Returns True in Python's own library and in installed packages."""
    return bool(_FOLDERS_OF_PACKAGES & set(file.parts)) or file.is_relative_to(sysconfig.get_path("stdlib"))


def _shown(file: str) -> str:
    path, cwd = Path(file), Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
