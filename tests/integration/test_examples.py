"""Of the scripts in examples/: each runs as a user would run it, and what it learns gets better."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import completed

EXAMPLES = Path(__file__).parents[2] / "examples"

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
UNDER_TORCHRUN = [("ddp", "--opt-level", "O1"), ("ddp", "--opt-level", "O2"), ("fsdp2",)]

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SCRIPTS = [
    "adapters",
    "accumulation",
    pytest.param("compile", marks=NEEDS_COMPILER),
    "gan",
    "gradient_penalty",
    "single_process",
]


def run(script: str, *options: str, where: Path, launcher: Sequence[str] = ()) -> str:
    """What a script prints, run by itself in a folder that it leaves as it was."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", *launcher, str(EXAMPLES / f"{script}.py"), *options]
    done = completed(command, cwd=where, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(where.iterdir()) == []
    return done.stdout


def first_and_last(printed: str) -> tuple[float, float]:
    """The two values that a script prints of what is to become less: ``step 60: loss 1.334``."""
    first, last = re.findall(r"^step (\d+): [a-z ]+ (-?\d+\.\d+)", printed, re.MULTILINE)
    assert int(first[0]) == 1 < int(last[0])
    return float(first[1]), float(last[1])


@pytest.mark.slow
class TestExamples:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_learn_something(self, script, tmp_path):
        first, last = first_and_last(run(script, where=tmp_path))
        assert last < first / 2

    @pytest.mark.parametrize("script", ["accumulation", "single_process"])
    def test_learn_something_in_half(self, script, tmp_path):
        first, last = first_and_last(run(script, "--opt-level", "O2", where=tmp_path))
        assert last < first / 2

    @pytest.mark.parametrize("command", UNDER_TORCHRUN, ids=" ".join)
    def test_learn_something_in_two_processes(self, command, tmp_path):
        first, last = first_and_last(run(*command, where=tmp_path, launcher=TORCHRUN))
        assert last < first / 2


def test_all_of_them_are_run() -> None:
    run_here = {getattr(script, "values", [script])[0] for script in SCRIPTS} | {name for name, *_ in UNDER_TORCHRUN}
    assert {path.stem for path in EXAMPLES.iterdir() if path.suffix == ".py"} == run_here
