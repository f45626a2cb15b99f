"""Of the scripts in examples/: each runs as a user would run it, and what it learns gets better."""

from __future__ import annotations

import os
import re
import shutil
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

EXAMPLES = Path(__file__).parents[2] / "examples"

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
UNDER_TORCHRUN = [
    *((script, "--opt-level", level) for script in ("ddp", "accelerate_digits") for level in ("O1", "O2")),
    ("fsdp2",),
]

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

#: Of frameworks' adapters; each learns the digits, and resumes to the same bits.
ADAPTERS = ["skorch_digits", "lightning_digits", "ignite_digits", "peft_lora"]

SCRIPTS = [
    "low_rank_adapters",
    "accumulation",
    pytest.param("compile", marks=NEEDS_COMPILER),
    "convert_model",
    "gan",
    "grad_scaler",
    "mixed_precision",
    "gradient_penalty",
    "report",
    "single_process",
    "transformers_digits",
    "accelerate_digits",
    "timm_digits",
    *ADAPTERS,
]

#: What comes before the path of a script that needs it.
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
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_learn_something(self, script, tmp_path):
        first, last = first_and_last(run(script, where=tmp_path, launcher=LAUNCHERS.get(script, ())))
        assert last < first / 2

    @pytest.mark.parametrize(
        "script",
        [*ADAPTERS, "accumulation", "single_process", "transformers_digits", "accelerate_digits", "timm_digits"],
    )
    def test_learn_something_in_half(self, script, tmp_path):
        launcher = LAUNCHERS.get(script, ())
        first, last = first_and_last(run(script, "--opt-level", "O2", where=tmp_path, launcher=launcher))
        assert last < first / 2

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("command", [("lightning_digits", "--devices"), ("ignite_digits", "--processes")], ids=str)
    def test_learn_something_where_the_framework_starts_two_processes(self, command, level, tmp_path):
        printed = run(*command, "2", "--opt-level", level, where=tmp_path)
        first, last = first_and_last(printed)
        assert last < first / 2

    @pytest.mark.parametrize("command", UNDER_TORCHRUN, ids=" ".join)
    def test_learn_something_in_two_processes(self, command, tmp_path):
        first, last = first_and_last(run(*command, where=tmp_path, launcher=TORCHRUN))
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
def test_one_that_is_killed_and_resumed_ends_with_the_same_bits(name: str, half: str, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_program_that_is_exported_runs_without_ampatch(half: str, tmp_path: Path) -> None:
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
    def test_the_planted_culprit_is_found_and_the_others_need_no_list(self, tmp_path: Path) -> None:
        printed = run("tune", where=tmp_path)
        digits, language, planted = printed.split("== ")[1:]
        for each in (digits, language):
            assert "no overlay is needed" in each
        assert "blacklist:\n  __main__:\n" in planted
        assert planted.count("    - ") == 1
        assert "    - standardised" in planted

    def test_the_command_of_its_docstring_writes_the_list(self, tmp_path: Path) -> None:
        command = "ampatch tune tune:planted"
        assert command in (EXAMPLES / "tune.py").read_text(encoding="utf-8")
        shutil.copy(EXAMPLES / "tune.py", tmp_path)
        typed(command, tmp_path)
        written = yaml.safe_load((tmp_path / "casts.yaml").read_text(encoding="utf-8"))
        assert written == {"blacklist": {"tune": ["standardised"]}}


def test_all_of_them_are_run() -> None:
    run_here = {getattr(script, "values", [script])[0] for script in SCRIPTS} | {name for name, *_ in UNDER_TORCHRUN}
    run_here.add("tune")
    page = (EXAMPLES.parent / "docs" / "guide" / "find_an_overflow.md").read_text(encoding="utf-8")
    run_here |= set(re.findall(r"^ *python examples/(\w+)\.py", page, re.MULTILINE))  # by test_pages.py
    assert {path.stem for path in EXAMPLES.iterdir() if path.suffix == ".py"} == run_here
