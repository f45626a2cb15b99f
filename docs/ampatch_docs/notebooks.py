"""Runs the notebooks of the documentation: `make notebook` stores their outputs anew, and a test compares these.

Owns what a stored notebook looks like. Must not store anything of the machine that ran it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "tutorials"

#: Seconds that one cell may take; a busy machine needs minutes.
_LIMIT = 600


def executed(path: Path, folder: Path) -> Any:
    """Returns a notebook after a run from top to bottom in a new kernel.

    Args:
        path: the notebook, which stays as it is.
        folder: the current folder of the run.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=_LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main() -> None:
    """Runs every notebook, and stores it with its outputs."""
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        nbformat.write(executed(path, TUTORIALS), path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main())
