"""Measures the overhead of mixed precision in small models: a call, a training step, and each layer of it.

Run as `python benchmarks/eager_overhead.py`. Each contender runs in its own process with one thread. They are measured
in turn, A B C A B C, never two at once, and started afresh in each of three generations. A step's time is divided by
the reference's time in the same round. A call is compared with the unpatched call in its own process, since two
processes differ by more than the overhead. Prints medians over all rounds and, in brackets, the 10th and 90th
percentile. "unpatched, again" is the unpatched call compared with itself; smaller differences are noise.

Results are compared too. If one is wrong, the table names the fault in place of a figure; differing values end in exit
status 1. Asserts nothing else. The tables are Markdown, as in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
from eager_cases import (
    CALL_LAYERS,
    CALLS,
    FORWARD_LAYERS,
    HALVES,
    MODELS,
    OPTIMIZERS,
    WORK,
    Case,
    Evidence,
    Figure,
    Figures,
    all_cases,
)
from peers import APEX, AUTOCAST, CONTENDERS, UNPATCHED, Contender, apexs_fault

CONTENDERS_AND_APEX = CONTENDERS | APEX

PHASES = ("zero_grad", "forward", "scale", "backward", "unscale", "step", "update")
OVER_BARE, BUT_MODEL = "step, over the unpatched", "all but forward and backward"
#: Rows of the table of layers, in order.
LAYERS = (
    *CALL_LAYERS,
    *FORWARD_LAYERS,
    *(f"{optimizer}: {phase}" for optimizer in OPTIMIZERS for phase in (*PHASES, OVER_BARE, BUT_MODEL)),
    "by itself: unscale",
    "by itself: update",
)

SECTIONS = ("calls", "steps", "layers")
#: Rounds in each generation of processes. Generations differ in speed by the addresses of the libraries.
ROUNDS = {"calls": 6, "steps": 4, "layers": 4}
GENERATIONS = 3


# Workers


def serve(connection: Connection, contender: Contender, share: float) -> None:
    """Runs a worker: opens the cases that it receives, and measures a round of the open case on each request."""
    os.environ.update(contender.environment)
    torch.set_num_threads(1)
    case: Case | None
    while (case := connection.recv()) is not None:
        with case.opened(contender.make, share) as (evidence, measure):
            connection.send(evidence)
            while connection.recv():
                connection.send(measure())


class Worker:
    """A contender's process, controlled from the main process.

    Args:
        contender: contender that the process runs.
        share: share of a full round that it measures each time, 0 to 1.
    """

    def __init__(self, contender: Contender, share: float) -> None:
        self.contender = contender
        self._share = share
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share torch's present state
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.contender, self._share), daemon=True)
        self._process.start()
        theirs.close()  # so that `recv` raises if the worker has died

    def takes_part(self, name: str, case: Case) -> bool:
        contender = self.contender
        return case.subject not in contender.skips and contender.half in (None, case.half) and name not in case.not_for

    def open(self, case: Case) -> dict[str, Evidence]:
        self._connection.send(case)
        evidence: dict[str, Evidence] = self._connection.recv()
        return evidence

    def measure(self) -> Figures:
        self._connection.send(True)
        figures: Figures = self._connection.recv()
        return figures

    def close(self) -> None:
        self._connection.send(False)
        if self.contender.stays_patched:
            self.stop()
            self._start()

    def stop(self) -> None:
        self._connection.send(None)
        self._process.join()


# Results


@dataclass(slots=True)
class Findings:
    """Results of one contender in the cases of one section and half type.

    Attributes:
        evidence: computed results, by figure.
        rounds: measurements by figure, one per round.
    """

    evidence: dict[str, Evidence] = field(default_factory=dict)
    rounds: dict[str, list[Figure]] = field(default_factory=dict)

    def add(self, figures: Figures) -> None:
        for name, figure in figures.items():
            self.rounds.setdefault(name, []).append(figure)


#: Findings by section and half type, then by the contender's name.
Results = dict[tuple[str, str], dict[str, Findings]]


def run(case: Case, workers: Mapping[str, Worker], rounds: int, findings: Mapping[str, Findings]) -> None:
    """Opens a case in all workers that take part, and measures them in turn."""
    workers = {name: worker for name, worker in workers.items() if worker.takes_part(name, case)}
    for name, worker in workers.items():
        findings[name].evidence |= worker.open(case)
        worker.measure()  # warm-up
    for _ in range(rounds):
        for name, worker in workers.items():
            if case.reopens:
                worker.close()
                worker.open(case)
            findings[name].add(worker.measure())
    for worker in workers.values():
        worker.close()


def fault(section: str, figure: str, contender: str, findings: Mapping[str, Findings]) -> str:
    """Returns the fault of a contender's result; empty if there is none."""
    evidence = {name: each.evidence[figure] for name, each in findings.items() if figure in each.evidence}
    if contender == UNPATCHED or contender not in evidence:
        return ""
    found = evidence[contender]
    if not found.dtype:
        return "refused"
    if not found.is_close_to(evidence[UNPATCHED]):
        return "other values"
    # The right dtype of a call's result is known. That of a model's outputs depends on the reference's policy.
    right = evidence[UNPATCHED if section == "calls" else CONTENDERS_AND_APEX[contender].reference]
    return f"in {found.dtype}" if found.dtype != right.dtype else ""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a table.

    Attributes:
        section: section of the report.
        half: half type.
        name: name of the measured work.
        contender: name of the contender.
        unit: "µs", "ns over unpatched", or "of" and the reference for a ratio of times.
        aim: maximum of the median; None for no aim.
        fault: fault of the result; empty if there is none.
        median: median over the rounds; None if there is a fault.
        low: 10th percentile.
        high: 90th percentile.
        seconds: median of the time itself.
    """

    section: str
    half: str
    name: str
    contender: str
    unit: str
    aim: float | None = None
    fault: str = ""
    median: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float | None = None

    def of(self, values: Sequence[float], seconds: Sequence[float]) -> Row:
        """Returns the row with the statistics of the rounds; unchanged if it has a fault."""
        if self.fault:
            return self
        low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
        median = statistics.median(values)
        # Interpolation between equal figures rounds, and may end beside the median.
        low, high = min(low, median), max(high, median)
        return replace(self, median=median, low=low, high=high, seconds=statistics.median(seconds))

    def cell(self) -> str:
        if self.median is None:
            return self.fault
        form = {"µs": ".1f", "ns over unpatched": "+.0f"}.get(self.unit, ".2f")
        spread = f"{self.low:{form}} to {self.high:{form}}"
        return f"{self.median:{form}} µs" if self.unit == "µs" else f"{self.median:{form}} ({spread})"


def rows_of_calls(half: str, findings: Mapping[str, Findings]) -> Iterator[Row]:
    for call, (name, found) in itertools.product(CALLS, findings.items()):
        figures = found.rounds.get(call.name, [])
        over, seconds = [each.over * 1e9 for each in figures], [each.seconds for each in figures]
        if name == UNPATCHED:
            without = [each.without for each in figures]
            yield Row("calls", half, call.name, name, "µs").of([each * 1e6 for each in without], without)
            yield Row("calls", half, call.name, f"{name}, again", "ns over unpatched").of(over, seconds)
        else:
            aim, wrong = call.aim if is_ours(name) else None, fault("calls", call.name, name, findings)
            yield Row("calls", half, call.name, name, "ns over unpatched", aim, wrong).of(over, seconds)


def rows_of_steps(half: str, findings: Mapping[str, Findings]) -> Iterator[Row]:
    for model, work in itertools.product(MODELS, WORK):
        figure = f"{model}: {work}"
        times = {
            name: [each.seconds for each in found.rounds[figure]]
            for name, found in findings.items()
            if figure in found.rounds
        }
        for name, seconds in times.items():
            reference = CONTENDERS_AND_APEX[name].reference
            wrong = fault("steps", figure, name, findings)
            if name == reference:
                row = Row("steps", half, figure, name, "µs", fault=wrong)
                yield row.of([each * 1e6 for each in seconds], seconds)
            else:
                aim = WORK[work].aim if is_ours(name) and reference == AUTOCAST else None
                row = Row("steps", half, figure, name, f"of {reference}", aim, wrong)
                yield row.of([each / base for each, base in zip(seconds, times[reference], strict=True)], seconds)


def rows_of_layers(half: str, findings: Mapping[str, Findings]) -> Iterator[Row]:
    for optimizer in OPTIMIZERS:
        bare = findings[UNPATCHED].rounds[f"{optimizer}: step"]
        for found in findings.values():
            found.rounds |= sums(optimizer, found.rounds, bare)
    for figure, (name, found) in itertools.product(LAYERS, findings.items()):
        if figure in found.rounds:
            wrong = fault("layers", figure.partition(":")[0], name, findings)
            seconds = [each.over for each in found.rounds[figure]]
            yield Row("layers", half, figure, name, "µs", fault=wrong).of([each * 1e6 for each in seconds], seconds)


def sums(optimizer: str, rounds: Mapping[str, list[Figure]], bare: list[Figure]) -> dict[str, list[Figure]]:
    """Returns sums over phases: the optimizer's step next to the bare one, and all phases except the model's."""
    steps = zip(rounds[f"{optimizer}: step"], bare, strict=True)
    names = [f"{optimizer}: {phase}" for phase in PHASES if phase not in ("forward", "backward")]
    others = zip(*(rounds[name] for name in names if name in rounds), strict=True)
    return {
        f"{optimizer}: {OVER_BARE}": [Figure(found.seconds, without.seconds) for found, without in steps],
        f"{optimizer}: {BUT_MODEL}": [Figure(sum(each.seconds for each in found)) for found in others],
    }


ROWS = {"calls": rows_of_calls, "steps": rows_of_steps, "layers": rows_of_layers}


def is_ours(name: str) -> bool:
    return name.startswith("ampatch")


# Tables

HEADINGS = {
    "calls": "Calls: nanoseconds over the unpatched call",
    "steps": "Models: ratio to torch.autocast with GradScaler; at O2, to a model converted by hand",
    "layers": "Layers: microseconds, of the steps of the transformer",
}


class Cell(Protocol):
    """One cell of a table: the row's name, the contender of the column, and the text."""

    @property
    def name(self) -> str: ...
    @property
    def contender(self) -> str: ...
    @property
    def aim(self) -> float | None: ...
    def cell(self) -> str: ...


def table(rows: Sequence[Cell]) -> Iterator[str]:
    """Yields the lines of a table: a row per name, a column per contender."""
    contenders = list(dict.fromkeys(row.contender for row in rows))
    aims = {row.name: row.aim for row in rows if row.aim is not None}
    by_name: dict[str, dict[str, str]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.contender] = row.cell()
    yield line(["", *contenders, *(["aim"] if aims else [])])
    yield line(["---"] * (len(contenders) + 1 + bool(aims)))
    for name, cells in by_name.items():
        aim = [f"{aims[name]:g}" if name in aims else ""] if aims else []
        yield line([name, *(cells.get(each, "") for each in contenders), *aim])


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="SECTION,...", help=f"of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="two short rounds, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    options = parser.parse_args()
    sections = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"argument --only: {', '.join(sorted(unknown))}; expected some of {','.join(SECTIONS)}")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no directory {options.json.parent}")

    from ampatch.native import calls, kernels  # here, since some workers import this module but must not import ampatch

    processor = torch.backends.cpu.get_cpu_capability()
    title = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {processor}, one thread; {kernels.in_use()}; "
        f"calls by {calls.in_use()}"
    )
    print(title)
    apexs = apexs_fault()
    if apexs:
        print(f"Apex is left out: {apexs}")
    contenders = CONTENDERS if apexs else CONTENDERS_AND_APEX
    results = measured(contenders, sections, options.quick)
    rows = []
    for section, half in itertools.product(sections, HALVES):
        found = list(ROWS[section](half, results[section, half]))
        print(f"\n### {HEADINGS[section]}, {half}\n", *table(found), sep="\n")
        rows += found
    if options.json:
        report = {"title": title, "left_out": {"Apex": apexs} if apexs else {}, "rows": list(map(asdict, rows))}
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(any(row.fault == "other values" for row in rows))


def measured(contenders: Mapping[str, Contender], sections: Collection[str], is_quick: bool) -> Results:
    results: Results = {}
    for _ in range(1 if is_quick else GENERATIONS):
        workers = {name: Worker(contender, 0.02 if is_quick else 1.0) for name, contender in contenders.items()}
        for case in all_cases(sections):
            findings = results.setdefault((case.section, case.half), {name: Findings() for name in contenders})
            run(case, workers, 2 if is_quick else ROUNDS[case.section], findings)
        for worker in workers.values():
            worker.stop()
    return {key: {name: found for name, found in findings.items() if found.rounds} for key, findings in results.items()}


if __name__ == "__main__":
    sys.exit(main())
