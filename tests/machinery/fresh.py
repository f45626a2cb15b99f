"""Interpreters in which torch is imported and nothing of ampatch, each made in a moment: forked, not started.

To start Python and import torch takes longer than most tests do. One process does so, and forks another for every
program. Must never keep anything from one program to the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The programs run outside of the loop, at the module's top, so that they end as any interpreter does.
_SERVER = """
import json, os, runpy, sys
import torch
for line in iter(sys.stdin.readline, ""):
    program = json.loads(line)
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, sum(os.times()[:4]), flush=True)
else:
    sys.exit()
for number, (name, flags) in enumerate(zip(program["files"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
    os.dup2(os.open(name, flags), number)
os.chdir(program["cwd"])
os.environ.clear()
os.environ.update(program["environment"])
sys.argv[1:] = program["arguments"]
exec(program["code"])
"""

# What `python -m ampatch` runs.
COMMAND = "runpy.run_module('ampatch', run_name='__main__', alter_sys=True)"


# Processor time so far of each process that forks, by its id.
_times: dict[int, float] = {}


def processor_time() -> float:
    """Returns the seconds of processor time that programs have taken, with what forks them, while that runs."""
    return sum(_times.values())


class Fresh:
    """Runs programs, each in an interpreter of its own that has imported torch."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        code: str,
        *arguments: str,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        stdout: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """What became of a program, as `subprocess.run` says it of ``python -P -c code``.

        Args:
            code: the program.
            arguments: its own.
            cwd: where it runs; None: here.
            environment: what it is told; None: the same as this process.
            stdout: the file that it writes to; None: what it writes is returned.
        """
        server = self._running()
        with tempfile.TemporaryDirectory() as folder:
            written, errors = Path(folder) / "stdout", Path(folder) / "stderr"
            written.touch()
            errors.touch()
            program = {
                "code": code,
                "arguments": arguments,
                "cwd": str(cwd or Path.cwd()),
                "environment": dict(os.environ) if environment is None else environment,
                "files": [os.devnull, stdout or str(written), str(errors)],
            }
            assert server.stdin is not None
            assert server.stdout is not None
            print(json.dumps(program), file=server.stdin, flush=True)
            status, taken = server.stdout.readline().split()
            _times[server.pid] = float(taken)
            return subprocess.CompletedProcess(["-c", code], int(status), written.read_text(), errors.read_text())

    def stop(self) -> None:
        """Ends the process that forks them."""
        if self._server is not None:
            self._server.communicate()
            del _times[self._server.pid]  # the operating system counts it from here on

    def _running(self) -> subprocess.Popen[str]:
        if self._server is None:
            # What else Python is told, such as to write at once, is not for the programs.
            told = {k: v for k, v in os.environ.items() if k == "PYTHONPATH" or not k.startswith(("PYTHON", "COV_"))}
            command = [sys.executable, "-P", "-c", _SERVER]
            self._server = subprocess.Popen(
                command, env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
            )
        return self._server
