"""Networks that take steps under amp, and everything that a step may change."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_state, dtype_name
from optimizers import SGD, backward, initialize
from torch import Tensor, nn

SCALE = 2.0**8

# Opt levels that cast, with each half type.
LEVELS: dict[str, dict[str, Any]] = {
    f"{level}-{dtype_name(half)}": {"opt_level": level, "half_dtype": half}
    for level in ("O1", "O2", "O3")
    for half in HALF_DTYPES
}

every_half = pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
o1_and_o2 = pytest.mark.parametrize("opt_level", ["O1", "O2"])


@pytest.fixture(params=["near", "far"])
def distance(request):
    """The host reads the device at once, or would have to wait for it."""
    if request.param == "far":
        request.getfixturevalue("far_away")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    """Returns the loss of the batch with this number."""
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
    return model(batch.to(next(model.parameters()).device)).float().square().mean()


def started(
    make: Callable[..., Any] = SGD, *, model: nn.Module | None = None, steps: int = 0, **options: Any
) -> tuple[Any, Any]:
    """Returns a model and its optimizer under amp, after some steps and without gradients.

    Args:
        make: makes the optimizer.
        model: a `network` unless given.
        steps: the number of steps. After the first, a fused optimizer has its state, and skips steps by itself.
        options: of `amp.initialize`.
    """
    model = network() if model is None else model
    optimizer = make(model.parameters())
    initialize(model, optimizer, **{"init_scale": SCALE, **options})
    train(model, optimizer, *[1.0] * steps)
    if steps:
        optimizer.zero_grad()
    return model, optimizer


def train(model: nn.Module, optimizer: Any, *factors: float) -> None:
    """Takes a step for each factor of the loss; leaves the gradients of the last."""
    for index, factor in enumerate(factors):
        optimizer.zero_grad()
        backward(loss_of(model, index) * factor, optimizer)
        optimizer.step()


def trained_by_torch(make: Callable[..., Any], model: nn.Module, *indices: int) -> tuple[nn.Module, Any]:
    """Takes a step without amp for the batch with each of these numbers; returns the model and its optimizer."""
    optimizer = make(model.parameters())
    for index in indices:
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()
    return model, optimizer


def closure_of(model: nn.Module, optimizer: Any, *factors: float) -> Callable[[], Tensor]:
    """Returns a closure that makes gradients of a loss with the next of these factors at each call."""
    following = iter(factors)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model) * next(following)
        backward(loss, optimizer)
        return loss.detach()

    return closure


def weights(model: nn.Module) -> list[Tensor]:
    """Returns copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def everything(model: nn.Module, optimizer: Any) -> Any:
    """Returns copies of weights, of what the optimizer updates and of its state."""
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy([list(model.parameters()), updated, optimizer.state_dict()])


@contextlib.contextmanager
def nothing_changes(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Asserts that neither weights, nor what the optimizer updates, nor its state change in the block."""
    before = everything(model, optimizer)
    yield
    assert_same_state(everything(model, optimizer), before)
