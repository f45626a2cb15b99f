"""Of adopted optimizers: gradients through `scale_loss` blocks, and steps that run, are skipped or are refused.

Where bits are compared, the level is O0 with a dynamic scale: no casts, and scales that are powers of two, so that
every number is that of plain float32 training.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import MOMENTUM, OPTIMIZERS, OTHERS, OVERFLOW, SGD, Larc, backward, initialize
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from ampatch import amp
from ampatch.errors import AmpWarning, LossScaleError, OptionError, UsageError
from ampatch.runtime import runtime
from ampatch.scaling import optimizer_gradients

SCALE = 2.0**16

UPDATES_HALF = pytest.mark.filterwarnings("ignore:the SGD updates half weights")


class Spy:
    """An optimizer that notes what type a matrix product has inside its step, and inside its closure."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.dtypes: list[torch.dtype] = []

    def zero_grad(self) -> None:
        pass

    def step(self, closure: Callable[[], object] | None = None) -> object:
        result = closure() if closure is not None else None
        self.dtypes.append(product().dtype)
        return result


def product() -> Tensor:
    """A whitelisted function on a weight, as in a loss."""
    with torch.enable_grad():
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True))


def linear(size: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, size, bias=False)


def batch(index: int, size: int = 4) -> Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, index: int) -> Tensor:
    return model(batch(index)).square().mean()


def overflow(model: nn.Module, optimizers: Any, **options: Any) -> None:
    backward(loss_of(model, 0) * OVERFLOW, optimizers, **options)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged so far."""
    caplog.set_level(logging.WARNING, logger="ampatch")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ampatch"]


class TestSkippedStep:
    def test_every_optimizer_of_torch_is_here(self):
        names = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
        assert {name.partition("-")[0] for name in OPTIMIZERS} | OTHERS == names

    @pytest.mark.parametrize("at", [0, 2], ids=["first-step", "third-step"])
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.covering(1)
    def test_leaves_everything_bit_for_bit_and_the_next_step_is_as_if_it_had_not_been(self, make, at):
        def train(skipping: bool) -> Any:
            model = linear()
            optimizer = make(model.parameters())
            if skipping:
                initialize(model, optimizer)
            for index in range(4):
                if index == at and skipping:
                    optimizer.zero_grad()
                    overflow(model, optimizer)
                    before = snapshot(model, optimizer)
                    optimizer.step()
                    assert_same_state(snapshot(model, optimizer), before)
                    assert amp.step_was_skipped(optimizer)
                optimizer.zero_grad()
                backward(loss_of(model, index), optimizer, with_amp=skipping)
                optimizer.step()
            return snapshot(model, optimizer)

        assert_same_state(train(skipping=True), train(skipping=False))

    def test_sparse_gradients(self):
        def train(skipping: bool) -> Any:
            torch.manual_seed(0)
            model = nn.Embedding(5, 3, sparse=True)
            optimizer = torch.optim.SparseAdam(model.parameters())
            if skipping:
                initialize(model, optimizer)
            for index in range(3):
                loss = model(torch.tensor([index, index, 4])).square().sum()
                if index == 1 and skipping:
                    optimizer.zero_grad()
                    backward(loss * OVERFLOW, optimizer)
                    optimizer.step()
                    assert amp.step_was_skipped(optimizer)
                optimizer.zero_grad()
                loss = model(torch.tensor([index, index, 4])).square().sum()
                backward(loss, optimizer, with_amp=skipping)
                optimizer.step()
            return snapshot(model, optimizer)

        assert_same_state(train(skipping=True), train(skipping=False))

    def test_is_counted_and_told(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        told = []
        for overflows in [True, True, False, True, False]:
            optimizer.zero_grad()
            backward(loss_of(model, 0) * (OVERFLOW if overflows else 1), optimizer)
            optimizer.step()
            told.append((amp.step_was_skipped(optimizer), amp.skipped_steps(optimizer), amp.get_loss_scale()))
        assert told == [
            (True, 1, SCALE / 2),
            (True, 2, SCALE / 4),
            (False, 2, SCALE / 4),
            (True, 3, SCALE / 8),
            (False, 3, SCALE / 8),
        ]

    def test_is_said_once_in_apex_words(self, log):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, verbosity=1)
        overflow(model, optimizer)
        assert log() == []
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert log() == ["Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0"]

    @pytest.mark.parametrize("verbosity", [0, False])
    def test_is_silent_at_verbosity_0(self, verbosity, log):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, verbosity=verbosity)
        overflow(model, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert log() == []

    def test_says_so_where_hysteresis_keeps_the_scale(self, log):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, verbosity=1, hysteresis=2)
        for _ in range(2):
            optimizer.zero_grad()
            overflow(model, optimizer)
            optimizer.step()
        assert log() == [
            "Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at 65536.0",
            "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        ]

    def test_fires_no_step_hooks_and_a_step_that_runs_does(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        fired = []
        optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
        optimizer.register_step_post_hook(lambda *_: fired.append("after"))
        overflow(model, optimizer)
        assert optimizer.step() is None
        assert fired == []
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert fired == ["before", "after"]

    @pytest.mark.parametrize("loss_scale", [1.0, 128.0])
    def test_never_happens_under_a_static_scale(self, loss_scale, log):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=loss_scale, verbosity=1)
        backward(loss_of(model, 0) * math.inf, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == loss_scale
        assert not model.weight.isfinite().any()
        assert log() == []

    def test_not_a_number_is_an_overflow_too(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0) * math.nan, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)

    def test_one_element_of_one_parameter_suffices(self):
        model = nn.Sequential(linear(), linear(), nn.Linear(4, 4))
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            model[2].bias.grad[3] = -math.inf
        optimizer.step()
        assert amp.step_was_skipped(optimizer)


class TestSeveralOptimizers:
    """One model, with an optimizer for each of two layers; two losses."""

    @pytest.fixture
    def layers(self) -> nn.Sequential:
        return nn.Sequential(linear(), linear())

    @pytest.fixture
    def optimizers(self, layers) -> list[torch.optim.Optimizer]:
        optimizers = [SGD(layer.parameters()) for layer in layers]
        initialize(layers, optimizers, num_losses=2, verbosity=1)
        return optimizers

    def skipped(self, optimizers: list[torch.optim.Optimizer]) -> list[bool]:
        for optimizer in optimizers:
            optimizer.step()
        return [amp.step_was_skipped(optimizer) for optimizer in optimizers]

    def test_all_that_the_pass_was_for_skip_and_its_scale_backs_off_once(self, layers, optimizers, log):
        overflow(layers, optimizers, loss_id=1)
        assert self.skipped(optimizers) == [True, True]
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == [SCALE, SCALE / 2]
        assert log() == ["Gradient overflow. Skipping step, loss scaler 1 reducing loss scale to 32768.0"]

    @pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["overflow-first", "overflow-last"])
    @pytest.mark.parametrize("loss_ids", [(0, 0), (0, 1)], ids=["one-scale", "two-scales"])
    def test_no_other_skips(self, layers, optimizers, order, loss_ids):
        blocks = [
            lambda: overflow(layers[0], optimizers[0], loss_id=loss_ids[0]),
            lambda: backward(loss_of(layers[1], 0), optimizers[1], loss_id=loss_ids[1]),
        ]
        for index in order:
            blocks[index]()
        assert self.skipped(optimizers) == [True, False]

    @pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["overflow-first", "overflow-last"])
    def test_no_other_skips_where_the_check_is_delayed(self, layers, optimizers, order):
        blocks = [
            lambda **options: overflow(layers[0], optimizers[0], **options),
            lambda **options: backward(loss_of(layers[1], 0), optimizers[1], **options),
        ]
        blocks[order[0]](delay_overflow_check=True)
        blocks[order[1]]()
        assert self.skipped(optimizers) == [True, False]
        assert amp.get_loss_scale() == SCALE / 2

    def test_two_losses_add_up_each_at_its_own_scale(self, layers, optimizers):
        overflow(layers, optimizers, loss_id=1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert amp.get_loss_scale(0) != amp.get_loss_scale(1)

        backward(loss_of(layers, 0), optimizers, loss_id=0)
        backward(loss_of(layers, 1), optimizers, loss_id=1)

        reference = copy.deepcopy(layers)
        reference.zero_grad()
        loss_of(reference, 0).backward()
        loss_of(reference, 1).backward()
        for parameter, wanted in zip(layers.parameters(), reference.parameters(), strict=True):
            assert_same_bits(parameter.grad, wanted.grad)
        assert self.skipped(optimizers) == [False, False]

    def test_one_given_twice_counts_once(self, layers, optimizers):
        backward(loss_of(layers, 0), [optimizers[0], optimizers[0], optimizers[1]])
        reference = copy.deepcopy(layers)
        reference.zero_grad()
        loss_of(reference, 0).backward()
        for parameter, wanted in zip(layers.parameters(), reference.parameters(), strict=True):
            assert_same_bits(parameter.grad, wanted.grad)

    def test_parameter_of_both_is_handled_once(self):
        model = linear()
        optimizers = [SGD(model.parameters()), MOMENTUM(model.parameters())]
        initialize(model, optimizers)
        for _ in range(2):
            backward(loss_of(model, 0), optimizers)
        reference = linear()
        loss_of(reference, 0).backward()
        assert_same_bits(model.weight.grad, 2 * reference.weight.grad)


class TestSharedParameter:
    """Two optimizers with one parameter: gradients of two scales are never added up, nor used scaled."""

    @pytest.fixture
    def model(self) -> nn.Module:
        return linear()

    @pytest.fixture
    def optimizers(self, model) -> list[torch.optim.Optimizer]:
        optimizers = [SGD(model.parameters()), SGD(model.parameters())]
        initialize(model, optimizers, num_losses=2)
        backward(loss_of(model, 0), optimizers[0], delay_unscale=True)
        return optimizers

    def test_block_for_the_other_one_while_gradients_are_scaled_raises_and_changes_nothing(self, model, optimizers):
        before = model.weight.grad.clone()
        with (
            pytest.raises(
                UsageError, match=r"add to the gradient of weight, .* Hand both optimizers to amp\.scale_loss"
            ),
            amp.scale_loss(loss_of(model, 1), optimizers[1]),
        ):
            pytest.fail("the block was entered")
        assert_same_bits(model.weight.grad, before)
        model.weight.grad = None

    def test_step_of_the_other_one_raises(self, model, optimizers):
        before = model.weight.detach().clone()
        with pytest.raises(UsageError, match=r"optimizer\.step\(\) would use the gradient of weight"):
            optimizers[1].step()
        assert_same_bits(model.weight.detach(), before)
        model.weight.grad = None

    def test_block_for_both_unscales_once(self, model, optimizers):
        backward(loss_of(model, 1), optimizers)
        reference = linear()
        for index in range(2):
            loss_of(reference, index).backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)
        for optimizer in optimizers:
            optimizer.step()

    def test_cleared_gradients_are_of_no_scale(self, model, optimizers):
        model.zero_grad()
        backward(loss_of(model, 1), optimizers[1])
        optimizers[1].step()

    def test_optimizer_that_dies_with_gradients_scaled_takes_them_along(self, model, optimizers, log):
        optimizers.pop(0)
        gc.collect()
        assert model.weight.grad is None
        assert log() == ["An optimizer was deleted whose gradients were still scaled: they are None now."]


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


class TestLearningRateScheduler:
    """Warnings are errors here, so that a scheduler which finds fault with `step` fails these tests."""

    def test_every_class_of_torch_is_here(self):
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
    def test_made_before_or_after_initialize_goes_its_way(self, make, made, skipped_first, level):
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

    def test_one_before_and_one_after(self):
        model = linear()
        optimizer = MOMENTUM(model.parameters())
        first = lr_scheduler.StepLR(optimizer, 1)
        initialize(model, optimizer)
        second = lr_scheduler.StepLR(optimizer, 1)
        overflow(model, optimizer)
        optimizer.step()
        first.step()
        second.step()
        assert amp.step_was_skipped(optimizer)

    @pytest.mark.parametrize("made", ["before", "after"])
    def test_setting_up_again_under_a_scheduler_skips_again(self, made):
        model = linear()
        optimizer = MOMENTUM(model.parameters())
        if made == "before":
            lr_scheduler.StepLR(optimizer, 1)
        initialize(model, optimizer)
        if made == "after":
            lr_scheduler.StepLR(optimizer, 1)
        amp.deinitialize()
        initialize(model, optimizer)
        overflow(model, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert model.weight.isfinite().all()


class TestGradients:
    def test_are_scaled_inside_the_block_and_unscaled_float32_after_it(self):
        model, reference = linear(), linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        loss = loss_of(model, 0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert_same_bits(scaled_loss, loss * SCALE)
            scaled_loss.backward()
            inside = model.weight.grad.clone()
        loss_of(reference, 0).backward()
        assert_same_bits(inside, reference.weight.grad * SCALE)
        assert_same_bits(model.weight.grad, reference.weight.grad)

    @pytest.mark.parametrize("loss_scale", ["dynamic", 128.0, 1.0])
    @pytest.mark.parametrize("delay_unscale", [False, True], ids=["unscaled-each-time", "unscaled-at-the-end"])
    def test_add_up_over_micro_batches(self, delay_unscale, loss_scale):
        model, reference = linear(), linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=loss_scale)
        for index in range(4):
            backward(loss_of(model, index), optimizer, delay_unscale=delay_unscale and index < 3)
            loss_of(reference, index).backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)
        assert model.weight.grad.data_ptr() != reference.weight.grad.data_ptr()
        optimizer.step()
        SGD(reference.parameters()).step()
        assert_same_bits(model.weight, reference.weight)

    @pytest.mark.parametrize("delay_unscale", [False, True], ids=["unscaled-each-time", "unscaled-at-the-end"])
    def test_add_up_onto_what_plain_backward_left(self, delay_unscale):
        model, reference = linear(), linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        loss_of(model, 0).backward()
        backward(loss_of(model, 1), optimizer, delay_unscale=delay_unscale)
        if delay_unscale:
            backward(loss_of(model, 2), optimizer)
        for index in range(3 if delay_unscale else 2):
            loss_of(reference, index).backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)

    def test_stay_where_they_are_while_they_are_brought_to_the_scale(self):
        # DDP's buckets alias them.
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        grad, memory = model.weight.grad, model.weight.grad.data_ptr()
        with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
            assert model.weight.grad is grad
            scaled_loss.backward()
        assert model.weight.grad is grad
        assert grad.data_ptr() == memory

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_half_weights_without_masters_are_warned_of(self, level):
        model = nn.Sequential(linear(), linear().half(), linear().half().requires_grad_(False))
        optimizer = SGD(model.parameters())
        if level == "O1":
            with pytest.warns(
                AmpWarning, match=r"SGD updates half weights, such as 1\.weight .*opt_level='O1' makes no"
            ):
                initialize(model, optimizer, opt_level=level)
        else:
            initialize(model, optimizer, opt_level=level)

    @pytest.mark.parametrize(
        ("half_dtype", "options", "is_lost"),
        [
            (torch.float16, {}, True),
            (torch.float16, {"eps": 1e-4}, False),
            (torch.bfloat16, {}, False),
        ],
        ids=["float16", "larger-eps", "bfloat16"],
    )
    def test_an_eps_that_is_zero_in_half_is_warned_of_and_makes_weights_nan(self, half_dtype, options, is_lost):
        model = nn.Linear(2, 2).to(half_dtype)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with pytest.warns(AmpWarning) as told:
            initialize(model, optimizer, opt_level="O1", half_dtype=half_dtype, loss_scale=1.0)
        assert ("its eps of 1e-08 is zero" in str(told[0].message)) == is_lost
        with amp.scale_loss(model(torch.zeros(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert bool(model.weight.isnan().any()) == is_lost

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_one_that_has_frozen_parameters_only_is_warned_of(self, level):
        model = nn.Sequential(linear(), linear())
        optimizer = torch.optim.AdamW(model.parameters())
        model.requires_grad_(False)
        model.append(linear())
        with pytest.warns(AmpWarning, match=r"AdamW updates 2 parameters, all of which are frozen.* such as 2\.weight"):
            initialize(model, optimizer, opt_level=level)

    @pytest.mark.parametrize("case", ["all-frozen", "another-has-them"])
    def test_one_that_has_frozen_parameters_only_may_be_right(self, case):
        model = nn.Sequential(linear(), linear())
        optimizers = [SGD(each.parameters()) for each in model]
        model[0].requires_grad_(False)
        if case == "all-frozen":
            model[1].requires_grad_(False)
        initialize(model, optimizers, opt_level="O2")

    def test_frozen_half_weights_are_not_warned_of(self):
        model = nn.Sequential(linear(), linear().half().requires_grad_(False))
        initialize(model, SGD(model.parameters()), opt_level="O1")

    @UPDATES_HALF
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("delay_unscale", [False, True], ids=["unscaled-each-time", "unscaled-at-the-end"])
    def test_half_ones_add_up_without_overflow_of_the_scaled_copy(self, half_dtype, delay_unscale):
        weight = nn.Parameter(torch.ones(3, dtype=half_dtype))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        initialize(nn.ParameterList([weight]), optimizer, loss_scale=2.0**10)
        weight.grad = torch.full_like(weight, 1000)  # times 2**10 it is beyond float16
        backward((weight * 4).sum(), optimizer, delay_unscale=delay_unscale)
        if delay_unscale:
            backward((weight * 8).sum(), optimizer)
        assert_same_bits(weight.grad, torch.full_like(weight, 1012 if delay_unscale else 1004))
        weight.grad = None
        weight.sum().backward()
        assert weight.grad.dtype is half_dtype

    @UPDATES_HALF
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("delay_unscale", [False, True], ids=["block", "delayed"])
    @pytest.mark.parametrize("clear", ["none", "zero", "model-none", "model-zero"])
    def test_half_ones_are_gone_if_they_are_cleared_inside_or_between_blocks(self, half_dtype, delay_unscale, clear):
        weight = nn.Parameter(torch.ones(3, dtype=half_dtype))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD([weight], lr=0.1)
        initialize(model, optimizer, loss_scale=2.0**4)
        weight.grad = torch.full_like(weight, 1000)
        with amp.scale_loss((weight * 4).sum(), optimizer, delay_unscale=delay_unscale) as scaled_loss:
            if delay_unscale:
                scaled_loss.backward()
            else:
                clear_gradients(model, optimizer, clear)
                scaled_loss.backward()
        if delay_unscale:
            clear_gradients(model, optimizer, clear)
            backward((weight * 4).sum(), optimizer)
        assert_same_bits(weight.grad, torch.full_like(weight, 4))

    @UPDATES_HALF
    def test_of_a_type_that_the_user_chose_keep_it(self):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
        weight.grad_dtype = None
        weight.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        initialize(nn.ParameterList([weight]), optimizer, loss_scale=2.0**4)
        backward((weight * 4).sum(), optimizer)
        assert weight.grad_dtype is None
        assert_same_bits(weight.grad, torch.full((3,), 5.0, dtype=torch.bfloat16))

    @pytest.mark.parametrize("clear", ["none", "zero", "model-none", "model-zero"])
    @pytest.mark.parametrize("where", ["before", "inside", "after-step"])
    def test_clearing_them(self, where, clear):
        model, reference = linear(), linear()
        optimizer, plain = MOMENTUM(model.parameters()), MOMENTUM(reference.parameters())
        initialize(model, optimizer)
        for index in range(3):
            if where == "before":
                clear_gradients(model, optimizer, clear)
            with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
                if where == "inside":
                    clear_gradients(model, optimizer, clear)
                scaled_loss.backward()
            optimizer.step()
            if where == "after-step":
                clear_gradients(model, optimizer, clear)
            plain.zero_grad()
            loss_of(reference, index).backward()
            plain.step()
        assert_same_bits(model.weight, reference.weight)

    def test_of_several_backward_passes_in_one_block(self):
        model, reference = linear(), linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        loss = loss_of(model, 0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            scaled_loss.backward()
        loss = loss_of(reference, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    @pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
    @pytest.mark.parametrize("blocks", [1, 2])
    def test_with_a_graph_can_be_differentiated_again(self, blocks, loss_scale):
        model, reference = linear(), linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=loss_scale)
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

    def test_that_are_none_stay_none(self):
        model = nn.Sequential(linear(), linear())
        model[1].requires_grad_(False)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        for _ in range(2):
            backward(loss_of(model, 0), optimizer)
            optimizer.step()
        assert model[1].weight.grad is None
        assert model[0].weight.grad is not None

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=dtype_name)
    def test_of_parameters_that_are_not_float32(self, dtype):
        def gradient(with_amp: bool) -> Tensor:
            weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            if with_amp:
                initialize(nn.ParameterList([weight]), optimizer)
            for _ in range(2):
                loss = (weight * (3 + 1j if dtype.is_complex else 3)).abs().square().sum()
                backward(loss, optimizer, with_amp=with_amp)
            optimizer.step()
            return weight.detach()

        assert_same_bits(gradient(with_amp=True), gradient(with_amp=False))

    def test_sparse_ones_add_up(self):
        embedding = nn.Embedding(5, 1, sparse=True)
        optimizer = SGD(embedding.parameters())
        initialize(embedding, optimizer)
        for _ in range(2):
            backward(embedding(torch.tensor([1, 1, 3])).sum(), optimizer)
        assert embedding.weight.grad.to_dense().flatten().tolist() == [0, 4, 0, 2, 0]

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    def test_pass_after_an_overflow_is_judged_by_itself(self, sparse):
        torch.manual_seed(0)
        model = nn.Embedding(5, 1, sparse=sparse)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        for index in range(4):
            loss = model(torch.tensor([1, 1, 3])).square().sum()
            backward(loss * (OVERFLOW if index == 1 else 1), optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": SCALE / 2, "unskipped": 0}

    def test_two_passes_that_overflow_are_one_skipped_step(self, log):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, verbosity=1)
        overflow(model, optimizer)
        overflow(model, optimizer)
        optimizer.step()
        assert amp.skipped_steps(optimizer) == 1
        assert log() == ["Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0"]

    def test_are_clipped_between_block_and_step(self):
        model, reference = linear(), linear()
        optimizer, plain = SGD(model.parameters()), SGD(reference.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
        optimizer.step()
        loss_of(reference, 0).backward()
        assert_same_bits(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
        plain.step()
        assert_same_bits(model.weight, reference.weight)

    def test_are_scaled_once_the_delay_is_over(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        scaled = model.weight.grad.clone()
        with amp.scale_loss(loss_of(model, 1), optimizer):
            assert_same_bits(model.weight.grad, scaled)
        assert_same_bits(model.weight.grad, scaled / SCALE)


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    target = model if how.startswith("model") else optimizer
    target.zero_grad(set_to_none=how.endswith("none"))


class TestCallsOutOfOrder:
    @pytest.fixture
    def model(self) -> nn.Linear:
        return linear()

    @pytest.fixture
    def optimizer(self, model) -> torch.optim.Optimizer:
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, num_losses=2)
        return optimizer

    def test_step_on_gradients_that_are_still_scaled_raises(self, model, optimizer):
        before = model.weight.detach().clone()
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        with pytest.raises(UsageError, match=r"still scaled: .* delay_unscale=True"):
            optimizer.step()
        assert_same_bits(model.weight, before)

        backward(loss_of(model, 1), optimizer)
        optimizer.step()
        assert not torch.equal(model.weight, before)

    def test_step_inside_the_block_raises(self, model, optimizer):
        before = model.weight.detach().clone()

        def step_too_early() -> None:
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
                scaled_loss.backward()
                optimizer.step()

        with pytest.raises(UsageError, match=r"inside the amp\.scale_loss block"):
            step_too_early()
        assert_same_bits(model.weight, before)

    def test_block_inside_a_block_for_the_same_optimizer_raises(self, model, optimizer):
        with (
            pytest.raises(UsageError, match="inside another one"),
            amp.scale_loss(loss_of(model, 0), optimizer),
            amp.scale_loss(loss_of(model, 1), optimizer),
        ):
            pytest.fail("the inner block was entered")
        assert model.weight.grad is None

    def test_blocks_of_two_optimizers_may_be_nested(self):
        model, reference = nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear())
        optimizers = [SGD(layer.parameters()) for layer in model]
        initialize(model, optimizers)
        with (
            amp.scale_loss(loss_of(model[0], 0), optimizers[0]) as first,
            amp.scale_loss(loss_of(model[1], 1), optimizers[1]) as second,
        ):
            first.backward()
            second.backward()
        for index in range(2):
            loss_of(reference[index], index).backward()
            assert_same_bits(model[index].weight.grad, reference[index].weight.grad)

    def test_block_inside_another_that_overflows_leaves_the_other_its_scale(self):
        models = [linear(), linear()]
        optimizers = [SGD(model.parameters()) for model in models]
        initialize(models, optimizers)
        with amp.scale_loss(loss_of(models[0], 0), optimizers[0]) as scaled_loss:
            scaled_loss.backward()
            overflow(models[1], optimizers[1])
        reference = linear()
        loss_of(reference, 0).backward()
        assert_same_bits(models[0].weight.grad, reference.weight.grad)

    def test_closure_whose_gradients_stay_scaled_does_not_step(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=128.0)
        before = model.weight.detach().clone()

        def closure() -> Tensor:
            loss = loss_of(model, 0)
            backward(loss, optimizer, delay_unscale=True)
            return loss

        with pytest.raises(UsageError, match=r"the closure of optimizer\.step\(closure\) left .* still scaled"):
            optimizer.step(closure)
        assert_same_bits(model.weight, before)
        optimizer.zero_grad()

    def test_step_before_backward_in_a_block_does_not_let_one_after_it_pass(self, model, optimizer):
        with pytest.raises(UsageError, match=r"inside the amp\.scale_loss block"):  # noqa: SIM117, PT012
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
                optimizer.step()
                scaled_loss.backward()
                optimizer.step()

    def test_scale_that_is_loaded_inside_a_block_is_for_the_next_one(self):
        model, reference = linear(), linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
        loss_of(reference, 0).backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)

    def test_adding_up_gradients_of_two_scales_raises_and_changes_nothing(self, model, optimizer):
        overflow(model, optimizer, loss_id=1)
        optimizer.step()
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, loss_id=0, delay_unscale=True)
        before = model.weight.grad.clone()
        with (
            pytest.raises(UsageError, match=r"scaled by loss scaler 0 at 65536, .* loss scaler 1 at 32768"),
            amp.scale_loss(loss_of(model, 1), optimizer, loss_id=1),
        ):
            pytest.fail("the block was entered")
        assert_same_bits(model.weight.grad, before)
        optimizer.zero_grad()

    def test_losses_of_two_scales_may_not_be_delayed_together_even_where_the_scales_are_equal_as_yet(
        self, model, optimizer
    ):
        backward(loss_of(model, 0), optimizer, loss_id=0, delay_unscale=True)
        with (
            pytest.raises(UsageError, match=r"loss scaler 0 at 65536, .* loss scaler 1 at 65536"),
            amp.scale_loss(loss_of(model, 1), optimizer, loss_id=1),
        ):
            pytest.fail("the block was entered")
        optimizer.zero_grad()

    @pytest.mark.parametrize("step", [False, True], ids=["next-block", "step-and-next-block"])
    @pytest.mark.parametrize("clear", ["none", "model-none"])
    def test_gradients_that_were_cleared_are_of_no_scale(self, model, optimizer, clear, step):
        backward(loss_of(model, 0), optimizer, loss_id=0, delay_unscale=True)
        clear_gradients(model, optimizer, clear)
        if step:
            optimizer.step()
        backward(loss_of(model, 1), optimizer, loss_id=1)
        reference = linear()
        loss_of(reference, 1).backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)


class TestBlockThatRaises:
    @UPDATES_HALF
    @pytest.mark.parametrize("before", [False, True], ids=["no-gradients", "gradients-there"])
    @pytest.mark.parametrize("half_dtype", [torch.float32, *HALF_DTYPES], ids=dtype_name)
    def test_leaves_no_gradients_and_the_next_iteration_is_clean(self, before, half_dtype):
        model, reference = linear().to(half_dtype), linear().to(half_dtype)
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=2.0**4)
        if before:
            model.weight.grad = torch.ones_like(model.weight)

        def fail_after_backward() -> None:
            with amp.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_after_backward()

        assert model.weight.grad is None
        backward((model.weight * 2).sum(), optimizer)
        (reference.weight * 2).sum().backward()
        assert_same_bits(model.weight.grad, reference.weight.grad)
        optimizer.step()
        SGD(reference.parameters()).step()
        assert_same_bits(model.weight, reference.weight)

    def test_an_overflow_that_is_gone_with_its_gradients_skips_nothing(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        overflow(model, optimizer)
        with pytest.raises(KeyboardInterrupt), amp.scale_loss(loss_of(model, 0), optimizer):
            raise KeyboardInterrupt
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale() == SCALE / 2

    @pytest.mark.parametrize("where", ["begin", "end"])
    def test_where_a_gradient_cannot_be_written_to(self, where):
        model, reference = nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear())
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=128.0)
        with torch.inference_mode():
            refused = torch.ones(4, 4)
        if where == "begin":
            backward(loss_of(model, 0), optimizer)
            model[1].weight.grad = refused

        def fail() -> None:
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
                scaled_loss.backward()
                model[1].weight.grad = refused

        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            fail()
        assert [layer.weight.grad for layer in model] == [None, None]
        backward(loss_of(model, 0), optimizer)
        loss_of(reference, 0).backward()
        for layer, wanted in zip(model, reference, strict=True):
            assert_same_bits(layer.weight.grad, wanted.weight.grad)

    def test_after_a_delayed_one(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, num_losses=2)
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model, 0), optimizer):
            raise ZeroDivisionError
        optimizer.step()
        backward(loss_of(model, 0), optimizer, loss_id=1)
        optimizer.step()


class TestFloor:
    def initialize(self, model: nn.Module, optimizer: object, **options: Any) -> None:
        initialize(model, optimizer, **{"init_scale": 2.0, "min_loss_scale": 1.0, **options})

    def test_stops_and_names_the_parameters_that_are_not_finite(self):
        model = nn.Sequential(linear(), linear(), nn.Linear(4, 4))
        optimizer = SGD(model.parameters())
        self.initialize(model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
                scaled_loss.backward()
                model[0].weight.grad[0, :2] = math.inf
                model[2].bias.grad[3] = math.nan
            optimizer.step()

        before = copy.deepcopy(model.state_dict())
        step()
        assert amp.get_loss_scale() == 1
        with pytest.raises(LossScaleError) as caught:
            step()
        message = str(caught.value)
        assert "loss scaler 0 is at its floor of 1" in message
        assert "0.weight, shape (4, 4), float32: 2 inf, 0 nan\n" in message
        assert "2.bias, shape (4,), float32: 0 inf, 1 nan" in message
        assert "1.weight" not in message
        assert_same_state(model.state_dict(), before)
        assert amp.skipped_steps(optimizer) == 2

    def test_a_floor_that_float32_rounds_is_still_the_floor(self):
        model = linear()
        optimizer = SGD(model.parameters())
        self.initialize(model, optimizer, init_scale=0.1, min_loss_scale=0.1)
        backward(loss_of(model, 0) * math.inf, optimizer)
        with pytest.raises(LossScaleError, match=r"floor of 0\.1 "):
            optimizer.step()

    def test_many_parameters_are_not_all_listed(self):
        model = nn.ModuleList([linear(1) for _ in range(13)])
        optimizer = SGD(model.parameters())
        self.initialize(model, optimizer, init_scale=1.0)
        backward(sum(layer.weight.sum() for layer in model) * math.inf, optimizer)
        with pytest.raises(LossScaleError, match=r"13 gradients (?s:.*)7\.weight, .*\n    and 5 more"):
            optimizer.step()

    def test_gradients_cleared_before_the_step_are_no_reason_to_stop(self):
        model = linear()
        optimizer = SGD(model.parameters())
        self.initialize(model, optimizer, init_scale=1.0)
        backward(loss_of(model, 0) * math.inf, optimizer)
        optimizer.zero_grad()
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)

    def test_sparse_gradients_and_parameters_of_no_model(self):
        model, other = linear(), nn.Embedding(3, 1, sparse=True)
        optimizer = SGD([*model.parameters(), *other.parameters()])
        self.initialize(model, optimizer, init_scale=1.0)
        backward(other(torch.tensor([1, 1])).sum() * math.inf, optimizer)
        with pytest.raises(LossScaleError, match=r"a parameter of shape \(3, 1\), .*: 1 inf, 0 nan"):
            optimizer.step()

    def test_training_can_go_on_after_it(self):
        model = linear()
        optimizer = SGD(model.parameters())
        self.initialize(model, optimizer, init_scale=1.0)
        backward(loss_of(model, 0) * math.inf, optimizer)
        with pytest.raises(LossScaleError):
            optimizer.step()
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)


class TestStep:
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_runs_with_casts_off_and_its_closure_with_casts_on(self, half_dtype):
        model = linear()
        spy = Spy(model.parameters())
        initialize(model, spy, opt_level="O1", half_dtype=half_dtype, loss_scale=1.0)
        assert product().dtype is half_dtype
        spy.step()
        inside = []
        spy.step(lambda: inside.append(product().dtype))
        spy.step(closure=lambda: inside.append(product().dtype))
        assert spy.dtypes == [torch.float32] * 3
        assert inside == [half_dtype] * 2
        assert product().dtype is half_dtype

    def test_closure_under_disable_casts_stays_without_casts(self):
        model = linear()
        spy = Spy(model.parameters())
        initialize(model, spy, opt_level="O1", half_dtype=torch.bfloat16, loss_scale=1.0)
        inside = []
        with amp.disable_casts():
            spy.step(lambda: inside.append(product().dtype))
        assert inside == [torch.float32]

    def test_casts_are_back_on_after_a_closure_that_raises(self):
        model = linear()
        spy = Spy(model.parameters())
        initialize(model, spy, opt_level="O1", half_dtype=torch.bfloat16, loss_scale=1.0)
        with pytest.raises(ZeroDivisionError):
            spy.step(lambda: 1 / 0)
        assert product().dtype is torch.bfloat16

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    def test_matrix_products_of_muon_stay_as_they_are(self, half_dtype):
        def step(with_amp: bool) -> Tensor:
            model = linear(8)
            optimizer = torch.optim.Muon(model.parameters(), ns_steps=2)
            if with_amp:
                initialize(model, optimizer, opt_level="O1", half_dtype=half_dtype, loss_scale=1)
            model.weight.grad = batch(0, 64)[:1].reshape(8, 8)
            optimizer.step()
            return model.weight

        plain = step(with_amp=False)
        assert_same_bits(step(with_amp=True), plain)

    @pytest.mark.parametrize("loss_scale", [1.0, 2.0**7])
    def test_lbfgs_trains_under_a_static_scale(self, loss_scale):
        def train(with_amp: bool) -> Tensor:
            model = linear()
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
            if with_amp:
                initialize(model, optimizer, loss_scale=loss_scale)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                backward(loss, optimizer, with_amp=with_amp)
                return loss

            for _ in range(2):
                assert isinstance(optimizer.step(closure), Tensor)
            return model.weight

        assert_same_bits(train(with_amp=True), train(with_amp=False))

    def test_without_any_block_is_a_plain_step_and_warns_once(self):
        model, reference = linear(), linear()
        optimizer, plain = MOMENTUM(model.parameters()), MOMENTUM(reference.parameters())
        initialize(model, optimizer)
        optimizer.step()  # on no gradients
        for index in range(2):
            for module in (model, reference):
                loss_of(module, index).backward()
            with (
                contextlib.nullcontext() if index else pytest.warns(AmpWarning, match="SGD steps .* Type: with amp.sc")
            ):
                optimizer.step()
            plain.step()
            assert_same_bits(model.weight, reference.weight)

    def test_without_any_block_does_not_warn_where_the_scale_is_static(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, loss_scale=8)
        loss_of(model, 0).backward()
        optimizer.step()

    def test_without_any_block_does_not_warn_where_a_scaler_is_used_by_hand(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        scaler = amp.LossScaler()
        scaler.scale(loss_of(model, 0)).backward()
        scaler.unscale_([model.weight.grad])
        optimizer.step()

    def test_of_an_optimizer_that_the_block_was_not_told_of_has_unscaled_gradients(self):
        models = [linear(), linear()]
        optimizers = [SGD(model.parameters()) for model in models]
        initialize(models, optimizers)
        backward(loss_of(models[0], 0) + loss_of(models[1], 0), optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(models[0].weight, models[1].weight)

    def test_is_the_users_again_after_deinitialize(self):
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
    def test_wrapper_that_is_no_optimizer_of_torch(self):
        model, reference = linear(), linear()
        wrapper, plain = Larc(MOMENTUM(model.parameters())), Larc(MOMENTUM(reference.parameters()))
        initialize(model, wrapper)
        overflow(model, wrapper)
        assert wrapper.step() is None
        assert (amp.step_was_skipped(wrapper), wrapper.steps) == (True, 0)
        wrapper.zero_grad()
        backward(loss_of(model, 0), wrapper)
        assert wrapper.step() == "stepped"
        loss_of(reference, 0).backward()
        plain.step()
        assert_same_bits(model.weight, reference.weight)

    def test_wrapper_made_after_initialize(self):
        model = linear()
        optimizer = MOMENTUM(model.parameters())
        initialize(model, optimizer)
        wrapper = Larc(optimizer)
        before = model.weight.detach().clone()
        overflow(model, optimizer)
        wrapper.step()
        assert amp.step_was_skipped(optimizer)
        assert_same_bits(model.weight, before)

    @pytest.mark.parametrize("skipped_first", [False, True], ids=["steps", "first-step-skipped"])
    def test_group_added_after_initialize(self, skipped_first):
        model = nn.Sequential(linear(), linear())
        optimizer = MOMENTUM(model[0].parameters())
        initialize(model, optimizer)
        if skipped_first:
            overflow(model, optimizer)
            optimizer.step()
            model.zero_grad()
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
        backward(loss_of(model, 0), optimizer)
        reference = copy.deepcopy(model)
        reference.zero_grad()
        loss_of(reference, 0).backward()
        for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert_same_bits(parameter.grad, wanted.grad)
        before = model[1].weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(model[1].weight, before - 0.5 * reference[1].weight.grad)
        assert [*amp.master_params(optimizer)] == [*model.parameters()]

    def test_groups_keep_their_options(self):
        model, reference = nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear())

        def make(layers: nn.Sequential) -> torch.optim.Optimizer:
            groups = [
                {"params": layers[0].parameters(), "weight_decay": 0.1},
                {"params": layers[1].parameters(), "lr": 0.5},
            ]
            return torch.optim.AdamW(groups, lr=0.01)

        optimizer, plain = make(model), make(reference)
        initialize(model, optimizer)
        for index in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            backward(loss_of(model, index), optimizer)
            loss_of(reference, index).backward()
            optimizer.step()
            plain.step()
        assert_same_state(model.state_dict(), reference.state_dict())

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
    def test_what_lacks_their_methods_is_none(self, thing, lacks):
        with pytest.raises(OptionError, match=rf"which lacks {lacks}; expected an object with param_groups"):
            amp.master_params(thing)


class TestCopies:
    """Of an adopted optimizer: they are what they would be without amp, and amp knows nothing of them."""

    def optimizers(self, model: nn.Module) -> list[Any]:
        return [MOMENTUM(model.parameters()), Larc(MOMENTUM(model.parameters()))]

    @pytest.mark.parametrize("kind", [0, 1], ids=["torch", "any-class"])
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
    )
    def test_steps_its_own_parameters_and_not_those_of_the_original(self, kind, duplicate):
        model = linear()
        optimizer = self.optimizers(model)[kind]
        initialize(model, optimizer)
        overflow(model, optimizer)
        twin_model, twin = duplicate((model, optimizer))
        before = model.weight.detach().clone()
        twin_model.weight.grad = torch.ones_like(model.weight)

        twin.step()

        assert_same_bits(model.weight, before)
        torch.testing.assert_close(twin_model.weight, before - (0.05 if kind else 0.1))
        with pytest.raises(UsageError, match="was never handed to"):
            amp.step_was_skipped(twin)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)

    @pytest.mark.parametrize("kind", [0, 1], ids=["torch", "any-class"])
    def test_copy_may_be_adopted_itself(self, kind):
        model = linear()
        optimizer = self.optimizers(model)[kind]
        initialize(model, optimizer)
        twin_model, twin = copy.deepcopy((model, optimizer))
        initialize(twin_model, twin)
        overflow(twin_model, twin)
        twin.step()
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert [amp.step_was_skipped(twin), amp.step_was_skipped(optimizer)] == [True, False]

    def test_state_dict_is_that_of_the_optimizer_alone(self):
        model, reference = linear(), linear()
        optimizer, plain = MOMENTUM(model.parameters()), MOMENTUM(reference.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        loss_of(reference, 0).backward()
        for stepping in (optimizer, plain):
            stepping.step()
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        overflow(model, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)


class TestLifetime:
    @UPDATES_HALF
    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("inside", [False, True])
    def test_gradients_that_were_not_unscaled_yet_are_unscaled_or_taken_away_with_a_word(self, half_dtype, inside):
        weight = nn.Parameter(torch.ones(3, dtype=half_dtype))
        optimizer = SGD([weight])
        initialize(nn.ParameterList([weight]), optimizer, init_scale=2.0**10)
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

    def test_gradients_that_are_unscaled_or_of_scale_one_stay(self):
        models = [linear(), linear()]
        optimizers = [SGD(model.parameters()) for model in models]
        initialize(models, optimizers)
        backward(loss_of(models[0], 0) + loss_of(models[1], 0), optimizers, delay_unscale=True)
        backward(loss_of(models[0], 1), optimizers[0])
        models[1].zero_grad()
        before = models[0].weight.grad.clone()
        amp.deinitialize()
        assert_same_bits(models[0].weight.grad, before)
        initialize(models, optimizers, loss_scale=1.0)
        optimizers[0].zero_grad()
        backward(loss_of(models[0], 0), optimizers[0], delay_unscale=True)
        before = models[0].weight.grad.clone()
        amp.deinitialize()
        assert_same_bits(models[0].weight.grad, before)

    def test_optimizer_that_hands_its_attributes_on_is_refused_and_the_one_inside_stays_as_it_was(self):
        class Around:
            def __init__(self, inside: object) -> None:
                object.__setattr__(self, "inside", inside)

            def __getattr__(self, name: str) -> object:
                return getattr(self.inside, name)

            def __setattr__(self, name: str, value: object) -> None:
                setattr(self.inside, name, value)

        model = linear()
        optimizer = SGD(model.parameters())
        around, step = Around(optimizer), optimizer.step
        with pytest.raises(OptionError, match=r"step of this Around cannot be replaced .* Hand in the"):
            initialize(model, around)
        assert optimizer.step == step
        assert "step" not in vars(optimizer)
        initialize(model, optimizer)

    @pytest.mark.parametrize("level", ["O0", "O1"])
    @pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with-scheduler"])
    @pytest.mark.covering(1)
    def test_optimizer_and_model_that_are_dropped_are_collected(self, scheduled, level):
        keeper = linear()
        initialize(keeper, SGD(keeper.parameters()), opt_level=level)
        model = linear()
        optimizer = MOMENTUM(model.parameters())
        initialize(model, optimizer, opt_level=level)
        scheduler = lr_scheduler.StepLR(optimizer, 1) if scheduled else None
        overflow(model, optimizer)
        optimizer.step()
        overflow(model, optimizer)
        gone = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model.weight)]

        del optimizer, model, scheduler
        gc.collect()

        assert [reference() for reference in gone] == [None, None, None]

    @UPDATES_HALF
    def test_parameter_that_its_optimizer_drops_is_collected(self):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        initialize(nn.ParameterList([weight]), optimizer, loss_scale=2.0)
        weight.grad = torch.ones_like(weight)
        backward(weight.sum(), optimizer)
        gone = weakref.ref(weight)
        optimizer.param_groups.clear()
        del weight
        gc.collect()
        assert gone() is None

    def test_passes_do_not_pile_up_where_nobody_steps(self, monkeypatch):
        monkeypatch.setattr(optimizer_gradients, "_MANY_PENDING", 8)
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, num_losses=2)
        for index in range(50):
            backward(loss_of(model, 0) * (OVERFLOW if index == 9 else 1), optimizer, loss_id=index % 2)
            assert len(runtime.live.adopted.record_of(optimizer).gradients.pending) <= 8
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.get_loss_scale(1) == SCALE / 2

    def test_step_lets_go_of_its_passes(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer)
        backward(loss_of(model, 0), optimizer)
        optimizer.step()
        assert runtime.live.adopted.record_of(optimizer).gradients.pending == []

    def test_cast_weights_are_forgotten_by_a_step_that_is_skipped_too(self):
        model = linear()
        optimizer = SGD(model.parameters())
        initialize(model, optimizer, opt_level="O1", half_dtype=torch.bfloat16)
        overflow(model, optimizer)
        F.linear(batch(0), model.weight)
        assert len(runtime.live.cache) == 1
        optimizer.step()
        assert len(runtime.live.cache) == 0
