"""Optimizers that tests of steps train with, and the two calls around a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampatch import amp

OVERFLOW = 1e38  # beyond float32 once it is multiplied by the first loss scale

SGD = functools.partial(torch.optim.SGD, lr=0.1)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

# Every optimizer of torch that takes dense gradients and no closure, in each of its implementations.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": SGD,
    "SGD-momentum": MOMENTUM,
    "SGD-nesterov-foreach": functools.partial(MOMENTUM, nesterov=True, foreach=True),
    "SGD-momentum-fused": functools.partial(MOMENTUM, fused=True),
    "Adam": torch.optim.Adam,
    "Adam-amsgrad-foreach": functools.partial(torch.optim.Adam, amsgrad=True, foreach=True),
    "Adam-fused": functools.partial(torch.optim.Adam, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW-foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW-fused": functools.partial(torch.optim.AdamW, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "Adagrad-fused": functools.partial(torch.optim.Adagrad, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "Muon": torch.optim.Muon,  # takes matrices only
}
# Torch's other optimizers: they take a closure or sparse gradients, or are the base class.
OTHERS = {"LBFGS", "SparseAdam", "Optimizer"}


class Larc:
    """An optimizer that is not torch's, around one that is: LARC's interface, with some arithmetic of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def step(self) -> str:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        self.optim.step()
        return "stepped"


class WithTuples(Larc):
    """Has groups that cannot be written to: they are made anew each time."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{**group, "params": tuple(group["params"])} for group in self.optim.param_groups]


def initialize(model: Any, optimizer: Any, **options: Any) -> None:
    """Calls `amp.initialize` with a dynamic scale, and without casts unless a level is given."""
    level = {} if "opt_level" in options else {"opt_level": "O1", "patch_torch_functions": False}
    amp.initialize(model, optimizer, **{**level, "loss_scale": "dynamic", "verbosity": 0, **options})


def backward(loss: Tensor, optimizers: Any, *, with_amp: bool = True, **options: Any) -> None:
    """Runs a backward pass in a block; without amp as torch does it alone, to compare with."""
    if not with_amp:
        loss.backward()
        return
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()
