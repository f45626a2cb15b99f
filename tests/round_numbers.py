"""Weights and data of few and round numbers: no rounding in either half type, in whatever order sums are taken."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MICRO_BATCHES, ROWS, WIDTH = 3, 4, 4

# Gradients are at most 8 with these, so that none overflows at this scale, even after the sum over processes.
SCALE = {"loss_scale": "dynamic", "init_scale": 2.0**10, "verbosity": 0}


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Overwrites the weights of a model."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator) / 2)


def data(device: str, rank: int) -> list[Tensor]:
    """The micro-batches of a rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(-1, 2, (ROWS, WIDTH), generator=generator).float().to(device) for _ in range(MICRO_BATCHES)]
