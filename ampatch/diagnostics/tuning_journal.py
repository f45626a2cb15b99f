"""The journal of a search: a JSON file with every run that has finished, so that a search that was stopped resumes.

Owns the file's format, and the check that the file belongs to the same search. The file is whole at every moment. Must
not run a training.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ampatch.diagnostics import report_file
from ampatch.diagnostics.tuning_functions import Observed
from ampatch.diagnostics.tuning_search import Kept
from ampatch.errors import OptionError

FORMAT = "ampatch tune journal"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One training that has finished.

    Attributes:
        kept: functions that ran in float32; None for a training without amp's casts (O0).
        seed: its seed.
        metric: what the user's ``evaluate`` returned; NaN if the training raised.
        seconds: its time.
        error: the exception, if it raised one.
        half_dtype: the half type of its session; "" at O0.
        observed: what it called; None if it was not watched.
    """

    kept: Kept | None
    seed: int
    metric: float
    seconds: float
    error: str = ""
    half_dtype: str = ""
    observed: Observed | None = None

    @property
    def failed(self) -> bool:
        """True if the training raised, or its metric is not finite."""
        return not math.isfinite(self.metric)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        data: dict[str, Any] = report_file.plain(asdict(self))
        del data["kept"]
        return {"float32": None if self.kept is None else sorted(self.kept), **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Returns what `to_dict` has made plain data of."""
        return cls(
            None if data["float32"] is None else frozenset(data["float32"]),
            int(data["seed"]),
            float(data["metric"]),
            float(data["seconds"]),
            data["error"],
            data["half_dtype"],
            None if data["observed"] is None else Observed.from_dict(data["observed"]),
        )


class Journal:
    """The runs that have finished.

    Args:
        path: the file; None keeps the runs in memory only.
        about: what all runs of the file have in common, as text by its name in words.

    Raises:
        OptionError: the file is no journal, cannot be written, or is of another search.
    """

    def __init__(self, path: str | PathLike[str] | None, about: Mapping[str, str]) -> None:
        self._path = None
        self._about = dict(about)
        self._runs: dict[tuple[Kept | None, int], Run] = {}
        if path is not None:
            self._path = report_file.checked_path(path, (".json",), "Type journal='tune.json'.")
            if self._path.exists():
                self._read(self._path)
        self.resumed = len(self._runs)

    def find(self, kept: Kept | None, seed: int, watched: bool) -> Run | None:
        """Returns a run that has finished; None if there is none, or none that was watched if that is asked for."""
        run = self._runs.get((kept, seed))
        return None if run is None or (watched and run.observed is None and not run.failed) else run

    def add(self, run: Run) -> None:
        """Adds a run, and writes the file."""
        self._runs[run.kept, run.seed] = run
        if self._path is not None:
            data = {
                "format": FORMAT,
                "version": VERSION,
                "about": self._about,
                "runs": [each.to_dict() for each in self._runs.values()],
            }
            report_file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", self._path)

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            is_journal = isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") == VERSION
            runs = [Run.from_dict(each) for each in data["runs"]] if is_journal else []
            about = dict(data["about"]) if is_journal else {}
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"the journal {str(path)!r} cannot be read ({type(error).__name__}: {error}). Delete the file, or give "
                "another name."
            ) from error
        if not is_journal:
            raise OptionError(
                f"{str(path)!r} exists, and is no journal of this version of ampatch. Give another name, so that it is "
                "not overwritten."
            )
        differing = [
            f"{name} ({about.get(name, 'unknown')} there, {value} here)"
            for name, value in self._about.items()
            if about.get(name) != value
        ]
        if differing:
            raise OptionError(
                f"the journal {str(path)!r} is of another search: it differs in {'; '.join(differing)}. Its runs would "
                "be compared with others. Delete the file, or give another name."
            )
        self._runs = {(run.kept, run.seed): run for run in runs}


def fingerprint(function: Any) -> str:
    """Returns a short text that changes with a function's name and source; functions that it calls do not count."""
    while isinstance(function, functools.partial):
        function = function.func
    code = function if hasattr(function, "__code__") or inspect.ismethod(function) else type(function)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # such as one typed at a prompt
        source = ""
    name = f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', '')}"
    return f"{name} {hashlib.sha256(source.encode()).hexdigest()[:12]}"
