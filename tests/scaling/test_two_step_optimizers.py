"""Steps in two halves: docs/guide/two_step_optimizers.md, with overflows; and `amp.gradients_are_finite`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError

EACH_LEVEL = pytest.mark.parametrize("level", ["O1", "O2"])


def started(level: str = "O1", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"half_dtype": "float16", "init_scale": 1024.0, "verbosity": 0, **options}
    amp.initialize(model, optimizer, opt_level=level, **chosen)
    return model, optimizer


def run(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum() * factor, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def climb(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        before = [each.clone() for each in model.parameters()]
        for each in model.parameters():
            assert each.grad is not None
            each.add_(each.grad.float() * 0.01)
    return before


def train(model: nn.Module, optimizer: torch.optim.Optimizer, factors: list[float], *, asks: bool) -> list[float]:
    """Steps in two halves, of which the first has these factors; returns the scale after each."""
    scales = []
    for factor in factors:
        run(model, optimizer, factor)
        if asks and not amp.gradients_are_finite(optimizer):
            optimizer.zero_grad()
            scales.append(amp.get_loss_scale())
            continue
        before = climb(model)
        optimizer.zero_grad()
        run(model, optimizer)
        with torch.no_grad():
            for each, weight in zip(model.parameters(), before, strict=True):
                each.copy_(weight)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(amp.get_loss_scale())
    return scales


@EACH_LEVEL
def test_where_the_script_asks_an_overflow_costs_the_step_only(level: str) -> None:
    model, optimizer = started(level)
    scales = train(model, optimizer, [1.0, 1e38, 1e38, 1.0], asks=True)
    assert scales == [1024, 1024, 512, 256]  # it falls when the next block begins
    assert all(bool(each.isfinite().all()) for each in model.parameters())


@EACH_LEVEL
def test_where_it_does_not_ask_the_warning_names_what_happened(level: str) -> None:
    model, optimizer = started(level)
    with pytest.warns(AmpWarning, match=r"An earlier block before the same step has overflowed.*gradients_are_finite"):
        scales = train(model, optimizer, [1.0, 1e38], asks=False)
    assert scales == [1024, 512]  # once for the two halves


@EACH_LEVEL
def test_in_a_closure_the_step_is_undone(level: str) -> None:
    factors = iter([1.0, 1.0, 1e38])

    class InOneStep(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for each in group["params"]:
                        each.add_(each.grad)
            closure()
            super().step()
            return closure()

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = InOneStep(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, half_dtype="float16", init_scale=1024.0, verbosity=0)
    before = [each.detach().clone() for each in amp.master_params(optimizer)]

    def closure() -> Tensor:
        optimizer.zero_grad()
        run(model, optimizer, next(factors))
        return torch.zeros(())

    optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    assert amp.get_loss_scale() == 512
    for one, other in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(one, other)


class TestGradientsAreFinite:
    @EACH_LEVEL
    @pytest.mark.parametrize(
        "options", [{}, {"loss_scale": 128.0}, {"half_dtype": "bfloat16", "loss_scale": 1.0}], ids=str
    )
    @pytest.mark.parametrize("delay_unscale", [False, True])
    def test_in_every_state(self, level: str, options: dict[str, Any], delay_unscale: bool) -> None:
        model, optimizer = started(level, **options)
        assert bool(amp.gradients_are_finite(optimizer))  # there are none
        run(model, optimizer, delay_unscale=delay_unscale)
        found = amp.gradients_are_finite(optimizer)
        assert (found.dtype, found.shape, bool(found)) == (torch.bool, (), True)
        optimizer.zero_grad()
        run(model, optimizer, math.inf, delay_unscale=delay_unscale)
        assert not bool(amp.gradients_are_finite(optimizer))
        optimizer.zero_grad()
        assert bool(amp.gradients_are_finite(optimizer))

    def test_after_an_overflow_in_one_of_several_blocks(self) -> None:
        model, optimizer = started()
        for factor in (1.0, math.inf, 1.0):
            run(model, optimizer, factor)
        assert not bool(amp.gradients_are_finite(optimizer))

    def test_with_amp_off_it_looks_at_the_gradients(self) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, enabled=False)
        assert bool(amp.gradients_are_finite(optimizer))
        model(torch.ones(2, 4)).sum().backward()
        assert bool(amp.gradients_are_finite(optimizer))
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = math.nan
        assert not bool(amp.gradients_are_finite(optimizer))

    def test_of_something_else_raises(self) -> None:
        started()
        with pytest.raises(OptionError, match="lacks"):
            amp.gradients_are_finite(nn.Linear(1, 1))
        with pytest.raises(UsageError, match="never handed"):
            amp.gradients_are_finite(torch.optim.SGD([torch.ones(1, requires_grad=True)]))


def test_a_loss_that_is_inf_with_finite_gradients_is_told_of_once() -> None:
    model, optimizer = started()
    for index in range(2):
        loss = model(torch.ones(2, 4)).float().sum() + torch.tensor(math.inf)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if index == 0:
            with pytest.warns(AmpWarning, match="the loss of a step is inf, and the step has run"):
                optimizer.step()
        else:
            optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        optimizer.zero_grad()


@EACH_LEVEL
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("blocks", [1, 3])
def test_steps_that_a_script_leaves_out_come_to_an_end(level: str, set_to_none: bool, blocks: int) -> None:
    model, optimizer = started(level, init_scale=2.0**20)
    left_out = 0
    for _ in range(20):
        for _ in range(blocks):
            run(model, optimizer, 4.0)
        if not amp.gradients_are_finite(optimizer):
            optimizer.zero_grad(set_to_none)
            left_out += 1
            continue
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        optimizer.zero_grad(set_to_none)
    assert 0 < left_out < 10


class TestGradientsThatChanged:
    def test_after_a_delayed_block(self) -> None:
        model, optimizer = started()
        run(model, optimizer)
        run(model, optimizer, math.inf, delay_unscale=True)
        assert not amp.gradients_are_finite(optimizer)
        optimizer.zero_grad()

    def test_by_the_user(self) -> None:
        model, optimizer = started()
        run(model, optimizer)
        assert model.weight.grad is not None
        model.weight.grad.fill_(math.nan)
        assert not amp.gradients_are_finite(optimizer)


def test_a_closure_that_an_optimizer_keeps_is_the_users_after_the_step() -> None:
    class Keeping(torch.optim.SGD):
        kept: Any = None

        def step(self, closure: Any) -> Any:  # type: ignore[override]
            self.kept = closure
            return closure()

    model = nn.Linear(4, 1)
    optimizer = Keeping(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, half_dtype="float16", init_scale=1024.0, verbosity=0)

    def closure() -> int:
        run(model, optimizer, math.inf)
        return 7

    assert optimizer.step(closure) == 7
    assert amp.step_was_skipped(optimizer)
    assert optimizer.kept() == 7
    assert not amp.gradients_are_finite(optimizer)


class TestGradientsThatNoBlockJudges:
    """Put together by the user from cleared ones, as for several tasks; or used for a second step."""

    @staticmethod
    def started(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, half_dtype="float16", init_scale=1024.0, verbosity=0)
        return model, optimizer

    @staticmethod
    def backward(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float) -> list[Tensor]:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(4, 2)).float().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        return [each.grad.clone() for each in model.parameters()]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("factors", [(1.0, math.inf), (math.inf, 1.0), (1.0, 1.0)], ids=str)
    def test_of_several_tasks(self, level: str, factors: tuple[float, float]) -> None:
        model, optimizer = self.started(level)
        before = [each.detach().clone() for each in model.parameters()]
        saved = [self.backward(model, optimizer, factor) for factor in factors]
        for parameter, one, other in zip(model.parameters(), *saved, strict=True):
            parameter.grad = (one + other) / 2
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (math.inf in factors)
        assert all(map(torch.equal, model.parameters(), before)) == (math.inf in factors)
        assert amp.get_loss_scale() == (512.0 if math.inf in factors else 1024.0)

    @pytest.mark.filterwarnings("ignore:the loss of a skipped step is inf")
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_of_a_step_that_was_skipped(self, level: str) -> None:
        model, optimizer = self.started(level)
        before = [each.detach().clone() for each in model.parameters()]
        self.backward(model, optimizer, math.inf)
        optimizer.step()
        optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        assert amp.get_loss_scale() == 512.0
