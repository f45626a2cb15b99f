"""``on_overflow="trace"``: which function it names for faults planted in every kind of place, and its remedies."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, dtype_name
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampatch import GradScaler, amp
from ampatch.diagnostics.overflow.tracer import OverflowTracer
from ampatch.runtime import runtime

FLOAT16 = torch.float16


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


class Amplified(torch.autograd.Function):
    """Multiplies gradients by a number."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Applied(nn.Module):
    """A function as a module between two linear layers."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def batch() -> torch.Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def in_float32(output: torch.Tensor) -> torch.Tensor:
    return output.float().sum()  # the gradient of a half loss would be the scale itself


def events_of(model: nn.Module, *, loss_fn=in_float32, steps: int = 1, x=None, **options: Any) -> list[Any]:
    """Trains for some steps, and returns the overflows."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    events: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {
        "half_dtype": FLOAT16,
        "verbosity": 0,
        "init_scale": 1024.0,
        "on_overflow": ("trace", events.append),
        **options,
    }
    model, optimizer = amp.initialize(model, optimizer, **given)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(batch() if x is None else x))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    amp.deinitialize()
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
        install = OverflowTracer.install

        def watching(tracer, ledger):
            install(tracer, ledger)
            tracer.watch(set(), 10**9)

        monkeypatch.setattr(OverflowTracer, "install", watching)
    return request.param


@pytest.fixture(autouse=True)
def _no_warnings_of_losses(recwarn):
    """A loss that is inf is warned of; that is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampatch.scaling.optimizer_step.warn", lambda _: None)
        yield


class TestForward:
    @pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
    def test_scores_of_attention_are_found_in_the_matmul(self, opt_level):
        model = nn.Sequential(nn.Linear(8, 8), Attention(1000.0))
        trace = trace_of(model, opt_level=opt_level, loss_scale="dynamic")
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
        trace = trace_of(nn.Sequential(nn.Linear(8, 8), Attention(1000.0)))
        assert f"\n  line      test_overflow_trace.py:{trace.line}: scores = " in str(trace)

    def test_anomaly_mode_blames_the_loss(self):
        def loss_fn(output):
            return F.cross_entropy(output.float().mean(dim=1), torch.tensor([0, 1]))

        model = nn.Sequential(nn.Linear(8, 8), Attention(1000.0))
        with (
            pytest.warns(UserWarning, match="Error detected in LogSoftmaxBackward0"),
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="'LogSoftmaxBackward0' returned nan values"),
        ):
            events_of(model, on_overflow="log", loss_fn=loss_fn)
        amp.deinitialize()
        assert trace_of(model, loss_fn=loss_fn).source == "scores = query @ key.transpose(-2, -1)"

    def test_the_blacklist_that_it_suggests_mends_it(self):
        model = nn.Sequential(nn.Linear(8, 8), Attention(1000.0))
        trace = trace_of(model)
        assert trace.cast_lists == {"modules": {"1": {"blacklist": {"*": ["matmul"]}}}}
        assert str(trace.cast_lists) in trace.remedies[0]
        assert not events_of(model, cast_lists=trace.cast_lists, init_scale=1.0)

    def test_the_module_that_it_suggests_mends_it(self):
        model = nn.Sequential(nn.Linear(8, 8), Attention(1000.0))
        trace = trace_of(model, opt_level="O2")
        assert trace.remedies[0].endswith("keep_fp32=['1'])")
        assert not events_of(model, opt_level="O2", keep_fp32=["1"], init_scale=1.0)

    def test_the_cast_of_a_large_argument_is_found(self):
        trace = trace_of(Applied(lambda x: torch.exp(x * 0 + 12)))
        assert (trace.operator, trace.function) == ("cast", "torch.nn.functional.linear")
        assert trace.inputs[0].largest == pytest.approx(math.exp(12))
        assert "{'blacklist': {'*': ['linear']}}" in str(trace.cast_lists)
        assert "in the cast to float16 of an argument for torch.nn.functional.linear" in str(trace)

    def test_what_float32_cannot_hold_either_has_no_remedy(self):
        trace = trace_of(Applied(lambda x: torch.log(x * 0)))
        assert (trace.direction, trace.function) == ("forward", "torch.log")
        (told,) = trace.remedies
        assert told.startswith("none in precision: ")
        assert told.endswith("not finite in float32 either")
        assert trace.cast_lists is None

    def test_no_list_is_suggested_for_an_operator_that_is_called_by_itself(self):
        trace = trace_of(Applied(lambda x: torch.ops.aten.mul.Tensor(x.half(), torch.full((), 6e4).half())))
        assert trace.function == "torch.ops.aten.mul.Tensor"
        assert "mul" not in str(trace.cast_lists)
        assert "no list can name it" in trace.remedies[0]

    def test_a_remedy_that_could_not_be_tried_is_a_guess(self):
        def function(x):
            half = x.half()
            result = half * torch.full((), 6e4).half()
            half.detach().zero_()
            return result

        trace = trace_of(Applied(function))
        assert trace.largest_in_float32 is None
        assert "was not tried" in trace.notes[0]

    def test_a_function_inside_of_torchs_own_python_is_named_as_lists_know_it(self):
        attention = nn.MultiheadAttention(8, 2, batch_first=True)

        class Attending(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = attention

            def forward(self, x):
                return self.attention(x * 5000, x * 5000, x)[0]

        trace = trace_of(Attending(), init_scale=1.0)
        assert trace.module == "attention"
        name = trace.function.rpartition(".")[2]
        assert trace.cast_lists == {"modules": {"attention": {"blacklist": {"*": [name]}}}}

    def test_of_a_loss_outside_of_the_model(self):
        trace = second_trace_of(nn.Linear(8, 8), loss_fn=lambda y: (y.half() * 60000).square().mean())
        assert trace.direction == "forward"
        assert trace.module is None
        assert "square" in trace.source


class TestIntendedInf:
    def test_a_mask_is_not_blamed(self):
        mask = torch.tensor([False, True, True])
        trace = trace_of(nn.Sequential(nn.Linear(8, 8), Attention(1000.0, mask)))
        assert "matmul" in trace.function

    def test_a_mask_alone_is_no_overflow(self):
        mask = torch.tensor([False, True, True])
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
    def test_of_a_custom_function_is_found_with_its_line(self, opt_level):
        trace = trace_of(Applied(lambda x: Amplified.apply(x, 1e5)), opt_level=opt_level)
        assert (trace.direction, trace.function) == ("backward", "Amplified")
        assert trace.source == "return grad * ctx.factor, None"
        assert "in the backward of Amplified" in str(trace)

    def test_of_a_listed_function_is_found_with_the_line_of_its_forward(self):
        def function(x):
            return torch.sqrt(x.half().abs() * 0 + 1e-7)

        trace = trace_of(Applied(function))
        assert trace.direction == "backward"
        assert trace.source == "return torch.sqrt(x.half().abs() * 0 + 1e-7)"

    def test_the_loss_scale_that_it_suggests_is_the_greatest_power_of_two_that_fits(self):
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

    def test_a_static_scale_is_told_what_to_type(self):
        trace = trace_of(Applied(lambda x: Amplified.apply(x, 1e5)), loss_scale=1024.0, check_finite=True)
        assert f"loss_scale={trace.max_loss_scale:g}" in trace.remedies[0]

    def test_of_a_gradient_that_is_cast_is_named_by_the_function_behind_it(self):
        trace = second_trace_of(nn.Linear(8, 8), loss_fn=lambda y: y.half().mean())
        assert trace.operator == "cast"
        assert trace.source == "trace = second_trace_of(nn.Linear(8, 8), loss_fn=lambda y: y.half().mean())"
        assert "the cast to float16 of a gradient for the backward of torch.Tensor.mean" in str(trace)


class TestInputs:
    def test_data_that_is_not_finite_is_told_of(self):
        x = batch()
        x[0, 0, 0] = math.nan
        trace = trace_of(nn.Linear(8, 8), x=x)
        assert trace.direction == "input"
        assert "data" in trace.remedies[0]

    def test_so_is_a_weight(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.init, "normal_", lambda parameter, std: parameter.data.fill_(math.inf))
            assert trace_of(model).direction == "input"

    def test_a_forward_pass_without_gradients_that_overflowed(self):
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


class TestOtherLoops:
    @pytest.mark.parametrize("teacher_is_first", [True, False])
    @pytest.mark.parametrize("mode", ["eval", "train"])
    @pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
    def test_a_teacher_beside_the_model(self, gradients, mode, teacher_is_first):
        events: list[Any] = []
        teacher = getattr(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mode)()
        student = Applied(lambda x: torch.log(x * 0))
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        student, optimizer = amp.initialize(
            student, optimizer, half_dtype=FLOAT16, verbosity=0, init_scale=1.0, on_overflow=("trace", events.append)
        )

        def taught():
            with gradients():
                return teacher(batch())

        for _ in range(2):
            if teacher_is_first:
                target = taught()
                output = student(batch())
            else:
                output = student(batch())
                target = taught()
            with amp.scale_loss(in_float32((output - target) ** 2), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        amp.deinitialize()
        traces = [event.trace for event in events]
        assert [(trace.direction, trace.function) for trace in traces] == [("forward", "torch.log")] * 2

    def test_gradients_that_accumulate(self, way):
        events: list[Any] = []
        model = Applied(lambda x: Amplified.apply(x, 1e9 if x.dim() == 3 else 1.0))  # the second one is sound
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, half_dtype=FLOAT16, verbosity=0, init_scale=1.0, on_overflow=("trace", events.append)
        )
        for is_last in (False, True):
            x = batch()[0] if is_last else batch()
            with amp.scale_loss(in_float32(model(x)), optimizer, delay_unscale=not is_last) as scaled:
                scaled.backward()
        optimizer.step()
        amp.deinitialize()
        assert [event.trace.function for event in events] == ["Amplified"]
        if way == "second run":
            assert events[0].trace.notes == ("in forward pass 1 of the 2 before this step",)

    def test_each_optimizer_gets_the_cause_of_its_own_gradients(self, way):
        events: list[Any] = []
        sound, faulty = nn.Linear(8, 8), Applied(lambda x: Amplified.apply(x, 1e9))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sound, faulty)]
        models, optimizers = amp.initialize(
            [sound, faulty],
            optimizers,
            half_dtype=FLOAT16,
            num_losses=2,
            init_scale=1.0,
            on_overflow=("trace", events.append),
        )
        losses = [in_float32(torch.log(models[0](batch()) * 0)), in_float32(models[1](batch()))]
        for number, optimizer in enumerate(optimizers):
            with amp.scale_loss(losses[number], optimizer, loss_id=number) as scaled:
                scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
        amp.deinitialize()
        outside = "torch.log" if way == "watched" else ""  # outside of the model
        assert [event.trace.function for event in events] == [outside, "Amplified"]

    def test_a_backward_pass_after_the_step_of_another(self):
        events: list[Any] = []
        models = [nn.Linear(8, 8), Applied(lambda x: torch.log(x * 0))]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        options: dict[str, Any] = {"half_dtype": FLOAT16, "verbosity": 0, "init_scale": 1.0, "num_losses": 2}
        amp.initialize(models, optimizers, on_overflow=("trace", events.append), **options)
        losses = [in_float32(model(batch())) for model in models]
        for number, (loss, optimizer) in enumerate(zip(losses, optimizers, strict=True)):
            with amp.scale_loss(loss, optimizer, loss_id=number) as scaled:
                scaled.backward()
            optimizer.step()
        amp.deinitialize()
        assert [(event.trace.direction, event.trace.function) for event in events] == [("forward", "torch.log")]

    def test_a_forward_pass_that_is_no_longer_watched_is_no_input(self, way):
        events: list[Any] = []
        sound, faulty = nn.Linear(8, 8), Applied(lambda x: torch.log(x * 0))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sound, faulty)]
        options: dict[str, Any] = {"half_dtype": FLOAT16, "verbosity": 0, "init_scale": 1.0}
        amp.initialize([sound, faulty], optimizers, on_overflow=("trace", events.append), **options)
        early = in_float32(faulty(batch()))
        for _ in range(2):
            with amp.scale_loss(in_float32(sound(batch())), optimizers[0]) as scaled:
                scaled.backward()
        with amp.scale_loss(early, optimizers[1]) as scaled:
            scaled.backward()
        optimizers[1].step()
        amp.deinitialize()
        assert [event.trace.direction for event in events] == ["forward" if way == "second run" else "unknown"]

    def test_an_older_cause_is_not_reported_for_a_later_step(self):
        events: list[Any] = []
        model = Applied(lambda x: Amplified.apply(x, 1e9) if x.dim() == 3 else torch.log(x * 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(
            model, optimizer, half_dtype=FLOAT16, verbosity=0, init_scale=1.0, on_overflow=("trace", events.append)
        )
        for x in (batch(), batch()[0]):
            with amp.scale_loss(in_float32(model(x)), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        amp.deinitialize()
        assert [event.trace.function for event in events] == ["Amplified", "torch.log"]

    def test_a_step_left_out_by_the_user_is_not_blamed_for_a_later_one(self):
        events: list[Any] = []
        model = Applied(lambda x: Amplified.apply(x, 1e9) if x.dim() == 3 else torch.log(x * 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(
            model, optimizer, half_dtype=FLOAT16, verbosity=0, init_scale=1.0, on_overflow=("trace", events.append)
        )
        for x in (batch(), batch()[0]):
            optimizer.zero_grad()
            with amp.scale_loss(in_float32(model(x)), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        amp.deinitialize()
        assert [event.trace.function for event in events] == ["torch.log"]

    def test_an_overflow_in_a_model_through_which_gradients_came(self):
        events: list[Any] = []
        generator, critic = nn.Linear(8, 8), Applied(lambda x: Amplified.apply(x, 1e9))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
        options: dict[str, Any] = {"half_dtype": FLOAT16, "verbosity": 0, "init_scale": 1.0}
        amp.initialize([generator, critic], optimizers, on_overflow=("trace", events.append), **options)
        with amp.scale_loss(in_float32(critic(generator(batch()))), optimizers[0]) as scaled:
            scaled.backward()
        optimizers[0].step()
        amp.deinitialize()
        assert [event.trace.function for event in events] == ["Amplified"]

    def test_a_checkpointed_region(self):
        class Recomputed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = Attention(1000.0)

            def forward(self, x):
                return checkpoint(self.attention, x, use_reentrant=False)

        trace = trace_of(Recomputed())
        assert "matmul" in trace.function
        assert trace.module == "attention"

    def test_bfloat16_with_check_finite(self):
        trace = trace_of(Applied(lambda x: torch.log(x * 0)), half_dtype=torch.bfloat16, check_finite=True)
        assert trace.function == "torch.log"

    def test_a_step_without_a_block(self):
        events: list[Any] = []
        model = Applied(lambda x: torch.log(x * 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model,
            optimizer,
            half_dtype=torch.bfloat16,
            verbosity=0,
            check_finite=True,
            on_overflow=("trace", events.append),
        )
        in_float32(model(batch())).backward()
        optimizer.step()
        amp.deinitialize()
        assert [event.trace.function for event in events] == ["torch.log"]

    def test_a_grad_scaler_beside_a_session(self):
        events: list[Any] = []
        model = Applied(lambda x: torch.log(x * 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = amp.initialize(model, half_dtype=FLOAT16, verbosity=0, on_overflow="trace")
        scaler = GradScaler("cpu", on_overflow=events.append)
        scaler.scale(model(batch()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        amp.deinitialize()
        assert [event.trace.function for event in events] == ["torch.log"]

    def test_a_compiled_model_is_traced_uncompiled(self):
        model = torch.compile(nn.Sequential(nn.Linear(8, 8), Attention(1000.0)), backend="eager")
        assert "matmul" in second_trace_of(model).function
        assert torch._dynamo.eval_frame._stance.stance == "default"

    def test_a_forward_in_another_thread_is_told_of(self, way):
        def function(x):
            thread = threading.Thread(target=lambda: nn.Linear(8, 8)(batch()))
            thread.start()
            thread.join()
            return torch.log(x * 0)

        trace = trace_of(Applied(function))
        assert trace.function == "torch.log"
        if way == "watched":
            assert trace.notes == ("forward passes in other threads were not watched",)
            assert trace.notes[0] in str(trace)


class TestResult:
    def test_is_plain_data(self):
        (event,) = events_of(nn.Sequential(nn.Linear(8, 8), Attention(1000.0)))
        read = json.loads(json.dumps(event.to_dict(), allow_nan=False))["trace"]
        assert read["direction"] == "forward"
        assert read["outputs"][0]["largest"] == "inf"
        assert read["line"] == event.trace.line

    def test_is_logged(self, caplog, way):
        with caplog.at_level(logging.WARNING, logger="ampatch"):
            events_of(nn.Sequential(nn.Linear(8, 8), Attention(1000.0)), on_overflow="trace")
        (record,) = caplog.records
        assert "Gradient overflow. Skipping step" in record.message
        assert "First inf: in torch.Tensor." in record.message
        mark = "(tried)" if way == "second run" else "(not tried)"
        assert f"  remedy    {mark} this function in float32" in record.message

    def test_is_in_the_error(self):
        with pytest.raises(amp.GradientOverflowError, match=r"First inf: in torch\.Tensor") as caught:
            events_of(nn.Sequential(nn.Linear(8, 8), Attention(1000.0)), on_overflow=("trace", "raise"))
        amp.deinitialize()
        assert caught.value.overflow.trace.module == "1"

    def test_the_environment_adds_it(self, monkeypatch):
        events: list[Any] = []
        monkeypatch.setenv("AMPATCH_TRACE_OVERFLOW", "1")
        events_of(Applied(lambda x: torch.log(x * 0)), on_overflow=events.append)
        assert [event.trace.function for event in events] == ["torch.log"]
        monkeypatch.setenv("AMPATCH_TRACE_OVERFLOW", "0")
        events_of(Applied(lambda x: torch.log(x * 0)), on_overflow=events.append)
        assert events[1].trace is None

    @pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_training_is_the_same(self, opt_level, half_dtype):
        trained = []
        for on_overflow in ("log", "trace"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), Attention(), nn.LayerNorm(8))
            events_of(
                model,
                steps=3,
                opt_level=opt_level,
                half_dtype=half_dtype,
                on_overflow=on_overflow,
                loss_fn=lambda y: F.mse_loss(y, batch()),
            )
            trained.append([parameter.detach() for parameter in model.parameters()])
        assert all(map(torch.equal, *trained))


class TestMemory:
    def test_evaluation_with_gradients_keeps_a_few_forward_passes(self, way):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, half_dtype=FLOAT16, verbosity=0, on_overflow="trace")
        tracer: Any = runtime.live.losses.overflows.tracer  # type: ignore[union-attr]
        counts = []
        for _ in range(20):
            model(batch())
            counts.append(len(tracer._noted if way == "second run" else tracer._watched._watch.ops))
        amp.deinitialize()
        assert counts[-1] == counts[12] < 12 * counts[0]

    def test_a_forked_process_records_nothing(self):
        model = nn.Linear(8, 8)
        model = amp.initialize(model, half_dtype=FLOAT16, verbosity=0, on_overflow="trace")
        tracer: Any = runtime.live.losses.overflows.tracer  # type: ignore[union-attr]
        tracer.watch(set(), 1)
        watch = tracer._watched._watch
        model(batch())
        before = len(watch.ops)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def work() -> None:
            torch.ones(3, requires_grad=True) * 2
            queue.put(len(watch.ops))

        process = context.Process(target=work)
        process.start()
        process.join()
        amp.deinitialize()
        assert queue.get() == before > 0


class TestPartsOfTensors:
    def test_a_write_to_a_part_keeps_the_origin_of_the_rest(self):
        class Edited(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                scores = (self.query(x) * 1000) @ (self.key(x) * 1000).transpose(-2, -1)
                scores[..., -1] = 0
                return torch.softmax(scores, dim=-1) @ x

        assert "matmul" in trace_of(Edited()).function

    def test_a_step_of_a_batch_that_is_not_finite_is_an_input(self):
        class Stepwise(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

            def forward(self, x):
                return torch.stack([self.last(self.norm(x[:, step])) for step in range(3)])

        x = batch()
        x[:, 2] = math.nan
        events = events_of(Stepwise(), x=x.clone())
        assert [event.trace.direction for event in events] == ["input"]

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_a_weight_that_a_layer_reads_transposed_is_an_input(self, opt_level):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.init, "normal_", lambda parameter, std: parameter.data.view(-1)[:1].fill_(math.nan))
            assert trace_of(model, opt_level=opt_level).direction == "input"

    def test_a_mask_that_comes_from_outside_is_not_blamed(self):
        mask = torch.zeros(3, 3).masked_fill_(torch.ones(3, 3, dtype=torch.bool).triu(1), -math.inf)

        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                bias = mask.to(torch.float16)
                scores = (self.query(x) * 1000) @ (self.key(x) * 1000).transpose(-2, -1) + bias
                return torch.softmax(scores, dim=-1) @ x

        assert "matmul" in trace_of(Masked()).function


class TestTheProcessAfterwards:
    def test_a_default_device_may_be_set_again(self):
        torch.set_default_device("cpu")
        try:
            events_of(nn.Linear(8, 8), init_scale=1.0)
            torch.set_default_device("cpu")
        finally:
            torch.set_default_device(None)

    def test_evaluation_runs_the_kernels_that_it_runs_without_a_trace(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        padding = torch.tensor([[False, False, True], [False, True, True]])
        results = []
        for on_overflow in ("raise", "trace"):
            torch.manual_seed(0)
            model = nn.TransformerEncoder(layer, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0, on_overflow=on_overflow)
            model(batch()).sum().backward()
            with torch.no_grad():
                results.append(model.eval()(batch(), src_key_padding_mask=padding))
            model.train()
            amp.deinitialize()
        assert torch.equal(*results)

    def test_where_warnings_are_errors_amp_is_off_after_this_one(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(amp.AmpWarning, match="has no effect"):
                amp.initialize(nn.Linear(2, 2), half_dtype=torch.bfloat16, on_overflow="raise", verbosity=0)
        assert not amp.is_on()

    @pytest.mark.parametrize("on_overflow", ["trace", "raise", print])
    def test_a_static_scale_without_a_check_is_warned_of(self, on_overflow):
        with pytest.warns(amp.AmpWarning, match=r"has no effect with a static loss scale \(1\).*check_finite=True"):
            amp.initialize(nn.Linear(8, 8), half_dtype=torch.bfloat16, verbosity=0, on_overflow=on_overflow)
