"""`amp.preflight` and `ampatch preflight`: models with planted faults, and a model that must not change."""

from __future__ import annotations

import copy
import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Disturbable, undisturbed
from torch import Tensor, nn

from ampatch import amp
from ampatch.cli import main as cli
from ampatch.diagnostics.preflight import preflight
from ampatch.errors import OptionError, UsageError

HALF, BFLOAT16 = torch.float16, torch.bfloat16
O1_HALF = [("O1", HALF)]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def mean_square(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def flight(model: nn.Module, inputs: Any, levels: Any = O1_HALF, loss_fn: Any = mean_square, **options: Any) -> Any:
    return amp.preflight(model, inputs, loss_fn, levels=levels, **{"measure": False, **options})


def gradients_with(call: str, model: nn.Module, inputs: Tensor, loss_fn: Any = mean_square) -> list[Tensor]:
    """The gradients of a step with the call that a report tells to type."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eval(call, {"amp": amp, "model": model, "optimizer": optimizer})
    with amp.scale_loss(loss_fn(model(inputs)), optimizer) as scaled:
        scaled.backward()
    found = [each.grad.float().clone() for each in amp.master_params(optimizer) if each.grad is not None]
    amp.deinitialize()
    return found


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


class SteepNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Steep.apply(self.first(x)))


class Offset(nn.Module):
    """Takes the difference of two numbers that are large and close."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)
        with torch.no_grad():
            self.lift.bias.fill_(300.0)

    def forward(self, x: Tensor) -> Tensor:
        lifted = self.lift(x)
        return lifted - lifted.mean(-1, keepdim=True)


class RunningSum(nn.Module):
    """Adds numbers to a sum that grows large, and returns the little by which they differ from a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        total, *columns = (self.lift(x) + 100).unbind(-1)
        for column in columns:
            total = total + column
        return total - 3200


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture(scope="module")
def operator() -> Iterator[Any]:
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
    """A module whose random mask depends on the type, as on a GPU, which draws other numbers for other types."""

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
    def test_only_float16_overflows(self, result: Any) -> None:
        assert [each.verdict for each in result.levels] == ["overflows", "overflows", "stands"]
        assert result.stands("O4")
        assert not result.stands("O1", "float16")

    def test_the_trace_and_the_float32_step_name_the_same_line(self, result: Any) -> None:
        trace, row = result.verdict("O1", HALF).trace, result.out_of_range[0]
        assert (trace.direction, trace.module, trace.file) == ("forward", "scores", __file__)
        assert (row.location.module, row.location.line) == ("scores", trace.line)
        assert row.location.source == "scores = queries @ queries.transpose(-1, -2)"
        assert row.location.at_o1 == "half"
        assert row.largest > 65504

    def test_what_only_passes_large_values_on_is_not_listed(self, result: Any) -> None:
        assert len([row for row in result.out_of_range if row.location.direction == "forward"]) == 1

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_the_change_that_it_tells_to_type_mends_it(self, result: Any, level: str) -> None:
        torch.manual_seed(0)
        model, x = Attention(), torch.randn(2, 3, 8)
        verdict = result.verdict(level, HALF)
        assert verdict.change.startswith(
            f'amp.initialize(model, optimizer, opt_level="{level}", half_dtype="float16", '
        )
        broken = call_without_change(verdict)
        assert not all(each.isfinite().all() for each in gradients_with(broken, copy.deepcopy(model), x))
        assert all(each.isfinite().all() for each in gradients_with(verdict.change, copy.deepcopy(model), x))

    def test_the_change_is_small(self, result: Any) -> None:
        assert 'cast_lists={"blacklist": {"*": ["matmul"]}}' in result.verdict("O1", HALF).change
        assert 'keep_fp32=["scores"]' in result.verdict("O2", HALF).change

    def test_the_report_fits_the_terminal_and_says_what_to_type(
        self, result: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        text = str(result)
        others = [line for line in text.splitlines() if not line.startswith("  amp.initialize(")]
        assert max(map(len, others)) <= 100
        for each in result.levels:
            assert each.call in text  # in one line, so that one can copy it
        assert text.index("half type") < text.index("What to type") < text.index("Beyond float16's range")

    def test_it_is_plain_data(self, result: Any) -> None:
        data = json.loads(json.dumps(result.to_dict()))
        assert data["levels"][0]["trace"]["module"] == "scores"
        assert data["levels"][0]["change"] == result.levels[0].change


def call_without_change(verdict: Any) -> str:
    return f"amp.initialize(model, optimizer, opt_level={verdict.opt_level!r}, half_dtype={verdict.half_dtype!r})"


class TestOverflowInBackward:
    def test_the_scale_at_which_the_level_stands(self) -> None:
        result = flight(SteepNet(), torch.randn(8, 4), loss_fn=lambda output: mean_square(output) * 100)
        (verdict,) = result.levels
        assert (verdict.verdict, verdict.change) == ("stands", None)
        assert verdict.loss_scale < 2**16
        assert (verdict.trace.direction, verdict.trace.file) == ("backward", __file__)

    def test_the_function_is_named_as_one_that_no_list_knows(self) -> None:
        first = flight(SteepNet(), torch.randn(2, 4)).unlisted[0]
        assert (first.kind, first.function, first.file) == ("autograd.Function", f"{__name__}.Steep", __file__)

    def test_buffers_are_as_before_at_each_scale(self) -> None:
        class Counting(SteepNet):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x) * self.calls

        (verdict,) = flight(Counting(), torch.randn(8, 4), loss_fn=lambda output: mean_square(output) * 100).levels
        assert verdict.loss_scale < 2**15
        assert verdict.verdict == "stands"

    def test_a_static_scale_is_lowered(self) -> None:
        (verdict,) = flight(
            SteepNet(), torch.randn(8, 4), [("O3", HALF)], loss_fn=lambda output: mean_square(output) * 3e4
        ).levels
        assert (verdict.verdict, verdict.loss_scale) == ("overflows", 1)
        lowered = float(verdict.change.rpartition("loss_scale=")[2].rstrip(")"))
        assert 2**-10 < lowered < 1

    def test_a_static_scale_becomes_dynamic_if_gradients_are_flushed(self) -> None:
        def tiny(output: Tensor) -> Tensor:
            return mean_square(output) * 1e-6

        result = flight(nn.Linear(4, 4), torch.randn(8, 4), [("O3", HALF)], tiny)
        (verdict,) = result.levels
        assert verdict.verdict == "inaccurate"
        assert verdict.underflow >= 0.01
        assert verdict.change.endswith('loss_scale="dynamic")')
        assert [row.parameter for row in result.underflows] == ["weight"]

    def test_the_share_that_a_loss_scale_saves(self) -> None:
        result = flight(
            nn.Linear(4, 4), torch.randn(8, 4), [("O2", HALF)], loss_fn=lambda output: mean_square(output) * 1e-9
        )
        assert result.stands("O2", HALF)
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
    def test_is_told_from_small_gradients(self) -> None:
        result = flight(Biases(), torch.randn(16, 4), loss_fn=lambda output: mean_square(output) * 1e-7)
        assert {row.parameter for row in result.underflows} >= {
            "lift.weight",
            "keys.weight",
            "norm.bias",
            "head.weight",
        }
        assert {row.parameter for row in result.underflows if row.is_noise} == {"lift.bias", "keys.bias"}
        assert all(row.is_noise for row in result.underflows[-2:])
        assert all(row.noise < 0.05 for row in result.underflows[:-2])
        assert "of it rounding noise" in str(result)
        assert "Rounding noise: the gradient of a float64 step differs by at least its own size." in str(result)

    def test_of_small_gradients_alone_there_is_none(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=lambda output: mean_square(output) * 1e-8)
        assert {row.noise for row in result.underflows} == {0.0}
        assert "none of these is rounding noise" in str(result)

    def test_targets_and_masks_of_dropout_stay_as_they_are(self, masked: type[nn.Linear]) -> None:
        model, target = nn.Sequential(masked(4, 32), nn.Dropout(0.5), nn.Linear(32, 4)), torch.randn(8, 4)
        result = flight(model, torch.randn(8, 4), loss_fn=lambda output: F.mse_loss(output, target) * 1e-8)
        assert result.noise_unknown == ""
        assert {row.noise for row in result.underflows} == {0.0}

    @pytest.mark.parametrize(
        ("in_float64", "why"),
        [("raise TypeError('float32 only')", "TypeError: float32 only"), ("x = x.sin()", "so that it is another step")],
        ids=["raises", "differs"],
    )
    def test_without_a_step_in_float64_nothing_is_called_noise(self, in_float64: str, why: str) -> None:
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
    def test_nor_if_an_attention_kernel_draws_its_own_dropout(self, dropout: float) -> None:
        class Attending(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                lifted = super().forward(x)
                return lifted * torch.ops.preflight_tests_attention.attention(lifted.detach(), dropout)

        with torch.library._scoped_library("preflight_tests_attention", "DEF") as library:
            library.define("attention(Tensor x, float dropout_p=0.0) -> Tensor")
            library.impl("attention", lambda x, _=0.0: torch.ones_like(x), "CompositeExplicitAutograd")
            result = flight(Attending(4, 4), torch.randn(8, 4), loss_fn=lambda output: mean_square(output) * 1e-8)
        assert ("drew its own dropout" in result.noise_unknown) is (dropout > 0)


class TestPrecision:
    def test_a_difference_of_large_numbers(self) -> None:
        result = flight(Offset(), torch.randn(8, 4), [("O1", BFLOAT16)])
        (verdict,) = result.levels
        assert verdict.verdict == "inaccurate"
        assert verdict.gradient_error > result.gradient_bound
        row = next(row for row in result.imprecise if row.location.direction == "forward")
        assert (row.location.function, row.location.at_o1) == ("torch.Tensor.sub", "the type of its inputs")
        assert row.location.source == "return lifted - lifted.mean(-1, keepdim=True)"
        assert verdict.change.endswith('cast_lists={"blacklist": {"*": ["linear"]}})')

    def test_a_running_sum(self) -> None:
        result = flight(RunningSum(), torch.randn(8, 4), [("O1", BFLOAT16), ("O3", BFLOAT16)])
        assert "return total - 3200" in {row.location.source for row in result.imprecise}
        assert [each.verdict for each in result.levels] == ["inaccurate", "inaccurate"]
        assert result.verdict("O1").change.endswith('cast_lists={"blacklist": {"*": ["add"]}})')
        assert result.verdict("O3").change is None

    def test_a_higher_tolerance_lists_less(self) -> None:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
        assert flight(model, x).imprecise == ()
        assert len(flight(model, x, tolerance=1e-5).imprecise) > 2

    def test_dropout_draws_the_same_in_every_type(self) -> None:
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
        result = flight(model, torch.randn(8, 16), ["O1", "O2"])
        assert all(each.gradient_error < 0.05 for each in result.levels)
        assert result.uncompared > 0

    def test_random_operators_that_draw_otherwise_in_half_do_so_too(self, masked: type[nn.Linear]) -> None:
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
        found = flight(model, torch.randn(8, 4), self.LEVELS, measure=False)
        for level in self.LEVELS:
            for half in ("float16", "bfloat16"):
                verdict = found.verdict(level, half)
                assert verdict.verdict == ("inaccurate" if level in lost_at else "stands")
                assert verdict.state == ("" if level == "O2" and isinstance(model.count, nn.Parameter) else "count")
                assert (verdict.state_error > 0.5) == (level in lost_at)
        assert ("the change that the step makes to count is off by" in str(found)) == bool(lost_at)

    def test_running_statistics_of_norms_stand(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        found = flight(model, torch.randn(64, 4), self.LEVELS, measure=False)
        assert {each.verdict for each in found.levels} == {"stands"}
        assert {each.state.startswith("1.running") for each in found.levels} == {True}

    def test_o3_says_what_one_step_does_not_show(self) -> None:
        told = "One step does not show it."
        model, x = nn.Linear(4, 4), torch.randn(8, 4)
        assert told in " ".join(str(flight(model, x, "O3", measure=False)).split())
        assert told not in " ".join(str(flight(model, x, "O2", measure=False)).split())


class Island(nn.Module):
    """A product beyond float16 where the model's own code turns casts off, though its arguments are half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            scores = torch.matmul(hidden * 300, hidden.t() * 300)  # the product of the island
            scores = scores.softmax(-1)
        return self.last(torch.matmul(scores, hidden.float()))


class TestIslands:
    def test_the_remedy_is_the_one_that_reaches_the_place(self) -> None:
        torch.manual_seed(0)
        found = flight(Island(), torch.randn(16, 8), (("O1", torch.float16), ("O2", torch.float16)), measure=False)
        in_lists, in_half = found.levels
        assert in_lists.verdict == in_half.verdict == "overflows"
        (note,) = in_lists.notes
        assert "no list reaches" in note
        assert "matmul overflows there on the blacklist, too" in note
        assert "Type .float() on its arguments there" in note
        assert not in_half.notes
        assert "By hand: matmul in float32, by .float() on its arguments" in " ".join(str(found).split())


class TestNotFiniteInFloat32:
    def test_an_input_that_is_nan_ends_it(self) -> None:
        x = torch.randn(8, 4)
        x[0, 0] = math.nan
        result = flight(nn.Linear(4, 4), x, ["O1", "O2", "O3"])
        assert (result.is_finite, result.levels) == (False, ())
        assert (result.trace.direction, result.trace.function) == ("input", "torch.nn.functional.linear")
        assert not result.stands("O1", HALF)
        assert "No precision helps" in " ".join(str(result).split())

    def test_an_operator_that_makes_it(self) -> None:
        class Root(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return (super().forward(x) - 1e4).sqrt()

        result = flight(Root(4, 4), torch.randn(2, 4))
        assert (result.is_finite, result.trace.function) == (False, "torch.Tensor.sqrt")

    def test_a_loss_that_is_not_finite_with_gradients_that_are(self) -> None:
        def loss(output: Tensor) -> Tensor:
            return mean_square(output) + (output.detach() * 0).sum().log().neg()

        result = flight(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=loss)
        assert (result.is_finite, result.loss) == (False, math.inf)
        assert result.trace.function == "torch.Tensor.log"


class TestUnlistedFunctions:
    def test_a_custom_operator_comes_first(self, operator: Any) -> None:
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.relu(operator(super().forward(x)))

        rows = flight(Net(4, 4), torch.randn(2, 4)).unlisted
        assert (rows[0].kind, rows[0].function) == ("custom operator", "torch.ops.preflight_tests.doubled")
        assert (rows[0].file, rows[0].module) == (__file__, "")
        assert next(row.function for row in rows if row.kind == "torch function") == "torch.relu"

    def test_functions_in_lists_and_those_that_call_them_are_none(self) -> None:
        model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        found = {row.function for row in flight(model, torch.randn(2, 3, 8)).unlisted}
        assert "torch.nn.functional.multi_head_attention_forward" not in found
        assert "torch.nn.functional.linear" not in found

    def test_what_the_user_has_registered_is_known(self) -> None:
        amp.register_float_function(Steep, "apply")
        assert all(row.kind == "torch function" for row in flight(SteepNet(), torch.randn(2, 4)).unlisted)


class TestFailures:
    def test_a_banned_function_and_its_change(self) -> None:
        def loss(output: Tensor) -> Tensor:
            return F.binary_cross_entropy(output.sigmoid(), torch.ones_like(output))

        (verdict,) = flight(nn.Linear(4, 1), torch.randn(2, 4), loss_fn=loss).levels
        assert verdict.verdict == "fails"
        assert verdict.error.startswith("BannedFunctionError: ")
        assert "binary_cross_entropy" in verdict.change

    def test_a_module_that_computes_with_float32_constants(self) -> None:
        class Mixed(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.aten.mm(torch.ones(2, 4), self.weight) + super().forward(x)

        model = nn.Sequential(nn.Linear(4, 4), Mixed(4, 4), nn.Linear(4, 4))
        (verdict,) = flight(model, torch.randn(2, 4), [("O2", HALF)]).levels
        assert verdict.verdict == "fails"
        assert "RuntimeError" in verdict.error
        assert 'keep_fp32=["1"]' in verdict.change

    def test_no_change_is_found(self) -> None:
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
        assert "O1 bfloat16 stands instead." in str(result)


class TestNothingChanges:
    @pytest.mark.parametrize("raises", [False, True])
    def test_model_inputs_random_numbers_and_torch(self, raises: bool) -> None:
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

    def test_it_needs_neither_gradients_nor_autocast_to_be_as_usual(self) -> None:
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
            (nn.Linear(4, 4), {3: 1}, {}, "inputs has the key 3"),
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
    def test_it_is_told(self, model: Any, inputs: Any, options: dict[str, Any], told: str) -> None:
        with pytest.raises(OptionError) as caught:
            flight(model, torch.randn(2, 4) if inputs is None else inputs, **options)
        assert told in str(caught.value)

    def test_with_amp_on(self) -> None:
        with amp.init(), pytest.raises(UsageError, match=r"amp\.deinitialize\(\)"):
            flight(nn.Linear(4, 4), torch.randn(2, 4))

    def test_a_level_that_was_not_tried(self) -> None:
        result = flight(nn.Linear(4, 4), torch.randn(2, 4), ["O1"])
        with pytest.raises(OptionError, match="O2 float16 or O2 bfloat16 was not tried"):
            result.stands("O2")
        with pytest.raises(OptionError, match="type half_dtype='float16', or the other"):
            result.stands("O1")


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
    def _users_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        (tmp_path / "preflight_package").mkdir()
        (tmp_path / "preflight_package" / "module.py").write_text(USERS_MODULE, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "preflight_package"]:
            del sys.modules[name]

    def test_the_report(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["preflight", "preflight_package.module:make", "--level", "O4", "--no-measure"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("Preflight of Linear: in float32 the loss is ")
        assert 'amp.initialize(model, optimizer, opt_level="O1", half_dtype="bfloat16")' in out

    def test_json_with_two_levels(self, capsys: pytest.CaptureFixture[str]) -> None:
        levels = ["--level", "O4", "--level", "O5", "--no-measure"]
        assert cli.main(["preflight", "preflight_package.module:make", "--json", *levels]) == 0
        data = json.loads(capsys.readouterr().out)
        assert [(each["opt_level"], each["verdict"]) for each in data["levels"]] == [("O1", "stands"), ("O2", "stands")]

    def test_no_level_stands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["preflight", "preflight_package.module:beyond", "--level", "O4", "--no-measure"]) == 1
        assert "No precision helps" in " ".join(capsys.readouterr().out.split())

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
            ("preflight_package.module:value", "has 'int' as 'value'; expected a function"),
            ("preflight_package.module:pair", "returned 2 values; expected three"),
            ("preflight_package.module:number", "returned int; expected three"),
            ("preflight_package.module:swapped", "module:swapped: found Tensor as a model; expected a torch.nn.Module"),
            ("preflight_package.module:needs", "It is called without arguments, and is to return the model"),
        ],
    )
    def test_a_wrong_target(self, target: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["preflight", target]) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("ampatch: error: ")
        assert told in error

    def test_a_wrong_level_is_told_before_the_model_is_built(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["preflight", "preflight_package.module:broken", "--level", "O7"]) == 1
        assert "opt_level is 'O7'" in capsys.readouterr().err

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
        self, function: str, told: str, line: str | None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["preflight", f"preflight_package.module:{function}"]) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"ampatch: error: preflight_package.module:{function}")
        assert told in error
        if line is not None:
            number = next(place for place, text in enumerate(USERS_MODULE.splitlines(), 1) if line in text)
            place = Path("preflight_package", "module.py")
            assert f", at {place}:{number}: {USERS_MODULE.splitlines()[number - 1].strip()}. " in error
        # The code that it says to type raises the same.
        (code,) = shlex.split(error.partition("type: python -c ")[2])
        sys.path.insert(0, "")
        try:
            with pytest.raises((Exception, SystemExit)) as caught:
                exec(code, {})
        finally:
            sys.path.remove("")
        assert f"{type(caught.value).__name__}: {caught.value}" in error

    def test_a_fault_of_ampatch_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def judge(*_: object) -> None:
            raise LookupError("of ours")

        monkeypatch.setattr(preflight, "underflows", judge)
        with pytest.raises(LookupError):
            cli.main(["preflight", "preflight_package.module:make", "--level", "O4", "--no-measure"])

    def test_too_little_memory_is_one_error(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def judge(*_: object) -> None:
            raise torch.OutOfMemoryError("tried to allocate")

        monkeypatch.setattr(preflight, "underflows", judge)
        assert cli.main(["preflight", "preflight_package.module:make", "--level", "O4", "--no-measure"]) == 1
        assert "Give it a smaller batch." in capsys.readouterr().err


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
    assert all(result.stands(each.opt_level, each.half_dtype) for each in result.levels)
