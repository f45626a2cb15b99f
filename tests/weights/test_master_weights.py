"""Of float32 masters at O2: made, stepped, cleared, saved, loaded and given back.

The reference is what `Reference` does by hand: a half model beside float32 parameters that a plain optimizer updates.
Both compute the same numbers in the same order, so that all bits are compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import MOMENTUM, OPTIMIZERS, SGD, Larc
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.native import extension_kernels, torch_kernels

SCALE = 2.0**8
OVERFLOW = 1e38

IMPLEMENTATIONS = {
    **OPTIMIZERS,
    "Adam-foreach": functools.partial(torch.optim.Adam, foreach=True),
    "SGD-momentum-foreach": functools.partial(MOMENTUM, foreach=True),
    "Adagrad-foreach": functools.partial(torch.optim.Adagrad, foreach=True),
    "Adadelta-foreach": functools.partial(torch.optim.Adadelta, foreach=True),
    "Adamax-foreach": functools.partial(torch.optim.Adamax, foreach=True),
    "ASGD-foreach": functools.partial(torch.optim.ASGD, foreach=True),
    "NAdam-foreach": functools.partial(torch.optim.NAdam, foreach=True),
    "RAdam-foreach": functools.partial(torch.optim.RAdam, foreach=True),
    "RMSprop-foreach": functools.partial(torch.optim.RMSprop, foreach=True),
    "Rprop-foreach": functools.partial(torch.optim.Rprop, foreach=True),
    "Adafactor-foreach": functools.partial(torch.optim.Adafactor, foreach=True),
}


class OwnWay(torch.optim.SGD):
    """Moves its parameters, and notes things in state and group, before it calls its closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        for group in self.param_groups:
            group["lr"] *= 0.5
            group["moved"] = True
            for parameter in group["params"]:
                parameter.mul_(0.5)
                self.state[parameter]["half"] = parameter.clone()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def zeroing(weight: Tensor) -> Callable[..., None]:
    """A step hook that zeroes a weight."""

    def zero(*_: object) -> None:
        with torch.no_grad():
            weight.zero_()

    return zero


def network(seed: int = 0) -> nn.Sequential:
    """Matrices only, as Muon wants them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def batch(index: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, index: int) -> Tensor:
    return model(batch(index)).float().square().mean()


def initialize(model: Any, optimizer: Any = None, **options: Any) -> None:
    options = {"opt_level": "O2", "half_dtype": torch.float16, "loss_scale": "dynamic", "init_scale": SCALE, **options}
    amp.initialize(model, optimizer, verbosity=0, **options)


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def masters(optimizer: Any) -> list[Tensor]:
    return list(amp.master_params(optimizer))


class Reference:
    """The same by hand."""

    def __init__(self, model: nn.Module, half_dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        self.model = copy.deepcopy(model).to(half_dtype)
        self.optimizer = make(self.masters)

    def backward(self, index: int, factor: float = 1.0) -> Tensor:
        """Adds the gradients of a loss to the masters'."""
        self.model.zero_grad()
        half_dtype = next(self.model.parameters()).dtype
        loss = self.model(batch(index).to(half_dtype)).float().square().mean()
        (loss * factor * SCALE).backward()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            new = parameter.grad.float() / SCALE
            master.grad = new if master.grad is None else master.grad + new
        return loss

    def write(self) -> None:
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        if closure is None:
            self.optimizer.step()
        else:
            self.optimizer.step(closure)
        self.write()
        self.optimizer.zero_grad()

    def assert_is(self, model: nn.Module, optimizer: Any) -> None:
        for mine, theirs in [(self.masters, masters(optimizer)), (self.model.parameters(), model.parameters())]:
            for wanted, found in zip(mine, theirs, strict=True):
                assert_same_bits(found, wanted)


@pytest.fixture(params=HALF_DTYPES, ids=dtype_name)
def half_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


class TestTraining:
    @pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
    @pytest.mark.covering(1)
    def test_is_what_it_is_by_hand_with_every_optimizer_and_a_skipped_step_is_as_if_it_had_not_been(
        self, make, half_dtype
    ):
        for overflow_at in (0, 2):
            model = network()
            reference, optimizer = Reference(model, half_dtype, make), make(model.parameters())
            initialize(model, optimizer, half_dtype=half_dtype)
            for index in range(4):
                if index == overflow_at:
                    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), list(model.parameters())])
                    backward(loss_of(model, index) * OVERFLOW, optimizer)
                    optimizer.step()
                    assert amp.step_was_skipped(optimizer)
                    after = [model.state_dict(), optimizer.state_dict(), list(model.parameters())]
                    assert_same_state(after, before)
                    amp.load_state_dict({"loss_scaler0": {"loss_scale": SCALE, "unskipped": 0}})
                backward(loss_of(model, index), optimizer)
                optimizer.step()
                reference.backward(index)
                reference.step()
                reference.assert_is(model, optimizer)
            assert_same_state(optimizer.state_dict(), reference.optimizer.state_dict())
            amp.deinitialize()

    @pytest.mark.parametrize("delay_unscale", [False, True], ids=["unscaled-each-time", "unscaled-at-the-end"])
    def test_gradients_add_up_over_micro_batches(self, delay_unscale, half_dtype):
        model = network()
        reference, optimizer = Reference(model, half_dtype, SGD), SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        for index in range(3):
            backward(loss_of(model, index), optimizer, delay_unscale=delay_unscale and index < 2)
            reference.backward(index)
        for master, wanted in zip(masters(optimizer), reference.masters, strict=True):
            tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[half_dtype] if delay_unscale else 0
            torch.testing.assert_close(master.grad, wanted.grad, rtol=tolerance, atol=tolerance / 100)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)

    def test_static_scale_of_one_needs_no_block(self, half_dtype):
        model, other = network(), network()
        optimizer, plain = MOMENTUM(model.parameters()), MOMENTUM(other.parameters())
        initialize([model, other], [optimizer, plain], half_dtype=half_dtype, loss_scale=1.0)
        for index in range(3):
            backward(loss_of(model, index), optimizer)
            loss_of(other, index).backward()
            optimizer.step()
            plain.step()
            for left, right in zip(masters(optimizer), masters(plain), strict=True):
                assert_same_bits(left, right)
        assert not torch.equal(masters(optimizer)[0], network()[0].weight)

    def test_parameters_of_several_groups_keep_their_options(self, half_dtype):
        def make(parameters: Any) -> torch.optim.Optimizer:
            first, second = parameters
            groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "lr": 0.5}]
            return torch.optim.AdamW(groups, lr=0.01)

        model = network()
        reference, optimizer = Reference(model, half_dtype, make), make(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        for index in range(3):
            backward(loss_of(model, index), optimizer)
            optimizer.step()
            reference.backward(index)
            reference.step()
        reference.assert_is(model, optimizer)

    def test_clipping_between_block_and_step(self, half_dtype):
        model = network()
        reference, optimizer = Reference(model, half_dtype, SGD), SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        backward(loss_of(model, 0), optimizer)
        reference.backward(0)
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
        assert_same_bits(norm, nn.utils.clip_grad_norm_(reference.masters, 0.01))
        optimizer.step()
        reference.step()
        reference.assert_is(model, optimizer)

    def test_small_updates_add_up_that_half_weights_would_lose(self, half_dtype):
        weight = nn.Parameter(torch.ones(1))
        model, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=1.0)
        initialize(model, optimizer, half_dtype=half_dtype)
        for _ in range(100):
            backward(weight.float().sum() * 1e-4, optimizer)
            optimizer.step()
        assert masters(optimizer)[0].item() == pytest.approx(0.99, abs=1e-3)
        assert_same_bits(weight.detach(), masters(optimizer)[0].detach().to(half_dtype))

    def test_sparse_gradients_are_unscaled_and_checked(self, half_dtype):
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(list(model.parameters()))
        master = nn.Parameter(model.weight.detach().clone())
        plain = torch.optim.SparseAdam([master])
        initialize(model, optimizer, half_dtype=half_dtype)
        for index in range(3):
            if index == 1:
                before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                backward(model(torch.tensor([1, 1, 4])).square().sum() * OVERFLOW, optimizer)
                optimizer.step()
                assert amp.step_was_skipped(optimizer)
                assert_same_state([model.state_dict(), optimizer.state_dict()], before)
            indices = torch.tensor([index, index, 4])
            for _ in range(2):
                backward(model(indices).square().sum(), optimizer)
            assert masters(optimizer)[0].grad.is_sparse
            twin = nn.Embedding(5, 3, sparse=True, _weight=master.detach().to(half_dtype))
            (twin(indices).float().square().sum() * SCALE).backward()
            master.grad = twin.weight.grad.coalesce().float() * 2 / SCALE
            optimizer.step()
            plain.step()
            assert_same_bits(masters(optimizer)[0].detach(), master.detach())

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    def test_gradients_with_a_graph_can_be_differentiated_again(self, half_dtype):
        weight = nn.Parameter(torch.tensor([0.5, 2.0]))
        model, optimizer = nn.ParameterList([weight]), SGD([weight])
        initialize(model, optimizer, half_dtype=half_dtype)
        with amp.scale_loss(weight.float().pow(3).sum(), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        assert masters(optimizer)[0].grad.tolist() == [0.75, 12]
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        assert second.tolist() == [3, 12]
        weight.grad = None

    def test_retained_graph_and_two_passes_in_a_block(self, half_dtype):
        model = network()
        reference, optimizer = Reference(model, half_dtype, SGD), SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        loss = loss_of(model, 0)
        for _ in range(2):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
            reference.backward(0)
        optimizer.step()
        reference.step()
        reference.assert_is(model, optimizer)

    def test_half_weights_are_written_by_one_multi_tensor_call_after_a_step(self, half_dtype, monkeypatch):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        backward(loss_of(model, 0), optimizer)
        written: list[int] = []
        for operators in filter(None, (torch_kernels, extension_kernels)):

            def copy_to_half(masters, halves, original=operators.copy_to_half):
                written.append(len(masters))
                return original(masters, halves)

            monkeypatch.setattr(operators, "copy_to_half", copy_to_half)
        optimizer.step()
        assert written == [2]


class TestMasters:
    def test_have_the_float32_bits_from_before_and_belong_to_every_half_parameter(self, half_dtype):
        model = network()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = SGD(model.parameters())
        parameters = list(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        for parameter, master, wanted in zip(parameters, masters(optimizer), before, strict=True):
            assert parameter.dtype is half_dtype
            assert_same_bits(master.detach(), wanted)
            assert_same_bits(parameter.detach(), wanted.to(half_dtype))
        assert [id(one) for one in model.parameters()] == [id(one) for one in parameters]
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, parameters))

    def test_frozen_parameter_has_none_until_it_is_unfrozen(self):
        model = network()
        model[0].weight.requires_grad_(False)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        assert masters(optimizer)[0] is model[0].weight
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        frozen = model[0].weight.detach().clone()
        model[0].weight.requires_grad_(True)
        backward(loss_of(model, 0), optimizer)
        assert masters(optimizer)[0].dtype is torch.float32
        optimizer.step()
        assert not torch.equal(model[0].weight, frozen)

    def test_parameter_without_gradient_is_skipped(self):
        model, unused = network(), nn.Linear(2, 2)
        optimizer = torch.optim.AdamW([*model.parameters(), *unused.parameters()], weight_decay=0.5)
        initialize([model, unused], optimizer)
        before = copy.deepcopy(unused.state_dict())
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert_same_state(unused.state_dict(), before)
        assert len(optimizer.state) == 2

    def test_double_parameters_and_integers_are_left_alone(self):
        model = nn.Module()
        model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        model.narrow = nn.Parameter(torch.ones(2))
        model.register_buffer("count", torch.tensor(3))
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        assert [parameter.dtype for parameter in model.parameters()] == [torch.float64, torch.float16]
        assert masters(optimizer)[0] is model.wide
        assert model.count.dtype is torch.int64

    def test_half_model_gets_masters_too_and_is_half_again_afterwards(self, half_dtype):
        model = network().to(half_dtype)
        optimizer = MOMENTUM(model.parameters())
        loss_of_half = model(batch(0).to(half_dtype)).square().sum()
        loss_of_half.backward()
        optimizer.step()
        initialize(model, optimizer, half_dtype=half_dtype)
        assert {master.dtype for master in masters(optimizer)} == {torch.float32}
        assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        amp.deinitialize()
        assert {parameter.dtype for parameter in model.parameters()} == {half_dtype}
        assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {half_dtype}

    def test_state_and_gradients_from_before_are_carried_over(self, half_dtype):
        model, reference = network(), network()
        optimizer, plain = torch.optim.Adam(model.parameters()), torch.optim.Adam(reference.parameters())
        for module, stepping in [(model, optimizer), (reference, plain)]:
            for index in range(2):
                stepping.zero_grad()
                loss_of(module, index).backward()
                stepping.step()
            stepping.zero_grad()
            loss_of(module, 2).backward()
        initialize(model, optimizer, half_dtype=half_dtype)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        for master, wanted in zip(masters(optimizer), reference.parameters(), strict=True):
            assert_same_bits(master.grad, wanted.grad)
        optimizer.step()
        plain.step()
        for master, wanted in zip(masters(optimizer), reference.parameters(), strict=True):
            assert_same_bits(master.detach(), wanted.detach())

    @pytest.mark.parametrize(("level", "expected"), [("O2", torch.float32), ("O3", torch.float16)])
    def test_state_from_before_in_other_types_stays_in_them(self, level, expected):
        """As the codes of an optimizer that keeps its state in 8 bits, and sums in double."""
        model = network()
        optimizer = MOMENTUM(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()
        others = {"codes": torch.tensor([0, 255], dtype=torch.uint8), "sums": torch.ones(2, dtype=torch.float64)}
        for state in optimizer.state.values():
            state.update({**others, "largest": torch.tensor(1 + 2.0**-20)})
        initialize(model, optimizer, opt_level=level)
        for state in optimizer.state.values():
            assert state["momentum_buffer"].dtype is expected
            assert {name: state[name] for name in others} == others
            assert state["largest"].item() == 1 + 2.0**-20

    def test_marks_on_parameters_are_on_masters(self):
        model = network()
        model[0].weight.no_weight_decay = True
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        assert masters(optimizer)[0].no_weight_decay is True
        model[0].weight.lr_scale = 0.5
        assert optimizer.param_groups[0]["params"][0].lr_scale == masters(optimizer)[0].lr_scale == 0.5

    def test_shared_parameter_has_one(self, half_dtype):
        model = network()
        model.append(nn.Tanh()).append(nn.Linear(3, 6, bias=False))
        model.tied = nn.Linear(6, 3, bias=False)
        model.tied.weight = model[2].weight
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        assert model.tied.weight is model[2].weight
        assert model.tied.weight.dtype is half_dtype
        assert len(masters(optimizer)) == 3

    def test_master_weights_can_be_left_out_at_o2_and_asked_for_at_o3(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, master_weights=False)
        assert masters(optimizer) == list(model.parameters())
        amp.deinitialize()
        initialize(model, optimizer, opt_level="O3", master_weights=True)
        assert {master.dtype for master in masters(optimizer)} == {torch.float32}


class TestAddedGroups:
    @pytest.mark.parametrize("when", ["before-backward", "after-backward", "after-step", "after-skipped-step"])
    def test_have_masters_whenever_they_are_added(self, when):
        model = network()
        optimizer = MOMENTUM(model[0].parameters())
        initialize(model, optimizer)
        if when != "before-backward":
            backward(loss_of(model, 0) * (OVERFLOW if "skipped" in when else 1), optimizer)
        if "step" in when:
            optimizer.step()
            model.zero_grad()
        else:
            model[2].weight.grad = None
        optimizer.add_param_group({"params": (parameter for parameter in model[2].parameters()), "lr": 0.5})
        assert [master.dtype for master in masters(optimizer)] == [torch.float32] * 2
        if when != "after-backward":
            backward(loss_of(model, 1), optimizer)
        before = [master.detach().clone() for master in masters(optimizer)]
        grads = [None if master.grad is None else master.grad.clone() for master in masters(optimizer)]
        optimizer.step()
        assert grads[0] is not None
        assert (grads[1] is None) == (when == "after-backward")
        if grads[1] is not None:
            torch.testing.assert_close(masters(optimizer)[1], before[1] - 0.5 * grads[1])

    def test_same_parameter_again_is_refused_and_nothing_was_added(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        with pytest.raises(ValueError, match="more than one parameter group"):  # torch's own
            optimizer.add_param_group({"params": [model[0].weight]})
        with pytest.raises(UsageError, match="holds a float32 master"):
            optimizer.add_param_group({"params": masters(optimizer)[:1]})
        assert len(optimizer.param_groups) == 1
        backward(loss_of(model, 0), optimizer)
        optimizer.step()

    def test_parameter_of_another_optimizer_is_refused_and_nothing_was_added(self):
        model = network()
        optimizers = [SGD(model[0].parameters()), SGD(model[2].parameters())]
        initialize(model, optimizers)
        with pytest.raises(UsageError, match=r"\(6, 4\) is in two optimizers"):
            optimizers[1].add_param_group({"params": [model[0].weight]})
        assert len(optimizers[1].param_groups) == 1
        backward(loss_of(model, 0), optimizers)
        for optimizer in optimizers:
            optimizer.step()


CLEARINGS: dict[str, Callable[[nn.Module, Any], object]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer-zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, _: model.zero_grad(),
    "model-zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "none": lambda model, _: [setattr(parameter, "grad", None) for parameter in model.parameters()],
    "zero_": lambda model, _: [
        parameter.grad.zero_() for parameter in model.parameters() if parameter.grad is not None
    ],
}


ZEROINGS = {
    "counted": lambda grad: grad.zero_(),
    "data": lambda grad: grad.data.zero_(),
    "other data": lambda grad: setattr(grad, "data", torch.zeros_like(grad)),
    "numpy": lambda grad: grad.numpy().fill(0),
    "storage": lambda grad: grad.untyped_storage().fill_(0),
}


class TestClearing:
    @pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
    @pytest.mark.parametrize("delay_unscale", [False, True], ids=["unscaled", "scaled"])
    def test_between_passes_drops_what_was_there(self, clear, delay_unscale):
        model = network()
        reference, optimizer = Reference(model, torch.float16, SGD), SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer, delay_unscale=delay_unscale)
        clear(model, optimizer)
        backward(loss_of(model, 1), optimizer)
        reference.backward(1)
        for master, wanted in zip(masters(optimizer), reference.masters, strict=True):
            assert_same_bits(master.grad, wanted.grad)
        optimizer.step()
        reference.step()
        reference.assert_is(model, optimizer)

    @pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
    def test_before_the_step_leaves_nothing_to_do(self, clear):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        backward(loss_of(model, 0), optimizer)
        clear(model, optimizer)
        assert not any(bool(master.grad.any()) for master in masters(optimizer) if master.grad is not None)
        optimizer.step()
        assert_same_state(model.state_dict(), before)

    @pytest.mark.parametrize("overflows", [False, True])
    def test_a_step_clears_skipped_or_not(self, overflows):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0) * (OVERFLOW if overflows else 1), optimizer)
        assert masters(optimizer)[0].grad is not None
        optimizer.step()
        assert [parameter.grad for parameter in (*masters(optimizer), *model.parameters())] == [None] * 4

    @pytest.mark.parametrize("clear", ZEROINGS.values(), ids=ZEROINGS)
    def test_what_a_delayed_block_has_left_drops_the_sums_of_earlier_ones(self, clear):
        model = network()
        reference, optimizer = Reference(model, torch.float16, SGD), SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        for parameter in model.parameters():
            clear(parameter.grad)
        backward(loss_of(model, 1), optimizer)
        reference.backward(1)
        for master, wanted in zip(masters(optimizer), reference.masters, strict=True):
            assert_same_bits(master.grad, wanted.grad)

    @pytest.mark.parametrize("edit", [lambda grad: grad.mul_(0.5), lambda grad: grad.data.mul_(0.5)])
    def test_what_a_delayed_block_has_left_in_part_is_warned_of(self, edit):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        edit(next(model.parameters()).grad)
        backward(loss_of(model, 1), optimizer)
        with pytest.warns(AmpWarning, match="had left scaled were changed before the next block"):
            optimizer.step()

    def test_inside_a_block_before_backward(self):
        model = network()
        reference, optimizer = Reference(model, torch.float16, SGD), SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
            optimizer.zero_grad()
            scaled_loss.backward()
        reference.backward(1)
        assert_same_bits(masters(optimizer)[0].grad, reference.masters[0].grad)

    def test_block_that_raises_leaves_no_gradients(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)

        def fail_after_backward() -> None:
            with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
                scaled_loss.backward()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_after_backward()
        assert [parameter.grad for parameter in (*masters(optimizer), *model.parameters())] == [None] * 4


class TestGradientsOfTheModel:
    def test_show_the_masters_in_half(self, half_dtype):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        for index in range(2):
            backward(loss_of(model, index), optimizer)
            for parameter, master in zip(model.parameters(), masters(optimizer), strict=True):
                assert_same_bits(parameter.grad, master.grad.to(half_dtype))

    def test_are_scaled_inside_the_block_and_what_runs_there_counts(self, half_dtype):
        model = network()
        reference, optimizer = Reference(model, half_dtype, SGD), SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            for parameter in model.parameters():  # as an all-reduce over two ranks does
                parameter.grad.mul_(2)
        reference.backward(0)
        for master, wanted in zip(masters(optimizer), reference.masters, strict=True):
            assert_same_bits(master.grad, 2 * wanted.grad)

    def test_clipping_them_takes_effect_in_half(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        norm = nn.utils.get_total_norm([master.grad for master in amp.master_params(optimizer)])
        assert norm.item() == pytest.approx(1e-2, rel=1e-2)

    def test_backward_without_a_block_after_one_with_adds_up(self):
        model = network()
        reference, optimizer = Reference(model, torch.float16, SGD), SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        loss_of(model, 1).backward()
        reference.backward(0)
        reference.backward(1)
        for master, wanted in zip(masters(optimizer), reference.masters, strict=True):
            torch.testing.assert_close(master.grad, wanted.grad, rtol=1e-2, atol=1e-4)

    def test_backward_without_a_block_before_one_with_adds_up(self):
        model = network()
        reference, optimizer = Reference(model, torch.float16, SGD), SGD(model.parameters())
        initialize(model, optimizer)
        loss_of(model, 0).backward()
        backward(loss_of(model, 1), optimizer)
        reference.backward(0)
        reference.backward(1)
        for master, wanted in zip(masters(optimizer), reference.masters, strict=True):
            torch.testing.assert_close(master.grad, wanted.grad, rtol=1e-2, atol=1e-4)


class TestWritingWeights:
    """What somebody writes into a model's weights, or into a master, is not lost at the next step."""

    def test_into_half_weights_reaches_the_masters_and_no_other_element_is_rounded(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        expected = masters(optimizer)[0].detach().clone()
        expected[0, 1] = 0.25
        with torch.no_grad():
            model[0].weight[0, 1] = 0.25
        optimizer.step()
        assert_same_bits(masters(optimizer)[0].detach(), expected)

    def test_another_tensor_in_data(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model[0].weight.data = torch.full((6, 4), 0.25, dtype=torch.float16)
        optimizer.step()
        assert_same_bits(masters(optimizer)[0].detach(), torch.full((6, 4), 0.25))

    def test_into_masters_reaches_the_half_weights_before_the_next_forward(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                master.clamp_(-0.01, 0.01)
        model(batch(0))
        assert float(model[0].weight.detach().abs().max()) <= 0.0101
        assert float(model.state_dict()["0.weight"].abs().max()) <= 0.01

    def test_into_masters_is_saved(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        with torch.no_grad():
            masters(optimizer)[0].fill_(0.1)
        assert_same_bits(model.state_dict()["0.weight"], torch.full((6, 4), 0.1))

    def test_by_a_forward_that_makes_its_own_weights_float32_is_an_error_with_the_cure(self):
        class Router(nn.Module):  # as that of GPTSAN
            def __init__(self) -> None:
                super().__init__()
                self.classifier = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                self.classifier = self.classifier.to(torch.float32)
                return self.classifier(x.to(torch.float32)).softmax(-1).to(x.dtype)

        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(4, 4), Router(), Router()])

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

        def train(**options: object) -> None:
            model = Experts()
            optimizer = SGD(model.parameters())
            initialize(model, optimizer, **options)
            for _ in range(2):
                with amp.scale_loss(model(batch(0)).square().sum(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()

        with pytest.raises(UsageError, match=r"blocks\.1\.classifier.weight: .* became torch\.float32") as caught:
            train()
        kept = str(caught.value).partition("keep_fp32=")[2].partition(")")[0]
        assert kept == "['blocks.*.classifier']"
        amp.deinitialize()
        train(keep_fp32=["blocks.*.classifier"])

    def test_model_converted_by_somebody_else_is_an_error(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model.float()
        with pytest.raises(UsageError, match=r"became torch\.float32 of shape .* after amp\.initialize"):
            model(batch(0))
        model.half()


#: Ways to write to a weight; torch counts the first only.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "counted": lambda weight: weight.fill_(2),
    "data": lambda weight: weight.data.fill_(2),
    "other data": lambda weight: setattr(weight, "data", torch.full_like(weight, 2)),
    "numpy": lambda weight: weight.detach().numpy().fill(2),
}


class TestStateDict:
    @pytest.mark.parametrize("exchange", [lambda p, data: setattr(p, "data", data), lambda p, data: p.set_(data)])
    def test_taken_before_weights_got_other_data_gives_back_what_they_were(self, exchange):
        model = network()
        initialize(model, SGD(model.parameters()))
        saved = model.state_dict()
        wanted = copy.deepcopy(saved)
        with torch.no_grad():
            for parameter in model.parameters():
                exchange(parameter, torch.full_like(parameter, 0.125))
        loss_of(model, 0)  # a forward has masters follow
        assert_same_state(saved, wanted)
        model.load_state_dict(saved)
        assert_same_state(model.state_dict(), wanted)

    def test_masters_written_to_by_way_of_their_parts_count_for_the_next_forward(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        for master in masters(optimizer):
            master.detach()[1:].data.fill_(0.5)
        loss_of(model, 0)
        for parameter in model.parameters():
            assert bool((parameter[1:] == 0.5).all())

    @pytest.mark.parametrize("part", [lambda data: data, lambda data: data[1:], lambda data: data.view(-1)])
    def test_data_of_a_master_counts_whenever_it_is_written_to_and_by_whom(self, part):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        master = masters(optimizer)[0]
        kept = [part(master.data), part(master.detach().data), part(master.data)]
        for index, data in enumerate(kept * 2):
            backward(loss_of(model, index), optimizer)
            optimizer.step()
            data.fill_(index + 1)
            loss_of(model, index)
            assert bool((model[0].weight[1:] == index + 1).all())
            assert bool((master[1:] == index + 1).all())

    def test_data_of_masters_that_is_only_read_leaves_half_weights_alone(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        loss = loss_of(model, 0)
        norms = [master.data.norm() for master in masters(optimizer)]
        loss_of(model, 0)
        backward(loss, optimizer)  # its graph has the half weights as they were
        assert all(norms)

    def test_masters_that_got_other_data_count_when_that_is_written_to(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        flat = torch.zeros(sum(master.numel() for master in masters(optimizer)))
        start = 0
        for master in masters(optimizer):
            piece = flat[start : start + master.numel()].view_as(master)
            start += master.numel()
            master.data = piece.copy_(master.detach())
        loss_of(model, 0)
        flat.mul_(0).add_(0.25)
        loss_of(model, 0)
        assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())

    def test_is_float32_with_the_masters_bits_for_the_whole_and_for_every_part(self, half_dtype):
        model = nn.Sequential(network(), nn.BatchNorm1d(3))
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        for index in range(2):
            backward(loss_of(model, index), optimizer)
            optimizer.step()
        saved = model.state_dict()
        assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}
        for (name, _), master in zip(model.named_parameters(), masters(optimizer), strict=True):
            assert_same_bits(saved[name], master.detach())
        assert_same_bits(model[0][0].state_dict()["weight"], saved["0.0.weight"])
        assert list(saved) == list(copy.deepcopy(network()).state_dict(prefix="0.")) + [
            f"1.{name}" for name in nn.BatchNorm1d(3).state_dict()
        ]

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_loaded_before_or_after_initialize_sets_both_copies(self, when, half_dtype):
        model, saved = network(), network(seed=1).state_dict()
        optimizer = SGD(model.parameters())
        if when == "before":
            model.load_state_dict(saved)
        initialize(model, optimizer, half_dtype=half_dtype)
        if when == "after":
            assert model.load_state_dict(saved).missing_keys == []
        for parameter, master, wanted in zip(model.parameters(), masters(optimizer), saved.values(), strict=True):
            assert_same_bits(master.detach(), wanted)
            assert_same_bits(parameter.detach(), wanted.to(half_dtype))
        optimizer.step()
        assert_same_state(model.state_dict(), saved)

    def test_of_a_part_is_loaded_into_both_copies(self):
        model, saved = network(), network(seed=1)[2].state_dict()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model[2].load_state_dict(saved)
        assert_same_bits(masters(optimizer)[1].detach(), saved["weight"])
        assert_same_bits(model.state_dict()["2.weight"], saved["weight"])

    def test_of_the_wrong_shape_is_torchs_error_and_the_masters_stay(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**before, "0.weight": torch.ones(2, 2)})
        assert_same_state(model.state_dict(), before)

    def test_assign_raises_before_anything_changed(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match="assign=True"):
            model.load_state_dict(network(seed=1).state_dict(), assign=True)
        assert_same_state(model.state_dict(), before)
        assert model[0].weight.dtype is torch.float16

    def test_outlives_the_optimizer(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        for index in range(3):
            backward(loss_of(model, index), optimizer)
            optimizer.step()
        wanted = [master.detach().clone() for master in masters(optimizer)]
        del optimizer
        gc.collect()
        for value, master in zip(model.state_dict().values(), wanted, strict=True):
            assert_same_bits(value, master)
        another = MOMENTUM(model.parameters())
        initialize(model, another)
        for found, master in zip(masters(another), wanted, strict=True):
            assert_same_bits(found.detach(), master)

    def test_of_a_frozen_parameter_is_its_half_weights_in_float32(self):
        model = network()
        model[0].weight.requires_grad_(False)
        initialize(model, SGD(model.parameters()))
        saved = model.state_dict()
        assert_same_bits(saved["0.weight"], model[0].weight.float())

    def test_of_a_frozen_parameter_that_came_half_is_the_parameter_itself(self, half_dtype):
        model = network().to(half_dtype)
        model[0].weight.requires_grad_(False)
        initialize(model, SGD(model.parameters()), half_dtype=half_dtype)
        saved = model.state_dict()
        assert saved["0.weight"].data_ptr() == model[0].weight.data_ptr()
        assert {value.dtype for name, value in saved.items() if name != "0.weight"} == {torch.float32}

    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
    def test_of_a_frozen_parameter_is_never_out_of_date(self, write):
        model = network().requires_grad_(False)
        initialize(model)
        before = model.state_dict()["0.weight"].clone()
        write(model[0].weight)
        assert_same_bits(model.state_dict()["0.weight"], model[0].weight.float())
        assert not torch.equal(model.state_dict()["0.weight"], before)

    def test_of_running_statistics_in_half_is_what_batch_norm_has_written(self, half_dtype):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        initialize(model, opt_level="O3", half_dtype=half_dtype, cast_buffers=True)
        model(batch(0) + 5)
        wanted = model[1].running_mean.float()
        assert wanted.any()
        assert_same_bits(model.state_dict()["1.running_mean"], wanted)
        model(batch(1) + 5)
        wanted = model[1].running_mean.float()
        amp.deinitialize()
        assert_same_bits(model[1].running_mean, wanted)

    def test_of_buffers_keeps_the_float32_values_they_had_until_they_change(self):
        model = network()
        model.register_buffer("frequencies", torch.tensor([0.1, 0.2, 0.3]))
        initialize(model, SGD(model.parameters()), cast_buffers=True)
        assert model.frequencies.dtype is torch.float16
        assert_same_bits(model.state_dict()["frequencies"], torch.tensor([0.1, 0.2, 0.3]))
        model.frequencies[1] = 5
        saved = model.state_dict()["frequencies"]
        assert_same_bits(saved, torch.tensor([0.1, 5, 0.3]))
        amp.deinitialize()
        assert_same_bits(model.frequencies, torch.tensor([0.1, 5, 0.3]))


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
    )
    def test_of_model_and_optimizer_are_an_ordinary_pair(self, duplicate, half_dtype):
        model = network()
        optimizer = MOMENTUM(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        twin_model, twin = duplicate((model, optimizer))
        assert twin.param_groups[0]["params"] == list(twin_model.parameters())
        assert list(twin.state) == list(twin_model.parameters())
        before = copy.deepcopy(model.state_dict())
        twin_model(batch(0)).sum().backward()
        twin.step()
        assert_same_state(model.state_dict(), before)
        assert not torch.equal(twin_model[0].weight, model[0].weight)
        initialize(twin_model, twin, half_dtype=half_dtype)
        backward(loss_of(twin_model, 0), twin)
        twin.step()
        assert_same_state(model.state_dict(), before)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_of_the_model_casts_by_itself_and_has_no_masters(self, duplicate, half_dtype):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        twin = duplicate(model)
        wanted = twin(batch(0))
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert_same_bits(twin(batch(0)), wanted)
        assert twin.state_dict()["0.weight"].dtype is (torch.float32 if duplicate is copy.deepcopy else half_dtype)
        twin.state_dict()["0.weight"].zero_()  # as an average of weights is written by many
        assert not twin[0].weight.any()
        amp.deinitialize()
        assert twin(batch(0)).dtype is torch.float32

    def test_is_still_the_optimizer_it_was(self):
        model = network()
        optimizer = SGD(model.parameters())
        before = repr(optimizer)
        initialize(model, optimizer)
        assert repr(optimizer) == before
        assert type(optimizer) is torch.optim.SGD


class TestClosure:
    def closure(self, model: nn.Module, optimizer: Any, seen: list[float], factors: Iterator[float]) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            seen.append(loss.item())
            backward(loss * next(factors), optimizer)
            return loss

        return closure

    def test_lbfgs_is_what_it_is_by_hand_and_sees_a_new_loss_each_time(self, half_dtype):
        make = functools.partial(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")
        model = network()
        reference, optimizer = Reference(model, half_dtype, make), make(model.parameters())
        initialize(model, optimizer, half_dtype=half_dtype)
        seen: list[float] = []
        ones = iter(lambda: 1.0, None)

        def by_hand() -> Tensor:
            reference.write()
            reference.optimizer.zero_grad()
            return reference.backward(0)

        for _ in range(2):
            optimizer.step(self.closure(model, optimizer, seen, ones))
            reference.step(by_hand)
            reference.assert_is(model, optimizer)
        assert len(set(seen)) > 4
        assert seen[-1] < seen[0]

    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    @pytest.mark.parametrize("overflow_at", [0, 1, 3])
    @pytest.mark.parametrize("name", ["LBFGS", "SGD", "Adam-fused"])
    @pytest.mark.covering(2)  # what matters to LBFGS is when the overflow comes
    def test_that_overflows_skips_the_step_and_everything_is_as_before(self, name, overflow_at, level):
        make: Any = {"LBFGS": functools.partial(torch.optim.LBFGS, max_iter=6), **OPTIMIZERS}[name]
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer, opt_level=level)
        seen: list[float] = []
        optimizer.step(self.closure(model, optimizer, seen, iter(lambda: 1.0, None)))
        first = len(seen)
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), list(model.parameters())])
        factors = (OVERFLOW if index == overflow_at else 1.0 for index in range(100))
        result = optimizer.step(self.closure(model, optimizer, seen, factors))
        assert isinstance(result, Tensor)
        if name != "LBFGS" and overflow_at > 0:
            assert not amp.step_was_skipped(optimizer)
            return
        assert len(seen) == first + overflow_at + 1
        assert amp.step_was_skipped(optimizer)
        assert amp.skipped_steps(optimizer) == 1
        assert_same_state([model.state_dict(), optimizer.state_dict(), list(model.parameters())], before)
        assert amp.get_loss_scale() == SCALE / 2
        optimizer.step(self.closure(model, optimizer, seen, iter(lambda: 1.0, None)))
        assert not amp.step_was_skipped(optimizer)

    @pytest.mark.slow
    @pytest.mark.parametrize("started", [False, True], ids=["first-step", "later-step"])
    @pytest.mark.parametrize("make", [*IMPLEMENTATIONS.values(), OwnWay], ids=[*IMPLEMENTATIONS, "own-way"])
    @pytest.mark.covering(1)
    def test_that_overflows_changes_nothing_with_every_optimizer(self, make, started):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer)
        if started:
            optimizer.step(self.closure(model, optimizer, [], iter([1.0])))
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), list(model.parameters())])
        optimizer.step(self.closure(model, optimizer, [], iter([OVERFLOW])))
        assert amp.step_was_skipped(optimizer)
        assert_same_state([model.state_dict(), optimizer.state_dict(), list(model.parameters())], before)
        optimizer.step(self.closure(model, optimizer, [], iter([1.0])))
        assert not torch.equal(model.state_dict()["0.weight"], before[0]["0.weight"])


class TestDeinitialize:
    def test_gives_back_float32_weights_from_the_masters(self, half_dtype):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        parameters, attributes = list(model.parameters()), set(vars(optimizer))
        initialize(model, optimizer, half_dtype=half_dtype)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        backward(loss_of(model, 1), optimizer)
        wanted = [(master.detach().clone(), master.grad.clone()) for master in masters(optimizer)]
        state = copy.deepcopy(optimizer.state_dict())
        amp.deinitialize()
        assert optimizer.param_groups[0]["params"] == parameters == list(model.parameters())
        for parameter, (values, grad) in zip(parameters, wanted, strict=True):
            assert_same_bits(parameter.detach(), values)
            assert_same_bits(parameter.grad, grad)
        assert_same_state(optimizer.state_dict(), state)
        assert list(optimizer.state) == parameters
        assert set(vars(optimizer)) == attributes
        for module in model.modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
            assert not any((*hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks))
        optimizer.step()
        assert model(batch(0)).dtype is torch.float32

    def test_and_again_is_exact(self, half_dtype):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        other, plain = copy.deepcopy((model, optimizer))
        for _ in range(2):
            initialize(model, optimizer, half_dtype=half_dtype)
            backward(loss_of(model, 0), optimizer)
            optimizer.step()
            amp.deinitialize()
        initialize(other, plain, half_dtype=half_dtype)
        for _ in range(2):
            backward(loss_of(other, 0), plain)
            plain.step()
        assert_same_state(model.state_dict(), other.state_dict())
        assert_same_state(optimizer.state_dict(), plain.state_dict())

    def test_masters_go_with_model_and_optimizer(self):
        keeper = network()
        initialize(keeper, SGD(keeper.parameters()))
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        gone = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(masters(optimizer)[0])]
        del optimizer, model
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3


class TestBadInput:
    def test_parameter_in_two_optimizers_is_refused_and_nothing_changed(self):
        model = network()
        optimizers = [SGD(model.parameters()), SGD(model[0].parameters())]
        before = copy.deepcopy(model.state_dict())
        attributes = [set(vars(optimizer)) for optimizer in optimizers]
        with pytest.raises(UsageError, match=r"shape \(6, 4\) is in two optimizers.*one of them only"):
            initialize(model, optimizers)
        assert_same_state(model.state_dict(), before)
        assert [set(vars(optimizer)) for optimizer in optimizers] == attributes
        assert optimizers[0].param_groups[0]["params"] == list(model.parameters())
        assert not model._forward_hooks

    def test_wrapper_around_an_adopted_optimizer_is_refused(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        with pytest.raises(UsageError, match=r"is in two optimizers.*hand in the outer one"):
            initialize([], Larc(optimizer))
        with pytest.raises(UsageError, match="masters that belong to another optimizer"):
            initialize([], SGD(masters(optimizer)))

    def test_groups_that_cannot_be_written_to_have_masters(self):
        class Frozen(Larc):
            @property
            def param_groups(self) -> list[dict[str, Any]]:
                return [{**group, "params": tuple(group["params"])} for group in self.optim.param_groups]

        models = network(), network()
        for model, kind in zip(models, (Frozen, Larc), strict=True):
            optimizer = kind(SGD(model.parameters()))
            initialize(model, optimizer)
            backward(loss_of(model, 0), optimizer)
            optimizer.step()
        assert_same_state(models[0].state_dict(), models[1].state_dict())

    def test_wrapper_that_is_no_optimizer_of_torch_has_masters(self):
        model, reference = network(), network()
        wrapper, plain = Larc(MOMENTUM(model.parameters())), Larc(MOMENTUM(reference.parameters()))
        initialize([model, reference], [wrapper, plain])
        for stepping, module in [(wrapper, model), (plain, reference)]:
            backward(loss_of(module, 0), stepping)
            assert stepping.step() == "stepped"
        assert_same_state(model.state_dict(), reference.state_dict())
        assert not torch.equal(model[0].weight, network()[0].weight.half())


class TestForwardOfOneModelAmongMany:
    """What is written into masters is followed before a forward, in this model's half weights and in no others."""

    @staticmethod
    def adopt(model: nn.Module, parameters: Any = None) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=torch.bfloat16, verbosity=0)
        return optimizer

    @staticmethod
    def write(optimizer: torch.optim.Optimizer, value: float) -> None:
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                master.fill_(value)

    @staticmethod
    def weights_after_forward(model: nn.Module, of: nn.Module | None = None) -> set[float]:
        model(torch.ones(2, 2))
        return {float(element) for parameter in (of or model).parameters() for element in parameter.detach().flatten()}

    def test_masters_of_another_model_are_left_alone(self):
        models = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [self.adopt(model) for model in models]
        for model in models:
            model(torch.ones(2, 2))
        self.write(optimizers[2], 3.0)
        assert self.weights_after_forward(models[0], of=models[2]) != {3.0}
        assert self.weights_after_forward(models[2]) == {3.0}

    def test_masters_of_an_optimizer_that_came_later_are_seen(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first = self.adopt(model, model[0].parameters())
        model(torch.ones(2, 2))
        second = self.adopt(model, model[1].parameters())
        for optimizer in (first, second):
            self.write(optimizer, 3.0)
        assert self.weights_after_forward(model) == {3.0}

    def test_masters_of_a_layer_that_came_later_are_seen(self):
        model, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
        optimizers = [self.adopt(model), self.adopt(other)]
        model(torch.ones(2, 2))
        model.append(other[0])
        for optimizer in optimizers:
            self.write(optimizer, 3.0)
        assert self.weights_after_forward(model) == {3.0}

    def test_masters_of_an_optimizer_that_took_the_place_of_one_are_seen(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first = self.adopt(model, model[0].parameters())
        model(torch.ones(2, 2))
        del first
        gc.collect()
        second = self.adopt(model, model[1].parameters())
        self.write(second, 3.0)
        assert self.weights_after_forward(model, of=model[1]) == {3.0}


@pytest.mark.gpu
def test_masters_follow_a_model_that_is_moved() -> None:
    model = network()
    optimizer = SGD(model.parameters())
    initialize(model, optimizer)
    wanted = [master.detach().clone() for master in masters(optimizer)]
    model.to("cuda")
    amp.deinitialize()
    for parameter, values in zip(model.parameters(), wanted, strict=True):
        assert parameter.is_cuda
        assert_same_bits(parameter.detach(), values)


def ones(parameters: list[Tensor]) -> list[float]:
    return [parameter.grad.flatten()[0].item() for parameter in parameters]


class TestGradientsOnTopOfEarlierOnes:
    """A parameter of which every pass has a gradient of 1, so that sums can be counted."""

    @pytest.fixture
    def weight(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(3))

    @pytest.fixture(params=["O1", "O2", "O3"])
    def optimizer(self, weight, request) -> torch.optim.Optimizer:
        optimizer = SGD([weight])
        level = {"patch_torch_functions": False} if request.param == "O1" else {}
        initialize(nn.ParameterList([weight]), optimizer, opt_level=request.param, **level)
        backward(weight.float().sum(), optimizer)
        return optimizer

    def test_add_up(self, weight, optimizer):
        backward(weight.float().sum(), optimizer)
        assert ones(masters(optimizer)) == [2]

    @pytest.mark.parametrize("how", ["optimizer", "model"])
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_are_gone_if_they_are_cleared_inside_the_block(self, weight, optimizer, how, set_to_none):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            cleared = optimizer if how == "optimizer" else nn.ParameterList([weight])
            cleared.zero_grad(set_to_none=set_to_none)
            scaled_loss.backward()
        assert ones(masters(optimizer)) == [1]

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_are_gone_if_they_are_cleared_between_two_backwards_of_a_block(self, weight, optimizer, set_to_none):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            nn.ParameterList([weight]).zero_grad(set_to_none=set_to_none)
            scaled_loss.backward()
        assert ones(masters(optimizer)) == [1]

    def test_stay_where_another_module_is_cleared(self, weight, optimizer):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            nn.Linear(1, 1).zero_grad(set_to_none=False)
            scaled_loss.backward()
        assert ones(masters(optimizer)) == [2]

    def test_are_gone_if_they_are_set_to_none_inside_the_block(self, weight, optimizer):
        with amp.scale_loss(weight.float().sum(), optimizer) as s:
            weight.grad = None
            s.backward()
        assert ones(masters(optimizer)) == [1]

    def test_are_gone_with_a_warning_if_they_are_replaced_once_backward_has_begun(self, weight, optimizer):
        has_masters = weight.dtype in HALF_DTYPES and masters(optimizer)[0] is not weight
        block = amp.scale_loss(weight.float().sum(), optimizer)
        warns = pytest.warns(amp.AmpWarning, match="add to them write p.grad")
        with warns if has_masters else contextlib.nullcontext(), block as s:
            torch.autograd.grad(s, weight, retain_graph=True)
            weight.grad = None
            s.backward()
        assert ones(masters(optimizer)) == [1]

    def test_in_place_a_gradient_of_ones_own_is_added(self, weight, optimizer):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            weight.grad += torch.autograd.grad(scaled_loss, weight)[0]
        assert ones(masters(optimizer)) == [2]

    @pytest.mark.parametrize("how", ["optimizer", "model", "none"])
    def test_are_gone_if_they_are_cleared_after_a_delayed_pass(self, weight, optimizer, how):
        backward(weight.float().sum(), optimizer, delay_unscale=True)
        CLEARINGS[how](nn.ParameterList([weight]), optimizer)
        backward(weight.float().sum(), optimizer)
        assert ones(masters(optimizer)) == [1]

    def test_are_gone_if_they_are_cleared_after_a_delayed_pass_and_the_step_does_nothing(self, weight, optimizer):
        backward(weight.float().sum(), optimizer, delay_unscale=True)
        weight.grad = None
        optimizer.step()
        assert_same_bits(weight.detach().float(), torch.ones(3))

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    @pytest.mark.parametrize("passes", [1, 2])
    def test_stay_where_the_new_ones_have_a_graph(self, weight, optimizer, passes):
        with amp.scale_loss((weight.float().square() / 2).sum(), optimizer) as scaled_loss:
            for _ in range(passes):
                scaled_loss.backward(create_graph=True)
        assert ones(masters(optimizer)) == [1 + passes]
        weight.grad = None

    def test_that_are_delayed_add_up_with_earlier_ones(self, weight, optimizer):
        backward(weight.float().sum(), optimizer, delay_unscale=True)
        backward(weight.float().sum(), optimizer)
        assert ones(masters(optimizer)) == [3]

    @pytest.mark.filterwarnings("ignore:gradients of half parameters were replaced")
    @pytest.mark.parametrize(
        "state", ["there", "cleared", "added-to", "in-block-before", "in-block-after", "cleared-in-block"]
    )
    def test_are_what_they_are_after_deinitialize(self, weight, optimizer, state):
        if state == "cleared":
            weight.grad = None
        elif state == "added-to":
            weight.float().sum().backward()
        elif "block" in state:
            with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
                if "before" in state:
                    amp.deinitialize()
                if "cleared" in state:
                    weight.grad = None
                scaled_loss.backward()
        with contextlib.suppress(AmpWarning):
            amp.deinitialize()
        wanted = {"there": [1], "cleared": None, "cleared-in-block": [1]}.get(state, [2])
        assert (None if weight.grad is None else ones([weight])) == wanted
        assert weight.dtype is torch.float32
        assert weight.grad is None or weight.grad.dtype is torch.float32


class TestGroupAddedWhileGradientsAreScaled:
    @pytest.mark.parametrize("how", ["inside", "delayed"])
    @pytest.mark.parametrize("unfreeze", [False, True])
    def test_gets_unscaled_gradients(self, how, unfreeze):
        weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=not unfreeze)]
        optimizer = SGD(weights if unfreeze else weights[:1])
        initialize(nn.ParameterList(weights), optimizer)
        weights[1].requires_grad_()

        def join() -> None:
            if unfreeze:
                masters(optimizer)
            else:
                optimizer.add_param_group({"params": [weights[1]]})

        loss = sum(weight.float().sum() for weight in weights)
        with amp.scale_loss(loss, optimizer, delay_unscale=how == "delayed") as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            if how == "inside":
                join()
        if how == "delayed":
            join()
            backward(loss, optimizer)
        assert ones(masters(optimizer)) == [2, 2] if how == "delayed" else [1, 1]


class TestStepHooks:
    def test_see_the_new_half_weights_and_what_they_write_stays(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        seen = []

        def clamp(*_: object) -> None:
            seen.append(model[0].weight.detach().clone())
            with torch.no_grad():
                model[0].weight.clamp_(-0.01, 0.01)

        optimizer.register_step_post_hook(clamp)
        backward(loss_of(model, 0), optimizer)
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(seen[0], before)
        assert float(masters(optimizer)[0].detach().abs().max()) <= 0.0101
        assert len(optimizer._optimizer_step_post_hooks) == 1
        assert not optimizer._optimizer_step_pre_hooks

    def test_before_the_step_write_to_what_is_updated(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        optimizer.register_step_pre_hook(zeroing(model[0].weight))
        backward(loss_of(model, 0), optimizer)
        expected = -0.1 * masters(optimizer)[0].grad
        optimizer.step()
        torch.testing.assert_close(masters(optimizer)[0].detach(), expected)


class TestMoreOfWriting:
    def test_data_replaced_twice_in_a_row(self):
        model = nn.Linear(4, 1000)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model(batch(0))
        wanted = model.weight.detach().float() * 4
        for _ in range(2):
            model.weight.data = model.weight.data * 2
        assert_same_bits(model.state_dict()["weight"], wanted)

    def test_by_way_of_data_before_the_first_step_and_before_saving_is_seen(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model[0].weight.data.fill_(0.25)
        optimizer.step()
        assert_same_bits(masters(optimizer)[0].detach(), torch.full((6, 4), 0.25))
        model[0].weight.data.fill_(0.5)
        assert_same_bits(model.state_dict()["0.weight"], torch.full((6, 4), 0.5))
        model[0].weight.data.fill_(0.75)
        amp.deinitialize()
        assert_same_bits(model[0].weight.detach(), torch.full((6, 4), 0.75))

    def test_data_of_masters_replaced(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model(batch(0))
        for master in amp.master_params(optimizer):
            master.data = torch.zeros_like(master)
        assert not model(batch(0)).any()

    @pytest.mark.parametrize("into", ["masters", "half weights"])
    def test_after_a_step_is_seen_by_the_next_forward_and_saved(self, into):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        for index in range(3):
            backward(loss_of(model, index), optimizer)
            optimizer.step()
            with torch.no_grad():
                (masters(optimizer) if into == "masters" else list(model.parameters()))[0].fill_(index + 0.5)
            if index < 2:
                model(batch(0))
            else:
                assert_same_bits(model.state_dict()["0.weight"], torch.full((6, 4), 2.5))
            assert_same_bits(model[0].weight.detach().float(), torch.full((6, 4), index + 0.5))
            assert_same_bits(masters(optimizer)[0].detach(), torch.full((6, 4), index + 0.5))

    def test_data_exchanged_for_saving_and_put_back(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        weight, before = model[0].weight, masters(optimizer)[0].detach().half()
        own = weight.data
        weight.data = torch.full_like(own, 0.25)
        assert_same_bits(model.state_dict()["0.weight"], torch.full((6, 4), 0.25))
        weight.data = own
        model(batch(0))
        assert_same_bits(masters(optimizer)[0].detach().half(), before)
        assert_same_bits(weight.detach(), before)

    def test_data_that_an_optimizer_replaces_leave_half_weights_good_for_backward_when_they_are_saved(self):
        class ByReplacement(torch.optim.SGD):
            def step(self) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data = parameter.data * 0.5

        model = network()
        optimizer = ByReplacement(model.parameters(), lr=0.1)
        initialize(model, optimizer)
        for index in range(2):
            backward(loss_of(model, index), optimizer)
            optimizer.step()
        loss = loss_of(model, 2)
        model.state_dict()
        backward(loss, optimizer)

    def test_by_way_of_data_as_own_optimizers_do_it_and_without_a_gradient(self):
        class ByData(torch.optim.SGD):
            def step(self) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.mul_(0.5)

        model = network()
        optimizer = ByData(model.parameters(), lr=0.1)
        initialize(model, optimizer)
        wanted = [master.detach() * 0.5 for master in masters(optimizer)]
        optimizer.step()
        for parameter, values in zip(model.parameters(), wanted, strict=True):
            assert_same_bits(parameter.detach(), values.half())

    def test_half_weights_that_were_not_updated_are_still_good_for_backward(self):
        model = nn.Sequential(network(), network())
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        first, second = model[0](batch(0).half()).float().sum(), model[1](batch(0).half()).float().sum()
        backward(first, optimizer)
        optimizer.step()
        backward(second, optimizer)
        optimizer.step()

    def test_dense_gradient_after_a_sparse_one_and_the_other_way_round(self):
        for order in ("sparse dense", "dense sparse"):
            model = nn.Embedding(3, 2, sparse=True)
            optimizer = SGD(model.parameters())
            initialize(model, optimizer)
            for kind in order.split():
                outputs = model(torch.tensor([0])) if kind == "sparse" else model.weight
                backward(outputs.float().sum(), optimizer)
            assert masters(optimizer)[0].grad.to_dense().flatten().tolist() == [2, 2, 1, 1, 1, 1]
            amp.deinitialize()

    def test_clipping_of_the_model_that_clips_nothing_changes_nothing(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        wanted = [master.grad.clone() for master in masters(optimizer)]
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        for master, grad in zip(masters(optimizer), wanted, strict=True):
            assert_same_bits(master.grad, grad)

    def test_warning_is_of_the_users_line(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=1)
        kept = masters(optimizer)
        loss_of(model, 0).backward()
        for parameter, master in zip(model.parameters(), kept, strict=True):
            master.grad = parameter.grad.float() * 2
        with pytest.warns(AmpWarning, match="set on float32 masters by hand") as caught:
            optimizer.step()
        assert caught[0].filename == __file__


class TestGivingBack:
    def test_goes_on_where_one_tensor_was_converted_by_the_user(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        wanted = model[1].weight.detach().clone()
        initialize(model, SGD(model.parameters()))
        model[0].float()
        amp.deinitialize()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert_same_bits(model[1].weight.detach(), wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
    def test_and_saving_keep_all_bits_of_a_model_that_the_user_has_converted(self, dtype):
        model = network()
        wanted = copy.deepcopy(model.state_dict())
        initialize(model, SGD(model.parameters()))
        model.to(dtype)
        saved = model.state_dict()
        for name, values in wanted.items():
            assert torch.equal(saved[name], values)
        amp.deinitialize()
        for name, values in wanted.items():
            assert torch.equal(model.state_dict()[name], values.to(dtype))

    def test_other_half_type_is_an_error_too(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model.bfloat16()
        with pytest.raises(UsageError, match=r"became torch\.bfloat16"):
            model(batch(0))

    def test_second_initialize_that_fails_changes_nothing_and_may_be_tried_again(self):
        model = nn.Linear(4, 3)
        initialize(model, half_dtype=torch.bfloat16)
        model(batch(0)).sum().backward()
        grad = model.weight.grad.clone()
        with pytest.raises(UsageError, match="in two optimizers") as kept:
            initialize(model, [SGD([model.weight]), SGD([model.weight, model.bias])], half_dtype=torch.bfloat16)
        assert_same_bits(model.weight.grad, grad)
        initialize(model, SGD(model.parameters()), half_dtype=torch.bfloat16)
        assert kept is not None

    def test_optimizer_may_be_replaced_without_waiting_for_the_collector(self):
        gc.disable()
        try:
            model = network()
            optimizer = SGD(model.parameters())
            initialize(model, optimizer)
            del optimizer
            initialize(model, MOMENTUM(model.parameters()))
        finally:
            gc.enable()

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_under_inference_mode(self, level):
        model = network()
        optimizer = SGD(model.parameters())
        with torch.inference_mode():
            initialize(model, optimizer, opt_level=level)
            model(batch(0))
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        with torch.inference_mode():
            amp.deinitialize()
        assert not model[0].weight.is_inference()

    def test_model_made_under_inference_mode_is_refused(self):
        with torch.inference_mode():
            model = network()
        with pytest.raises(OptionError, match=r"made under torch\.inference_mode"):
            initialize(model)
        assert model[0].weight.dtype is torch.float32

    @pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD])
    def test_copy_of_the_optimizer_steps_by_itself(self, make):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        twin_model, twin = copy.deepcopy((model, optimizer))
        before = twin_model[0].weight.detach().clone()
        twin_model(batch(0)).sum().backward()
        twin.step()
        assert not torch.equal(twin_model[0].weight, before)

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_state_of_a_parameter_without_dimensions(self, level):
        model = nn.Linear(2, 2)
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        initialize(model, optimizer, opt_level=level)
        backward(model.temperature.float(), optimizer)
        optimizer.step()
        amp.deinitialize()
        assert optimizer.state[model.temperature]["exp_avg"].dtype is torch.float32

    def test_buffers_that_the_model_replaces(self):
        class Average(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.zeros(4))

            def forward(self, x: Tensor) -> Tensor:
                self.mean = self.mean.half() * 0.5 + x.half().mean(dim=0) * 0.5
                return x - self.mean

        model = Average()
        initialize(model)
        model(batch(0))
        assert model.mean.dtype is torch.float16
        assert model.state_dict()["mean"].dtype is torch.float32
        amp.deinitialize()
        assert model.mean.dtype is torch.float32
        assert model.mean.any()

    def test_module_that_two_models_share_and_one_keeps_is_refused(self):
        shared = nn.Linear(2, 2)
        models = [nn.ModuleDict({"head": shared}), nn.ModuleDict({"tail": shared})]
        with pytest.raises(OptionError, match="shared by two models"):
            initialize(models, keep_fp32="head")
        assert shared.weight.dtype is torch.float32

    def test_state_dict_that_keeps_variables_has_the_masters(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        assert list(model.state_dict(keep_vars=True).values()) == masters(optimizer)


class TestLoadingUnusualThings:
    def test_into_a_copy_by_assignment(self):
        model = network()
        initialize(model, SGD(model.parameters()))
        twin = copy.deepcopy(model)
        twin.load_state_dict(network(seed=1).state_dict(), assign=True)
        assert twin[0].weight.dtype is torch.float32
        assert model[0].weight.dtype is torch.float16

    def test_into_a_part_that_has_buffers_alone_keeps_every_bit(self):
        part = nn.Module()
        part.register_buffer("frequencies", torch.tensor([0.1, 0.2]))
        model = nn.ModuleList([network(), part])
        initialize(model, SGD(model.parameters()))
        saved = model.state_dict()
        saved["1.frequencies"] = torch.tensor([0.3, 0.7])
        model.load_state_dict(saved)
        assert_same_bits(model.state_dict()["1.frequencies"], torch.tensor([0.3, 0.7]))

    def test_after_a_parameter_was_unfrozen_gives_its_master_every_bit(self):
        model = network()
        model[0].weight.requires_grad_(False)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model[0].weight.requires_grad_(True)
        saved = network(seed=1).state_dict()
        model.load_state_dict(saved)
        assert_same_bits(masters(optimizer)[0].detach(), saved["0.weight"])

    def test_after_the_parameter_of_a_single_layer_was_unfrozen_too(self):
        model = nn.Linear(4, 3)
        model.weight.requires_grad_(False)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model.weight.requires_grad_(True)
        saved = nn.Linear(4, 3).state_dict()
        model.load_state_dict(saved)
        assert_same_bits(masters(optimizer)[0].detach(), saved["weight"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_capturable_optimizer_skips_and_steps(name: str) -> None:
    model = network().cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), capturable=True)
    initialize(model, optimizer)
    for overflows in (True, False, True, False):
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        loss = model(batch(0).cuda()).square().mean()
        backward(loss * (OVERFLOW if overflows else 1), optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is overflows
        if overflows:
            assert_same_state([model.state_dict(), optimizer.state_dict()], before)
        else:
            assert not torch.equal(model.state_dict()["0.weight"], before[0]["0.weight"])


class TestUnusualSteps:
    def test_optimizer_whose_step_fires_no_hooks_and_writes_by_way_of_data(self):
        model = network()
        optimizer = SGD(model.parameters())

        def step(me: Any, closure: Any = None) -> None:
            for group in me.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-0.1)

        optimizer.step = types.MethodType(step, optimizer)
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        wanted = [(master.detach() - 0.1 * master.grad) for master in masters(optimizer)]
        optimizer.step()
        for parameter, values in zip(model.parameters(), wanted, strict=True):
            assert_same_bits(parameter.detach(), values.half())

    def test_optimizer_that_never_called_the_constructor_of_its_class(self):
        class Around(torch.optim.Optimizer):
            def __init__(self, inside: torch.optim.Optimizer) -> None:
                self.inside = inside
                self.param_groups, self.state, self.defaults = inside.param_groups, inside.state, inside.defaults

            def step(self, closure: Any = None) -> Any:
                return self.inside.step(closure)

            def zero_grad(self, set_to_none: bool = True) -> None:
                self.inside.zero_grad(set_to_none)

        model, reference = network(), network()
        around, plain = Around(MOMENTUM(model.parameters())), MOMENTUM(reference.parameters())
        initialize([model, reference], [around, plain])
        for module, optimizer in [(model, around), (reference, plain)]:
            backward(loss_of(module, 0), optimizer)
            optimizer.step()
        assert_same_state(model.state_dict(), reference.state_dict())

    def test_hook_writes_stay_inside_an_except_block_too(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        optimizer.register_step_post_hook(zeroing(model[0].weight))
        backward(loss_of(model, 0), optimizer)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            optimizer.step()
        assert not model[0].weight.any()

    def test_hook_that_clips_the_models_gradients_counts(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        before = [master.detach().clone() for master in masters(optimizer)]
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1e-2) and None)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        moved = nn.utils.get_total_norm(
            [old - master.detach() for old, master in zip(before, masters(optimizer), strict=True)]
        )
        assert moved.item() == pytest.approx(1e-3, rel=1e-2)  # by the learning rate

    def test_saving_does_not_change_the_training(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        model(batch(0))
        wanted = []
        for master in amp.master_params(optimizer):
            master.data.clamp_(-0.01, 0.01)  # by a way that is not counted
            wanted.append(master.detach().clone())
        model.state_dict()
        for master, values in zip(masters(optimizer), wanted, strict=True):
            assert_same_bits(master.detach(), values)


class TestGradientsInOtherTensors:
    def test_that_the_user_puts_in_place_add_up(self):
        weight = nn.Parameter(torch.ones(3))
        optimizer = SGD([weight])
        initialize(nn.ParameterList([weight]), optimizer)
        for _ in range(2):
            with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                weight.grad = weight.grad * 1  # as an all-reduce into another tensor does
        assert ones(masters(optimizer)) == [2]

    def test_that_are_pieces_of_one_storage_are_gone_if_they_are_cleared(self):
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = SGD(weights)
        model = nn.ParameterList(weights)
        initialize(model, optimizer)
        backward(torch.cat(weights).float().sum(), optimizer)
        with amp.scale_loss(torch.cat(weights).float().sum(), optimizer) as scaled_loss:
            model.zero_grad()
            scaled_loss.backward()
        assert ones(masters(optimizer)) == [1, 1]

    def test_that_are_zeroed_after_a_delayed_pass_are_gone(self):
        weight = nn.Parameter(torch.ones(3))
        model, optimizer = nn.ParameterList([weight]), SGD([weight])
        initialize(model, optimizer)
        backward(weight.float().sum(), optimizer)
        backward(weight.float().sum(), optimizer, delay_unscale=True)
        model.zero_grad(set_to_none=False)
        backward(weight.float().sum(), optimizer)
        assert ones(masters(optimizer)) == [1]

    def test_that_do_not_fit_do_not_keep_the_rest_from_being_given_back(self):
        model = network()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, patch_torch_functions=True)
        backward(loss_of(model, 0), optimizer)
        weight = model[0].weight
        grad, weight.grad = weight.grad[:2].clone(), None
        weight.data = weight.data[:2].clone()
        weight.grad = grad
        with contextlib.suppress(RuntimeError):
            amp.deinitialize()
        assert model[2].weight.dtype is torch.float32
        assert "step" not in vars(optimizer)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32

    def test_state_dict_hooks_of_the_user_have_the_last_word(self):
        model = nn.Linear(4, 4)
        wanted = model.weight.detach().clone().T

        def transpose(_: nn.Module, saved: dict[str, Any], prefix: str, __: object) -> None:
            saved[f"{prefix}weight"] = saved[f"{prefix}weight"].T

        initialize(model, SGD(model.parameters()))
        model.register_state_dict_post_hook(transpose)
        assert_same_bits(model.state_dict()["weight"], wanted)


class TestManyParameters:
    """At O2, the block's end and the step run few Python calls for each parameter: C++ walks the lists."""

    @staticmethod
    def calls_of_a_step(count: int) -> Counter[str]:
        """Counts the calls that code of amp makes in the end of a block and a step of ``count`` parameters."""
        model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        initialize(model, optimizer, half_dtype=torch.float16)
        found: Counter[str] = Counter()

        def note(frame: types.FrameType, event: str, function: Any) -> None:
            if event in ("call", "c_call") and "ampatch" in frame.f_globals.get("__name__", ""):
                found[frame.f_code.co_name if event == "call" else function.__name__] += 1

        for is_last in (False, False, True):
            optimizer.zero_grad()
            block = amp.scale_loss(torch.stack([each.sum() for each in model]).float().sum(), optimizer)
            block.__enter__().backward()
            sys.setprofile(note if is_last else None)
            try:
                block.__exit__(None, None, None)
                optimizer.step()
            finally:
                sys.setprofile(None)
        amp.deinitialize()
        return found

    def test_each_adds_few_calls_to_a_step(self, compiled, compiled_calls, select, select_calls):
        select("extension")
        select_calls("compiled")
        fewer, more = self.calls_of_a_step(20), self.calls_of_a_step(40)
        grows = {name: (count - fewer[name]) / 20 for name, count in more.items() if count > fewer[name]}
        assert grows == {"id": 1}
