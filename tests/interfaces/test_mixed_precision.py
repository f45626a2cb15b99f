"""Of `ampatch.MixedPrecision`: every optimizer steps as in float32, and its masters travel in its own state."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import MOMENTUM as SGD
from optimizers import OPTIMIZERS, backward
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ampatch
from ampatch import MixedPrecision, amp
from ampatch.errors import OptionError, UsageError

EACH_HALF = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)

WITHOUT_MUON = {name: make for name, make in OPTIMIZERS.items() if name != "Muon"}  # the network has biases
EACH_OPTIMIZER = pytest.mark.parametrize("make", WITHOUT_MUON.values(), ids=WITHOUT_MUON)
EACH_WAY_TO_COPY = pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))], ids=["copy", "pickle"]
)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def network(half: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Half but for its last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].to(half)
    return model


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
    hidden = model[1](model[0](batch.to(model[0].weight.dtype)))
    return model[2](hidden.float()).square().mean()


def train(model: nn.Module, optimizer: Any, *indices: int) -> None:
    for index in indices:
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()


def wrapped(make: Callable[..., Any] = SGD, half: torch.dtype = torch.bfloat16) -> tuple[nn.Sequential, MixedPrecision]:
    """Returns a model, and an optimizer with masters of it."""
    model = network(half)
    return model, MixedPrecision(make(model.parameters()))


def single(size: int = 1, half: torch.dtype = torch.bfloat16, **options: Any) -> tuple[nn.Parameter, MixedPrecision]:
    """Returns a parameter of ones with gradients of one, and an optimizer with a master of it."""
    parameter = nn.Parameter(torch.ones(size, dtype=half))
    parameter.grad = torch.ones_like(parameter)
    return parameter, MixedPrecision(torch.optim.SGD([parameter], **{"lr": 1.0, **options}))


class ByHand:
    """A model with float32 copies of its weights, which a float32 optimizer updates."""

    def __init__(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(each.detach().float().clone()) for each in self.parameters]
        self.optimizer = make(self.masters)

    def hand_on_gradients(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()

    def write(self) -> None:
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)

    def step(self, loss: Tensor) -> None:
        self.model.zero_grad()
        loss.backward()
        self.hand_on_gradients()
        self.optimizer.step()
        self.write()

    def train(self, *indices: int) -> None:
        for index in indices:
            self.step(loss_of(self.model, index))


def closure_of(
    optimizer: Any, model: nn.Module, scaler: Any = None, *, overflow_at: int = -1, set_to_none: bool = True
) -> Callable[[], Tensor]:
    """Returns a closure, which may scale its loss and overflow in one of its calls."""
    calls = itertools.count()

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model)
        scaled = loss * (math.inf if next(calls) == overflow_at else 1)
        (scaler.scale(scaled) if scaler else scaled).backward()
        return loss

    return closure


def check(optimizer: MixedPrecision, model: nn.Module, by_hand: ByHand) -> None:
    assert_same_state(list(optimizer.master_params()), by_hand.masters)
    assert_same_state(list(model.parameters()), by_hand.parameters)
    state = optimizer.state_dict()["state"]
    for number, expected in by_hand.optimizer.state_dict()["state"].items():
        assert_same_state({key: value for key, value in state[number].items() if key != "master"}, expected)


class TestSteps:
    @EACH_HALF
    @EACH_OPTIMIZER
    def test_every_optimizer_steps_the_masters_as_float32_weights(self, make, half):
        (model, optimizer), by_hand = wrapped(make, half), ByHand(network(half), make)
        train(model, optimizer, 0, 1, 2)
        by_hand.train(0, 1, 2)
        check(optimizer, model, by_hand)

    @EACH_HALF
    def test_wrapping_a_class_gives_what_makes_wrapped_optimizers(self, half):
        model, by_hand = network(half), ByHand(network(half), SGD)
        made = MixedPrecision(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
        assert isinstance(made, MixedPrecision)
        assert isinstance(made.optimizer, torch.optim.SGD)
        assert isinstance(MixedPrecision(SGD)(network(half).parameters()), MixedPrecision)
        train(model, made, 0, 1)
        by_hand.train(0, 1)
        check(made, model, by_hand)

    def test_masters_may_be_float64(self):
        model = network()
        optimizer = MixedPrecision(ADAMW(model.parameters()), dtype="float64")
        train(model, optimizer, 0)
        assert {master.dtype for master in optimizer.master_params()} == {torch.float64}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
        assert all(state["exp_avg"].dtype is torch.float64 for state in optimizer.state.values())

    def test_one_optimizer_may_have_parameters_of_all_types(self):
        types = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in types]
        optimizer = MixedPrecision(torch.optim.SGD(parameters, lr=0.5))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert [each.dtype for each in optimizer.master_params()] == [torch.float32] * 3 + [torch.float64]
        assert [each.tolist() for each in parameters] == [[0.5, 0.5]] * 4
        assert [each.dtype for each in parameters] == types

    def test_parameters_of_8_bits_have_no_master(self):
        tiny = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
        empty = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        optimizer = MixedPrecision(torch.optim.SGD([tiny, empty], lr=1.0))
        empty.grad = torch.zeros_like(empty)
        optimizer.step()
        assert [each.dtype for each in optimizer.master_params()] == [torch.float8_e4m3fn, torch.float32]

    def test_sparse_gradients_step_the_rows_that_they_have(self):
        table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
        before = table.weight.detach().clone()
        optimizer = MixedPrecision(torch.optim.SparseAdam(table.parameters(), lr=0.1))
        table(torch.tensor([1, 1])).sum().backward()
        optimizer.step()
        assert_same_bits(table.weight[0], before[0])
        assert (table.weight[1] != before[1]).all()

    def test_an_error_in_a_step_leaves_the_models_parameters_in_the_groups(self):
        model, optimizer = wrapped(ADAMW)
        handle = optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, 0)
        handle.remove()
        held = [each for group in optimizer.param_groups for each in group["params"]]
        assert all(found is wanted for found, wanted in zip(held, model.parameters(), strict=True))
        by_hand = ByHand(network(), ADAMW)
        train(model, optimizer, 0)
        by_hand.train(0)
        check(optimizer, model, by_hand)

    def test_a_step_that_is_interrupted_at_its_start_keeps_the_masters(self):
        class Interrupting(defaultdict[Tensor, Any]):
            def __delitem__(self, key: Tensor) -> None:
                super().__delitem__(key)
                raise KeyboardInterrupt

        model, optimizer = wrapped(functools.partial(torch.optim.SGD, lr=1e-4))
        train(model, optimizer, 0, 1)
        masters = [master.detach().clone() for master in optimizer.master_params()]
        state = optimizer.optimizer.state
        optimizer.optimizer.state = Interrupting(dict, state)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.optimizer.state = defaultdict(dict, optimizer.optimizer.state)
        assert_same_state(list(optimizer.master_params()), masters)
        train(model, optimizer, 2)


class TestClosures:
    def test_closures_see_the_models_parameters_and_may_set_options(self):
        model, optimizer = wrapped()
        seen: list[Any] = []

        def closure() -> Tensor:
            (group,) = optimizer.param_groups
            seen.extend(group["params"])
            group["lr"] = 0.0
            loss = loss_of(model)
            loss.backward()
            return loss

        before = copy.deepcopy(model.state_dict())
        optimizer.step(closure)
        assert all(found is wanted for found, wanted in zip(seen, model.parameters(), strict=True))
        assert_same_state(model.state_dict(), before)
        assert optimizer.param_groups[0]["lr"] == 0.0

    @pytest.mark.parametrize("make", [SGD, torch.optim.LBFGS], ids=["SGD", "LBFGS"])
    def test_closures_see_weights_rounded_from_the_masters(self, make):
        (model, optimizer), by_hand = wrapped(make), ByHand(network(), make)
        closure = closure_of(by_hand.model, by_hand.model)

        def closure_by_hand() -> Tensor:
            by_hand.write()
            loss = closure()
            by_hand.hand_on_gradients()
            return loss

        for _ in range(3):
            found = optimizer.step(closure_of(optimizer, model))
            assert found.item() == by_hand.optimizer.step(closure_by_hand).item()
        assert_same_state(list(optimizer.master_params()), by_hand.masters)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_closures_may_clear_gradients_by_the_wrapped_optimizer(self, set_to_none):
        weights = []
        for clears_inner in (False, True):
            model, optimizer = wrapped(functools.partial(torch.optim.LBFGS, max_iter=3))
            cleared = optimizer.optimizer if clears_inner else optimizer
            optimizer.step(closure_of(cleared, model, set_to_none=set_to_none))
            weights.append(model.state_dict())
        assert_same_state(*weights)


class TestWrappedOptimizer:
    def test_options_and_attributes_are_those_of_the_wrapped_optimizer(self):
        inside = SGD(network().parameters())
        optimizer = MixedPrecision(inside)
        optimizer.param_groups[0]["lr"] = 0.5
        assert inside.param_groups[0]["lr"] == 0.5
        inside.param_groups[0]["momentum"] = 0.0
        assert optimizer.param_groups[0]["momentum"] == 0.0
        assert optimizer.defaults is inside.defaults
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert "SGD" in repr(optimizer)
        with pytest.raises(AttributeError, match="SGD"):
            optimizer.nothing_of_the_kind  # noqa: B018

    @pytest.mark.parametrize("on_inside", [False, True], ids=["on-it", "on-the-one-inside"])
    @pytest.mark.filterwarnings("error")
    def test_a_scheduler_may_be_of_the_wrapper_or_of_the_wrapped_optimizer(self, on_inside):
        model, by_hand = network(), ByHand(network(), SGD)
        inside = SGD(model.parameters())
        optimizer = MixedPrecision(inside)
        schedulers = [
            lr_scheduler.StepLR(inside if on_inside else optimizer, 1, gamma=0.5),
            lr_scheduler.StepLR(by_hand.optimizer, 1, gamma=0.5),
        ]
        for index in range(3):
            train(model, optimizer, index)
            by_hand.train(index)
            for scheduler in schedulers:
                scheduler.step()
        check(optimizer, model, by_hand)

    def test_hooks_of_the_wrapper_see_the_model_and_those_inside_the_masters(self):
        model, optimizer = wrapped()
        seen: list[Any] = []

        def note(stepping: Any, *_: Any) -> None:
            seen.append([each.dtype for group in stepping.param_groups for each in group["params"]])

        optimizer.register_step_post_hook(note)
        optimizer.optimizer.register_step_pre_hook(note)
        train(model, optimizer, 0)
        half, full = torch.bfloat16, torch.float32
        assert seen == [[full] * 4, [half, half, full, full]]

    @pytest.mark.parametrize(
        "add",
        [
            lambda optimizer, late: optimizer.add_param_group({"params": [late]}),
            lambda optimizer, late: optimizer.param_groups[0]["params"].append(late),
        ],
        ids=["group", "appended"],
    )
    def test_parameters_added_later_have_masters(self, add):
        (_, optimizer), late = wrapped(), nn.Parameter(torch.ones(1, dtype=torch.float16))
        add(optimizer, late)
        late.grad = torch.ones_like(late)
        optimizer.step()
        assert late.item() == pytest.approx(0.9, abs=1e-3)
        assert optimizer.master_of(late).item() == pytest.approx(0.9, abs=1e-7)


class TestWritingWeights:
    def test_writing_to_a_half_element_changes_no_other_of_the_master(self):
        parameter, optimizer = single(2, lr=1e-3)
        optimizer.step()
        parameter.data[1] = 5.0
        assert optimizer.master_of(parameter).tolist() == [pytest.approx(0.999), 5.0]

    def test_writing_to_a_master_counts_from_the_next_step_on(self):
        parameter, optimizer = single(2)
        with torch.no_grad():
            optimizer.master_of(parameter).copy_(torch.tensor([3.0, 2.0]))
        assert optimizer.master_of(parameter).tolist() == [3.0, 2.0]
        optimizer.step()
        assert parameter.tolist() == [2.0, 1.0]

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_values_that_are_not_finite_reach_the_master(self, value):
        parameter, optimizer = single()
        parameter.data.fill_(value)
        assert repr(optimizer.master_of(parameter).item()) == repr(value)


class TestGradients:
    @EACH_HALF
    def test_gradients_accumulate_and_are_clipped_in_half(self, half):
        (model, optimizer), by_hand = wrapped(SGD, half), ByHand(network(half), SGD)
        for each in (model, by_hand.model):
            for index in range(2):
                loss_of(each, index).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        optimizer.step()
        by_hand.hand_on_gradients()
        by_hand.optimizer.step()
        assert_same_state(list(optimizer.master_params()), by_hand.masters)

    def test_widened_gradients_accumulate_in_float32_until_the_step(self):
        parameter, optimizer = single()
        (parameter * 255).sum().backward()
        optimizer.widen_gradients()
        (parameter * 1).sum().backward()
        assert (parameter.grad.dtype, parameter.grad.item()) == (torch.float32, 257.0)
        optimizer.step()
        assert optimizer.master_of(parameter).item() == -256.0
        assert parameter.grad.dtype is torch.bfloat16
        parameter.grad = None
        parameter.data = parameter.data.float()
        (parameter * 1.001).sum().backward()
        assert parameter.grad.item() == pytest.approx(1.001, abs=1e-6)


class KeepsItsParameters(torch.optim.Optimizer):
    """Steps what it was given at first, whatever stands in its groups."""

    def __init__(self, parameters: Any) -> None:
        self.kept = list(parameters)
        super().__init__(self.kept, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _ in range(2):
            if closure is not None:
                closure()
            for each in self.kept:
                each.sub_(each.grad)


class TwoHalves(torch.optim.Adam):
    """Writes to the weights in two methods, as sharpness-aware minimization does; the second one steps."""

    @torch.no_grad()
    def climb(self) -> None:
        self.before = [each.clone() for each in self.param_groups[0]["params"]]
        for each in self.param_groups[0]["params"]:
            each.add_(each.grad, alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def go_back(self) -> None:
        torch._foreach_copy_(self.param_groups[0]["params"], self.before)
        self.step()
        self.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class TestUnusualOptimizers:
    @pytest.mark.parametrize("closure", [None, lambda: None], ids=["", "closure"])
    def test_updates_of_an_optimizer_that_keeps_its_parameters_reach_the_masters(self, closure):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer = MixedPrecision(KeepsItsParameters([parameter]))
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(closure)
        assert_same_bits(parameter, torch.full((2,), -1, dtype=torch.bfloat16))
        assert_same_bits(optimizer.master_of(parameter), torch.full((2,), -1.0))

    @pytest.mark.parametrize("masters", [True, "split"])
    def test_methods_that_are_halves_of_a_step_run_on_the_masters_as_on_float32_weights(self, masters):
        halves, optimizer = (model := network()), MixedPrecision(TwoHalves(model.parameters()), masters=masters)
        reference = copy.deepcopy(halves)
        for parameter in reference.parameters():
            parameter.data = parameter.data.float()
        plain = TwoHalves(reference.parameters())
        for index in range(3):
            for name in ("climb", "go_back"):
                loss_of(halves, index).backward()
                for parameter, half in zip(reference.parameters(), halves.parameters(), strict=True):
                    parameter.grad = half.grad.float()
                getattr(optimizer, name)()
                getattr(plain, name)()
                assert all(each.grad is None for each in halves.parameters())
        assert_same_state(list(map(optimizer.master_of, halves.parameters())), list(reference.parameters()))

    def test_method_that_runs_a_backward_pass_raises_and_changes_nothing(self):
        model = network()
        optimizer = MixedPrecision(TwoHalves(model.parameters()))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match="a method of this TwoHalves runs a backward pass"):
            optimizer.backward(loss_of(model))
        assert_same_state(model.state_dict(), before)

    @EACH_HALF
    def test_momentum_stays_if_a_scaler_unscales_in_a_closure(self, half):
        parameter, optimizer = single(half=half, lr=0.1, momentum=0.9)
        scaler = ampatch.GradScaler("cpu", init_scale=4.0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = parameter.sum()
            scaler.scale(loss).backward()
            return loss

        for _ in range(3):
            scaler.step(optimizer, closure)
            scaler.update()
        assert optimizer.state[parameter]["momentum_buffer"].item() == pytest.approx(2.71)
        assert optimizer.master_of(parameter).item() == pytest.approx(0.439)

    @pytest.mark.parametrize("what", ["step again", "add groups", "load its state", "save its state"])
    def test_closures_must_not_use_their_optimizer(self, what):
        model, optimizer = wrapped()
        train(model, optimizer, 0)
        before, late = copy.deepcopy(optimizer.state_dict()), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        change = {
            "step again": optimizer.step,
            "save its state": optimizer.state_dict,
            "add groups": lambda: optimizer.add_param_group({"params": [late]}),
            "load its state": lambda: optimizer.load_state_dict(before),
        }[what]
        with pytest.raises(UsageError, match=f"is under way; {what} before or after it"):
            optimizer.step(change)
        assert_same_state(optimizer.state_dict(), before)

    @EACH_WAY_TO_COPY
    def test_a_copy_made_in_a_closure_has_the_masters_and_cannot_step(self, way):
        model, optimizer = wrapped()
        train(model, optimizer, 0)
        masters = copy.deepcopy(list(optimizer.master_params()))
        copies: list[MixedPrecision] = []
        optimizer.step(lambda: copies.append(way(optimizer)))
        assert_same_state(list(copies[0].master_params()), masters)
        with pytest.raises(UsageError, match="is under way"):
            copies[0].step()

    def test_another_optimizer_may_take_the_place_of_the_wrapped_one(self):
        results = []
        for assigns in (False, True):
            model, optimizer = wrapped()
            train(model, optimizer, 0)
            if assigns:
                optimizer.optimizer = SGD(model.parameters())
            else:
                optimizer = MixedPrecision(SGD(model.parameters()))
            train(model, optimizer, 1)
            results.append((optimizer.state_dict(), list(optimizer.master_params())))
        assert_same_state(*results)

    def test_a_parameter_listed_twice_has_one_master(self):
        parameter, _ = single()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = MixedPrecision(torch.optim.SGD([parameter, parameter], lr=0.125))
        optimizer.step()
        assert parameter.item() == optimizer.master_of(parameter).item() == 0.75

    def test_masters_are_frozen_and_thawed_with_their_parameters(self):
        model = network()
        model.requires_grad_(False)
        optimizer = MixedPrecision(SGD(model.parameters()))
        model.requires_grad_(True)
        seen: list[bool] = []
        optimizer.optimizer.register_step_pre_hook(
            lambda inside, *_: seen.extend(each.requires_grad for each in inside.param_groups[0]["params"])
        )
        train(model, optimizer, 0)
        assert seen == [True] * 4


class TestFloat16:
    @pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
    @pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_a_grad_scaler_unscales_and_skips(self, kind, fused, far, request):
        if far:
            request.getfixturevalue("far_away")
        make = functools.partial(ADAMW, fused=fused)
        (model, optimizer), (plain, wanted) = wrapped(make, torch.float16), wrapped(make, torch.float16)
        scaler = kind("cpu", init_scale=2.0**8)
        for index in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, index) * (math.inf if index in (0, 3) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        for index in (1, 2, 4):  # of powers of two nothing is lost, unless gradients are as small as float16's least
            wanted.zero_grad()
            (loss_of(plain, index) * 2.0**8).backward()
            for parameter in plain.parameters():
                parameter.grad_dtype = None
                parameter.grad = parameter.grad.float() / 2.0**8
            wanted.step()
        assert scaler.get_scale() == 2.0**6
        for found, expected in zip(optimizer.master_params(), wanted.master_params(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}

    def test_gradients_that_our_scaler_unscales_are_float32_until_the_step(self):
        model = network(torch.float16)
        optimizer = MixedPrecision(torch.optim.SGD(model.parameters(), lr=1e4))
        scaler = ampatch.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)  # less than float16 holds
        before = [master.detach().clone() for master in optimizer.master_params()]
        scaler.step(optimizer)
        moved = [(now - was).norm() for now, was in zip(optimizer.master_params(), before, strict=True)]
        assert torch.stack(moved).norm().item() == pytest.approx(1e-2, rel=1e-3)
        assert [parameter.grad.dtype for parameter in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_gradients_have_the_parameters_type_after_a_skipped_step_and_after_zeroing(self, set_to_none):
        model = network(torch.float16)
        optimizer = MixedPrecision(SGD(model.parameters()))
        own = [parameter.dtype for parameter in model.parameters()]
        scaler = ampatch.GradScaler("cpu")
        scaler.scale(loss_of(model) * math.inf).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert [parameter.grad.dtype for parameter in model.parameters()] == own

        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        optimizer.zero_grad(set_to_none)
        loss_of(model).backward()
        assert [parameter.grad.dtype for parameter in model.parameters()] == own

    def test_a_grad_scaler_steps_with_a_closure(self):
        (model, optimizer), scaler = wrapped(torch.optim.LBFGS, torch.float16), ampatch.GradScaler("cpu")
        first = scaler.step(optimizer, closure_of(optimizer, model, scaler))
        scaler.update()
        assert loss_of(model) < first / 2

    @pytest.mark.parametrize("overflow_at", [0, 2])
    def test_an_overflow_in_a_closure_undoes_the_step(self, overflow_at):
        (model, optimizer), scaler = wrapped(torch.optim.LBFGS, torch.float16), ampatch.GradScaler("cpu")
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        scaler.step(optimizer, closure_of(optimizer, model, scaler, overflow_at=overflow_at))
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        assert_same_state((model.state_dict(), optimizer.state_dict()), before)


class TestStart:
    @pytest.mark.parametrize("form", ["tensors", "module", "names"])
    def test_masters_start_from_float32_values_that_are_given(self, form):
        torch.manual_seed(0)
        precise = nn.Linear(4, 3)
        model = copy.deepcopy(precise).bfloat16()
        named = list(model.named_parameters())
        given = {
            "tensors": [each.detach().clone() for each in precise.parameters()],
            "module": precise,
            "names": precise.state_dict(),
        }[form]
        optimizer = MixedPrecision(torch.optim.SGD(named, lr=0.1), masters_from=given)
        assert_same_state(list(optimizer.master_params()), list(precise.parameters()))
        assert next(optimizer.master_params()) is not next(precise.parameters())
        assert_same_state(list(model.parameters()), [wanted.bfloat16() for wanted in precise.parameters()])

    def test_state_of_an_optimizer_that_has_stepped_in_half_becomes_float32(self):
        model = network()
        inside = ADAMW(model.parameters())
        train(model, inside, 0)
        optimizer = MixedPrecision(inside)
        train(model, optimizer, 1)
        assert all(state["exp_avg"].dtype is torch.float32 for state in optimizer.state.values())


class TestSaving:
    @EACH_HALF
    @EACH_OPTIMIZER
    def test_a_resumed_run_has_every_bit_with_every_optimizer(self, make, half):
        model, optimizer = wrapped(make, half)
        train(model, optimizer, 0, 1)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other, resumed = wrapped(make, half)
        resumed.load_state_dict(saved["optimizer"])
        assert_same_state(list(other[0].parameters()), list(model[0].parameters()))
        other.load_state_dict(saved["model"])
        train(model, optimizer, 2, 3)
        train(other, resumed, 2, 3)
        assert_same_state(resumed.state_dict(), optimizer.state_dict())
        assert_same_state(other.state_dict(), model.state_dict())

    @pytest.mark.parametrize(
        "state",
        [{}, None, 3, {"state": {}}, {"state": 3, "param_groups": [{"params": [0]}]}, {"state": {}, "param_groups": 1}],
        ids=repr,
    )
    def test_loading_what_is_no_state_dict_is_an_error(self, state):
        optimizer = MixedPrecision(SGD(network().parameters()))
        with pytest.raises(OptionError, match="is no state dict of an optimizer"):
            optimizer.load_state_dict(state)

    @pytest.mark.parametrize("broken", ["shape", "groups"])
    def test_loading_state_of_another_model_is_an_error_and_changes_nothing(self, broken):
        model, optimizer = wrapped(ADAMW)
        state = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 0)
        before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        if broken == "shape":
            state["state"][1]["master"] = torch.ones(7)
        else:
            state["param_groups"] *= 2
        with pytest.raises(ValueError, match=r"a master of shape|different number of parameter groups"):
            optimizer.load_state_dict(state)
        assert_same_state((optimizer.state_dict(), model.state_dict()), before)

    def test_state_dict_hooks_are_called(self):
        _, optimizer = wrapped()
        seen: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, given: {k: v for k, v in given.items() if k != "more"})
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        saved = optimizer.state_dict()
        assert saved["more"] == 1
        optimizer.load_state_dict(saved)
        assert seen == ["save", "loaded"]

    def test_a_checkpoint_without_masters_loads(self):
        model, (_, optimizer) = network(torch.float32), wrapped(ADAMW)
        plain = ADAMW(model.parameters())
        train(model, plain, 0)
        optimizer.load_state_dict(plain.state_dict())
        for found, expected in zip(optimizer.state.values(), plain.state.values(), strict=True):
            assert_same_bits(found["exp_avg"], expected["exp_avg"])

    def test_a_float32_model_goes_on_from_the_masters(self):
        (model, optimizer), (precise, resumed) = wrapped(ADAMW), wrapped(ADAMW, torch.float32)
        train(model, optimizer, 0)
        resumed.load_state_dict(optimizer.state_dict())
        assert_same_state(list(precise.parameters())[:2], list(optimizer.master_params())[:2])

    @EACH_WAY_TO_COPY
    def test_copies_train_apart_to_the_same_bits(self, way):
        model, optimizer = wrapped(ADAMW)
        lr_scheduler.StepLR(optimizer, 1)  # wraps its step
        train(model, optimizer, 0)
        other, copied = way((model, optimizer))
        train(model, optimizer, 1)
        train(other, copied, 1)
        assert_same_state(copied.state_dict(), optimizer.state_dict())
        assert_same_state(other.state_dict(), model.state_dict())

    @EACH_HALF
    def test_a_model_made_float32_has_the_masters_values(self, half):
        (model, optimizer), by_hand = wrapped(SGD, half), ByHand(network(half), SGD)
        train(model, optimizer, 0, 1)
        by_hand.train(0, 1)
        model.float()
        with torch.no_grad():
            model[0].bias[0] = 0.5
            by_hand.masters[1][0] = 0.5
        saved = optimizer.master_state_dict(model)
        for found, expected in zip(saved.values(), by_hand.masters, strict=True):
            assert_same_bits(found, expected)
        train(model, optimizer, 2)
        assert_same_bits(model[0].weight, next(optimizer.master_params()))

    def test_a_model_made_the_other_half_type_keeps_the_masters(self):
        model, optimizer = wrapped()
        train(model, optimizer, 0, 1)
        before = [master.detach().clone() for master in optimizer.master_params()]
        model[0].half()
        with torch.no_grad():
            model[0].bias[0] = before[1][0] = 0.25
        assert_same_state(list(optimizer.master_params()), list(before))
        train(model, optimizer, 2)
        assert_same_bits(model[0].weight, next(optimizer.master_params()).half())

    def test_master_state_dict_has_the_models_names_and_float32_weights(self):
        model, optimizer = wrapped()
        train(model, optimizer, 0, 1)
        saved = optimizer.master_state_dict(model)
        assert list(saved) == list(model.state_dict())
        precise = network(torch.float32)
        precise.load_state_dict(saved)
        assert_same_state(list(precise.parameters()), list(optimizer.master_params()))
        assert saved["2.weight"].data_ptr() == model[2].weight.data_ptr()  # without a master, it is left as it is

    def test_master_state_dict_has_one_copy_of_a_tied_weight(self):
        model, optimizer = wrapped()
        saved = optimizer.master_state_dict(nn.ModuleList([model[0], model[0]]))
        assert saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr() != model[0].weight.data_ptr()


class Lookahead:
    """As in "Lookahead Optimizer: k steps forward, 1 step back" (Zhang et al., 2019), the way it is mostly wrapped."""

    def __init__(self, optimizer: Any, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.state: dict[Tensor, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                self.state.setdefault(each, {"slow": each.detach().clone()})
        result = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for each in group["params"]:
                    slow = self.state[each]["slow"]
                    slow.add_(each - slow, alpha=self.alpha)
                    each.copy_(slow)
        return result


class TestComposition:
    def test_a_wrapped_lookahead_steps_the_masters(self):
        model, by_hand = network(), ByHand(network(), lambda masters: Lookahead(SGD(masters)))
        optimizer = MixedPrecision(Lookahead(SGD(model.parameters())))
        train(model, optimizer, *range(5))
        by_hand.train(*range(5))
        assert_same_state(list(optimizer.master_params()), by_hand.masters)

    def test_a_lookahead_around_it_writes_to_the_masters(self):
        model, optimizer = wrapped()
        outer = Lookahead(optimizer)
        train(model, outer, *range(4))
        for master, parameter in zip(optimizer.master_params(), model.parameters(), strict=True):
            assert_same_bits(master.to(parameter.dtype), parameter)

    @pytest.mark.parametrize("inside", [False, True])
    def test_larc_inside_or_outside_trains(self, inside):
        from ampatch.apex.parallel.LARC import LARC

        model = network()
        made = SGD(model.parameters())
        optimizer = MixedPrecision(LARC(made)) if inside else LARC(MixedPrecision(made))
        before = loss_of(model)
        train(model, optimizer, *[0] * 5)
        assert loss_of(model) < before

    @pytest.mark.parametrize("between", [False, True])
    def test_wrapping_twice_is_an_error(self, between):
        once = MixedPrecision(SGD(network().parameters()))
        with pytest.raises(OptionError, match="has masters of its own already, by a MixedPrecision"):
            MixedPrecision(Lookahead(once) if between else once)

    @EACH_HALF
    def test_masters_of_both_o2_and_the_wrapper_are_an_error(self, half):
        model = network(torch.float32)
        optimizer = MixedPrecision(SGD(model.parameters()))
        for handed_in in (optimizer, Lookahead(optimizer)):
            with pytest.raises(OptionError, match=r"has masters of its own, by a MixedPrecision.*master_weights=False"):
                amp.initialize(model, handed_in, opt_level="O2", half_dtype=half, verbosity=0)
        inside = SGD(model.parameters())
        amp.initialize(model, inside, opt_level="O2", half_dtype=half, verbosity=0)
        with pytest.raises(UsageError, match=r"amp\.initialize gives this SGD float32 masters"):
            MixedPrecision(inside)

    @EACH_HALF
    def test_o3_trains_with_the_wrappers_masters(self, half):
        (model, optimizer), by_hand = wrapped(SGD, torch.float32), ByHand(network(torch.float32).to(half), SGD)
        amp.initialize(model, optimizer, opt_level="O3", half_dtype=half, verbosity=0)
        for index in range(3):
            optimizer.zero_grad()
            backward(model(torch.ones(2, 4)).float().square().mean() * (index + 1), optimizer)
            optimizer.step()
            by_hand.step(by_hand.model(torch.ones(2, 4).to(half)).float().square().mean() * (index + 1))
        assert_same_state(list(optimizer.master_params()), by_hand.masters)


class Stateless:
    param_groups: Any = []  # noqa: RUF012

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: nn.Linear(1, 1), "found Linear as an optimizer"),
            (lambda: None, "found NoneType as an optimizer"),
            (Stateless, "this Stateless has no mapping `state`"),
        ],
    )
    def test_what_is_no_optimizer_cannot_be_wrapped(self, make, message):
        with pytest.raises(OptionError, match=message):
            MixedPrecision(make())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": torch.float16}, "dtype is torch.float16"),
            ({"dtype": "int"}, "dtype is 'int'"),
            ({"masters_from": [torch.ones(1)]}, "masters_from has 1 tensors, and the optimizer 2 parameters"),
            (
                {"masters_from": [torch.ones(1), 2]},
                r"torch.float32 of shape \(1,\) for parameter 0, whose shape is \(3, 2",
            ),
            ({"masters_from": 5}, "masters_from is of type int"),
            ({"masters_from": {"weight": torch.ones(3, 2)}}, "masters_from is a mapping, and this SGD has no names"),
        ],
        ids=lambda value: "" if isinstance(value, str) else "-".join(value),
    )
    def test_options_that_do_not_fit_are_errors_and_change_nothing(self, options, message):
        model = nn.Linear(2, 3).bfloat16()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(OptionError, match=message):
            MixedPrecision(SGD(model.parameters()), **options)
        assert_same_state(model.state_dict(), before)

    def test_names_and_tensors_that_are_not_there_are_errors(self):
        model = nn.Linear(2, 3).bfloat16()
        with pytest.raises(OptionError, match="masters_from lacks 'bias'"):
            MixedPrecision(SGD(model.named_parameters()), masters_from={"weight": model.weight})
        optimizer = MixedPrecision(SGD(model.parameters()), dtype="float")
        with pytest.raises(OptionError, match=r"found a tensor of shape \(1,\) that this SGD does not update"):
            optimizer.master_of(torch.ones(1))
