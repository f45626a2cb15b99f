"""The report of one run of the demo, behind `ampatch demo --report`.

Owns which run the report is about, and what its page says if a part of the run was not seen. Must never change the
result of a run but its times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampatch import amp
from ampatch.demo.plan import Run
from ampatch.diagnostics import json_files


def reported(runs: Sequence[Run]) -> Run | None:
    """Returns the run that a report is about: the first in float16, or else in another half type; None without one."""
    halves = [run for run in runs if run.half_dtype is not None]
    return next((run for run in halves if run.half_dtype == "float16"), halves[0] if halves else None)


class RunReport:
    """The report of a run.

    Attributes:
        run: the run that it is about.
        target: the file of its page.
        failed: True if it could not be written.
    """

    def __init__(self, run: Run, target: Path) -> None:
        self.run, self.target = run, target
        self.failed = False
        self.recording = amp.report()

    def write(self, steps_before: int) -> Iterator[str]:
        """Writes the page, and yields what to tell the user of it.

        Args:
            steps_before: number of the run's steps before an interruption, which were not seen.
        """
        # jinja2 is imported only if there is a page to write.
        from ampatch.diagnostics.report.page import page

        data: dict[str, Any] = self.recording.to_dict()
        if steps_before:
            note = f"The report covers steps {steps_before + 1} to {steps_before + len(data['steps'])} of {self.run}: "
            note += "the demo was interrupted before, and resumed."
            data["notes"] = [*data["notes"], note]
            yield note
        try:
            json_files.write_text(page(data), self.target)
        except OSError as error:
            self.failed = True
            yield f"The report could not be written: {error}"
        else:
            yield (
                f"The report of {self.run} is in {self.target}; a browser shows it. The times of this run include the "
                "recording."
            )
