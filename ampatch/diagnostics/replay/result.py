"""What `amp.replay` returns, as frozen values, and their text. Must never run a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ampatch.diagnostics.json_files import plain
from ampatch.diagnostics.overflow.trace import OverflowTrace
from ampatch.diagnostics.tables import Column, printed, table


@dataclass(frozen=True, slots=True)
class ReplayedLevel:
    """The step at one opt level.

    Attributes:
        level: what ran, such as "O1 float16"; with "as saved" for the settings of the file, and "compiled" if
            `torch.compile` had compiled the models.
        is_finite: True if all gradients are finite; None if that is unknown, since the step raised or could not run.
        finding: the first operator that produced inf or NaN, or why it is unknown; empty if the step is finite.
        trace: the trace, if an operator was found.
    """

    level: str
    is_finite: bool | None
    finding: str = ""
    trace: OverflowTrace | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """A skipped step that ran again. ``str()`` of it is the trace, and a table of the opt levels.

    Attributes:
        file: name of the file.
        trace: the trace of the step with the settings of the file.
        is_same: True if this trace names the place that the saved one names.
        compared: the same in words.
        levels: the step as saved, and at each opt level.
        notes: what may differ from the step as it was.
    """

    file: str
    trace: OverflowTrace
    is_same: bool
    compared: str
    levels: tuple[ReplayedLevel, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, None, lists and dicts. inf and NaN are the texts "inf" and "nan"."""
        return plain(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        columns = [
            Column("level", lambda row: row.level),
            Column("gradients", lambda row: _GRADIENTS[row.is_finite]),
            Column("first inf or NaN", lambda row: row.finding),
        ]
        head = f"{self.trace}\n  replayed  from {self.file}: {self.compared}\n"
        rows = table("The same step at each level", columns, self.levels, len(self.levels))
        return printed([head, *rows, *(f"note: {note}" for note in self.notes)])


_GRADIENTS = {True: "finite", False: "inf or NaN", None: "unknown"}
