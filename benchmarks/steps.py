"""Compares whole training steps with torch.autocast and GradScaler: time, kernel launches, waits, memory.

Run as `python benchmarks/steps.py`; `--device cpu --quick` needs no GPU. A step is zero_grad, forward and backward
pass, clipping of the gradients, and a fused AdamW. The small transformer's kernels are so short that the host is the
limit; the large one keeps the device busy. Each contender has its own process, all on the same two processors. They run
in turn, A B C A B C, never two at once, in at least eight rounds, and more while there is time. Each time is divided by
the reference's time in the same round. Prints medians over the rounds and, in brackets, the 10th and 90th
percentile. The JSON file also has the kernels of a step, and how much more often than autocast each contender launches
them.

"host" is the time until the last call of a round returned, while the device may still be at work. Losses are compared
with those of float32: a contender with other losses is named, is not timed, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import on_device
import torch
from eager_cases import HALVES, Evidence, Model, full, set_up, transformer
from eager_overhead import Worker, line
from peers import AUTOCAST, CONTENDERS, UNPATCHED, Peer

CLIP_AT = 1.0
OPTIMIZER = "fused AdamW"
COMPARED = tuple(
    name for name in CONTENDERS if name in (UNPATCHED, AUTOCAST, "ampatch O1", "ampatch O2") or "fused_linear" in name
)
WARMING_STEPS = 5  # optimizer state, casts and the libraries' own memory exist after the first
ROUNDS = range(8, 101)  # more than eight if there is time
SECONDS = 75.0  # of the whole run

SMALL, LARGE = "a small transformer", "a large transformer"
MODELS = {
    SMALL: Model(transformer, (4, 8, 32), 32, steps=20),
    # About 100 million parameters and 4,096 tokens.
    LARGE: Model(functools.partial(transformer, 1024, 16, 12), (8, 512, 1024), 4096, steps=5),
}
QUICK = {SMALL: MODELS[SMALL], LARGE: Model(functools.partial(transformer, 64, 4, 2), (2, 16, 64), 32, steps=5)}
CASES = [*((SMALL, half) for half in HALVES), (LARGE, "float16")]


class Once(NamedTuple):
    """What one step shows without being timed.

    Attributes:
        losses: losses of the first steps.
        counts: launches, waits and allocations of one step.
        peak: bytes of the process on the device at the peak of one step.
    """

    losses: Evidence
    counts: on_device.Counts
    peak: int


class Round(NamedTuple):
    """Mean seconds of a step in one round: until the device was done, and until the host was."""

    seconds: float
    host: float


@dataclass(frozen=True)
class WholeSteps:
    """Steps of one model in one half type; a case for `eager_overhead.Worker`.

    Attributes:
        model: model to train.
        half: name of the half type.
        device: "cuda" or "cpu".
    """

    model: Model
    half: str
    device: str

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[tuple[Once, Callable[[], Round]]]:
        on_device.share_processors()
        torch.manual_seed(0)
        model, batch = self.model.make().to(self.device), self.model.batch()
        batch = type(batch)(*(tensor.to(self.device) for tensor in batch))
        with set_up(make, model, self.half, OPTIMIZER) as peer:
            peer.max_norm = CLIP_AT
            step = functools.partial(peer.step, batch)
            losses = [step() for _ in range(WARMING_STEPS)]
            (counts,) = on_device.counts([step], self.device)
            once = Once(Evidence.of(losses[0], *losses), counts, on_device.peak(step, self.device))
            yield once, functools.partial(self._measured, step, full(self.model.steps, share))

    def _measured(self, step: Callable[[], object], times: int) -> Round:
        on_device.finish(self.device)
        start = time.perf_counter()
        for _ in range(times):
            step()
        host = time.perf_counter() - start
        on_device.finish(self.device)
        return Round((time.perf_counter() - start) / times, host / times)


# Results


class Spread(NamedTuple):
    """Median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one contender.

    Attributes:
        model: name of the model.
        half: name of the half type.
        contender: name of the contender.
        fault: fault of its losses; empty if they are right.
        launches: kernel launches of a step.
        waits: waits of a step.
        allocations: allocations of a step.
        kernels: launches of a step, by the kernel's name.
        more_launches: those beyond autocast's, by the kernel's name; below zero if they are fewer.
        peak: bytes at the peak of a step.
        rounds: number of rounds; 0 if it was not timed.
        seconds: median seconds of a step; None if it was not timed, as all below.
        host_seconds: median seconds of the host.
        ratio: time as a share of the reference's in the same round.
        host_ratio: the host's time as a share of the reference's.
    """

    model: str
    half: str
    contender: str
    fault: str
    launches: int
    waits: int
    allocations: int
    kernels: dict[str, int]
    more_launches: dict[str, int]
    peak: int
    rounds: int = 0
    seconds: float | None = None
    host_seconds: float | None = None
    ratio: Spread | None = None
    host_ratio: Spread | None = None

    def cells(self) -> Iterator[str]:
        yield self.contender
        yield self.fault or f"{self.seconds * 1e3:.3f}"
        yield str(self.ratio or "")
        yield "" if self.fault else f"{self.host_seconds * 1e3:.3f}"
        yield str(self.host_ratio or "")
        yield from (str(self.launches), str(self.waits), str(self.allocations), f"{self.peak / 2**20:.1f}")


TIMES = ("step, ms", "of autocast's", "host, ms", "of autocast's")
COLUMNS = ("", *TIMES, "launches", "waits", "allocations", "peak, MiB")


def compared(name: str, case: WholeSteps, workers: Mapping[str, Worker], rounds: range, until: float) -> Iterator[Row]:
    """Measures the contenders in turn, and yields their rows.

    Args:
        name: name of the model.
        case: steps to measure.
        workers: processes by contender.
        rounds: numbers of rounds that are enough.
        until: time of `time.monotonic` at which no more rounds begin, if there were enough.
    """
    with ThreadPoolExecutor(len(workers)) as threads:  # at once: nothing is timed yet
        opened = threads.map(lambda worker: worker.open(case), workers.values())
        once: dict[str, Once] = dict(zip(workers, opened, strict=True))
    faults = {each: fault_of(found.losses, once[UNPATCHED].losses) for each, found in once.items()}
    right = {each: worker for each, worker in workers.items() if not faults[each]}
    for worker in right.values():
        worker.measure()  # warm-up
    measured: dict[str, list[Round]] = {each: [] for each in right}
    for number in range(rounds.stop - 1):
        if number >= rounds.start and time.monotonic() > until:
            break
        for each, worker in right.items():
            measured[each].append(worker.measure())
    for worker in workers.values():
        worker.close()
    for each, found in once.items():
        counts, more = found.counts, found.counts.kernels.copy()
        more.subtract(once[AUTOCAST].counts.kernels)
        row = Row(
            *(name, case.half, each, faults[each], counts.launches, counts.waits, counts.allocations),
            *(dict(counts.kernels), {kernel: count for kernel, count in more.most_common() if count}, found.peak),
        )
        yield timed(row, measured[each], measured.get(AUTOCAST)) if each in right else row


def timed(row: Row, rounds: Sequence[Round], reference: Sequence[Round] | None) -> Row:
    """Returns a row with its times; without ratios if there is no reference."""
    seconds, host = ([each[part] for each in rounds] for part in range(2))
    ratios = dict.fromkeys(("ratio", "host_ratio"))
    if reference is not None and row.contender != AUTOCAST:
        pairs = list(zip(rounds, reference, strict=True))
        ratios = {
            "ratio": Spread.of([found.seconds / base.seconds for found, base in pairs]),
            "host_ratio": Spread.of([found.host / base.host for found, base in pairs]),
        }
    medians = {"seconds": statistics.median(seconds), "host_seconds": statistics.median(host)}
    return replace(row, rounds=len(rounds), **medians, **ratios)


def fault_of(found: Evidence, right: Evidence) -> str:
    return "" if found.is_close_to(right) else "other losses"


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two short rounds of tiny models, to see that it runs")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="add no more rounds after so long (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no directory {options.json.parent}")

    from ampatch.native import calls, kernels  # here, since some workers import this module but must not import ampatch

    title = (
        f"{on_device.name_of(options.device)}; torch {torch.__version__}; {kernels.in_use()}; calls by {calls.in_use()}"
    )
    print(title, flush=True)
    models, rounds, share = (QUICK, range(2, 3), 0.2) if options.quick else (MODELS, ROUNDS, 1.0)
    workers = {name: Worker(CONTENDERS[name], share) for name in COMPARED}
    rows: list[Row] = []
    for number, (name, half) in enumerate(CASES, 1):
        until = began + options.seconds * number / len(CASES)
        found = list(compared(name, WholeSteps(models[name], half, options.device), workers, rounds, until))
        print(f"\n### {name}, {half}\n", line(COLUMNS), line(["---"] * len(COLUMNS)), sep="\n")
        print(*(line(row.cells()) for row in found), sep="\n", flush=True)
        rows += found
        if options.json:  # after each case: on a lent machine, time may run out
            report = {"title": title, "rows": list(map(asdict, rows))}
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for worker in workers.values():
        worker.stop()
    return int(any(row.fault for row in rows))


if __name__ == "__main__":
    sys.exit(main())
