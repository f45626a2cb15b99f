"""Of optimizers that skip by themselves: the one in the guide keeps the contract that the page states."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_state
from stepping import every_half, loss_of, network, started, train, trained_by_torch, weights
from torch import Tensor, nn

import ampatch
from ampatch import amp

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "optimizers.md"

# The factors of the losses of five steps: some overflow, the first one too.
FACTORS = [math.inf, 1, 1, math.inf, 1]


def _from_page() -> type[torch.optim.Optimizer]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "class SignedMomentum" in block]
    found: dict[str, Any] = {"torch": torch}
    exec(code, found)
    return found["SignedMomentum"]


SignedMomentum = _from_page()


class Counting(SignedMomentum):
    """Notes whether it was given a scale to divide by, and a verdict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.given: list[tuple[bool, bool]] = []

    def step(self, closure: Any = None) -> Any:
        self.given.append((getattr(self, "grad_scale", None) is not None, getattr(self, "found_inf", None) is not None))
        return super().step(closure)


def assert_trained_without_the_overflows(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    finite = [index for index, factor in enumerate(FACTORS) if factor == 1]
    reference, plain = trained_by_torch(SignedMomentum, network(), *finite)
    assert_same_state(weights(model), weights(reference))
    assert_same_state(optimizer.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled-by-hand"])
@pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
def test_optimizer_skips_and_unscales_under_a_grad_scaler(kind, unscales, far, request):
    if far:
        request.getfixturevalue("far_away")
    model = network()
    optimizer, scaler = Counting(model.parameters()), kind("cpu", init_scale=2.0**8)
    for index, factor in enumerate(FACTORS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, index) * factor).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert_trained_without_the_overflows(model, optimizer)
    assert optimizer.given == [(not unscales, True)] * len(FACTORS)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.usefixtures("far_away")
def test_optimizer_skips_under_amp_from_its_second_step_on():
    model, optimizer = started(Counting, on_overflow="log")
    train(model, optimizer, *FACTORS)
    assert_trained_without_the_overflows(model, optimizer)
    # The first step, which has no state yet, amp skips; the second makes it.
    assert optimizer.given == [(False, False), (False, True), (False, True), (False, True)]
    assert amp.skipped_steps(optimizer) == 2


@pytest.mark.usefixtures("far_away")
@every_half
def test_optimizer_updates_masters_at_o2(half_dtype):
    model, optimizer = started(Counting, opt_level="O2", half_dtype=half_dtype, on_overflow="log", steps=2)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    train(model, optimizer, math.inf)
    assert_same_state([master.detach() for master in amp.master_params(optimizer)], before)
    assert {master.dtype for master in before} == {torch.float32}
    assert {float(state["steps"]) for state in optimizer.state.values()} == {2.0}


def test_optimizer_steps_without_any_scale():
    model = network()
    optimizer = Counting(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.given == [(False, False)]
    assert first.item() == loss_of(network()).item()
    assert loss_of(model) < first
