"""What a skipped step says, by the choices of ``on_overflow``; and that it is skipped cleanly before."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
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
from ampatch.diagnostics.overflow import tracer
from ampatch.errors import AmpWarning
from ampatch.runtime import runtime
from ampatch.scaling import overflows
from ampatch.scaling.overflows import NonFiniteGradient, Overflow, ScaleChange

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FUSED = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
OPTIMIZERS: dict[str, Callable[..., Any]] = {"SGD": SGD, "AdamW-fused": FUSED}
SCALE = 2.0**8

LEVELS: dict[str, dict[str, Any]] = {
    f"{level}-{dtype_name(half)}": {"opt_level": level, "half_dtype": half}
    for level in ("O1", "O2", "O3")
    for half in HALF_DTYPES
}

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

LINE = "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 128.0"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def begun(on_overflow: Any, make: Callable[..., Any] = SGD, *, steps: int = 1, **options: Any) -> tuple[Any, Any]:
    """A model and an optimizer that have made a step or more."""
    model = network()
    optimizer = make(model.parameters())
    settings = {"half_dtype": "float16", "loss_scale": "dynamic", "init_scale": SCALE, "verbosity": 0, **options}
    amp.initialize(model, optimizer, on_overflow=on_overflow, **settings)
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).float().square().mean()


def backward(model: nn.Module, optimizer: Any, *, bad: nn.Module | None = None, factor: float = 1.0, **options: Any):
    """A backward pass in a block; the gradient of the weight of the linear layer ``bad`` gets an inf."""
    with amp.scale_loss(loss_of(model) * factor, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        if bad is not None:
            bad.weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]


def everything(model: nn.Module, optimizer: Any) -> Any:
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy([list(model.parameters()), updated, optimizer.state_dict()])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Losses here are inf or NaN on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss of a skipped step", AmpWarning)
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="ampatch")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ampatch"]


class TestTheValue:
    OVERFLOW = Overflow(
        "SGD",
        (ScaleChange(0, 256.0, 128.0), ScaleChange(2, 4.0, 4.0)),
        tuple(NonFiniteGradient(f"layers.{index}.weight", (2, 3), "float16", 1, index) for index in range(10)),
        math.nan,
    )

    def test_is_text_that_begins_with_the_log_line(self):
        lines = str(self.OVERFLOW).splitlines()
        assert lines == [
            LINE,
            "Gradient overflow. Skipping step, loss scaler 2 keeping loss scale at 4.0",
            "  the loss itself is nan: no loss scale could help",
            "  10 gradients of this SGD with inf or NaN:",
            *(f"    layers.{index}.weight, shape (2, 3), float16: 1 inf, {index} nan" for index in range(8)),
            "    and 2 more",
        ]

    def test_ends_with_the_trace(self):
        overflow = Overflow("SGD", (ScaleChange(0, 2.0, 1.0),), (), remark="cleared", trace=Trace("in exp"))
        assert str(overflow).splitlines()[1:] == ["  SGD: cleared", "trace: in exp"]
        assert overflow.to_dict()["trace"] == {"what": "in exp"}

    def test_is_plain_data_for_json(self):
        data = json.loads(json.dumps(self.OVERFLOW.to_dict(), allow_nan=False))
        assert data.keys() == {"optimizer", "scales", "gradients", "non_finite_loss", "remark", "trace"}
        assert data["scales"][0] == {"loss_id": 0, "before": 256.0, "after": 128.0}
        assert data["gradients"][1] == {
            "name": "layers.1.weight",
            "shape": [2, 3],
            "dtype": "float16",
            "infs": 1,
            "nans": 1,
        }
        assert data["non_finite_loss"] == "nan"

    def test_has_short_names_for_what_is_usual(self):
        overflow = self.OVERFLOW
        assert (overflow.loss_ids, overflow.loss_scale_before, overflow.loss_scale_after) == ((0, 2), 256.0, 128.0)
        assert not overflow.loss_is_finite

    def test_cannot_be_changed(self):
        with pytest.raises(AttributeError):
            self.OVERFLOW.optimizer = "Adam"  # type: ignore[misc]

    @pytest.mark.parametrize("kind", [amp.GradientOverflowError, amp.LossScaleError])
    def test_travels_with_its_error(self, kind):
        overflow = Overflow("SGD", (ScaleChange(0, 2.0, 1.0),), ())
        error = pickle.loads(pickle.dumps(kind("text", overflow)))
        assert (str(error), error.overflow) == ("text", overflow)


class Trace:
    """What a tracer finds."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __str__(self) -> str:
        return f"trace: {self.what}"

    def to_dict(self) -> dict[str, str]:
        return {"what": self.what}


class TestAFunction:
    @every_level
    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_gets_the_event_after_a_clean_skip(self, far, make, options, request):
        if far:
            request.getfixturevalue("far_away")
        seen: list[tuple[Overflow, Any, bool]] = []

        def note(overflow: Overflow) -> None:
            seen.append((overflow, everything(model, optimizer), amp.step_was_skipped(optimizer)))

        model, optimizer = begun(note, make, **options)
        before = everything(model, optimizer)
        backward(model, optimizer, bad=model[2])
        optimizer.step()
        ((overflow, then, was_skipped),) = seen
        assert_same_state(then, before)
        assert_same_state(everything(model, optimizer), before)
        assert was_skipped
        full = "float32" if options["opt_level"] in ("O1", "O2") else dtype_name(options["half_dtype"])
        assert overflow == Overflow(
            type(optimizer).__name__,
            (ScaleChange(0, SCALE, SCALE / 2),),
            (NonFiniteGradient("2.weight", (2, 4), full, 1, 0),),
        )

    @every_level
    @every_optimizer
    def test_counts_inf_and_nan_apart(self, make, options):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append, make, **options)
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[0] = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
            model[2].bias.grad[:] = math.nan
        optimizer.step()
        found = {each.name: (each.shape, each.infs, each.nans) for each in seen[0].gradients}
        assert found == {"0.weight": ((4, 4), 2, 1), "2.bias": ((2,), 0, 2)}

    def test_is_told_of_a_loss_that_is_not_finite(self):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append)
        for factor in (math.inf, math.nan):
            backward(model, optimizer, factor=factor)
            optimizer.step()
        assert seen[0].non_finite_loss == math.inf
        assert math.isnan(seen[1].non_finite_loss or 0)
        assert "  the loss itself is nan" in str(seen[1])

    def test_is_called_after_the_log_line(self, log):
        lines: list[list[str]] = []
        model, optimizer = begun(lambda _: lines.append(log()), verbosity=1)
        backward(model, optimizer, bad=model[0])
        optimizer.step()
        assert lines == [[LINE]]

    def test_sees_casts_on_as_the_loop_does(self):
        seen: list[torch.dtype] = []
        weight = torch.ones(2, 2, requires_grad=True)
        model, optimizer = begun(lambda _: seen.append(torch.mm(torch.ones(2, 2), weight).dtype))
        backward(model, optimizer, bad=model[0])
        optimizer.step()
        assert seen == [torch.float16]

    @every_level
    @every_optimizer
    def test_may_raise_out_of_the_step_and_training_goes_on(self, make, options):
        def stop(_: Overflow) -> None:
            raise KeyError("mine")

        model, optimizer = begun(stop, make, **options)
        before = everything(model, optimizer)
        backward(model, optimizer, bad=model[0])
        with pytest.raises(KeyError, match="mine"):
            optimizer.step()
        assert_same_state(everything(model, optimizer), before)
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        assert not torch.equal(model[0].weight, before[0][0])

    def test_is_not_called_where_nothing_is_skipped(self):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append, steps=3)
        backward(model, optimizer, bad=model[0])
        optimizer.zero_grad()
        optimizer.step()
        assert seen == []

    def test_is_called_for_each_optimizer_of_a_block(self, log):
        seen: list[Overflow] = []
        model = network()
        optimizers = [SGD(model[0].parameters()), torch.optim.AdamW(model[2].parameters())]
        amp.initialize(model, optimizers, half_dtype="float16", init_scale=SCALE, on_overflow=seen.append)
        backward(model, optimizers, bad=model[2])
        for optimizer in optimizers:
            optimizer.step()
        assert [(each.optimizer, [g.name for g in each.gradients]) for each in seen] == [
            ("SGD", []),
            ("AdamW", ["2.weight"]),
        ]
        assert [each.remark for each in seen] == [overflows.OF_ANOTHER_OPTIMIZER, ""]
        assert log() == [LINE]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_knows_of_another_optimizer_that_has_stepped_already(self, level):
        seen: list[Overflow] = []
        model = network()
        optimizers = [SGD(model[2].parameters()), SGD(model[0].parameters())]
        amp.initialize(model, optimizers, opt_level=level, half_dtype="float16", on_overflow=seen.append, verbosity=0)
        backward(model, optimizers, bad=model[2])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert [each.remark for each in seen] == ["", overflows.OF_ANOTHER_OPTIMIZER]

    @every_level
    def test_has_what_an_earlier_block_overflowed_in(self, options):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append, **options)
        backward(model, optimizer, bad=model[2])
        backward(model, optimizer)
        optimizer.step()
        assert [each.name for each in seen[0].gradients] == ["2.weight"]
        assert seen[0].gradients[0].infs == 1

    def test_names_each_loss_that_overflowed(self):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append, num_losses=3)
        backward(model, optimizer, bad=model[0], loss_id=0)
        backward(model, optimizer, loss_id=1)
        backward(model, optimizer, bad=model[2], loss_id=2)
        optimizer.step()
        assert seen[0].scales == (ScaleChange(0, SCALE, SCALE / 2), ScaleChange(2, SCALE, SCALE / 2))
        assert {each.name for each in seen[0].gradients} == {"0.weight", "2.weight"}

    @pytest.mark.parametrize("how", ["delayed", "clipped", "delayed-check"])
    def test_of_other_ways_through_a_block(self, how):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append)
        if how == "delayed-check":
            backward(model, optimizer, bad=model[0], delay_overflow_check=True)
            backward(model, optimizer)
        else:
            backward(model, optimizer, bad=model[0], delay_unscale=True)
            if how == "clipped":
                amp.clip_grad_norm_(optimizer, 1.0)
            else:
                backward(model, optimizer)
        optimizer.step()
        assert [each.name for each in seen[0].gradients] == ["0.weight"]
        assert amp.get_loss_scale() == SCALE / 2

    def test_under_check_finite(self):
        seen: list[Overflow] = []
        model, optimizer = begun(seen.append, opt_level="O4", half_dtype=None, loss_scale=1.0, check_finite=True)
        backward(model, optimizer, factor=math.nan)
        optimizer.step()
        optimizer.zero_grad()
        model[0].bias.grad = torch.full_like(model[0].bias, math.inf)
        optimizer.step()
        assert [each.scales for each in seen] == [(ScaleChange(0, 1.0, 1.0),)] * 2
        assert math.isnan(seen[0].non_finite_loss or 0)
        assert len(seen[0].gradients) == 4
        assert seen[1].gradients == (NonFiniteGradient("0.bias", (4,), "float32", 4, 0),)
        assert seen[1].loss_is_finite

    def test_with_a_closure_that_overflows_later(self):
        seen: list[Overflow] = []
        model, optimizer = begun(
            seen.append, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4), steps=0
        )
        calls = iter(range(10))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                if next(calls) == 2:
                    model[0].weight.grad[0, 0] = math.inf
            return loss.detach()

        before = everything(model, optimizer)
        optimizer.step(closure)
        assert_same_state(everything(model, optimizer), before)
        assert [each.name for each in seen[0].gradients] == ["0.weight"]

    @pytest.mark.parametrize("wrapped", [False, True], ids=["before", "after"])
    def test_beside_a_scheduler(self, wrapped):
        seen: list[Overflow] = []
        model = network()
        optimizer = SGD(model.parameters())
        schedulers = [lr_scheduler.StepLR(optimizer, 1)] if wrapped else []
        amp.initialize(model, optimizer, half_dtype="float16", on_overflow=seen.append, verbosity=0)
        schedulers += [lr_scheduler.StepLR(optimizer, 1)] if not wrapped else []
        backward(model, optimizer, bad=model[0])
        optimizer.step()
        schedulers[0].step()
        assert len(seen) == 1
        copied = copy.deepcopy(optimizer)
        copied.step()
        assert len(seen) == 1

    def test_in_the_session_of_init(self):
        seen: list[Overflow] = []
        model = network()
        optimizer = SGD(model.parameters())
        with amp.init(half_dtype="float16", on_overflow=seen.append):
            backward(model, optimizer, bad=model[0])
            optimizer.step()
        assert [each.gradients[0].shape for each in seen] == [(4, 4)]

    def test_of_sparse_double_and_complex_gradients(self):
        seen: list[Overflow] = []
        model = nn.Module()
        model.table = nn.Embedding(4, 2, sparse=True)
        model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        model.imaginary = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, half_dtype="float16", on_overflow=seen.append, verbosity=0)
        loss = model.table(torch.tensor([1, 1])).sum() * math.inf + (model.wide * math.nan).sum().float()
        loss = loss + (model.imaginary * math.nan).sum().real
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert {(each.name, each.dtype) for each in seen[0].gradients} == {
            ("table.weight", "float32"),
            ("wide", "float64"),
            ("imaginary", "complex64"),
        }


class TestRaise:
    @every_level
    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_is_an_error_after_a_clean_skip_that_a_loop_may_catch(self, far, make, options, request):
        if far:
            request.getfixturevalue("far_away")
        model, optimizer = begun("raise", make, **options)
        for number in range(1, 4):
            before = everything(model, optimizer)
            backward(model, optimizer, bad=model[2])
            with pytest.raises(amp.GradientOverflowError) as caught:
                optimizer.step()
            assert caught.value.overflow.gradients[0].name == "2.weight"
            assert_same_state(everything(model, optimizer), before)
            assert amp.get_loss_scale() == SCALE / 2**number
            assert amp.skipped_steps(optimizer) == number
            optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        assert not torch.equal(model[0].weight, before[0][0])

    def test_says_what_happened_and_what_to_type(self):
        model, optimizer = begun("raise")
        backward(model, optimizer, bad=model[0])
        with pytest.raises(ArithmeticError) as caught:
            optimizer.step()
        error: Any = caught.value
        assert isinstance(error, amp.AmpError)
        assert str(error).startswith(f"{error.overflow}\n")
        assert "catch amp.GradientOverflowError around optimizer.step()" in str(error)

    def test_under_check_finite(self):
        model, optimizer = begun("raise", opt_level="O4", half_dtype=None, loss_scale=1.0, check_finite=True)
        (model(torch.ones(1, 4)).sum() * math.nan).backward()
        with pytest.raises(amp.GradientOverflowError, match=r"keeping loss scale at 1\.0"):
            optimizer.step()

    def test_in_a_closure_leaves_no_trace_of_amps_own_exception(self):
        model, optimizer = begun("raise")

        def closure() -> Tensor:
            optimizer.zero_grad()
            backward(model, optimizer, bad=model[0])
            return torch.zeros(())

        with pytest.raises(amp.GradientOverflowError) as caught:
            optimizer.step(closure)
        assert caught.value.__context__ is None


class TestTrace:
    def test_logs_all_of_it_instead_of_the_line(self, log):
        model, optimizer = begun("trace")
        backward(model, optimizer, bad=model[2])
        optimizer.step()
        (text,) = log()
        assert text.splitlines() == [
            LINE,
            "  1 gradient of this SGD with inf or NaN:",
            "    2.weight, shape (2, 4), float32: 1 inf, 0 nan",
            "No watched operator produced the inf or NaN of these gradients.",
            f"  note      {tracer.FINITE_AGAIN}",
            f"  note      {tracer.IS_ARMED}",
        ]

    @pytest.mark.parametrize("on_overflow", ["trace", "raise", "function"])
    def test_asks_the_sessions_tracer_about_the_block_that_overflowed(self, on_overflow, log):
        seen: list[Overflow] = []
        asked: list[Any] = []

        class Tracer:
            skipped, notes_steps = None, False

            def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> object | None:
                asked.append((list(parameters), loss_scale))
                return Trace("in exp")

            def end_step(self, parameters: Iterable[Tensor]) -> None:
                asked.append(list(parameters))

        model, optimizer = begun(seen.append if on_overflow == "function" else on_overflow)
        assert runtime.live is not None
        runtime.live.losses.overflows.tracer = Tracer()
        block: Any = amp.scale_loss(loss_of(model), optimizer)
        with block as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[0, 0] = math.inf
        backward(model, optimizer)
        try:
            optimizer.step()
        except amp.GradientOverflowError as error:
            seen.append(error.overflow)
        owned = list(model.parameters())
        assert asked == [(owned, float(block.scale_use.scale)), owned]
        text = str(seen[0]) if seen else log()[0]
        assert text.endswith("trace: in exp")

    def test_under_check_finite_asks_with_the_static_scale(self):
        asked: list[Any] = []

        class Tracer:
            skipped, notes_steps = None, False

            def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> object | None:
                asked.append(loss_scale)

            def end_step(self, parameters: Iterable[Tensor]) -> None:
                pass

        model, optimizer = begun("trace", loss_scale=8.0, num_losses=2, check_finite=True)
        assert runtime.live is not None
        runtime.live.losses.overflows.tracer = Tracer()
        backward(model, optimizer, loss_id=1)
        backward(model, optimizer, bad=model[0])
        optimizer.step()
        assert asked == [8.0]


class TestLog:
    """The default: one line, and nothing else."""

    def test_is_one_line(self, log):
        model, optimizer = begun("log", verbosity=1)
        backward(model, optimizer, bad=model[0])
        optimizer.step()
        assert log() == [LINE]

    @pytest.mark.parametrize("wrong", ["Raise", "loud", None, 3])
    def test_other_choices_are_refused(self, wrong):
        with pytest.raises(amp.OptionError, match=r"on_overflow is .*; expected 'explain', 'log', 'raise', 'trace'"):
            amp.initialize(network(), on_overflow=wrong)
        with pytest.raises(amp.OptionError, match="on_overflow"):
            amp.init(on_overflow=wrong)
        assert not amp.is_on()

    WRONG = (lambda: None, lambda overflow, step: None, ("trace", lambda *, overflow: None))

    @pytest.mark.parametrize("function", WRONG, ids=["none", "two", "by keyword"])
    def test_a_function_of_another_number_of_arguments_is_refused(self, function):
        with pytest.raises(amp.OptionError, match=r"cannot be called with one argument \("):
            amp.init(half_dtype="float16", on_overflow=function)

    RIGHT = (print, lambda overflow, step=1: None, lambda *args: None, [].append)

    @pytest.mark.parametrize("function", RIGHT, ids=["print", "default", "any", "method"])
    def test_a_function_that_takes_one_is_taken(self, function):
        amp.init(half_dtype="float16", on_overflow=function)
        amp.deinitialize()


class TestTheFloor:
    @pytest.mark.parametrize("on_overflow", ["log", "raise", "trace", "function"])
    def test_stays_an_error_of_its_own_that_has_the_event(self, on_overflow):
        seen: list[Overflow] = []
        choice = seen.append if on_overflow == "function" else on_overflow
        model, optimizer = begun(choice, init_scale=1.0, min_loss_scale=1.0)
        backward(model, optimizer, bad=model[0])
        with pytest.raises(amp.LossScaleError, match=r"0\.weight, shape \(4, 4\), float32: 1 inf, 0 nan") as caught:
            optimizer.step()
        assert caught.value.overflow.gradients == (NonFiniteGradient("0.weight", (4, 4), "float32", 1, 0),)
        assert caught.value.overflow.scales == (ScaleChange(0, 1.0, 1.0),)
        assert seen == []


class TestGradScaler:
    def run(self, on_overflow: Any, make: Callable[..., Any] = SGD, **options: Any) -> tuple[Any, Any, Any]:
        model = network()
        optimizer, scaler = (
            make(model.parameters()),
            ampatch.GradScaler("cpu", init_scale=SCALE, on_overflow=on_overflow, **options),
        )
        self.iterate(model, optimizer, scaler)
        return model, optimizer, scaler

    def iterate(self, model: nn.Module, optimizer: Any, scaler: Any, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * factor).backward()
        try:
            scaler.step(optimizer)
        finally:
            scaler.update()

    @every_optimizer
    @pytest.mark.parametrize("far", [False, True], ids=["", "far-away"])
    def test_calls_a_function_after_a_clean_skip(self, far, make, request):
        if far:
            request.getfixturevalue("far_away")
        seen: list[tuple[Overflow, Any]] = []
        model, optimizer, scaler = self.run(
            lambda overflow: seen.append((overflow, everything(model, optimizer))), make
        )
        before = everything(model, optimizer)
        self.iterate(model, optimizer, scaler, math.nan)
        ((overflow, then),) = seen
        assert_same_state(then, before)
        assert overflow.scales == (ScaleChange(0, SCALE, SCALE / 2),)
        assert scaler.get_scale() == SCALE / 2
        assert overflow.gradients[0] == NonFiniteGradient("param_groups[0]['params'][0]", (4, 4), "float32", 0, 16)
        self.iterate(model, optimizer, scaler)
        assert len(seen) == 1
        assert not torch.equal(model[0].weight, before[0][0])

    @every_optimizer
    def test_raises_and_goes_on(self, make):
        model, optimizer, scaler = self.run("raise", make)
        before = everything(model, optimizer)
        for _ in range(2):
            with pytest.raises(amp.GradientOverflowError, match="Skipping step"):
                self.iterate(model, optimizer, scaler, math.inf)
        assert_same_state(everything(model, optimizer), before)
        assert scaler.get_scale() == SCALE / 4
        self.iterate(model, optimizer, scaler)

    @pytest.mark.parametrize(("on_overflow", "lines"), [("log", 1), ("trace", 6)])
    def test_logs(self, on_overflow, lines, log):
        model, optimizer, scaler = self.run(on_overflow)
        self.iterate(model, optimizer, scaler, math.nan)
        (text,) = log()
        assert text.splitlines()[0] == LINE
        assert len(text.splitlines()) == lines

    def test_with_a_closure(self):
        seen: list[Overflow] = []
        model, optimizer, scaler = self.run(seen.append)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model) * math.nan
            scaler.scale(loss).backward()
            return loss

        before = everything(model, optimizer)
        scaler.step(optimizer, closure)
        scaler.update()
        assert_same_state(everything(model, optimizer), before)
        assert len(seen[0].gradients) == 4

    def test_at_its_floor_the_error_has_the_event(self):
        model, optimizer, scaler = self.run("raise", min_loss_scale=SCALE)
        with pytest.raises(amp.LossScaleError) as caught:
            self.iterate(model, optimizer, scaler, math.nan)
        assert len(caught.value.overflow.gradients) == 4

    def test_refuses_other_choices_unless_it_is_disabled(self):
        with pytest.raises(amp.OptionError, match="on_overflow is 'loud'"):
            ampatch.GradScaler("cpu", on_overflow="loud")
        ampatch.GradScaler("cpu", on_overflow="loud", enabled=False)

    def test_that_was_pickled_without_a_choice_logs(self):
        scaler = ampatch.GradScaler("cpu")
        state = scaler.__getstate__()
        del state["_overflows"]
        loaded = ampatch.GradScaler.__new__(ampatch.GradScaler)
        loaded.__setstate__(state)
        assert not loaded._overflows.reports


def ddp(factors: list[float], beside: bool) -> list[dict[str, Any]]:
    seen: list[Overflow] = []
    model = network()
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, half_dtype="float16", init_scale=SCALE, on_overflow=seen.append, verbosity=0)
    if beside:  # reduced by nobody: amp tells the other ranks
        replica: Any = nn.Sequential(DistributedDataParallel(nn.Sequential(*model[:2])), model[2])
    else:
        replica = DistributedDataParallel(model)
    with amp.scale_loss(loss_of(replica), optimizer) as scaled_loss:
        scaled_loss.backward()
        if beside and factors[dist.get_rank()] != 1:
            model[2].weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]
        elif not beside:
            for parameter in model.parameters():
                parameter.grad.mul_(factors[dist.get_rank()])  # type: ignore[union-attr]
                dist.all_reduce(parameter.grad)
    optimizer.step()
    return [each.to_dict() for each in seen]


def fsdp() -> list[dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    seen: list[Overflow] = []
    model = network()
    fully_shard(model)
    optimizer = SGD(model.parameters())
    amp.initialize(model, optimizer, half_dtype="float16", init_scale=SCALE, on_overflow=seen.append, verbosity=0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        if dist.get_rank() == 0:
            grad: Any = model[0].weight.grad
            grad.to_local()[0, 0] = math.inf
    optimizer.step()
    return [each.to_dict() for each in seen]


class TestSeveralRanks:
    @pytest.mark.slow
    def test_of_ddp_all_have_the_same_event(self, two):
        first, second = two.run(ddp, [1.0, math.inf], False)
        assert first == second
        assert len(first[0]["gradients"]) == 4

    @pytest.mark.slow
    def test_of_ddp_with_parameters_beside_it_the_other_says_so(self, two):
        (first,), (second,) = two.run(ddp, [1.0, math.inf], True)
        assert (first["gradients"], first["remark"]) == ([], overflows.OF_ANOTHER_RANK)
        assert [each["name"] for each in second["gradients"]] == ["2.weight"]

    @pytest.mark.slow
    def test_of_fsdp2_the_rank_with_the_piece_names_it(self, two):
        (first,), (second,) = two.run(fsdp)
        assert [(each["name"], each["shape"], each["infs"]) for each in first["gradients"]] == [("0.weight", [4, 4], 1)]
        assert (second["gradients"], second["remark"]) == ([], overflows.OF_ANOTHER_RANK)


def test_choices_have_names_for_settings() -> None:
    class Logger:
        def __call__(self, overflow: Overflow) -> None: ...

    assert overflows.name_of_choice("raise") == "raise"
    assert overflows.name_of_choice(network) == f"{__name__}.network"
    assert overflows.name_of_choice(functools.partial(print)) == "functools.partial"
    assert re.fullmatch(r"test_overflows\.test_choices.*Logger", overflows.name_of_choice(Logger()))
