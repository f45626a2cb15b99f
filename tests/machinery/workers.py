"""Real processes with a process group, which run a test's function together: every rank the same, as under torchrun.

They are started once and serve many tests, since starting them takes longer than most tests do.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What is imported here is there in every worker from the start.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "ampatch"])

_PATIENCE = 120.0  # seconds until a collective that some rank never joins is given up


# Processor time of every worker so far, by its process's id.
_times: dict[int, float] = {}


def processor_time() -> float:
    """Returns the seconds of processor time that all workers of this process have taken."""
    return sum(_times.values())


class Workers:
    """Processes of one group.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None  # where they find one another

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns in every process, by rank.

        Args:
            function: at the top of a module.
            args: whatever pickles. A device is "cpu" or "cuda".

        Raises:
            AssertionError: it raised in one of them, or one of them died or did not answer in time. The message has the
                call, and of each rank what it wrote to stderr last; of one that hangs, where it does.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes: list[tuple[Any, str | None]] = []
        for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True)):
            try:
                ready = pipe.poll(_PATIENCE)
                *outcome, taken = pipe.recv() if ready else (None, f"rank {rank} gave no answer in {_PATIENCE} s", 0.0)
                outcomes.append(tuple(outcome))
                _times[process.pid] = max(taken, _times.get(process.pid, 0.0))
            except (EOFError, OSError):
                outcomes.append((None, f"rank {rank} died"))
        faults = [fault for _, fault in outcomes if fault is not None]
        if faults:
            given = ", ".join(map(repr, args))
            written = [f"stderr of rank {rank}:\n{text}" for rank, text in enumerate(self._errors()) if text]
            self.stop()  # the others may wait for it for ever
            raise AssertionError("\n".join([f"{function.__qualname__}({given})", *faults, *written]))
        return [result for result, _ in outcomes]

    def stop(self) -> None:
        """Ends the processes; the next `run` starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()

    def _errors(self) -> list[str]:
        """Returns the last lines that each rank has written to stderr."""
        assert self._directory is not None
        paths = (_stderr_of(Path(self._directory.name) / "store", rank) for rank in range(self.count))
        return [path.read_text(errors="replace")[-8000:] if path.exists() else "" for path in paths]

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name) / "store"
        for rank in range(self.count):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(there, rank, self.count, str(store)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _stderr_of(store: Path, rank: int) -> Path:
    return store.with_name(f"stderr.{rank}")


def _serve(pipe: Connection, rank: int, count: int, store: str) -> None:
    errors = os.open(_stderr_of(Path(store), rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(errors, 2)
    faulthandler.enable(errors)
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(rank % gpus)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus >= count else "gloo",  # NCCL wants a GPU for each
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=_PATIENCE / 2),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        # Where a rank hangs is written before the test gives it up.
        faulthandler.dump_traceback_later(0.9 * _PATIENCE, file=errors)
        outcome = _outcome(function, args)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(outcome)


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Returns what a call gave, or why it did not, and the process's time so far, pickled."""
    from ampatch import amp

    torch.manual_seed(0)
    try:
        return bytes(ForkingPickler.dumps((function(*args), None, sum(os.times()[:2]))))
    except BaseException:  # noqa: BLE001 - it is handed on, whatever it is
        fault = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        return bytes(ForkingPickler.dumps((None, fault, sum(os.times()[:2]))))
    finally:
        amp.deinitialize()
        torch._dynamo.reset()
