"""A small net, its data, and questions about its weights and gradients; and how tests start processes."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch
from helpers import DEVICES, HALF_DTYPES, dtype_name
from torch import Tensor, nn

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
EACH_LEVEL = pytest.mark.parametrize("level", ["O1", "O2"])
EACH_HALF = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def types_of(module: nn.Module) -> set[torch.dtype]:
    return {each.dtype for each in module.parameters()}


def types_computed_by(module: nn.Module) -> set[torch.dtype]:
    """The types of a module's outputs, a set that grows with each call of the module."""
    seen: set[torch.dtype] = set()
    module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    return seen


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in module.state_dict().items()}


def norm(parameters: Iterable[Tensor]) -> float:
    """The norm of the gradients of all of these parameters; 0 without any."""
    squares = [each.grad.float().square().sum().item() for each in parameters if each.grad is not None]
    return sum(squares) ** 0.5


def assert_close(actual: list[Tensor], expected: list[Tensor], part: float) -> None:
    """Up to a part of the largest value of each tensor."""
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        room = part * float(other.float().abs().max()) + 1e-6
        assert float((one.float() - other.float()).abs().max()) <= room
