"""Starts scripts as a user does: each in a Python of its own, behind `ampatch run --cpu`, alone or under torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helpers import completed


@dataclass(frozen=True)
class Run:
    """One start of a script.

    Attributes:
        script: where it is.
        options: its own.
        where: the folder it runs in.
        processes: how many torchrun starts; 0 without torchrun.
        environment: what is set in it besides this process's own.
        by_ampatch: whether `ampatch run --cpu` stands in front.
    """

    script: Path
    options: Sequence[str]
    where: Path
    processes: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    by_ampatch: bool = True

    @property
    def command(self) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        ampatch = ["-m", "ampatch", "run", "--cpu"]
        return [
            sys.executable,
            *(torchrun if self.processes else []),
            *(ampatch if self.by_ampatch else []),
            str(self.script),
            *self.options,
        ]


def carry_out(run: Run) -> subprocess.CompletedProcess[str]:
    """What it printed, in a folder that is made for it; it has to end well."""
    run.where.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(run.environment)}
    done = completed(run.command, cwd=run.where, env=environment)
    assert done.returncode == 0, f"{' '.join(run.command)}\n{done.stdout}{done.stderr}"
    return done


def carry_out_all(runs: Sequence[Run]) -> list[subprocess.CompletedProcess[str]]:
    """Several, two at a time, since most of what they do is importing torch."""
    at_once = 1 if any(run.processes for run in runs) else 2
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(carry_out, runs))


def group_of_one() -> tuple[tuple[str, str], ...]:
    """What a launcher sets for the only process that it starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
    )
