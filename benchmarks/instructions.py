"""Counts the instructions of a training step and of a call: their cost where clocks are too noisy.

Run as `python benchmarks/instructions.py`; needs Linux, valgrind with its headers, and a C compiler. On a shared
processor, a step's time varies by a tenth or more between rounds; its number of instructions does not. Each contender
trains the models of `eager_overhead.py` under callgrind, in its own process, forked after torch is imported. The first
steps are not counted. Then callgrind counts instructions, and misses of the first instruction cache, which large Python
code causes. Between runs the counts differ by a few per thousand.

For steps, prints ratios to the reference's counts: instructions, and misses in brackets. For calls, in a loop, prints
the instructions over those of the unpatched call in the same process. Valgrind does not support AVX-512, so matrix
products are those of a processor with AVX2. They are the same for all contenders. In half precision they are a large
part of a step, since a processor without half arithmetic emulates it. `--phases` prints the parts of each step. The
tables are Markdown, as in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from eager_cases import CALLS, HALVES, MODELS, OPTIMIZERS, WORK, names_of, set_up, tried
from eager_overhead import PHASES, is_ours, table
from peers import AUTOCAST, BY_HAND, CONTENDERS, UNPATCHED, Batch, Peer
from torch import nn

COUNTED = (AUTOCAST, "ampatch O1", BY_HAND, "ampatch O2")
WARMING_STEPS = 10
STEPS = 3
CALLS_EACH = 100
CALLING = tuple(name for name in COUNTED if "calls" not in CONTENDERS[name].skips)
CALL_NAMES = frozenset(call.name for call in CALLS)
#: For calls: the name in place of a model, and the phases.
CALL, WITHOUT, WITH = "call", "without", "with"

#: Requests of a process to the callgrind it runs under. They are C macros, so they must be compiled.
REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *label) { CALLGRIND_DUMP_STATS_AT(label); }
"""
LIBRARY = "requests.so"


class Case(NamedTuple):
    """A model's step; or a call, with `CALL` as the model and the call's name as the optimizer."""

    half: str
    model: str
    optimizer: str


class Counts(NamedTuple):
    """Counts of one step, or of a part of it.

    Attributes:
        instructions: number of executed instructions.
        misses: number of misses of the first instruction cache.
    """

    instructions: float
    misses: float

    def plus(self, other: Counts) -> Counts:
        return Counts(self.instructions + other.instructions, self.misses + other.misses)


#: Counts by contender, case and phase. Calls have `CALL` as their model, and phases of their own.
Counted = dict[tuple[str, Case, str], Counts]


# In the process under callgrind


class Callgrind:
    """The callgrind that this process runs under.

    Args:
        directory: directory of the compiled requests.
        contender: name of the counted contender.
    """

    def __init__(self, directory: Path, contender: str) -> None:
        self._requests = ctypes.CDLL(str(directory / LIBRARY))
        self._contender = contender

    @contextlib.contextmanager
    def counting(self, warm_up: Callable[[], object]) -> Iterator[None]:
        """Counts the instructions of the block, after ``warm_up`` has filled callgrind's simulated caches."""
        gc.collect()
        gc.disable()  # a collection might fall into one contender's step, and not into another's
        self._requests.start()
        warm_up()
        self._requests.zero()
        try:
            yield
        finally:
            self._requests.stop()
            gc.enable()

    def count_steps(self, peer: Peer, case: Case, batch: Batch, warming: int, steps: int) -> None:
        """Counts training steps by phase, after ``warming`` uncounted steps."""
        for _ in range(warming):
            peer.step(batch)
        with self.counting(warm_up=functools.partial(peer.step, batch)):
            for _ in range(steps):
                peer.step(batch, functools.partial(self.write, case))

    def write(self, case: Case, phase: str) -> None:
        """Dumps the counts since the last dump, and resets them."""
        self._requests.dump("|".join((self._contender, *case, phase)).encode())


def within(directory: Path, count: Callable[[str, Sequence[Case], Callgrind], None]) -> None:
    """Counts each contender in a forked process; `run_within` starts this.

    Forks, since importing torch takes the most time.

    Args:
        directory: directory of the compiled requests.
        count: function that counts the cases of a contender.
    """
    contenders, cases = json.load(sys.stdin)
    for contender in contenders:
        os.environ.update(CONTENDERS[contender].environment)
        arguments = contender, [Case(*each) for each in cases], Callgrind(directory, contender)
        process = multiprocessing.get_context("fork").Process(target=count, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{contender} ended with {process.exitcode}")
        for name in CONTENDERS[contender].environment:
            del os.environ[name]


def count_calls(callgrind: Callgrind, contender: str, half: str) -> None:
    torch.manual_seed(0)
    layer, kernel = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 1, 3, 3))
    names = names_of(layer, kernel, HALVES[half])

    def count(phase: str, statements: Mapping[str, str]) -> None:
        for name, statement in statements.items():
            if tried(statement, names).dtype:
                loop = compile(f"for _ in range({CALLS_EACH}): {statement}", name, "exec")
                with callgrind.counting(warm_up=functools.partial(exec, loop, names)):
                    exec(loop, names)
                    callgrind.write(Case(half, CALL, name), phase)

    count(WITHOUT, {call.name: call.unpatched or call.statement for call in CALLS})
    with set_up(CONTENDERS[contender].make, layer, half) as peer, peer.casts():
        count(WITH, {call.name: call.statement for call in CALLS})


def count_step(callgrind: Callgrind, contender: str, case: Case) -> None:
    torch.manual_seed(0)
    batch = MODELS[case.model].batch()
    with set_up(CONTENDERS[contender].make, MODELS[case.model].make(), case.half, case.optimizer) as peer:
        callgrind.count_steps(peer, case, batch, WARMING_STEPS, STEPS)


def count(contender: str, cases: Sequence[Case], callgrind: Callgrind) -> None:
    torch.set_num_threads(1)
    if contender in CALLING:
        for half in dict.fromkeys(case.half for case in cases):
            count_calls(callgrind, contender, half)
    for case in cases:
        count_step(callgrind, contender, case)


# In the process that starts callgrind


@contextlib.contextmanager
def prepared(parser: argparse.ArgumentParser) -> Iterator[Path]:
    """Makes a directory for `run_within`, and removes it afterwards; exits with an error if a tool is missing."""
    if shutil.which("valgrind") is None:
        parser.error("there is no valgrind here; install it with its headers, as by `apt-get install valgrind`")
    with tempfile.TemporaryDirectory() as directory:
        compile_requests(Path(directory), parser)
        yield Path(directory)


def compile_requests(directory: Path, parser: argparse.ArgumentParser) -> None:
    """Compiles the requests to callgrind."""
    (directory / "requests.c").write_text(REQUESTS, encoding="utf-8")
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", LIBRARY, "requests.c"]
    if shutil.which(command[0]) is None:
        parser.error(f"there is no C compiler {command[0]!r} here; install one, or name it in CC")
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        parser.error(
            f"valgrind's headers do not compile; install them, as by `apt-get install valgrind`. {done.stderr}"
        )


def run_within(
    script: str, contenders: Sequence[str], cases: Sequence[Case], directory: Path, options: Iterable[str]
) -> list[Path]:
    """Runs a script's contenders under callgrind, and returns the files that callgrind wrote."""
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", *options),
        *(f"--callgrind-out-file={directory}/counts.%p", f"--log-file={directory}/log.%p"),
        *(sys.executable, script, "--within", str(directory)),
    ]
    # The iteration order of sets depends on hashes, and must be the same in every run.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, input=json.dumps([contenders, cases]), text=True, env=environment, check=False)
    if done.returncode:
        logs = "".join(log.read_text(encoding="utf-8", errors="replace") for log in sorted(directory.glob("log.*")))
        raise SystemExit(f"{script} ended with {done.returncode} within valgrind: {logs}")
    return list(directory.glob("counts.*"))


def run(contenders: Sequence[str], cases: Sequence[Case], directory: Path) -> Counted:
    """Runs the contenders under callgrind, and returns their counts per step or call."""
    counted: Counted = {}
    for file in run_within(__file__, contenders, cases, directory, ["--cache-sim=yes"]):
        found = read(file)
        if found is not None:
            contender, case, phase, counts = found
            key = contender, case, phase
            times = CALLS_EACH if case.model == CALL else STEPS
            counted[key] = counted.get(key, Counts(0, 0)).plus(Counts(*(each / times for each in counts)))
    return counted


def read(file: Path) -> tuple[str, Case, str, Counts] | None:
    """Returns contender, case, phase and counts of one of callgrind's files; None if the file is of no phase."""
    label, events = "", []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            key, _, value = text.partition(":")
            if key == "desc" and "Client Request:" in value:
                label = value.rpartition("Client Request:")[2].strip()
            elif key == "events":
                events = value.split()
            elif key == "summary":
                numbers = dict(zip(events, map(int, value.split()), strict=False))
                contender, *case, phase = label.split("|") if label else ["", ""]
                return (contender, Case(*case), phase, Counts(numbers["Ir"], numbers["I1mr"])) if case else None
    return None


# Tables


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a table.

    Attributes:
        half: half type.
        name: model, optimizer and, for a phase, its name; or the name of a call.
        contender: name of the contender.
        instructions: number of instructions of a step, a phase or a call.
        misses: number of misses of the first instruction cache.
        reference: name of the contender that ratios refer to.
        of_instructions: ratio of instructions; None for the reference itself, and for calls and phases.
        of_misses: ratio of misses; None as ``of_instructions``.
        aim: maximum ratio of a step's time to the reference's; None for no aim.
        over: instructions of a call over those of the unpatched call in the same process; None otherwise.
    """

    half: str
    name: str
    contender: str
    instructions: float
    misses: float
    reference: str
    of_instructions: float | None = None
    of_misses: float | None = None
    aim: float | None = None
    over: float | None = None

    def cell(self) -> str:
        if self.name in CALL_NAMES:
            return f"{self.instructions:.0f}" if self.over is None else f"{self.over:+.0f}"
        if self.of_instructions is None:
            return f"{self.instructions / 1000:.0f}k ({self.misses / 1000:.1f}k)"
        return f"{self.of_instructions:.3f} ({self.of_misses:.2f})"


def whole_step(counted: Counted, contender: str, case: Case) -> Counts:
    phases = (counts for (name, of, _), counts in counted.items() if (name, of) == (contender, case))
    return functools.reduce(Counts.plus, phases)


def rows_of_steps(counted: Counted, cases: Iterable[Case], contenders: Iterable[str]) -> Iterator[Row]:
    for case, contender in itertools.product(cases, contenders):
        work, reference = f"whole step, {case.optimizer}", CONTENDERS[contender].reference
        counts, others = whole_step(counted, contender, case), whole_step(counted, reference, case)
        row = Row(case.half, f"{case.model}: {work}", contender, *counts, reference)
        if contender != reference:
            row = replace(
                row,
                of_instructions=counts.instructions / others.instructions,
                of_misses=counts.misses / others.misses,
                aim=WORK[work].aim if is_ours(contender) and reference == AUTOCAST else None,
            )
        yield row


def rows_of_phases(counted: Counted, cases: Iterable[Case], contenders: Iterable[str]) -> Iterator[Row]:
    for case, phase, contender in itertools.product(cases, PHASES, contenders):
        counts = counted.get((contender, case, phase))
        if counts is not None:
            name = f"{case.model}, {case.optimizer}: {phase}"
            yield Row(case.half, name, contender, *counts, CONTENDERS[contender].reference)


def rows_of_calls(counted: Counted, half: str, contenders: Sequence[str]) -> Iterator[Row]:
    for call, contender in itertools.product(CALLS, (UNPATCHED, *contenders) if contenders else ()):
        case = Case(half, CALL, call.name)
        counts = counted.get((contenders[0], case, WITHOUT) if contender == UNPATCHED else (contender, case, WITH))
        if counts is not None:
            over = None if contender == UNPATCHED else counts.instructions - counted[contender, case, WITHOUT][0]
            yield Row(half, call.name, contender, *counts, UNPATCHED, over=over)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", metavar="MODEL,...", help=f"of {','.join(MODELS)} (default: all)")
    parser.add_argument("--halves", metavar="TYPE,...", help=f"of {','.join(HALVES)} (default: all)")
    parser.add_argument("--contenders", metavar="NAME,...", help=f"of {','.join(COUNTED)} (default: all)")
    parser.add_argument("--phases", action="store_true", help="print the parts of each step as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        within(options.within, count)
        return 0
    models, halves = chosen(parser, "models", options.models, MODELS), chosen(parser, "halves", options.halves, HALVES)
    wanted = chosen(parser, "contenders", options.contenders, COUNTED)
    wanted += [CONTENDERS[name].reference for name in wanted]
    contenders = [name for name in COUNTED if name in wanted]
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no directory {options.json.parent}")
    cases = [Case(*each) for each in itertools.product(halves, models, OPTIMIZERS)]
    with prepared(parser) as directory:
        counted = run(contenders, cases, directory)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, one thread, {STEPS} steps each")
    rows = []
    for half in halves:
        of_half = [case for case in cases if case.half == half]
        calls = list(rows_of_calls(counted, half, [name for name in contenders if name in CALLING]))
        rows += calls
        print(f"\n### Calls: instructions over the unpatched call, {half}\n", *table(calls), sep="\n")
        for heading, made in (("Steps", rows_of_steps), ("Phases", rows_of_phases)):
            found = list(made(counted, of_half, contenders))
            rows += found
            if made is rows_of_steps or options.phases:
                print(
                    f"\n### {heading}: instructions (and misses of the first cache), {half}\n", *table(found), sep="\n"
                )
    if options.json:
        options.json.write_text(json.dumps(list(map(asdict, rows)), indent=2) + "\n", encoding="utf-8")
    return 0


def chosen(parser: argparse.ArgumentParser, name: str, given: str | None, known: Iterable[str]) -> list[str]:
    wanted = list(known) if given is None else given.split(",")
    if unknown := set(wanted) - set(known):
        parser.error(f"argument --{name}: {', '.join(sorted(unknown))}; expected some of {','.join(known)}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
