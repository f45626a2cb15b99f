"""Learns a cast list for each of three models: digits, a language model, and digits with a planted culprit.

    python examples/tune.py                     # all three
    python examples/tune.py planted --runs 8    # one of them, with a budget
    cd examples && ampatch tune tune:planted    # the same as a command, which writes casts.yaml

The first two keep their metric with the lists as they are. In the third a list of the user's whitelists a function that
computes a variance as the difference of two large numbers; amp.tune finds it among all functions in half.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.demo.digits import load, split

STEPS = 60
TRAINING, TEST = split(load())
TEXT = "".join(files("ampatch.lists").joinpath(f"{name}.yaml").read_text() for name in ("whitelist", "blacklist"))
CHARACTERS = sorted(set(TEXT))
CODES = torch.tensor([CHARACTERS.index(each) for each in TEXT])
LENGTH = 32


def standardised(images: Tensor) -> Tensor:
    """Brings images to mean 0 and variance 1. The variance is a difference, which half types cannot hold."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    variance = (images * images).mean(dim=(2, 3), keepdim=True) - mean * mean
    return (images - mean) / variance.clamp_min(1e-4).sqrt()


class Digits(nn.Module):
    """A convolution and two linear layers, for images on a bright background."""

    def __init__(self, standardises: bool) -> None:
        super().__init__()
        self.standardises = standardises
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 16, 64)
        self.scores = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns scores of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        x = standardised(images + 8) if self.standardises else images
        x = F.max_pool2d(F.relu(self.convolution(x)), 2).flatten(1)
        scores: Tensor = self.scores(F.gelu(self.hidden(x)))
        return scores


class Language(nn.Module):
    """A transformer block that predicts the next character."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.feedforward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scores = nn.Linear(width, len(CHARACTERS))

    def forward(self, codes: Tensor) -> Tensor:
        """Returns scores of shape (batch, LENGTH, characters) for codes of shape (batch, LENGTH)."""
        x = self.embedding(codes) + self.position
        query, key, value = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        x = x + self.feedforward(self.norms[1](x))
        scores: Tensor = self.scores(self.norms[2](x))
        return scores


def trained(model: nn.Module, batches: Any, amp_options: dict[str, Any]) -> nn.Module:
    """Trains a new model; the options of amp.tune go to amp.initialize."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **amp_options)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return model


def batches_of_digits() -> Any:
    """Yields batches of 64 images, in an order that depends on torch's seed."""
    for _ in range(STEPS):
        batch = TRAINING[torch.randint(len(TRAINING), (64,))]
        yield batch.images, batch.labels


def batches_of_text() -> Any:
    """Yields batches of 32 pieces of the first nine tenths of the text, each with its next characters."""
    for _ in range(STEPS):
        starts = torch.randint(len(CODES) * 9 // 10 - LENGTH, (32,))
        pieces = torch.stack([CODES[start : start + LENGTH + 1] for start in starts.tolist()])
        yield pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Returns the share of the test digits that a model recognises."""
    return float((model(TEST.images).argmax(dim=1) == TEST.labels).float().mean())


@torch.no_grad()
def loss_of_text(model: nn.Module) -> float:
    """Returns the mean loss for each character of the last tenth of the text."""
    codes = CODES[len(CODES) * 9 // 10 :]
    pieces = codes[: (len(codes) - 1) // LENGTH * LENGTH + 1]
    inputs, targets = pieces[:-1].view(-1, LENGTH), pieces[1:]
    return float(F.cross_entropy(model(inputs).flatten(0, -2).float(), targets))


def digits() -> dict[str, Any]:
    """Returns the arguments of amp.tune for digits: the lists are right as they are."""
    return {
        "train": lambda amp_options: trained(Digits(False), batches_of_digits(), amp_options),
        "evaluate": accuracy,
        "tolerance": 0.03,
        "higher_is_better": True,
    }


def language() -> dict[str, Any]:
    """Returns the arguments for the language model, whose metric is a loss."""
    return {
        "train": lambda amp_options: trained(Language(), batches_of_text(), amp_options),
        "evaluate": loss_of_text,
        "tolerance": "2%",
        "higher_is_better": False,
    }


def planted() -> dict[str, Any]:
    """Returns the arguments for digits with a list that whitelists the wrong function."""
    return {
        "train": lambda amp_options: trained(Digits(True), batches_of_digits(), amp_options),
        "evaluate": accuracy,
        "tolerance": 0.03,
        "higher_is_better": True,
        "cast_lists": {"whitelist": {__name__: ["standardised"]}},
    }


def main() -> None:
    """Tunes the models named on the command line, one after another."""
    models = {"digits": digits, "language": language, "planted": planted}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(models)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each trial")
    parser.add_argument("--runs", type=int, help="budget for each model, as a number of runs")
    arguments = parser.parse_args()
    for name in arguments.models or models:
        budget = None if arguments.runs is None else f"{arguments.runs} runs"
        print(f"== {name}\n", flush=True)
        print(amp.tune(**models[name](), seeds=arguments.seeds, budget=budget), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
