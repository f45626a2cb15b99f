"""`amp.compare` and `ampatch compare`: models with planted faults, models of torch's own, and two saved reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import ampatch
from helpers import Disturbable, undisturbed
from planted_overflows import with_gradient
from sample_reports import small, step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampatch import amp
from ampatch.errors import CastListError, OptionError, UsageError

HALF = {"opt_level": "O1", "half_dtype": "float16"}
HALF_TYPES = ["float16", "bfloat16"]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def mean_square(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def distance_to_noise(output: Tensor) -> Tensor:
    return F.mse_loss(output.float(), torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))


def compared(model: nn.Module, inputs: Any = None, a: Any = "O0", b: Any = "O1", loss_fn: Any = mean_square) -> Any:
    return amp.compare(model, torch.randn(4, 8) if inputs is None else inputs, loss_fn, a, b)


def rows(result: Any, function: str, phase: str = "forward") -> list[Any]:
    return [row for row in result.rows if row.function.rpartition(".")[2] == function and row.phase == phase]


# Models of torch's own


def transformer() -> tuple[nn.Module, Any]:
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (torch.randn(2, 7, 16), torch.randn(2, 5, 16))


def convolutions() -> tuple[nn.Module, Any]:
    body = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.AvgPool2d(2))
    return nn.Sequential(*body, nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(100, 4)), torch.randn(4, 3, 16, 16)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def recurrent() -> tuple[nn.Module, Any]:
    return nn.Sequential(Recurrent(8, 16, 2, batch_first=True), nn.Linear(16, 4)), torch.randn(2, 5, 8)


class Operators(TorchDispatchMode):
    """Notes which operators torch runs inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **kwargs or {})


def operators_of_recurrent_layers(dtype: torch.dtype) -> set[str]:
    """Which operators stand in for recurrent layers: it depends on the processor in which types it has a kernel."""
    with Operators() as operators:
        nn.LSTM(8, 16, dtype=dtype)(torch.randn(5, 2, 8, dtype=dtype))
    return operators.names


class TestSoundModels:
    @pytest.mark.parametrize("half", HALF_TYPES)
    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("make", [transformer, convolutions, recurrent])
    def test_sound_models_are_within_the_noise_of_rounding(self, make: Any, level: str, half: str) -> None:
        model, inputs = make()
        result = compared(model, inputs, "O0", {"opt_level": level, "half_dtype": half}, distance_to_noise)
        assert result.verdict.startswith(f"{level} {half} is within the noise of {half}: ")
        assert (result.first, result.worst.starts) == (None, 0)
        assert 0 < result.gradient_error < result.noise
        assert all(row.finite_a and row.finite_b for row in result.rows if not row.unmatched)
        kernels = operators_of_recurrent_layers
        if make is not recurrent or kernels(getattr(torch, half)) == kernels(torch.float32):
            assert {row.operator for row in result.rows if row.unmatched} == {"cast"}

    def test_the_same_level_twice_gives_the_same_numbers(self) -> None:
        model, inputs = convolutions()
        result = compared(model, inputs, "O1", "O1")
        assert "give the same numbers in every call" in result.verdict
        assert (result.first, result.worst, result.gradient_error) == (None, None, 0.0)
        assert {row.error for row in result.rows} == {0.0}

    @pytest.mark.parametrize("half", HALF_TYPES)
    def test_dropout_draws_the_same_mask_in_both_steps(self, half: str) -> None:
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
        (row,) = rows(compared(model, b={"opt_level": "O2", "half_dtype": half}), "bernoulli_")
        assert (row.type_a, row.type_b, row.error) == ("float32", half, 0.0)

    def test_calls_inside_of_torchs_modules_have_no_line(self) -> None:
        model, inputs = transformer()
        own = [row for row in compared(model, inputs).rows if row.module]
        assert {row.file for row in own} == {None}
        assert {row.file for row in compared(around(Offset())).rows if row.module == "3"} == {__file__}

    def test_two_half_types_are_compared(self) -> None:
        result = compared(nn.Linear(8, 8), None, HALF, "O1")
        assert result.title == "Linear: O1 float16 (a) and O1 bfloat16 (b)"
        (row,) = [row for row in rows(result, "linear") if row.operator == "addmm"]
        assert (row.type_a, row.type_b) == ("float16", "bfloat16")

    def test_gradients_that_cancel_to_rounding_noise_do_not_count(self) -> None:
        class Keys(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return (x @ super().forward(x).transpose(-1, -2)).softmax(-1) @ x

        result = compared(Keys(8, 8), torch.randn(2, 6, 8), loss_fn=distance_to_noise)
        bias = next(each for each in result.gradients if each.parameter == "bias")
        assert bias.cancelled
        assert bias.error > 1000
        assert result.first is None
        assert result.worst.error < 0.1

    @pytest.mark.parametrize("half", HALF_TYPES)
    def test_a_mask_is_no_overflow(self, half: str) -> None:
        class Masked(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                scores = super().forward(x)
                mask = torch.full_like(scores, torch.finfo(scores.dtype).min).triu(1)
                return (scores + mask).softmax(-1)

        result = compared(Masked(8, 8), b={"opt_level": "O2", "half_dtype": half}, loss_fn=distance_to_noise)
        assert result.first is None
        assert all(row.finite_b for row in result.rows if not row.unmatched)

    @pytest.mark.gpu
    @pytest.mark.parametrize("half", HALF_TYPES)
    def test_another_attention_kernel_on_a_gpu_has_its_counterpart(self, half: str) -> None:
        model, inputs = transformer()
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # which its kernel would draw itself
        sides = ("O0", {"opt_level": "O1", "half_dtype": half})
        batch = tuple(each.cuda() for each in inputs)
        result = amp.compare(model.cuda(), batch, lambda output: F.mse_loss(output.float(), batch[1]), *sides)
        assert result.verdict.startswith(f"O1 {half} is within the noise of {half}: ")
        assert result.notes == ()


# Planted faults


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 12).exp().log()


class Probabilities(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (60 * x).softmax(-1)


class Offset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 300) - 300


@with_gradient
def shifted(grad: Tensor) -> Tensor:
    return (grad + 300) - 300


class InBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted(x)


def around(culprit: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), culprit, nn.Linear(16, 8))


def logarithm_of_chosen(output: Tensor) -> Tensor:
    return -output.float().clamp(1e-30).log()[:, 3].mean()


class TestCulprits:
    def test_an_exp_that_a_list_forces_to_half_overflows(self) -> None:
        result = compared(around(Gate()), a=HALF, b={**HALF, "cast_lists": {"whitelist": {"*": ["exp"]}}})
        first = result.first
        assert (first.phase, first.function, first.module) == ("forward", "torch.Tensor.exp", "3")
        assert (first.file, first.source) == (__file__, "return (x.abs() + 12).exp().log()")
        assert (first.type_a, first.type_b) == ("float32", "float16")
        assert (first.error, first.own_error, first.finite_a, first.finite_b) == (math.inf, math.inf, True, False)
        told = " ".join(str(result).split())
        assert "O1 float16 with cast_lists has inf or NaN in loss or gradients, and O1 float16 has none." in told
        assert "It begins in the forward of exp, module 3, at " in told

    def test_a_softmax_forced_to_half_is_named_and_not_the_logarithm_of_its_zeros(self) -> None:
        model = nn.Sequential(nn.Linear(8, 64), Probabilities())
        lists = {"whitelist": {"*": ["softmax"]}}
        result = compared(model, a=HALF, b={**HALF, "cast_lists": lists}, loss_fn=logarithm_of_chosen)
        first = result.first
        assert (first.function, first.module) == ("torch.Tensor.softmax", "1")
        assert first.error < 0.01  # in the 2-norm, which does not see what is small
        assert first.flushed > 0.3
        assert "% flushed to zero)" in " ".join(str(result).split())
        (logarithm,) = rows(result, "log")
        assert logarithm.error > logarithm.noise
        assert logarithm.starts

    @pytest.mark.parametrize(
        ("culprit", "phase"), [(Offset(), "forward"), (InBackward(), "backward")], ids=["forward", "backward"]
    )
    def test_a_difference_of_large_numbers_is_found_in_its_pass(self, culprit: nn.Module, phase: str) -> None:
        result = compared(around(culprit), b="O2", loss_fn=distance_to_noise)
        assert result.verdict.startswith("O2 bfloat16 is beyond the noise of bfloat16: ")
        assert (result.first.phase, result.first.operator) == (phase, "sub")
        assert result.first.source.endswith("+ 300) - 300")
        assert result.first.own_error > 0.1
        module = "4" if phase == "forward" else "2"
        after = next(row for row in rows(result, "linear", phase) if row.module == module and not row.unmatched)
        assert after.error > 0.1  # which it has from its input
        assert after.own_error < 0.01
        assert not after.starts

    def test_the_first_of_two_culprits_is_named(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Offset(), nn.Linear(8, 8), Offset())
        result = compared(model, b="O2", loss_fn=distance_to_noise)
        assert [row.module for row in result.rows if row.starts and row.operator == "sub"] == ["1", "3"]
        assert result.first.module == "1"

    def test_an_error_of_its_own_counts_beside_one_from_before(self) -> None:
        class Fast(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (300 * x).cos()

        result = compared(nn.Sequential(nn.Linear(8, 8), Offset(), Fast()), b="O2", loss_fn=distance_to_noise)
        (cosine,) = rows(result, "cos")
        assert cosine.input_error > cosine.noise
        assert cosine.own_error > 0.1
        assert cosine.starts

    def test_the_loss_scale_is_that_of_the_step_that_has_one(self) -> None:
        beyond = with_gradient(lambda grad: (grad.sign() * 7e4) * 1e-6)

        class Overflowing(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return beyond(super().forward(x))

        result = compared(Overflowing(8, 8), a={**HALF, "cast_lists": {"blacklist": {"*": ["mul"]}}}, b=HALF)
        assert result.verdict.startswith("O1 float16 has inf or NaN")
        assert (result.first.phase, result.first.operator) == ("backward", "mul")
        assert result.loss_scale == 2**16

    def test_no_precision_is_blamed_for_an_overflow_in_both_steps(self) -> None:
        result = compared(around(Gate()), torch.full((2, 8), 1e30))
        assert "of both steps have inf or NaN, so that no precision is to blame" in result.verdict

    def test_the_side_with_inf_may_be_a(self) -> None:
        result = compared(around(Gate()), a={"opt_level": "O3", "half_dtype": "float16"}, b="O0")
        assert result.verdict.startswith("O3 float16 has inf or NaN in loss or gradients, and O0 has none.")
        assert (result.first.function, result.first.finite_a) == ("torch.Tensor.exp", False)


class TestMatching:
    def test_calls_of_one_step_only_are_told(self) -> None:
        class Clamped(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                lifted = super().forward(x)
                return lifted.clamp(-9, 9) if lifted.dtype is torch.bfloat16 else lifted.tanh()

        result = compared(Clamped(8, 8), b="O2")
        (only_a,), (only_b,) = rows(result, "tanh"), rows(result, "clamp")
        assert (only_a.unmatched, only_a.type_a, only_a.type_b, only_a.error) == (1, "float32", "", None)
        assert (only_b.unmatched, only_b.type_a, only_b.type_b) == (1, "", "bfloat16")
        others = [row for row in result.rows if row.unmatched and row.operator != "cast"]
        assert f"{len(others)} others" in str(result)

    def test_calls_of_a_loop_that_runs_less_often_are_matched(self) -> None:
        class Loop(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                for count in range(2 if self.weight.dtype is torch.bfloat16 else 3):
                    x = super().forward(x)[: 4 - count]
                return x

        result = compared(Loop(8, 8), b="O2")
        calls = [row for row in rows(result, "linear") if row.operator == "addmm"]
        assert [row.unmatched for row in calls] == [0, 0, 1]
        assert calls[1].error < 0.05

    def test_every_call_of_both_steps_is_a_row(self) -> None:
        result = compared(nn.Linear(8, 8))
        for side in ("type_a", "type_b"):
            assert len([row for row in rows(result, "linear") if row.operator == "addmm" and getattr(row, side)]) == 1
        assert [row.number for row in result.rows] == [*range(1, len(result.rows) + 1)]


class TestResult:
    def test_to_dict_is_plain_data(self) -> None:
        result = compared(around(Gate()), a=HALF, b={"opt_level": "O3", "half_dtype": "float16"})
        data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert data["loss"] == {"a": result.loss_a, "b": "nan"}
        assert data["first"]["error"] == "inf"
        assert {"number", "phase", "function", "module", "file", "line", "source"} <= data["rows"][0].keys()
        assert {"type_a", "type_b", "error", "max_error", "finite_a", "finite_b", "unmatched"} <= data["worst"].keys()
        parameters = {f"{module}.{name}" for module in (0, 2, 4) for name in ("weight", "bias")}
        assert {each["parameter"] for each in data["gradients"]} == parameters
        exp = next(each for each in data["functions"] if each["name"] == "torch.Tensor.exp")
        assert (exp["calls"], exp["above"], exp["error"]) == (2, 2, "inf")
        assert {each["name"] for each in data["modules"]} >= {*map(str, range(5))}

    @pytest.mark.parametrize("columns", [60, 80, 120])
    def test_the_text_fits_the_terminal(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        result = compared(around(Gate()), b={"opt_level": "O3", "half_dtype": "float16"})
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(result)
        assert max(map(len, text.splitlines())) <= columns
        assert "exp" in text
        assert "Calls above the noise" in text


class TestHints:
    def test_a_loss_function_of_two_arguments_is_told_how_it_is_called(self) -> None:
        with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
            compared(nn.Linear(4, 4), torch.randn(2, 4), "O0", "O1", lambda output, target: output)  # type: ignore[misc]
        assert "loss_fn is called with the model's output alone, here a Tensor." in caught.value.__notes__[0]

    @pytest.mark.parametrize("read", [lambda report: report, amp.Report.to_dict], ids=["report", "dict"])
    def test_reports_that_are_not_saved_are_refused(self, read: Any) -> None:
        with amp.report() as watched:
            pass
        with pytest.raises(OptionError, match=r"Type report\.save\('a\.json'\) for each report, then amp\.compare"):
            amp.compare(read(watched), read(watched))


class TestSideEffects:
    @pytest.mark.parametrize("raises", [False, True])
    def test_model_inputs_random_numbers_and_torch_stay(self, raises: bool) -> None:
        model, x = Disturbable(), torch.randn(8, 4)
        model(x.clone()).sum().backward()

        def loss(output: Tensor) -> Tensor:
            if raises and output.dtype is torch.bfloat16:
                raise KeyError("from the user")
            return mean_square(output)

        with undisturbed(model, x):
            if raises:
                with pytest.raises(KeyError) as caught:
                    compared(model, {"x": x, "bias": 1.0}, "O0", "O1", loss)
                assert caught.value.__notes__ == ["ampatch: A step of amp.compare raised this, at O1 bfloat16."]
            else:
                assert compared(model, {"x": x, "bias": 1.0}, "O1", "O2", loss).gradient_error < 0.2

    def test_compare_is_refused_while_amp_is_set_up(self) -> None:
        with amp.init(half_dtype=torch.bfloat16), pytest.raises(UsageError, match=r"amp\.deinitialize\(\)"):
            compared(nn.Linear(8, 8))


class TestBadInput:
    def test_a_model_that_amp_converted_is_refused(self) -> None:
        model = amp.initialize(nn.Linear(8, 8), opt_level="O2", half_dtype=torch.bfloat16, verbosity=0)
        with pytest.raises(OptionError, match=r"is bfloat16; expected float32.* Type amp\.deinitialize\(\) first"):
            compared(model)

    @pytest.mark.parametrize(
        ("sides", "told"),
        [
            ({"b": "O7"}, "in b: opt_level is 'O7'"),
            ({"a": 3}, "a is 3; expected an opt level ('O1'), or a mapping"),
            ({"b": {"opt_levl": "O1"}}, "b has the unknown argument 'opt_levl'. Did you mean 'opt_level'"),
            ({"b": {"half_dtype": "float64"}}, "in b: half_dtype is 'float64'"),
            ({"b": {"opt_level": "O4", "half_dtype": "float16"}}, "in b: half_dtype="),
            ({"b": {"opt_level": "O2", "cast_lists": {}}}, "in b: cast_lists contradicts opt_level='O2'"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_bad_sides_are_told(self, sides: dict[str, Any], told: str) -> None:
        with pytest.raises(OptionError) as caught:
            compared(nn.Linear(8, 8), **sides)
        assert told in str(caught.value)

    @pytest.mark.parametrize("opt_level", ["O1", "O5", "O6"])
    def test_formats_are_compared_and_their_rounding_is_told_apart_from_noise(self, opt_level: str) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        side = {"opt_level": opt_level, "half_dtype": "bfloat16"}
        without, result = (
            compared(model, torch.randn(64, 16), b=side | lists)
            for lists in ({}, {"cast_lists": {"modules": {"2": {"format": "float4_e2m1"}}}})
        )
        assert result.gradient_error > 3 * without.gradient_error
        assert {row.module for row in rows(result, "linear") if row.is_above_noise} == {"2"}
        assert any("b has functions in" in note and "format float4_e2m1" in note for note in result.notes)
        assert any("b has functions in" in note for note in without.notes) == (opt_level == "O6")

    def test_faults_of_a_list_are_raised(self, tmp_path: Path) -> None:
        (tmp_path / "casts.yaml").write_text("blacklist: {torch: [no_such_function]}", encoding="utf-8")
        with pytest.raises(CastListError, match="no_such_function"):
            compared(nn.Linear(8, 8), b={"cast_lists": str(tmp_path / "casts.yaml")})

    def test_a_list_in_a_file_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "casts.yaml"
        file.write_text("blacklist: {'*': [linear]}", encoding="utf-8")
        result = compared(nn.Linear(8, 8), b={"cast_lists": str(file)})
        assert result.b == f"O1 bfloat16 with {file}"
        assert {row.type_b for row in rows(result, "linear") if not row.unmatched} == {"float32"}


# Saved reports


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def save(name: str, content: Any) -> str:
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return name

    return save


class TestReports:
    def test_reports_that_agree_are_told_to(self, saved: Any) -> None:
        other = small(cost={"seconds": 9.0, "recording_seconds": 1.0, "operators": 9})
        result = amp.compare(saved("a.json", small()), saved("b.json", other))
        assert result.title == "Two reports: a.json (a) and b.json (b)"
        assert result.verdict.startswith("The reports agree in all ")
        assert (result.first, result.worst, result.notes) == (None, None, ())

    def test_the_greatest_difference_and_the_first_differing_step_are_told(self, saved: Any) -> None:
        steps = [step(1), step(2, overflow=True, skipped=True, gradient_norm="inf"), step(3, scale=32768.0)]
        function = {**small()["functions"][0], "casts": 2, "cast_bytes": 1024}
        other = small(steps=steps, functions=[function], settings={"opt_level": "O2"})
        result = amp.compare(saved("a.json", small()), saved("b.json", other))
        assert result.worst.quantity == "gradient norm"
        assert (result.worst.value_a, result.worst.value_b, result.worst.error) == (1.5, math.inf, math.inf)
        assert result.first.step == 2
        assert "Their steps part at step 2, in overflow." in result.verdict
        cast_bytes = next(row for row in result.rows if row.quantity == "cast bytes")
        assert (cast_bytes.value_a, cast_bytes.value_b, cast_bytes.error) == (4096, 1024, 0.75)
        assert result.notes == ("opt_level is 'O1' in a and 'O2' in b",)
        assert "linear" in str(result)
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["worst"]["error"] == "inf"

    def test_a_difference_is_weighed_by_the_greatest_number_of_its_kind(self, saved: Any) -> None:
        linear = small()["functions"][0]
        bmm = {**linear, "name": "torch.bmm", "cast_bytes": 4}
        functions = [linear, bmm], [{**linear, "cast_bytes": 2048}, {**bmm, "cast_bytes": 8}]
        a, b = (small(functions=each) for each in functions)
        assert amp.compare(saved("a.json", a), saved("b.json", b)).worst.function == linear["name"]

    def test_a_report_without_amp_differs_in_one_note(self, saved: Any) -> None:
        a, b = saved("a.json", small(settings=None)), saved("b.json", small())
        assert amp.compare(a, b).notes == ("amp was off in a",)
        assert amp.compare(b, a).notes == ("amp was off in b",)
        assert amp.compare(a, a).notes == ()

    def test_rows_of_one_report_only_are_unmatched(self, saved: Any) -> None:
        underflow = {"lost": 0.25, "best_scale": 1024.0, "parameters": [{"name": "w", "zero": 0.5, "subnormal": 0.1}]}
        result = amp.compare(saved("a.json", small()), saved("b.json", small(underflow=underflow, functions=[])))
        unmatched = {(row.quantity, row.value_a, row.value_b) for row in result.rows if row.unmatched}
        assert {("underflow: lost", None, 0.25), ("gradient: zero share", None, 0.5), ("casts", 8, None)} <= unmatched

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("{", "no report"),
            ([], "its format is not 'ampatch report'"),
            ({}, "its format is not 'ampatch report'"),
            ({"format": "other"}, "its format is not 'ampatch report'"),
            (small(version=2), "a report of version 2"),
            (small(version=2, about=None), "a report of version 2"),
            ({"format": "ampatch report", "version": 1}, "a damaged report"),
            (small(steps=[{}]), "a damaged report"),
            (small(steps=[step(1, scale="x")]), "a damaged report"),
            (small(settings=3), "a damaged report"),
        ],
        ids=["json", "list", "empty", "format", "version", "about", "section", "field", "number", "settings"],
    )
    def test_another_file_is_refused(self, saved: Any, content: Any, told: str) -> None:
        with pytest.raises(OptionError) as caught:
            amp.compare(saved("a.json", small()), saved("b.json", content))
        assert str(caught.value).startswith("b.json is ")
        assert told in str(caught.value)

    def test_other_arguments_are_refused(self, saved: Any) -> None:
        a = saved("a.json", small())
        with pytest.raises(OptionError, match=r"'none\.json' cannot be read: No such file"):
            amp.compare(a, "none.json")
        with pytest.raises(OptionError, match="b is 'Tensor'; expected the file of another report"):
            amp.compare(a, torch.ones(3))
        with pytest.raises(OptionError, match="or two files of reports and nothing else"):
            amp.compare(a, a, mean_square)

    def test_saved_reports_are_compared_by_the_command(self, saved: Any) -> None:
        files = [saved("a.json", small()), saved("b.json", small(steps=[step(1, scale=1.0)]))]
        assert "What differs most" in ampatch("compare", *files).out
        assert json.loads(ampatch("compare", *files, "--json").out)["first"]["step"] == 1
        status, _, err = ampatch("compare", files[0], "none.json")
        assert status == 1
        assert err.startswith("ampatch: error: 'none.json' cannot be read")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch's forward mode
def test_a_model_that_differentiates_in_forward_mode_is_compared() -> None:
    class Slopes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.jacfwd(lambda x: super(Slopes, self).forward(x).tanh())(x)

    assert rows(compared(Slopes(8, 8), torch.randn(8)), "linear")


class TestDtypeArguments:
    """A function on the blacklist may get dtype=float32 for a cast, so that its operators have other arguments."""

    @pytest.mark.parametrize("name", ["sum", "cumsum"])
    def test_the_function_whose_list_differs_is_the_culprit(self, name: str) -> None:
        class Total(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.full((64,), 2000.0))

            def forward(self, x: Tensor) -> Tensor:
                totals = getattr(torch, name)((x * self.scale).half(), 1)
                return totals.float() - 1.0

        lists = {"cast_lists": {"unlisted": {"*": [name]}}}
        found = compared(Total(), torch.ones(2, 64), HALF, HALF | lists, torch.mean)
        assert found.first is not None
        assert (found.first.function, found.first.finite_a, found.first.finite_b) == (f"torch.{name}", True, False)
        assert found.first.own_error == float("inf")
        assert f"It begins in the forward of {name}" in found.verdict
