"""`amp.report`: watches a block of code, and says what amp did in it.

Owns which report is open, and of which parts a report is made. Imports the parts when a report opens, as
`ampatch.apex.amp` imports this module with all public names. Must never change what it watches.
"""

from __future__ import annotations

import datetime
import shlex
import sys
import time
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampatch.diagnostics import json_files
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime
from ampatch.version import __version__

if TYPE_CHECKING:
    from ampatch.diagnostics.compare.result import Comparison
    from ampatch.diagnostics.report.calls import CallRecorder
    from ampatch.diagnostics.report.steps import Steps
    from ampatch.session import Session

#: The report that is open; empty if there is none.
_open: list[Report] = []


class Report:
    """What amp did in a block of code; made by `amp.report`.

    It can be read while its block runs: it then tells what has happened so far.
    """

    def __init__(self) -> None:
        self._calls: CallRecorder | None = None
        self._steps: Steps | None = None
        self._parts = ExitStack()
        self._began = ""
        self._start = 0.0
        self._seconds: float | None = None  # None while it is open
        self._settings: dict[str, Any] | None = None
        self._comparison: dict[str, Any] | None = None
        self._notes: list[str] = []

    def __enter__(self) -> Report:
        if self._calls is not None:
            raise UsageError("this report has been entered before. Type amp.report() for another one.")
        from ampatch.diagnostics.report.calls import CallRecorder
        from ampatch.diagnostics.report.steps import Steps

        calls, steps = CallRecorder(), Steps()
        with ExitStack() as parts:
            parts.enter_context(steps)
            parts.enter_context(calls)  # raises if another report is open
            parts.callback(runtime.before_close.remove, self._note_settings)
            runtime.before_close.append(self._note_settings)
            parts.callback(_open.clear)
            _open.append(self)
            self._parts = parts.pop_all()
        self._calls, self._steps = calls, steps
        self._began = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._seconds is not None:
            return
        self._seconds = time.perf_counter() - self._start
        if kind is not None:
            self._notes.append(f"the block ended with {kind.__name__}: the report covers what ran until then.")
        with self._parts:
            if runtime.live is not None:
                self._note_settings(runtime.live)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data: text, numbers, booleans, None, lists and dicts. inf and NaN are texts.

        Syncs with the device. The guide's page about reports describes the fields.

        Raises:
            UsageError: its block has not begun.
        """
        calls, steps = self._calls, self._steps
        if calls is None or steps is None:
            raise UsageError(
                "this report has watched nothing yet. Type `with amp.report() as report:` around the code to watch."
            )
        from ampatch.diagnostics.report.advice import advice

        recorded = calls.as_dict()
        notes, recording = recorded.pop("notes"), calls.seconds + steps.seconds
        seconds = time.perf_counter() - self._start if self._seconds is None else self._seconds
        if self._seconds is None and runtime.live is not None:
            self._note_settings(runtime.live)
        data = {
            "format": json_files.FORMAT,
            "version": json_files.VERSION,
            "about": {
                "ampatch": __version__,
                "torch": torch.__version__,
                "devices": _devices(),
                "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]) if sys.orig_argv else "",
                "began": self._began,
            },
            "settings": self._settings,
            "cost": {"seconds": seconds, "recording_seconds": min(recording, seconds), "operators": calls.operators},
            **recorded,
            "steps": steps.rows(),
            "underflow": steps.underflow(),
            "comparison": self._comparison,
            "notes": [*notes, *self._notes],
        }
        data["advice"] = advice(data)
        return json_files.plain(data)  # type: ignore[no-any-return]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes `to_dict` to a JSON file, which `amp.compare` reads.

        Args:
            path: of the file; its name ends with ".json". A file that exists is replaced.

        Raises:
            OptionError: the path has another ending, or cannot be written.
            UsageError: the report's block has not begun.
        """
        otherwise = "Type report.save('report.json'); or report.to_html('report.html') for a page."
        file = json_files.checked_path(path, (".json",), otherwise)
        json_files.write(self.to_dict(), file)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes the report as a page that needs no other file.

        Args:
            path: of the file; its name ends with ".html" or ".htm". A file that exists is replaced.

        Raises:
            OptionError: the path has another ending, or cannot be written.
            UsageError: the report's block has not begun.
        """
        otherwise = "Type report.to_html('report.html'); or report.save('report.json') for a JSON file."
        file = json_files.checked_path(path, json_files.PAGES, otherwise)
        data = self.to_dict()
        from ampatch.diagnostics.report.page import page

        json_files.write_text(page(data), file)

    def add_comparison(self, comparison: Comparison) -> None:
        """Puts the result of `amp.compare` into the report, in place of one that was put there before.

        Raises:
            OptionError: it is something else.
        """
        from ampatch.diagnostics.compare.result import Comparison

        if not isinstance(comparison, Comparison):
            raise OptionError(
                f"the comparison is {type(comparison).__name__!r}; expected what amp.compare(...) returns. Type "
                "report.add_comparison(amp.compare(model, inputs, loss_fn))."
            )
        self._comparison = comparison.to_dict()

    def __str__(self) -> str:
        from ampatch.diagnostics.report.text import text

        return text(self.to_dict())

    def _note_settings(self, session: Session) -> None:
        from ampatch.diagnostics.recorder.recorder import paused

        with paused():
            self._settings = dict(session.as_plain_data())


def note_own_steps(caller: str) -> None:
    """Notes in the open report, if there is one, that amp itself runs steps.

    Args:
        caller: the public function that runs them.
    """
    for report in _open:
        report._notes.append(
            f"{caller} ran in the block: its steps on copies of the model are counted, and the settings may be its "
            "own. Call it outside of the block to leave them out."
        )


def _devices() -> list[str]:
    """Returns the names of the GPUs that this process has used; "cpu" if there are none."""
    if not torch.cuda.is_initialized():
        return ["cpu"]
    used = [each for each in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(each)]
    return [torch.cuda.get_device_name(each) for each in used] or ["cpu"]
