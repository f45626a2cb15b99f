"""What a skipped step says, by the choices of ``on_overflow``; and that it is skipped cleanly before."""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import stepping
import torch
import torch.distributed as dist
from helpers import assert_same_state, dtype_name
from optimizers import MOMENTUM, SGD, backward, initialize
from stepping import LEVELS, SCALE, distance, everything, loss_of, network, nothing_changes, o1_and_o2, train  # noqa: F401
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ampatch
from ampatch import amp
from ampatch.diagnostics.overflow import tracer
from ampatch.runtime import runtime
from ampatch.scaling import overflows
from ampatch.scaling.overflows import NonFiniteGradient, Overflow, ScaleChange

# Losses here are inf or NaN on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the loss of a skipped step:ampatch.errors.AmpWarning")

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": MOMENTUM,
    "AdamW-fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}
CHECKED = {"opt_level": "O4", "half_dtype": None, "loss_scale": 1.0, "check_finite": True}

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

LINE = "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 128.0"

# With casts, whose operators are watched to explain an overflow.
started = functools.partial(stepping.started, opt_level="O1", half_dtype="float16", steps=1)


@pytest.fixture
def seen() -> list[Overflow]:
    """The events that a function was called with."""
    return []


def overflow(model: nn.Module, optimizers: Any, layer: int = 0, **options: Any) -> None:
    """Makes a backward pass in a block, after which the gradient of a layer's weight has an inf."""
    with amp.scale_loss(loss_of(model), optimizers, **options) as scaled_loss:
        scaled_loss.backward()
        model[layer].weight.grad[0, 0] = math.inf


class Trace:
    """What a tracer finds."""

    def __str__(self) -> str:
        return "trace: in exp"

    def to_dict(self) -> dict[str, str]:
        return {"what": "in exp"}


class TestOverflow:
    OVERFLOW = Overflow(
        "SGD",
        (ScaleChange(0, 256.0, 128.0), ScaleChange(2, 4.0, 4.0)),
        tuple(NonFiniteGradient(f"layers.{index}.weight", (2, 3), "float16", 1, index) for index in range(10)),
        math.nan,
    )

    def test_text_begins_with_the_log_lines(self):
        assert str(self.OVERFLOW).splitlines() == [
            LINE,
            "Gradient overflow. Skipping step, loss scaler 2 keeping loss scale at 4.0",
            "  the loss itself is nan: no loss scale could help",
            "  10 gradients of this SGD with inf or NaN:",
            *(f"    layers.{index}.weight, shape (2, 3), float16: 1 inf, {index} nan" for index in range(8)),
            "    and 2 more",
        ]

    def test_text_ends_with_the_trace(self):
        overflow = Overflow("SGD", (ScaleChange(0, 2.0, 1.0),), (), remark="cleared", trace=Trace())
        assert str(overflow).splitlines()[1:] == ["  SGD: cleared", "trace: in exp"]
        assert overflow.to_dict()["trace"] == {"what": "in exp"}

    def test_event_is_plain_data_for_json(self):
        data = json.loads(json.dumps(self.OVERFLOW.to_dict(), allow_nan=False))
        assert data.keys() == {"optimizer", "scales", "gradients", "non_finite_loss", "remark", "trace"}
        assert data["scales"][0] == {"loss_id": 0, "before": 256.0, "after": 128.0}
        gradient = {"name": "layers.1.weight", "shape": [2, 3], "dtype": "float16", "infs": 1, "nans": 1}
        assert data["gradients"][1] == gradient
        assert data["non_finite_loss"] == "nan"

    def test_event_is_immutable_and_has_short_names(self):
        overflow = self.OVERFLOW
        assert (overflow.loss_ids, overflow.loss_scale_before, overflow.loss_scale_after) == ((0, 2), 256.0, 128.0)
        assert not overflow.loss_is_finite
        with pytest.raises(AttributeError):
            overflow.optimizer = "Adam"

    @pytest.mark.parametrize("kind", [amp.GradientOverflowError, amp.LossScaleError])
    def test_error_is_pickled_with_its_event(self, kind):
        overflow = Overflow("SGD", (ScaleChange(0, 2.0, 1.0),), ())
        error = pickle.loads(pickle.dumps(kind("text", overflow)))
        assert (str(error), error.overflow) == ("text", overflow)


class TestFunctions:
    @every_level
    @every_optimizer
    @pytest.mark.usefixtures("distance")
    def test_function_gets_the_event_after_a_clean_skip(self, make, options):
        seen: list[tuple[Overflow, Any, bool]] = []

        def note(overflow: Overflow) -> None:
            seen.append((overflow, everything(model, optimizer), amp.step_was_skipped(optimizer)))

        model, optimizer = started(make, on_overflow=note, **options)
        before = everything(model, optimizer)
        overflow(model, optimizer, 2)
        optimizer.step()
        ((event, then, was_skipped),) = seen
        assert_same_state(then, before)
        assert_same_state(everything(model, optimizer), before)
        assert was_skipped
        full = dtype_name(options["half_dtype"]) if options["opt_level"] == "O3" else "float32"
        assert event == Overflow(
            type(optimizer).__name__,
            (ScaleChange(0, SCALE, SCALE / 2),),
            (NonFiniteGradient("2.weight", (3, 6), full, 1, 0),),
        )

    @every_optimizer
    def test_event_counts_inf_and_nan_apart(self, make, seen):
        model, optimizer = started(make, on_overflow=seen.append)
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[0] = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
            model[2].bias.grad[:] = math.nan
        optimizer.step()
        found = {each.name: (each.shape, each.infs, each.nans) for each in seen[0].gradients}
        assert found == {"0.weight": ((6, 4), 2, 1), "2.bias": ((3,), 0, 3)}

    def test_event_has_a_loss_that_is_not_finite(self, seen):
        model, optimizer = started(on_overflow=seen.append)
        train(model, optimizer, math.inf, math.nan)
        assert seen[0].non_finite_loss == math.inf
        assert math.isnan(seen[1].non_finite_loss or 0)
        assert "  the loss itself is nan" in str(seen[1])

    def test_function_is_called_after_the_log_line_with_casts_on(self, caplog):
        weight = torch.ones(2, 2, requires_grad=True)

        def note(_: Overflow) -> None:
            seen.append((*caplog.messages, torch.mm(torch.ones(2, 2), weight).dtype))

        seen: list[Any] = []
        model, optimizer = started(on_overflow=note, verbosity=1)
        overflow(model, optimizer)
        optimizer.step()
        assert seen == [(LINE, torch.float16)]

    def test_function_is_not_called_unless_a_step_is_skipped(self, seen):
        model, optimizer = started(steps=3, on_overflow=seen.append)
        overflow(model, optimizer)
        optimizer.zero_grad()
        optimizer.step()
        assert seen == []

    @o1_and_o2
    @pytest.mark.parametrize("order", [[0, 2], [2, 0]], ids=["overflow-last", "overflow-first"])
    def test_function_is_called_for_each_optimizer_of_a_block(self, order, opt_level, seen, caplog):
        model = network()
        optimizers = [SGD(model[layer].parameters()) for layer in order]
        options = {"half_dtype": "float16", "init_scale": SCALE, "verbosity": 1}
        initialize(model, optimizers, opt_level=opt_level, on_overflow=seen.append, **options)
        overflow(model, optimizers, 2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        first, last = seen if order == [0, 2] else reversed(seen)
        assert (first.gradients, first.remark) == ((), overflows.OF_ANOTHER_OPTIMIZER)
        assert ([each.name for each in last.gradients], last.remark) == (["2.weight"], "")
        assert caplog.messages == [LINE]

    def test_event_names_each_loss_that_overflowed(self, seen):
        model, optimizer = started(on_overflow=seen.append, num_losses=3)
        overflow(model, optimizer, loss_id=0)
        backward(loss_of(model), optimizer, loss_id=1)
        overflow(model, optimizer, 2, loss_id=2)
        optimizer.step()
        assert seen[0].scales == (ScaleChange(0, SCALE, SCALE / 2), ScaleChange(2, SCALE, SCALE / 2))
        assert {each.name for each in seen[0].gradients} == {"0.weight", "2.weight"}

    @every_level
    @pytest.mark.parametrize(
        "delay", [{}, {"delay_unscale": True}, {"delay_overflow_check": True}], ids=["", "delayed", "check-delayed"]
    )
    def test_event_names_the_gradients_that_an_earlier_block_overflowed_in(self, delay, options, seen):
        model, optimizer = started(on_overflow=seen.append, **options)
        overflow(model, optimizer, **delay)
        backward(loss_of(model), optimizer)
        optimizer.step()
        assert [(each.name, each.infs) for each in seen[0].gradients] == [("0.weight", 1)]
        assert amp.get_loss_scale() == SCALE / 2

    def test_event_names_the_gradients_that_overflowed_before_they_were_clipped(self, seen):
        model, optimizer = started(on_overflow=seen.append)
        overflow(model, optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        assert [each.name for each in seen[0].gradients] == ["0.weight"]

    def test_event_of_a_step_that_checks_has_a_scale_that_stays(self, seen):
        model, optimizer = started(on_overflow=seen.append, **CHECKED)
        train(model, optimizer, math.nan)
        optimizer.zero_grad()
        model[0].bias.grad = torch.full_like(model[0].bias, math.inf)
        optimizer.step()
        assert [each.scales for each in seen] == [(ScaleChange(0, 1.0, 1.0),)] * 2
        assert math.isnan(seen[0].non_finite_loss or 0)
        assert len(seen[0].gradients) == 4
        assert seen[1].gradients == (NonFiniteGradient("0.bias", (6,), "float32", 6, 0),)
        assert seen[1].loss_is_finite

    def test_event_of_an_undone_closure_names_the_gradients(self, seen):
        lbfgs = functools.partial(torch.optim.LBFGS, max_iter=4)
        model, optimizer = started(lbfgs, steps=0, on_overflow=seen.append)
        evaluations = iter(range(9))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            backward(loss, optimizer)
            if next(evaluations) == 2:
                overflow(model, optimizer)
            return loss.detach()

        with nothing_changes(model, optimizer):
            optimizer.step(closure)
        assert [each.name for each in seen[0].gradients] == ["0.weight"]

    def test_function_is_called_in_a_session_of_init(self, seen):
        model = network()
        optimizer = SGD(model.parameters())
        with amp.init(half_dtype="float16", on_overflow=seen.append):
            overflow(model, optimizer)
            optimizer.step()
        assert [each.gradients[0].shape for each in seen] == [(6, 4)]

    def test_event_names_sparse_double_and_complex_gradients(self, seen):
        model = nn.Module()
        model.table = nn.Embedding(4, 2, sparse=True)
        model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        model.imaginary = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        _, optimizer = started(model=model, steps=0, on_overflow=seen.append)
        loss = model.table(torch.tensor([1, 1])).sum() * math.inf + (model.wide * math.nan).sum().float()
        backward(loss + (model.imaginary * math.nan).sum().real, optimizer)
        optimizer.step()
        found = {(each.name, each.dtype) for each in seen[0].gradients}
        assert found == {("table.weight", "float32"), ("wide", "float64"), ("imaginary", "complex64")}


def raise_key_error(_: Overflow) -> None:
    raise KeyError


class TestErrors:
    @every_level
    @every_optimizer
    @pytest.mark.usefixtures("distance")
    @pytest.mark.parametrize(
        ("on_overflow", "error"),
        [("raise", amp.GradientOverflowError), (raise_key_error, KeyError)],
        ids=["raise", "function"],
    )
    def test_step_raises_after_a_clean_skip_and_training_can_go_on(self, on_overflow, error, make, options):
        model, optimizer = started(make, on_overflow=on_overflow, **options)
        for number in range(1, 4):
            before = everything(model, optimizer)
            optimizer.zero_grad()
            overflow(model, optimizer, 2)
            with pytest.raises(error) as caught:
                optimizer.step()
            assert on_overflow != "raise" or caught.value.overflow.gradients[0].name == "2.weight"
            assert_same_state(everything(model, optimizer), before)
            assert amp.get_loss_scale() == SCALE / 2**number
            assert amp.skipped_steps(optimizer) == number
        train(model, optimizer, 1)
        assert not torch.equal(model[0].weight, before[0][0])

    def test_error_says_what_happened_and_what_to_type(self):
        model, optimizer = started(on_overflow="raise")
        overflow(model, optimizer)
        with pytest.raises(ArithmeticError) as caught:
            optimizer.step()
        error: Any = caught.value
        assert isinstance(error, amp.AmpError)
        assert str(error).startswith(f"{error.overflow}\n")
        assert "catch amp.GradientOverflowError around optimizer.step()" in str(error)

    def test_error_of_a_closure_has_no_internal_exception_as_its_context(self):
        model, optimizer = started(on_overflow="raise")
        with pytest.raises(amp.GradientOverflowError) as caught:
            optimizer.step(lambda: overflow(model, optimizer))
        assert caught.value.__context__ is None

    @pytest.mark.parametrize("on_overflow", ["log", "raise", "trace", raise_key_error])
    def test_error_at_the_floor_has_the_event_whatever_the_choice(self, on_overflow):
        model, optimizer = started(on_overflow=on_overflow, init_scale=1.0, min_loss_scale=1.0)
        overflow(model, optimizer)
        with pytest.raises(amp.LossScaleError, match=r"0\.weight, shape \(6, 4\), float32: 1 inf, 0 nan") as caught:
            optimizer.step()
        assert caught.value.overflow.gradients == (NonFiniteGradient("0.weight", (6, 4), "float32", 1, 0),)
        assert caught.value.overflow.scales == (ScaleChange(0, 1.0, 1.0),)


class FakeTracer:
    """Notes what a session asks its tracer."""

    skipped, notes_steps = None, False

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ended: list[list[Tensor]] = []
        runtime.live.losses.overflows.tracer = self

    def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> Trace:
        self.asked.append((list(parameters), loss_scale))
        return Trace()

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        self.ended.append(list(parameters))


class TestTraces:
    def test_trace_is_logged_instead_of_the_line(self, caplog):
        model, optimizer = started(on_overflow="trace")
        overflow(model, optimizer, 2)
        optimizer.step()
        (text,) = caplog.messages
        assert text.splitlines() == [
            LINE,
            "  1 gradient of this SGD with inf or NaN:",
            "    2.weight, shape (3, 6), float32: 1 inf, 0 nan",
            "No watched operator produced the inf or NaN of these gradients.",
            f"  note      {tracer.FINITE_AGAIN}",
            f"  note      {tracer.IS_ARMED}",
        ]

    @pytest.mark.parametrize("on_overflow", ["trace", "raise", "function"])
    def test_tracer_is_asked_about_the_block_that_overflowed(self, on_overflow, seen, caplog):
        model, optimizer = started(on_overflow=seen.append if on_overflow == "function" else on_overflow)
        fake = FakeTracer()
        overflow(model, optimizer)
        backward(loss_of(model), optimizer)
        try:
            optimizer.step()
        except amp.GradientOverflowError as error:
            seen.append(error.overflow)
        owned = list(model.parameters())
        assert fake.asked == [(owned, SCALE)]
        assert fake.ended == [owned]
        text = str(seen[0]) if seen else caplog.messages[0]
        assert text.endswith("trace: in exp")

    def test_tracer_of_a_step_that_checks_is_asked_with_the_static_scale(self):
        model, optimizer = started(on_overflow="trace", loss_scale=8.0, num_losses=2, check_finite=True)
        fake = FakeTracer()
        backward(loss_of(model), optimizer, loss_id=1)
        overflow(model, optimizer)
        optimizer.step()
        assert [loss_scale for _, loss_scale in fake.asked] == [8.0]


class TestChoices:
    @pytest.mark.parametrize("wrong", ["Raise", "loud", None, 3])
    def test_choice_of_another_name_is_refused(self, wrong):
        with pytest.raises(amp.OptionError, match=r"on_overflow is .*; expected 'explain', 'log', 'raise', 'trace'"):
            amp.initialize(network(), on_overflow=wrong)
        with pytest.raises(amp.OptionError, match="on_overflow"):
            amp.init(on_overflow=wrong)
        assert not amp.is_on()

    @pytest.mark.parametrize(
        "function",
        [lambda: None, lambda overflow, step: None, ("trace", lambda *, overflow: None)],
        ids=["none", "two", "by keyword"],
    )
    def test_function_that_does_not_take_one_argument_is_refused(self, function):
        with pytest.raises(amp.OptionError, match=r"cannot be called with one argument \("):
            amp.init(half_dtype="float16", on_overflow=function)

    @pytest.mark.parametrize(
        "function",
        [print, lambda overflow, step=1: None, lambda *args: None, [].append],
        ids=["print", "default", "any", "method"],
    )
    def test_function_that_takes_one_argument_is_accepted(self, function):
        amp.init(half_dtype="float16", on_overflow=function)

    def test_choices_have_names_for_settings(self):
        class Logger:
            def __call__(self, overflow: Overflow) -> None: ...

        assert overflows.name_of_choice("raise") == "raise"
        assert overflows.name_of_choice(raise_key_error) == f"{__name__}.raise_key_error"
        assert overflows.name_of_choice(functools.partial(print)) == "functools.partial"
        assert re.fullmatch(r"test_overflows\..*test_choices.*Logger", overflows.name_of_choice(Logger()))


class TestGradScaler:
    def started(self, on_overflow: Any, make: Callable[..., Any] = MOMENTUM) -> tuple[Any, Any, Any]:
        model = network()
        optimizer = make(model.parameters())
        scaler = ampatch.GradScaler("cpu", init_scale=SCALE, on_overflow=on_overflow)
        self.step(model, optimizer, scaler)
        return model, optimizer, scaler

    def step(self, model: nn.Module, optimizer: Any, scaler: Any, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * factor).backward()
        try:
            scaler.step(optimizer)
        finally:
            scaler.update()

    @every_optimizer
    @pytest.mark.usefixtures("distance")
    def test_function_gets_the_event_after_a_clean_skip(self, make):
        seen: list[tuple[Overflow, Any]] = []
        model, optimizer, scaler = self.started(lambda event: seen.append((event, everything(model, optimizer))), make)
        before = everything(model, optimizer)
        self.step(model, optimizer, scaler, math.nan)
        ((event, then),) = seen
        assert_same_state(then, before)
        assert event.scales == (ScaleChange(0, SCALE, SCALE / 2),)
        assert scaler.get_scale() == SCALE / 2
        assert event.gradients[0] == NonFiniteGradient("param_groups[0]['params'][0]", (6, 4), "float32", 0, 24)
        self.step(model, optimizer, scaler)
        assert len(seen) == 1
        assert not torch.equal(model[0].weight, before[0][0])

    @every_optimizer
    def test_step_raises_after_a_clean_skip_and_training_can_go_on(self, make):
        model, optimizer, scaler = self.started("raise", make)
        for _ in range(2):
            with (
                nothing_changes(model, optimizer),
                pytest.raises(amp.GradientOverflowError, match="Skipping step"),
            ):
                self.step(model, optimizer, scaler, math.inf)
        assert scaler.get_scale() == SCALE / 4
        self.step(model, optimizer, scaler)

    @pytest.mark.parametrize(("on_overflow", "lines"), [("log", 1), ("trace", 6)])
    def test_skipped_step_is_logged(self, on_overflow, lines, caplog):
        self.step(*self.started(on_overflow), math.nan)
        (text,) = caplog.messages
        assert text.splitlines()[0] == LINE
        assert len(text.splitlines()) == lines

    def test_function_gets_the_event_of_a_closure(self, seen):
        model, optimizer, scaler = self.started(seen.append)
        with nothing_changes(model, optimizer):
            scaler.step(optimizer, lambda: scaler.scale(loss_of(model) * math.nan).backward())
        scaler.update()
        assert len(seen[0].gradients) == 4

    def test_choice_of_another_name_is_refused_unless_the_scaler_is_disabled(self):
        with pytest.raises(amp.OptionError, match="on_overflow is 'loud'"):
            ampatch.GradScaler("cpu", on_overflow="loud")
        ampatch.GradScaler("cpu", on_overflow="loud", enabled=False)

    def test_scaler_that_was_pickled_without_a_choice_logs(self):
        state = ampatch.GradScaler("cpu").__getstate__()
        del state["_overflows"]
        loaded = ampatch.GradScaler.__new__(ampatch.GradScaler)
        loaded.__setstate__(state)
        assert not loaded._overflows.reports


def ddp(factors: list[float], beside: bool) -> list[dict[str, Any]]:
    seen: list[Overflow] = []
    model, optimizer = started(on_overflow=seen.append)
    if beside:  # reduced by nobody: amp tells the other ranks
        replica: Any = nn.Sequential(DistributedDataParallel(nn.Sequential(*model[:2])), model[2])
    else:
        replica = DistributedDataParallel(model)
    with amp.scale_loss(loss_of(replica), optimizer) as scaled_loss:
        scaled_loss.backward()
        if beside and factors[dist.get_rank()] != 1:
            model[2].weight.grad[0, 0] = math.inf
        elif not beside:
            for parameter in model.parameters():
                parameter.grad.mul_(factors[dist.get_rank()])
                dist.all_reduce(parameter.grad)
    optimizer.step()
    return [each.to_dict() for each in seen]


def fsdp() -> list[dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    seen: list[Overflow] = []
    model = network()
    fully_shard(model)
    _, optimizer = started(model=model, steps=0, on_overflow=seen.append)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        if dist.get_rank() == 0:
            model[0].weight.grad.to_local()[0, 0] = math.inf
    optimizer.step()
    return [each.to_dict() for each in seen]


class TestSeveralRanks:
    @pytest.mark.slow
    def test_ranks_of_ddp_have_the_same_event(self, two):
        first, second = two.run(ddp, [1.0, math.inf], False)
        assert first == second
        assert len(first[0]["gradients"]) == 4

    @pytest.mark.slow
    def test_rank_of_ddp_says_that_gradients_beside_it_overflowed_on_another_rank(self, two):
        (first,), (second,) = two.run(ddp, [1.0, math.inf], True)
        assert (first["gradients"], first["remark"]) == ([], overflows.OF_ANOTHER_RANK)
        assert [each["name"] for each in second["gradients"]] == ["2.weight"]

    @pytest.mark.slow
    def test_rank_of_fsdp2_with_the_shard_names_its_gradient(self, two):
        (first,), (second,) = two.run(fsdp)
        assert [(each["name"], each["shape"], each["infs"]) for each in first["gradients"]] == [("0.weight", [6, 4], 1)]
        assert (second["gradients"], second["remark"]) == ([], overflows.OF_ANOTHER_RANK)
