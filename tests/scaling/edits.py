"""Edits of gradients and weights by every means, and runs that make them under amp and in plain torch.

Weights and gradients here are small integers and halves of them, which every type holds: what is compared is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from stepping import every_half
from torch import Tensor, nn

from ampatch import amp

START = [8.0, -8.0, 16.0, 4.0]

Parameters = Iterable[nn.Parameter]
Change = Callable[[Parameters], object]


def every_level(test: Any) -> Any:
    """Level and half type are two settings, so that `covering` need not have each means meet all of their pairs."""
    return every_half(pytest.mark.parametrize("opt_level", ["O1", "O2"])(test))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(START))
        self.second = nn.Parameter(torch.tensor(START).flip(0).view(2, 2))

    def forward(self, factor: float) -> Tensor:
        slopes = torch.tensor([1.0, -2.0, 3.0, 4.0])
        total = (self.first.float() * slopes).sum() + (self.second.float().flatten() * slopes.flip(0)).sum()
        return total * factor


@contextlib.contextmanager
def plain_block(loss: Tensor, *_: object, **__: object) -> Iterator[Tensor]:
    yield loss


class Run:
    """A model and its optimizer, to take the same steps in plain torch and with amp.

    Args:
        opt_level: None: plain torch, for which all but the optimizer and the model is ignored.
        half_dtype: of amp.
        optimizer: makes one, or a list of them.
        model: makes one.
        options: of `amp.initialize`.
    """

    def __init__(
        self,
        opt_level: str | None,
        half_dtype: torch.dtype = torch.float16,
        optimizer: Callable[..., Any] = torch.optim.SGD,
        model: Callable[[], Any] = Weights,
        **options: Any,
    ) -> None:
        self.model = model()
        self.optimizer = optimizer(self.model.parameters(), lr=0.5)
        self.block: Any = plain_block
        if opt_level is not None:
            options = {"loss_scale": "dynamic", "init_scale": 8.0, "verbosity": 0, **options}
            amp.initialize(self.model, self.optimizer, opt_level=opt_level, half_dtype=half_dtype, **options)
            self.block = amp.scale_loss

    def backward(self, factor: float = 1.0, within: Change | None = None, **options: Any) -> None:
        with self.block(self.model(factor), self.optimizer, **options) as loss:
            if within is not None:
                within(self.parameters)
            loss.backward()

    def step(self) -> None:
        """Takes a step with gradients of its own."""
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def masters(self) -> list[Tensor]:
        return list(amp.master_params(self.optimizer))

    @property
    def weights(self) -> list[float]:
        return [value for each in self.model.state_dict().values() for value in each.float().flatten().tolist()]


def assert_as_in_torch(opt_level: str, half_dtype: torch.dtype, script: Callable[[Run], object], **options: Any) -> Run:
    """Asserts that a script returns what it returns in plain torch, and leaves the same weights.

    Returns:
        The run with amp.
    """
    wanted, found = (Run(level, half_dtype, **options) for level in (None, opt_level))
    returned = script(wanted)
    assert script(found) == returned
    assert found.weights == wanted.weights
    return found


def each(change: Callable[[nn.Parameter], object]) -> Change:
    def change_all(parameters: Parameters) -> None:
        for parameter in parameters:
            change(parameter)

    return change_all


def each_gradient(change: Callable[[Tensor], object]) -> Change:
    return each(lambda parameter: change(parameter.grad))


def each_replaced(change: Callable[[Tensor], Tensor | None]) -> Change:
    return each(lambda parameter: setattr(parameter, "grad", change(parameter.grad)))


def zero_by_numpy(tensor: Tensor) -> None:
    words = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    words.numpy().reshape(-1)[:2] = 0


GRADIENT_EDITS: dict[str, Change] = {
    "data.clamp_": each_gradient(lambda grad: grad.data.clamp_(-2, 2)),
    "data.div_": each_gradient(lambda grad: grad.data.div_(2)),
    "data.zero_": each_gradient(lambda grad: grad.data.zero_()),
    "data.neg_": each_gradient(lambda grad: grad.data.neg_()),
    "data.copy_ of a permutation": each_gradient(lambda grad: grad.data.copy_(grad.flip(0))),
    "rows": lambda parameters: next(iter(parameters)).grad.data[:2].zero_(),
    "numpy": each_gradient(zero_by_numpy),
    "dlpack": each_gradient(lambda grad: torch.from_dlpack(grad.detach()).mul_(2)),
    "storage": each_gradient(lambda grad: grad.untyped_storage().fill_(0)),
    "mul_": each_gradient(lambda grad: grad.mul_(0.5)),
    "another": each_replaced(torch.ones_like),
    "another from it": each_replaced(lambda grad: grad * 2),
    "none": each_replaced(lambda _: None),
    "_foreach_mul_": lambda parameters: torch._foreach_mul_([each.grad for each in parameters], 2.0),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.5),
    "a backward outside of a block": lambda parameters: sum(each.float().sum() for each in parameters).backward(),
}

CLEARINGS: dict[str, Callable[[Any], object]] = {
    "optimizer": lambda run: run.optimizer.zero_grad(),
    "optimizer-zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "model": lambda run: run.model.zero_grad(),
    "model-zeros": lambda run: run.model.zero_grad(set_to_none=False),
    "none": lambda run: GRADIENT_EDITS["none"](run.model.parameters()),
    "data.zero_": lambda run: [each.grad.data.zero_() for each in run.model.parameters() if each.grad is not None],
}


def set_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.full_like(parameter, 3.0)


@torch.no_grad()
def double(parameter: Tensor) -> None:
    parameter.mul_(2)


def double_by_vector(parameters: Parameters) -> None:
    parameters = list(parameters)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach() * 2, parameters)


WEIGHT_EDITS: dict[str, Change] = {
    "data.sub_": each(lambda parameter: parameter.data.sub_(1)),
    "data.clamp_": each(lambda parameter: parameter.data.clamp_(-2, 2)),
    "data.copy_ of a permutation": each(lambda parameter: parameter.data.copy_(parameter.detach().flip(0))),
    "data[...] =": each(lambda parameter: parameter.data[:1].fill_(1)),
    "data =": each(set_data),
    "detach": each(lambda parameter: parameter.detach().mul_(2)),
    "in place": each(double),
    "init": each(lambda parameter: nn.init.constant_(parameter, 5.0)),
    "vector_to_parameters": double_by_vector,
    "_foreach_add_": torch.no_grad()(lambda parameters: torch._foreach_add_(list(parameters), 1.0)),
}
# Writes to weights that torch does not count.
UNSEEN: dict[str, Change] = {
    "numpy": each(lambda parameter: zero_by_numpy(parameter.detach())),
    "dlpack": each(lambda parameter: torch.from_dlpack(parameter.detach()).mul_(2)),
    "storage": each(lambda parameter: parameter.untyped_storage().fill_(0)),
}

# Ways to make the groups of an optimizer anew.
REBUILDS: dict[str, Callable[[Run], object]] = {
    "params =": lambda run: run.optimizer.param_groups[0].update(params=run.parameters),
    "params = some": lambda run: run.optimizer.param_groups[0].update(params=[run.model.first]),
    "pop and add": lambda run: (
        run.optimizer.param_groups.pop(),
        run.optimizer.add_param_group({"params": run.parameters, "lr": 0.25}),
    ),
    "__init__": lambda run: run.optimizer.__init__(run.model.parameters(), lr=0.25),
    "clear and add": lambda run: (
        run.optimizer.param_groups.clear(),
        [run.optimizer.add_param_group({"params": [each], "lr": 0.25}) for each in run.model.parameters()],
    ),
}
