"""Words an exception that the user's own code raised as one error, for commands that run this code.

The error has the exception, the user's file and line, and a command that shows the whole traceback. Must never be used
for exceptions of ampatch's own code: their tracebacks are needed to mend it.
"""

from __future__ import annotations

import linecache
import shlex
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

from ampatch.errors import OptionError

#: Packages between the command and the user's code.
_BETWEEN = ("ampatch", "importlib", "torch")
_FOLDERS_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of code that raised: its file, its number, and its text."""

    file: Path
    number: int
    text: str

    def __str__(self) -> str:
        cwd = Path.cwd()
        file = self.file.relative_to(cwd) if self.file.is_relative_to(cwd) else self.file
        return f"{file}:{self.number}: {self.text}"

    @property
    def is_installed(self) -> bool:
        """True in Python's own library and in installed packages."""
        own_library = sysconfig.get_path("stdlib")
        return bool(_FOLDERS_OF_PACKAGES & set(self.file.parts)) or self.file.is_relative_to(own_library)


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
    place = "" if line is None else f", at {line}"
    notes = [note.removeprefix("ampatch: ") for note in getattr(error, "__notes__", ()) if note.startswith("ampatch: ")]
    return OptionError(" ".join([f"{told}{place}.", *notes, f"For its traceback, type: python -c {shlex.quote(code)}"]))


def _users_line(error: BaseException) -> _Line | None:
    """Returns the innermost line of the user's files, else of a package other than torch; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return _Line(Path(error.filename), error.lineno, (error.text or "").strip())
    lines = [
        _Line(Path(file := frame.f_code.co_filename), number, linecache.getline(file, number).strip())
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN
    ]
    own = [line for line in lines if not line.is_installed]
    return next(reversed(own or lines), None)
