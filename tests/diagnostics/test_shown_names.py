"""The names of files as tables and sentences show them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ampatch.diagnostics.shown_names import shown_path

CELL = "/tmp/ipykernel_4242/324111416.py"


@pytest.fixture
def notebook(monkeypatch):
    """A stand-in for IPython, which has compiled one cell."""
    compiler = SimpleNamespace(format_code_name={CELL: ("Cell", "In[3]")}.get)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_a_path_is_shown_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "models" / "net.py")) == "models/net.py"


def test_a_cell_of_a_notebook_has_the_number_of_its_run(notebook):
    assert shown_path(CELL) == "In[3]"


def test_other_files_are_shown_as_ever_in_a_notebook(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "net.py")) == "net.py"


def test_ipython_without_cells_changes_nothing(monkeypatch):
    for shell in (None, SimpleNamespace(compile=compile)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert shown_path(CELL) == CELL
