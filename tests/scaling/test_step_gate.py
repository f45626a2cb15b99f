"""The gate before a step that may be skipped, and four ways to it: a block, a GradScaler, Apex's class, a trainer."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same_state
from optimizers import MOMENTUM, SGD, initialize
from optimizers import backward as backward_in_block
from stepping import everything, loss_of, network, weights
from torch import Tensor, nn

import ampatch
from ampatch.apex.fp16_utils import FP16_Optimizer
from ampatch.errors import LossScaleError
from ampatch.integrations.trainer_session import TrainerSession, Wording
from ampatch.scaling.overflows import ScaleChange
from ampatch.scaling.step_gate import ClosureGate

WORDING = Wording("Trainer(...)", "Make one.", "trainer.backward(loss)")
SCALES = {"init_scale": 2.0, "min_loss_scale": 1.0}

LBFGS = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4)

#: Makes the backward pass of a loss, and makes a step, each with the scale of one of the four ways.
Loop = tuple[Callable[[Tensor], None], Callable[..., Any]]


def by_block(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    initialize(model, optimizer, opt_level="O1", half_dtype="float16", **SCALES)
    yield lambda loss: backward_in_block(loss, optimizer), optimizer.step


def by_grad_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    scaler = ampatch.GradScaler("cpu", **SCALES)

    def step(*closure: Any) -> Any:
        result = scaler.step(optimizer, *closure)
        scaler.update()
        return result

    yield lambda loss: scaler.scale(loss).backward(), step


def by_fp16_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    wrapper = FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args=SCALES)
    yield wrapper.backward, wrapper.step


def by_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    scaler = ampatch.GradScaler("cpu", **SCALES)
    session = TrainerSession([model], [optimizer], {"opt_level": "O1", "half_dtype": "float16"}, WORDING, scaler)
    session.open({})
    try:
        with session.scaled_backward():
            yield Tensor.backward, optimizer.step
    finally:
        session.close()


@pytest.mark.parametrize("way", [by_block, by_grad_scaler, by_fp16_optimizer, by_trainer])
def test_every_way_skips_then_raises_at_the_floor_with_one_message(way):
    model = network()
    optimizer = MOMENTUM(model.named_parameters())
    before = weights(model)
    for backward, step in way(model, optimizer):
        backward(loss_of(model) * math.inf)
        assert step() is None
        optimizer.zero_grad()
        assert optimizer._opt_called
        backward(loss_of(model) * math.inf)
        with pytest.raises(LossScaleError) as caught:
            step()
    message = str(caught.value)
    assert message.startswith("loss scaler 0 is at its floor of 1 and the gradients still overflow, so no scale")
    assert "0.weight, shape (6, 4), float32: " in message
    assert len(caught.value.overflow.gradients) == 4
    assert caught.value.overflow.scales == (ScaleChange(0, 1.0, 1.0),)
    assert_same_state(weights(model), before)
    assert not optimizer.state


@pytest.mark.parametrize("at", [0, 2], ids=["first-call", "later-call"])
@pytest.mark.parametrize("way", [by_block, by_grad_scaler, by_trainer])
def test_every_way_undoes_a_step_whose_closure_overflows(way, at):
    # Apex's class evaluates a closure again until nothing overflows.
    model = network()
    optimizer = LBFGS(model.parameters())
    factors = iter([1.0] * at + [math.inf])
    before = everything(model, optimizer)
    for backward, step in way(model, optimizer):

        def closure(backward: Callable[[Tensor], None] = backward) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model) * next(factors)
            backward(loss)
            return loss

        assert step(closure).isinf()
    assert list(factors) == []
    assert_same_state(everything(model, optimizer), before)


def test_fp16_optimizer_undoes_a_step_whose_closure_overflows_at_the_floor():
    layer = nn.Linear(2, 1).half()
    args = {"init_scale": 1.0, "min_loss_scale": 1.0}
    optimizer = FP16_Optimizer(LBFGS(layer.parameters()), dynamic_loss_scale=True, dynamic_loss_args=args)
    evaluated: list[float] = []

    def closure(*factors: float) -> Tensor:
        factor = factors[len(evaluated)]
        evaluated.append(factor)
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 2).half()).float().square().sum() * factor
        optimizer.backward(loss)
        return loss

    def masters() -> Any:
        return [each.detach().clone() for group in optimizer.state_dict()["fp32_from_fp16"] for each in group]

    before = weights(layer), masters()
    with pytest.raises(LossScaleError, match="at its floor"):
        optimizer.step(functools.partial(closure, 1, 1, math.inf))
    assert evaluated == [1, 1, math.inf]
    assert_same_state((weights(layer), masters()), before)
    evaluated.clear()
    optimizer.step(functools.partial(closure, *[1] * 9))  # goes on
    assert evaluated


def test_gate_copies_nothing_unless_an_evaluation_may_follow_a_change():
    parameter = nn.Parameter(torch.ones(2))
    assert not ClosureGate(SGD([parameter]), may_go_back=True).can_restore
    assert not ClosureGate(torch.optim.LBFGS([parameter]), may_go_back=False).can_restore


def test_gate_undoes_a_step_that_goes_on_after_an_overflow():
    parameter = nn.Parameter(torch.ones(2))
    gate = ClosureGate(torch.optim.LBFGS([parameter]), may_go_back=True)

    def step() -> str:
        with torch.no_grad():
            parameter.zero_()
        with contextlib.suppress(BaseException):
            gate.leave("verdict", "loss")
        return "done"

    assert gate.run(step) == "loss"
    assert gate.overflowed == "verdict"
    assert parameter.tolist() == [1.0, 1.0]
