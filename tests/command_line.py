"""Calls of the command `ampatch` in the process of the tests."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from ampatch.cli import main as cli


class Ended(NamedTuple):
    """A command's exit status, and what it printed."""

    status: int
    out: str
    err: str


def ampatch(*arguments: object) -> Ended:
    """Runs a command, also one that argparse ends."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(each) for each in arguments])
        except SystemExit as exit_:
            status = exit_.code
    return Ended(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))
