"""Of blocks whose backward pass reaches parameters of other optimizers: steps are those without amp, or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optimizers
import pytest
import torch
from optimizers import OVERFLOW, SGD, initialize
from stepping import o1_and_o2
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning, UsageError
from ampatch.runtime import runtime
from ampatch.scaling.unscaling import Unscaling

torch.manual_seed(0)
X, Y = torch.randn(8, 4).mul(8).round() / 8, torch.randn(8, 1).mul(8).round() / 8


class Two:
    """An encoder, a head on it, and an optimizer for each.

    Args:
        level: the opt level; None: no amp.
    """

    def __init__(self, level: str | None) -> None:
        torch.manual_seed(0)
        self.with_amp = level is not None
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.of_encoder, self.of_head = SGD(self.encoder.parameters()), SGD(self.head.parameters())
        if self.with_amp:
            options = {"opt_level": level, "half_dtype": "float16", "init_scale": 1024.0}
            initialize([self.encoder, self.head], [self.of_encoder, self.of_head], **options)

    def loss(self) -> Tensor:
        return (self.head(self.encoder(X)) - Y).float().square().mean()

    def by_head(self, factor: float = 1.0) -> None:
        optimizers.backward(self.loss() * factor, self.of_head, with_amp=self.with_amp)

    def by_encoder(self) -> None:
        optimizers.backward(self.encoder(X).float().square().mean(), self.of_encoder, with_amp=self.with_amp)

    def step(self) -> None:
        self.of_head.step()
        self.of_encoder.step()

    def clear(self, set_to_none: bool = True) -> None:
        self.of_head.zero_grad(set_to_none)
        self.of_encoder.zero_grad(set_to_none)

    def weights(self) -> Tensor:
        parameters = (*self.encoder.parameters(), *self.head.parameters())
        return torch.cat([each.detach().float().flatten() for each in parameters])


def one_after_the_other(run: Two) -> None:
    run.by_head()
    assert not run.with_amp or amp.grads_are_unscaled(run.of_encoder)
    run.of_head.step()
    run.of_head.zero_grad()
    run.by_encoder()
    run.of_encoder.step()


def both_from_one(run: Two) -> None:
    run.by_head()
    run.step()


def after_its_own(run: Two) -> None:
    run.by_encoder()
    both_from_one(run)


def critic(run: Two, set_to_none: bool = True) -> None:
    for _ in range(3):
        run.of_encoder.zero_grad(set_to_none)
        run.by_encoder()
        run.of_encoder.step()
        run.of_head.zero_grad(set_to_none)
        run.by_head()
        run.of_head.step()


def critic_with_zeros(run: Two) -> None:
    critic(run, set_to_none=False)


def zeros_each_time(run: Two) -> None:
    for _ in range(3):
        run.clear(set_to_none=False)
        both_from_one(run)


def clipped(run: Two) -> None:
    run.by_head()
    amp.clip_grad_norm_(run.of_encoder, 0.1)
    run.of_encoder.step()


def clipped_by_torch(run: Two) -> None:
    run.by_head()
    nn.utils.clip_grad_norm_(amp.master_params(run.of_encoder), 0.1)
    run.of_encoder.step()


def within_a_block(run: Two) -> None:
    """The inner block is for the encoder; the outer one reaches only the head."""
    loss = (run.head(run.encoder(X).detach()) - Y).float().square().mean()
    if run.with_amp:
        with amp.scale_loss(loss, run.of_head) as scaled_loss:
            run.by_encoder()
            scaled_loss.backward()
    else:
        run.by_encoder()
        loss.backward()
    run.step()


def in_both_blocks(run: Two) -> None:
    """The inner block is for the encoder, of which the outer one has reached gradients."""
    if run.with_amp:
        with amp.scale_loss(run.loss(), run.of_head) as scaled_loss:
            scaled_loss.backward()
            run.by_encoder()
    else:
        run.by_head()
        run.by_encoder()
    run.step()


def inside_a_block_with_gradients(run: Two) -> None:
    """The inner block adds to gradients of the outer one, before the backward pass of that begins."""
    run.by_encoder()
    loss = run.encoder(X).float().square().mean()
    if run.with_amp:
        with amp.scale_loss(loss, run.of_encoder) as scaled_loss:
            run.by_head()
            scaled_loss.backward()
    else:
        run.by_head()
        loss.backward()
    run.step()


SCRIPTS = [
    *(one_after_the_other, both_from_one, after_its_own, critic, critic_with_zeros, zeros_each_time, clipped),
    *(clipped_by_torch, within_a_block, in_both_blocks, inside_a_block_with_gradients),
]


def assert_as_without_amp(script: Callable[[Two], None], run: Two, level: str) -> None:
    plain = Two(None)
    script(plain)
    script(run)
    assert (run.weights() - plain.weights()).abs().max() < (1e-4 if level == "O1" else 5e-4)


@o1_and_o2
@pytest.mark.parametrize("script", SCRIPTS)
def test_steps_are_those_without_amp(script, opt_level):
    assert_as_without_amp(script, Two(opt_level), opt_level)


USES: dict[str, Callable[[Two], object]] = {
    "step": lambda run: run.of_encoder.step(),
    "clip": lambda run: amp.clip_grad_norm_(run.of_encoder, 1.0),
    "unscale": lambda run: amp.unscale_(run.of_encoder),
    "block": lambda run: run.by_encoder(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_sums_of_uncleared_gradients_of_the_last_step_and_scaled_ones_are_refused(use):
    run = Two("O1")
    run.by_encoder()
    run.of_encoder.step()
    run.by_head()
    assert not amp.grads_are_unscaled(run.of_encoder)
    before = run.weights()
    with pytest.raises(UsageError, match=r"sums of unscaled ones and scaled ones.*amp\.scale_loss\(loss, \[optimizer"):
        use(run)
    assert torch.equal(run.weights(), before)
    run.of_encoder.zero_grad()
    run.by_encoder()
    run.of_encoder.step()
    assert not torch.equal(run.weights(), before)


@o1_and_o2
def test_gradients_left_by_a_block_that_raised_are_refused(opt_level):
    run = Two(opt_level)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with amp.scale_loss(run.loss(), run.of_head) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt
    with pytest.raises(UsageError, match="sums of"):
        run.of_encoder.step()


@o1_and_o2
def test_overflow_in_gradients_of_another_optimizer_counts_only_if_that_one_steps(opt_level):
    run = Two(opt_level)
    run.by_head(OVERFLOW)
    run.of_encoder.zero_grad()
    run.of_head.step()
    assert amp.get_loss_scale() == 512
    run.by_encoder()
    run.of_encoder.step()
    assert amp.get_loss_scale() == 512
    assert not amp.step_was_skipped(run.of_encoder)
    run.of_encoder.zero_grad()
    run.by_head(OVERFLOW)
    run.of_encoder.step()
    assert amp.step_was_skipped(run.of_encoder)


@o1_and_o2
@pytest.mark.parametrize("set_to_none", [True, False])
def test_overflow_is_forgotten_with_its_gradients(opt_level, set_to_none):
    run = Two(opt_level)
    run.by_head(OVERFLOW)
    run.of_head.step()
    run.clear(set_to_none)
    run.by_head()
    assert amp.gradients_are_finite(run.of_encoder)
    run.step()
    assert not amp.step_was_skipped(run.of_encoder)
    assert amp.get_loss_scale() == 512


@o1_and_o2
@pytest.mark.parametrize("is_inner_first", [False, True])
@pytest.mark.parametrize("reaches", [False, True])
def test_nested_blocks_that_reach_a_third_optimizer_leave_its_gradients_or_are_refused(
    reaches, is_inner_first, opt_level
):
    model = nn.ParameterList([torch.ones(2) for _ in range(3)])
    each_of = [SGD([parameter]) for parameter in model]
    initialize(model, each_of, opt_level=opt_level, half_dtype="float16", init_scale=1024.0)
    with amp.scale_loss((model[0] + model[2]).float().sum(), each_of[0]) as outer:
        if not is_inner_first:
            outer.backward()
        optimizers.backward((model[1] + model[2] * reaches).float().sum(), each_of[1])
        if is_inner_first:
            outer.backward()
    if reaches and is_inner_first:
        with pytest.raises(UsageError, match="sums of unscaled ones and scaled ones"):
            each_of[2].step()
        return
    assert [parameter.grad.tolist() for parameter in model] == [[1, 1], [1, 1], [1 + reaches, 1 + reaches]]
    (master,) = amp.master_params(each_of[2])
    assert master.grad.tolist() == [1 + reaches, 1 + reaches]


def run_inside(inner: Any, refused: str) -> None:
    """Runs a block inside another one, which raises an error with these words; "": none."""
    if refused:
        with pytest.raises(UsageError, match=refused):
            inner.__enter__()
    else:
        with inner as scaled_loss:
            scaled_loss.backward()


@o1_and_o2
@pytest.mark.parametrize("reaches", [False, True])
def test_nested_block_that_adds_to_gradients_of_another_scale_is_refused(reaches, opt_level):
    model = nn.ParameterList([torch.ones(2) for _ in range(2)])
    each_of = [SGD([parameter]) for parameter in model]
    initialize(model, each_of, opt_level=opt_level, half_dtype="float16", num_losses=2)
    scales = {"loss_scaler0": 64.0, "loss_scaler1": 8.0}
    amp.load_state_dict({name: {"loss_scale": scale, "unskipped": 0} for name, scale in scales.items()})
    with amp.scale_loss(model[0].float().sum(), each_of[0]) as outer:
        loss = (model[1] + model[0] if reaches else model[1]).float().sum()
        inner = amp.scale_loss(loss, each_of[1], loss_id=1)
        run_inside(inner, refused="multiplies there by 64" if reaches else "")
        outer.backward()
    assert model[0].grad.tolist() == [1, 1]


@pytest.mark.parametrize("reaches", [False, True])
def test_nested_block_that_would_unscale_a_shared_gradient_of_the_outer_one_is_refused(reaches):
    model = nn.ParameterList([torch.ones(2) for _ in range(3)])
    each_of = [SGD([parameter, model[2]]) for parameter in model[:2]]
    initialize(model, each_of, init_scale=64.0)
    with amp.scale_loss(model[2].sum(), each_of[0]) as outer:
        inner = amp.scale_loss((model[1] + model[2]).sum() if reaches else model[1].sum(), each_of[1])
        run_inside(inner, refused="stands inside another one" if reaches else "")
        outer.backward()
    assert model[2].grad.tolist() == [1, 1]


@o1_and_o2
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("is_handed", [False, True])
def test_overflow_counts_after_any_blocks_that_leave_the_gradients_zero(blocks, is_handed, opt_level):
    run = Two(opt_level)
    run.by_head(OVERFLOW)
    for _ in range(blocks):
        if is_handed:
            run.by_head(0.0)
        else:
            run.by_encoder()
    assert not amp.gradients_are_finite(run.of_head)
    run.by_head(1.0 if is_handed else 0.0)
    before = run.weights()
    run.of_head.step()
    assert amp.step_was_skipped(run.of_head)
    assert torch.equal(run.weights(), before)


@o1_and_o2
def test_block_from_which_two_optimizers_step_is_one_clean_step(opt_level):
    run = Two(opt_level)
    for _ in range(3):
        both_from_one(run)
        run.clear()
    assert amp.stats()["clean_steps"] == 3


@o1_and_o2
def test_block_whose_end_fails_is_closed_and_the_next_is_right(opt_level, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError

    run = Two(opt_level)
    with monkeypatch.context() as patched:
        patched.setattr(Unscaling, "note_unscaled", fail)
        with pytest.raises(MemoryError):
            run.by_head()
    assert runtime.live.losses.blocks.open == []
    run.clear()
    assert_as_without_amp(one_after_the_other, run, opt_level)


def test_block_whose_warning_is_an_error_is_closed():
    run = Two("O1")
    run.head.weight.register_hook(lambda grad: grad)
    with pytest.raises(AmpWarning, match="a hook of a leaf"):
        run.by_head()
    run.by_head()
    run.of_head.step()
