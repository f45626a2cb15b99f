"""Tests whole training runs: small networks learn under amp as in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from optimizers import backward
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp

O1_FLOAT16 = {"opt_level": "O1", "half_dtype": torch.float16}
O1_BFLOAT16 = {"opt_level": "O1", "half_dtype": torch.bfloat16}
O1_BFLOAT16_DYNAMIC = {**O1_BFLOAT16, "loss_scale": "dynamic"}
O4 = {"opt_level": "O4"}
LEVELS = {
    "O1-float16": O1_FLOAT16,
    "O1-bfloat16": O1_BFLOAT16,
    "O1-bfloat16-dynamic": O1_BFLOAT16_DYNAMIC,
    "O4": O4,
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


class Recurrent(nn.Module):
    """Reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.recurrent(images.squeeze(1))
        return self.head(states[:, -1])


class Attentive(nn.Module):
    """Attends to the lines of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(images.squeeze(1)).mean(1))


NETWORKS = {"mlp": mlp, "cnn": cnn, "lstm": Recurrent, "transformer": Attentive}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Noisy images, in which one quarter is brighter than the others: the class is which."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        classes = torch.randint(4, (16,), generator=generator)
        images = torch.randn(16, 1, 8, 8, generator=generator)
        for image, quarter in zip(images, classes.tolist(), strict=True):
            image[0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 1.5
        found.append((images, classes))
    return found


class Run:
    """A network in training; without options for amp in plain float32."""

    def __init__(self, network: Callable[[], nn.Module], options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.7)
        self.with_amp = options is not None
        if options is not None:
            amp.initialize(self.model, self.optimizer, verbosity=0, **options)
        self.losses: list[float] = []

    def train(self, data: Iterable[tuple[Tensor, Tensor]], overflows: Collection[int] = ()) -> float:
        """Trains a step for each batch, some of which overflow; returns the mean loss of the last ten steps."""
        for number, (images, classes) in enumerate(data):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), classes)
            factor = math.inf if number in overflows else 1
            backward(loss * factor, self.optimizer, with_amp=self.with_amp)
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
        return sum(self.losses[-10:]) / 10

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.covering(1)
def test_training_ends_at_the_loss_of_float32(network, options):
    data = batches(40)
    plain = Run(network, None)
    expected = plain.train(data)
    assert expected < 0.6 * plain.losses[0]

    run = Run(network, options)
    assert run.train(data) == pytest.approx(expected, rel=0.05, abs=0.01)
    assert all(parameter.dtype is torch.float32 for parameter in run.model.parameters())
    assert amp.cast_counts().casts > 0


def test_scale_that_is_too_large_is_halved_until_gradients_fit():
    # 2**24 times a gradient of 1/16 is beyond float16; no overflow is injected here.
    run = Run(cnn, {**O1_FLOAT16, "init_scale": 2.0**24})
    run.train(batches(20))
    skipped = amp.skipped_steps(run.optimizer)
    assert 0 < skipped < 20
    assert amp.get_loss_scale() == 2.0 ** (24 - skipped)
    assert run.losses[-1] < run.losses[0]
