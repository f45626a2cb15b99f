"""The steps of a report: scale, overflow, skip and norm, and the gradients that a half type loses."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from optimizers import MOMENTUM, backward
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch import amp
from ampatch.diagnostics.report import exponents
from ampatch.diagnostics.report import steps as report_steps
from ampatch.diagnostics.report.exponents import GradientExponents, Histogram, Range
from ampatch.diagnostics.report.steps import Steps
from ampatch.errors import AmpWarning, LossScaleError
from ampatch.scaling import step_observers

SCALE = 2.0**8

every_half = pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
every_level = pytest.mark.parametrize("opt_level", ["O1", "O2"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


def begun(make: Callable[[Any], Any] = MOMENTUM, **options: Any) -> tuple[nn.Sequential, Any]:
    model = network()
    settings = {"half_dtype": "float16", "loss_scale": "dynamic", "init_scale": SCALE, "verbosity": 0, **options}
    return amp.initialize(model, make(model.parameters()), **settings)


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return model(torch.linspace(-1, 1, 12).view(3, 4)).float().square().mean() * factor


def step(model: nn.Module, optimizer: Any, factor: float = 1.0, clips: bool = False, **options: Any) -> None:
    backward(loss_of(model, factor), optimizer, **options)
    if clips:
        amp.clip_grad_norm_(optimizer, 0.01)
    optimizer.step()
    optimizer.zero_grad()


def norm_of(gradients: Iterable[Tensor]) -> Any:
    return pytest.approx(float(sum(each.double().square().sum() for each in gradients) ** 0.5))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Losses here are inf and NaN on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss of a skipped step", AmpWarning)
        yield


class TestSteps:
    @every_level
    def test_steps_have_scale_overflow_skip_and_norm(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)
        with Steps() as steps:
            for factor in (1.0, math.inf, 1.0):
                step(model, optimizer, factor)
        first, second, _ = rows = steps.rows()
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["scale"] for row in rows] == [SCALE, SCALE, SCALE / 2]
        assert [row["overflow"] for row in rows] == [row["skipped"] for row in rows] == [False, True, False]
        assert second["gradient_norm"] is None
        assert first["gradient_norm"] > 0
        assert {row["loss_id"] for row in rows} == {0}

    @every_half
    @every_level
    @pytest.mark.parametrize("delays", [False, True], ids=["unscaled by the block", "unscaled by clipping"])
    def test_the_norm_is_that_before_clipping(self, opt_level, half_dtype, delays):
        model, optimizer = begun(opt_level=opt_level, half_dtype=half_dtype)
        with Steps() as steps:
            backward(loss_of(model), optimizer, delay_unscale=delays)
            norm = amp.clip_grad_norm_(optimizer, 0.01)
            optimizer.step()
        (row,) = steps.rows()
        assert row["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)

    @every_level
    def test_a_step_has_the_scale_of_an_earlier_backward_pass(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)
        backward(loss_of(model), optimizer)
        with Steps() as steps:
            optimizer.step()
        (row,) = steps.rows()
        assert (row["scale"], row["loss_id"], row["skipped"]) == (SCALE, 0, False)

    @every_level
    def test_the_norm_is_of_the_sum_of_accumulated_gradients(self, opt_level):
        model, optimizer = begun(opt_level=opt_level)
        with Steps() as steps:
            for _ in range(3):
                backward(loss_of(model), optimizer)
            expected = norm_of(each.grad for each in amp.master_params(optimizer))
            optimizer.step()
        (row,) = steps.rows()
        assert row["gradient_norm"] == expected

    @every_half
    @every_level
    @pytest.mark.parametrize("make", [MOMENTUM, ADAMW], ids=["SGD", "fused AdamW"])
    @pytest.mark.parametrize("options", [{}, {"clips": True, "delay_unscale": True}], ids=["plain", "clipped"])
    def test_recording_steps_changes_no_bit(self, opt_level, half_dtype, make, options):
        results = []
        for block in (contextlib.nullcontext(), Steps()):
            model, optimizer = begun(make, opt_level=opt_level, half_dtype=half_dtype)
            with block:
                for factor in (1.0, 2.0, math.nan, 1.0, 1.0):
                    step(model, optimizer, factor, **options)
            state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
            results.append([*(each.detach().clone() for each in model.parameters()), *state])
            amp.deinitialize()
        assert len(block.rows()) == 5
        assert all(map(torch.equal, *results))

    def test_a_step_whose_kernel_skips_has_its_verdict(self, monkeypatch):
        monkeypatch.setattr("ampatch.scaling.scale_use.AT_HAND", frozenset())
        model, optimizer = begun(ADAMW)
        with Steps() as steps:
            for factor in (1.0, 1.0, math.nan, 1.0):
                step(model, optimizer, factor)
        assert [row["skipped"] for row in steps.rows()] == [False, False, True, False]

    def test_steps_of_two_optimizers_have_rows_of_their_own(self):
        model = network()
        optimizers = [MOMENTUM(model[0].parameters()), MOMENTUM(model[2].parameters())]
        amp.initialize(model, optimizers, half_dtype="float16", loss_scale=SCALE, verbosity=0, num_losses=2)
        with Steps() as steps:
            for loss_id, optimizer in enumerate(optimizers):
                backward(loss_of(model), optimizer, loss_id=loss_id)
                optimizer.step()
                model.zero_grad()
        assert [row["loss_id"] for row in steps.rows()] == [0, 1]

    def test_a_step_that_raises_at_the_minimum_scale_is_recorded(self):
        model, optimizer = begun(min_loss_scale=SCALE)
        with Steps() as steps, pytest.raises(LossScaleError):
            step(model, optimizer, math.nan)
        (row,) = steps.rows()
        assert row["overflow"]
        assert row["skipped"]

    def test_steps_without_amp_have_a_norm_and_no_scale(self):
        model = network()
        optimizer = MOMENTUM(model.parameters())
        with Steps() as steps:
            loss_of(model).backward()
            optimizer.step()
        (row,) = steps.rows()
        assert row["gradient_norm"] == norm_of(each.grad for each in model.parameters())
        assert (row["scale"], row["loss_id"], row["skipped"]) == (1.0, None, False)

    @pytest.mark.parametrize("adopted", [False, True], ids=["without amp", "amp"])
    def test_steps_with_a_closure_have_its_gradients(self, adopted):
        model, optimizer = begun() if adopted else (network(), None)
        optimizer = optimizer or MOMENTUM(model.parameters())
        norms = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            backward(loss, optimizer, with_amp=adopted)
            norms.append(norm_of(each.grad for each in model.parameters()))
            return loss

        with Steps() as steps:
            for _ in range(3):
                optimizer.step(closure)
        assert [row["gradient_norm"] for row in steps.rows()] == norms
        assert steps.underflow()["seen"] == 3

    @pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ampatch.GradScaler], ids=["torch", "ampatch"])
    @pytest.mark.parametrize("make", [MOMENTUM, ADAMW], ids=["unscaled before", "unscaled by the kernel"])
    def test_steps_of_a_grad_scaler_have_its_scale_and_skips_and_the_unscaled_norm(self, make, scaler_class):
        model = network()
        optimizer, scaler = make(model.parameters()), scaler_class("cpu", init_scale=SCALE)
        norm = norm_of(torch.autograd.grad(loss_of(model), list(model.parameters())))
        with Steps() as steps:
            for factor in (1.0, math.inf, 1.0):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, factor)).backward()
                scaler.step(optimizer)
                scaler.update()
        found = [(row["scale"], row["overflow"], row["skipped"]) for row in steps.rows()]
        assert found == [(SCALE, False, False), (SCALE, True, True), (SCALE / 2, False, False)]
        assert steps.rows()[0]["gradient_norm"] == norm
        assert steps.underflow()["scale"] == SCALE / 2

    def test_gradients_of_two_optimizers_without_amp_are_apart(self):
        model = network()
        optimizers = [MOMENTUM(model[0].parameters()), MOMENTUM(model[2].parameters())]
        with Steps() as steps:
            loss_of(model).backward()
            for optimizer in optimizers:
                optimizer.step()
        elements = {row["name"]: row["elements"] for row in steps.underflow()["parameters"]}
        assert elements == {
            "parameter 0": 32,
            "parameter 1": 8,
            "parameter 0 of optimizer 2": 16,
            "parameter 1 of optimizer 2": 2,
        }

    def test_recording_steps_leaves_no_hooks(self):
        method = torch.amp.GradScaler._maybe_opt_step
        hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
        steps = Steps()
        with steps:
            assert step_observers.observers == [steps]
        assert not step_observers.observers
        assert hooks == (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks))
        assert torch.amp.GradScaler._maybe_opt_step is method

    def test_numbers_on_the_device_are_read_before_many_pile_up(self, monkeypatch):
        monkeypatch.setattr("ampatch.diagnostics.report.steps._WAITING", 3)
        model, optimizer = begun()
        with Steps() as steps:
            for _ in range(7):
                step(model, optimizer)
            assert len(steps._ended) == 1
        assert [row["step"] for row in steps.rows()] == list(range(1, 8))


class CountsOperators(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


class TestUnderflow:
    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**30])
    def test_lost_shares_are_those_of_a_cast_to_half(self, dtype, scale):
        generator = torch.Generator().manual_seed(0)
        # Exponents from -40 to 20; 1.5 lies far from where a cast to half rounds up to the next exponent.
        values = 1.5 * 2.0 ** torch.randint(-40, 20, (10_000,), generator=generator)
        exponents = GradientExponents()
        exponents.add([("weight", values)])
        found = exponents.read()["weight"].lost(scale, Range.of(dtype))
        half = (values.double() * scale).to(dtype)
        info = torch.finfo(dtype)
        assert found == {
            "zero": float((half == 0).double().mean()),
            "subnormal": float(((half != 0) & (half < info.smallest_normal)).double().mean()),
            "overflow": float(half.isinf().double().mean()),
        }

    def test_zeros_and_exponents_of_every_element_are_counted(self):
        exponents = GradientExponents()
        exponents.add([("a", torch.tensor([0.0, -0.0, 1.0, -1.9, 2.0**-149])), ("b", torch.tensor(3.0))])
        exponents.add([("a", torch.tensor([0.5])), ("none", torch.empty(0))])
        found = exponents.read()
        assert found == {"a": Histogram(2, {0: 2, -149: 1, -1: 1}), "b": Histogram(0, {1: 1})}

    def test_steps_that_overflow_are_not_counted(self):
        exponents = GradientExponents()
        exponents.add([("a", torch.tensor([1.0])), ("b", torch.tensor([math.inf]))])
        exponents.add([("a", torch.tensor([math.nan])), ("b", torch.tensor([1.0]))])
        assert {name: each.elements for name, each in exponents.read().items()} == {"a": 0, "b": 0}

    def test_more_elements_are_counted_than_float32_can(self, monkeypatch):
        monkeypatch.setattr("ampatch.diagnostics.report.exponents._CHUNK", 7)
        exponents = GradientExponents()
        exponents.add([("a", torch.ones(100))])
        assert exponents.read()["a"].by_exponent == {0: 100}

    @pytest.mark.slow
    def test_many_gradients_are_counted_with_few_operators(self):
        generator = torch.Generator().manual_seed(0)
        sizes = [*range(200), 2**14 + 1]
        gradients = [
            (f"p{size}", 2.0 ** torch.randint(-140, 120, (size,), generator=generator).float()) for size in sizes
        ]
        exponents = GradientExponents()
        exponents.add(gradients)
        with CountsOperators() as counted:
            exponents.add(gradients)
        assert counted.operators < 2 * len(gradients)
        for name, gradient in gradients:
            if gradient.numel():
                alone = GradientExponents()
                alone.add([(name, gradient)])
                alone.add([(name, gradient)])
                assert exponents.read()[name] == alone.read()[name]
                assert alone.read()[name].elements == 2 * gradient.numel()

    def test_gradients_whose_sizes_change_keep_no_more_memory(self):
        exponents = GradientExponents()
        for size in range(1, 200):  # as those of a sparse embedding
            exponents.add([("weight", torch.ones(size, 4))])
        held = [each for each in gc.get_objects() if type(each) is Tensor and each.dtype == torch.int64]
        assert len(held) < 50
        assert exponents.read()["weight"].elements == 4 * sum(range(1, 200))

    @pytest.mark.parametrize(
        ("by_exponent", "scale", "best"),
        [
            pytest.param({-10: 5}, 8.0, 8.0, id="nothing is lost"),
            pytest.param({-30: 5}, 1.0, 2.0**16, id="too small: the nearest that loses nothing"),
            pytest.param({-28: 5, 0: 5}, 1.0, 2.0**14, id="a wide range: one bit below the overflow"),
            pytest.param({-45: 5, -35: 5, 0: 5}, 1.0, 2.0**10, id="rather few bits than zero"),
            pytest.param({3: 5}, 2.0**20, 2.0**11, id="too large"),
            pytest.param({}, 4.0, 4.0, id="no gradients"),
        ],
    )
    def test_the_best_scale_loses_least(self, by_exponent, scale, best):
        assert Histogram(0, by_exponent).best_scale(scale, Range.of(torch.float16)) == best

    def test_the_best_scale_is_below_those_at_which_steps_overflowed(self):
        model, optimizer = begun(init_scale=2.0**12)
        with Steps() as steps:
            step(model, optimizer, math.inf)  # the scale is 2**11 from here on
            step(model, optimizer, 2.0**-22)
        found = steps.underflow()
        assert (found["scale"], found["best_scale"]) == (2.0**11, 2.0**11)
        assert found["lost"] > 0

    @every_level
    def test_underflow_of_a_training_has_parameters_and_a_better_scale(self, opt_level):
        model, optimizer = begun(opt_level=opt_level, init_scale=1.0)
        with Steps() as steps:
            for _ in range(2):
                step(model, optimizer, 2.0**-12)
        found = steps.underflow()
        assert (found["half"], found["scale"], found["seen"]) == ("float16", 1.0, 2)
        assert [row["name"] for row in found["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert found["elements"] == 2 * sum(each.numel() for each in model.parameters())
        assert found["best_scale"] > 1
        now = next(row for row in found["scales"] if row["scale"] == 1)
        best = next(row for row in found["scales"] if row["scale"] == found["best_scale"])
        assert now["zero"] + now["subnormal"] == found["lost"] > 0.5
        assert best["zero"] + best["subnormal"] < 0.01

    def test_underflow_is_none_without_gradients(self):
        with Steps() as steps:
            pass
        assert steps.underflow() is None

    @every_level
    def test_underflow_is_warned_of_once(self, opt_level):
        model, optimizer = begun(opt_level=opt_level, init_scale=1.0)
        with Steps(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(120):
                step(model, optimizer, 2.0**-12)
        (told,) = map(str, (each.message for each in caught))
        assert told.startswith("at a loss scale of 1, ")
        assert "underflow in float16" in told
        assert "type amp.initialize(..., init_scale=" in told

    def test_no_underflow_is_warned_of_at_a_good_scale(self):
        model, optimizer = begun()
        with Steps(), warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(12):
                step(model, optimizer)


class TestLargeGradients:
    @pytest.mark.parametrize("with_subnormals", [False, True])
    def test_large_gradients_are_counted_on_the_host_as_elsewhere(self, with_subnormals: bool) -> None:
        signs = torch.tensor([1.0, -1.0])[:, None]
        powers = torch.logspace(-126, 127, 254, base=2, dtype=torch.float64).to(torch.float32)
        edges = torch.tensor([0.0, -0.0, torch.inf, torch.nan, torch.finfo(torch.float32).max])
        values = torch.cat([powers, 1.5 * powers, edges]) * signs
        if with_subnormals:
            values = torch.cat([values.flatten(), torch.tensor([2.0**-149, -(2.0**-130), 1.75 * 2.0**-127])])
        values = values.flatten().repeat(3)
        expected = exponents._histogram(values)
        assert torch.equal(exponents._counted_on_host(values), expected)
        assert torch.equal(exponents._counted_on_host(values[::2]), exponents._histogram(values[::2]))

    def test_deterministic_algorithms_count_without_histc(self, monkeypatch):
        values = torch.cat([torch.logspace(-45, 38, 1000), torch.tensor([0.0, torch.inf])])
        expected = exponents._histogram(values).double()
        monkeypatch.setattr(torch, "histc", None)  # on a GPU it raises then
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert torch.equal(exponents._histogram(values), expected)

    def test_large_gradients_have_the_norm_that_float64_gives(self) -> None:
        gradient = torch.randn(3 * 2**20 + 5) * 1e-3
        expected = gradient.to(torch.float64).square().sum()
        assert report_steps._squares(gradient).item() == pytest.approx(expected.item(), rel=1e-6)
        # Squares that float32 does not hold.
        gradient[7] = 1e30
        assert report_steps._squares(gradient).item() == pytest.approx(1e60)
        assert report_steps._squares(torch.zeros(0)).item() == 0
