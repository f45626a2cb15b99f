"""The gate before a step that may be skipped, and four ways to it: a block, a GradScaler, Apex's class, a trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same_state
from torch import Tensor, nn

import ampatch
from ampatch import amp
from ampatch.apex.fp16_utils import FP16_Optimizer
from ampatch.errors import LossScaleError
from ampatch.integrations.trainer_session import TrainerSession, Wording
from ampatch.scaling.overflows import Overflow, OverflowHandler, ScaleChange
from ampatch.scaling.step_gate import ClosureGate, end_skipped, skipping_by_itself

WORDING = Wording("Trainer(...)", "Make one.", "trainer.backward(loss)")

#: Makes the backward pass of a loss, and makes a step, each with the scale of one of the four ways.
Loop = tuple[Callable[[Tensor], None], Callable[..., Any]]


def by_block(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    amp.initialize(model, optimizer, opt_level="O1", half_dtype="float16", init_scale=2.0, min_loss_scale=1.0)

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    yield backward, optimizer.step


def by_grad_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    scaler = ampatch.GradScaler("cpu", init_scale=2.0, min_loss_scale=1.0)

    def step(*closure: Any) -> Any:
        result = scaler.step(optimizer, *closure)
        scaler.update()
        return result

    yield lambda loss: scaler.scale(loss).backward(), step


def by_fp16_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    args = {"init_scale": 2.0, "min_loss_scale": 1.0}
    wrapper = FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args=args)
    yield wrapper.backward, wrapper.step


def by_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Loop]:
    scaler = ampatch.GradScaler("cpu", init_scale=2.0, min_loss_scale=1.0)
    session = TrainerSession([model], [optimizer], {"opt_level": "O1", "half_dtype": "float16"}, WORDING, scaler)
    session.open({})
    try:
        with session.scaled_backward():
            yield Tensor.backward, optimizer.step
    finally:
        session.close()


WAYS = [by_block, by_grad_scaler, by_fp16_optimizer, by_trainer]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
class TestTheFourWays:
    def test_skip_then_raise_at_the_floor_with_one_message(self, way):
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1, momentum=0.9)
        before = copy.deepcopy(layer.state_dict())
        for backward, step in way(layer, optimizer):
            backward(layer(torch.ones(1, 2)).float().sum() * math.inf)
            assert step() is None
            optimizer.zero_grad()
            assert optimizer._opt_called
            backward(layer(torch.ones(1, 2)).float().sum() * math.inf)
            with pytest.raises(LossScaleError) as caught:
                step()
        message = str(caught.value)
        assert message.startswith("loss scaler 0 is at its floor of 1 and the gradients still overflow, so no scale")
        assert "weight, shape (1, 2), float32: 2 inf, 0 nan" in message
        assert caught.value.overflow.scales == (ScaleChange(0, 1.0, 1.0),)
        assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
        assert not optimizer.state

    def test_undo_a_step_whose_closure_overflows(self, way):
        if way is by_fp16_optimizer:
            pytest.skip("Apex's class evaluates a closure again until nothing overflows")
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=4)
        evaluations = 0
        before = copy.deepcopy(layer.state_dict())
        for backward, step in way(layer, optimizer):

            def closure(backward: Callable[[Tensor], None] = backward) -> Tensor:
                nonlocal evaluations
                evaluations += 1
                optimizer.zero_grad()
                loss = layer(torch.ones(1, 2)).float().square().sum() * (math.inf if evaluations == 3 else 1.0)
                backward(loss)
                return loss

            assert step(closure).isinf()
        assert evaluations == 3
        assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
        assert not optimizer.state_dict()["state"]


def test_fp16_optimizer_undoes_a_step_whose_closure_overflows_at_the_floor():
    layer = nn.Linear(2, 1).half()
    inner = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=4)
    args = {"init_scale": 1.0, "min_loss_scale": 1.0}
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=args)
    before = copy.deepcopy((layer.state_dict(), optimizer.state_dict()["fp32_from_fp16"]))
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 2).half()).float().square().sum() * (math.inf if evaluations > 2 else 1.0)
        optimizer.backward(loss)
        return loss

    with pytest.raises(LossScaleError, match="at its floor"):
        optimizer.step(closure)
    assert evaluations == 3
    assert_same_state((layer.state_dict(), optimizer.state_dict()["fp32_from_fp16"]), before)
    evaluations = -10
    optimizer.step(closure)  # goes on
    assert evaluations > -10


class TestClosureGate:
    @pytest.mark.parametrize("goes_on", [False, True], ids=["left at once", "goes on"])
    def test_restores_parameters_options_and_state(self, goes_on):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.LBFGS([parameter])
        gate = ClosureGate(optimizer, may_go_back=True)

        def step() -> str:
            with torch.no_grad():
                parameter.zero_()
            optimizer.state[parameter]["seen"] = 1
            optimizer.param_groups[0]["lr"] = 7.0
            try:
                gate.leave("verdict", "loss")
            except BaseException:
                if not goes_on:
                    raise
            return "done"

        assert gate.run(step) == "loss"
        assert gate.overflowed == "verdict"
        assert parameter.tolist() == [1.0, 1.0]
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 1

    def test_copies_nothing_if_no_evaluation_comes_after_a_change(self):
        parameter = nn.Parameter(torch.ones(2))
        assert not ClosureGate(torch.optim.SGD([parameter], lr=0.1), may_go_back=True).can_restore
        assert not ClosureGate(torch.optim.LBFGS([parameter]), may_go_back=False).can_restore


def test_skipping_by_itself_leaves_no_attributes_behind():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    flag = torch.ones(())
    with skipping_by_itself(optimizer, optimizer.param_groups[0]["params"], None, flag) as found_inf:
        assert optimizer.found_inf is found_inf
        assert found_inf == 1
        assert optimizer.grad_scale is None
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


class TestEndSkipped:
    OVERFLOW = Overflow("SGD", (ScaleChange(1, 4.0, 2.0),), (), remark="cleared")

    def end(self, choice: Any, floor: float, log: Callable[[], object] = lambda: None) -> Overflow | None:
        return end_skipped(
            object(), [(self.OVERFLOW.scales[0], floor)], lambda: self.OVERFLOW, OverflowHandler(choice), log
        )

    def test_logs_a_line_or_reports(self):
        lines: list[int] = []
        assert self.end("log", 0, lambda: lines.append(1)) is None
        assert lines == [1]
        assert self.end("trace", 0, lambda: lines.append(2)) is self.OVERFLOW
        assert lines == [1]
        assert self.end("raise", 0, lambda: lines.append(3)) is self.OVERFLOW
        assert lines == [1, 3]

    def test_raises_at_the_floor_before_it_logs(self):
        lines: list[int] = []
        with pytest.raises(LossScaleError, match=r"loss scaler 1 is at its floor of 4 .*\n  SGD: cleared"):
            self.end("log", 4.0, lambda: lines.append(1))
        assert not lines
