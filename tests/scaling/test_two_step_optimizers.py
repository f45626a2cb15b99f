"""Steps in two halves: docs/guide/two_step_optimizers.md, with overflows; and `amp.gradients_are_finite`."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import stepping
import torch
from helpers import assert_same_state
from optimizers import OVERFLOW, backward
from stepping import closure_of, loss_of, o1_and_o2, weights
from torch import nn

from ampatch import amp
from ampatch.errors import AmpWarning

started = functools.partial(stepping.started, half_dtype="float16", init_scale=1024.0)


def run(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    backward(loss_of(model) * factor, optimizer, **options)


@torch.no_grad()
def train(model: nn.Module, optimizer: Any, factors: list[float], *, asks: bool) -> list[float]:
    """Takes steps in two halves, of which the first has these factors; returns the scale after each."""
    scales = []
    for factor in factors:
        with torch.enable_grad():
            run(model, optimizer, factor)
        if not asks or amp.gradients_are_finite(optimizer):
            before = weights(model)
            for parameter in model.parameters():
                parameter.add_(parameter.grad.float() * 0.01)
            optimizer.zero_grad()
            with torch.enable_grad():
                run(model, optimizer)
            for parameter, weight in zip(model.parameters(), before, strict=True):
                parameter.copy_(weight)
            optimizer.step()
        optimizer.zero_grad()
        scales.append(amp.get_loss_scale())
    return scales


@o1_and_o2
def test_overflow_that_the_script_asks_for_costs_the_step_only(opt_level):
    model, optimizer = started(opt_level=opt_level)
    scales = train(model, optimizer, [1.0, OVERFLOW, OVERFLOW, 1.0], asks=True)
    assert scales == [1024, 1024, 512, 256]  # it falls when the next block begins
    assert all(bool(each.isfinite().all()) for each in model.parameters())


@o1_and_o2
def test_overflow_that_the_script_does_not_ask_for_is_warned_of(opt_level):
    model, optimizer = started(opt_level=opt_level)
    with pytest.warns(AmpWarning, match=r"An earlier block before the same step has overflowed.*gradients_are_finite"):
        scales = train(model, optimizer, [1.0, OVERFLOW], asks=False)
    assert scales == [1024, 512]  # once for the two halves


@o1_and_o2
def test_step_that_writes_between_evaluations_of_its_closure_is_undone(opt_level):
    class InOneStep(torch.optim.SGD):
        def step(self, closure: Any) -> None:
            closure()
            with torch.no_grad():
                for each in self.param_groups[0]["params"]:
                    each.add_(each.grad)
            closure()
            super().step()
            closure()

    model, optimizer = started(functools.partial(InOneStep, lr=0.1), opt_level=opt_level)
    before = [each.detach().clone() for each in amp.master_params(optimizer)]
    optimizer.step(closure_of(model, optimizer, 1.0, 1.0, OVERFLOW))
    assert amp.step_was_skipped(optimizer)
    assert amp.get_loss_scale() == 512
    assert_same_state([each.detach() for each in amp.master_params(optimizer)], before)


def test_closure_that_an_optimizer_keeps_is_the_users_after_the_step():
    class Keeping(torch.optim.SGD):
        def step(self, closure: Any) -> Any:
            self.kept = closure
            return closure()

    model, optimizer = started(Keeping, opt_level="O1")

    def closure() -> int:
        run(model, optimizer, OVERFLOW)
        return 7

    assert optimizer.step(closure) == 7
    assert amp.step_was_skipped(optimizer)
    assert optimizer.kept() == 7
    assert not amp.gradients_are_finite(optimizer)


class TestGradientsAreFinite:
    @o1_and_o2
    @pytest.mark.parametrize(
        "options", [{}, {"loss_scale": 128.0}, {"half_dtype": "bfloat16", "loss_scale": 1.0}], ids=str
    )
    @pytest.mark.parametrize("delay_unscale", [False, True])
    def test_gradients_are_finite_in_every_state(self, opt_level, options, delay_unscale):
        model, optimizer = started(opt_level=opt_level, **options)
        assert bool(amp.gradients_are_finite(optimizer))  # there are none
        run(model, optimizer, delay_unscale=delay_unscale)
        found = amp.gradients_are_finite(optimizer)
        assert (found.dtype, found.shape, bool(found)) == (torch.bool, (), True)
        optimizer.zero_grad()
        run(model, optimizer, math.inf, delay_unscale=delay_unscale)
        assert not bool(amp.gradients_are_finite(optimizer))
        optimizer.zero_grad()
        assert bool(amp.gradients_are_finite(optimizer))

    @pytest.mark.parametrize("delay_unscale", [False, True])
    def test_gradients_are_not_finite_after_an_overflow_in_the_second_block(self, delay_unscale):
        model, optimizer = started()
        run(model, optimizer)
        run(model, optimizer, math.inf, delay_unscale=delay_unscale)
        if not delay_unscale:
            run(model, optimizer)
        assert not amp.gradients_are_finite(optimizer)
        optimizer.zero_grad()

    @pytest.mark.parametrize("enabled", [True, False])
    def test_gradients_that_the_user_edits_are_looked_at(self, enabled):
        model, optimizer = started(enabled=enabled)
        assert amp.gradients_are_finite(optimizer)
        backward(loss_of(model), optimizer, with_amp=enabled)
        assert amp.gradients_are_finite(optimizer)
        model[0].weight.grad[0, 0] = math.nan
        assert not amp.gradients_are_finite(optimizer)

    @o1_and_o2
    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("blocks", [1, 3])
    def test_scale_falls_until_a_script_that_asks_leaves_out_no_more_steps(self, opt_level, set_to_none, blocks):
        model, optimizer = started(opt_level=opt_level, init_scale=2.0**20)
        left_out = 0
        for _ in range(20):
            for _ in range(blocks):
                run(model, optimizer, 4.0)
            if amp.gradients_are_finite(optimizer):
                optimizer.step()
                assert not amp.step_was_skipped(optimizer)
            else:
                left_out += 1
            optimizer.zero_grad(set_to_none)
        assert 0 < left_out < 10


def test_loss_that_is_inf_with_finite_gradients_is_warned_of_once(recwarn):
    model, optimizer = started(opt_level="O1")
    for _ in range(2):
        backward(loss_of(model) + math.inf, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        optimizer.zero_grad()
    (warning,) = recwarn
    assert "the loss of a step is inf, and the step has run" in str(warning.message)


class TestGradientsThatNoBlockJudges:
    """Put together by the user from cleared ones, as for several tasks; or used for a second step."""

    @o1_and_o2
    @pytest.mark.parametrize("factors", [(1.0, math.inf), (math.inf, 1.0), (1.0, 1.0)], ids=str)
    def test_step_with_a_mean_of_gradients_of_several_tasks_is_skipped_if_one_overflowed(self, opt_level, factors):
        model, optimizer = started(opt_level=opt_level)
        before, saved = weights(model), []
        for factor in factors:
            optimizer.zero_grad()
            run(model, optimizer, factor)
            saved.append([each.grad.clone() for each in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *saved, strict=True):
            parameter.grad = (one + other) / 2
        optimizer.step()
        skips = math.inf in factors
        assert amp.step_was_skipped(optimizer) == skips
        assert all(map(torch.equal, model.parameters(), before)) == skips
        assert amp.get_loss_scale() == (512.0 if skips else 1024.0)

    @pytest.mark.filterwarnings("ignore:the loss of a skipped step is inf", "ignore:this .* steps without gradients")
    @o1_and_o2
    def test_second_step_with_gradients_that_overflowed_is_skipped_too(self, opt_level):
        model, optimizer = started(opt_level=opt_level)
        before = weights(model)
        run(model, optimizer, math.inf)
        optimizer.step()
        optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        assert amp.get_loss_scale() == 512.0
