"""One progress bar for all runs of the demo, with the time left, and one line for each run that has ended.

Counts and draws; nothing here trains. The bar is for terminals: elsewhere the lines stand alone.
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
        bar: tqdm's bar. It counts seconds of work.
        seconds: the time of a step of each run.
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

    Steps of some runs take several times as long as those of others. The bar therefore counts each step as the seconds
    that it takes, so that the time left is right from the first run on.

    Args:
        seconds: the time of a step of each run, in the order of the runs.
        steps: how many steps each run has.
        finished: how many runs had ended before.
        steps_done: how many steps of the next run had been done before.
    """
    times = list(seconds.values())
    done = steps * sum(times[:finished]) + steps_done * sum(times[finished : finished + 1])
    # smoothing=0: tqdm then takes the average speed of the whole run, and not that of the latest steps.
    with tqdm(
        total=steps * sum(times),
        initial=done,
        bar_format=_FORMAT,
        ncols=shutil.get_terminal_size().columns,  # 80 where the terminal does not say, where tqdm draws nothing
        smoothing=0,
        disable=not is_drawn(),
        file=sys.stderr,
    ) as bar:
        yield Progress(bar, seconds)
