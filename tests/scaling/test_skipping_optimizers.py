"""Of optimizers that skip by themselves: the one in the guide keeps the contract that the page states."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from torch import Tensor, nn

import ampatch
from ampatch import amp

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "optimizers.md"

# Which of the steps overflow, the first one too.
OVERFLOWS = [True, False, False, True, False]


def _from_page() -> type[torch.optim.Optimizer]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "class SignedMomentum" in block]
    found: dict[str, Any] = {"torch": torch}
    exec(code, found)
    return found["SignedMomentum"]  # type: ignore[no-any-return]


SignedMomentum = _from_page()


class Counting(SignedMomentum):  # type: ignore[misc, valid-type]
    """Tells what it was given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.given: list[tuple[bool, bool]] = []

    def step(self, closure: Any = None) -> Any:
        self.given.append((getattr(self, "grad_scale", None) is not None, getattr(self, "found_inf", None) is not None))
        return super().step(closure)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, index: int) -> Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
    return model(batch).float().square().mean() * (math.inf if OVERFLOWS[index] else 1)


def without_overflows() -> tuple[nn.Module, torch.optim.Optimizer]:
    """What a run ends with that leaves the steps out which overflow."""
    model = network()
    optimizer = SignedMomentum(model.parameters())
    for index, overflows in enumerate(OVERFLOWS):
        if not overflows:
            optimizer.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()
    return model, optimizer


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wanted, wanted_optimizer = without_overflows()
    for found, expected in zip(model.parameters(), wanted.parameters(), strict=True):
        assert_same_bits(found, expected)
    assert_same_state(optimizer.state_dict()["state"], wanted_optimizer.state_dict()["state"])


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled-by-hand"])
@pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
def test_under_a_grad_scaler(
    kind: Callable[..., torch.amp.GradScaler], unscales: bool, far: bool, request: pytest.FixtureRequest
) -> None:
    if far:
        request.getfixturevalue("far_away")
    model = network()
    optimizer, scaler = Counting(model.parameters()), kind("cpu", init_scale=2.0**8)
    for index in range(len(OVERFLOWS)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, index)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    check(model, optimizer)
    assert optimizer.given == [(not unscales, True)] * len(OVERFLOWS)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.usefixtures("far_away")
def test_under_amp() -> None:
    model = network()
    optimizer = Counting(model.parameters())
    amp.initialize(model, optimizer, half_dtype="float16", patch_torch_functions=False, init_scale=2.0**8, verbosity=0)
    for index in range(len(OVERFLOWS)):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    check(model, optimizer)
    # The first step, which has no state yet, amp skips; the second makes it.
    assert optimizer.given == [(False, False), (False, True), (False, True), (False, True)]
    assert amp.skipped_steps(optimizer) == 2


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
def test_at_o2_it_updates_masters(half: torch.dtype) -> None:
    model = network()
    optimizer = Counting(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, loss_scale="dynamic", verbosity=0)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    for index in (1, 2, 3):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if index == 2:
            before = [master.detach().clone() for master in amp.master_params(optimizer)]
    for master, kept in zip(amp.master_params(optimizer), before, strict=True):
        assert_same_bits(master, kept)
        assert master.dtype is torch.float32
    assert {float(state["steps"]) for state in optimizer.state.values()} == {2.0}


def test_without_any_scale() -> None:
    model = network()
    optimizer = Counting(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.given == [(False, False)]
    assert first.item() == loss_of(network(), 1).item()
    assert loss_of(model, 1) < first
