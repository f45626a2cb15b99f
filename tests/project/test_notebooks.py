"""Tests that the notebooks of the documentation run, and that their outputs show what their text claims."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
pytest.importorskip("nbclient", reason="needs nbclient")

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = DOCS / "tutorials" / "from_nan_to_cure.ipynb"


def outputs_of(notebook: Any) -> list[str]:
    """Of each cell with code the text that it printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output["text"] for output in cell.outputs) for cell in cells]


def accuracy(output: str) -> float:
    (found,) = re.findall(r"^accuracy (\d+\.\d) %$", output, re.MULTILINE)
    return float(found)


def check(notebook: Any) -> None:
    """Fails if outputs of the tutorial do not show what its text claims."""
    _, _, _, float32, broken, trace, rule, *cures, preflight = outputs_of(notebook)
    assert "loss nan" in broken
    assert "LossScaleError: loss scaler 0 is at its floor" in broken
    assert "First inf: in torch.Tensor.matmul (operator bmm).\n  module    attention (Attention)\n" in trace
    assert "  line      In[2]:7: scores = self.query(x) @ self.key(x)" in trace
    assert re.search(r"^  float32   largest \d+", trace, re.MULTILINE)
    assert "(tried) this function in float32 in 'attention': amp.initialize(" in trace
    assert "cast_lists={'modules': {'attention': {'blacklist': {'*': ['matmul']}}}}" in trace
    assert "* torch.Tensor.__matmul__   whitelist" in rule
    assert accuracy(float32) > 94
    assert [abs(accuracy(cure) - accuracy(float32)) < 2 for cure in cures] == [True, True]
    assert "overflows, mended" in preflight
    assert 'cast_lists={"blacklist": {"*": ["matmul"]}}' in preflight
    lost = preflight.partition("More than 5% lost to bfloat16's precision")[2].partition("Functions in no cast list")[0]
    # Which of its two passes loses most depends on the processor, as the trained weights do.
    # The table breaks the line within the operator's name where that is long.
    assert re.search(r"^ (forward|backward) +softmax .*float32 +attention ", lost, re.MULTILINE)


def test_stored_outputs_are_of_one_run_and_name_no_folder():
    notebook = nbformat.read(TUTORIAL, as_version=4)
    check(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not re.search(r"/(?:tmp|home|root)/", TUTORIAL.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_tutorial_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    notebooks = importlib.import_module("ampatch_docs.notebooks")
    check(notebooks.executed(TUTORIAL, tmp_path))
