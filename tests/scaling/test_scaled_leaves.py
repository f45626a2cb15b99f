"""Hooks of leaves that run in a block, and other optimizers' steps on what it leaves scaled, are told of once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning


def started(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **{"half_dtype": "float16", "init_scale": 16.0, "verbosity": 0, **options})
    return model, optimizer


def run(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


HOOKS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "of a parameter": lambda model, _: model.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1)),
    "of the input": lambda _, x: x.register_hook(lambda grad: grad.clamp(-0.1, 0.1)),
    "after accumulation": lambda model, _: model.weight.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_in_a_block_is_told_of_once(hook: str) -> None:
    model, optimizer = started()
    x = torch.ones(2, 4, requires_grad=True)
    HOOKS[hook](model, x)
    with pytest.warns(AmpWarning, match=r"a hook of a leaf of shape .* multiplied by the loss scale"):
        run(model, optimizer, x)
    run(model, optimizer, x)  # a second warning would be an error


def test_a_plain_optimizer_on_a_latent_is_told_of_once() -> None:
    model, optimizer = started()
    latent = torch.ones(2, 4, requires_grad=True)
    plain = torch.optim.SGD([latent], lr=0.1)
    for index in range(2):
        run(model, optimizer, latent)
        optimizer.step()
        if index == 0:
            with pytest.warns(AmpWarning, match=r"steps on a tensor of shape \(2, 4\) whose gradient .* multiplied"):
                plain.step()
        else:
            plain.step()


@pytest.mark.parametrize("options", [{"loss_scale": 1.0}, {}], ids=["not scaled", "nothing of the kind"])
def test_where_nothing_sees_scaled_gradients_nothing_is_told(options: dict[str, Any]) -> None:
    model, optimizer = started(**options)
    x, latent = torch.ones(2, 4), torch.ones(2, requires_grad=True)
    if options:
        model.weight.register_hook(lambda grad: grad)
    plain = torch.optim.SGD([latent], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer, x)
        optimizer.step()
        latent.sum().backward()
        plain.step()
