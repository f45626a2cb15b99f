"""Measures the memory per parameter: at rest, and at the peak of forward pass, backward pass and step.

Run as `python benchmarks/memory.py`. With `--device cuda` it reads `torch.cuda.memory_stats`; otherwise it sums the
allocations that torch's allocators report to its profiler. Prints bytes per parameter at every opt level, beside those
of `torch.autocast` and the calculated minimum. Memory does not vary between runs. Times and asserts nothing.

The batch is small and the layers are large, so that weights, gradients and optimizer state are nearly all of the
memory. Optimizers are fused, since others allocate temporary tensors, the same at every level.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.diagnostics.peak_memory import peak_allocated

#: Phases of a training step, in order; no other work runs between them.
PHASES = ("forward", "backward", "step")
PHASES_AND_REST = ("rest", *PHASES)

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3, fused=True),
}


class _OwnSGD(torch.optim.SGD):
    """torch's SGD, but of a class whose steps amp knows nothing about: it has the masters of all parameters at once."""


class _OwnAdam(torch.optim.Adam):
    """torch's Adam, in the same way."""


ALL_AT_ONCE: dict[str, MakeOptimizer] = {
    "SGD with momentum": functools.partial(_OwnSGD, lr=1e-3, momentum=0.9, fused=True),
    "Adam": functools.partial(_OwnAdam, lr=1e-3, fused=True),
}
STATE = {"SGD with momentum": 1, "Adam": 2}  # numbers kept per parameter

# The minimum


@dataclass(frozen=True)
class Parts:
    """Bytes per parameter that a training step must allocate.

    Attributes:
        weight: bytes of the model's weight.
        cast: bytes of a weight's cast, alive from its first use in the forward pass to its last in the backward pass.
        gradient: bytes of the gradient, alive from the backward pass until it is cleared.
        master: bytes of the float32 master of a half weight.
        master_gradient: bytes of the master's gradient, alive from the end of the `amp.scale_loss` block to the step.
        remainder: bytes of what a half weight lacks of its float32 value.
        number: bytes of one number that the optimizer keeps.
        temporary: bytes of the master and its gradient that a parameter has only while the optimizer updates it.
        temporary_number: bytes by which such a number is wider during that time.
    """

    weight: int
    gradient: int
    number: int
    cast: int = 0
    master: int = 0
    master_gradient: int = 0
    remainder: int = 0
    temporary: int = 0
    temporary_number: int = 0

    def least(self, phase: str, numbers: int) -> int:
        """Returns the minimum at the peak of a phase, if the optimizer keeps ``numbers`` numbers per parameter."""
        rest = self.weight + self.master + self.remainder + self.number * numbers
        gradients = self.gradient + self.master_gradient
        # During the backward pass gradients replace casts, and are at least as large.
        return rest + {"rest": 0, "forward": self.cast, "backward": gradients, "step": gradients}[phase]

    def in_turn(self, numbers: int) -> int:
        """Returns what a parameter takes on top during the step, while the optimizer updates it."""
        return self.temporary + self.temporary_number * numbers


FLOAT32 = Parts(weight=4, gradient=4, number=4)
FUNCTIONS_CAST = Parts(weight=4, gradient=4, number=4, cast=2)
MASTERS = Parts(weight=2, gradient=2, number=4, master=4, master_gradient=4)
HALF = Parts(weight=2, gradient=2, number=2)
# Masters that exist only while the optimizer steps, for a part of the parameters at a time. The least has none of them.
SPLIT = Parts(weight=2, gradient=2, number=4, remainder=2, temporary=8)
STOCHASTIC = Parts(weight=2, gradient=2, number=4, temporary=8)
STOCHASTIC_STATE = Parts(weight=2, gradient=2, number=2, temporary=8, temporary_number=2)

TITLES = {
    "weight": "weight",
    "cast": "cast of it, in forward",
    "gradient": "gradient",
    "master": "master",
    "master_gradient": "its gradient, until the step",
    "remainder": "remainder of the weight",
    "number": "each number the optimizer keeps",
    "temporary": "a part's masters and gradients",
    "temporary_number": "a part's numbers, wider by",
}

WAYS = {
    "float32": FLOAT32,
    "autocast": FUNCTIONS_CAST,
    "O0": FLOAT32,
    "O1": FUNCTIONS_CAST,
    "O2": MASTERS,
    "O3": HALF,
    "O4": FUNCTIONS_CAST,
    "O5": MASTERS,
    "O5 split": SPLIT,
    "O5 stochastic": STOCHASTIC,
    "O5 stochastic, bfloat16 state": STOCHASTIC_STATE,
}

#: Arguments of `amp.initialize` beside the level, with which an entry of `WAYS` begins.
ARGUMENTS: dict[str, dict[str, str]] = {
    "O5 split": {"master_weights": "split"},
    "O5 stochastic": {"master_weights": "stochastic"},
    "O5 stochastic, bfloat16 state": {"master_weights": "stochastic", "optimizer_state": "bfloat16"},
}


def halves(way: str) -> list[str | None]:
    """Returns the half types to measure an entry of `WAYS` in."""
    if way in ("float32", "O0"):
        return [None]
    return ["bfloat16"] if way.startswith(("O4", "O5")) else list(HALVES)


# Measurement


class Training:
    """A model that is trained at an opt level, with autocast, or in float32.

    Args:
        way: key of `WAYS`.
        half: key of `HALVES`; None if nothing is half.
        model: float32 model on its device.
        batch: input of the model.
        make_optimizer: function that makes an optimizer from parameters.
    """

    def __init__(
        self, way: str, half: str | None, model: nn.Module, batch: Tensor, make_optimizer: MakeOptimizer
    ) -> None:
        self.model, self.batch = model, batch
        self.optimizer = make_optimizer(model.parameters())
        self._half = None if half is None else HALVES[half]
        self._autocasts = way == "autocast"
        self._loss: Tensor | None = None
        device = batch.device.type
        self._scaler = torch.amp.GradScaler(device, enabled=self._autocasts and self._half is torch.float16)
        self._has_amp = way not in ("float32", "autocast")
        if self._has_amp:
            level, more = way.partition(" ")[0], ARGUMENTS.get(way, {})
            amp.initialize(model, self.optimizer, opt_level=level, half_dtype=self._half, verbosity=0, **more)

    def forward(self) -> None:
        with self._autocast():
            self._loss = self.model(self.batch).float().square().mean()

    def backward(self) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None
        if self._has_amp:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            self._scaler.scale(loss).backward()

    def step(self) -> None:
        if self._has_amp:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad()

    def rest(self) -> None:
        """Does nothing: between two steps only lasting tensors are alive."""

    def whole(self) -> None:
        for phase in PHASES:
            getattr(self, phase)()

    def infer(self) -> None:
        with self._autocast():
            self.model(self.batch)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._autocasts:
            return torch.autocast(self.batch.device.type, dtype=self._half)
        return contextlib.nullcontext()


def peak(device: str, prepare: Callable[[], Callable[[], object]]) -> int:
    """Returns the largest number of bytes of a device's memory allocated at any moment of a piece of work.

    Counts only memory allocated after ``prepare`` has begun, without memory that amp and torch never free.

    Args:
        device: "cpu" or "cuda".
        prepare: function that sets up the work and returns it; the work must keep references to its objects.
    """
    try:
        return peak_allocated(prepare) if device == "cpu" else _peak_on_gpu(prepare)
    finally:
        amp.deinitialize()


def _peak_on_gpu(prepare: Callable[[], Callable[[], object]]) -> int:
    # A first run, since libraries allocate memory on first use and keep it, such as cuBLAS's workspace.
    prepare()()
    amp.deinitialize()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    work = prepare()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    # Requested bytes, since allocated bytes are rounded up, which matters for small tensors.
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def peak_of(device: str, phase: str, start: Callable[[], Training]) -> int:
    """Returns `peak` of a phase of the third training step: by then all lasting tensors exist."""

    def prepare() -> Callable[[], object]:
        training = start()
        for _ in range(2):
            training.whole()
        if phase in PHASES:
            for earlier in PHASES[: PHASES.index(phase)]:
                getattr(training, earlier)()
        work: Callable[[], object] = getattr(training, phase)
        return work

    return peak(device, prepare)


def network(device: str, width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):  # a GPU fills the weights much faster
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


# Output


def show_parts() -> None:
    print("\nthe least, by part: bytes a parameter\n")
    ways = {parts: ", ".join(way for way in WAYS if WAYS[way] == parts) for parts in WAYS.values()}
    widths = {parts: max(20, len(names) + 2) for parts, names in ways.items()}
    print(f"{'':34}" + "".join(f"{names:>{widths[parts]}}" for parts, names in ways.items()))
    for part, title in TITLES.items():
        print(f"{title:34}" + "".join(f"{getattr(parts, part) or '':>{width}}" for parts, width in widths.items()))


def line(cells: list[str]) -> str:
    return f"{cells[0]:{max(map(len, WAYS)) + 2}}{cells[1]:10}" + "".join(f"{cell:>18}" for cell in cells[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=1280, help="of the layers (default: 1280)")
    parser.add_argument("--layers", type=int, default=6, help="of that width (default: 6)")
    parser.add_argument("--all-at-once", action="store_true", help="step with subclasses of torch's optimizers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    options = parser.parse_args()
    device: str = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here")
    model = network(device, options.width, options.layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    title = f"{where}, torch {torch.__version__}: a network of {count:,} parameters, 8 rows a batch"
    print(title)
    show_parts()
    print("\nbytes a parameter at the peak, and in brackets the least, of which activations, what one operation")
    print("needs for itself, and masters that exist only while the optimizer steps, are no part")

    def start(way: str, half: str | None, make_optimizer: MakeOptimizer) -> Training:
        batch = torch.ones(8, options.width, device=device)
        return Training(way, half, network(device, options.width, options.layers), batch, make_optimizer)

    rows: list[dict[str, Any]] = []
    for name, make_optimizer in (ALL_AT_ONCE if options.all_at_once else OPTIMIZERS).items():
        print(f"\n{name}\n{line(['', '', *PHASES_AND_REST])}")
        for way, parts in WAYS.items():
            for half in halves(way):
                begin = functools.partial(start, way, half, make_optimizer)
                found = {phase: peak_of(device, phase, begin) / count for phase in PHASES_AND_REST}
                least = {phase: parts.least(phase, STATE[name]) for phase in PHASES_AND_REST}
                cells = [f"{found[phase]:.2f} ({least[phase]:2})" for phase in PHASES_AND_REST]
                print(line([way, half or "", *cells]), flush=True)
                rows.append({"optimizer": name, "way": way, "half": half, "bytes": found, "least": least})
    if options.json:
        options.json.write_text(json.dumps({"title": title, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
