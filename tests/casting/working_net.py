"""A model whose forward pass is a function of the test's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampatch import amp


class Net(nn.Module):
    """Calls a function with its layer and its arguments."""

    def __init__(self, work: Callable[..., object]) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(4, 4), work

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.work(self.layer, *args, **kwargs)


def initialized(
    work: Callable[..., object] | nn.Module,
    opt_level: str = "O2",
    half_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> nn.Module:
    """A `Net`, or the model that is given, after `amp.initialize`."""
    model = work if isinstance(work, nn.Module) else Net(work)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, verbosity=0, **options)[0]
