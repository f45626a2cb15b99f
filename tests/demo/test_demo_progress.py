"""The demo's progress: one bar for all runs with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest
import torch
from command_line import ampatch

from ampatch.cli.main import main
from ampatch.demo import digits, progress, training
from ampatch.demo.plan import Run

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

pytest_plugins = ["demo_digits"]

FLOAT32, HALF = Run("O0", None), Run("O1", "float16")
CHOSEN = ("demo", "--opt-levels", "O0,O4", "--epochs", "1")


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True

    def bars(self) -> list[str]:
        """The states of the bar, in their order."""
        return [part for part in re.split(r"[\r\n]+", self.getvalue()) if "%|" in part]


@contextmanager
def at_a_terminal() -> Iterator[Terminal]:
    """Stands in for standard error; as a fixture it would not, because pytest puts its own back before the test."""
    terminal = Terminal()
    with redirect_stderr(terminal):
        yield terminal


def percentages(bars: list[str]) -> list[int]:
    return [int(bar.partition("%|")[0].split()[-1]) for bar in bars]


class TestBar:
    def test_a_step_moves_the_bar_by_the_time_that_it_takes(self) -> None:
        with (
            at_a_terminal() as terminal,
            progress.shown({FLOAT32: 1.0, HALF: 4.0}, 10, finished=0, steps_done=0) as shown,
        ):
            for _ in range(5):
                shown.step(HALF, 0.5)
            shown.bar.refresh()
            assert (shown.bar.n, shown.bar.total) == (20, 50)

        last = terminal.bars()[-1]
        assert percentages([last]) == [40]
        assert last.startswith("O1 float16 ")
        assert "loss=0.5000" in last

    @pytest.mark.parametrize(("finished", "steps_done", "done"), [(0, 3, 3), (1, 0, 10), (1, 3, 22), (2, 0, 50)])
    def test_the_bar_of_a_resumed_demo_begins_where_it_stopped(self, finished: int, steps_done: int, done: int) -> None:
        times = {FLOAT32: 1.0, HALF: 4.0}
        with at_a_terminal(), progress.shown(times, 10, finished=finished, steps_done=steps_done) as shown:
            assert shown.bar.n == done

    def test_the_time_left_is_that_of_all_runs(self) -> None:
        with (
            at_a_terminal() as terminal,
            progress.shown({FLOAT32: 1.0, HALF: 4.0}, 10, finished=0, steps_done=0) as shown,
        ):
            shown.bar.start_t -= 10.5  # as if so many seconds had passed
            for _ in range(10):
                shown.step(FLOAT32, 0.5)
            shown.bar.refresh()

        assert re.search("00:1[01] passed, 00:4[2-5] left", terminal.bars()[-1])


@pytest.mark.usefixtures("few_digits")
class TestDemo:
    def test_one_bar_on_a_terminal_counts_all_runs(self) -> None:
        with at_a_terminal() as terminal:
            assert main(CHOSEN) == 0

        found = percentages(terminal.bars())
        assert found == sorted(found), "it begins again with none of the runs"
        assert (found[0], found[-1]) == (0, 100)
        assert " left" in terminal.bars()[-1]
        lines = re.split(r"[\r\n]+", terminal.getvalue())
        assert sum("of the test digits recognised" in line for line in lines) == 2

    def test_without_a_terminal_there_are_lines_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "seconds_per_step", lambda *_args, **_kwargs: pytest.fail("measured for no bar"))
        status, _, err = ampatch(*CHOSEN)
        begins, float32, mixed, *_ = err.splitlines()
        assert status == 0
        assert "\r" not in err
        assert begins.startswith("Training on ")
        assert float32.startswith("O0: ")
        assert mixed.startswith("O4 bfloat16: ")

    @pytest.mark.slow
    def test_measuring_steps_takes_no_part_in_the_training(self) -> None:
        train, test = digits.split(digits.load())
        losses: list[float] = []
        for _ in range(2):
            training.run(
                train, test, "O4", torch.bfloat16, epochs=1, seed=0, on_step=lambda loss, _: losses.append(loss)
            )
            assert training.seconds_per_step(train, "O4", torch.bfloat16, seed=0) > 0

        assert losses[:5] == losses[5:]
