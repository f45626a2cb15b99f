"""Compares the final losses of trainings whose float32 masters do not last with those at O5.

Run as `python benchmarks/final_losses.py [--steps N] [--seed N] [--optimizers NAME ...] [--json FILE]`. Trains a
character model on the text of this project's license, and a convolutional network on the demo's digits, on the CPU. The
optimizers are AdamW, SGD with momentum, and a Lion and an Adafactor that are written here, so that amp does not know
them. With `--optimizers torch` takes those of torch instead, at their usual learning rates. Every way to keep
weights starts from the same weights and sees the same batches. Prints the loss over all training data after the last
step, and its difference to that of O5, as Markdown. Times and asserts nothing.

The learning rates of the first four are small on purpose: O3 rounds a weight to bfloat16 after each step, and loses an
update that is less than half of the weight's last digit. LBFGS is missing: its steps amplify any rounding, and its loss
after a given step says nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.demo import digits

#: Arguments of `amp.initialize` for each way to keep weights. The first is what the others are compared with.
WAYS: dict[str, dict[str, Any]] = {
    "O5": {"opt_level": "O5"},
    "O5 split": {"opt_level": "O5", "master_weights": "split"},
    "O5 stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "O5 stochastic, bfloat16 state": {
        "opt_level": "O5",
        "master_weights": "stochastic",
        "optimizer_state": "bfloat16",
    },
    "O3": {"opt_level": "O3", "half_dtype": "bfloat16"},
}
BATCH_SIZE = 64

# Models

CONTEXT = 16


def character_model(characters: int) -> nn.Module:
    """Returns a model that predicts a character from `CONTEXT` ones before it."""
    return nn.Sequential(
        nn.Embedding(characters, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, characters),
    )


def vision_model() -> nn.Module:
    return nn.Sequential(
        # A bias here would have a gradient of zero, and Lion would step by the sign of its rounding error.
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, digits.CLASSES),
    )


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its training data.

    Attributes:
        make: function that makes the model.
        inputs: all inputs.
        targets: the class of each.
    """

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor


def characters() -> Task:
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    known = sorted(set(text))
    codes = torch.tensor([known.index(each) for each in text])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    return Task(functools.partial(character_model, len(known)), windows[:, :-1].contiguous(), windows[:, -1])


def images() -> Task:
    train, _ = digits.split(digits.load())
    return Task(vision_model, train.images, train.labels)


TASKS = {"characters": characters, "digits": images}

# Optimizers


class Lion(torch.optim.Optimizer):
    """X. Chen et al., "Symbolic discovery of optimization algorithms", 2023: steps by the sign of a moving average."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # torch's signature
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_(average.lerp(parameter.grad, 1 - first).sign_(), alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - second)


class Adafactor(torch.optim.Optimizer):
    """N. Shazeer, M. Stern, "Adafactor", 2018: squares of gradients by row and column, and updates of bounded size."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, beta: float = 0.99) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad / self._size(parameter, group["beta"])
                update /= update.square().mean().sqrt().clamp_(min=1.0)
                parameter.sub_(update, alpha=group["lr"])

    def _size(self, parameter: Tensor, beta: float) -> Tensor:
        """Returns an estimate of the gradient's usual size, of each element."""
        state, square = self.state[parameter], parameter.grad.square() + 1e-12
        means = {"all": square} if parameter.dim() < 2 else {"rows": square.mean(-1), "columns": square.mean(-2)}
        for name, mean in means.items():
            state[name] = mean if name not in state else state[name].lerp(mean, 1 - beta)
        if parameter.dim() < 2:
            return state["all"].sqrt()
        rows = state["rows"] / state["rows"].mean(-1, keepdim=True)
        return (rows.unsqueeze(-1) * state["columns"].unsqueeze(-2)).sqrt()


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SLOW: dict[str, Make] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-4),
    "SGD": functools.partial(torch.optim.SGD, lr=2e-3, momentum=0.9),
    "Lion": functools.partial(Lion, lr=3e-5),
    "Adafactor": functools.partial(Adafactor, lr=1e-4),
}


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of torch that takes matrices only; other parameters stay as they are."""
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=1e-2)


TORCHS: dict[str, Make] = {
    "torch.ASGD": functools.partial(torch.optim.ASGD, lr=1e-2),
    "torch.Adadelta": torch.optim.Adadelta,
    "torch.Adafactor": torch.optim.Adafactor,
    "torch.Adagrad": torch.optim.Adagrad,
    "torch.Adam": torch.optim.Adam,
    "torch.Adam, amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "torch.AdamW": torch.optim.AdamW,
    "torch.Adamax": torch.optim.Adamax,
    "torch.Muon": muon,
    "torch.NAdam": torch.optim.NAdam,
    "torch.RAdam": torch.optim.RAdam,
    "torch.RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "torch.Rprop": functools.partial(torch.optim.Rprop, lr=1e-3),
    "torch.SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}
OPTIMIZERS = SLOW | TORCHS

# Training


def final_loss(task: Task, optimizer_name: str, way: str, steps: int, seed: int = 0) -> float:
    """Returns the loss over all data of a task after a training."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    generator = torch.Generator().manual_seed(seed)
    amp.initialize(model, optimizer, verbosity=0, **WAYS[way])
    try:
        for _ in range(steps):
            batch = torch.randint(len(task.targets), (BATCH_SIZE,), generator=generator)
            optimizer.zero_grad()
            with amp.scale_loss(F.cross_entropy(model(task.inputs[batch]), task.targets[batch]), optimizer) as loss:
                loss.backward()
            optimizer.step()
        with torch.no_grad():
            return float(F.cross_entropy(model.eval()(task.inputs), task.targets))
    finally:
        amp.deinitialize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of each training (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=["torch", *OPTIMIZERS],
        default=list(SLOW),
        help='names, or "torch" for all of torch\'s (default: the first four)',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all losses")
    options = parser.parse_args()
    names = list(TORCHS) if options.optimizers == ["torch"] else options.optimizers
    print("| | " + " | ".join(WAYS) + " |\n|---|" + "---|" * len(WAYS))
    found: dict[str, dict[str, float]] = {}
    for task_name, load in TASKS.items():
        task = load()
        for optimizer_name in names:
            losses = {way: final_loss(task, optimizer_name, way, options.steps, options.seed) for way in WAYS}
            found[f"{task_name}, {optimizer_name}"] = losses
            reference = losses["O5"]
            cells = [f"{reference:.4f}"]
            cells += [f"{loss:.4f} ({loss / reference - 1:+.2%})" for way, loss in losses.items() if way != "O5"]
            print(f"| {task_name}, {optimizer_name} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
