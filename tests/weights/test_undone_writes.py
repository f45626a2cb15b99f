"""Half weights that user code changes and puts back before a step: their masters keep all bits, as in plain torch.

Averages for a validation are one such case, steps in two halves (SAM) another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizers import backward
from torch import Tensor, nn

from ampatch import amp

MODES: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "half_dtype": "float16"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}


@contextmanager
def by_copy(model: nn.Module) -> Iterator[None]:
    before = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn_like(each))
        yield
        for each, old in zip(model.parameters(), before, strict=True):
            each.copy_(old)


@contextmanager
def by_data(model: nn.Module) -> Iterator[None]:
    before = [each.clone() for each in model.parameters()]
    for each in model.parameters():
        each.data.copy_(torch.randn_like(each))
    yield
    for each, old in zip(model.parameters(), before, strict=True):
        each.data.copy_(old.data)


@contextmanager
def by_other_data(model: nn.Module) -> Iterator[None]:
    before = [each.data for each in model.parameters()]
    for each in model.parameters():
        each.data = torch.randn_like(each)
    yield
    for each, old in zip(model.parameters(), before, strict=True):
        each.data = old


@contextmanager
def by_moving(model: nn.Module) -> Iterator[None]:
    """As the first half of SAM moves weights, and the second moves them back by a copy."""
    before = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 0.25)
        yield
        torch._foreach_copy_(list(model.parameters()), before)


def nothing(_: nn.Module) -> None:
    pass


def forward(model: nn.Module) -> None:
    model(torch.randn(3, 4))


def copied(model: nn.Module) -> None:
    copy.deepcopy(model)(torch.randn(3, 4))


def saved_twice(model: nn.Module) -> None:
    first = {name: each.clone() for name, each in model.state_dict().items()}
    forward(model)
    for name, each in model.state_dict().items():
        assert torch.equal(each, first[name])
        assert torch.equal(each.to(model.get_parameter(name).dtype), model.get_parameter(name))


def adopted(mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    amp.initialize(model, optimizer, verbosity=0, **MODES[mode])
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model(torch.ones(3, 4)).float().square().mean(), optimizer)
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [each.clone() for each in model.state_dict().values()]


@pytest.mark.parametrize("use", [nothing, forward, copied, saved_twice])
@pytest.mark.parametrize("change", [by_copy, by_data, by_other_data, by_moving])
@pytest.mark.parametrize("mode", list(MODES))
def test_masters_keep_their_bits(mode: str, change: Callable[..., Any], use: Callable[..., None]) -> None:
    model, optimizer = adopted(mode)
    same, of_same = adopted(mode)
    with change(model):
        use(model)
    for each, other in ((model, optimizer), (same, of_same)):
        step(each, other)
        step(each, other)
    for one, other in zip(weights(model), weights(same), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use", [nothing, forward, saved_twice])
@pytest.mark.parametrize("mode", list(MODES))
def test_what_stays_changed_is_the_masters(mode: str, use: Callable[..., None]) -> None:
    model, optimizer = adopted(mode)
    with torch.no_grad():
        model[0].bias.fill_(3.5)
    use(model)
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    assert model.state_dict()["0.bias"].tolist() == [3.5] * 8


@pytest.mark.parametrize("mode", ["O2", "O5"])
def test_an_earlier_state_dict_sees_what_is_written_in_place_but_not_other_data(mode: str) -> None:
    model, _ = adopted(mode)
    earlier = model.state_dict()
    weight = earlier["0.weight"].clone()
    with torch.no_grad():
        model[0].bias.fill_(3.5)
    model[0].weight.data = torch.zeros_like(model[0].weight)
    assert model.state_dict()["0.weight"].count_nonzero() == 0
    assert model.state_dict()["0.bias"].tolist() == earlier["0.bias"].tolist() == [3.5] * 8
    assert torch.equal(earlier["0.weight"], weight)


@pytest.mark.parametrize("mode", ["O2", "O5"])
def test_a_state_dict_of_changed_weights_leads_to_the_masters(mode: str) -> None:
    model, optimizer = adopted(mode)
    with torch.no_grad():
        model[0].bias.fill_(3.5)
    model.state_dict()["0.bias"].fill_(1.1)
    forward(model)
    assert model[0].bias[0] == torch.tensor(1.1).to(model[0].bias.dtype)
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    assert torch.equal(model.state_dict()["0.bias"], torch.full((8,), 1.1))
