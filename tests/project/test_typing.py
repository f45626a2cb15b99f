"""What a type checker makes of calls: a model keeps its class through `amp.initialize`."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampatch import amp

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # mypy reads torch, which takes ten seconds where it has no cache
def test_mypy_keeps_the_class_of_a_model_through_initialize() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", "tests/typed_calls.py"]

    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (0, "Success: no issues found in 1 source file"), (
        checked.stdout
    )


def test_help_of_initialize_has_each_argument_with_default_and_meaning() -> None:
    text = pydoc.render_doc(amp.initialize, renderer=pydoc.plaintext)
    signature, _, described = text.partition("Args:")
    parameters = inspect.signature(amp.initialize).parameters.values()

    assert len(parameters) == 33
    assert [each.name for each in parameters if str(each) not in signature.replace("\n", " ")] == []
    by_groups = re.findall(r"^ {8}(\w+): ", described.partition("Returns:")[0], re.MULTILINE)
    assert sorted(by_groups) == sorted(each.name for each in parameters)
