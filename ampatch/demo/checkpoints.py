"""The file that `ampatch demo` writes when it is interrupted, and goes on from.

Owns the format: a dict that `torch.load(weights_only=True)` reads, so that a file from elsewhere cannot run anything. A
file is there whole or not at all, and is checked before any of it is used.
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from ampatch.demo import training
from ampatch.demo.plan import CHOICES, Plan
from ampatch.demo.training import Result, State
from ampatch.errors import AmpError
from ampatch.opt_levels import HALF_DTYPES

_FORMAT = "ampatch demo"
# To be counted up with every change of what is saved, and of the network or the optimizer that it is for.
_VERSION = 2
_DAMAGED = "is no whole checkpoint: it was cut short, damaged, or is something else"


class CheckpointError(AmpError, ValueError):
    """A file cannot be resumed from. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far the demo has come.

    Attributes:
        plan: what it trains.
        json: where its report goes, as an absolute path; None for nowhere.
        finished: the results of the first runs of the plan.
        running: the state of the run after these; None where it has not begun.
    """

    plan: Plan
    json: str | None
    finished: list[Result]
    running: State | None


def check_target(path: Path) -> None:
    """Whether a file could be written here, without writing it.

    Raises:
        OSError: it could not.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{str(path)!r} is not an ordinary file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OSError(f"there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"no file may be made in {str(folder)!r}")


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a checkpoint, in place of the file that is there.

    The state of the run may refer to tensors that go on changing once this has returned.

    Raises:
        OSError: it could not be written; a file that was there is as it was.
    """
    check_target(path)
    run = checkpoint.plan.runs()[len(checkpoint.finished) :][:1]
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "arguments": {**asdict(checkpoint.plan), "json": checkpoint.json},
        "finished": [asdict(result) for result in checkpoint.finished],
        # The name is for people who look into the file: the plan and the number of results say the same.
        "running": None if checkpoint.running is None else {"run": str(*run), "state": checkpoint.running},
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    target = path.resolve()  # through a link, rather than in its place
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or is no whole checkpoint of this version.
    """
    content = _content(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _error(path, "was not written by `ampatch demo`")
    if content.get("version") != _VERSION:
        found = content.get("version")
        raise _error(path, f"has the format of another version of ampatch: found {found!r}, expected {_VERSION}")
    try:
        checkpoint = _checkpoint(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _error(path, "was written by `ampatch demo`, but has been changed since") from error
    return checkpoint


def _content(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():
            raise _error(path, "is not an ordinary file")
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise _error(path, "is empty")
            # torch.load does not look at the checksums.
            if ZipFile(file).testzip() is not None:
                raise _error(path, _DAMAGED)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch makes of an archive that is something else
                return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror or error})") from error
    except Exception as error:  # there is no end to what a reader of another's format may raise
        raise _error(path, _DAMAGED) from error


def _checkpoint(content: dict[str, Any]) -> Checkpoint:
    arguments = dict(content["arguments"])
    json = arguments.pop("json")
    plan = Plan(**arguments)
    finished = [Result(**result) for result in content["finished"]]
    running = None if content["running"] is None else content["running"]["state"]
    runs = plan.runs()
    done = [(run.opt_level, run.half_dtype) for run in runs[: len(finished)]]
    sound = (
        (json is None or isinstance(json, str))
        and set(plan.opt_levels) <= set(CHOICES)
        and set(plan.half_dtypes) <= HALF_DTYPES.keys()
        and isinstance(plan.epochs, int)
        and isinstance(plan.seed, int)
        and done == [(result.opt_level, result.half_dtype) for result in finished]
        and (running is None or (len(finished) < len(runs) and training.steps_done(running) > 0))
    )
    if not sound:
        raise ValueError("its parts contradict one another")
    return Checkpoint(plan, json, finished, running)


def _error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} {what}; expected a file that `ampatch demo` saved when it was interrupted. To train from the "
        "start, leave --resume out."
    )
