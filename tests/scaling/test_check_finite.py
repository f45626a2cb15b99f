"""With ``check_finite=True`` no step writes inf or NaN from gradients, however they got there, at any scale."""

from __future__ import annotations

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import HALF_DTYPES, assert_same_state, dtype_name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import ampatch
from ampatch import amp
from ampatch.errors import AmpWarning
from ampatch.runtime import runtime

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
FUSED = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
OPTIMIZERS: dict[str, Callable[..., Any]] = {"SGD": SGD, "AdamW": ADAMW, "AdamW-fused": FUSED}

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    **{
        f"{level}-{dtype_name(half)}": {"opt_level": level, "half_dtype": half}
        for level in ("O1", "O2", "O3")
        for half in HALF_DTYPES
    },
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5-without-masters": {"opt_level": "O5", "master_weights": False},
}
SCALES = [1.0, 128.0, "dynamic"]

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_scale = pytest.mark.parametrize("loss_scale", SCALES)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

LINE = "Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at 1.0"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def begun(make: Callable[..., Any] = SGD, *, steps: int = 1, **options: Any) -> tuple[nn.Module, Any]:
    """A model and an optimizer that have made a step or more, so that there is state to destroy."""
    model = network()
    optimizer = make(model.parameters())
    settings = {"opt_level": "O4", "check_finite": True, "verbosity": 0, "init_scale": 2.0**8, **options}
    amp.initialize(model, optimizer, **settings)
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return model(torch.ones(3, 4)).float().square().mean() * factor


def backward(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    with amp.scale_loss(loss_of(model, factor), optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def everything(model: nn.Module, optimizer: Any) -> Any:
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy([list(model.parameters()), updated, optimizer.state_dict()])


def is_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Losses here are inf or NaN on purpose, and gradients come from no block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss of a skipped step", AmpWarning)
        warnings.filterwarnings("ignore", ".*no amp.scale_loss was told of", AmpWarning)
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="ampatch")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ampatch"]


# Ways by which inf or NaN get into the gradients of a step.


def in_a_block(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.nan)


def inf_in_a_block(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.inf)


def without_a_block(model: nn.Module, optimizer: Any) -> None:
    loss_of(model, math.nan).backward()


def in_an_earlier_block(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.nan)
    backward(model, optimizer)


def in_a_delayed_block(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.nan, delay_unscale=True)
    backward(model, optimizer)


def unscaled_by_hand(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.nan, delay_unscale=True)
    amp.unscale_(optimizer)


def clipped_by_amp(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.nan, delay_unscale=True)
    amp.clip_grad_norm_(optimizer, 1.0)


def clipped_by_torch(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, math.inf)
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)


def edited_after_the_block(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer)
    model[2].weight.grad[0, 0] = math.nan  # type: ignore[index, union-attr]


def edited_through_data(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer)
    model[2].weight.grad.data[0, 0] = math.inf  # type: ignore[index, union-attr]


def edited_in_the_masters(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer)
    list(amp.master_params(optimizer))[-1].grad[0] = -math.inf  # type: ignore[index]


def set_by_hand(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)


WAYS = [
    in_a_block,
    inf_in_a_block,
    without_a_block,
    in_an_earlier_block,
    in_a_delayed_block,
    unscaled_by_hand,
    clipped_by_amp,
    clipped_by_torch,
    edited_after_the_block,
    edited_through_data,
    edited_in_the_masters,
    set_by_hand,
]


class TestASkippedStep:
    @every_level
    @every_scale
    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    @pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
    @pytest.mark.covering(1)
    def test_leaves_everything_as_it_is_however_gradients_got_there(
        self, way, far, make, loss_scale, options, request, log
    ):
        if far:
            request.getfixturevalue("far_away")
        model, optimizer = begun(make, loss_scale=loss_scale, **options)
        before = everything(model, optimizer)
        way(model, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert amp.skipped_steps(optimizer) == 1
        assert_same_state(everything(model, optimizer), before)
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert is_finite(model)
        assert not torch.equal(model[0].weight, before[0][0])

    @every_level
    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_may_be_the_first(self, far, make, options, request):
        if far:
            request.getfixturevalue("far_away")
        model, optimizer = begun(make, steps=0, loss_scale=1.0, **options)
        before = everything(model, optimizer)
        in_a_block(model, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert_same_state(everything(model, optimizer), before)

    @every_level
    def test_would_have_destroyed_the_weights(self, options):
        model, optimizer = begun(loss_scale=1.0, **{**options, "check_finite": False})
        in_a_block(model, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert not is_finite(model)

    @pytest.mark.parametrize("loss_scale", [1.0, 128.0])
    def test_is_logged_and_leaves_a_static_scale_alone(self, loss_scale, log):
        model, optimizer = begun(loss_scale=loss_scale, verbosity=1, on_overflow="log")
        for _ in range(3):
            in_a_block(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert log() == [LINE.replace("1.0", str(loss_scale))] * 3
        assert amp.get_loss_scale() == loss_scale

    def test_raises_no_error_of_a_floor(self):
        model, optimizer = begun(loss_scale=2.0**-30, min_loss_scale=1.0)
        for _ in range(3):
            in_a_block(model, optimizer)
            optimizer.step()
        assert amp.skipped_steps(optimizer) == 3

    def test_names_the_number_of_the_last_loss(self, log):
        model, optimizer = begun(num_losses=2, verbosity=1)
        backward(model, optimizer, math.nan, loss_id=1)
        optimizer.step()
        assert log() == [LINE.replace("scaler 0", "scaler 1")]

    def test_warns_once_of_a_loss_that_is_not_finite(self):
        model, optimizer = begun()
        backward(model, optimizer, math.nan)
        with pytest.warns(AmpWarning, match=r"the loss of a skipped step is nan\. Look") as told:
            optimizer.step()
        assert len(told) == 1

    def test_lets_schedulers_think_that_there_was_a_step(self):
        model, optimizer = begun(steps=0)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        in_a_block(model, optimizer)
        optimizer.step()
        scheduler.step()
        assert amp.step_was_skipped(optimizer)

    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_under_a_dynamic_scale_is_one_skip_for_block_and_step(self, far, make, log, request):
        if far:
            request.getfixturevalue("far_away")
        model, optimizer = begun(make, loss_scale="dynamic", verbosity=1, on_overflow="log")
        in_a_block(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, optimizer)
        set_by_hand(model, optimizer)
        optimizer.step()
        assert amp.stats()["overflows"] == amp.skipped_steps(optimizer) == 2
        assert log() == [
            "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 128.0",
            "Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at 128.0",
        ]

    @every_optimizer
    def test_is_made_where_unscaling_itself_overflows(self, make):
        model, optimizer = begun(make, loss_scale=2.0**-4)
        before = everything(model, optimizer)
        backward(model, optimizer, delay_unscale=True)
        for parameter in model.parameters():
            parameter.grad.fill_(1e38)  # type: ignore[union-attr]
        amp.clip_grad_norm_(optimizer, math.inf)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert_same_state(everything(model, optimizer), before)

    def test_is_not_made_where_the_user_has_made_the_gradients_finite(self):
        model, optimizer = begun()
        in_a_block(model, optimizer)
        for parameter in amp.master_params(optimizer):
            parameter.grad.nan_to_num_()  # type: ignore[union-attr]
        with pytest.warns(AmpWarning, match="the loss of a step is nan, and the step has run"):
            optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert is_finite(model)

    @pytest.mark.parametrize("value", [3e38, -3e38, 1e-40])
    def test_is_not_made_for_gradients_that_are_only_large(self, value):
        model, optimizer = begun(functools.partial(torch.optim.SGD, lr=1e-38))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)

    def test_is_not_made_without_gradients(self):
        _, optimizer = begun()
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)

    def test_concerns_only_the_optimizer_with_such_gradients(self):
        model = network()
        optimizers = [SGD(model[0].parameters()), SGD(model[2].parameters())]
        amp.initialize(model, optimizers, opt_level="O4", check_finite=True, verbosity=0)
        backward(model, optimizers)
        model[2].bias.grad[0] = math.nan  # type: ignore[index, union-attr]
        for optimizer in optimizers:
            optimizer.step()
        assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]

    def test_is_made_in_the_session_of_init_too(self):
        model = network()
        optimizer = SGD(model.parameters())
        with amp.init(half_dtype="bfloat16", loss_scale=1, check_finite=True):
            backward(model, optimizer)
            optimizer.step()
            for way in (in_a_block, without_a_block):
                optimizer.zero_grad()
                before = everything(model, optimizer)
                way(model, optimizer)
                optimizer.step()
                assert amp.step_was_skipped(optimizer)
                assert_same_state(everything(model, optimizer), before)


class TestKindsOfGradients:
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_sparse(self, far, request):
        if far:
            request.getfixturevalue("far_away")
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O4", check_finite=True, verbosity=0)
        for factor in (1.0, math.nan):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.tensor([1, 1, 2])).sum() * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert is_finite(model)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=dtype_name)
    def test_double_and_complex(self, dtype):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O4", check_finite=True, verbosity=0)
        model.weight.grad = torch.tensor([1, math.inf, 1]).to(dtype)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert is_finite(model)

    @pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
    def test_with_a_graph(self):
        model, optimizer = begun(steps=0)
        with amp.scale_loss(loss_of(model, math.nan), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        optimizer.zero_grad()


class LeavesClosuresAlone(torch.optim.SGD):
    """An optimizer that takes a function as an argument and does not call it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class TestClosures:
    @every_level
    @pytest.mark.parametrize("at", [0, 2])
    def test_of_lbfgs_restore_what_was_there_before_the_step(self, at, options):
        def make(parameters: Any) -> Any:
            return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, tolerance_change=0.0, tolerance_grad=0.0)

        model, optimizer = begun(make, steps=0, loss_scale=1.0, **options)
        factors = iter([1.0] * at + [math.nan] * 10)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, next(factors))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            return loss.detach()

        before = everything(model, optimizer)
        optimizer.step(closure)
        assert amp.step_was_skipped(optimizer)
        assert_same_state(everything(model, optimizer), before)

    @every_optimizer
    def test_without_a_block(self, make):
        model, optimizer = begun(make)
        before = everything(model, optimizer)

        def closure(factor: float) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, factor)
            loss.backward()
            return loss

        assert optimizer.step(lambda: closure(math.nan)).isnan()
        assert amp.step_was_skipped(optimizer)
        assert_same_state(everything(model, optimizer), before)
        optimizer.step(lambda: closure(1.0))
        assert not amp.step_was_skipped(optimizer)

    def test_that_the_optimizer_never_calls(self):
        model, optimizer = begun(functools.partial(LeavesClosuresAlone, lr=0.1))
        before = everything(model, optimizer)
        in_a_block(model, optimizer)
        optimizer.step(lambda: None)
        assert amp.step_was_skipped(optimizer)
        assert_same_state(everything(model, optimizer), before)
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step(lambda: None)
        assert not amp.step_was_skipped(optimizer)

    def test_are_called_although_gradients_of_the_last_step_are_left(self):
        model, optimizer = begun()
        in_a_block(model, optimizer)
        optimizer.step()
        called = []

        def closure() -> Tensor:
            called.append(1)
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert called == [1]
        assert not amp.step_was_skipped(optimizer)


class TestBesideAGradScaler:
    """A scaler of torch's interface may judge the same steps: both skip, and neither takes the other's marks away."""

    @pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_skips_what_it_finds_and_what_the_scaler_does_not_see(self, far, make, kind, request):
        if far:
            request.getfixturevalue("far_away")
        model, optimizer = begun(make, steps=0, opt_level="O1", half_dtype="bfloat16", loss_scale=1)
        scaler = kind("cpu", init_scale=4.0)

        def step(factor: float = 1.0, edited: bool = False) -> bool:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, factor)).backward()
            scaler.unscale_(optimizer)
            if edited:
                model[0].bias.grad[0] = math.nan  # type: ignore[index, union-attr]
            before = copy.deepcopy(model.state_dict())
            scaler.step(optimizer)
            scaler.update()
            return all(map(torch.equal, before.values(), model.state_dict().values()))

        assert [step(), step(math.inf), step(edited=True), step()] == [False, True, True, False]
        assert scaler.get_scale() == 2.0
        assert amp.skipped_steps(optimizer) == 1
        assert not hasattr(optimizer, "found_inf")

    @pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
    @pytest.mark.parametrize("check_finite", [False, True])
    def test_may_scale_in_a_block_at_a_scale_of_one(self, check_finite, kind):
        model, optimizer = begun(
            steps=0, opt_level="O1", half_dtype="bfloat16", loss_scale=1, check_finite=check_finite
        )
        scaler = kind("cpu", init_scale=4.0)
        before = model[0].weight.detach().clone()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaler.scale(scaled_loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(model[0].weight, before)

    @pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
    @pytest.mark.usefixtures("far_away")
    def test_a_fused_optimizer_still_unscales_in_its_kernel(self, kind):
        def trained(check_finite: bool) -> Any:
            model, optimizer = begun(
                FUSED, steps=0, opt_level="O1", half_dtype="bfloat16", loss_scale=1, check_finite=check_finite
            )
            scaler = kind("cpu", init_scale=4.0)
            for factor in (1.0, 2.0, math.inf, 1.0):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, factor)).backward()
                scaler.step(optimizer)
                scaler.update()
            result = everything(model, optimizer)
            amp.deinitialize()
            return result

        assert_same_state(trained(check_finite=True), trained(check_finite=False))


def ddp(options: dict[str, Any]) -> tuple[list[bool], list[Tensor]]:
    model, optimizer = begun(steps=0, **options)
    replica = DistributedDataParallel(model)
    skipped = []
    for step in range(3):
        factor = math.nan if step == 1 and dist.get_rank() == 1 else 1.0
        optimizer.zero_grad()
        backward(replica, optimizer, factor)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, [parameter.detach().clone() for parameter in model.parameters()]


def fsdp() -> tuple[list[bool], bool]:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level="O4", check_finite=True, verbosity=0)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        backward(model, optimizer)
        if step == 1 and dist.get_rank() == 0:
            grad: Any = model[0].weight.grad
            grad.to_local()[0, 0] = math.nan
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, all(bool(each.to_local().isfinite().all()) for each in model.parameters())  # type: ignore[attr-defined]


class TestSeveralRanks:
    @pytest.mark.slow
    @pytest.mark.parametrize("level", ["O4", "O5"])
    def test_of_ddp_skip_together(self, two, level):
        (skipped, weights), (others, other_weights) = two.run(ddp, {"opt_level": level})
        assert skipped == others == [False, True, False]
        assert_same_state(weights, other_weights)

    @pytest.mark.slow
    def test_of_fsdp2_skip_where_one_has_a_nan_in_its_shard(self, two):
        assert two.run(fsdp) == [([False, True, False], True)] * 2


class TestWithoutIt:
    @pytest.mark.parametrize("loss_scale", [1.0, 128.0])
    def test_nothing_is_read_or_kept(self, loss_scale):
        model, optimizer = begun(check_finite=False, loss_scale=loss_scale)
        backward(model, optimizer)
        assert runtime.live is not None
        (use,) = runtime.live.adopted.record_of(optimizer).gradients.pending
        assert (use.found_inf, use._losses) == (None, [])

    def test_results_of_steps_are_the_same(self):
        def trained(check_finite: bool) -> Any:
            model, optimizer = begun(FUSED, steps=4, check_finite=check_finite)
            result = everything(model, optimizer)
            amp.deinitialize()
            return result

        assert_same_state(trained(check_finite=True), trained(check_finite=False))
