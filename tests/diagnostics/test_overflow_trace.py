"""``on_overflow="trace"``: the functions that traces name for planted overflows, and the remedies."""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, together
from optimizers import SGD, backward
from planted_overflows import Amplified, traced, watch_each_step
from torch import nn

from ampatch import GradScaler, amp
from ampatch.diagnostics.overflow import causes
from ampatch.diagnostics.recorder.records import has_half
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.runtime import runtime


class Attention(nn.Module):
    """Attention whose scores are multiplied by ``factor`` squared before they are divided."""

    def __init__(self, factor: float = 1.0, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.factor, self.mask = factor, mask

    def forward(self, x):
        query, key = self.query(x) * self.factor, self.key(x) * self.factor
        scores = query @ key.transpose(-2, -1)
        scores = scores / math.sqrt(8)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        return weights @ x


class Applied(nn.Module):
    """A function as a module between two linear layers."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def overflowing() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Attention(1000.0))


def batch() -> torch.Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def in_float32(output: torch.Tensor) -> torch.Tensor:
    return output.float().sum()  # the gradient of a half loss would be the scale itself


def events_of(model: nn.Module, *, loss_fn=in_float32, steps: int = 1, x=None, **options: Any) -> list[Any]:
    """Trains for some steps, and returns the overflows."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    optimizer = SGD(model.parameters(), lr=0.01)
    with traced(model, optimizer, **{"init_scale": 1024.0, **options}) as events:
        for _ in range(steps):
            optimizer.zero_grad()
            backward(loss_fn(model(batch() if x is None else x)), optimizer)
            optimizer.step()
    return events


def trace_of(model: nn.Module, **options: Any) -> Any:
    """Returns the trace of the only overflow of one step."""
    (event,) = events_of(model, **options)
    return event.trace


def second_trace_of(model: nn.Module, **options: Any) -> Any:
    """Returns the trace of the second of two overflows: after the first, the steps are watched."""
    first, second = events_of(model, steps=2, loss_scale=65536.0, check_finite=True, **options)
    if len(first.trace.notes) > 1:
        assert "the next steps are watched" in first.trace.notes[-1]
    return second.trace


@pytest.fixture(params=["second run", "watched"], autouse=True)
def way(request, monkeypatch):
    """How an overflow is found: by a second run, or by watching the steps as they run."""
    if request.param == "watched":
        watch_each_step(monkeypatch)
    return request.param


@pytest.fixture(autouse=True)
def _no_warnings(recwarn, monkeypatch):
    """Warnings are no errors here, and amp does not warn of a loss that is inf: other tests do that."""
    monkeypatch.setattr("ampatch.scaling.step_outcomes.warn", lambda _: None)


class TestForward:
    @pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
    def test_overflowing_scores_of_attention_are_found_in_the_matmul(self, opt_level):
        trace = trace_of(overflowing(), opt_level=opt_level, loss_scale="dynamic")
        assert trace.direction == "forward"
        assert trace.function in ("torch.Tensor.matmul", "torch.Tensor.__matmul__")
        assert (trace.module, trace.module_class) == ("1", "Attention")
        assert trace.source == "scores = query @ key.transpose(-2, -1)"
        assert trace.file == __file__
        assert [each.dtype for each in trace.inputs] == ["float16", "float16"]
        assert all(1000 < each.largest < 65504 for each in trace.inputs)
        assert 65504 < trace.largest_in_float32 < math.inf

    def test_the_text_has_the_path_from_the_current_folder(self, monkeypatch):
        monkeypatch.chdir(Path(__file__).parent)
        trace = trace_of(overflowing())
        assert f"\n  line      test_overflow_trace.py:{trace.line}: scores = " in str(trace)

    def test_anomaly_mode_blames_the_loss(self):
        def loss_fn(output):
            return F.cross_entropy(output.float().mean(dim=1), torch.tensor([0, 1]))

        with (
            pytest.warns(UserWarning, match="Error detected in LogSoftmaxBackward0"),
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="'LogSoftmaxBackward0' returned nan values"),
        ):
            events_of(overflowing(), on_overflow="log", loss_fn=loss_fn)
        amp.deinitialize()
        assert trace_of(overflowing(), loss_fn=loss_fn).source == "scores = query @ key.transpose(-2, -1)"

    def test_the_suggested_blacklist_mends_the_overflow(self):
        trace = trace_of(overflowing())
        assert trace.cast_lists == {"modules": {"1": {"blacklist": {"*": ["matmul"]}}}}
        assert str(trace.cast_lists) in trace.remedies[0]
        assert not events_of(overflowing(), cast_lists=trace.cast_lists, init_scale=1.0)

    def test_the_suggested_module_in_fp32_mends_the_overflow(self):
        trace = trace_of(overflowing(), opt_level="O2")
        assert trace.remedies[0].endswith("keep_fp32=['1'])")
        assert not events_of(overflowing(), opt_level="O2", keep_fp32=["1"], init_scale=1.0)

    def test_the_cast_of_a_large_argument_is_found(self):
        trace = trace_of(Applied(lambda x: torch.exp(x * 0 + 12)))
        assert (trace.operator, trace.function) == ("cast", "torch.nn.functional.linear")
        assert trace.inputs[0].largest == pytest.approx(math.exp(12))
        assert "{'blacklist': {'*': ['linear']}}" in str(trace.cast_lists)
        assert "in the cast to float16 of an argument for torch.nn.functional.linear" in str(trace)

    def test_an_overflow_in_float32_too_has_no_remedy_in_precision(self):
        trace = trace_of(Applied(lambda x: torch.log(x * 0)))
        assert (trace.direction, trace.function) == ("forward", "torch.log")
        (told,) = trace.remedies
        assert told.startswith("none in precision: ")
        assert told.endswith("not finite in float32 either")
        assert trace.cast_lists is None

    def test_no_list_is_suggested_for_an_operator_called_directly(self):
        trace = trace_of(Applied(lambda x: torch.ops.aten.mul.Tensor(x.half(), torch.full((), 6e4).half())))
        assert trace.function == "torch.ops.aten.mul.Tensor"
        assert "mul" not in str(trace.cast_lists)
        assert "no list can name it" in trace.remedies[0]

    def test_a_remedy_that_could_not_be_tried_is_noted(self):
        def function(x):
            half = x.half()
            result = half * torch.full((), 6e4).half()
            half.detach().zero_()
            return result

        trace = trace_of(Applied(function))
        assert trace.largest_in_float32 is None
        assert "was not tried" in trace.notes[0]

    def test_layers_that_overflow_alike_are_mended_together(self):
        class Layers(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.last = nn.ModuleList([Attention(1000.0), Attention(1000.0)]), nn.Linear(8, 8)

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return self.last(x)

        overlay = trace_of(Layers()).cast_lists["modules"]
        assert set(overlay) <= {"layers.*", "layers.0"}  # untried, it is for the first alone

    def test_a_function_inside_of_torchs_own_python_is_named_as_lists_know_it(self):
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        model = Applied(lambda x: attention(x * 5000, x * 5000, x)[0])
        model.attention = attention
        trace = trace_of(model, init_scale=1.0)
        assert trace.module == "attention"
        name = trace.function.rpartition(".")[2]
        assert str({"blacklist": {"*": [name]}}) in str(trace.cast_lists)

    def test_an_overflow_in_a_loss_outside_of_the_model_is_found(self):
        trace = second_trace_of(nn.Linear(8, 8), loss_fn=lambda y: (y.half() * 60000).square().mean())
        assert trace.direction == "forward"
        assert trace.module is None
        assert "square" in trace.source


class TestMasks:
    def test_a_mask_is_not_blamed(self):
        mask = torch.tensor([False, True, True])
        assert "matmul" in trace_of(nn.Sequential(nn.Linear(8, 8), Attention(1000.0, mask))).function
        assert not events_of(Attention(1.0, mask), init_scale=1.0)

    def test_the_softmax_over_a_row_that_is_masked_completely_is_blamed(self):
        trace = trace_of(nn.Sequential(nn.Linear(8, 8), Attention(1.0, torch.ones(3, dtype=torch.bool))))
        assert trace.function == "torch.softmax"
        assert trace.source == "weights = torch.softmax(scores, dim=-1)"

    def test_inf_that_reaches_no_gradient_is_not_blamed(self):
        def function(x):
            torch.log(torch.zeros(3, requires_grad=True))
            return Amplified.apply(x, 1e9)

        assert trace_of(Applied(function)).function == "Amplified"


class TestBackward:
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_overflow_in_a_custom_backward_is_found_with_its_line(self, opt_level):
        trace = trace_of(Applied(lambda x: Amplified.apply(x, 1e5)), opt_level=opt_level)
        assert (trace.direction, trace.function) == ("backward", "Amplified")
        assert trace.source == "return grad * ctx.factor, None"
        assert "in the backward of Amplified" in str(trace)

    def test_overflow_in_a_functions_backward_has_the_line_of_its_forward(self):
        def function(x):
            return torch.sqrt(x.half().abs() * 0 + 1e-7)

        trace = trace_of(Applied(function))
        assert trace.direction == "backward"
        assert trace.source == "return torch.sqrt(x.half().abs() * 0 + 1e-7)"

    def test_the_suggested_loss_scale_is_the_greatest_power_of_two_that_fits(self):
        def model():
            return Applied(lambda x: Amplified.apply(x, 1e5))

        fits = trace_of(model()).max_loss_scale
        assert math.log2(fits).is_integer()
        assert trace_of(model(), init_scale=2 * fits).direction == "backward"
        assert all(event.trace.function != "Amplified" for event in events_of(model(), init_scale=fits))

    def test_no_scale_is_suggested_below_the_floor(self):
        trace = trace_of(Applied(lambda x: Amplified.apply(x, 1e30)))
        assert trace.max_loss_scale is None
        assert "no loss scale" in trace.remedies[0]

    def test_a_lower_static_scale_is_suggested(self):
        trace = trace_of(Applied(lambda x: Amplified.apply(x, 1e5)), loss_scale=1024.0, check_finite=True)
        assert f"loss_scale={trace.max_loss_scale:g}" in trace.remedies[0]

    def test_the_cast_of_a_gradient_is_named_by_its_function(self):
        trace = second_trace_of(nn.Linear(8, 8), loss_fn=lambda y: y.half().mean())
        assert trace.operator == "cast"
        assert trace.source == "trace = second_trace_of(nn.Linear(8, 8), loss_fn=lambda y: y.half().mean())"
        assert "the cast to float16 of a gradient for the backward of torch.Tensor.mean" in str(trace)


class TestInputs:
    def test_data_that_is_not_finite_is_an_input(self):
        x = batch()
        x[0, 0, 0] = math.nan
        trace = trace_of(nn.Linear(8, 8), x=x)
        assert trace.direction == "input"
        assert "data" in trace.remedies[0]

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_a_weight_that_is_not_finite_is_an_input(self, opt_level, monkeypatch):
        monkeypatch.setattr(nn.init, "normal_", lambda parameter, std: parameter.data.view(-1)[:1].fill_(math.nan))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        assert trace_of(model, opt_level=opt_level).direction == "input"

    def test_a_forward_pass_without_gradients_that_overflowed_is_an_input(self):
        teacher = Applied(lambda x: x * 1e5).eval()
        model = nn.Linear(8, 8)
        model.add_module("teacher", teacher)

        def distilled(output):
            with torch.no_grad():
                target = teacher(batch())
            return in_float32(output * target)

        trace = second_trace_of(model, loss_fn=distilled)
        assert trace.direction == "input"
        assert "the forward pass without gradients" in trace.remedies[0]


class TestLoops:
    @pytest.mark.parametrize("teacher_is_first", [True, False])
    @pytest.mark.parametrize("mode", ["eval", "train"])
    @pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
    def test_a_teacher_without_gradients_is_not_blamed(self, gradients, mode, teacher_is_first):
        teacher = getattr(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mode)()
        student = Applied(lambda x: torch.log(x * 0))
        optimizer = SGD(student.parameters())

        def taught():
            with gradients():
                return teacher(batch())

        with traced(student, optimizer) as events:
            for _ in range(2):
                target = taught() if teacher_is_first else None
                output = student(batch())
                target = taught() if target is None else target
                backward(in_float32((output - target) ** 2), optimizer)
                optimizer.step()
                optimizer.zero_grad()
        assert [(each.trace.direction, each.trace.function) for each in events] == [("forward", "torch.log")] * 2

    def test_the_forward_pass_is_told_if_gradients_accumulate(self, way):
        model = Applied(lambda x: Amplified.apply(x, 1e9 if x.dim() == 3 else 1.0))  # the second one is sound
        optimizer = SGD(model.parameters())
        with traced(model, optimizer) as events:
            for x in (batch(), batch()[0]):
                backward(in_float32(model(x)), optimizer, delay_unscale=x.dim() == 3)
            optimizer.step()
        assert [event.trace.function for event in events] == ["Amplified"]
        if way == "second run":
            assert events[0].trace.notes == ("in forward pass 1 of the 2 before this step",)

    def test_an_overflow_in_the_sum_of_finite_gradients_is_traced(self, way):
        model = nn.Linear(8, 8)
        optimizer = SGD(model.parameters())
        with traced(model, optimizer, opt_level="O3", loss_scale=1.0, check_finite=True) as events:
            for last in (False, True):
                backward(in_float32(model(batch()) * 6000), optimizer, delay_unscale=not last)
            optimizer.step()
        told = "the sum of several gradients of one tensor" if way == "watched" else ""  # a second run adds up none
        assert [event.trace.function for event in events] == [told]

    def test_each_optimizer_gets_the_cause_of_its_own_gradients(self, way):
        models = [nn.Linear(8, 8), Applied(lambda x: Amplified.apply(x, 1e9))]
        optimizers = [SGD(each.parameters()) for each in models]
        with traced(models, optimizers, num_losses=2) as events:
            losses = [in_float32(torch.log(models[0](batch()) * 0)), in_float32(models[1](batch()))]
            for number, optimizer in enumerate(optimizers):
                backward(losses[number], optimizer, loss_id=number)
            for optimizer in optimizers:
                optimizer.step()
        outside = "torch.log" if way == "watched" else ""  # outside of the model
        assert [event.trace.function for event in events] == [outside, "Amplified"]

    def test_a_backward_pass_after_another_optimizers_step_is_traced(self):
        models = [nn.Linear(8, 8), Applied(lambda x: torch.log(x * 0))]
        optimizers = [SGD(each.parameters()) for each in models]
        with traced(models, optimizers, num_losses=2) as events:
            losses = [in_float32(model(batch())) for model in models]
            for number, optimizer in enumerate(optimizers):
                backward(losses[number], optimizer, loss_id=number)
                optimizer.step()
        assert [(event.trace.direction, event.trace.function) for event in events] == [("forward", "torch.log")]

    def test_a_forward_pass_that_is_no_longer_watched_is_no_input(self, way):
        models = sound, faulty = [nn.Linear(8, 8), Applied(lambda x: torch.log(x * 0))]
        optimizers = [SGD(each.parameters()) for each in models]
        with traced(models, optimizers) as events:
            early = in_float32(faulty(batch()))
            for _ in range(2):
                backward(in_float32(sound(batch())), optimizers[0])
            backward(early, optimizers[1])
            optimizers[1].step()
        assert [event.trace.direction for event in events] == ["forward" if way == "second run" else "unknown"]

    @pytest.mark.parametrize("steps_first", [True, False], ids=["each step", "only the second step"])
    def test_the_cause_of_an_earlier_step_is_not_told_again(self, steps_first):
        model = Applied(lambda x: Amplified.apply(x, 1e9) if x.dim() == 3 else torch.log(x * 0))
        optimizer = SGD(model.parameters())
        with traced(model, optimizer) as events:
            for x in (batch(), batch()[0]):
                optimizer.zero_grad()
                backward(in_float32(model(x)), optimizer)
                if steps_first or x.dim() == 2:
                    optimizer.step()
        assert [event.trace.function for event in events] == ["Amplified", "torch.log"][not steps_first :]

    def test_an_overflow_in_a_model_that_gradients_pass_through_is_traced(self):
        models = generator, critic = [nn.Linear(8, 8), Applied(lambda x: Amplified.apply(x, 1e9))]
        optimizers = [SGD(each.parameters()) for each in models]
        with traced(models, optimizers) as events:
            backward(in_float32(critic(generator(batch()))), optimizers[0])
            optimizers[0].step()
        assert [event.trace.function for event in events] == ["Amplified"]

    @pytest.mark.parametrize("scales", [True, False], ids=["scale_loss", "no scale_loss"])
    def test_bfloat16_is_traced_with_check_finite(self, scales):
        model = Applied(lambda x: torch.log(x * 0))
        optimizer = SGD(model.parameters())
        with traced(model, optimizer, half_dtype="bfloat16", check_finite=True) as events:
            backward(in_float32(model(batch())), optimizer, with_amp=scales)
            optimizer.step()
        assert [event.trace.function for event in events] == ["torch.log"]

    def test_a_grad_scaler_beside_a_session_traces(self):
        events: list[Any] = []
        model = Applied(lambda x: torch.log(x * 0))
        optimizer = SGD(model.parameters())
        with traced(model, None, on_overflow="trace"):
            scaler = GradScaler("cpu", on_overflow=events.append)
            scaler.scale(model(batch()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert [event.trace.function for event in events] == ["torch.log"]

    def test_a_compiled_model_is_traced_uncompiled(self):
        model = torch.compile(overflowing(), backend="eager")
        assert "matmul" in second_trace_of(model).function
        assert torch._dynamo.eval_frame._stance.stance == "default"

    def test_a_forward_pass_in_another_thread_is_noted(self, way):
        def function(x):
            together([lambda: nn.Linear(8, 8)(batch())])
            return torch.log(x * 0)

        trace = trace_of(Applied(function))
        assert trace.function == "torch.log"
        if way == "watched":
            assert trace.notes == ("forward passes in other threads were not watched",)
            assert trace.notes[0] in str(trace)


class TestResult:
    def test_to_dict_is_plain_data(self):
        (event,) = events_of(overflowing())
        read = json.loads(json.dumps(event.to_dict(), allow_nan=False))["trace"]
        assert read["direction"] == "forward"
        assert read["outputs"][0]["largest"] == "inf"
        assert read["line"] == event.trace.line

    def test_the_trace_is_logged(self, caplog, way):
        with caplog.at_level(logging.WARNING, logger="ampatch"):
            events_of(overflowing(), on_overflow="trace")
        (record,) = caplog.records
        assert "Gradient overflow. Skipping step" in record.message
        assert "First inf: in torch.Tensor." in record.message
        mark = "(tried)" if way == "second run" else "(not tried)"
        assert f"  remedy    {mark} this function in float32" in record.message

    def test_the_trace_is_in_the_error(self):
        with pytest.raises(amp.GradientOverflowError, match=r"First inf: in torch\.Tensor") as caught:
            events_of(overflowing(), on_overflow=("trace", "raise"))
        amp.deinitialize()
        assert caught.value.overflow.trace.module == "1"

    @pytest.mark.parametrize(("value", "functions"), [("1", ["torch.log"]), ("0", [])])
    def test_the_environment_asks_for_traces(self, value, functions, monkeypatch):
        events: list[Any] = []
        monkeypatch.setenv("AMPATCH_TRACE_OVERFLOW", value)
        events_of(Applied(lambda x: torch.log(x * 0)), on_overflow=events.append)
        assert [event.trace.function for event in events if event.trace] == functions
        assert len(events) == 1


class TestMemory:
    def test_evaluation_with_gradients_keeps_a_few_forward_passes(self, way):
        model = nn.Linear(8, 8)
        counts = []
        with traced(model, SGD(model.parameters()), on_overflow="trace"):
            tracer: Any = runtime.live.losses.overflows.tracer
            for _ in range(20):
                model(batch())
                counts.append(len(tracer._noted if way == "second run" else tracer._watched.ops))
        assert max(counts[12:]) < 12 * counts[0]


class TestPartsOfTensors:
    def test_a_write_to_a_part_keeps_the_origin_of_the_rest(self):
        def function(x):
            scores = (x * 1000) @ (x * 1000).transpose(-2, -1)
            scores[..., -1] = 0
            return torch.softmax(scores, dim=-1) @ x

        assert "matmul" in trace_of(Applied(function)).function

    def test_a_slice_of_a_batch_that_is_not_finite_is_an_input(self):
        class Stepwise(nn.Sequential):
            def forward(self, x):
                return torch.stack([nn.Sequential.forward(self, x[:, step]) for step in range(3)])

        x = batch()
        x[:, 2] = math.nan
        assert trace_of(Stepwise(nn.LayerNorm(8), nn.Linear(8, 8)), x=x).direction == "input"

    def test_a_mask_that_comes_from_outside_is_not_blamed(self):
        mask = torch.zeros(3, 3).masked_fill_(torch.ones(3, 3, dtype=torch.bool).triu(1), -math.inf)

        def function(x):
            scores = (x * 1000) @ (x * 1000).transpose(-2, -1) + mask.to(torch.float16)
            return torch.softmax(scores, dim=-1) @ x

        assert "matmul" in trace_of(Applied(function)).function


class TestSideEffects:
    def test_a_default_device_may_be_set_again(self):
        torch.set_default_device("cpu")
        try:
            events_of(nn.Linear(8, 8), init_scale=1.0)
            torch.set_default_device("cpu")
        finally:
            torch.set_default_device(None)

    def test_an_operator_that_runs_again_in_float32_leaves_running_statistics(self):
        norm = nn.BatchNorm1d(8)
        nn.init.constant_(norm.weight, 1e6)
        watch = Watch(keep=has_half)
        with watch:
            norm(torch.randn(16, 8, dtype=torch.float16)).sum().backward()
        watch.read()
        before = norm.running_mean.clone()
        (op,) = (op for op in watch.ops if not op.is_backward and "norm" in op.op_name)
        assert causes.in_float32(op) > 65504
        assert_same_bits(norm.running_mean, before)

    def test_amp_is_off_after_a_warning_that_is_an_error(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(amp.AmpWarning, match="has no effect"):
                amp.initialize(nn.Linear(2, 2), half_dtype=torch.bfloat16, on_overflow="raise", verbosity=0)
        assert not amp.is_on()

    @pytest.mark.parametrize("on_overflow", ["trace", "raise", print])
    def test_a_static_scale_without_a_check_is_warned_of(self, on_overflow):
        with pytest.warns(amp.AmpWarning, match=r"has no effect with a static loss scale \(1\).*check_finite=True"):
            amp.initialize(nn.Linear(8, 8), half_dtype=torch.bfloat16, verbosity=0, on_overflow=on_overflow)
