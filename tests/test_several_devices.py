"""Models whose parameters are on several devices: one verdict decides on the step, and every gradient is unscaled.

The far devices show on any machine which way a number goes. What a GPU computes is for the tests marked gpu to show, of
models that are partly on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from far_devices import FarDevices
from torch import Tensor, nn

from ampatch import amp

SCALE = 4.0

SGD = functools.partial(torch.optim.SGD, lr=1.0)
FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(SGD, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=1.0, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1.0, fused=True),
}
# Where the parameters are: by index of the far device, or None on the CPU.
PLACES = {"two-GPUs": (0, 1), "second-GPU": (1, 1), "GPU-and-CPU": (0, None), "CPU-and-GPU": (None, 1)}

in_every_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


class Parameters(nn.Module):
    """One parameter in each place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(each) for each in tensors)


class Far:
    """A model on far devices, whose gradients a test sets itself."""

    def __init__(self, devices: FarDevices, places: tuple[int | None, ...]) -> None:
        self.devices, self.places = devices, places
        self.model = Parameters([self.tensor(1.0, place) for place in places])

    def tensor(self, value: float, place: int | None) -> Tensor:
        return torch.full((2,), value) if place is None else self.devices.of([value, value], place)

    def number(self, value: float, place: int | None) -> Tensor:
        return torch.tensor(value) if place is None else self.devices.of(value, place)

    def backward(self, gradients: tuple[float, ...]) -> None:
        for parameter, place, value in zip(self.model.parameters(), self.places, gradients, strict=True):
            new = self.tensor(value, place)
            parameter.grad = new if parameter.grad is None else parameter.grad + new

    def weights(self) -> list[float]:
        return [self.devices.values(each.detach())[0].item() for each in self.model.parameters()]

    def gradients(self) -> list[float]:
        return [self.devices.values(each.grad)[0].item() for each in self.model.parameters()]


@pytest.fixture
def far(far_devices: FarDevices, places: tuple[int | None, ...]) -> Far:
    return Far(far_devices, places)


def initialize(far: Far, optimizer: Any, **options: Any) -> None:
    amp.initialize(
        far.model,
        optimizer,
        **{
            "opt_level": "O1",
            "patch_torch_functions": False,
            "loss_scale": "dynamic",
            "init_scale": SCALE,
            "verbosity": 0,
            **options,
        },
    )


def block(far: Far, optimizer: Any, gradients: tuple[float, ...], loss_on: int | None = 0, **options: Any) -> None:
    with amp.scale_loss(far.number(1.0, loss_on), optimizer, **options):
        far.backward(gradients)


@in_every_place
@pytest.mark.parametrize("loss_on", [0, 1, None], ids=["loss-on-cuda:0", "loss-on-cuda:1", "loss-on-the-CPU"])
@pytest.mark.parametrize("overflowing", [None, 0, 1])
class TestAStep:
    def test_skips_if_any_device_overflows(self, far, loss_on, overflowing):
        optimizer = SGD(far.model.parameters())
        initialize(far, optimizer)
        scaled = tuple(math.inf if index == overflowing else SCALE for index in range(2))
        block(far, optimizer, scaled, loss_on)
        optimizer.step()
        assert far.weights() == ([0, 0] if overflowing is None else [1, 1])
        assert amp.step_was_skipped(optimizer) == (overflowing is not None)
        assert amp.get_loss_scale() == (SCALE if overflowing is None else SCALE / 2)

    @every_fused
    def test_of_a_fused_optimizer_skips_by_itself_on_every_device(self, far, loss_on, overflowing, make):
        optimizer = make(far.model.parameters())
        initialize(far, optimizer)
        block(far, optimizer, (SCALE, SCALE), loss_on)
        optimizer.step()
        optimizer.zero_grad()
        before = far.weights()
        assert before == pytest.approx([0, 0], abs=1e-6)
        block(far, optimizer, tuple(math.inf if index == overflowing else SCALE for index in range(2)), loss_on)
        optimizer.step()
        if overflowing is None:
            assert all(now < earlier - 0.5 for now, earlier in zip(far.weights(), before, strict=True))
        else:
            assert far.weights() == before
        assert amp.step_was_skipped(optimizer) == (overflowing is not None)


@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["one-GPU", "two-GPUs"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("is_unpickled", [False, True], ids=["new", "unpickled"])
def test_an_optimizer_for_graphs_skips_outside_of_a_capture_too(far, name, is_unpickled):
    optimizer = getattr(torch.optim, name)(far.model.parameters(), lr=1.0, fused=True, capturable=True)
    if is_unpickled:  # pickling keeps no more; of such an optimizer torch warns, and amp leaves that to it
        del optimizer._warned_capturable_if_run_uncaptured
    initialize(far, optimizer)
    block(far, optimizer, (SCALE, SCALE))
    with pytest.warns(UserWarning, match="capturable=True") if is_unpickled else contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad()
    before = far.weights()
    block(far, optimizer, (math.inf, SCALE))
    optimizer.step()
    assert far.weights() == before
    assert amp.skipped_steps(optimizer) == 1
