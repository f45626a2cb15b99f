"""Of adopted optimizers: gradients through `scale_loss` blocks, and steps that run, are skipped or are refused.

Functions do not cast here, and scales are powers of two: every number is that of plain float32 training, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stepping
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import MOMENTUM, OPTIMIZERS, OTHERS, OVERFLOW, SGD, Larc, backward, initialize
from stepping import distance, every_half, everything, loss_of, nothing_changes, train, trained_by_torch, weights  # noqa: F401
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from ampatch import MixedPrecision, amp
from ampatch.errors import AmpWarning, LossScaleError, OptionError, UsageError
from ampatch.runtime import runtime
from ampatch.scaling import optimizer_gradients

SCALE = 2.0**16
LINE = "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to "

UPDATES_HALF = pytest.mark.filterwarnings("ignore:the SGD updates half weights")

delays = pytest.mark.parametrize("delay_unscale", [False, True], ids=["unscaled-each-time", "unscaled-at-the-end"])


def linear(size: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, size, bias=False)


def started(make: Callable[..., Any] = SGD, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = linear() if model is None else model
    return stepping.started(make, model=model, **{"init_scale": SCALE, **options})


def started_half(half_dtype: torch.dtype, **options: Any) -> tuple[nn.Parameter, Any]:
    """Returns a half weight without a master, and its optimizer."""
    weight = nn.Parameter(torch.ones(3, dtype=half_dtype))
    return weight, started(model=nn.ParameterList([weight]), **options)[1]


def overflow(model: nn.Module, optimizers: Any, **options: Any) -> None:
    backward(loss_of(model) * OVERFLOW, optimizers, **options)


def gradients_of_torch(*indices: int, model: Callable[[], nn.Module] = linear) -> list[Tensor]:
    """Returns the gradients that plain torch adds up over batches."""
    layer = model()
    for index in indices:
        loss_of(layer, index).backward()
    return [parameter.grad for parameter in layer.parameters()]


def assert_gradients(model: nn.Module, expected: list[Tensor]) -> None:
    assert_same_state([parameter.grad for parameter in model.parameters()], expected)


def assert_block_is_refused(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(UsageError, match=message), amp.scale_loss(*args, **options):
        pytest.fail("the block was entered")


class TestSkippedSteps:
    def test_table_has_every_optimizer_of_torch(self):
        names = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
        assert {name.partition("-")[0] for name in OPTIMIZERS} | OTHERS == names

    @pytest.mark.parametrize("at", [0, 2], ids=["first-step", "third-step"])
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.covering(1)
    def test_skipped_step_changes_nothing_then_or_later(self, make, at):
        model, optimizer = started(make)
        for index in range(4):
            if index == at:
                optimizer.zero_grad()
                overflow(model, optimizer)
                with nothing_changes(model, optimizer):
                    optimizer.step()
                assert amp.step_was_skipped(optimizer)
            optimizer.zero_grad()
            backward(loss_of(model, index), optimizer)
            optimizer.step()

        assert_same_state(everything(model, optimizer), everything(*trained_by_torch(make, linear(), *range(4))))

    @pytest.mark.usefixtures("distance")
    @pytest.mark.parametrize("verbosity", [0, False, 1])
    def test_skipped_steps_are_counted_and_logged_unless_verbosity_is_0(self, verbosity, caplog):
        model, optimizer = started(OPTIMIZERS["Adam-fused"], verbosity=verbosity)
        told = []
        for factor in [OVERFLOW, OVERFLOW, 1, OVERFLOW, 1]:
            train(model, optimizer, factor)
            told.append((amp.step_was_skipped(optimizer), amp.skipped_steps(optimizer), amp.get_loss_scale()))
        assert told == [
            (True, 1, SCALE / 2),
            (True, 2, SCALE / 4),
            (False, 2, SCALE / 4),
            (True, 3, SCALE / 8),
            (False, 3, SCALE / 8),
        ]
        assert caplog.messages == [f"{LINE}{scale}" for scale in (SCALE / 2, SCALE / 4, SCALE / 8)] * bool(verbosity)

    def test_two_blocks_that_overflow_are_one_skipped_step_which_logs(self, caplog):
        model, optimizer = started(verbosity=1)
        overflow(model, optimizer)
        overflow(model, optimizer)
        assert caplog.messages == []
        optimizer.step()
        assert amp.skipped_steps(optimizer) == 1
        optimizer.zero_grad()
        optimizer.step()
        assert caplog.messages == [f"{LINE}32768.0"]

    def test_overflow_that_hysteresis_forgives_is_logged_with_the_scale_that_stays(self, caplog):
        model, optimizer = started(verbosity=1, hysteresis=2)
        train(model, optimizer, OVERFLOW, OVERFLOW)
        assert caplog.messages == [
            "Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at 65536.0",
            f"{LINE}32768.0",
        ]

    def test_step_hooks_run_unless_the_step_is_skipped(self):
        model, optimizer = started()
        fired = []
        optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
        optimizer.register_step_post_hook(lambda *_: fired.append("after"))
        overflow(model, optimizer)
        assert optimizer.step() is None
        assert fired == []
        train(model, optimizer, 1)
        assert fired == ["before", "after"]

    @pytest.mark.parametrize("loss_scale", [1.0, 128.0])
    def test_step_is_never_skipped_under_a_static_scale(self, loss_scale, caplog):
        model, optimizer = started(loss_scale=loss_scale, verbosity=1)
        train(model, optimizer, math.inf)
        assert not amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == loss_scale
        assert not model.weight.isfinite().any()
        assert caplog.messages == []

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    def test_block_after_an_overflow_is_judged_by_itself(self, sparse):
        torch.manual_seed(0)
        model, optimizer = started(model=nn.Embedding(5, 1, sparse=sparse))
        for factor in (1, OVERFLOW, 1, 1):
            backward(model(torch.tensor([1, 1, 3])).square().sum() * factor, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": SCALE / 2, "unskipped": 0}


@pytest.mark.usefixtures("distance")
class TestSeveralOptimizers:
    """Two layers with an optimizer each, which has its state, and two losses."""

    @pytest.fixture
    def layers(self) -> nn.Sequential:
        return nn.Sequential(linear(), linear())

    @pytest.fixture
    def optimizers(self, layers) -> list[torch.optim.Optimizer]:
        optimizers = [OPTIMIZERS["Adam-fused"](layer.parameters()) for layer in layers]
        initialize(layers, optimizers, num_losses=2, on_overflow="log")
        backward(loss_of(layers), optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return optimizers

    @pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["overflow-first", "overflow-last"])
    @pytest.mark.parametrize("loss_ids", [(0, 0), (0, 1)], ids=["one-scale", "two-scales"])
    @pytest.mark.parametrize("delayed", [False, True], ids=["", "first-check-delayed"])
    def test_overflow_skips_no_optimizer_of_another_block(self, layers, optimizers, order, loss_ids, delayed):
        before = weights(layers)
        for place, index in enumerate(order):
            loss = loss_of(layers[index]) * (1 if index else OVERFLOW)
            delay = delayed and place == 0
            backward(loss, optimizers[index], loss_id=loss_ids[index], delay_overflow_check=delay)
        for optimizer in optimizers:
            optimizer.step()
        assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, False]
        assert amp.get_loss_scale(0) == SCALE / 2
        assert [torch.equal(*pair) for pair in zip(weights(layers), before, strict=True)] == [True, False]

    def test_gradient_that_a_block_is_given_twice_is_unscaled_once(self):
        model = linear()
        optimizers = [SGD(model.parameters()), MOMENTUM(model.parameters())]
        initialize(model, optimizers)
        for _ in range(2):
            backward(loss_of(model), [optimizers[0], *optimizers])
        assert_gradients(model, gradients_of_torch(0, 0))


class TestSharedParameter:
    """Two optimizers with one parameter: gradients of two scales are never added up, nor used scaled."""

    @pytest.fixture
    def model(self) -> nn.Module:
        return linear()

    @pytest.fixture
    def optimizers(self, model) -> list[torch.optim.Optimizer]:
        optimizers = [SGD(model.parameters()), SGD(model.parameters())]
        initialize(model, optimizers, num_losses=2)
        backward(loss_of(model), optimizers[0], delay_unscale=True)
        return optimizers

    def test_block_and_step_of_the_other_optimizer_are_refused_while_it_is_scaled(self, model, optimizers):
        before = copy.deepcopy([model.weight, model.weight.grad])
        message = r"add to the gradient of weight, .* Hand both optimizers to amp\.scale_loss"
        assert_block_is_refused(message, loss_of(model, 1), optimizers[1])
        with pytest.raises(UsageError, match=r"optimizer\.step\(\) would use the gradient of weight"):
            optimizers[1].step()
        assert_same_state([model.weight, model.weight.grad], before)
        model.zero_grad()
        backward(loss_of(model, 1), optimizers[1])
        optimizers[1].step()

    def test_block_of_both_optimizers_unscales_it_once(self, model, optimizers):
        backward(loss_of(model, 1), optimizers)
        assert_gradients(model, gradients_of_torch(0, 1))
        for optimizer in optimizers:
            optimizer.step()

    def test_scaled_gradients_of_a_deleted_optimizer_become_none(self, model, optimizers, caplog):
        optimizers.pop(0)
        gc.collect()
        assert model.weight.grad is None
        assert caplog.messages == ["An optimizer was deleted whose gradients were still scaled: they are None now."]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.05),
}


class TestLearningRateSchedulers:
    """Warnings are errors here, so that a scheduler which finds fault with `step` fails these tests."""

    def test_table_has_every_scheduler_of_torch(self):
        names = {
            name
            for name, value in vars(lr_scheduler).items()
            if isinstance(value, type)
            and issubclass(value, lr_scheduler.LRScheduler)
            and value.__module__ == lr_scheduler.__name__
        }
        assert names - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.parametrize("skipped_first", [False, True], ids=["steps", "first-step-skipped"])
    @pytest.mark.parametrize("made", ["before", "after"])
    @pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
    @pytest.mark.covering(1)
    def test_scheduler_sets_the_learning_rates_of_plain_torch(self, make, made, skipped_first, level):
        def rates(model: nn.Module, with_amp: bool) -> list[float]:
            optimizer = MOMENTUM(model.parameters())
            scheduler = make(optimizer) if made == "before" or not with_amp else None
            if with_amp:
                initialize(model, optimizer, opt_level=level, half_dtype=torch.bfloat16)
            scheduler = scheduler or make(optimizer)
            arguments = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            rates = []
            for index in range(4):
                overflows = with_amp and skipped_first and index == 0
                optimizer.zero_grad()
                backward(loss_of(model, index) * (OVERFLOW if overflows else 1), optimizer, with_amp=with_amp)
                optimizer.step()
                if with_amp:
                    assert amp.step_was_skipped(optimizer) is overflows
                scheduler.step(*arguments)
                rates += scheduler.get_last_lr()
            amp.deinitialize()
            optimizer.step()
            scheduler.step(*arguments)
            return rates

        assert rates(linear(), with_amp=True) == rates(linear(), with_amp=False)

    def test_schedulers_made_at_any_time_let_steps_skip_after_initializing_again(self):
        model = linear()
        optimizer = MOMENTUM(model.parameters())
        schedulers = [lr_scheduler.StepLR(optimizer, 1)]
        for _ in range(2):
            initialize(model, optimizer)
            schedulers.append(lr_scheduler.StepLR(optimizer, 1))
            overflow(model, optimizer)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            assert amp.step_was_skipped(optimizer)
            assert model.weight.isfinite().all()
            amp.deinitialize()
            optimizer.zero_grad()


class InFloat32(torch.autograd.Function):
    """Makes float32 of a tensor, and leaves its gradient float32: torch casts that."""

    @staticmethod
    def forward(ctx: Any, half: Tensor) -> Tensor:
        return half.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class TestGradients:
    def test_gradients_are_scaled_inside_the_block_and_unscaled_float32_after_it(self):
        model, optimizer = started()
        (expected,) = gradients_of_torch(0)
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert_same_bits(scaled_loss, loss * SCALE)
            scaled_loss.backward()
            assert_same_bits(model.weight.grad, expected * SCALE)
        assert_same_bits(model.weight.grad, expected)

    def test_gradients_keep_their_memory_in_the_next_block(self):
        # DDP's buckets alias them.
        model, optimizer = started()
        backward(loss_of(model), optimizer)
        grad, memory = model.weight.grad, model.weight.grad.data_ptr()
        with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
            assert model.weight.grad is grad
            scaled_loss.backward()
        assert model.weight.grad is grad
        assert grad.data_ptr() == memory

    @UPDATES_HALF
    @every_half
    @delays
    def test_half_gradients_add_up_although_their_scaled_copies_would_overflow(self, half_dtype, delay_unscale):
        weight, optimizer = started_half(half_dtype, loss_scale=2.0**10)
        weight.grad = torch.full_like(weight, 1000)  # times 2**10 it is beyond float16
        backward((weight * 4).sum(), optimizer, delay_unscale=delay_unscale)
        if delay_unscale:
            backward((weight * 8).sum(), optimizer)
        assert_same_bits(weight.grad, torch.full_like(weight, 1012 if delay_unscale else 1004))
        weight.grad = None
        InFloat32.apply(weight).sum().backward()
        assert weight.grad.dtype is half_dtype

    @UPDATES_HALF
    def test_gradients_of_a_type_that_the_user_chose_keep_it(self):
        weight, optimizer = started_half(torch.float16, loss_scale=2.0**4)
        weight.grad_dtype = None
        weight.grad = torch.ones(3, dtype=torch.bfloat16)
        backward((weight * 4).sum(), optimizer)
        assert weight.grad_dtype is None
        assert_same_bits(weight.grad, torch.full((3,), 5.0, dtype=torch.bfloat16))

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    @pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
    @pytest.mark.parametrize("blocks", [1, 2])
    def test_gradients_with_a_graph_can_be_differentiated_again(self, blocks, loss_scale):
        model, optimizer = started(loss_scale=loss_scale)
        reference = linear()
        for index in range(blocks):
            with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
                scaled_loss.backward(create_graph=True)
            loss_of(reference, index).backward(create_graph=True)
        assert_same_bits(model.weight.grad, reference.weight.grad)
        second, wanted = [
            torch.autograd.grad(module.weight.grad.square().sum(), module.weight)[0] for module in (model, reference)
        ]
        torch.testing.assert_close(second, wanted)
        model.weight.grad = reference.weight.grad = None

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=dtype_name)
    def test_gradients_of_double_and_complex_parameters_are_those_of_torch(self, dtype):
        def trained(with_amp: bool) -> Tensor:
            weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
            optimizer = SGD([weight])
            if with_amp:
                initialize(nn.ParameterList([weight]), optimizer)
            for _ in range(2):
                loss = (weight * (3 + 1j if dtype.is_complex else 3)).abs().square().sum()
                backward(loss, optimizer, with_amp=with_amp)
            optimizer.step()
            return weight.detach()

        assert_same_bits(trained(with_amp=True), trained(with_amp=False))

    def test_sparse_gradients_add_up(self):
        embedding, optimizer = started(model=nn.Embedding(5, 1, sparse=True))
        for _ in range(2):
            backward(embedding(torch.tensor([1, 1, 3])).sum(), optimizer)
        assert embedding.weight.grad.to_dense().flatten().tolist() == [0, 4, 0, 2, 0]


class TestWarningsOfInitialize:
    @pytest.mark.parametrize(
        ("level", "frozen", "warns"),
        [("O1", False, True), ("O1", True, False), ("O2", False, False)],
        ids=["half", "frozen", "masters"],
    )
    def test_half_weights_that_are_updated_without_masters_are_warned_of(self, level, frozen, warns):
        model = nn.Sequential(linear(), linear().half().requires_grad_(not frozen), linear().half())
        model[2].requires_grad_(False)
        message = r"SGD updates half weights, such as 1\.weight .*opt_level='O1' makes no"
        with pytest.warns(AmpWarning, match=message) if warns else contextlib.nullcontext():
            initialize(model, SGD(model.parameters()), opt_level=level)

    @pytest.mark.parametrize(
        ("half_dtype", "options", "is_lost"),
        [(torch.float16, {}, True), (torch.float16, {"eps": 1e-4}, False), (torch.bfloat16, {}, False)],
        ids=["float16", "larger-eps", "bfloat16"],
    )
    def test_eps_that_is_zero_in_half_is_warned_of_and_makes_weights_nan(self, half_dtype, options, is_lost):
        model = nn.Linear(2, 2).to(half_dtype)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with pytest.warns(AmpWarning) as told:
            initialize(model, optimizer, opt_level="O1", half_dtype=half_dtype, loss_scale=1.0)
        assert ("its eps of 1e-08 is zero" in str(told[0].message)) == is_lost
        backward(model(torch.zeros(1, 2)).sum(), optimizer)
        optimizer.step()
        assert bool(model.weight.isnan().any()) == is_lost

    @pytest.mark.parametrize("is_adopted", [True, False])
    def test_a_weight_that_user_code_makes_half_later_is_warned_of_once(self, is_adopted):
        model, loss = linear(), linear()  # losses may have weights, and give them the type of their inputs
        adopted = nn.Sequential(model, loss) if is_adopted else model
        optimizer = SGD([*model.parameters(), *loss.parameters()])
        initialize(adopted, optimizer, opt_level="O1")
        loss.weight.data = loss.weight.data.float()
        for frozen in (model.weight.requires_grad_(False), nn.Parameter(torch.ones(2))):
            frozen.data = frozen.data.half()
        name = r"1\.weight" if is_adopted else "a parameter of shape"
        with pytest.warns(AmpWarning, match=rf"made {name}.* torch.float16, a weight that the SGD updates, and"):
            loss.weight.data = loss.weight.data.half()
        loss.weight.data = loss.weight.data.half()

    @pytest.mark.parametrize(
        "swap",
        [
            pytest.param(nn.Module.half, id="by-module"),
            pytest.param(
                lambda m: torch.utils.swap_tensors(m.weight, nn.Parameter(m.weight.detach().half())), id="by-user"
            ),
        ],
    )
    def test_a_weight_that_is_swapped_for_a_half_one_is_warned_of(self, swap, monkeypatch):
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        model = linear()
        initialize(model, SGD(model.parameters()), opt_level="O1")
        with pytest.warns(AmpWarning, match=r"made weight torch\.float16, a weight that the SGD updates, and"):
            swap(model)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_optimizer_of_frozen_parameters_is_warned_of_if_others_are_trained_by_none(self, level):
        model = nn.Sequential(linear(), linear())
        optimizer = torch.optim.AdamW(model.parameters())
        model.requires_grad_(False)
        model.append(linear())
        with pytest.warns(AmpWarning, match=r"AdamW updates 2 parameters, all of which are frozen.* such as 2\.weight"):
            initialize(model, optimizer, opt_level=level)

    @pytest.mark.parametrize("all_frozen", [True, False])
    def test_optimizer_of_frozen_parameters_is_not_warned_of_otherwise(self, all_frozen):
        model = nn.Sequential(linear(), linear())
        optimizers = [SGD(each.parameters()) for each in model]
        model[0].requires_grad_(False)
        model[1].requires_grad_(not all_frozen)
        initialize(model, optimizers, opt_level="O2")


class TestCallsOutOfOrder:
    @pytest.fixture
    def model(self) -> nn.Linear:
        return linear()

    @pytest.fixture
    def optimizer(self, model) -> torch.optim.Optimizer:
        return started(model=model, num_losses=2)[1]

    def test_step_on_gradients_that_are_still_scaled_raises(self, model, optimizer):
        before = model.weight.detach().clone()
        backward(loss_of(model), optimizer, delay_unscale=True)
        with pytest.raises(UsageError, match=r"still scaled: .* delay_unscale=True"):
            optimizer.step()
        assert_same_bits(model.weight, before)
        backward(loss_of(model, 1), optimizer)
        optimizer.step()
        assert not torch.equal(model.weight, before)

    @pytest.mark.parametrize("steps_before", [False, True], ids=["", "after-a-step-before-backward"])
    def test_step_inside_the_block_raises(self, model, optimizer, steps_before):
        before = model.weight.detach().clone()
        with pytest.raises(UsageError, match=r"inside the amp\.scale_loss block"):  # noqa: SIM117, PT012
            with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
                if steps_before:
                    optimizer.step()
                scaled_loss.backward()
                optimizer.step()
        assert_same_bits(model.weight, before)

    def test_closure_whose_gradients_stay_scaled_does_not_step(self):
        model, optimizer = started(loss_scale=128.0)
        before = model.weight.detach().clone()

        def closure() -> None:
            backward(loss_of(model), optimizer, delay_unscale=True)

        with pytest.raises(UsageError, match=r"the closure of optimizer\.step\(closure\) left .* still scaled"):
            optimizer.step(closure)
        assert_same_bits(model.weight, before)
        optimizer.zero_grad()

    @pytest.mark.parametrize("scale", [65536, 32768], ids=["equal", "lower"])
    def test_adding_up_gradients_of_two_loss_scalers_raises_and_changes_nothing(self, model, optimizer, scale):
        if scale < SCALE:
            overflow(model, optimizer, loss_id=1)
            optimizer.step()
            optimizer.zero_grad()
        backward(loss_of(model), optimizer, loss_id=0, delay_unscale=True)
        before = model.weight.grad.clone()
        message = f"scaled by loss scaler 0 at 65536, .* loss scaler 1 at {scale}"
        assert_block_is_refused(message, loss_of(model, 1), optimizer, loss_id=1)
        assert_same_bits(model.weight.grad, before)
        optimizer.zero_grad()

    @pytest.mark.parametrize("steps", [False, True], ids=["next-block", "step-and-next-block"])
    @pytest.mark.parametrize("clear", ["optimizer", "model"])
    def test_cleared_gradients_do_not_bind_the_next_block_to_their_scale(self, model, optimizer, clear, steps):
        backward(loss_of(model), optimizer, loss_id=0, delay_unscale=True)
        (optimizer if clear == "optimizer" else model).zero_grad()
        if steps:
            optimizer.step()
        backward(loss_of(model, 1), optimizer, loss_id=1)
        assert_gradients(model, gradients_of_torch(1))


class TestBlockThatRaises:
    @UPDATES_HALF
    @pytest.mark.parametrize("before", [False, True], ids=["no-gradients", "gradients-there"])
    @pytest.mark.parametrize("half_dtype", [torch.float32, *HALF_DTYPES], ids=dtype_name)
    def test_block_that_raises_leaves_no_gradients_and_the_next_is_right(self, before, half_dtype):
        weight, optimizer = started_half(half_dtype, loss_scale=2.0**4)
        if before:
            weight.grad = torch.ones_like(weight)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
            with amp.scale_loss(weight.sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                raise ZeroDivisionError
        assert weight.grad is None
        backward((weight * 2).sum(), optimizer)
        assert_same_bits(weight.grad, torch.full_like(weight, 2))
        optimizer.step()

    def test_overflow_whose_gradients_a_raising_block_dropped_skips_nothing(self):
        model, optimizer = started()
        overflow(model, optimizer)
        with pytest.raises(KeyboardInterrupt), amp.scale_loss(loss_of(model), optimizer):
            raise KeyboardInterrupt
        backward(loss_of(model), optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == SCALE / 2

    @pytest.mark.parametrize("where", ["begin", "end"])
    def test_gradient_that_cannot_be_written_to_raises_and_all_are_dropped(self, where):
        model, optimizer = started(model=nn.Sequential(linear(), linear()), loss_scale=128.0)
        expected = gradients_of_torch(0, model=lambda: copy.deepcopy(model))
        with torch.inference_mode():
            refused = torch.ones(4, 4)
        if where == "begin":
            backward(loss_of(model), optimizer)
            model[1].weight.grad = refused
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):  # noqa: PT012, SIM117
            with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
                scaled_loss.backward()
                model[1].weight.grad = refused
        assert [layer.weight.grad for layer in model] == [None, None]
        backward(loss_of(model), optimizer)
        assert_gradients(model, expected)

    def test_block_that_raises_drops_gradients_of_a_delayed_one_too(self):
        model, optimizer = started(num_losses=2)
        backward(loss_of(model), optimizer, delay_unscale=True)
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer):
            raise ZeroDivisionError
        optimizer.step()
        backward(loss_of(model), optimizer, loss_id=1)
        optimizer.step()


class TestFloor:
    def test_floor_that_float32_rounds_is_still_the_floor(self):
        model, optimizer = started(init_scale=0.1, min_loss_scale=0.1)
        with pytest.raises(LossScaleError, match=r"floor of 0\.1 "):
            train(model, optimizer, math.inf)

    def test_error_at_the_floor_lists_eight_gradients(self):
        model, optimizer = started(model=nn.ModuleList([linear(1) for _ in range(13)]), min_loss_scale=SCALE)
        backward(sum(layer.weight.sum() for layer in model) * math.inf, optimizer)
        with pytest.raises(LossScaleError, match=r"13 gradients (?s:.*)7\.weight, .*\n    and 5 more"):
            optimizer.step()

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_gradients_cleared_before_the_step_raise_no_error_at_the_floor(self, set_to_none):
        model, optimizer = started(min_loss_scale=SCALE)
        backward(loss_of(model) * math.inf, optimizer)
        optimizer.zero_grad(set_to_none)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)

    def test_error_at_the_floor_counts_sparse_gradients_and_those_of_no_model(self):
        model, other = linear(), nn.Embedding(3, 1, sparse=True)
        optimizer = SGD([*model.parameters(), *other.parameters()])
        initialize(model, optimizer, init_scale=1.0, min_loss_scale=1.0)
        backward(other(torch.tensor([1, 1])).sum() * math.inf, optimizer)
        with pytest.raises(LossScaleError, match=r"a parameter of shape \(3, 1\), .*: 1 inf, 0 nan"):
            optimizer.step()


def product() -> Tensor:
    """Calls a whitelisted function with a weight, as a loss does."""
    with torch.enable_grad():
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True))


class Spy:
    """An optimizer that notes the type of a matrix product inside its step."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.dtypes: list[torch.dtype] = []

    def zero_grad(self) -> None: ...

    def step(self, closure: Callable[[], object] | None = None) -> None:
        if closure is not None:
            closure()
        self.dtypes.append(product().dtype)


class TestSteps:
    @every_half
    def test_step_runs_with_casts_off_and_its_closure_with_the_casts_of_the_caller(self, half_dtype):
        _, spy = started(Spy, opt_level="O1", half_dtype=half_dtype, loss_scale=1.0)
        inside = []
        spy.step()
        spy.step(lambda: inside.append(product().dtype))
        spy.step(closure=lambda: inside.append(product().dtype))
        with amp.disable_casts():
            spy.step(lambda: inside.append(product().dtype))
        assert spy.dtypes == [torch.float32] * 4
        assert inside == [half_dtype, half_dtype, torch.float32]
        with pytest.raises(ZeroDivisionError):
            spy.step(lambda: 1 / 0)
        assert product().dtype is half_dtype

    @pytest.mark.parametrize("loss_scale", [1.0, 2.0**7])
    def test_lbfgs_trains_under_a_static_scale_as_without_amp(self, loss_scale):
        def trained(with_amp: bool) -> Tensor:
            model = linear()
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
            if with_amp:
                initialize(model, optimizer, loss_scale=loss_scale)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model)
                backward(loss, optimizer, with_amp=with_amp)
                return loss

            for _ in range(2):
                assert isinstance(optimizer.step(closure), Tensor)
            return model.weight

        assert_same_bits(trained(with_amp=True), trained(with_amp=False))

    @pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
    def test_step_without_a_block_is_plain_and_warns_once_if_the_scale_is_dynamic(self, loss_scale):
        model, optimizer = started(MOMENTUM, loss_scale=loss_scale)
        reference = linear()
        plain = MOMENTUM(reference.parameters())
        optimizer.step()  # on no gradients
        for index in range(2):
            for module in (model, reference):
                loss_of(module, index).backward()
            warns = loss_scale == "dynamic" and index == 0
            with (
                pytest.warns(AmpWarning, match="SGD steps .* Type: with amp.sc") if warns else contextlib.nullcontext()
            ):
                optimizer.step()
            plain.step()
            assert_same_bits(model.weight, reference.weight)

    def test_step_is_torchs_own_again_after_deinitialize(self):
        model = linear()
        optimizer = SGD(model.parameters())
        before = set(vars(optimizer))
        initialize(model, optimizer)
        assert "step" in vars(optimizer)
        kept = optimizer.step
        overflow(model, optimizer)
        amp.deinitialize()
        assert set(vars(optimizer)) == before
        assert optimizer.step.__func__ is torch.optim.SGD.step
        model.weight.grad = torch.ones_like(model.weight)
        weight = model.weight.detach().clone()
        kept()
        torch.testing.assert_close(model.weight, weight - 0.1)


class TestOptimizersOfAnyClass:
    def test_wrapper_that_is_no_optimizer_of_torch_skips_and_steps(self):
        def make(parameters: Iterator[nn.Parameter]) -> Larc:
            return Larc(MOMENTUM(parameters))

        model, wrapper = started(make)
        overflow(model, wrapper)
        assert wrapper.step() is None
        assert (amp.step_was_skipped(wrapper), wrapper.steps) == (True, 0)
        wrapper.zero_grad()
        backward(loss_of(model), wrapper)
        assert wrapper.step() == "stepped"
        assert_same_bits(model.weight, trained_by_torch(make, linear(), 0)[0].weight)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    @pytest.mark.parametrize("kind", ["O4", "O5", "split", "MixedPrecision"])
    def test_error_of_a_step_that_lacks_the_graph_of_gradients_says_which_levels_have_it(self, kind):
        class SecondOrder(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                parameters = self.param_groups[0]["params"]
                with torch.enable_grad():
                    torch.autograd.grad([each.grad.sum() for each in parameters], parameters)

        model = linear().bfloat16() if kind == "MixedPrecision" else linear()
        optimizer: Any = SecondOrder(model.parameters(), lr=0.1)
        level = "O4" if kind == "O4" else "O0" if kind == "MixedPrecision" else "O5"
        initialize(model, optimizer, opt_level=level, **({"master_weights": "split"} if kind == "split" else {}))
        with amp.scale_loss(model(torch.ones(2, 4, dtype=model.weight.dtype)).square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        if kind == "MixedPrecision":
            amp.deinitialize()
            optimizer = MixedPrecision(optimizer)
        if kind == "O4":
            optimizer.step()
            return
        with pytest.raises(RuntimeError, match="does not have a grad_fn") as caught:
            optimizer.step()
        assert "type opt_level='O1' or 'O4'" in caught.value.__notes__[0]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_optimizer_of_a_tensor_of_no_model_skips_and_steps_in_float32_beside_the_models(self, level):
        model, temperature, plain = linear(), torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        optimizer, other, reference = SGD(model.parameters()), MOMENTUM([temperature]), MOMENTUM([plain])
        initialize(model, [optimizer, other], opt_level=level, init_scale=SCALE)
        backward(temperature.exp() * OVERFLOW, other)
        other.step()
        assert (amp.step_was_skipped(other), amp.step_was_skipped(optimizer), temperature.item()) == (True, False, 1)
        for _ in range(3):
            for tensor, each in ((temperature, other), (plain, reference)):
                each.zero_grad()
                backward(tensor.exp().sum(), each) if each is other else tensor.exp().sum().backward()
                each.step()
        assert_same_bits(temperature, plain)

    @pytest.mark.parametrize("skipped_first", [False, True], ids=["steps", "first-step-skipped"])
    def test_group_added_after_initialize_is_updated_with_its_own_options(self, skipped_first):
        def trained(with_amp: bool) -> Any:
            model = nn.Sequential(linear(), linear())
            optimizer = MOMENTUM([{"params": model[0].parameters(), "weight_decay": 0.1}])
            if with_amp:
                initialize(model, optimizer)
            if with_amp and skipped_first:
                overflow(model, optimizer)
                optimizer.step()
                model.zero_grad()
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
            assert not with_amp or [*amp.master_params(optimizer)] == [*model.parameters()]
            for index in range(2):
                optimizer.zero_grad()
                backward(loss_of(model, index), optimizer, with_amp=with_amp)
                optimizer.step()
            return everything(model, optimizer)

        assert_same_state(trained(with_amp=True), trained(with_amp=False))

    @pytest.mark.parametrize(
        ("thing", "lacks"),
        [
            (None, "param_groups, step, zero_grad"),
            (nn.Linear(1, 1), "param_groups, step"),
            (torch.optim.SGD, "param_groups"),
            ([1.0], "param_groups, step, zero_grad"),
        ],
        ids=["None", "model", "class", "list"],
    )
    def test_object_that_is_no_optimizer_is_refused(self, thing, lacks):
        with pytest.raises(OptionError, match=rf"which lacks {lacks}; expected an object with param_groups"):
            amp.master_params(thing)

    def test_wrapper_that_hands_its_attributes_on_is_refused_and_changes_nothing(self):
        class Around:
            def __init__(self, inside: object) -> None:
                object.__setattr__(self, "inside", inside)

            def __getattr__(self, name: str) -> object:
                return getattr(self.inside, name)

            def __setattr__(self, name: str, value: object) -> None:
                setattr(self.inside, name, value)

        model = linear()
        optimizer = SGD(model.parameters())
        step = optimizer.step
        with pytest.raises(OptionError, match=r"step of this Around cannot be replaced .* Hand in the"):
            initialize(model, Around(optimizer))
        assert optimizer.step == step
        assert "step" not in vars(optimizer)
        initialize(model, optimizer)


class TestCopies:
    """A copy of an adopted optimizer is what it would be without amp, and amp knows nothing of it."""

    @pytest.mark.parametrize(
        "make", [MOMENTUM, lambda parameters: Larc(MOMENTUM(parameters))], ids=["torch", "any-class"]
    )
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
    )
    def test_copy_steps_its_own_parameters_and_may_be_initialized_itself(self, make, duplicate):
        model, optimizer = started(make)
        overflow(model, optimizer)
        twin_model, twin = duplicate((model, optimizer))
        before = model.weight.detach().clone()
        twin_model.weight.grad = torch.ones_like(model.weight)

        twin.step()

        assert_same_bits(model.weight, before)
        torch.testing.assert_close(twin_model.weight, before - (0.05 if isinstance(twin, Larc) else 0.1))
        with pytest.raises(UsageError, match="was never handed to"):
            amp.step_was_skipped(twin)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)

        initialize(twin_model, twin)
        train(twin_model, twin, OVERFLOW)
        train(model, optimizer, 1)
        assert [amp.step_was_skipped(twin), amp.step_was_skipped(optimizer)] == [True, False]


class TestLifetime:
    @UPDATES_HALF
    @every_half
    @pytest.mark.parametrize("inside", [False, True])
    def test_scaled_gradients_are_dropped_by_deinitialize_unless_their_block_is_open(self, half_dtype, inside):
        weight, optimizer = started_half(half_dtype, init_scale=2.0**10)
        backward(weight.sum(), optimizer)
        with amp.scale_loss(weight.sum(), optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
            if inside:
                amp.deinitialize()
        if inside:
            assert_same_bits(weight.grad, torch.full_like(weight, 2))
        else:
            assert weight.grad.dtype is torch.float32
            with pytest.warns(AmpWarning, match="still scaled, .* are None now") as caught:
                amp.deinitialize()
            assert weight.grad is None
            assert caught[0].filename == __file__
        weight.grad = None
        weight.sum().backward()
        assert_same_bits(weight.grad, torch.ones_like(weight))

    def test_gradients_that_are_unscaled_or_of_scale_1_survive_deinitialize(self):
        models = [linear(), linear()]
        optimizers = [SGD(model.parameters()) for model in models]
        initialize(models, optimizers)
        backward(loss_of(models[0]) + loss_of(models[1]), optimizers, delay_unscale=True)
        backward(loss_of(models[0], 1), optimizers[0])
        models[1].zero_grad()
        amp.deinitialize()
        assert_gradients(models[0], gradients_of_torch(0, 1))
        initialize(models, optimizers, loss_scale=1.0)
        optimizers[0].zero_grad()
        backward(loss_of(models[0]), optimizers[0], delay_unscale=True)
        amp.deinitialize()
        assert_gradients(models[0], gradients_of_torch(0))

    @pytest.mark.parametrize("level", ["O0", "O1", "O2"])
    @pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with-scheduler"])
    @pytest.mark.covering(1)
    def test_optimizer_and_model_that_are_dropped_are_collected(self, scheduled, level):
        keeper = started(opt_level=level)
        model, optimizer = started(MOMENTUM, opt_level=level)
        scheduler = lr_scheduler.StepLR(optimizer, 1) if scheduled else None
        overflow(model, optimizer)
        optimizer.step()
        overflow(model, optimizer)
        (updated,) = amp.master_params(optimizer)
        gone = [weakref.ref(each) for each in (optimizer, model, model.weight, updated)]

        del optimizer, model, scheduler, updated
        gc.collect()

        assert [reference() for reference in gone] == [None] * 4
        assert keeper[0].weight is not None

    @UPDATES_HALF
    def test_parameter_that_its_optimizer_drops_is_collected(self):
        weight, optimizer = started_half(torch.float16, loss_scale=2.0)
        weight.grad = torch.ones_like(weight)
        backward(weight.sum(), optimizer)
        gone = weakref.ref(weight)
        optimizer.param_groups.clear()
        del weight
        gc.collect()
        assert gone() is None

    def test_records_of_blocks_do_not_pile_up_without_steps_and_go_with_a_step(self, monkeypatch):
        monkeypatch.setattr(optimizer_gradients, "_MANY_PENDING", 8)
        model, optimizer = started(num_losses=2)
        for index in range(50):
            backward(loss_of(model) * (OVERFLOW if index == 9 else 1), optimizer, loss_id=index % 2)
            assert len(runtime.live.adopted.record_of(optimizer).gradients.verdicts.pending) <= 8
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale(1) == SCALE / 2
        assert runtime.live.adopted.record_of(optimizer).gradients.verdicts.pending == []

    def test_skipped_step_empties_the_cache_of_cast_weights(self):
        model, optimizer = started(opt_level="O1", half_dtype=torch.bfloat16)
        overflow(model, optimizer)
        F.linear(torch.ones(1, 4), model.weight)
        assert len(runtime.live.cache) == 1
        optimizer.step()
        assert len(runtime.live.cache) == 0
