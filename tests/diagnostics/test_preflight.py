"""`amp.preflight` and `ampatch preflight`: models with planted faults, and a model that must not change."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from command_line import ampatch
from helpers import Disturbable, undisturbed
from torch import Tensor, nn

from ampatch import amp
from ampatch.diagnostics.preflight import preflight
from ampatch.errors import OptionError, UsageError

HALF, BFLOAT16 = torch.float16, torch.bfloat16
O1_HALF = [("O1", HALF)]
#: What runs steps of copies with a loss.
DIAGNOSES = {
    "preflight": lambda model, x, loss: amp.preflight(model, x, loss, levels=["O1", "O2"]),
    "compare": lambda model, x, loss: amp.compare(model, x, loss, "O0", "O2"),
    "what_if": lambda model, x, loss: amp.what_if(model, x, loss, formats=["e4m3"]),
}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def mean_square(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def loss_times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda output: mean_square(output) * factor


def flight(model: nn.Module, inputs: Any, levels: Any = O1_HALF, loss_fn: Any = mean_square, **options: Any) -> Any:
    return amp.preflight(model, inputs, loss_fn, levels=levels, **{"measure": False, **options})


def gradients_are_finite(call: str, model: nn.Module, inputs: Tensor) -> bool:
    """Whether a step with this call of `amp.initialize` has finite gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eval(call, {"amp": amp, "model": model, "optimizer": optimizer})
    with amp.scale_loss(mean_square(model(inputs)), optimizer) as scaled:
        scaled.backward()
    finite = all(each.grad.isfinite().all() for each in amp.master_params(optimizer))
    amp.deinitialize()
    return finite


class Scores(nn.Module):
    """Attention scores beyond float16's range, and a softmax of a small part of them."""

    def forward(self, queries: Tensor) -> Tensor:
        scores = queries @ queries.transpose(-1, -2)
        return (scores * 1e-6).softmax(-1) @ queries


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.scores = Scores()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scores(self.project(x) * 300) / 300)


class Steep(torch.autograd.Function):
    """Its backward multiplies gradients, so that scaled ones leave float16's range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * 100) * 0.01


class SteepNet(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Steep.apply(super().forward(x)), self.weight)


class Offset(nn.Linear):
    """Takes the difference of two numbers that are close, and large if the bias is."""

    def forward(self, x: Tensor) -> Tensor:
        lifted = super().forward(x)
        return lifted - lifted.mean(-1, keepdim=True)


class RunningSum(nn.Linear):
    """Adds 32 numbers to a sum that grows large, and returns the little by which they differ from a hundred."""

    def forward(self, x: Tensor) -> Tensor:
        total, *columns = (super().forward(x) + 100).unbind(-1)
        for column in columns:
            total = total + column
        return total - 3200


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture(scope="module")
def custom_operator() -> Iterator[Any]:
    with torch.library._scoped_library("preflight_tests", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", doubled, "CompositeExplicitAutograd")
        library.impl("doubled", _Doubled.apply, "Autograd")
        yield torch.ops.preflight_tests.doubled


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.preflight_tests.doubled(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.fixture
def masked() -> Iterator[type[nn.Linear]]:
    """A module with a random mask that depends on the type, as on a GPU, which draws other numbers for other types."""

    def mask(x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape)
        return ((drawn if x.dtype is torch.float32 else drawn.flip(0)) < 0.5).to(x.dtype)

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            lifted = super().forward(x)
            return lifted * torch.ops.preflight_tests_random.mask(lifted.detach())

    with torch.library._scoped_library("preflight_tests_random", "DEF") as library:
        library.define("mask(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("mask", mask, "CompositeExplicitAutograd")
        yield Masked


@pytest.fixture(scope="module")
def result() -> Any:
    torch.manual_seed(0)
    return flight(Attention(), torch.randn(2, 3, 8), [("O1", HALF), ("O2", HALF), ("O1", BFLOAT16)])


class TestOverflowInForward:
    def test_the_trace_and_the_float32_step_name_the_same_line(self, result: Any) -> None:
        assert [each.verdict for each in result.levels] == ["overflows", "overflows", "passes"]
        assert result.passes("O4")
        assert not result.passes("O1", "float16")
        trace = result.verdict("O1", HALF).trace
        assert (trace.direction, trace.module, trace.file) == ("forward", "scores", __file__)
        # Functions that only pass large values on are not listed.
        (row,) = (row for row in result.out_of_range if row.location.direction == "forward")
        assert (row.location.module, row.location.line) == ("scores", trace.line)
        assert row.location.source == "scores = queries @ queries.transpose(-1, -2)"
        assert row.location.at_o1 == "half"
        assert row.largest > 65504

    @pytest.mark.parametrize(
        ("level", "small"), [("O1", 'cast_lists={"blacklist": {"*": ["matmul"]}}'), ("O2", 'keep_fp32=["scores"]')]
    )
    def test_the_change_is_small_and_mends_the_overflow(self, result: Any, level: str, small: str) -> None:
        torch.manual_seed(0)
        model, x = Attention(), torch.randn(2, 3, 8)
        change = result.verdict(level, HALF).change
        call = f'amp.initialize(model, optimizer, opt_level="{level}", half_dtype="float16"'
        assert change.startswith(f"{call}, ")
        assert small in change
        assert not gradients_are_finite(f"{call})", copy.deepcopy(model), x)
        assert gradients_are_finite(change, copy.deepcopy(model), x)

    def test_the_report_fits_the_terminal_and_has_calls_in_one_line(
        self, result: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        text = str(result)
        others = [line for line in text.splitlines() if not line.startswith("  amp.initialize(")]
        assert max(map(len, others)) <= 100
        assert all(each.call in text for each in result.levels)
        assert text.index("half type") < text.index("What to type") < text.index("Beyond float16's range")

    def test_to_dict_is_plain_data(self, result: Any) -> None:
        data = json.loads(json.dumps(result.to_dict()))
        assert data["levels"][0]["trace"]["module"] == "scores"
        assert data["levels"][0]["change"] == result.levels[0].change


class TestOverflowInBackward:
    def test_a_level_passes_at_a_lower_scale(self) -> None:
        result = flight(SteepNet(4, 4), torch.randn(8, 4), loss_fn=loss_times(100))
        (verdict,) = result.levels
        assert (verdict.verdict, verdict.change) == ("passes", None)
        assert verdict.loss_scale < 2**16
        assert (verdict.trace.direction, verdict.trace.file) == ("backward", __file__)
        first = result.unlisted[0]
        assert (first.kind, first.function, first.file) == ("autograd.Function", f"{__name__}.Steep", __file__)

    def test_buffers_are_restored_before_each_scale(self) -> None:
        class Counting(SteepNet):
            def __init__(self) -> None:
                super().__init__(4, 4)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x) * self.calls

        (verdict,) = flight(Counting(), torch.randn(8, 4), loss_fn=loss_times(100)).levels
        assert verdict.loss_scale < 2**15
        assert verdict.verdict == "passes"

    def test_a_static_scale_is_lowered(self) -> None:
        (verdict,) = flight(SteepNet(4, 4), torch.randn(8, 4), [("O3", HALF)], loss_times(3e4)).levels
        assert (verdict.verdict, verdict.loss_scale) == ("overflows", 1)
        lowered = float(verdict.change.rpartition("loss_scale=")[2].rstrip(")"))
        assert 2**-10 < lowered < 1

    def test_a_static_scale_becomes_dynamic_if_gradients_are_flushed(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(8, 4), [("O3", HALF)], loss_times(1e-6))
        (verdict,) = result.levels
        assert verdict.verdict == "inaccurate"
        assert verdict.underflow >= 0.01
        assert verdict.change.endswith('loss_scale="dynamic")')
        assert [row.parameter for row in result.underflows] == ["weight"]

    def test_underflow_is_told_with_and_without_the_loss_scale(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(8, 4), [("O2", HALF)], loss_times(1e-9))
        assert result.passes("O2", HALF)
        assert all(row.share == 1 and row.share_scaled == 0 and row.scale == 2**16 for row in result.underflows)


class Biases(nn.Module):
    """Has biases whose gradients are zero by mathematics: before a batch norm, and of the keys of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.keys, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.lift(x)).relu()).view(4, 4, 8)
        return self.head((x @ self.keys(x).transpose(-1, -2)).softmax(-1) @ x)


class TestRoundingNoise:
    def test_rounding_noise_is_told_from_small_gradients(self) -> None:
        result = flight(Biases(), torch.randn(16, 4), loss_fn=loss_times(1e-7))
        weights = {"lift.weight", "keys.weight", "norm.bias", "head.weight"}
        assert {row.parameter for row in result.underflows} >= weights
        assert {row.parameter for row in result.underflows if row.is_noise} == {"lift.bias", "keys.bias"}
        assert all(row.is_noise for row in result.underflows[-2:])
        assert all(row.noise < 0.05 for row in result.underflows[:-2])
        assert "of it rounding noise" in str(result)
        assert "Rounding noise: the gradient of a float64 step differs by at least its own size." in str(result)

    def test_small_gradients_alone_are_no_noise(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=loss_times(1e-8))
        assert {row.noise for row in result.underflows} == {0.0}

    def test_the_float64_step_has_the_same_targets_and_dropout_masks(self, masked: type[nn.Linear]) -> None:
        model, target = nn.Sequential(masked(4, 32), nn.Dropout(0.5), nn.Linear(32, 4)), torch.randn(8, 4)
        result = flight(model, torch.randn(8, 4), loss_fn=lambda output: F.mse_loss(output, target) * 1e-8)
        assert result.noise_unknown == ""
        assert {row.noise for row in result.underflows} == {0.0}

    @pytest.mark.parametrize(
        ("in_float64", "why"),
        [("raise TypeError('float32 only')", "TypeError: float32 only"), ("x = x.sin()", "so that it is another step")],
        ids=["raises", "differs"],
    )
    def test_noise_is_unknown_without_a_comparable_float64_step(self, in_float64: str, why: str) -> None:
        class Narrow(Biases):
            def forward(self, x: Tensor) -> Tensor:
                if x.dtype is torch.float64:
                    scope = {"x": x}
                    exec(in_float64, scope)
                    x = scope["x"]
                return super().forward(x)

        result = flight(Narrow(), torch.randn(16, 4))
        assert why in result.noise_unknown
        assert {row.noise for row in result.underflows} == {None}
        assert "Rounding noise was not told from small gradients by a float64 step: " in str(result)

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_noise_is_unknown_if_an_attention_kernel_draws_its_own_dropout(self, dropout: float) -> None:
        class Attending(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                lifted = super().forward(x)
                return lifted * torch.ops.preflight_tests_attention.attention(lifted.detach(), dropout)

        with torch.library._scoped_library("preflight_tests_attention", "DEF") as library:
            library.define("attention(Tensor x, float dropout_p=0.0) -> Tensor")
            library.impl("attention", lambda x, _=0.0: torch.ones_like(x), "CompositeExplicitAutograd")
            result = flight(Attending(4, 4), torch.randn(8, 4), loss_fn=loss_times(1e-8))
        assert ("drew its own dropout" in result.noise_unknown) is (dropout > 0)


class TestPrecision:
    def test_a_difference_of_large_numbers_is_inaccurate(self) -> None:
        model = Offset(4, 4)
        nn.init.constant_(model.bias, 300.0)
        result = flight(model, torch.randn(8, 4), [("O1", BFLOAT16)])
        (verdict,) = result.levels
        assert verdict.verdict == "inaccurate"
        assert verdict.gradient_error > result.gradient_bound
        row = next(row for row in result.imprecise if row.location.direction == "forward")
        assert (row.location.function, row.location.at_o1) == ("torch.Tensor.sub", "the type of its inputs")
        assert row.location.source == "return lifted - lifted.mean(-1, keepdim=True)"
        assert verdict.change.endswith('cast_lists={"blacklist": {"*": ["linear"]}})')

    def test_a_running_sum_is_inaccurate(self) -> None:
        result = flight(RunningSum(4, 32), torch.randn(8, 4), [("O1", BFLOAT16), ("O3", BFLOAT16)])
        assert "return total - 3200" in {row.location.source for row in result.imprecise}
        assert [each.verdict for each in result.levels] == ["inaccurate", "inaccurate"]
        assert result.verdict("O1").change.endswith('cast_lists={"blacklist": {"*": ["add"]}})')
        assert result.verdict("O3").change is None

    def test_an_operator_whose_input_is_written_to_is_not_compared(self) -> None:
        class Centred(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                hidden = super().forward(x) + 3.0
                hidden -= hidden.mean(-1, keepdim=True)  # of the centred numbers the mean is rounding
                return hidden

        result = flight(Centred(8, 8), torch.randn(8, 8), [("O1", BFLOAT16)])
        assert "mean" not in {row.location.operator for row in result.imprecise}
        assert result.uncompared == 1

    def test_a_higher_tolerance_lists_less(self) -> None:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
        assert flight(model, x).imprecise == ()
        assert len(flight(model, x, tolerance=1e-5).imprecise) > 2

    def test_dropout_draws_the_same_in_every_type(self) -> None:
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
        result = flight(model, torch.randn(8, 16), ["O1", "O2"])
        assert all(each.gradient_error < 0.05 for each in result.levels)
        assert result.uncompared > 0

    def test_random_operators_that_draw_differently_in_half_draw_as_in_float32(self, masked: type[nn.Linear]) -> None:
        result = flight(masked(16, 4), torch.randn(8, 16), ["O1", "O2"])
        assert all(each.gradient_error < 0.05 for each in result.levels)


class Counter(nn.Module):
    """Counts its steps; ``in_half`` computes the count in the type of the weights, as a half counter would."""

    def __init__(self, in_half: bool, is_weight: bool = False) -> None:
        super().__init__()
        self.layers = nn.Linear(4, 4)
        count = torch.tensor(3000.0)
        if is_weight:
            self.count = nn.Parameter(count, requires_grad=False)
        else:
            self.register_buffer("count", count)
        self.in_half = in_half

    def forward(self, x: Tensor) -> Tensor:
        if self.in_half:
            self.count.copy_(self.count.to(self.layers.weight.dtype) + 1)
        else:
            self.count += 1
        return self.layers(x)


class TestState:
    """What a step writes to buffers and frozen weights is judged beside the float32 step."""

    LEVELS = ("O1", "O2", "O3")

    @pytest.mark.parametrize(
        ("model", "lost_at"),
        [(Counter(False), ()), (Counter(True), ("O2", "O3")), (Counter(False, is_weight=True), ("O3",))],
        ids=["buffer", "buffer computed in half", "weight"],
    )
    def test_a_count_that_half_loses_is_inaccurate(self, model: nn.Module, lost_at: tuple[str, ...]) -> None:
        found = flight(model, torch.randn(8, 4), self.LEVELS)
        for level in self.LEVELS:
            for half in ("float16", "bfloat16"):
                verdict = found.verdict(level, half)
                assert verdict.verdict == ("inaccurate" if level in lost_at else "passes")
                assert verdict.state == ("" if level == "O2" and isinstance(model.count, nn.Parameter) else "count")
                assert (verdict.state_error > 0.5) == (level in lost_at)
        assert ("the change that the step makes to count is off by" in str(found)) == bool(lost_at)

    @pytest.mark.parametrize("replaces", [False, True])
    def test_a_step_that_runs_again_at_a_lower_scale_begins_with_the_same_buffers(self, replaces: bool) -> None:
        class Centre(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 8)
                self.register_buffer("centre", torch.zeros(8))

            def forward(self, x: Tensor) -> Tensor:
                output = super().forward(x)
                moved = self.centre * 0.9 + output.detach().float().mean(0) * 0.1
                if replaces:
                    self.centre = moved
                else:
                    self.centre.copy_(moved)
                return output

        (verdict,) = flight(Centre(), torch.randn(16, 8), loss_fn=loss_times(1e5)).levels
        assert verdict.loss_scale < 1024
        assert (verdict.verdict, verdict.state) == ("passes", "centre")

    def test_a_buffer_that_becomes_nan_in_half_is_inaccurate(self) -> None:
        class Spread(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 8)
                self.register_buffer("spread", torch.ones(8))

            def forward(self, x: Tensor) -> Tensor:
                output = super().forward(x)
                large = output.detach() * 1e6
                self.spread.copy_((large - large.mean(0)).abs().mean(0))
                return output

        (verdict,) = flight(Spread(), torch.randn(8, 8)).levels
        assert (verdict.verdict, verdict.state, verdict.state_error) == ("inaccurate", "spread", math.inf)

    def test_sparse_buffers_stand(self) -> None:
        class Graph(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 8)
                self.register_buffer("edges", torch.eye(8).to_sparse())

            def forward(self, x: Tensor) -> Tensor:
                return torch.sparse.mm(self.edges, super().forward(x).float())

        found = flight(Graph(), torch.randn(8, 8), self.LEVELS)
        assert {each.verdict for each in found.levels} == {"passes"}

    def test_running_statistics_of_norms_stand(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        found = flight(model, torch.randn(64, 4), self.LEVELS)
        assert {each.verdict for each in found.levels} == {"passes"}
        assert {each.state.startswith("1.running") for each in found.levels} == {True}

    def test_only_o3_says_what_one_step_does_not_show(self) -> None:
        told = "One step does not show it."
        model, x = nn.Linear(4, 4), torch.randn(8, 4)
        assert told in " ".join(str(flight(model, x, "O3")).split())
        assert told not in " ".join(str(flight(model, x, "O2")).split())


class Island(nn.Linear):
    """A product beyond float16 where the model's own code turns casts off, though its arguments are half."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            scores = torch.matmul(hidden * 300, hidden.t() * 300)  # the product of the island
            scores = scores.softmax(-1)
        return super().forward(torch.matmul(scores, hidden.float()))


def test_no_list_is_proposed_for_an_overflow_where_the_model_turns_casts_off() -> None:
    found = flight(Island(8, 8), torch.randn(16, 8), [("O1", HALF), ("O2", HALF)])
    in_lists, in_half = found.levels
    assert in_lists.verdict == in_half.verdict == "overflows"
    assert in_lists.change
    assert "matmul" not in in_lists.change  # where casts are off, no list reaches
    assert "By hand: matmul in float32, by .float() on its arguments" in " ".join(str(found).split())


class TestNotFiniteInFloat32:
    def test_an_input_that_is_nan_ends_the_preflight(self) -> None:
        x = torch.randn(8, 4)
        x[0, 0] = math.nan
        result = flight(nn.Linear(4, 4), x, ["O1", "O2", "O3"])
        assert (result.is_finite, result.levels) == (False, ())
        assert (result.trace.direction, result.trace.function) == ("input", "torch.nn.functional.linear")
        assert not result.passes("O1", HALF)
        assert "No precision helps" in " ".join(str(result).split())

    def test_an_operator_that_makes_nan_in_float32_is_traced(self) -> None:
        class Root(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return (super().forward(x) - 1e4).sqrt()

        result = flight(Root(4, 4), torch.randn(2, 4))
        assert (result.is_finite, result.trace.function) == (False, "torch.Tensor.sqrt")

    def test_an_infinite_loss_with_finite_gradients_is_traced(self) -> None:
        def loss(output: Tensor) -> Tensor:
            return mean_square(output) + (output.detach() * 0).sum().log().neg()

        result = flight(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=loss)
        assert (result.is_finite, result.loss) == (False, math.inf)
        assert result.trace.function == "torch.Tensor.log"


class TestUnlistedFunctions:
    def test_custom_operators_come_first(self, custom_operator: Any) -> None:
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.relu(custom_operator(super().forward(x)))

        rows = flight(Net(4, 4), torch.randn(2, 4)).unlisted
        assert (rows[0].kind, rows[0].function) == ("custom operator", "torch.ops.preflight_tests.doubled")
        assert (rows[0].file, rows[0].module) == (__file__, "")
        assert next(row.function for row in rows if row.kind == "torch function") == "torch.relu"

    def test_listed_functions_and_their_callers_are_not_unlisted(self) -> None:
        model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        found = {row.function for row in flight(model, torch.randn(2, 3, 8)).unlisted}
        assert "torch.nn.functional.multi_head_attention_forward" not in found
        assert "torch.nn.functional.linear" not in found

    def test_registered_functions_are_not_unlisted(self) -> None:
        amp.register_float_function(Steep, "apply")
        assert all(row.kind == "torch function" for row in flight(SteepNet(4, 4), torch.randn(2, 4)).unlisted)


class TestFailures:
    def test_a_banned_function_fails_and_its_change_names_it(self) -> None:
        def loss(output: Tensor) -> Tensor:
            return F.binary_cross_entropy(output.sigmoid(), torch.ones_like(output))

        (verdict,) = flight(nn.Linear(4, 1), torch.randn(2, 4), loss_fn=loss).levels
        assert verdict.verdict == "fails"
        assert verdict.error.startswith("BannedFunctionError: ")
        assert "binary_cross_entropy" in verdict.change

    def test_a_module_that_computes_with_float32_constants_is_kept_in_fp32(self) -> None:
        class Mixed(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.aten.mm(torch.ones(2, 4), self.weight) + super().forward(x)

        model = nn.Sequential(nn.Linear(4, 4), Mixed(4, 4), nn.Linear(4, 4))
        (verdict,) = flight(model, torch.randn(2, 4), [("O2", HALF)]).levels
        assert verdict.verdict == "fails"
        assert "RuntimeError" in verdict.error
        assert 'keep_fp32=["1"]' in verdict.change

    def test_another_level_is_proposed_if_no_change_helps(self) -> None:
        class Picky(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                if self.weight.dtype is not torch.float32:
                    raise ValueError("only float32 here")
                return super().forward(x)

        result = flight(Picky(4, 4), torch.randn(2, 4), [("O2", HALF), ("O1", BFLOAT16)])
        verdict = result.verdict("O2")
        assert (verdict.verdict, verdict.change) == ("fails", None)
        assert verdict.error == "ValueError: only float32 here"
        assert "No change was found that mends it" in str(result)
        assert "O1 bfloat16 passes instead." in str(result)
        by_other_name = flight(Picky(4, 4), torch.randn(2, 4), [("O2", HALF), ("O1", HALF), "O4"])
        assert "O4 bfloat16 passes instead." in str(by_other_name)


class TestSideEffects:
    @pytest.mark.parametrize("raises", [False, True])
    def test_model_inputs_random_numbers_and_torch_stay(self, raises: bool) -> None:
        model, x = Disturbable(), torch.randn(8, 4)
        model(x.clone()).sum().backward()

        def loss(output: Tensor) -> Tensor:
            if raises:
                raise KeyError("from the user")
            return mean_square(output)

        for level in ("O1", "O2"):
            with undisturbed(model, x):
                if raises:
                    with pytest.raises(KeyError) as caught:
                        flight(model, {"x": x, "bias": 1.0}, [level], loss)
                    assert caught.value.__notes__ == [
                        "ampatch: The model or loss_fn raised this in float32 (O0), before any opt level was tried."
                    ]
                else:
                    assert flight(model, {"x": x, "bias": 1.0}, [level], loss).is_finite

    @pytest.mark.parametrize("diagnose", DIAGNOSES)
    def test_weights_of_the_loss_keep_their_gradients(self, diagnose: str) -> None:
        model, weight, x = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), torch.randn(2, 4)
        weight.grad = torch.full((4,), 3.0)

        def loss(output: Tensor) -> Tensor:
            penalty = sum(each.norm() for each in model.parameters())
            return mean_square(output * weight) + penalty

        DIAGNOSES[diagnose](model, x, loss)
        assert (weight.grad == 3.0).all()
        assert all(each.grad is None for each in model.parameters())
        loss(model(x)).backward()
        assert (weight.grad != 3.0).all()
        assert all(each.grad is not None for each in model.parameters())

    def test_no_grad_and_autocast_of_the_caller_have_no_effect(self) -> None:
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        expected = flight(model, x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert flight(model, x).loss == expected.loss
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_warnings_of_amp_become_notes(self) -> None:
        class Scripted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.jit.script(nn.Linear(4, 4))

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        model = Scripted()
        (verdict,) = flight(model, torch.randn(2, 4), [("O1", BFLOAT16)]).levels
        assert all(each.grad is None for each in model.parameters())
        assert "TorchScript has compiled inner" in verdict.notes[0]


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a file is open in it")


class TestBadInput:
    @pytest.mark.parametrize(
        ("model", "inputs", "options", "told"),
        [
            ("net", 0, {}, "found str as a model"),
            (nn.Linear(4, 4), 3, {}, "inputs is 'int'; expected a tensor, a tuple"),
            (nn.Linear(4, 4).half(), None, {}, "the model's 'weight' is float16; expected float32"),
            (nn.Linear(4, 4, device="meta"), None, {}, "is on 'meta'; expected the CPU or a GPU"),
            (nn.LazyLinear(4), None, {}, "has no shape yet"),
            (nn.Linear(4, 4).requires_grad_(False), None, {}, "no parameter that requires a gradient"),
            (nn.DataParallel(nn.Linear(4, 4)), None, {}, "wrapped in DataParallel"),
            (Uncopyable(4, 4), None, {}, "cannot be copied by copy.deepcopy (TypeError: a file is open in it)"),
            (nn.Linear(4, 4), None, {"loss_fn": 3}, "loss_fn is 'int'; expected a function"),
            (nn.Linear(4, 4), None, {"loss_fn": lambda _: 3.0}, "loss_fn returned 'float'; expected a scalar tensor"),
            (nn.Linear(4, 4), None, {"loss_fn": lambda output: output}, "tensor of shape (2, 4)"),
            (nn.Linear(4, 4), None, {"loss_fn": lambda output: output.sum().detach()}, "depends on no parameter"),
            (nn.Linear(4, 4), None, {"levels": "O7"}, "opt_level is 'O7'"),
            (nn.Linear(4, 4), None, {"levels": ["O0"]}, "O0 is float32"),
            (nn.Linear(4, 4), None, {"levels": []}, "levels is empty"),
            (nn.Linear(4, 4), None, {"levels": [("O1", "float16", 3)]}, "expected a level ('O1'), or a pair"),
            (nn.Linear(4, 4), None, {"levels": [("O4", "float16")]}, "O4 is bfloat16"),
            (nn.Linear(4, 4), None, {"tolerance": -1}, "tolerance is -1"),
            (nn.Linear(4, 4), None, {"tolerance": "much"}, "tolerance is 'much'"),
            (nn.Linear(4, 4), None, {"measure": "perhaps"}, "measure"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_bad_input_is_told(self, model: Any, inputs: Any, options: dict[str, Any], told: str) -> None:
        with pytest.raises(OptionError) as caught:
            flight(model, torch.randn(2, 4) if inputs is None else inputs, **options)
        assert told in str(caught.value)

    def test_preflight_is_refused_while_amp_is_set_up(self) -> None:
        with amp.init(), pytest.raises(UsageError, match=r"amp\.deinitialize\(\)"):
            flight(nn.Linear(4, 4), torch.randn(2, 4))

    def test_passes_needs_a_level_that_was_tried_and_its_half_type(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(2, 4), ["O1"])
        with pytest.raises(OptionError, match="O2 float16 or O2 bfloat16 was not tried"):
            result.passes("O2")
        with pytest.raises(OptionError, match="type half_dtype='float16', or the other"):
            result.passes("O1")

    def test_stands_is_passes_and_deprecated(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(2, 4), ["O1"])
        with pytest.warns(FutureWarning, match=r"type result\.passes"):
            assert result.stands("O1", HALF)


USERS_MODULE = """
import torch
from torch import nn

def make():
    return nn.Linear(4, 4), torch.randn(2, 4), lambda output: output.float().pow(2).mean()

def beyond():
    return nn.Linear(4, 4), torch.full((2, 4), 1e30), lambda output: output.float().pow(2).mean()

def pair():
    return nn.Linear(4, 4), torch.randn(2, 4)

def number():
    return 3

def broken():
    raise ValueError("no data")

def ends():
    raise SystemExit(3)

def needs(data):
    return make()

class Net(nn.Linear):
    def forward(self, x, y=0):
        return super().forward(x).reshape(3, 7)

def bad_forward():
    return Net(4, 4), torch.randn(2, 4), torch.sum

def bad_inputs():
    return nn.Linear(4, 4), (torch.randn(2, 4), 3), torch.sum

def bad_loss():
    return nn.Linear(4, 4), {"input": torch.randn(2, 4)}, lambda output: nn.functional.mse_loss(output, None)

def of_files():
    return nn.Linear(4, 4), torch.randn(2, 4), lambda output: open("absent")

class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("saved")

def bad_backward():
    return nn.Linear(4, 4), torch.randn(2, 4), lambda output: Back.apply(output).sum()

def swapped():
    return torch.randn(2, 4), nn.Linear(4, 4), torch.sum

value = 3
"""


class TestCommand:
    @pytest.fixture(autouse=True)
    def _users_folder(self, package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package("preflight_package", module=USERS_MODULE)
        monkeypatch.chdir(tmp_path)
        sys.path.remove(str(tmp_path))  # the command itself searches the current folder

    def test_the_report_has_the_level_that_the_user_typed(self) -> None:
        status, out, _ = ampatch("preflight", "preflight_package.module:make", "--level", "O5", "--no-measure")
        assert status == 0
        assert out.startswith("Preflight of Linear: in float32 the loss is ")
        assert re.search(r"^ *O5 +bfloat16 +passes", out, re.MULTILINE)
        assert '  amp.initialize(model, optimizer, opt_level="O5")\n' in out
        assert "O2" not in out

    def test_json_has_each_level_once(self) -> None:
        options = ["--json", "--level", "O4", "--level", "O5", "--level", "O2", "--no-measure"]
        status, out, _ = ampatch("preflight", "preflight_package.module:make", *options)
        levels = [(each["opt_level"], each["half_dtype"], each["verdict"]) for each in json.loads(out)["levels"]]
        passing = [("O4", "bfloat16"), ("O5", "bfloat16"), ("O2", "float16")]
        assert (status, levels) == (0, [(*each, "passes") for each in passing])

    def test_the_status_is_1_if_no_level_passes(self) -> None:
        status, out, _ = ampatch("preflight", "preflight_package.module:beyond", "--level", "O4", "--no-measure")
        assert status == 1
        assert "No precision helps" in " ".join(out.split())

    @pytest.mark.parametrize(
        ("target", "told"),
        [
            ("preflight_package.module", "expected MODULE:FUNCTION, such as preflight_package.module:one_step."),
            ("preflight_package/module.py:make", "expected MODULE:FUNCTION, such as preflight_package.module:make."),
            ("preflight_package.module:", "expected MODULE:FUNCTION, such as preflight_package.module:one_step."),
            (":make", "expected MODULE:FUNCTION, such as train:make."),
            ("preflight_package.absent:make", "the module 'preflight_package.absent' cannot be imported"),
            ("preflight_package.modul:make", "Did you mean 'preflight_package.module'"),
            ("preflight_package.module:maker", "has no 'maker'; expected a function. Did you mean 'make'?"),
            ("preflight_package.module:value", "has 'value' of type int; expected a function"),
            ("preflight_package.module:pair", "returned 2 values; expected three"),
            ("preflight_package.module:number", "returned int; expected three"),
            ("preflight_package.module:swapped", "module:swapped: found Tensor as a model; expected a torch.nn.Module"),
            ("preflight_package.module:needs", "It is called without arguments, and is to return the model"),
        ],
    )
    def test_a_wrong_target_is_one_clear_line(self, target: str, told: str) -> None:
        status, _, err = ampatch("preflight", target)
        (error,) = err.splitlines()
        assert status == 1
        assert error.startswith("ampatch: error: ")
        assert told in error

    def test_a_wrong_level_is_told_before_the_model_is_built(self) -> None:
        status, _, err = ampatch("preflight", "preflight_package.module:broken", "--level", "O7")
        assert status == 1
        assert "opt_level is 'O7'" in err

    @pytest.mark.parametrize(
        ("function", "told", "line"),
        [
            ("broken", "broken raised ValueError: no data", 'raise ValueError("no data")'),
            ("ends", "ends raised SystemExit: 3", "raise SystemExit(3)"),
            ("bad_forward", "RuntimeError: shape '[3, 7]' is invalid", "return super().forward(x).reshape(3, 7)"),
            ("bad_inputs", "TypeError: Linear.forward() takes 2 positional arguments but 3 were given", None),
            ("bad_loss", "AttributeError: 'NoneType'", "mse_loss(output, None)"),
            ("of_files", "FileNotFoundError: [Errno 2]", 'lambda output: open("absent")'),
            ("bad_backward", "KeyError: 'saved'", 'raise KeyError("saved")'),
        ],
    )
    def test_what_the_users_code_raises_is_one_error_with_its_line(
        self, function: str, told: str, line: str | None
    ) -> None:
        status, _, err = ampatch("preflight", f"preflight_package.module:{function}")
        (error,) = err.splitlines()
        assert status == 1
        assert error.startswith(f"ampatch: error: preflight_package.module:{function}")
        assert told in error
        if line is not None:
            number = next(place for place, text in enumerate(USERS_MODULE.splitlines(), 1) if line in text)
            place = Path("preflight_package", "module.py")
            assert f", at {place}:{number}: {USERS_MODULE.splitlines()[number - 1].strip()}. " in error
        # The code that it says to type raises the same.
        (code,) = shlex.split(error.partition("type: python -c ")[2])
        sys.path.insert(0, "")
        with pytest.raises((Exception, SystemExit)) as caught:
            exec(code, {})
        assert f"{type(caught.value).__name__}: {caught.value}" in error

    FAST: ClassVar = ["preflight", "preflight_package.module:make", "--level", "O4", "--no-measure"]

    def test_a_fault_of_ampatch_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "underflows", Mock(side_effect=LookupError("of ours")))
        with pytest.raises(LookupError):
            ampatch(*self.FAST)

    def test_too_little_memory_is_one_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "underflows", Mock(side_effect=torch.OutOfMemoryError("tried to allocate")))
        status, _, err = ampatch(*self.FAST)
        assert status == 1
        assert "Give it a smaller batch." in err


@pytest.mark.slow
def test_time_and_memory_of_every_level() -> None:
    result = flight(nn.Linear(64, 64), torch.randn(4, 64), [("O2", BFLOAT16), ("O3", BFLOAT16)], measure=True)
    assert result.float32_milliseconds > 0
    assert all(each.milliseconds > 0 for each in result.levels)
    masters, half = result.levels
    weights = 64 * 64 * 4
    assert result.float32_peak_bytes > 2 * weights  # with gradients
    assert half.peak_bytes < masters.peak_bytes
    assert "MiB" in str(result)


@pytest.mark.slow
def test_all_levels_of_one_model() -> None:
    result = amp.preflight(Disturbable(), {"x": torch.randn(8, 4)}, mean_square)
    assert [each.name for each in result.levels] == [
        f"{level} {half}" for level in ("O1", "O2", "O3") for half in ("float16", "bfloat16")
    ]
    assert all(result.passes(each.opt_level, each.half_dtype) for each in result.levels)
