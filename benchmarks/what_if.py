"""Compares what `amp.what_if` says of a format with trainings in which a function or a module has that format.

Run as `python benchmarks/what_if.py [--tasks NAME ...] [--seeds N] [--json FILE]`. Trains three small models: a
character transformer on the text of this project's license, a convolutional autoencoder and an MLP on the demo's
digits. Each training has one function or one module in one coarse format, which `cast_lists` names and amp emulates;
all else is in float32. Prints the increase of the final loss, as the mean over seeds, beside the noise that
`amp.what_if` found in one step of the model after a third of a training. Prints rank correlations (Spearman) of the
two, and of increases by even and by odd seeds: no measure can follow an order that changes with the seed. Times and
asserts nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.demo import digits
from ampatch.diagnostics.what_if.given import format_of

#: Coarse ones, so that their effect is greater than that of another seed.
FORMATS: tuple[Any, ...] = (
    {"name": "float8_e4m3", "scale": "none"},
    {"name": "e5m1", "overflow": "saturate"},
    {"name": "e3m1", "scale": "tensor"},
    "float4_e2m1",
    {"name": "float4_e2m1", "scale": "tensor"},
    {"name": "e3m1", "overflow": "saturate"},
)
BATCH_SIZE = 16
CONTEXT = 16
WIDTH = 32

# Models


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -1e9).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        mixed = torch.softmax(scores + self.mask, -1) @ values
        return self.merge(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(F.gelu(self.widen(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions.weight
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def convolutional() -> nn.Module:
    """Returns an autoencoder of images of 8 by 8."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 32),
        nn.Linear(32, 16 * 16),
        nn.GELU(),
        nn.Unflatten(1, (4, 8, 8)),
        nn.Conv2d(4, 1, 3, padding=1),
    )


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 48)]
    for _ in range(2):
        layers += [nn.GELU(), nn.Linear(48, 48)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(48, digits.CLASSES))


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its training data.

    Attributes:
        make: function that makes the model.
        inputs: all inputs.
        targets: the class of each, or an image to predict.
        functions: names of functions that get a format in the whole model.
        modules: names of modules that get a format.
        steps: number of steps of a training.
    """

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    functions: tuple[str, ...]
    modules: tuple[str, ...]
    steps: int = 150

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.loss_of(batch)(model(self.inputs[batch]))

    def loss_of(self, batch: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns the function that has the loss of a model's output."""
        loss_fn = F.mse_loss if self.targets.is_floating_point() else F.cross_entropy
        return lambda output: loss_fn(output, self.targets[batch])


def characters() -> Task:
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    known = sorted(set(text))
    windows = torch.tensor([known.index(each) for each in text]).unfold(0, CONTEXT + 1, 1)
    return Task(
        functools.partial(Transformer, len(known)),
        windows[:, :-1].contiguous(),
        windows[:, 1:].contiguous(),
        ("linear", "matmul"),
        ("blocks.0", "blocks.0.attention", "blocks.0.narrow", "blocks.1.widen", "head"),
        steps=120,
    )


def images() -> Task:
    train, _ = digits.split(digits.load())
    return Task(convolutional, train.images, train.images, ("conv2d", "linear"), ("0", "2", "5", "6", "9"))


def labels() -> Task:
    train, _ = digits.split(digits.load())
    return Task(mlp, train.images, train.labels, ("linear",), ("1", "3", "5", "7"))


TASKS: dict[str, Callable[[], Task]] = {"transformer": characters, "convolutions": images, "MLP": labels}

# Trainings


def trained(task: Task, steps: int, seed: int, cast_lists: dict[str, Any]) -> tuple[nn.Module, float]:
    """Trains a model, and returns it with its mean loss over the last fifth of the steps."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0, cast_lists=cast_lists)
    losses: list[float] = []
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = task.loss(model, torch.randint(len(task.targets), (BATCH_SIZE,), generator=generator))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        amp.deinitialize()
    last = losses[-steps // 5 :]
    return model, sum(last) / len(last)


def lists_of(task: Task, kind: str, name: str, number_format: Any) -> dict[str, Any]:
    """Returns cast lists in which a function or a module has a format, and all else computes in float32."""
    inside = [{"name": each, "format": number_format} for each in task.functions if kind == "module" or each == name]
    outside = [each for each in task.functions if kind == "module" or each != name]
    if kind == "function":
        return {"blacklist": {"*": [*outside, *inside]}}
    return {"blacklist": {"*": outside}, "modules": {name: {"blacklist": inside}}}


def in_float32(task: Task) -> dict[str, Any]:
    return {"blacklist": {"*": list(task.functions)}}


def units(task: Task) -> list[tuple[str, str]]:
    return [("function", name) for name in task.functions] + [("module", name) for name in task.modules]


Numbers = dict[tuple[str, str, str], float]


def increases(task: Task, seed: int) -> Numbers:
    """Returns the increase of the loss by format, and by the kind and name of what has it."""

    def loss(cast_lists: dict[str, Any]) -> float:
        return trained(task, task.steps, seed, cast_lists)[1]

    reference = loss(in_float32(task))
    return {
        (str(format_of(each)), *unit): loss(lists_of(task, *unit, each)) - reference
        for each in FORMATS
        for unit in units(task)
    }


def noises(task: Task, seed: int) -> Numbers:
    """Returns the noise of the same, from one step of a model after a third of a training in float32."""
    model, _ = trained(task, task.steps // 3, seed, in_float32(task))
    # As many as in the trainings: the gradient of a mean over more is smaller, and a format may lose it.
    batch = torch.randint(len(task.targets), (BATCH_SIZE,), generator=torch.Generator().manual_seed(seed + 1))
    result = amp.what_if(model, task.inputs[batch], task.loss_of(batch), formats=FORMATS)
    of_functions = {(row.format, "function", row.function): row.noise for row in result.functions}
    return of_functions | {(row.format, "module", str(row.module)): row.noise for row in result.modules}


def correlation(one: Numbers, other: Numbers) -> float:
    """Returns the rank correlation (Spearman): that of the ranks."""
    pairs = [[each[key] for key in one] for each in (one, other)]
    return float(torch.corrcoef(torch.stack([*map(ranks, pairs)]))[0, 1])


def mean(found: Sequence[Numbers]) -> Numbers:
    return {key: sum(each[key] for each in found) / len(found) for key in found[0]}


def ranks(values: list[float]) -> Tensor:
    """Returns the place of each number in their order; equal ones share theirs."""
    given = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=math.inf, posinf=torch.finfo(torch.float64).max)
    return (given[:, None] > given).sum(1) + (given[:, None] == given).sum(1) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="of weights and batches, at least 2 (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all increases and noises")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="which models to train")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.tasks:
        task = TASKS[name]()
        steps = [noises(task, seed) for seed in range(options.seeds)]
        by_seed = [increases(task, seed) for seed in range(options.seeds)]
        noise, increase = mean(steps), mean(by_seed)
        single = [correlation(increase, each) for each in steps]
        print(
            f"{name}: rank correlation {correlation(increase, noise):.2f}, {min(single):.2f} to {max(single):.2f} by "
            f"single steps, {correlation(mean(by_seed[::2]), mean(by_seed[1::2])):.2f} of even and odd seeds"
        )
        for key in sorted(increase, key=noise.__getitem__, reverse=True):
            print(f"  {' '.join(key):60} noise {noise[key]:8.3g}  loss {increase[key]:+.4f}", flush=True)
        found[name] = [{"unit": key, "noise": noise[key], "increase": increase[key]} for key in increase]
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
