"""Ctrl-C saves the demo, and `--resume` gives the results of an uninterrupted demo, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import demo_digits
import pytest
import torch
from command_line import ampatch
from demo_digits import CHECKPOINT, STEPS_OF_A_RUN, results
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ampatch import demo
from ampatch.cli import main
from ampatch.demo import checkpoints, digits, report, training
from ampatch.demo.checkpoints import Checkpoint
from ampatch.demo.plan import SETTINGS, Plan, Run
from ampatch.demo.progress import Progress
from ampatch.demo.training import Result, State

pytest_plugins = ["demo_digits"]
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("ctrl_c_raises")]  # once: without the compiled libraries

CHOSEN = ("--opt-levels", "O0,O4", "--epochs", "2", "--seed", "1")


@pytest.fixture(scope="module", autouse=True)
def few_digits() -> Iterator[None]:
    """Runs all tests of the module inside `demo_digits.few`, and its fixtures, too."""
    with demo_digits.few():
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    target = tmp_path_factory.mktemp("uninterrupted") / "results.json"
    assert ampatch("demo", *CHOSEN, "--json", target).status == 0
    return results(target)


@pytest.fixture
def ctrl_c_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Presses Ctrl-C twice, so many steps from now."""
    return lambda steps: demo_digits.press_ctrl_c(monkeypatch, steps, times=2)


def same(state: State, other: State) -> bool:
    """Whether two states are the same, bit for bit and type for type."""
    (leaves, structure), (others, other_structure) = tree_flatten(state), tree_flatten(other)
    return structure == other_structure and all(
        isinstance(twin, Tensor) and leaf.dtype is twin.dtype and torch.equal(leaf, twin)
        if isinstance(leaf, Tensor)
        else leaf == twin
        for leaf, twin in zip(leaves, others, strict=True)
    )


class TestInterrupting:
    @pytest.mark.parametrize(
        "steps",
        [1, pytest.param(STEPS_OF_A_RUN, marks=pytest.mark.slow), STEPS_OF_A_RUN + 3],
        ids=["at_once", "at_the_end_of_a_run", "within_the_second_run"],
    )
    def test_resumed_results_are_those_of_an_uninterrupted_demo(
        self, steps: int, uninterrupted: list[dict[str, Any]], ctrl_c_after: Callable[[int], None]
    ) -> None:
        ctrl_c_after(steps)
        status, _, err = ampatch("demo", *CHOSEN, "--json", "results.json")
        assert status == 130
        assert not Path("results.json").exists()
        *program, demo_, resume, file = shlex.split(err.splitlines()[-1].removeprefix("Interrupted. To go on, type: "))
        command = [demo_, resume, file]
        assert (program, command) == ([sys.executable, "-m", "ampatch"], ["demo", "--resume", CHECKPOINT])
        status, out, _ = ampatch(*command)
        assert status == 0
        assert results() == uninterrupted
        entries = json.loads(Path("results.json").read_text())
        assert out == report.table([Result(**entry) for entry in entries]) + "\n"

    @pytest.mark.gpu
    @pytest.mark.parametrize(("device", "other"), [("cuda", "cpu"), ("cpu", "cuda")], ids=["to_the_cpu", "to_the_gpu"])
    def test_a_run_goes_on_on_another_device(
        self, device: str, other: str, uninterrupted: list[dict[str, Any]], ctrl_c_after: Callable[[int], None]
    ) -> None:
        ctrl_c_after(STEPS_OF_A_RUN + 3)
        assert ampatch("demo", *CHOSEN, "--device", device).status == 130
        assert ampatch("demo", "--resume", CHECKPOINT, "--device", other, "--json", "results.json").status == 0
        for found, right in zip(results(), uninterrupted, strict=True):
            assert found["final_loss"] == pytest.approx(right["final_loss"], rel=0.1)

    def test_the_line_to_type_names_a_device_that_is_not_the_default(
        self, ctrl_c_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "_default_device", lambda: "cuda")
        ctrl_c_after(1)
        status, _, err = ampatch("demo", *CHOSEN, "--device", "cpu")
        assert status == 130
        assert err.endswith(f"demo --resume {CHECKPOINT} --device cpu\n")

    @pytest.mark.slow
    def test_a_demo_may_be_interrupted_several_times(
        self, uninterrupted: list[dict[str, Any]], ctrl_c_after: Callable[[int], None]
    ) -> None:
        ctrl_c_after(6)
        assert ampatch("demo", *CHOSEN, "--save", "mine.pt").status == 130
        for _ in range(2):
            ctrl_c_after(6)
            assert ampatch("demo", "--resume", "mine.pt").status == 130
        ctrl_c_after(6)
        assert ampatch("demo", "--resume", "mine.pt", "--json", "results.json").status == 0
        assert results() == uninterrupted
        assert not Path(CHECKPOINT).exists()

    def test_an_interrupted_demo_prints_no_table_and_deinitializes_amp(
        self, ctrl_c_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        untouched = torch.nn.functional.linear
        threads = torch.get_num_threads()
        ctrl_c_after(2)
        with pytest.raises(KeyboardInterrupt):
            main._run(["demo", "--opt-levels", "O4"])
        assert capsys.readouterr().out == ""
        assert torch.nn.functional.linear is untouched
        assert torch.get_num_threads() == threads

    def test_a_checkpoint_that_cannot_be_saved_is_told(self, ctrl_c_after: Callable[[int], None]) -> None:
        Path(CHECKPOINT).mkdir()
        ctrl_c_after(1)
        status, _, err = ampatch("demo", "--opt-levels", "O0")
        line = err.splitlines()[-1]
        told = f"Interrupted, and the progress could not be saved: '{CHECKPOINT}' cannot be written: it is a"
        assert status == 130
        assert line.startswith(told)
        assert "--save" in line

    def test_ctrl_c_while_the_checkpoint_is_saved_changes_nothing(
        self, ctrl_c_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save = torch.save

        def pressed_meanwhile(*arguments: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            save(*arguments)

        monkeypatch.setattr(torch, "save", pressed_meanwhile)
        ctrl_c_after(3)
        assert ampatch("demo", "--opt-levels", "O0").status == 130
        running = checkpoints.load(Path(CHECKPOINT)).running
        assert running is not None
        assert training.steps_done(running) == 3
        assert [path.name for path in Path().iterdir()] == [CHECKPOINT]

    def test_between_two_runs_no_state_is_saved(
        self, uninterrupted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accuracy = training.accuracy

        def pressed_while_testing(*arguments: Any) -> float:
            signal.raise_signal(signal.SIGINT)
            return accuracy(*arguments)

        monkeypatch.setattr(training, "accuracy", pressed_while_testing)
        assert ampatch("demo", *CHOSEN).status == 130
        assert checkpoints.load(Path(CHECKPOINT)).running is None
        assert ampatch("demo", "--resume", CHECKPOINT).status == 130
        assert ampatch("demo", "--resume", CHECKPOINT, "--json", "results.json").status == 0
        assert results() == uninterrupted

    def test_ctrl_c_that_cannot_be_held_back_ends_with_a_plain_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Progress, "step", Mock(side_effect=KeyboardInterrupt))
        status, _, err = ampatch("demo", "--opt-levels", "O0")
        assert (status, err.splitlines()[-1]) == (130, "Interrupted: nothing was saved.")

    @pytest.mark.slow
    def test_sigint_from_another_process_interrupts(self, uninterrupted: list[dict[str, Any]]) -> None:
        # A process that is started in the background may have it ignored.
        program = """
import signal, sys
import demo_digits
from ampatch.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
with demo_digits.few():
    sys.exit(main())
"""
        with subprocess.Popen(
            [sys.executable, "-c", program, "demo", *CHOSEN],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(demo_digits.__file__).parent)},
        ) as running:
            assert running.stderr is not None
            assert running.stderr.readline().startswith("Training on ")
            running.send_signal(signal.SIGINT)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=60)

        assert (running.returncode, out) == (130, "")
        assert err.splitlines() == [
            f"Interrupted. To go on, type: {shlex.quote(sys.executable)} -m ampatch demo --resume {CHECKPOINT}"
        ]
        assert ampatch("demo", "--resume", CHECKPOINT, "--json", "results.json").status == 0
        assert results() == uninterrupted


class TestResuming:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        """A checkpoint of a demo that had finished all of its runs."""
        finished = Result("O0", None, 0.99, 0.0084, 7.1, 7.06, 0.0, 0.0, 0, 1.0)
        plan = Plan(["O0"], ["bfloat16"], epochs=2, seed=3)
        checkpoints.save(Checkpoint(plan, str(tmp_path / "first.json"), [finished], None), Path(CHECKPOINT))
        return Path(CHECKPOINT)

    @pytest.mark.parametrize(
        ("given", "saved_with"),
        [
            (["--opt-levels", "O0,O1"], "--opt-levels O0"),
            (["--half-dtype", "float16"], "--half-dtype bfloat16"),
            (["--epochs", "10"], "--epochs 2"),
            (["--seed", "0"], "--seed 3"),
        ],
        ids=str,
    )
    def test_an_argument_that_contradicts_the_file_is_one_clear_error(
        self, given: list[str], saved_with: str, saved: Path
    ) -> None:
        status, out, err = ampatch("demo", "--resume", saved, *given)
        (line,) = err.splitlines()
        told = f"{' '.join(given)} contradicts 'ampatch-demo.pt', which began with {saved_with}. Leave {given[0]} out"
        assert (status, out) == (1, "")
        assert line.startswith(f"ampatch: error: {told}")

    def test_the_same_arguments_may_be_given_again(self, saved: Path) -> None:
        same = ("--opt-levels", "O0", "--half-dtype", "bfloat16", "--epochs", "2", "--seed", "3")
        assert ampatch("demo", "--resume", saved, *same).status == 0

    def test_the_json_path_is_that_of_the_first_command_from_any_folder(
        self, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert ampatch("demo", "--resume", f"../{saved}").status == 0
        assert json.loads((tmp_path / "first.json").read_text())[0]["opt_level"] == "O0"

    def test_another_json_path_takes_the_place_of_the_first(self, saved: Path) -> None:
        assert ampatch("demo", "--resume", saved, "--json", "second.json").status == 0
        assert Path("second.json").exists()
        assert not Path("first.json").exists()

    def test_a_json_path_that_became_a_folder_is_told_before_any_training(self, saved: Path) -> None:
        Path("first.json").mkdir()
        status, _, err = ampatch("demo", "--resume", saved)
        (line,) = err.splitlines()
        assert status == 1
        assert line.startswith("ampatch: error: the demo began with --json: ")
        assert line.endswith("it is a folder. Give another name. Or type --json with another file.")


@pytest.mark.slow
class TestStates:
    """A run that goes on from a state, saved and loaded, is the run that it was."""

    train, test = (part[torch.arange(100)] for part in digits.split(digits.load()))
    EPOCHS = 2
    STEPS = 8

    @pytest.fixture(autouse=True)
    def without_the_profiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "peak_memory", lambda *_args, **_kwargs: 0)

    def trained(self, planned: Run, on_step: Callable[[float, Callable[[], State]], None], **resumed: Any) -> Result:
        options = {"epochs": self.EPOCHS, "seed": 5, "on_step": on_step, **resumed}
        result = training.run(self.train, self.test, planned.opt_level, planned.dtype, **options)
        return replace(result, ms_per_step=0.0)

    def resumes_exactly(self, planned: Run, steps: int, path: Path) -> None:
        """Asserts it of a run that is interrupted after so many steps."""
        whole: list[float] = []
        parts: list[float] = []
        last: list[State] = []

        def watch(losses: list[float], loss: float, state: Callable[[], State]) -> None:
            losses.append(loss)
            if len(losses) == self.STEPS:
                last.append(copy.deepcopy(state()["parts"]))

        def interrupt(loss: float, state: Callable[[], State]) -> None:
            watch(parts, loss, state)
            if len(parts) == steps:
                only = Plan([planned.opt_level], [planned.half_dtype or "float16"])
                checkpoints.save(Checkpoint(only, None, [], state()), path)
                raise KeyboardInterrupt

        expected = self.trained(planned, partial(watch, whole))
        with pytest.raises(KeyboardInterrupt):
            self.trained(planned, interrupt)
        torch.manual_seed(steps)  # the caller's random numbers have no part in it
        found = self.trained(planned, partial(watch, parts), resume_from=checkpoints.load(path).running)

        assert parts == whole
        assert found == expected
        assert len(whole) == self.STEPS
        assert same(last[0], last[-1])

    @pytest.mark.parametrize("planned", SETTINGS.values(), ids=str)
    def test_a_run_of_any_level_resumes_exactly(self, planned: Run, tmp_path: Path) -> None:
        self.resumes_exactly(planned, 3, tmp_path / "demo.pt")

    @pytest.mark.parametrize("steps", [1, 4, 5, 8])
    def test_a_run_resumes_exactly_after_any_step_of_an_epoch(self, steps: int, tmp_path: Path) -> None:
        self.resumes_exactly(Run("O4", "bfloat16"), steps, tmp_path / "demo.pt")

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_a_run_whose_loss_scale_has_backed_off_resumes_exactly(
        self, opt_level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # With losses so large the first steps overflow at 2**16, and are skipped.
        cross_entropy = torch.nn.functional.cross_entropy
        monkeypatch.setattr(training.F, "cross_entropy", lambda scores, labels: 2.0**10 * cross_entropy(scores, labels))
        skipped: list[int] = []

        def watch(_loss: float, state: Callable[[], State]) -> None:
            skipped.append(state()["counts"].get("skipped_steps", 0))

        planned = Run(opt_level, "float16")
        self.trained(planned, watch)

        assert skipped[2] > 0
        self.resumes_exactly(planned, 3, tmp_path / "demo.pt")
