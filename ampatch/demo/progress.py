"""One progress bar for all runs of the demo, with the time left, and one line for each finished run.

Must not train. Draws the bar on terminals only; elsewhere it prints only the lines.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ampatch.demo.plan import Run

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed} passed, {remaining} left{postfix}"


def is_drawn() -> bool:
    """Returns True if standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of all runs.

    Attributes:
        bar: tqdm's bar, which counts seconds of work.
        seconds: seconds per step of each run.
    """

    bar: Any
    seconds: Mapping[Run, float]

    def step(self, run: Run, loss: float) -> None:
        """Counts a step of ``run``."""
        self.bar.set_description_str(str(run), refresh=False)
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update(self.seconds[run])

    def say(self, line: str) -> None:
        """Prints a line to standard error, above the bar if there is one."""
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, file=sys.stderr, flush=True)


@contextmanager
def shown(seconds: Mapping[Run, float], steps: int, *, finished: int, steps_done: int) -> Iterator[Progress]:
    """Shows the progress while the block runs.

    Steps of some runs take several times as long as those of others. The bar therefore counts seconds of work, not
    steps, so that the time left is right from the first run on.

    Args:
        seconds: seconds per step of each run, in the order of the runs.
        steps: number of steps of each run.
        finished: number of runs that finished before a resume.
        steps_done: number of steps of the next run that were done before a resume.
    """
    times = list(seconds.values())
    done = steps * sum(times[:finished]) + steps_done * sum(times[finished : finished + 1])
    # smoothing=0 makes tqdm use the average speed since the start, not that of the latest steps.
    with tqdm(
        total=steps * sum(times),
        initial=done,
        bar_format=_FORMAT,
        ncols=shutil.get_terminal_size().columns,  # 80 if the terminal gives no width; tqdm would draw no bar
        smoothing=0,
        disable=not is_drawn(),
        file=sys.stderr,
    ) as bar:
        yield Progress(bar, seconds)
