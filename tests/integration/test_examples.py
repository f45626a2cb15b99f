"""Of the scripts in examples/: each runs as a user would run it, and what it learns gets better."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from apart import WITH_TIMM
from helpers import assert_same_state, completed
from small_nets import EACH_LEVEL, ENVIRONMENT, TORCHRUN

EXAMPLES = Path(__file__).parents[2] / "examples"

# Adapters that start two processes; other scripts need torchrun.
BY_THEMSELVES = {"lightning_digits": "--devices=2", "ignite_digits": "--processes=2"}

IN_TWO_PROCESSES = [
    *((name, "--opt-level", level) for name in ("ddp", "accelerate_digits") for level in ("O1", "O2")),
    *((name, two, "--opt-level", level) for name, two in BY_THEMSELVES.items() for level in ("O1", "O2")),
    ("fsdp2",),
]

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

# Of frameworks' adapters; each learns the digits, and resumes to the same bits.
ADAPTERS = ["skorch_digits", "lightning_digits", "ignite_digits", "peft_lora"]

OF_LEVELS = [*ADAPTERS, "accumulation", "single_process", "transformers_digits", "accelerate_digits", "timm_digits"]

ALONE = [
    *((name,) for name in ("low_rank_adapters", "convert_model", "gan", "grad_scaler", "mixed_precision")),
    *((name,) for name in ("gradient_penalty", "report", *OF_LEVELS)),
    *((name, "--opt-level", "O2") for name in OF_LEVELS),  # O1 is what they train at by default
    pytest.param(("compile",), marks=NEEDS_COMPILER),
]

# What comes before the path of a script that needs it.
LAUNCHERS = {"timm_digits": WITH_TIMM}


def run(script: str, *options: str, where: Path, launcher: Sequence[str] = ()) -> str:
    """What a script prints, run by itself in a folder that it leaves as it was."""
    command = [sys.executable, "-W", "error::UserWarning", *launcher, str(EXAMPLES / f"{script}.py"), *options]
    done = completed(command, cwd=where, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(where.iterdir()) == []
    return done.stdout


def first_and_last(printed: str) -> tuple[float, float]:
    """The two values that a script prints of what is to become less: ``step 60: loss 1.334``."""
    first, last = re.findall(r"^step (\d+): [a-z ]+ (-?\d+\.\d+)", printed, re.MULTILINE)
    assert int(first[0]) == 1 < int(last[0])
    return float(first[1]), float(last[1])


def typed(command: str, where: Path) -> str:
    """What a command prints that is typed into a shell."""
    scripts = Path(sys.executable).parent
    environment = {**ENVIRONMENT, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=where, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
class TestExamples:
    @pytest.mark.parametrize("command", ALONE, ids=" ".join)
    def test_loss_falls(self, command, tmp_path):
        first, last = first_and_last(run(*command, where=tmp_path, launcher=LAUNCHERS.get(command[0], ())))
        assert last < first / 2

    @pytest.mark.parametrize("command", IN_TWO_PROCESSES, ids=" ".join)
    def test_loss_falls_in_two_processes(self, command, tmp_path):
        launcher = () if command[0] in BY_THEMSELVES else TORCHRUN
        first, last = first_and_last(run(*command, where=tmp_path, launcher=launcher))
        assert last < first / 2


def saved_by(script: list[str], *options: str, checkpoint: Path) -> dict[str, Any]:
    done = completed([*script, *options, "--checkpoint", str(checkpoint)], cwd=checkpoint.parent, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"accuracy: (\d+\.\d)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 94
    return torch.load(checkpoint, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*ADAPTERS, "convert_model", "grad_scaler", "mixed_precision"])
def test_a_killed_and_resumed_example_ends_with_the_same_bits(name: str, half: str, tmp_path: Path) -> None:
    script = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py")]
    options = ["--epochs", "12", "--half", half]
    whole = saved_by(script, *options, checkpoint=tmp_path / "whole.pt")

    broken = tmp_path / "broken.pt"
    first = subprocess.Popen([*script, *options, "--checkpoint", str(broken)], cwd=tmp_path, env=ENVIRONMENT)
    while not broken.exists() and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    first.wait()
    saved = torch.load(broken, weights_only=True)
    assert ("epoch" in saved and saved["epoch"] < 12) or saved["trainer"]["iteration"] < 12 * 11
    resumed = saved_by(script, *options, checkpoint=broken)

    assert_same_state(resumed, whole)
    if "scaler" in resumed:
        assert (resumed["scaler"] == {}) is (half == "bfloat16")
    if name == "skorch_digits":
        assert resumed["amp"]["loss_scaler0.loss_scale"] == (1 if half == "bfloat16" else 2**16)


# Runs a script, and kills it within an epoch: after the first step of its optimizer once a file exists.
KILLED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

def kill(*_):
    if os.path.exists(file):
        os.kill(os.getpid(), signal.SIGKILL)

_, file, *sys.argv = sys.argv
register_optimizer_step_post_hook(kill)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Of examples that save each epoch: what they save after the first epoch of three, and at the end.
FOLDERS = {
    "accelerate_digits": ("epoch.1", ["model/model.safetensors", "epoch.3/optimizer.bin", "epoch.3/ampatch.pt"]),
    "transformers_digits": (
        "checkpoint-12",
        ["model/model.safetensors", "checkpoint-36/optimizer.pt", "checkpoint-36/ampatch.pt"],
    ),
    "timm_digits": ("last.pth.tar", ["last.pth.tar"]),
}


def assert_same_files(one: Path, other: Path, names: list[str]) -> None:
    from safetensors.torch import load_file

    for name in names:
        load = load_file if name.endswith("safetensors") else functools.partial(torch.load, weights_only=False)
        assert_same_state(load(one / name), load(other / name))


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@EACH_LEVEL
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.covering(1)
def test_an_example_killed_within_an_epoch_resumes_to_the_same_bits(name, level, half, tmp_path) -> None:
    first, files = FOLDERS[name]
    script = [*LAUNCHERS.get(name, ()), str(EXAMPLES / f"{name}.py")]
    killed = ["-c", KILLED, str(tmp_path / "killed" / first), *script]
    codes = []
    for folder, command in (("whole", script), ("killed", killed), ("killed", script)):
        options = ["--epochs", "3", "--opt-level", level, "--half", half, "--checkpoints", str(tmp_path / folder)]
        done = subprocess.run([sys.executable, *command, *options], env=ENVIRONMENT, check=False)
        codes.append(done.returncode)
    assert codes == [0, -signal.SIGKILL, 0]
    assert_same_files(tmp_path / "whole", tmp_path / "killed", files)


@pytest.mark.slow
@pytest.mark.beyond_ci
def test_two_ranks_of_accelerate_resume_to_the_same_bits(tmp_path: Path) -> None:
    options = ["--opt-level", "O2", "--half", "float16", "--accumulate", "2"]
    for name, epochs in (("whole", 3), ("broken", 2), ("broken", 3)):
        given = [*options, "--epochs", str(epochs), "--checkpoints", str(tmp_path / name)]
        command = [sys.executable, *TORCHRUN, str(EXAMPLES / "accelerate_digits.py"), *given]
        done = completed(command, cwd=tmp_path, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    assert_same_files(tmp_path / "whole", tmp_path / "broken", FOLDERS["accelerate_digits"][1])


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_an_exported_program_runs_without_ampatch(half: str, tmp_path: Path) -> None:
    program = tmp_path / "digits.pt2"
    script = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / "convert_model.py")]
    options = ["--epochs", "1", "--half", half, "--program", str(program)]
    done = completed([*script, *options], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    serve = (
        "import sys, torch; made = torch.export.load(sys.argv[1]).module(); made(torch.zeros(359, 1, 8, 8));"
        "assert not [name for name in sys.modules if name.startswith('ampatch')]"
    )
    done = completed([sys.executable, "-c", serve, str(program)], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
class TestTune:
    def test_only_the_planted_function_needs_an_overlay(self, tmp_path: Path) -> None:
        printed = run("tune", where=tmp_path)
        digits, language, planted = printed.split("== ")[1:]
        assert "no overlay is needed" in digits
        assert "no overlay is needed" in language
        assert "blacklist:\n  __main__:\n" in planted
        assert planted.count("    - ") == 1
        assert "    - standardised" in planted

    def test_the_command_of_the_docstring_writes_the_list(self, tmp_path: Path) -> None:
        command = "ampatch tune tune:planted"
        assert command in (EXAMPLES / "tune.py").read_text(encoding="utf-8")
        shutil.copy(EXAMPLES / "tune.py", tmp_path)
        typed(command, tmp_path)
        written = yaml.safe_load((tmp_path / "casts.yaml").read_text(encoding="utf-8"))
        assert written == {"blacklist": {"tune": ["standardised"]}}


def test_every_example_is_run() -> None:
    run_here = {"compile", "tune", *(command[0] for command in (*ALONE[:-1], *IN_TWO_PROCESSES))}
    page = (EXAMPLES.parent / "docs" / "guide" / "find_an_overflow.md").read_text(encoding="utf-8")
    run_here |= set(re.findall(r"^ *python examples/(\w+)\.py", page, re.MULTILINE))  # by test_pages.py
    assert {path.stem for path in EXAMPLES.iterdir() if path.suffix == ".py"} == run_here
