"""Of blocks whose backward pass reaches parameters of other optimizers: steps are those without amp, or raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
        self.level = level
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.of_encoder, self.of_head = (torch.optim.SGD(each.parameters(), 0.1) for each in (self.encoder, self.head))
        if level is not None:
            amp.initialize(
                [self.encoder, self.head],
                [self.of_encoder, self.of_head],
                opt_level=level,
                half_dtype="float16",
                init_scale=1024.0,
                verbosity=0,
            )

    def by_head(self, *others: torch.optim.Optimizer, factor: float = 1.0) -> None:
        loss = (self.head(self.encoder(X)) - Y).float().square().mean()
        self.backward(loss * factor, self.of_head, *others)

    def by_encoder(self) -> None:
        self.backward(self.encoder(X).float().square().mean(), self.of_encoder)

    def backward(self, loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        if self.level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, list(optimizers)) as scaled_loss:
                scaled_loss.backward()

    def weights(self) -> Tensor:
        parameters = (*self.encoder.parameters(), *self.head.parameters())
        return torch.cat([each.detach().float().flatten() for each in parameters])


def shared(run: Two) -> None:
    run.by_head()
    assert run.level is None or amp.grads_are_unscaled(run.of_encoder)
    run.of_head.step()
    run.of_head.zero_grad()
    run.by_encoder()
    run.of_encoder.step()


def both_from_one(run: Two) -> None:
    run.by_head()
    run.of_head.step()
    run.of_encoder.step()


def after_its_own(run: Two) -> None:
    run.by_encoder()
    run.by_head()
    run.of_head.step()
    run.of_encoder.step()


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


def clipped(run: Two) -> None:
    run.by_head()
    if run.level is None:
        nn.utils.clip_grad_norm_(run.encoder.parameters(), 0.1)
    else:
        amp.clip_grad_norm_(run.of_encoder, 0.1)
    run.of_encoder.step()


def clipped_by_torch(run: Two) -> None:
    run.by_head()
    parameters = run.encoder.parameters() if run.level is None else amp.master_params(run.of_encoder)
    nn.utils.clip_grad_norm_(parameters, 0.1)
    run.of_encoder.step()


def within_a_block(run: Two) -> None:
    """The inner block is for the encoder; the outer one reaches only the head."""
    loss = (run.head(run.encoder(X).detach()) - Y).float().square().mean()
    if run.level is None:
        run.by_encoder()
        loss.backward()
    else:
        with amp.scale_loss(loss, run.of_head) as scaled_loss:
            run.by_encoder()
            scaled_loss.backward()
    run.of_head.step()
    run.of_encoder.step()


EACH_LEVEL = pytest.mark.parametrize("level", ["O1", "O2"])


@EACH_LEVEL
@pytest.mark.parametrize(
    "script",
    [
        *(shared, both_from_one, after_its_own, critic, critic_with_zeros, clipped, clipped_by_torch),
        within_a_block,
    ],
)
def test_steps_are_those_without_amp(script: Callable[[Two], None], level: str) -> None:
    plain, run = Two(None), Two(level)
    script(plain)
    script(run)
    assert (run.weights() - plain.weights()).abs().max() < (1e-4 if level == "O1" else 5e-4)


@pytest.mark.parametrize("use", ["step", "clip", "unscale", "block"])
def test_gradients_of_a_step_before_that_were_not_cleared_are_used_by_nobody(use: str) -> None:
    run = Two("O1")
    run.by_encoder()
    run.of_encoder.step()
    run.by_head()
    assert not amp.grads_are_unscaled(run.of_encoder)
    uses: dict[str, Callable[[], object]] = {
        "step": run.of_encoder.step,
        "clip": lambda: amp.clip_grad_norm_(run.of_encoder, 1.0),
        "unscale": lambda: amp.unscale_(run.of_encoder),
        "block": run.by_encoder,
    }
    before = run.weights()
    with pytest.raises(UsageError, match=r"sums of unscaled ones and scaled ones.*amp\.scale_loss\(loss, \[optimizer"):
        uses[use]()
    assert torch.equal(run.weights(), before)
    run.of_encoder.zero_grad()
    run.by_encoder()
    run.of_encoder.step()
    assert not torch.equal(run.weights(), before)


@EACH_LEVEL
def test_an_overflow_there_skips_its_own_step_and_counts_only_if_it_steps(level: str) -> None:
    run = Two(level)
    run.by_head(factor=1e38)
    run.of_encoder.zero_grad()
    run.of_head.step()
    assert amp.get_loss_scale() == 512
    run.by_encoder()
    run.of_encoder.step()
    assert amp.get_loss_scale() == 512
    assert not amp.step_was_skipped(run.of_encoder)
    run.of_encoder.zero_grad()
    run.by_head(factor=1e38)
    run.of_encoder.step()
    assert amp.step_was_skipped(run.of_encoder)


@EACH_LEVEL
def test_after_a_block_that_failed_they_are_used_by_nobody(level: str) -> None:
    run = Two(level)
    loss = (run.head(run.encoder(X)) - Y).float().square().mean()

    def failing() -> None:
        with amp.scale_loss(loss, run.of_head) as scaled_loss:
            scaled_loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    with pytest.raises(UsageError, match="sums of"):
        run.of_encoder.step()


def in_both_blocks(run: Two) -> None:
    """An inner block for the encoder, of which the outer one has reached gradients."""
    if run.level is None:
        run.by_head()
        run.by_encoder()
    else:
        loss = (run.head(run.encoder(X)) - Y).float().square().mean()
        with amp.scale_loss(loss, run.of_head) as scaled_loss:
            scaled_loss.backward()
            run.by_encoder()
    run.of_head.step()
    run.of_encoder.step()


def zeros_each_time(run: Two) -> None:
    for _ in range(3):
        run.of_encoder.zero_grad(set_to_none=False)
        run.of_head.zero_grad(set_to_none=False)
        run.by_head()
        run.of_head.step()
        run.of_encoder.step()


@EACH_LEVEL
@pytest.mark.parametrize("script", [in_both_blocks, zeros_each_time])
def test_steps_are_those_without_amp_also_here(script: Callable[[Two], None], level: str) -> None:
    test_steps_are_those_without_amp(script, level)


@EACH_LEVEL
def test_one_block_is_one_clean_step_whichever_optimizers_step(level: str) -> None:
    run = Two(level)
    for _ in range(3):
        run.by_head()
        run.of_head.step()
        run.of_encoder.step()
        run.of_head.zero_grad()
        run.of_encoder.zero_grad()
    assert amp.stats()["clean_steps"] == 3


@EACH_LEVEL
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_overflow_is_forgotten_with_its_gradients(level: str, set_to_none: bool) -> None:
    run = Two(level)
    run.by_head(factor=1e38)
    run.of_head.step()
    run.of_head.zero_grad(set_to_none)
    run.of_encoder.zero_grad(set_to_none)
    run.by_head()
    assert amp.gradients_are_finite(run.of_encoder)
    run.of_head.step()
    run.of_encoder.step()
    assert not amp.step_was_skipped(run.of_encoder)
    assert amp.get_loss_scale() == 512


@EACH_LEVEL
def test_a_block_whose_end_fails_is_not_asked_again(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = Two(level), Two(None)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Unscaling, "note_unscaled", fail)
        with pytest.raises(MemoryError):
            run.by_head()
    assert runtime.live is not None
    assert runtime.live.losses.blocks.open == []
    for each in (run, plain):
        each.of_encoder.zero_grad()
        each.of_head.zero_grad()
        shared(each)
    assert (run.weights() - plain.weights()).abs().max() < 5e-4


def test_a_block_whose_warning_is_an_error_is_not_open() -> None:
    run = Two("O1")
    run.head.weight.register_hook(lambda grad: grad)
    with pytest.raises(AmpWarning, match="a hook of a leaf"):
        run.by_head()
    run.by_head()
    run.of_head.step()
