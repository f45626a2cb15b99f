"""At O2 and O5 one parameter is one object: in the model, in the optimizer's groups, its state and its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import backward
from torch import Tensor, nn

import ampatch
from ampatch import amp
from ampatch.apex.fp16_utils import FP16_Optimizer
from ampatch.errors import UsageError
from ampatch.weights.exchange import exchange

pytestmark = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)


class Training:
    """A model of half weights, and a step of the optimizer around its masters, by one of three ways."""

    def __init__(self, way: str, half: torch.dtype, make: Callable[..., Any], **options: Any) -> None:
        torch.manual_seed(0)
        self.way, self.model = way, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        if way != "initialize":
            self.model.to(half)
        self.inner = self.optimizer = make(self.model.parameters(), **options)
        if way == "initialize":
            amp.initialize(self.model, self.optimizer, opt_level="O2", half_dtype=half, loss_scale=1, verbosity=0)
        else:
            wrappers = {"MixedPrecision": ampatch.MixedPrecision, "FP16_Optimizer": FP16_Optimizer}
            self.optimizer = wrappers[way](self.inner)

    def step(self, seed: int = 1) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        loss = self.model(inputs.to(self.model[0].weight.dtype)).float().square().mean()
        if self.way == "initialize":
            backward(loss, self.optimizer)
        elif self.way == "FP16_Optimizer":
            self.optimizer.backward(loss)
        else:
            loss.backward()
        self.optimizer.step()

    @property
    def masters(self) -> list[Tensor]:
        if self.way == "FP16_Optimizer":
            return self.optimizer.fp32_from_fp16_groups[0]
        return list(amp.master_params(self.optimizer) if self.way == "initialize" else self.optimizer.master_params())

    def values(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]

    def dtypes(self) -> set[torch.dtype]:
        return {parameter.dtype for parameter in self.model.parameters()}


def initialized(half: torch.dtype, make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> Training:
    return Training("initialize", half, make, **(options if make is torch.optim.AdamW else {"lr": 0.1, **options}))


WAYS = pytest.mark.parametrize("way", ["initialize", "MixedPrecision", "FP16_Optimizer"])


class Scaled(torch.optim.SGD):
    """Reads an attribute of each parameter, from its groups or from a list of its own."""

    def __init__(self, parameters: Any, lr: float, own_list: bool = False) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, lr=lr)
        self.own_list = own_list

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.mine if self.own_list else self.param_groups[0]["params"]:
            assert parameter.dtype is parameter.grad.dtype is torch.float32
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] * getattr(parameter, "lr_scale", 1.0))


@WAYS
class TestParameters:
    def test_groups_and_state_have_the_models_parameters(self, way, half):
        training = Training(way, half, torch.optim.AdamW)
        for _ in range(2):
            training.step()
            held = training.optimizer.param_groups[0]["params"]
            assert list(map(id, held)) == list(map(id, training.model.parameters()))
            assert training.dtypes() == {half}
            for parameter in held:
                assert training.optimizer.state[parameter]["exp_avg"].dtype is torch.float32

    @pytest.mark.parametrize("own_list", [False, True])
    def test_a_step_reads_attributes_of_parameters_set_later(self, own_list, way, half):
        training = Training(way, half, Scaled, lr=0.5, own_list=own_list)
        frozen, other = training.model[0].weight, training.model[2].weight
        frozen.lr_scale = 0.0
        before = frozen.detach().clone(), other.detach().clone()
        training.step()
        assert_same_bits(frozen.detach(), before[0])
        assert not torch.equal(other, before[1])

    def test_state_may_be_read_before_the_first_step(self, way, half):
        training = Training(way, half, torch.optim.AdamW)
        state = training.optimizer.state[training.model[0].weight]
        assert {name for name in state if name != "master"} == set()
        training.step()
        assert len(training.optimizer.state_dict()) > 0

    def test_momentum_can_be_reset_by_parameter(self, way, half):
        """As ReLoRA and pruning do: the next step is that of an optimizer that has just begun."""
        found = []
        for reset in (lambda state: state["momentum_buffer"].zero_(), lambda state: state.pop("momentum_buffer")):
            training = Training(way, half, torch.optim.SGD, lr=0.1, momentum=0.9)
            training.step(seed=1)
            for parameter in training.model.parameters():
                reset(training.optimizer.state[parameter])
            training.step(seed=2)
            found.append(training.values())
            amp.deinitialize()
        assert_same_state(*found)

    def test_hooks_and_memory_of_a_parameter_stay(self, way, half):
        training = Training(way, half, torch.optim.SGD, lr=0.1)
        weight, seen = training.model[0].weight, []
        weight.register_hook(lambda grad: seen.append(grad.dtype))
        weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor is weight))
        address = weight.data_ptr()
        for seed in (1, 2):
            training.step(seed)
        assert seen == [half, True] * 2
        assert weight.data_ptr() == address

    def test_an_error_in_the_step_leaves_half_weights(self, way, half):
        class Fails(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                raise ZeroDivisionError

        training = Training(way, half, Fails, lr=0.1)
        with pytest.raises(ZeroDivisionError):
            training.step()
        assert training.dtypes() == {half}
        assert {each.dtype for each in training.masters} == {torch.float32}


class ScheduleFree(torch.optim.SGD):
    """Changes its parameters in a method of its own, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(1 + 2**-14)


class TestMethodsOfTheOptimizer:
    def test_methods_of_an_optimizer_change_masters(self, half):
        training = initialized(half, ScheduleFree)
        before = training.values()
        training.optimizer.eval()
        changed = [was * (1 + 2**-14) for was in before]
        assert_same_state(training.masters, changed)
        assert_same_state(list(training.model.parameters()), [each.to(half) for each in changed])

    def test_methods_may_be_called_between_forward_and_backward(self, half):
        class Asked(torch.optim.SGD):
            def rate(self) -> float:
                return self.param_groups[0]["lr"]

        training = initialized(half, Asked)
        for _ in range(2):
            loss = training.model(torch.ones(2, 4)).square().mean()
            assert training.optimizer.rate() == 0.1
            backward(loss, training.optimizer)
        training.optimizer.step()

    def test_a_method_that_runs_the_backward_pass_is_refused(self, half):
        class Fused(torch.optim.SGD):
            """Updates weights within the backward pass, as LOMO does."""

            def fused_backward(self, loss: Tensor) -> None:
                loss.backward()

            def fused_step(self, model: nn.Module) -> None:
                model(torch.ones(2, 4)).square().mean().backward()

        training = initialized(half, Fused)
        before = training.values()
        loss = training.model(torch.ones(2, 4)).square().mean()
        with pytest.raises(UsageError, match="a method of this Fused runs a backward pass"):
            training.optimizer.fused_backward(loss)
        assert all(each.dtype is half for each in training.model.parameters())
        training.optimizer.fused_step(training.model)  # a forward of its own computes with masters
        assert_same_state(training.masters, before)
        training.step()

    def test_a_step_sees_whether_a_parameter_is_frozen(self, half):
        class Decaying(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    if parameter.requires_grad:
                        parameter.mul_(0.5)

        training = initialized(half, Decaying)
        training.model[0].weight.requires_grad_(False)
        before = training.values()
        training.step()
        halved = [torch.equal(each, was * 0.5) for each, was in zip(training.masters, before, strict=True)]
        assert halved == [False, True, True, True]

    def test_a_subclass_changes_masters_after_the_step_of_its_base(self, half):
        """The hooks of torch end with the inner step; what the outer one does then counts as well."""

        class Decaying(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                super().step()
                for parameter in self.param_groups[0]["params"]:
                    assert parameter.dtype is torch.float32
                    parameter.mul_(1 - 2**-14)

        training = initialized(half, Decaying)
        training.optimizer.register_step_post_hook(lambda *_: None)
        training.step()
        amp.deinitialize()
        plain = initialized(half)
        plain.step()
        assert_same_state(list(training.model.parameters()), [each * (1 - 2**-14) for each in plain.values()])


class TestInterruptedSteps:
    def test_deinitialize_within_a_step_gives_float32_back(self, half):
        class Ends(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                super().step()
                amp.deinitialize()

        training = initialized(half, Ends)
        training.step()
        assert training.dtypes() == {torch.float32}


def test_a_master_in_a_group_is_an_error(half):
    training = initialized(half)
    training.optimizer.param_groups[0]["params"] = training.masters
    with pytest.raises(UsageError, match=r"holds a float32 master.*put back the parameter"):
        training.optimizer.step()
    training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
    training.step()


def test_an_exchange_that_fails_leaves_the_other_tensors(half):
    parameters = [nn.Parameter(torch.ones(2, dtype=half)) for _ in range(2)]
    masters = [nn.Parameter(torch.ones(2)), "no tensor"]
    with pytest.raises(RuntimeError):
        exchange(parameters, masters)
    assert [parameters[0].dtype, masters[0].dtype] == [half, torch.float32]
