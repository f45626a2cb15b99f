"""Overflows of loops without a session: `ampatch run --trace-overflow` for scripts of torch.amp."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planted_overflows import Amplified
from torch import Tensor, nn

import ampatch
from ampatch import amp
from ampatch.diagnostics.overflow.script import ScriptTracer
from ampatch.ledger import PatchLedger
from ampatch.scaling import step_observers


class Squares(nn.Module):
    """A layer whose products exceed float16's range if its factor is large."""

    def __init__(self, factor: float = 1000.0) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: Tensor, *, shift: float) -> Tensor:
        scaled = self.linear(x) * self.factor + shift
        return torch.softmax(scaled @ scaled.mT, -1) * scaled[:, :2]


class GoesBack(nn.Module):
    """A layer that multiplies gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, shift: float) -> Tensor:
        return Amplified.apply(self.linear(x) + shift, 1e4).float()


@pytest.fixture
def tracer(caplog: pytest.LogCaptureFixture) -> Iterator[ScriptTracer]:
    caplog.set_level(logging.WARNING, logger="ampatch")
    ledger, made = PatchLedger(), ScriptTracer()
    made.install(ledger)
    yield made
    ledger.undo()
    assert step_observers.observers == []


def train(model: nn.Module, scaler: Any, steps: int = 1, **options: Any) -> None:
    torch.manual_seed(0)
    for each in model.parameters():
        nn.init.constant_(each, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(torch.ones(2, 4), shift=1.0)
        scaler.scale(output.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True], ids=["skipped by the scaler", "skipped by the kernel"])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
def test_a_step_that_a_scaler_skips_is_explained(
    kind: Any, fused: bool, tracer: ScriptTracer, caplog: pytest.LogCaptureFixture
) -> None:
    train(Squares(), kind("cpu", init_scale=8.0), fused=fused)
    (told,) = (each for each in caplog.messages if "GradScaler skips" in each)
    assert "at a loss scale of 8\n" in told
    assert "linear.weight, shape (4, 4)" in told
    assert "First inf: in torch.Tensor.matmul" in told
    assert "test_script_trace.py:30: return torch.softmax(scaled @ scaled.mT, -1)" in told
    assert "(not tried) this function in float32: torch.autocast(..., enabled=False) around the line" in told
    assert "half_dtype" not in told


def test_the_same_cause_again_is_one_line(tracer: ScriptTracer, caplog: pytest.LogCaptureFixture) -> None:
    train(Squares(), torch.amp.GradScaler("cpu", init_scale=8.0), steps=3)
    first, *others = caplog.messages
    assert "First inf" in first
    assert [each.count("\n") for each in others] == [1, 1]


def test_an_overflow_in_the_backward_pass_is_the_scales(tracer: ScriptTracer, caplog: pytest.LogCaptureFixture) -> None:
    train(GoesBack(), torch.amp.GradScaler("cpu"))
    assert "(tried) a loss scale of 0.5 or less; the dynamic scale gets there by itself" in caplog.text


def test_steps_that_run_are_not_mentioned(tracer: ScriptTracer, caplog: pytest.LogCaptureFixture) -> None:
    train(Squares(1.0), torch.amp.GradScaler("cpu", init_scale=8.0))
    assert caplog.messages == []
    assert tracer.may_skip


def test_weights_and_gradients_are_as_without_a_trace(tracer: ScriptTracer) -> None:
    traced, plain = Squares(), Squares()
    train(traced, torch.amp.GradScaler("cpu", init_scale=8.0), steps=2)
    tracer_off, before = PatchLedger(), nn.Module.__call__
    tracer_off.set(nn.Module, "__call__", type(plain)._wrapped_call_impl)
    train(plain, torch.amp.GradScaler("cpu", init_scale=8.0), steps=2)
    tracer_off.undo()
    assert nn.Module.__call__ is before
    for one, two in zip(traced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_loop_without_a_scaler_is_known(tracer: ScriptTracer) -> None:
    Squares()(torch.ones(2, 4), shift=1.0).sum().backward()
    assert tracer.has_run_forward
    assert not tracer.may_skip


def test_a_session_traces_its_own_steps(tracer: ScriptTracer, caplog: pytest.LogCaptureFixture) -> None:
    model = Squares()
    optimizer = torch.optim.SGD(model.parameters())
    amp.initialize(model, optimizer, half_dtype="float16", on_overflow="trace", init_scale=8.0)
    with amp.scale_loss(model(torch.ones(2, 4), shift=1.0).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert [each.splitlines()[0] for each in caplog.messages if "First inf" in each] == [
        "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 4.0"
    ]
    assert tracer.may_skip
