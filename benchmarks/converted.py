"""Compares a forward pass of `amp.convert_model`'s copy with O1, `amp.frozen_weights` and `torch.autocast`.

Run as `python benchmarks/converted.py [--rounds N]`. One process runs all contenders in turn, since the speed of
machines varies from minute to minute. Prints medians in microseconds, and their ratios to autocast. The models are
small, so that the host's work dominates. Asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ampatch import amp

Forward = Callable[[], object]

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "20 linear layers": (lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), lambda: torch.randn(4, 8)),
    "convnet": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        ),
        lambda: torch.randn(2, 3, 16, 16),
    ),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 4, enable_nested_tensor=False
        ),
        lambda: torch.randn(2, 8, 32),
    ),
}


@contextlib.contextmanager
def contender(name: str, model: nn.Module, batch: Tensor, half: torch.dtype) -> Iterator[Forward]:
    """Sets up a contender while the block runs, and yields a function that runs the model's forward pass."""

    def autocast() -> object:
        with torch.autocast("cpu", half):
            return model(batch)

    if name == "float32":
        yield lambda: model(batch)
    elif name == "autocast":
        yield autocast
    elif name == "converted":
        made = amp.convert_model(model, half)
        yield lambda: made(batch)
    else:
        amp.initialize(model, opt_level="O1", half_dtype=half, verbosity=0)
        try:
            with amp.frozen_weights(model) if name == "O1, frozen" else contextlib.nullcontext():
                yield lambda: model(batch)
        finally:
            amp.deinitialize()


CONTENDERS = ("float32", "autocast", "O1", "O1, frozen", "converted")


def measured(model: nn.Module, batch: Tensor, half: torch.dtype, rounds: int) -> dict[str, float]:
    """Returns the median time of each contender in microseconds; every round runs all contenders in turn."""
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name in CONTENDERS:
            with contender(name, model, batch, half) as forward:
                forward()
                forward()  # the second forward pass fills the caches for good
                begin = time.perf_counter()
                for _ in range(20):
                    forward()
                times[name].append((time.perf_counter() - begin) / 20 * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'microseconds (to autocast)':40}" + "".join(f"{name:>16}" for name in CONTENDERS))
    for title, (make, make_batch) in MODELS.items():
        for half in (torch.float16, torch.bfloat16):
            torch.manual_seed(0)
            found = measured(make().eval(), make_batch(), half, options.rounds)
            cells = [f"{found[name]:.0f} ({found[name] / found['autocast']:.2f})" for name in CONTENDERS]
            print(f"{title + ', ' + str(half).removeprefix('torch.'):40}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
