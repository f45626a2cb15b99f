"""`MixedPrecision` with masters that exist only while the optimizer steps."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn

from ampatch import GradScaler, MixedPrecision
from ampatch.errors import OptionError, UsageError
from ampatch.weights import step_parts

EACH_KIND = pytest.mark.parametrize("kind", ["split", "stochastic"])


def precise() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trainable(kind: str | bool, **options: Any) -> tuple[nn.Module, MixedPrecision]:
    model = precise().bfloat16()
    return model, MixedPrecision(adamw(model), masters=kind, **options)


def step(model: nn.Module, optimizer: Any, count: int = 1, first: int = 0) -> None:
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def masters(optimizer: MixedPrecision) -> list[Tensor]:
    return [optimizer.master_of(each).detach().clone() for each in optimizer.param_groups[0]["params"]]


def assert_all_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


class TestSteps:
    def test_split_masters_are_those_that_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_parts, "_LEAST", 1)
        found = []
        for kind in ("split", True):
            model, optimizer = trainable(kind)
            step(model, optimizer, 5)
            found.append(masters(optimizer))
        assert_all_same(*found)

    @EACH_KIND
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_step_in_parts_leaves_all_gradients_in_place(
        self, kind: str, fails: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(step_parts, "_LEAST", 1)
        model, optimizer = trainable(kind)
        step(model, optimizer)
        given = [torch.ones_like(each) for each in model.parameters()]
        for parameter, grad in zip(model.parameters(), given, strict=True):
            parameter.grad = grad
        if fails:
            optimizer.state[model[2].weight]["exp_avg"] = torch.ones(7)
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            optimizer.step()
        assert [id(parameter.grad) for parameter in model.parameters()] == list(map(id, given))

    @EACH_KIND
    def test_the_state_holds_no_masters_between_steps(self, kind: str) -> None:
        model, optimizer = trainable(kind, optimizer_state="bfloat16")
        step(model, optimizer)
        for parameter in model.parameters():
            assert optimizer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert parameter.dtype is optimizer.state[parameter]["exp_avg"].dtype is torch.bfloat16

    @EACH_KIND
    def test_a_closure_and_a_scaler_step_as_without_amp(self, kind: str) -> None:
        model, optimizer = trainable(kind)
        inputs = torch.ones(4, 8, dtype=torch.bfloat16)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs).float().square().mean()
            loss.backward()
            return loss

        before = closure().item()
        for _ in range(4):
            optimizer.step(closure)
        scaler = GradScaler("cpu", init_scale=8.0)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(inputs).float().square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert closure().item() < before

    @EACH_KIND
    def test_a_write_between_steps_counts(self, kind: str) -> None:
        model, optimizer = trainable(kind)
        step(model, optimizer)
        model[0].weight.data.zero_()
        assert not masters(optimizer)[0].any()

    @EACH_KIND
    def test_a_model_that_is_converted_is_refused(self, kind: str) -> None:
        model, optimizer = trainable(kind)
        step(model, optimizer)
        expected = masters(optimizer) if kind == "split" else [each.detach().float() for each in model.parameters()]
        with pytest.raises(UsageError, match=r"put together from bfloat16 parameters.*made with masters=True"):
            step(model.float(), optimizer)
        kept = MixedPrecision(adamw(model))
        kept.load_state_dict(optimizer.state_dict())
        assert_all_same([each.detach() for each in model.parameters()], expected)


class TestSaving:
    @EACH_KIND
    @pytest.mark.parametrize("state", ["float32", "bfloat16"])
    def test_a_run_resumes_bit_for_bit(self, kind: str, state: str) -> None:
        model, optimizer = trainable(kind, optimizer_state=state)
        step(model, optimizer, 3)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step(model, optimizer, 3, first=3)
        again, other = trainable(kind, optimizer_state=state)
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        step(again, other, 3, first=3)
        assert_all_same(masters(other), masters(optimizer))

    def test_split_masters_load_into_kept_ones_and_back(self) -> None:
        kinds: list[str | bool] = ["split", True, "split"]
        model, optimizer = trainable(kinds[0])
        step(model, optimizer, 3)
        expected = masters(optimizer)
        for kind in kinds[1:]:
            model, other = trainable(kind)
            other.load_state_dict(optimizer.state_dict())
            assert_all_same(masters(other), expected)
            optimizer = other

    @EACH_KIND
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda whole: pickle.loads(pickle.dumps(whole))])
    def test_a_copy_steps_as_the_original(self, kind: str, copied: Callable[[Any], Any]) -> None:
        model, optimizer = trainable(kind)
        step(model, optimizer, 3)
        other_model, other = copied((model, optimizer))
        for each in ((model, optimizer), (other_model, other)):
            step(*each, first=3)
        assert_all_same(masters(other), masters(optimizer))

    def test_masters_from_a_model_are_taken_with_every_bit(self) -> None:
        _, optimizer = trainable("split", masters_from=precise())
        assert_all_same(masters(optimizer), [each.detach() for each in precise().parameters()])

    @pytest.mark.parametrize("kind", [True, "split", "stochastic"])
    def test_frozen_parameters_take_masters_from_at_once_and_keep_what_is_loaded_later(self, kind: str | bool) -> None:
        model = precise().bfloat16().requires_grad_(False)
        nn.init.zeros_(model[0].weight)
        optimizer = MixedPrecision(adamw(model), masters=kind, masters_from=precise())
        assert_all_same([each.detach() for each in model.parameters()], [*precise().bfloat16().parameters()])
        loaded = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        model.requires_grad_(True)
        step(model, optimizer)
        assert all(bool((each - 0.5).abs().max() < 0.01) for each in masters(optimizer))

    def test_the_state_dict_of_a_model_has_the_masters(self) -> None:
        model, optimizer = trainable("split")
        step(model, optimizer)
        assert_all_same(list(optimizer.master_state_dict(model).values()), masters(optimizer))


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"masters": "splt"}, "masters is 'splt'; expected True, 'split' or 'stochastic'"),
            ({"masters": False}, "masters is False; expected True"),
            ({"masters": "split", "dtype": "float64"}, "contradicts dtype=torch.float64; expected float32 masters"),
            ({"optimizer_state": "bfloat16"}, "needs masters that exist only while the optimizer steps"),
        ],
        ids=str,
    )
    def test_a_contradiction_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message):
            MixedPrecision(adamw(precise().bfloat16()), **options)

    def test_a_later_float16_group_is_refused_and_not_added(self) -> None:
        _, optimizer = trainable("split")
        with pytest.raises(OptionError, match="is float16"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]})
        assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize("masters", [True, "split"])
    def test_a_later_group_may_be_a_generator(self, masters: bool | str) -> None:
        optimizer = MixedPrecision(adamw(precise().bfloat16()), masters=masters)
        late = nn.Linear(2, 2).bfloat16()
        optimizer.add_param_group({"params": late.parameters()})
        assert list(map(id, optimizer.param_groups[1]["params"])) == list(map(id, late.parameters()))

    def test_a_step_that_the_user_has_replaced_runs_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_parts, "_LEAST", 1)
        model, optimizer = trainable("split")
        calls, inside = [], optimizer.optimizer.step
        monkeypatch.setattr(optimizer.optimizer, "step", lambda *args: calls.append(inside(*args)))
        step(model, optimizer)
        assert len(calls) == 1

    @EACH_KIND
    def test_two_parameters_that_share_memory_are_refused(self, kind: str) -> None:
        first = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        with pytest.raises(OptionError, match=r"parameters 0 and 1 of the optimizer share memory, and masters="):
            MixedPrecision(torch.optim.SGD([first, nn.Parameter(first.data)], lr=0.1), masters=kind)
        optimizer = MixedPrecision(torch.optim.SGD([first], lr=0.1), masters=kind)
        with pytest.raises(OptionError, match=r"parameters 0 and 1 of the optimizer share memory, and masters="):
            optimizer.add_param_group({"params": [nn.Parameter(first.data)]})
        assert len(optimizer.param_groups) == 1

    def test_float16_parameters_are_refused(self) -> None:
        with pytest.raises(OptionError, match=r"needs bfloat16 parameters, and .* is float16. Type model.bfloat16"):
            MixedPrecision(adamw(precise().half()), masters="split")
