"""The file that `ampatch demo` writes when it is interrupted, and resumes from.

Owns the format: a dict that `torch.load(weights_only=True)` reads, so that a foreign file cannot run code. A file must
never exist in part, and one of another format or version must never be used.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ampatch.demo.plan import Plan
from ampatch.demo.training import Result, State
from ampatch.diagnostics import json_files
from ampatch.errors import AmpError

_FORMAT = "ampatch demo"
# Increase with every change of the saved content, the network or the optimizer.
_VERSION = 4


class CheckpointError(AmpError, ValueError):
    """The demo cannot resume from a file. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Progress of the demo.

    Attributes:
        plan: runs to train.
        json: absolute path of the JSON report; None for no report.
        finished: results of the first runs of the plan.
        running: state of the run after these; None if it has not begun.
        report: absolute path of the page of `amp.report`; None for no page.
    """

    plan: Plan
    json: str | None
    finished: list[Result]
    running: State | None
    report: str | None = None


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a checkpoint; an existing file is replaced.

    The run may change the tensors of its state once this function has returned.

    Raises:
        OptionError: the path is none of a file that can be written.
        OSError: the file could not be written; an existing file is unchanged.
    """
    target = json_files.checked_path(path, (), "")
    run = checkpoint.plan.runs()[len(checkpoint.finished) :][:1]
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "arguments": {**asdict(checkpoint.plan), "json": checkpoint.json, "report": checkpoint.report},
        "finished": [asdict(result) for result in checkpoint.finished],
        # The name is for people who read the file: `load` finds the run by the number of results.
        "running": None if checkpoint.running is None else {"run": str(*run), "state": checkpoint.running},
    }
    with json_files.replacing(target) as unfinished:
        torch.save(content, unfinished)


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or is not a complete checkpoint of this version.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of archives in other formats
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror or error})") from error
    except Exception as error:  # torch raises errors of many types for foreign files
        raise _error(path, "is no whole checkpoint: it was cut short, damaged, or is something else") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _error(path, "was not written by `ampatch demo`")
    if content.get("version") != _VERSION:
        found = content.get("version")
        raise _error(path, f"has the format of another version of ampatch: found {found!r}, expected {_VERSION}")
    try:
        return _checkpoint(content)
    except (KeyError, TypeError) as error:
        raise _error(path, "was written by `ampatch demo`, but has been changed since") from error


def _checkpoint(content: dict[str, Any]) -> Checkpoint:
    arguments = dict(content["arguments"])
    json, report = arguments.pop("json"), arguments.pop("report")
    finished = [Result(**result) for result in content["finished"]]
    running = None if content["running"] is None else content["running"]["state"]
    return Checkpoint(Plan(**arguments), json, finished, running, report)


def _error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} {what}; expected a file that `ampatch demo` saved when it was interrupted. To train from the "
        "start, leave --resume out."
    )
