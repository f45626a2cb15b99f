"""With ``check_finite=True`` no step writes inf or NaN from gradients, however they got there, at any scale."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import stepping
import torch
import torch.distributed as dist
from helpers import assert_same_state, dtype_name
from optimizers import MOMENTUM, backward, initialize
from stepping import closure_of, distance, everything, loss_of, network, nothing_changes, train, weights  # noqa: F401
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ampatch
from ampatch import amp
from ampatch.errors import AmpWarning
from ampatch.runtime import runtime

# Losses here are inf or NaN on purpose, and gradients come from no block.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the loss of a skipped step:ampatch.errors.AmpWarning"),
    pytest.mark.filterwarnings("ignore:.*no amp.scale_loss was told of:ampatch.errors.AmpWarning"),
]

# An eps that float16 holds: with another, gradients of zero make half weights NaN.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
FUSED = functools.partial(ADAMW, fused=True)
OPTIMIZERS: dict[str, Callable[..., Any]] = {"SGD": MOMENTUM, "AdamW": ADAMW, "AdamW-fused": FUSED}
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    **stepping.LEVELS,
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5-without-masters": {"opt_level": "O5", "master_weights": False},
}

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_scaler = pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])

LINE = "Gradient overflow. Skipping step, loss scaler {} {} {}"


def started(make: Callable[..., Any] = MOMENTUM, **options: Any) -> tuple[Any, Any]:
    """Returns a model and an optimizer after a step that has made state to destroy; at O4 unless a level is given."""
    return stepping.started(make, **{"opt_level": "O4", "loss_scale": 1.0, "check_finite": True, "steps": 1, **options})


def is_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


# Ways by which inf or NaN get into the gradients of a step.


def in_a_block(model: nn.Module, optimizer: Any, factor: float = math.nan, **options: Any) -> None:
    backward(loss_of(model) * factor, optimizer, **options)


def without_a_block(model: nn.Module, optimizer: Any) -> None:
    (loss_of(model) * math.nan).backward()


def in_an_earlier_block(model: nn.Module, optimizer: Any) -> None:
    in_a_block(model, optimizer)
    backward(loss_of(model), optimizer)


def in_a_delayed_block(model: nn.Module, optimizer: Any) -> None:
    in_a_block(model, optimizer, delay_unscale=True)
    backward(loss_of(model), optimizer)


def unscaled_by_hand(model: nn.Module, optimizer: Any) -> None:
    in_a_block(model, optimizer, delay_unscale=True)
    amp.unscale_(optimizer)


def clipped_by_amp(model: nn.Module, optimizer: Any) -> None:
    in_a_block(model, optimizer, delay_unscale=True)
    amp.clip_grad_norm_(optimizer, 1.0)


def clipped_by_torch(model: nn.Module, optimizer: Any) -> None:
    in_a_block(model, optimizer, math.inf)
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)


def edited_after_the_block(model: nn.Module, optimizer: Any) -> None:
    backward(loss_of(model), optimizer)
    model[2].weight.grad[0, 0] = math.nan


def edited_through_data(model: nn.Module, optimizer: Any) -> None:
    backward(loss_of(model), optimizer)
    model[2].weight.grad.data[0, 0] = math.inf


def edited_in_the_masters(model: nn.Module, optimizer: Any) -> None:
    backward(loss_of(model), optimizer)
    list(amp.master_params(optimizer))[-1].grad[0] = -math.inf


def set_by_hand(model: nn.Module, optimizer: Any, value: float = math.nan) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


WAYS: dict[str, Callable[[nn.Module, Any], None]] = {
    "in_a_block": in_a_block,
    "inf_in_a_block": functools.partial(in_a_block, factor=math.inf),
    "without_a_block": without_a_block,
    "in_an_earlier_block": in_an_earlier_block,
    "in_a_delayed_block": in_a_delayed_block,
    "unscaled_by_hand": unscaled_by_hand,
    "clipped_by_amp": clipped_by_amp,
    "clipped_by_torch": clipped_by_torch,
    "edited_after_the_block": edited_after_the_block,
    "edited_through_data": edited_through_data,
    "edited_in_the_masters": edited_in_the_masters,
    "set_by_hand": set_by_hand,
}


class TestSkippedSteps:
    @every_level
    @pytest.mark.parametrize("loss_scale", [1.0, 128.0, "dynamic"])
    @every_optimizer
    @pytest.mark.usefixtures("distance")
    @pytest.mark.parametrize("steps", [0, 1], ids=["first-step", "second-step"])
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    @pytest.mark.covering(1)
    def test_step_is_skipped_however_inf_or_nan_got_into_gradients(self, way, steps, make, loss_scale, options):
        model, optimizer = started(make, steps=steps, loss_scale=loss_scale, **options)
        before = everything(model, optimizer)
        way(model, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.skipped_steps(optimizer) == 1
        assert_same_state(everything(model, optimizer), before)
        train(model, optimizer, 1)
        assert not amp.step_was_skipped(optimizer)
        assert is_finite(model)
        assert not torch.equal(model[0].weight, before[0][0])

    @pytest.mark.parametrize("loss_scale", [1.0, 2.0**-30, 128.0])
    @pytest.mark.parametrize("on_overflow", ["log", "explain"])
    def test_skipped_steps_are_logged_and_leave_a_static_scale_alone(self, on_overflow, loss_scale, caplog):
        options = {"verbosity": 1, "on_overflow": on_overflow, "min_loss_scale": 1.0}
        model, optimizer = started(loss_scale=loss_scale, **options)
        train(model, optimizer, *[math.nan] * 3)
        lines = [message for message in caplog.messages if message.startswith("Gradient overflow")]
        assert lines == [LINE.format(0, "keeping loss scale at", loss_scale)] * 3
        assert amp.get_loss_scale() == loss_scale
        assert amp.skipped_steps(optimizer) == 3

    def test_log_line_names_the_loss_scaler_of_the_last_block(self, caplog):
        model, optimizer = started(num_losses=2, verbosity=1)
        in_a_block(model, optimizer, loss_id=1)
        optimizer.step()
        assert caplog.messages == [LINE.format(1, "keeping loss scale at", 1.0)]

    @every_optimizer
    @pytest.mark.usefixtures("distance")
    def test_overflow_that_block_and_step_find_is_one_skipped_step_under_a_dynamic_scale(self, make, caplog):
        model, optimizer = started(make, loss_scale="dynamic", verbosity=1, on_overflow="log")
        train(model, optimizer, math.nan)
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        set_by_hand(model, optimizer)
        optimizer.step()
        assert amp.stats()["overflows"] == amp.skipped_steps(optimizer) == 2
        assert caplog.messages == [
            LINE.format(0, "reducing loss scale to", 128.0),
            LINE.format(0, "keeping loss scale at", 128.0),
        ]

    @every_optimizer
    def test_step_is_skipped_if_unscaling_itself_overflows(self, make):
        model, optimizer = started(make, loss_scale=2.0**-4)
        with nothing_changes(model, optimizer):
            backward(loss_of(model), optimizer, delay_unscale=True)
            for parameter in model.parameters():
                parameter.grad.fill_(1e38)
            amp.clip_grad_norm_(optimizer, math.inf)
            optimizer.step()
        assert amp.step_was_skipped(optimizer)

    def test_step_runs_if_the_user_has_made_the_gradients_finite(self):
        model, optimizer = started()
        in_a_block(model, optimizer)
        for parameter in amp.master_params(optimizer):
            parameter.grad.nan_to_num_()
        with pytest.warns(AmpWarning, match="the loss of a step is nan, and the step has run"):
            optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert is_finite(model)

    @pytest.mark.parametrize("value", [3e38, -3e38, 1e-40, None])
    def test_step_runs_with_large_tiny_and_no_gradients(self, value):
        model, optimizer = started(functools.partial(torch.optim.SGD, lr=1e-38), steps=0)
        if value is not None:
            set_by_hand(model, optimizer, value)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)

    def test_step_of_another_optimizer_runs(self):
        model = network()
        optimizers = [MOMENTUM(model[0].parameters()), MOMENTUM(model[2].parameters())]
        initialize(model, optimizers, opt_level="O4", check_finite=True)
        backward(loss_of(model), optimizers)
        model[2].bias.grad[0] = math.nan
        for optimizer in optimizers:
            optimizer.step()
        assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]

    def test_step_is_skipped_in_a_session_of_init(self):
        model = network()
        optimizer = MOMENTUM(model.parameters())
        with amp.init(half_dtype="bfloat16", loss_scale=1, check_finite=True):
            train(model, optimizer, 1)
            for way in (in_a_block, without_a_block):
                optimizer.zero_grad()
                with nothing_changes(model, optimizer):
                    way(model, optimizer)
                    optimizer.step()
                assert amp.step_was_skipped(optimizer)


class TestKindsOfGradients:
    @pytest.mark.usefixtures("distance")
    def test_sparse_gradients_are_checked(self):
        model, optimizer = started(torch.optim.SparseAdam, model=nn.Embedding(4, 2, sparse=True), steps=0)
        for factor in (1.0, math.nan):
            optimizer.zero_grad()
            backward(model(torch.tensor([1, 1, 2])).sum() * factor, optimizer)
            optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert is_finite(model)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=dtype_name)
    def test_double_and_complex_gradients_are_checked(self, dtype):
        model, optimizer = started(model=nn.ParameterList([torch.ones(3, dtype=dtype)]), steps=0)
        model[0].grad = torch.tensor([1, math.inf, 1]).to(dtype)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert is_finite(model)

    @pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
    def test_gradients_with_a_graph_are_checked(self):
        model, optimizer = started(steps=0)
        with amp.scale_loss(loss_of(model) * math.nan, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        optimizer.zero_grad()


class TestClosures:
    @every_level
    @pytest.mark.parametrize("at", [0, 2])
    def test_step_of_lbfgs_is_undone_if_an_evaluation_is_not_finite(self, at, options):
        lbfgs = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4, tolerance_change=0.0, tolerance_grad=0.0)
        model, optimizer = started(lbfgs, steps=0, **options)
        with nothing_changes(model, optimizer):
            optimizer.step(closure_of(model, optimizer, *[1.0] * at, *[math.nan] * 10))
        assert amp.step_was_skipped(optimizer)

    @every_optimizer
    def test_gradients_of_a_closure_without_a_block_are_checked(self, make):
        model, optimizer = started(make)

        def closure(factor: float) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model) * factor
            loss.backward()
            return loss

        with nothing_changes(model, optimizer):
            assert optimizer.step(lambda: closure(math.nan)).isnan()
        assert amp.step_was_skipped(optimizer)
        # The closure runs although bad gradients of the last step are left.
        assert optimizer.step(lambda: closure(1.0)).isfinite()
        assert not amp.step_was_skipped(optimizer)

    def test_gradients_are_checked_if_the_optimizer_never_calls_its_closure(self):
        class LeavesClosuresAlone(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                super().step()

        model, optimizer = started(functools.partial(LeavesClosuresAlone, lr=0.1))
        before = everything(model, optimizer)
        for factor in (math.nan, 1):
            optimizer.zero_grad()
            in_a_block(model, optimizer, factor)
            optimizer.step(lambda: None)
            assert amp.step_was_skipped(optimizer) == (factor != 1)
            assert (factor == 1) != torch.equal(model[0].weight, before[0][0])


class TestBesideAGradScaler:
    """A scaler of torch's interface may judge the same steps: both skip, and neither takes the other's marks away."""

    @every_scaler
    @every_optimizer
    @pytest.mark.usefixtures("distance")
    def test_step_is_skipped_for_what_the_scaler_finds_and_for_what_it_does_not_see(self, make, kind):
        model, optimizer = started(make, steps=0)
        scaler = kind("cpu", init_scale=4.0)

        def skips(factor: float = 1.0, edited: bool = False) -> bool:
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * factor).backward()
            scaler.unscale_(optimizer)
            if edited:
                model[0].bias.grad[0] = math.nan
            before = weights(model)
            scaler.step(optimizer)
            scaler.update()
            return all(map(torch.equal, before, model.parameters()))

        assert [skips(), skips(math.inf), skips(edited=True), skips()] == [False, True, True, False]
        assert scaler.get_scale() == 2.0
        assert amp.skipped_steps(optimizer) == 1
        assert not hasattr(optimizer, "found_inf")

    @every_scaler
    @pytest.mark.parametrize("check_finite", [False, True])
    def test_scaler_may_scale_the_loss_of_a_block_at_a_scale_of_1(self, check_finite, kind):
        model, optimizer = started(steps=0, check_finite=check_finite)
        scaler = kind("cpu", init_scale=4.0)
        before = weights(model)
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaler.scale(scaled_loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(model[0].weight, before[0])

    @every_scaler
    @pytest.mark.usefixtures("far_away")
    def test_fused_optimizer_unscales_in_its_kernel_as_without_the_check(self, kind):
        def trained(check_finite: bool) -> Any:
            model, optimizer = started(FUSED, steps=0, check_finite=check_finite)
            scaler = kind("cpu", init_scale=4.0)
            for factor in (1.0, 2.0, math.inf, 1.0):
                optimizer.zero_grad()
                scaler.scale(loss_of(model) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
            result = everything(model, optimizer)
            amp.deinitialize()
            return result

        assert_same_state(trained(check_finite=True), trained(check_finite=False))


def ddp(options: dict[str, Any]) -> tuple[list[bool], list[Tensor]]:
    model, optimizer = started(steps=0, **options)
    replica = DistributedDataParallel(model)
    skipped = []
    for step in range(3):
        train(replica, optimizer, math.nan if step == 1 and dist.get_rank() == 1 else 1.0)
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, weights(model)


def fsdp() -> tuple[list[bool], bool]:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    _, optimizer = started(model=model, steps=0)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        if step == 1 and dist.get_rank() == 0:
            model[0].weight.grad.to_local()[0, 0] = math.nan
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, all(bool(each.to_local().isfinite().all()) for each in model.parameters())


class TestSeveralRanks:
    @pytest.mark.slow
    @pytest.mark.parametrize("level", ["O4", "O5"])
    def test_ranks_of_ddp_skip_together(self, two, level):
        (skipped, first), (others, second) = two.run(ddp, {"opt_level": level})
        assert skipped == others == [False, True, False]
        assert_same_state(first, second)

    @pytest.mark.slow
    def test_ranks_of_fsdp2_skip_if_one_has_a_nan_in_its_shard(self, two):
        assert two.run(fsdp) == [([False, True, False], True)] * 2


class TestWithoutTheCheck:
    @pytest.mark.parametrize("loss_scale", [1.0, 128.0])
    def test_nothing_is_read_or_kept(self, loss_scale):
        model, optimizer = started(check_finite=False, loss_scale=loss_scale)
        backward(loss_of(model), optimizer)
        (use,) = runtime.live.adopted.record_of(optimizer).gradients.verdicts.pending
        assert (use.found_inf, use._losses) == (None, [])

    def test_steps_have_the_same_results(self):
        model, optimizer = started(FUSED, steps=4)
        expected = copy.deepcopy(everything(model, optimizer))
        amp.deinitialize()
        assert_same_state(everything(*started(FUSED, steps=4, check_finite=False)), expected)
