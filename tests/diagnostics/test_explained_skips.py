"""``on_overflow="explain"``, the default: explains skips that the search of the loss scale does not account for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import SGD, backward
from planted_overflows import Amplified
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ampatch
from ampatch import amp
from ampatch.runtime import runtime

pytestmark = pytest.mark.filterwarnings("ignore:the loss of a:ampatch.errors.AmpWarning")

FINE: tuple[float, float] = (1.0, 1.0)
#: A factor in the model that overflows in float16, and one of the loss.
IN_MODEL, IN_LOSS, IN_BOTH = (1e6, 1.0), (1.0, float("inf")), (1e6, float("inf"))


class Net(nn.Module):
    """Two layers with a factor between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.last(self.first(x) * factor) / factor


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The traces in the log: all but the lines of skipped steps."""
    caplog.set_level(logging.WARNING, logger="ampatch")
    return lambda: [each.getMessage() for each in caplog.records if not each.getMessage().startswith("Gradient")]


def run(*steps: tuple[float, float], model: nn.Module | None = None, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = model or Net()
    optimizer = SGD(model.parameters(), lr=1e-4)
    given = {"half_dtype": "float16", "init_scale": 64.0, "verbosity": 1, **options}
    amp.initialize(model, optimizer, **given)
    return go_on(model, optimizer, *steps)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: tuple[float, float]) -> torch.optim.Optimizer:
    for in_model, in_loss in steps:
        optimizer.zero_grad()
        backward(model(torch.ones(3, 4), in_model).float().sum() * in_loss, optimizer)
        optimizer.step()
    return optimizer


def recorder() -> Any:
    assert runtime.live is not None
    return runtime.live.casts.regions.recorder


@pytest.fixture(autouse=True)
def quiet_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)


class TestOrdinarySteps:
    def test_ordinary_steps_are_not_explained(self, log):
        run(FINE, FINE)
        assert recorder() is None
        assert log() == []

    @pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}])
    def test_the_first_search_of_the_scale_is_not_explained(self, options, log):
        optimizer = run(*[FINE] * 6, init_scale=2.0**30, max_loss_scale=2.0**30, **options)
        assert amp.skipped_steps(optimizer) == 6
        assert recorder() is None
        assert log() == []


class TestExplained:
    def test_the_second_loss_that_is_not_finite_is_explained_once(self, log):
        run(FINE, IN_MODEL, IN_MODEL, IN_MODEL)
        (told,) = log()  # and not a second time
        assert told.startswith("First inf: in torch.Tensor.mul.")
        assert "(tried)" in told
        assert "on_overflow='explain', the default, looks for the cause" in told

    def test_the_graph_between_loss_and_model_is_told(self, log):
        run(FINE, IN_LOSS, IN_LOSS)
        (told,) = log()
        assert "Between the loss and the model: MulBackward0, SumBackward0, ToCopyBackward0" in told

    @pytest.mark.parametrize(("ran", "most"), [(True, 3), (False, 8)])
    def test_the_third_skip_in_a_row_and_the_eighth_at_the_start_are_explained(self, ran, most, log):
        class Model(Net):
            def forward(self, x: Tensor, factor: float) -> Tensor:
                return self.last(Amplified.apply(self.first(x), factor))

        model = Model()
        optimizer = run(*[FINE] * ran, *[(1e9, 1.0)] * (most - 1), model=model)
        assert log() == []
        go_on(model, optimizer, (1e9, 1.0))
        (told,) = log()
        assert told.startswith("First inf: in the backward of Amplified (operator mul).")

    def test_a_skip_under_a_checked_static_scale_is_explained(self, log):
        run(FINE, IN_MODEL, IN_MODEL, loss_scale=8.0, check_finite=True)
        (told,) = log()
        assert told.startswith("First inf: in torch.Tensor.mul.")

    def test_recording_ends_after_a_hundred_steps(self, log):
        run(FINE, IN_MODEL, *[FINE] * 99)
        assert recorder() is not None
        amp.deinitialize()
        run(FINE, IN_MODEL, *[FINE] * 100)
        assert recorder() is None
        assert log() == []

    def test_explaining_changes_no_weight(self):
        def weights(on_overflow: str) -> list[Tensor]:
            optimizer = run(FINE, IN_MODEL, IN_BOTH, FINE, IN_LOSS, FINE, on_overflow=on_overflow)
            found = [each.detach().clone() for each in optimizer.param_groups[0]["params"]]
            amp.deinitialize()
            return found

        assert all(map(torch.equal, weights("explain"), weights("log")))


class TestGradScaler:
    def test_the_third_skip_of_a_grad_scaler_in_a_row_is_explained(self, log):
        model = Net()
        optimizer = run(model=model)
        scaler = ampatch.GradScaler("cpu", init_scale=64.0)
        for factor in (1.0, 1e6, 1e6, 1e6):
            assert log() == []
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 4), factor).float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        (told,) = log()
        assert told.startswith("First inf: in torch.Tensor.mul.")


class TestTurnedOff:
    @pytest.mark.parametrize("options", [{"on_overflow": "log"}, {"verbosity": 0}])
    def test_no_skip_is_explained_where_that_is_turned_off(self, options, log):
        run(FINE, *[IN_MODEL] * 5, **options)
        assert recorder() is None
        assert log() == []

    def test_no_forward_is_noted_among_several_ranks(self, log):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            run(FINE, IN_MODEL, IN_MODEL, IN_MODEL)
        finally:
            torch.distributed.destroy_process_group()
        assert recorder() is None
        assert log() == []
