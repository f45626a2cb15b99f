"""Of float32 masters at O2: made, stepped, cleared, saved, loaded and given back.

Optimizers are compared bit for bit with those of a float32 model that is given the masters' gradients. These are
compared with the gradients of float32 training in test_training_matrix.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import MOMENTUM, OPTIMIZERS, OVERFLOW, SGD, Larc, WithTuples, backward
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.native import extension_kernels, torch_kernels
from ampatch.native.host_copy import HostCopy

SCALE = 2.0**8

OTHERS_BY_FOREACH = ["Adafactor", "Adagrad", "Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
IMPLEMENTATIONS = {
    **OPTIMIZERS,
    "SGD-momentum-foreach": functools.partial(MOMENTUM, foreach=True),
    **{f"{name}-foreach": functools.partial(getattr(torch.optim, name), foreach=True) for name in OTHERS_BY_FOREACH},
}


def network(seed: int = 0) -> nn.Sequential:
    """Matrices only, as Muon wants them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def batch(index: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    return model(batch(index)).float().square().mean()


def initialize(model: Any, optimizer: Any = None, **options: Any) -> None:
    options = {"opt_level": "O2", "half_dtype": torch.float16, "loss_scale": "dynamic", "init_scale": SCALE, **options}
    amp.initialize(model, optimizer, verbosity=0, **options)


def trainable(make: Callable[..., Any] = SGD, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """Returns a model and its optimizer under amp."""
    model = network() if model is None else model
    optimizer = make(model.parameters())
    initialize(model, optimizer, **options)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, index: int = 0, factor: float = 1.0) -> None:
    backward(loss_of(model, index) * factor, optimizer)
    optimizer.step()


def masters(optimizer: Any) -> list[Tensor]:
    return list(amp.master_params(optimizer))


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def grads(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors]


def dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), list(model.parameters())])


def write(tensors: Iterable[Tensor], value: float) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)


class TestTraining:
    @pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
    @pytest.mark.covering(1)
    def test_every_optimizer_steps_as_in_float32_and_a_skipped_step_changes_nothing(self, make, half):
        for overflow_at in (0, 2):
            model, optimizer = trainable(make, half_dtype=half)
            plain = network()
            plain_optimizer = make(plain.parameters())
            for index in range(4):
                if index == overflow_at:
                    before = everything(model, optimizer)
                    step(model, optimizer, index, OVERFLOW)
                    assert amp.step_was_skipped(optimizer)
                    assert_same_state(everything(model, optimizer), before)
                    amp.load_state_dict({"loss_scaler0": {"loss_scale": SCALE, "unskipped": 0}})
                backward(loss_of(model, index), optimizer)
                for parameter, master in zip(plain.parameters(), masters(optimizer), strict=True):
                    parameter.grad = master.grad.clone()
                optimizer.step()
                plain_optimizer.step()
                assert_same_state(masters(optimizer), list(plain.parameters()))
                assert_same_state(list(model.parameters()), [each.to(half) for each in plain.parameters()])
            assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())
            amp.deinitialize()

    def test_a_static_scale_of_one_needs_no_block(self, half):
        model, other = network(), network()
        optimizer, plain = MOMENTUM(model.parameters()), MOMENTUM(other.parameters())
        initialize([model, other], [optimizer, plain], half_dtype=half, loss_scale=1.0)
        for index in range(3):
            step(model, optimizer, index)
            loss_of(other, index).backward()
            plain.step()
            assert_same_state(masters(optimizer), masters(plain))
        assert not torch.equal(masters(optimizer)[0], network()[0].weight)

    def test_sparse_gradients_are_unscaled_and_checked(self, half):
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=True)
        master = nn.Parameter(model.weight.detach().clone())
        plain = torch.optim.SparseAdam([master])
        _, optimizer = trainable(lambda parameters: torch.optim.SparseAdam(list(parameters)), model, half_dtype=half)
        for index in range(3):
            indices = torch.tensor([index, index, 4])
            if index == 1:
                before = everything(model, optimizer)
                backward(model(indices).square().sum() * OVERFLOW, optimizer)
                optimizer.step()
                assert amp.step_was_skipped(optimizer)
                assert_same_state(everything(model, optimizer), before)
            for _ in range(2):
                backward(model(indices).square().sum(), optimizer)
            assert masters(optimizer)[0].grad.is_sparse
            twin = nn.Embedding(5, 3, sparse=True, _weight=master.detach().to(half))
            (twin(indices).float().square().sum() * SCALE).backward()
            master.grad = twin.weight.grad.coalesce().float() * 2 / SCALE
            optimizer.step()
            plain.step()
            assert_same_bits(masters(optimizer)[0], master)

    @pytest.mark.parametrize("order", [["sparse", "dense"], ["dense", "sparse"]])
    def test_sparse_and_dense_gradients_of_a_weight_add_up(self, order):
        model, optimizer = trainable(model=nn.Embedding(3, 2, sparse=True))
        losses = {"sparse": lambda: model(torch.tensor([0])).float().sum(), "dense": lambda: model.weight.float().sum()}
        for kind in order:
            backward(losses[kind](), optimizer)
        assert masters(optimizer)[0].grad.to_dense().flatten().tolist() == [2, 2, 1, 1, 1, 1]

    def test_half_weights_are_written_by_one_multi_tensor_call(self, monkeypatch):
        model, optimizer = trainable()
        backward(loss_of(model), optimizer)
        written = []

        def counted(copy):
            return lambda masters, halves: (written.append(len(halves)), copy(masters, halves))

        for operators in filter(None, (torch_kernels, extension_kernels)):
            monkeypatch.setattr(operators, "copy_to_half", counted(operators.copy_to_half))
        optimizer.step()
        assert written == [2]

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        "name", ["Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
    )
    def test_a_capturable_optimizer_skips_and_steps(self, name):
        model, optimizer = trainable(functools.partial(getattr(torch.optim, name), capturable=True), network().cuda())
        for overflows in (True, False, True, False):
            before = everything(model, optimizer)
            backward(model(batch(0).cuda()).square().mean() * (OVERFLOW if overflows else 1), optimizer)
            optimizer.step()
            assert amp.step_was_skipped(optimizer) is overflows
            if overflows:
                assert_same_state(everything(model, optimizer), before)
            else:
                assert not torch.equal(model.state_dict()["0.weight"], before[0]["0.weight"])


class TestMasters:
    def test_masters_have_the_float32_bits_and_parameters_stay_the_same_objects(self, half):
        model = network()
        optimizer, parameters, before = SGD(model.parameters()), list(model.parameters()), copies(model.parameters())
        printed = repr(optimizer)
        initialize(model, optimizer, half_dtype=half)
        assert_same_state(masters(optimizer), before)
        assert_same_state(parameters, [values.to(half) for values in before])
        for held in (model.parameters(), optimizer.param_groups[0]["params"]):
            assert list(map(id, held)) == list(map(id, parameters))
        assert (type(optimizer), repr(optimizer)) == (torch.optim.SGD, printed)

    def test_a_frozen_parameter_has_no_master_until_it_is_unfrozen(self):
        model = network()
        model[0].weight.requires_grad_(False)
        trainable_model, optimizer = trainable(model=model)
        assert masters(optimizer)[0] is model[0].weight
        step(trainable_model, optimizer)
        frozen = model[0].weight.detach().clone()
        model[0].weight.requires_grad_(True)
        backward(loss_of(model), optimizer)
        assert masters(optimizer)[0].dtype is torch.float32
        optimizer.step()
        loss_of(model)
        assert model[0].weight.dtype is torch.float16
        assert not torch.equal(model[0].weight, frozen)

    def test_a_float64_parameter_is_its_own_master(self):
        weights = nn.ParameterList([torch.ones(2, dtype=torch.float64), torch.ones(2)])
        _, optimizer = trainable(model=weights)
        assert [parameter.dtype for parameter in weights] == [torch.float64, torch.float16]
        assert masters(optimizer)[0] is weights[0]

    def test_a_half_model_has_masters_and_is_half_again_afterwards(self, half):
        def momenta() -> set[torch.dtype]:
            return {state["momentum_buffer"].dtype for state in optimizer.state.values()}

        model = network().to(half)
        optimizer = MOMENTUM(model.parameters())
        model(batch(0).to(half)).square().sum().backward()
        optimizer.step()
        initialize(model, optimizer, half_dtype=half)
        assert dtypes(masters(optimizer)) == momenta() == {torch.float32}
        step(model, optimizer)
        amp.deinitialize()
        assert dtypes(model.parameters()) == momenta() == {half}

    def test_masters_go_on_with_the_state_and_gradients_from_before(self, half):
        model, reference = network(), network()
        optimizer, plain = torch.optim.Adam(model.parameters()), torch.optim.Adam(reference.parameters())
        for module, stepping in [(model, optimizer), (reference, plain)]:
            for index in range(2):
                stepping.zero_grad()
                loss_of(module, index).backward()
                stepping.step()
            stepping.zero_grad()
            loss_of(module, 2).backward()
        initialize(model, optimizer, half_dtype=half)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        assert_same_state(grads(masters(optimizer)), grads(reference.parameters()))
        optimizer.step()
        plain.step()
        assert_same_state(masters(optimizer), list(reference.parameters()))

    @pytest.mark.parametrize(("level", "expected"), [("O2", torch.float32), ("O3", torch.float16)])
    def test_state_from_before_in_other_types_stays_in_them(self, level, expected):
        """As the codes of an optimizer that keeps its state in 8 bits, and sums in double."""
        model = network()
        optimizer = MOMENTUM(model.parameters())
        loss_of(model).backward()
        optimizer.step()
        others = {"codes": torch.tensor([0, 255], dtype=torch.uint8), "sums": torch.ones(2, dtype=torch.float64)}
        for state in optimizer.state.values():
            state.update({**others, "largest": torch.tensor(1 + 2.0**-20)})
        initialize(model, optimizer, opt_level=level)
        for state in optimizer.state.values():
            assert state["momentum_buffer"].dtype is expected
            assert {name: state[name] for name in others} == others
            assert state["largest"].item() == 1 + 2.0**-20

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_state_of_a_parameter_without_dimensions_is_float32_afterwards(self, level):
        model = nn.ParameterDict({"temperature": torch.tensor(1.0)})
        optimizer = torch.optim.Adam(model.parameters())
        model.temperature.grad = torch.tensor(1.0)
        optimizer.step()
        initialize(model, optimizer, opt_level=level)
        backward(model.temperature.float(), optimizer)
        optimizer.step()
        amp.deinitialize()
        assert optimizer.state[model.temperature]["exp_avg"].dtype is torch.float32

    def test_attributes_of_parameters_are_those_of_their_masters(self):
        model = network()
        model[0].weight.no_weight_decay = True
        _, optimizer = trainable(model=model)
        assert masters(optimizer)[0].no_weight_decay is True
        model[0].weight.lr_scale = 0.5
        assert optimizer.param_groups[0]["params"][0].lr_scale == masters(optimizer)[0].lr_scale == 0.5

    def test_a_tied_parameter_has_one_master(self, half):
        model = network()
        model.tied = nn.Linear(6, 3, bias=False)
        model.tied.weight = model[2].weight
        _, optimizer = trainable(model=model, half_dtype=half)
        assert model.tied.weight is model[2].weight
        assert model.tied.weight.dtype is half
        assert len(masters(optimizer)) == 2

    def test_masters_can_be_left_out_at_o2_and_asked_for_at_o3(self):
        model, optimizer = trainable(master_weights=False)
        assert masters(optimizer) == list(model.parameters())
        amp.deinitialize()
        initialize(model, optimizer, opt_level="O3", master_weights=True)
        assert dtypes(masters(optimizer)) == {torch.float32}

    def test_an_optimizer_steps_after_its_model_was_dropped(self):
        weight = nn.Parameter(torch.ones(3))
        optimizer = SGD([weight])
        initialize(nn.ParameterList([weight]), optimizer)
        for _ in range(2):
            backward(weight.float().sum(), optimizer)
            optimizer.step()
        torch.testing.assert_close(masters(optimizer)[0].detach(), torch.full((3,), 0.8))

    @pytest.mark.gpu
    def test_masters_follow_a_model_that_is_moved(self):
        model, optimizer = trainable()
        wanted = copies(masters(optimizer))
        model.to("cuda")
        amp.deinitialize()
        assert all(parameter.is_cuda for parameter in model.parameters())
        assert_same_state(list(model.parameters()), wanted)


class TestAddedGroups:
    @pytest.mark.parametrize("when", ["before-backward", "after-backward", "after-step", "after-skipped-step"])
    def test_a_group_has_masters_whenever_it_is_added(self, when):
        model = network()
        optimizer = MOMENTUM(model[0].parameters())
        initialize(model, optimizer)
        if when != "before-backward":
            backward(loss_of(model) * (OVERFLOW if "skipped" in when else 1), optimizer)
        if "step" in when:
            optimizer.step()
            model.zero_grad()
        else:
            model[2].weight.grad = None
        optimizer.add_param_group({"params": (parameter for parameter in model[2].parameters()), "lr": 0.5})
        assert [master.dtype for master in masters(optimizer)] == [torch.float32] * 2
        if when != "after-backward":
            backward(loss_of(model, 1), optimizer)
        before, (first, second) = copies(masters(optimizer)), copy.deepcopy(grads(masters(optimizer)))
        optimizer.step()
        assert first is not None
        assert (second is None) == (when == "after-backward")
        if second is not None:
            torch.testing.assert_close(masters(optimizer)[1], before[1] - 0.5 * second)

    def test_a_parameter_that_the_optimizer_has_is_refused_and_not_added(self):
        model, optimizer = trainable()
        with pytest.raises(ValueError, match="more than one parameter group"):  # torch's own
            optimizer.add_param_group({"params": [model[0].weight]})
        with pytest.raises(UsageError, match="holds a float32 master"):
            optimizer.add_param_group({"params": masters(optimizer)[:1]})
        assert len(optimizer.param_groups) == 1
        step(model, optimizer)

    def test_a_parameter_of_another_optimizer_is_refused_and_not_added(self):
        model = network()
        optimizers = [SGD(model[0].parameters()), SGD(model[2].parameters())]
        initialize(model, optimizers)
        with pytest.raises(UsageError, match=r"\(6, 4\) is in two optimizers"):
            optimizers[1].add_param_group({"params": [model[0].weight]})
        assert len(optimizers[1].param_groups) == 1
        backward(loss_of(model), optimizers)
        for optimizer in optimizers:
            optimizer.step()

    @pytest.mark.parametrize("how", ["inside", "delayed"])
    @pytest.mark.parametrize("unfreeze", [False, True])
    def test_a_parameter_added_while_gradients_are_scaled_has_them_unscaled(self, how, unfreeze):
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
        assert first_elements(masters(optimizer)) == [2, 2] if how == "delayed" else [1, 1]


def first_elements(parameters: list[Tensor]) -> list[float]:
    return [parameter.grad.flatten()[0].item() for parameter in parameters]


CLEARINGS: dict[str, Callable[[nn.Module, Any], object]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer-zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, _: model.zero_grad(),
    "model-zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "none": lambda model, _: setattr(model[0], "grad", None),
    "zero_": lambda model, _: model[0].grad is None or model[0].grad.zero_(),
}
UNCOUNTED_CLEARINGS = {
    "data": lambda model, _: model[0].grad.data.zero_(),
    "other data": lambda model, _: setattr(model[0].grad, "data", torch.zeros_like(model[0])),
    "numpy": lambda model, _: model[0].grad.numpy().fill(0),
    "storage": lambda model, _: model[0].grad.untyped_storage().fill_(0),
}
ALL_CLEARINGS = CLEARINGS | UNCOUNTED_CLEARINGS


@pytest.mark.covering(2)  # with masters, amp notices each change in another way
class TestAccumulation:
    """A weight that every backward pass gives a gradient of 1, so that sums can be counted."""

    @pytest.fixture
    def model(self) -> nn.ParameterList:
        return nn.ParameterList([torch.ones(3)])

    @pytest.fixture
    def weight(self, model) -> nn.Parameter:
        return model[0]

    @pytest.fixture(params=["O1", "O2", "O3"])
    def optimizer(self, model, request) -> torch.optim.Optimizer:
        level = {"patch_torch_functions": False} if request.param == "O1" else {}
        _, optimizer = trainable(model=model, opt_level=request.param, **level)
        backward(model[0].float().sum(), optimizer)
        return optimizer

    @pytest.mark.parametrize("clear", ALL_CLEARINGS.values(), ids=ALL_CLEARINGS)
    def test_gradients_cleared_after_a_delayed_block_are_gone(self, model, weight, optimizer, clear):
        backward(weight.float().sum(), optimizer, delay_unscale=True)
        clear(model, optimizer)
        backward(weight.float().sum(), optimizer)
        assert first_elements(masters(optimizer)) == [1]

    def test_a_step_after_delayed_gradients_were_set_to_none_changes_nothing(self, weight, optimizer):
        backward(weight.float().sum(), optimizer, delay_unscale=True)
        weight.grad = None
        optimizer.step()
        assert_same_bits(weight.float(), torch.ones(3))

    @pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
    def test_gradients_cleared_inside_a_block_are_gone(self, model, weight, optimizer, clear):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            clear(model, optimizer)
            scaled_loss.backward()
        assert first_elements(masters(optimizer)) == [1]

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_gradients_cleared_between_two_backward_passes_of_a_block_are_gone(
        self, model, weight, optimizer, set_to_none
    ):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            model.zero_grad(set_to_none=set_to_none)
            scaled_loss.backward()
        assert first_elements(masters(optimizer)) == [1]

    @pytest.mark.parametrize("is_open", [False, True])
    def test_scaled_gradients_stay_scaled_if_the_optimizer_loads_its_state(self, weight, optimizer, is_open):
        with amp.scale_loss(weight.float().sum(), optimizer, delay_unscale=not is_open) as scaled_loss:
            scaled_loss.backward()
            if is_open:
                optimizer.load_state_dict(optimizer.state_dict())
        if not is_open:
            optimizer.load_state_dict(optimizer.state_dict())
            backward(weight.float().sum(), optimizer)
        assert first_elements(masters(optimizer)) == [2 if is_open else 3]

    def test_gradients_stay_if_another_module_is_cleared(self, weight, optimizer):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            nn.Linear(1, 1).zero_grad(set_to_none=False)
            scaled_loss.backward()
        assert first_elements(masters(optimizer)) == [2]

    def test_gradients_replaced_once_backward_has_begun_are_gone_with_a_warning(self, weight, optimizer):
        has_masters = weight.dtype in HALF_DTYPES and masters(optimizer)[0] is not weight
        block = amp.scale_loss(weight.float().sum(), optimizer)
        warns = pytest.warns(amp.AmpWarning, match="add to them write p.grad")
        with warns if has_masters else contextlib.nullcontext(), block as scaled_loss:
            torch.autograd.grad(scaled_loss, weight, retain_graph=True)
            weight.grad = None
            scaled_loss.backward()
        assert first_elements(masters(optimizer)) == [1]

    def test_a_gradient_that_the_user_adds_in_place_counts(self, weight, optimizer):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            weight.grad += torch.autograd.grad(scaled_loss, weight)[0]
        assert first_elements(masters(optimizer)) == [2]

    def test_gradients_that_the_user_puts_into_other_tensors_add_up(self, weight, optimizer):
        with amp.scale_loss(weight.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            weight.grad = weight.grad * 1  # as an all-reduce into another tensor does
        assert first_elements(masters(optimizer)) == [2]

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    @pytest.mark.parametrize("passes", [1, 2])
    def test_gradients_with_a_graph_add_up_and_can_be_differentiated(self, weight, optimizer, passes):
        with amp.scale_loss((weight.float().square() / 2).sum(), optimizer) as scaled_loss:
            for _ in range(passes):
                scaled_loss.backward(create_graph=True)
        assert first_elements(masters(optimizer)) == [1 + passes]
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        assert second.tolist() == [passes] * 3
        weight.grad = None

    @pytest.mark.filterwarnings("ignore:gradients of half parameters were replaced")
    @pytest.mark.parametrize(
        ("state", "wanted"),
        [
            ("there", 1),
            ("cleared", None),
            ("added-to", 2),
            ("in-block-before", 2),
            ("in-block-after", 2),
            ("cleared-in-block", 1),
        ],
    )
    def test_deinitialize_gives_gradients_back_in_float32(self, weight, optimizer, state, wanted):
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
        assert weight.dtype is torch.float32
        if wanted is None:
            assert weight.grad is None
        else:
            assert_same_bits(weight.grad, torch.full((3,), float(wanted)))


class TestGradients:
    def test_gradients_are_those_of_the_masters_in_half(self, half):
        model, optimizer = trainable(half_dtype=half)
        for index in range(2):
            backward(loss_of(model, index), optimizer)
            assert_same_state(grads(model.parameters()), [grad.to(half) for grad in grads(masters(optimizer))])

    def test_gradients_from_before_the_first_block_add_up_with_those_of_the_block(self):
        plain, (model, optimizer) = network(), trainable()
        loss_of(model, 0).backward()
        backward(loss_of(model, 1), optimizer)
        for index in range(2):
            loss_of(plain, index).backward()
        torch.testing.assert_close(grads(masters(optimizer)), grads(plain.parameters()), rtol=1e-2, atol=1e-3)

    def test_a_block_that_raises_leaves_no_gradients(self):
        model, optimizer = trainable()
        backward(loss_of(model), optimizer)
        with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ZeroDivisionError
        assert grads([*masters(optimizer), *model.parameters()]) == [None] * 4

    @pytest.mark.parametrize("edit", [lambda grad: grad.mul_(0.5), lambda grad: grad.data.mul_(0.5)])
    def test_changing_some_delayed_gradients_before_the_next_block_warns(self, edit):
        model, optimizer = trainable()
        backward(loss_of(model), optimizer)
        backward(loss_of(model), optimizer, delay_unscale=True)
        edit(next(model.parameters()).grad)
        backward(loss_of(model, 1), optimizer)
        with pytest.warns(AmpWarning, match="had left scaled were changed before the next block"):
            optimizer.step()

    def test_a_warning_whose_number_arrives_while_amp_looks_is_not_lost(self, monkeypatch):
        """As from a GPU, which does not stop between two questions of the host."""
        asked = itertools.count()
        monkeypatch.setattr(HostCopy, "has_arrived", property(lambda _: next(asked) > 0))
        model, optimizer = trainable()
        backward(loss_of(model), optimizer)
        backward(loss_of(model), optimizer, delay_unscale=True)
        next(model.parameters()).grad.mul_(0.5)
        step(model, optimizer)
        with pytest.warns(AmpWarning, match="had left scaled were changed before the next block"):
            step(model, optimizer, 1)

    def test_gradients_that_are_pieces_of_one_storage_are_gone_if_cleared(self):
        model, optimizer = trainable(model=nn.ParameterList([torch.ones(3), torch.ones(3)]))
        backward(torch.cat(list(model)).float().sum(), optimizer)
        with amp.scale_loss(torch.cat(list(model)).float().sum(), optimizer) as scaled_loss:
            model.zero_grad()
            scaled_loss.backward()
        assert first_elements(masters(optimizer)) == [1, 1]

    def test_a_gradient_that_does_not_fit_leaves_the_rest_to_be_given_back(self):
        model, optimizer = trainable(patch_torch_functions=True)
        backward(loss_of(model), optimizer)
        weight = model[0].weight
        grad, weight.grad = weight.grad[:2].clone(), None
        weight.data = weight.data[:2].clone()
        weight.grad = grad
        with contextlib.suppress(RuntimeError):
            amp.deinitialize()
        assert model[2].weight.dtype is torch.float32
        assert "step" not in vars(optimizer)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


class TestWritingWeights:
    """Of writing to weights and masters, scaling/test_edited_weights.py has every means."""

    def test_writing_to_one_half_element_rounds_no_other(self):
        model, optimizer = trainable()
        expected = masters(optimizer)[0].detach().clone()
        expected[0, 1] = model[0].weight.data[0, 1] = 0.25
        optimizer.step()
        assert_same_bits(masters(optimizer)[0], expected)
        expected[0, 1] = model[0].weight.data[0, 1] = 0.5
        amp.deinitialize()
        assert_same_bits(model[0].weight, expected)

    def test_data_of_half_weights_can_be_replaced_twice_in_a_row(self):
        model, _ = trainable(model=nn.Linear(4, 1000))
        model(batch(0))
        wanted = model.weight.detach().float() * 4
        for _ in range(2):
            model.weight.data = model.weight.data * 2
        assert_same_bits(model.state_dict()["weight"], wanted)

    @pytest.mark.parametrize("part", [lambda data: data, lambda data: data[1:], lambda data: data.view(-1)])
    def test_kept_data_of_a_master_counts_whenever_it_is_written_to(self, part):
        model, optimizer = trainable()
        master = masters(optimizer)[0]
        kept = [part(master.data), part(master.detach().data), part(master.data)]
        for index, data in enumerate(kept * 2):
            step(model, optimizer, index)
            data.fill_(index + 1)
            loss_of(model, index)
            assert bool((model[0].weight[1:] == index + 1).all())
            assert bool((master[1:] == index + 1).all())

    def test_masters_moved_into_one_flat_tensor_count_when_it_is_written_to(self):
        model, optimizer = trainable()
        flat = torch.zeros(sum(master.numel() for master in masters(optimizer)))
        pieces = flat.split([master.numel() for master in masters(optimizer)])
        for master, piece in zip(masters(optimizer), pieces, strict=True):
            master.data = piece.view_as(master).copy_(master.detach())
        loss_of(model)
        flat.mul_(0).add_(0.25)
        loss_of(model)
        assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())

    def test_reading_data_of_masters_leaves_half_weights_alone(self):
        model, optimizer = trainable()
        loss = loss_of(model)
        norms = [master.data.norm() for master in masters(optimizer)]
        loss_of(model)
        backward(loss, optimizer)  # its graph has the half weights as they were
        assert all(norms)

    def test_a_forward_that_makes_its_own_weights_float32_is_an_error_with_the_cure(self):
        class Router(nn.Module):  # as that of GPTSAN
            def __init__(self) -> None:
                super().__init__()
                self.classifier = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                self.classifier = self.classifier.to(torch.float32)
                return self.classifier(x.to(torch.float32)).softmax(-1).to(x.dtype)

        def train(**options: object) -> None:
            model, optimizer = trainable(model=nn.Sequential(nn.Linear(4, 4), Router(), Router()), **options)
            for _ in range(2):
                step(model, optimizer)

        with pytest.raises(UsageError, match=r"1\.classifier.weight: .* became torch\.float32") as caught:
            train()
        kept = str(caught.value).partition("keep_fp32=")[2].partition(")")[0]
        assert kept == "['*.classifier']"
        amp.deinitialize()
        train(keep_fp32=["*.classifier"])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
    def test_a_model_that_the_user_has_converted_is_an_error(self, dtype):
        model, _ = trainable()
        model.to(dtype)
        with pytest.raises(UsageError, match=rf"became {dtype} of shape .* after amp\.initialize"):
            model(batch(0))

    def test_buffers_that_the_model_replaces_are_saved_and_given_back_in_float32(self):
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


class TestSeveralModels:
    """What is written into masters is followed before a forward, in this model's half weights and in no others."""

    def weights_after_forward(self, model: nn.Module, of: nn.Module | None = None) -> set[float]:
        model(torch.ones(2, 2))
        return {float(element) for parameter in (of or model).parameters() for element in parameter.detach().flatten()}

    def test_masters_of_another_model_are_not_followed(self):
        (first, _), (second, optimizer) = trainable(model=nn.Linear(2, 2)), trainable(model=nn.Linear(2, 2))
        for model in (first, second):
            model(torch.ones(2, 2))
        write(masters(optimizer), 3.0)
        assert self.weights_after_forward(first, of=second) != {3.0}
        assert self.weights_after_forward(second) == {3.0}

    @pytest.mark.parametrize("first_is_gone", [False, True])
    def test_masters_of_an_optimizer_that_came_later_are_followed(self, first_is_gone):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [SGD(model[0].parameters())]
        initialize(model, optimizers[0])
        model(torch.ones(2, 2))
        if first_is_gone:
            del optimizers[0]
            gc.collect()
        optimizers.append(SGD(model[1].parameters()))
        initialize(model, optimizers[-1])
        for optimizer in optimizers:
            write(masters(optimizer), 3.0)
        assert self.weights_after_forward(model, of=model[1] if first_is_gone else model) == {3.0}

    def test_masters_of_a_layer_that_came_later_are_followed(self):
        pairs = [trainable(model=nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
        (model, _), (other, _) = pairs
        model(torch.ones(2, 2))
        model.append(other[0])
        for _, optimizer in pairs:
            write(masters(optimizer), 3.0)
        assert self.weights_after_forward(model) == {3.0}


class TestStateDict:
    def test_state_dict_has_the_masters_for_the_whole_and_for_a_part(self, half):
        model = nn.Sequential(network(), nn.BatchNorm1d(3))
        names = list(model.state_dict())
        _, optimizer = trainable(model=model, half_dtype=half)
        step(model, optimizer)
        saved = model.state_dict()
        assert list(saved) == names
        assert dtypes(saved.values()) == {torch.float32, torch.int64}
        assert_same_state([saved[name] for name, _ in model.named_parameters()], masters(optimizer))
        assert_same_bits(model[0][0].state_dict()["weight"], saved["0.0.weight"])
        assert [model.state_dict(keep_vars=True)[name] for name, _ in model.named_parameters()] == masters(optimizer)

    @pytest.mark.parametrize("exchange", [lambda p, data: setattr(p, "data", data), lambda p, data: p.set_(data)])
    def test_state_dict_keeps_its_values_if_weights_get_other_data(self, exchange):
        model, _ = trainable()
        saved = model.state_dict()
        wanted = copy.deepcopy(saved)
        with torch.no_grad():
            for parameter in model.parameters():
                exchange(parameter, torch.full_like(parameter, 0.125))
        loss_of(model)  # a forward has masters follow
        assert_same_state(saved, wanted)
        model.load_state_dict(saved)
        assert_same_state(model.state_dict(), wanted)

    def test_loading_part_by_part_sets_both_copies(self, half):
        saved = network(seed=1).state_dict()
        model, optimizer = trainable(half_dtype=half)
        for index in (0, 2):
            assert model[index].load_state_dict({"weight": saved[f"{index}.weight"]}).missing_keys == []
        assert_same_state(masters(optimizer), list(saved.values()))
        assert_same_state(list(model.parameters()), [wanted.to(half) for wanted in saved.values()])
        optimizer.step()
        assert_same_state(model.state_dict(), saved)

    def test_loading_with_assign_raises_and_changes_nothing(self):
        model, _ = trainable()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match=r"assign=True\) would replace the half parameters"):
            model.load_state_dict(network(seed=1).state_dict(), assign=True)
        assert_same_state(model.state_dict(), before)
        assert model[0].weight.dtype is torch.float16

    def test_loading_into_a_copy_with_assign_leaves_the_model_alone(self):
        model, _ = trainable()
        twin = copy.deepcopy(model)
        twin.load_state_dict(network(seed=1).state_dict(), assign=True)
        assert twin[0].weight.dtype is torch.float32
        assert model[0].weight.dtype is torch.float16

    def test_loading_into_a_part_that_has_only_buffers_keeps_every_bit(self):
        part = nn.Module()
        part.register_buffer("frequencies", torch.tensor([0.1, 0.2]))
        model, _ = trainable(model=nn.ModuleList([network(), part]))
        model.load_state_dict({**model.state_dict(), "1.frequencies": torch.tensor([0.3, 0.7])})
        assert_same_bits(model.state_dict()["1.frequencies"], torch.tensor([0.3, 0.7]))

    @pytest.mark.parametrize("make", [network, lambda: nn.Linear(4, 3)], ids=["layers", "one layer"])
    def test_loading_after_a_parameter_was_unfrozen_gives_its_master_every_bit(self, make):
        model, saved = make(), make().state_dict()
        next(model.parameters()).requires_grad_(False)
        _, optimizer = trainable(model=model)
        next(model.parameters()).requires_grad_(True)
        model.load_state_dict({name: value + 0.1 for name, value in saved.items()})
        assert_same_bits(masters(optimizer)[0], next(iter(saved.values())) + 0.1)

    @pytest.mark.parametrize(
        "write",
        [
            lambda tensor: tensor.fill_(2),
            lambda tensor: tensor.data.fill_(2),
            lambda tensor: setattr(tensor, "data", torch.full_like(tensor, 2)),
            lambda tensor: tensor.numpy().fill(2),
        ],
        ids=["counted", "data", "other data", "numpy"],
    )
    def test_state_dict_of_a_frozen_parameter_is_never_out_of_date(self, write):
        model = network().requires_grad_(False)
        initialize(model)
        assert_same_bits(model.state_dict()["0.weight"], model[0].weight.float())
        write(model[0].weight)
        assert_same_bits(model.state_dict()["0.weight"], torch.full((6, 4), 2.0))

    def test_state_dict_of_a_frozen_parameter_that_came_half_is_the_parameter(self, half):
        model = network().to(half)
        model[0].weight.requires_grad_(False)
        trainable(model=model, half_dtype=half)
        saved = model.state_dict()
        assert saved["0.weight"].data_ptr() == model[0].weight.data_ptr()
        assert saved["2.weight"].dtype is torch.float32

    def test_state_dict_of_half_running_statistics_is_what_batch_norm_has_written(self, half):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        initialize(model, opt_level="O3", half_dtype=half, cast_buffers=True)
        model(batch(0) + 5)
        wanted = model[1].running_mean.float()
        assert wanted.any()
        assert_same_bits(model.state_dict()["1.running_mean"], wanted)
        model(batch(1) + 5)
        wanted = model[1].running_mean.float()
        amp.deinitialize()
        assert_same_bits(model[1].running_mean, wanted)

    def test_state_dict_of_half_buffers_keeps_the_float32_values_until_they_change(self):
        model = network()
        model.register_buffer("frequencies", torch.tensor([0.1, 0.2, 0.3]))
        initialize(model, cast_buffers=True)
        assert model.frequencies.dtype is torch.float16
        assert_same_bits(model.state_dict()["frequencies"], torch.tensor([0.1, 0.2, 0.3]))
        model.frequencies[1] = 5
        assert_same_bits(model.state_dict()["frequencies"], torch.tensor([0.1, 5, 0.3]))
        amp.deinitialize()
        assert_same_bits(model.frequencies, torch.tensor([0.1, 5, 0.3]))

    def test_state_dict_hooks_of_the_user_run_last(self):
        model, _ = trainable(model=nn.Linear(4, 4))
        wanted = model.state_dict()["weight"].clone().T

        def transpose(_: nn.Module, saved: dict[str, Any], prefix: str, __: object) -> None:
            saved[f"{prefix}weight"] = saved[f"{prefix}weight"].T

        model.register_state_dict_post_hook(transpose)
        assert_same_bits(model.state_dict()["weight"], wanted)


class Tagged(nn.Parameter):
    """A parameter of a library's class, which copies itself as torch's does."""


class Curved(nn.Parameter):
    """A parameter whose class copies it with its attributes, as geoopt's does."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, curvature: float = 1.0) -> Any:
        made = super().__new__(cls, data, requires_grad)
        made.curvature = curvature
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = Curved(self.data.clone(), self.requires_grad, self.curvature)
        return memo[id(self)]


class TestCopies:
    @pytest.mark.parametrize("kind", [Tagged, functools.partial(Curved, curvature=0.5)])
    def test_a_copy_of_a_parameter_has_its_class_and_the_masters_bits(self, kind, half):
        model = network()
        model[0].weight = kind(model[0].weight.detach())
        model[2].weight = kind(model[2].weight.detach(), requires_grad=False)
        before = [each.detach().clone() for each in model.parameters()]
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, half_dtype=half)
        model.listed = [model[0].weight]
        twin, other = copy.deepcopy((model, optimizer))
        assert_same_bits(twin[0].weight, before[0])
        assert_same_bits(twin[2].weight, before[1].to(half).float())
        assert twin.listed[0] is other.param_groups[0]["params"][0] is twin[0].weight
        for one, its_copy in zip(model.parameters(), twin.parameters(), strict=True):
            assert (type(its_copy), its_copy.requires_grad) == (type(one), one.requires_grad)
            assert vars(its_copy) == vars(one)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_of_the_model_casts_by_itself_and_has_no_masters(self, duplicate, half):
        model, optimizer = trainable(half_dtype=half)
        twin = duplicate(model)
        wanted = twin(batch(0))
        step(model, optimizer)
        assert_same_bits(twin(batch(0)), wanted)
        assert twin.state_dict()["0.weight"].dtype is (torch.float32 if duplicate is copy.deepcopy else half)
        twin.state_dict()["0.weight"].zero_()  # as an average of weights is written by many
        assert not twin[0].weight.any()
        amp.deinitialize()
        assert twin(batch(0)).dtype is torch.float32

    @pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD])
    def test_a_copy_of_model_and_optimizer_steps_by_itself(self, make):
        model, optimizer = trainable(make)
        step(model, optimizer)
        twin_model, twin = copy.deepcopy((model, optimizer))
        before = twin_model[0].weight.detach().clone()
        twin_model(batch(0)).sum().backward()
        twin.step()
        assert not torch.equal(twin_model[0].weight, before)

    def test_a_pickle_after_a_copy_has_half_weights_and_state(self, half):
        model, optimizer = trainable(torch.optim.Adam, half_dtype=half)
        step(model, optimizer)
        copy.deepcopy((model, optimizer))
        pickled = pickle.loads(pickle.dumps(optimizer))
        assert {each.dtype for each in pickled.param_groups[0]["params"]} == {half}
        assert {state["exp_avg"].dtype for state in pickled.state.values()} == {half}


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


class TestClosure:
    def step(self, model: nn.Module, optimizer: Any, overflow_at: int | None = None) -> tuple[Any, list[float]]:
        """Steps with a closure whose loss overflows in one of its calls; returns the result, and the losses."""
        seen = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            backward(loss * (OVERFLOW if len(seen) == overflow_at else 1), optimizer)
            seen.append(loss.item())
            return loss

        return optimizer.step(closure), seen

    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    @pytest.mark.parametrize(
        ("name", "overflow_at"),
        [("LBFGS", 0), ("LBFGS", 1), ("LBFGS", 3), ("SGD", 0), ("Adam-fused", 0), ("own way", 0)],
    )
    @pytest.mark.covering(2)  # what matters to LBFGS is when the overflow comes
    def test_an_overflow_in_a_closure_skips_the_step_and_restores_everything(self, name, overflow_at, level):
        make = {"LBFGS": functools.partial(torch.optim.LBFGS, max_iter=6), "own way": OwnWay, **OPTIMIZERS}[name]
        model, optimizer = trainable(make, opt_level=level)
        self.step(model, optimizer)
        before = everything(model, optimizer)
        result, losses = self.step(model, optimizer, overflow_at)
        assert isinstance(result, Tensor)
        assert len(losses) == overflow_at + 1
        assert amp.step_was_skipped(optimizer)
        assert amp.skipped_steps(optimizer) == 1
        assert_same_state(everything(model, optimizer), before)
        assert amp.get_loss_scale() == SCALE / 2
        self.step(model, optimizer)
        assert not amp.step_was_skipped(optimizer)


class TestDeinitialize:
    def test_deinitialize_gives_back_float32_weights_from_the_masters(self, half):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        parameters, attributes = list(model.parameters()), set(vars(optimizer))
        initialize(model, optimizer, half_dtype=half)
        step(model, optimizer)
        backward(loss_of(model, 1), optimizer)
        values, gradients = copies(masters(optimizer)), copy.deepcopy(grads(masters(optimizer)))
        state = copy.deepcopy(optimizer.state_dict())
        amp.deinitialize()
        assert optimizer.param_groups[0]["params"] == parameters == list(model.parameters())
        assert_same_state(parameters, values)
        assert_same_state(grads(parameters), gradients)
        assert_same_state(optimizer.state_dict(), state)
        assert list(optimizer.state) == parameters
        assert set(vars(optimizer)) == attributes
        for module in model.modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
            assert not any((*hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks))
        optimizer.step()
        assert model(batch(0)).dtype is torch.float32

    def test_weights_are_given_back_if_the_user_has_converted_one_layer(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        wanted = model[1].weight.detach().clone()
        trainable(model=model)
        model[0].float()
        amp.deinitialize()
        assert dtypes(model.parameters()) == {torch.float32}
        assert_same_bits(model[1].weight, wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
    def test_weights_keep_all_bits_if_the_user_has_converted_the_model(self, dtype):
        wanted = network().state_dict()
        model, _ = trainable()
        model.to(dtype)
        for name, values in model.state_dict().items():
            assert torch.equal(values, wanted[name])
        amp.deinitialize()
        assert_same_state(model.state_dict(), {name: values.to(dtype) for name, values in wanted.items()})

    @pytest.mark.parametrize("kernels", ["torch", None])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
    def test_gradients_stay_if_the_user_has_converted_the_model_after_a_block(self, dtype, kernels, select):
        select(kernels)
        model, optimizer = trainable()
        backward(loss_of(model), optimizer)
        wanted = [parameter.grad.to(dtype) for parameter in model.parameters()]
        model.to(dtype)
        amp.deinitialize()
        for parameter, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=2**-7, atol=2**-14)


class TestSetUp:
    def test_a_second_initialize_that_fails_changes_nothing_and_may_be_tried_again(self):
        model = nn.Linear(4, 3)
        initialize(model, half_dtype=torch.bfloat16)
        model(batch(0)).sum().backward()
        grad = model.weight.grad.clone()
        with pytest.raises(UsageError, match="in two optimizers") as kept:
            initialize(model, [SGD([model.weight]), SGD([model.weight, model.bias])], half_dtype=torch.bfloat16)
        assert_same_bits(model.weight.grad, grad)
        initialize(model, SGD(model.parameters()), half_dtype=torch.bfloat16)
        assert kept is not None

    def test_a_wrapper_of_an_adopted_optimizer_and_one_of_masters_are_refused(self):
        _, optimizer = trainable()
        with pytest.raises(UsageError, match=r"is in two optimizers.*hand in the outer one"):
            initialize([], Larc(optimizer))
        with pytest.raises(UsageError, match="masters that belong to another optimizer"):
            initialize([], SGD(masters(optimizer)))

    def test_a_module_that_two_models_share_and_one_keeps_is_refused(self):
        shared = nn.Linear(2, 2)
        with pytest.raises(OptionError, match="shared by two models"):
            initialize([nn.ModuleDict({"head": shared}), nn.ModuleDict({"tail": shared})], keep_fp32="head")
        assert shared.weight.dtype is torch.float32

    def test_an_optimizer_may_be_replaced_without_waiting_for_the_garbage_collector(self):
        gc.disable()
        try:
            model, optimizer = trainable()
            del optimizer
            initialize(model, MOMENTUM(model.parameters()))
        finally:
            gc.enable()

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_initialize_and_deinitialize_in_inference_mode_leave_ordinary_weights(self, level):
        with torch.inference_mode(False):
            model = network()
        with torch.inference_mode():
            _, optimizer = trainable(model=model, opt_level=level)
            model(batch(0))
        step(model, optimizer)
        with torch.inference_mode():
            amp.deinitialize()
        assert not model[0].weight.is_inference()

    def test_a_model_made_in_inference_mode_is_refused(self):
        with torch.inference_mode():
            model = network()
        with pytest.raises(OptionError, match=r"made under torch\.inference_mode"):
            initialize(model)
        assert model[0].weight.dtype is torch.float32


class WithoutConstructor(torch.optim.Optimizer):
    """Never calls the constructor of torch's class."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.param_groups, self.state, self.defaults = inside.param_groups, inside.state, inside.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)


class TestOtherOptimizers:
    @pytest.mark.parametrize(("wrap", "factor"), [(Larc, 0.5), (WithTuples, 0.5), (WithoutConstructor, 1.0)], ids=str)
    def test_a_wrapper_of_an_optimizer_steps_the_masters(self, wrap, factor):
        model, optimizer = trainable(lambda parameters: wrap(SGD(parameters)))
        backward(loss_of(model), optimizer)
        wanted = [master.detach() - 0.1 * (factor * master.grad) for master in masters(optimizer)]
        assert optimizer.step() == (None if wrap is WithoutConstructor else "stepped")
        for found, values in zip(model.state_dict().values(), wanted, strict=True):
            torch.testing.assert_close(found, values)

    @pytest.mark.parametrize("by_replacing", [False, True])
    def test_an_optimizer_that_writes_by_way_of_data_steps_the_masters(self, by_replacing):
        class ByData(torch.optim.SGD):
            def step(self) -> None:
                for parameter in self.param_groups[0]["params"]:
                    if by_replacing:
                        parameter.data = parameter.data * 0.5
                    else:
                        parameter.data.mul_(0.5)

        model, optimizer = trainable(ByData)
        wanted = [(master.detach() * 0.5).half() for master in masters(optimizer)]
        optimizer.step()  # without a gradient
        assert_same_state(list(model.parameters()), wanted)
        step(model, optimizer)
        loss = loss_of(model)
        model.state_dict()
        backward(loss, optimizer)  # saving has left the half weights of its graph as they were

    def test_a_step_that_fires_no_hooks_and_writes_by_way_of_data_steps_the_masters(self):
        def step(me: Any, closure: Any = None) -> None:
            for parameter in me.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)

        model = network()
        optimizer = SGD(model.parameters())
        optimizer.step = types.MethodType(step, optimizer)
        initialize(model, optimizer)
        backward(loss_of(model), optimizer)
        wanted = [(master.detach() - 0.1 * master.grad).half() for master in masters(optimizer)]
        optimizer.step()
        assert_same_state(list(model.parameters()), wanted)


class TestStepHooks:
    def test_post_hooks_see_the_new_half_weights_and_what_they_write_stays(self):
        model, optimizer = trainable()
        seen = []

        def clamp(*_: object) -> None:
            seen.append(model[0].weight.detach().clone())
            with torch.no_grad():
                model[0].weight.clamp_(-0.01, 0.01)

        optimizer.register_step_post_hook(clamp)
        before = model[0].weight.detach().clone()
        backward(loss_of(model), optimizer)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            optimizer.step()  # an exception that is being handled is not one of the step
        assert not torch.equal(seen[0], before)
        assert float(masters(optimizer)[0].detach().abs().max()) <= 0.0101
        assert len(optimizer._optimizer_step_post_hooks) == 1
        assert not optimizer._optimizer_step_pre_hooks

    def test_pre_hooks_write_to_the_weights_that_are_updated(self):
        model, optimizer = trainable()

        def zero(optimizer: Any, *_: object) -> None:
            (held, _) = optimizer.param_groups[0]["params"]
            assert held is model[0].weight
            assert held.dtype is torch.float16
            write([held], 0.0)

        optimizer.register_step_pre_hook(zero)
        backward(loss_of(model), optimizer)
        expected = -0.1 * masters(optimizer)[0].grad
        optimizer.step()
        torch.testing.assert_close(masters(optimizer)[0].detach(), expected)

    def test_pre_hooks_clip_the_gradients_that_are_stepped_with(self):
        model, optimizer = trainable()
        before = copies(masters(optimizer))
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1e-2) and None)
        step(model, optimizer)
        moves = [old - master.detach() for old, master in zip(before, masters(optimizer), strict=True)]
        assert nn.utils.get_total_norm(moves).item() == pytest.approx(1e-3, rel=1e-2)  # by the learning rate


class TestManyParameters:
    """At O2, the block's end and the step run few Python calls for each parameter: C++ walks the lists."""

    def calls_of_a_step(self, count: int) -> Counter[str]:
        """Counts the calls that code of amp makes in the end of a block and a step of ``count`` parameters."""
        model = nn.ParameterList([torch.ones(2) for _ in range(count)])
        _, optimizer = trainable(functools.partial(SGD, foreach=True), model)
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

    def test_each_parameter_adds_few_calls_to_a_step(self, compiled, compiled_calls, select, select_calls):
        select("extension")
        select_calls("compiled")
        fewer, more = self.calls_of_a_step(20), self.calls_of_a_step(40)
        grows = {name: (count - fewer[name]) / 20 for name, count in more.items() if count > fewer[name]}
        assert grows == {"id": 1}
