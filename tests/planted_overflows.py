"""Overflows planted in models, and sessions that trace them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ampatch import amp
from ampatch.diagnostics.overflow.tracer import OverflowTracer


class Amplified(torch.autograd.Function):
    """Multiplies gradients by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def with_gradient(gradient_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a function that copies a tensor, and whose backward pass calls the decorated one with the gradient."""

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gradient_of(grad)

    return Copied.apply


@contextlib.contextmanager
def traced(models: Any, optimizers: Any, **options: Any) -> Iterator[list[Any]]:
    """Has amp on in float16 in the block; yields the list to which it adds the traced overflows."""
    events: list[Any] = []
    usual = {"half_dtype": "float16", "verbosity": 0, "init_scale": 1.0, "on_overflow": ("trace", events.append)}
    amp.initialize(models, optimizers, **usual | options)
    yield events
    amp.deinitialize()


def watch_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has later sessions watch the steps as they run, instead of running those that overflow again."""
    install = OverflowTracer.install

    def watching(tracer: OverflowTracer, ledger: Any) -> None:
        install(tracer, ledger)
        tracer.watch(set(), 10**9)

    monkeypatch.setattr(OverflowTracer, "install", watching)
