"""Counts the host's instructions in a training step: the cost of mixed precision when a GPU does the arithmetic.

Run as `python benchmarks/host.py`; needs Linux, valgrind with its headers, and a C compiler. Each contender trains a
transformer in its own process under valgrind's callgrind, which counts how often each instruction of the program runs.
It trains the model in two sizes, with the same layers, calls and tensors, but more elements per tensor. An instruction
that runs more often in the larger model belongs to a loop over elements. That is the device's work, and is left out.
All other instructions are the host's; the table sums them by phase of the step.

Ratios are to torch.autocast with GradScaler, at O2 too. On a CPU, the node of `fused_linear`, the default, casts each
half weight gradient in one more call; on a GPU the product writes it in float32. Between runs the sums differ by a few
per thousand. The tables are Markdown, as in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from eager_cases import HALVES, OPTIMIZERS, set_up
from instructions import Callgrind, Case, chosen, prepared, run_within, within
from peers import AUTOCAST, CONTENDERS, Batch
from torch import nn

COMPARED = (AUTOCAST, "ampatch O1", "ampatch O1 without fused_linear", "ampatch O2")
PHASES = ("zero_grad", "forward", "scale", "backward", "unscale", "step", "update")
LAYERS = 2
WARMING_STEPS = 5
STEPS = 2
#: Loops over elements run at least 1.4 times as often in the larger model; Python's work differs by less.
GROWS = 1.2


class Size(NamedTuple):
    """Size of a model and its batch of four sequences.

    Attributes:
        width: number of features of a token, and of classes.
        length: number of tokens in a sequence.
        bias: True if layers have biases.
    """

    width: int
    length: int
    bias: bool = False

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(self.width, 4, 2 * self.width, dropout=0.0, batch_first=True, bias=self.bias)
        encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        return nn.Sequential(encoder, nn.Flatten(0, 1), nn.Linear(self.width, self.width, self.bias))

    def batch(self) -> Batch:
        return Batch(torch.randn(4, self.length, self.width), torch.randint(self.width, (4 * self.length,)))


SMALLER, LARGER = "smaller", "larger"
SMALLER_WITH_BIASES, LARGER_WITH_BIASES = "smaller, with biases", "larger, with biases"
SIZES = {
    SMALLER: Size(68, 17),
    LARGER: Size(96, 24),
    SMALLER_WITH_BIASES: Size(68, 17, bias=True),
    LARGER_WITH_BIASES: Size(96, 24, bias=True),
}
LARGER_OF = {SMALLER: LARGER, SMALLER_WITH_BIASES: LARGER_WITH_BIASES}

#: Number of runs of the instruction at each address.
Places = Counter[int]


class Counts(NamedTuple):
    """Instructions of a step, or of a phase of it.

    Attributes:
        host: number of instructions that do not depend on the size of tensors.
        device: number of other instructions, in the smaller model.
    """

    host: float = 0.0
    device: float = 0.0

    def plus(self, other: Counts) -> Counts:
        return Counts(self.host + other.host, self.device + other.device)


#: Counts by contender, half type, optimizer and phase.
Counted = dict[tuple[str, str, str, str], Counts]


# In the process under callgrind


def count(contender: str, cases: Sequence[Case], callgrind: Callgrind) -> None:
    torch.set_num_threads(1)
    for case in cases:
        torch.manual_seed(0)
        batch = SIZES[case.model].batch()
        with set_up(CONTENDERS[contender].make, SIZES[case.model].model(), case.half, case.optimizer) as peer:
            callgrind.count_steps(peer, case, batch, WARMING_STEPS, STEPS)


# In the process that starts callgrind


def run(contenders: Sequence[str], cases: Sequence[Case], directory: Path) -> Counted:
    """Runs the contenders under callgrind, and returns their counts."""
    options = ["--dump-instr=yes", "--dump-line=no", "--compress-pos=no"]
    places: dict[str, Places] = {}
    for file in run_within(__file__, contenders, cases, directory, options):
        label, found = read(file)
        places.setdefault(label, Counter()).update(found)
    counted: Counted = {}
    for contender, case, phase in itertools.product(contenders, cases, PHASES):
        label = "|".join((contender, *case, phase))
        if case.model in LARGER_OF and label in places:
            larger = places["|".join((contender, *case._replace(model=LARGER_OF[case.model]), phase))]
            counted[contender, case.half, case.optimizer, phase] = told_apart(places[label], larger)
    return counted


def read(file: Path) -> tuple[str, Places]:
    """Returns the label and the counts of one of callgrind's files; the label is empty if the file is of no phase."""
    label, is_of_call = "", False
    places: Places = Counter()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("0x"):
                if not is_of_call:  # the line after `calls=` repeats the cost of the called function
                    address, _, cost = line.partition(" ")
                    places[int(address, 16)] += int(cost)
                is_of_call = False
            elif line.startswith("calls="):
                is_of_call = True
            elif line.startswith("desc:") and "Client Request:" in line:
                label = line.rpartition("Client Request:")[2].strip()
    return label, places


def told_apart(smaller: Places, larger: Places) -> Counts:
    """Sums a phase of a step; an instruction that runs in only one of the two models counts as the device's."""
    host = device = 0
    for address, times in smaller.items():
        if max(times, larger[address]) > GROWS * min(times, larger[address]):
            device += times
        else:
            host += times
    return Counts(host / STEPS, device / STEPS)


# Tables


def table(counted: Counted, half: str, optimizers: Iterable[str], contenders: Sequence[str]) -> Iterator[str]:
    yield f"| thousands of instructions, {half} | " + " | ".join(contenders) + " |"
    yield "|---" * (len(contenders) + 1) + "|"
    for optimizer in optimizers:
        for phase in PHASES:
            found = [counted.get((contender, half, optimizer, phase)) for contender in contenders]
            if any(found):
                yield row(f"{optimizer}: {phase}", (f"{each.host / 1000:.0f}" if each else "" for each in found))
        wholes = [whole_step(counted, contender, half, optimizer) for contender in contenders]
        ratios = [f" ({each.host / wholes[0].host:.3f})" for each in wholes[1:]]
        cells = (f"{each.host / 1000:.0f}{ratio}" for each, ratio in zip(wholes, ["", *ratios], strict=True))
        yield row(f"**{optimizer}: whole step**", cells)
        yield row(f"{optimizer}: left out, the device's", (f"{each.device / 1000:.0f}" for each in wholes))


def row(name: str, cells: Iterable[str]) -> str:
    return " | ".join((f"| {name}", *cells)) + " |"


def whole_step(counted: Counted, contender: str, half: str, optimizer: str) -> Counts:
    phases = (counted.get((contender, half, optimizer, phase), Counts()) for phase in PHASES)
    return functools.reduce(Counts.plus, phases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--halves", metavar="TYPE,...", default="float16", help=f"of {','.join(HALVES)} (float16)")
    parser.add_argument("--optimizers", metavar="NAME,...", help=f"of {','.join(OPTIMIZERS)} (default: all)")
    parser.add_argument("--contenders", metavar="NAME,...", help=f"of {','.join(COMPARED)} (default: all)")
    parser.add_argument("--biases", action="store_true", help="give each layer of the model a bias")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        within(options.within, count)
        return 0
    halves = chosen(parser, "halves", options.halves, HALVES)
    optimizers = chosen(parser, "optimizers", options.optimizers, OPTIMIZERS)
    wanted = {AUTOCAST, *chosen(parser, "contenders", options.contenders, COMPARED)}
    contenders = [name for name in COMPARED if name in wanted]
    smaller = SMALLER_WITH_BIASES if options.biases else SMALLER
    cases = [Case(*each) for each in itertools.product(halves, (smaller, LARGER_OF[smaller]), optimizers)]
    with prepared(parser) as directory:
        counted = run(contenders, cases, directory)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, one thread, {STEPS} steps each")
    for half in halves:
        print("", *table(counted, half, optimizers, contenders), sep="\n")
    if options.json:
        keys = ("contender", "half", "optimizer", "phase")
        rows = [{**dict(zip(keys, key, strict=True)), **counts._asdict()} for key, counts in counted.items()]
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
