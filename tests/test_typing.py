"""What a type checker makes of calls: a model keeps its class through `amp.initialize`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_overloads

import pytest

from ampatch import amp

ROOT = Path(__file__).parent.parent


@pytest.mark.slow  # mypy reads torch, which takes ten seconds where it has no cache
def test_mypy_sees_the_classes_of_what_was_handed_in() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", "tests/typed_calls.py"]

    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (0, "Success: no issues found in 1 source file"), (
        checked.stdout
    )


def test_every_overload_has_all_arguments_in_their_order() -> None:
    def told(function: object) -> list[tuple[object, ...]]:
        parameters = list(inspect.signature(function).parameters.values())
        assert [each.name for each in parameters[:2]] == ["models", "optimizers"]
        return [
            (each.name, each.kind, each.annotation, each.default is inspect.Parameter.empty) for each in parameters[2:]
        ]

    overloads = get_overloads(amp.initialize)

    assert [told(each) for each in overloads] == [told(amp.initialize)] * 2
