"""``overflow.save`` and ``amp.replay``: a skipped step runs again, in another process and at other opt levels."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fresh import COMMAND, Fresh
from optimizers import SGD, backward
from planted_overflows import Amplified, traced
from torch import Tensor, nn

from ampatch import amp

EACH_LEVEL = pytest.mark.parametrize("level", ["O1", "O2"])

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x, options):
        hidden = torch.nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        scores = torch.matmul(hidden * self.factor, hidden.t() * self.factor)
        return self.last(torch.softmax(scores, -1) @ hidden) * options["scale"]


def make_model():
    return Net()


def make_other():
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of a model in a module in the current folder."""
    (tmp_path / "nets.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return importlib.import_module("nets").Net


def saved_step(model: nn.Module, level: str = "O1", **options: Any) -> amp.Overflow:
    """Trains until a step is skipped, and saves that step."""
    events: list[amp.Overflow] = []

    def save(overflow: amp.Overflow) -> None:
        overflow.save("step.pt")
        events.append(overflow)
        raise StopIteration

    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"init_scale": 64.0, "on_overflow": ("trace", save), **options}
    with traced(model, optimizer, opt_level=level, **options):
        for x in torch.randn(6, 16, 8):
            optimizer.zero_grad()
            backward(F.mse_loss(model(x, {"scale": 1.0}).float(), x[:, :4]), optimizer)
            with contextlib.suppress(StopIteration):
                optimizer.step()
            if events:
                break
            if isinstance(getattr(model, "factor", None), Tensor):
                model.factor *= 10
    return events[0]


def saving(model: nn.Module, *inputs: Any, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Saves a step of one batch, which overflows, while it is skipped."""
    optimizer = SGD(model.parameters())
    on_overflow = ("trace", lambda overflow: overflow.save("step.pt"))
    amp.initialize(model, optimizer, half_dtype="float16", verbosity=0, on_overflow=on_overflow)
    backward(model(*inputs).float().mean(), optimizer)
    meanwhile()
    optimizer.step()


class Overflowing(nn.Linear):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return super().forward(x) * 1e6


def finite(replay: amp.Replay) -> dict[str, bool | None]:
    return {row.level: row.is_finite for row in replay.levels}


class TestReplay:
    @EACH_LEVEL
    def test_a_replay_names_the_same_place_and_the_levels_that_stand(self, net: Any, level: str) -> None:
        overflow = saved_step(net(), level)
        replay = amp.replay("step.pt", net())
        assert replay.is_same
        assert replay.trace.function == overflow.trace.function
        assert replay.trace.outputs == overflow.trace.outputs  # the same inputs, weights, buffers and random numbers
        assert finite(replay) == {
            f"{level} float16, as saved": False,
            "O0": True,
            "O1 float16": False,
            "O1 bfloat16": True,
            "O2 float16": False,
            "O2 bfloat16": True,
            "O3 float16": False,
        }
        assert "The same step at each level" in str(replay)
        json.dumps(replay.to_dict(), allow_nan=False)

    def test_a_buffer_of_several_modules_is_that_of_the_run(self) -> None:
        class Shares(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
                factor = torch.ones(())
                self.first.register_buffer("factor", factor)
                self.second.register_buffer("factor", factor)

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x)) * self.second.factor

        model = Shares()
        model.first.factor.fill_(1e6)
        saving(model, torch.randn(8, 4))
        amp.deinitialize()
        assert amp.replay("step.pt", Shares()).is_same

    def test_a_replay_has_the_cast_lists_of_the_run(self, net: Any) -> None:
        saved_step(net(), cast_lists={"blacklist": {"torch": ["softmax"]}}, init_scale=2.0**20)
        replay = amp.replay("step.pt", net(), levels="O2")
        assert list(finite(replay)) == ["O1 float16, as saved", "O0", "O2 float16", "O2 bfloat16"]
        assert replay.notes[1:] == ()  # but that of the gradients: the policy is that of the run

    def test_a_replay_leaves_the_model_and_the_process_as_they_were(self, net: Any) -> None:
        saved_step(net())
        model = net()
        before = {name: each.clone() for name, each in model.state_dict().items()}
        random = torch.get_rng_state()
        amp.replay("step.pt", model)
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        assert torch.equal(random, torch.get_rng_state())
        assert not amp.is_on()

    @pytest.mark.slow
    def test_a_step_is_replayed_compiled_too(self) -> None:
        class Model(nn.Linear):
            def forward(self, x: Tensor, options: dict[str, float]) -> Tensor:
                y = super().forward(x)
                return y if torch.compiler.is_compiling() else y * 1e6 * options["scale"]

        saved_step(Model(8, 4))
        rows = finite(amp.replay("step.pt", Model(8, 4), levels="O1", compiled=True))
        assert rows["O1 float16, as saved"] is False
        assert rows["O1 float16, as saved, compiled"] is True

    @EACH_LEVEL
    def test_a_replay_restores_frozen_weights_modes_and_buffers(self, net: Any, level: str) -> None:
        model = net()
        model.first.weight.requires_grad_(False)
        model.norm.eval()
        model.norm.running_var.fill_(0.25)
        model.register_buffer("table", torch.ones(3), persistent=False)
        overflow = saved_step(model, level)
        replay = amp.replay("step.pt", net(), levels="O3")
        assert replay.trace.outputs == overflow.trace.outputs
        assert replay.is_same

    def test_a_replay_without_the_cause_names_no_place(self, net: Any) -> None:
        class Net(nn.Module):  # of the same name, with other code
            def __init__(self) -> None:
                super().__init__()
                self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

            def forward(self, x: Tensor, options: Any) -> Tensor:
                return self.last(self.first(x)) / 1e3

        saved_step(net())
        replay = amp.replay("step.pt", Net(), levels="O3")
        assert not replay.is_same
        assert "no place, so that the model's code or its settings may differ" in " ".join(str(replay).split())

    def test_an_overflow_in_a_backward_pass_is_replayed(self, net: Any) -> None:
        class Model(nn.Linear):
            def forward(self, x: Tensor, options: dict[str, float]) -> Tensor:
                return Amplified.apply(super().forward(x), 1e6) * options["scale"]

        overflow = saved_step(Model(8, 4))
        replay = amp.replay("step.pt", Model(8, 4), levels=["O1"])
        assert overflow.trace.function == replay.trace.function == "Amplified"
        assert finite(replay) == {"O1 float16, as saved": False, "O0": True, "O1 float16": False, "O1 bfloat16": True}
        assert replay.notes == ()


class TestCommand:
    @pytest.mark.slow
    def test_the_command_names_the_same_operator_in_a_fresh_process(self, net: Any, fresh: Fresh) -> None:
        overflow = saved_step(net())
        done = fresh.run(COMMAND, "replay", "step.pt", "nets:make_model", "--json", "--level", "O2")
        assert not done.returncode, done.stderr
        replayed = json.loads(done.stdout)
        assert replayed["is_same"]
        assert replayed["trace"]["operator"] == overflow.trace.operator
        assert [row["level"] for row in replayed["levels"]][1:] == ["O0", "O2 float16", "O2 bfloat16"]


class TestErrors:
    def test_a_step_of_another_model_is_refused(self, net: Any) -> None:
        saved_step(net())
        other = net()
        other.last = nn.Linear(8, 5)
        for model, told in (
            (nn.Linear(2, 2), "is a step of Net; found Linear"),
            (other, r"its 'last.weight' is float32 \[4, 8\]; in the model"),
            (net().half(), r"is float32 \[8, 8\]; in the model that was passed it is float16"),
        ):
            with pytest.raises(amp.OptionError, match=told):
                amp.replay("step.pt", model)

    @pytest.mark.parametrize(
        ("write", "told"),
        [
            (lambda path: None, "there is no file 'step.pt'"),
            (lambda path: path.write_text("no"), "holds no step that this version of ampatch reads"),
            (
                lambda path: torch.save({"weight": torch.ones(2)}, path),
                "holds no step that this version of ampatch reads",
            ),
        ],
    )
    def test_another_file_is_refused(self, net: Any, write: Callable[[Path], object], told: str) -> None:
        write(Path("step.pt"))
        with pytest.raises(amp.OptionError, match=told):
            amp.replay("step.pt", net())

    @pytest.mark.parametrize(
        ("value", "told"),
        [
            (np.float64(1), "which a file of tensors and plain data cannot hold"),
            ({1: [np.int64(2)]}, "which a file of tensors and plain data cannot hold"),
            ({np.int64(1): 2}, "which a file of tensors and plain data cannot hold"),
            (Path, r"Overflowing was called with a type, .* Pass tensors"),
        ],
        ids=str,
    )
    def test_arguments_that_no_file_can_hold_are_refused(self, value: Any, told: str) -> None:
        with pytest.raises(amp.OptionError, match=told):
            saving(Overflowing(8, 4), torch.ones(2, 8), value)

    def test_inputs_that_were_written_to_are_refused(self) -> None:
        x = torch.ones(2, 8)
        with pytest.raises(amp.UsageError, match="cannot run again: its arguments were written to since"):
            saving(Overflowing(8, 4), x, meanwhile=x.zero_)

    def test_a_replay_is_refused_while_amp_is_set_up(self, net: Any) -> None:
        saved_step(net())
        with amp.init(), pytest.raises(amp.UsageError, match=r"Type amp.deinitialize\(\) first"):
            amp.replay("step.pt", net())

    def test_a_step_that_is_over_cannot_be_saved(self, net: Any) -> None:
        overflow = saved_step(net())
        with pytest.raises(amp.UsageError, match="the step is over, or the model is compiled"):
            overflow.save("later.pt")

    def test_a_step_without_a_trace_cannot_be_saved(self) -> None:
        overflow = amp.Overflow("SGD", (), ())
        with pytest.raises(amp.UsageError, match="was not traced"):
            overflow.save("step.pt")
