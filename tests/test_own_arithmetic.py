"""Tests that amp's own arithmetic is never cast, whatever functions the lists name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import backward
from torch import Tensor

import ampatch
from ampatch import amp

#: Functions that scaling, unscaling, clipping and masters use, by torch's names.
ARITHMETIC = [
    *("abs", "add", "amax", "any", "clamp", "clone", "div", "full_like", "isfinite", "masked_fill", "maximum", "mul"),
    *("multiply", "ones_like", "reciprocal", "sqrt", "square", "stack", "sub", "sum", "true_divide", "where"),
    *("zeros_like",),
]
SCALE = 2.0**20  # inf in float16


class Training:
    """A model whose own functions are not cast, so that only amp's arithmetic could differ."""

    def __init__(self, lists: Any, level: str, adopts_optimizer: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        options = {"init_scale": SCALE, "verbosity": 0, "half_dtype": torch.float16, **options}
        optimizer = self.optimizer if adopts_optimizer else None
        amp.initialize(self.model, optimizer, opt_level=level, patch_torch_functions=True, cast_lists=lists, **options)

    @amp.disable_casts
    def loss(self, factor: float = 1) -> Tensor:
        return self.model(torch.full((2, 4), 2.0**-9)).float().square().sum() * factor

    @amp.disable_casts
    def noted(self) -> list[Any]:
        saved = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        state = [value.clone() for each in self.optimizer.state.values() for value in each.values()]
        gradients = [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        return [saved, state, gradients, amp.state_dict(), amp.stats()["skipped_steps"]]


def block(training: Training) -> None:
    for _ in range(2):
        training.optimizer.zero_grad()
        backward(training.loss(), training.optimizer)
        training.optimizer.step()


def accumulation(training: Training) -> None:
    for _ in range(3):
        with amp.scale_loss([training.loss(), training.loss()], training.optimizer) as scaled_losses:
            torch.autograd.backward(scaled_losses)
    training.optimizer.step()


def clipping_what_is_scaled(training: Training) -> Tensor:
    backward(training.loss(), training.optimizer, delay_unscale=True)
    norm = amp.clip_grad_norm_(training.optimizer, 2.0**-8)
    training.optimizer.step()
    return norm


def unscaling_by_hand(training: Training) -> Tensor:
    backward(training.loss(), training.optimizer, delay_unscale=True)
    amp.unscale_(training.optimizer)
    for parameter in amp.master_params(training.optimizer):
        parameter.grad *= 0.5
    norm = amp.clip_grad_norm_(training.optimizer, 2.0**-8)
    training.optimizer.step()
    return norm


def overflow(training: Training) -> None:
    backward(training.loss(float("inf")), training.optimizer)
    training.optimizer.step()
    block(training)


def closure(training: Training) -> Tensor:
    def evaluate() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        backward(loss, training.optimizer)
        return loss.detach()

    return training.optimizer.step(evaluate)


def saving_and_loading(training: Training) -> None:
    block(training)
    saved = training.model.state_dict()
    block(training)
    training.model.load_state_dict(saved)
    with torch.no_grad():
        training.model.weight.data[0] = 2.0**-3
    block(training)


SCRIPTS = [block, accumulation, clipping_what_is_scaled, unscaling_by_hand, overflow, closure, saving_and_loading]


def ran(script: Callable[[Training], Any], lists: Any, level: str, **options: Any) -> list[Any]:
    """The results of a script, and what it leaves."""
    training = Training(lists, level, **options)
    found = [script(training), *training.noted()]
    amp.deinitialize()
    return found


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:the loss of a skipped step:ampatch.errors.AmpWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("treatment", ["whitelist", "blacklist"])
def test_training_is_the_same_with_lists_that_name_amps_arithmetic(script, level, treatment):
    plain = ran(script, None, level)
    assert_same(ran(script, {treatment: {"*": ARITHMETIC}}, level), plain)


@pytest.mark.parametrize("options", [{"loss_scale": 3.0}, {"half_dtype": torch.bfloat16, "loss_scale": "dynamic"}])
def test_training_at_other_scales_is_the_same(options):
    plain = ran(block, None, "O1", **options)
    assert_same(ran(block, {"whitelist": {"*": ARITHMETIC}}, "O1", **options), plain)


def by_loss_scaler(training: Training) -> Any:
    scaler = amp.LossScaler(init_scale=SCALE)
    scaler.scale(training.loss()).backward()
    overflowed = scaler.unscale_(parameter.grad for parameter in training.model.parameters())
    scaler.update()
    return [overflowed, scaler.state_dict()]


def by_grad_scaler(training: Training) -> Any:
    scaler = ampatch.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(training.loss()).backward()
    scaler.step(training.optimizer)
    scaler.update()
    return scaler.state_dict()


@pytest.mark.parametrize("script", [by_loss_scaler, by_grad_scaler], ids=lambda script: script.__name__)
def test_scalers_by_hand_are_the_same(script):
    options = {"adopts_optimizer": False, "loss_scale": 1}
    plain = ran(script, None, "O1", **options)
    assert_same(ran(script, {"whitelist": {"*": ARITHMETIC}}, "O1", **options), plain)
