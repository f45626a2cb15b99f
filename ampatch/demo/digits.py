"""The handwritten digits: read from the package's own data, and split into a training set and a test set.

Owns the file `data/digits.csv.gz` and its format. Must never use the network, or import more than the standard library
and torch.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

CLASSES = 10
SIDE = 8
FULL_INK = 16

# The test set is the same for every seed, so that the accuracies of any two runs can be compared.
_SPLIT_SEED = 0
_TEST_SHARE = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Images with their labels.

    Attributes:
        images: float32 tensor of shape (count, 1, 8, 8), from 0 (no ink) to 1.
        labels: int64 tensor of shape (count,), from 0 to 9.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> Digits:
        """Returns the digits at the positions in ``index``."""
        return Digits(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> Digits:
        """Returns the digits on a device."""
        return Digits(self.images.to(device), self.labels.to(device))


def load() -> Digits:
    """Returns all 1,797 digits, in the order of the file."""
    resource = files("ampatch.demo") / "data" / "digits.csv.gz"
    with resource.open("rb") as compressed, gzip.open(compressed, "rt", encoding="ascii") as text:
        rows = torch.tensor([[int(value) for value in line.split(",")] for line in text])
    pixels, labels = rows[:, :-1], rows[:, -1]
    return Digits(pixels.reshape(-1, 1, SIDE, SIDE) / FULL_INK, labels)


def split(digits: Digits) -> tuple[Digits, Digits]:
    """Returns the training set and the test set, which has a fifth of every class; both are always the same."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    train, test = [], []
    for label in range(CLASSES):
        where = (digits.labels == label).nonzero().flatten()
        where = where[torch.randperm(len(where), generator=generator)]
        tested = round(len(where) * _TEST_SHARE)
        test.append(where[:tested])
        train.append(where[tested:])
    return digits[torch.cat(train)], digits[torch.cat(test)]
