"""Hooks of leaves that run in a block, and other optimizers' steps on what it leaves scaled, are warned of once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_state
from optimizers import SGD, backward
from stepping import started
from torch import Tensor, nn

from ampatch.errors import AmpWarning

HOOKS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "of a parameter": lambda model, _: model.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1)),
    "of the input": lambda _, x: x.register_hook(lambda grad: grad.clamp(-0.1, 0.1)),
    "after accumulation": lambda model, _: model.weight.register_post_accumulate_grad_hook(lambda _: None),
}


def layer(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return started(model=nn.Linear(4, 1), opt_level="O1", half_dtype="float16", init_scale=16.0, **options)


@pytest.mark.parametrize("add_hook", HOOKS.values(), ids=HOOKS)
def test_hook_of_a_leaf_in_a_block_is_warned_of_once(add_hook):
    model, optimizer = layer()
    x = torch.ones(2, 4, requires_grad=True)
    add_hook(model, x)
    with pytest.warns(AmpWarning, match=r"a hook of a leaf of shape .* multiplied by the loss scale"):
        backward(model(x).float().sum(), optimizer)
    backward(model(x).float().sum(), optimizer)  # a second warning would be an error


def test_hook_of_a_loss_that_is_a_leaf_is_not_warned_of():
    """sentence-transformers' cached losses go backward through the model there, from cached gradients."""
    model, optimizer = layer()
    loss = torch.ones((), requires_grad=True)

    @torch.enable_grad()
    def go_backward(grad: Tensor) -> None:
        (model(torch.ones(2, 4)).float().sum() * grad).backward()

    loss.register_hook(go_backward)
    backward(loss, optimizer)
    assert_same_state(model.bias.grad, torch.full((1,), 2.0))


class Closed(Tensor):
    """Allows few functions, as the weights of torch's ``call_for_per_sample_grads`` do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.Tensor.sum
        return super().__torch_function__(func, types, args, kwargs or {})


def test_hook_of_a_leaf_that_does_not_let_its_attributes_be_read_is_warned_of():
    _, optimizer = layer()
    leaf = torch.ones(3).as_subclass(Closed)
    with torch.DisableTorchFunction():
        leaf.requires_grad_().register_hook(lambda grad: grad)
    with pytest.warns(AmpWarning, match=r"a hook of a leaf of shape \(3,\)"):
        backward(leaf.sum().as_subclass(Tensor), optimizer)


def test_step_of_a_plain_optimizer_on_a_latent_of_the_block_is_warned_of_once():
    model, optimizer = layer()
    latent = torch.ones(2, 4, requires_grad=True)
    plain = SGD([latent])
    backward(model(latent).float().sum(), optimizer)
    optimizer.step()
    with pytest.warns(AmpWarning, match=r"steps on a tensor of shape \(2, 4\) whose gradient .* multiplied"):
        plain.step()
    backward(model(latent).float().sum(), optimizer)
    optimizer.step()
    plain.step()


def test_step_on_a_gradient_that_the_loop_has_set_itself_is_not_warned_of():
    """As GradNorm sets those of the weights of its losses."""
    model, optimizer = layer()
    weight = torch.ones(2, requires_grad=True)
    plain = SGD([weight])
    for _ in range(2):
        loss = (model(torch.ones(2, 4)).float().sum() * weight).sum()
        backward(loss, optimizer)
        weight.grad = torch.ones(2)
        plain.step()
        optimizer.step()


@pytest.mark.parametrize("options", [{"loss_scale": 1.0}, {}], ids=["hook-at-scale-1", "no-hook"])
def test_hooks_and_plain_optimizers_that_see_no_scaled_gradients_are_not_warned_of(options):
    model, optimizer = layer(**options)
    if options:
        model.weight.register_hook(lambda grad: grad)
    backward(model(torch.ones(2, 4)).float().sum(), optimizer)
    optimizer.step()
    latent = torch.ones(2, requires_grad=True)
    plain = SGD([latent])
    latent.sum().backward()
    plain.step()
