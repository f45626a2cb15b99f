"""`amp.report`: its contents, its text, and its advice, which each test follows on a real model."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import together
from optimizers import SGD, backward
from planted_overflows import with_gradient
from sample_reports import NUMBERS, full, small, step
from torch import Tensor, nn

from ampatch import amp
from ampatch.casting import cast_observers
from ampatch.diagnostics import json_files
from ampatch.diagnostics.report.advice import advice
from ampatch.diagnostics.report.text import text
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime
from ampatch.scaling import step_observers

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

SETTINGS = {"opt_level": "O1", "half_dtype": "float16", "loss_scale": "dynamic", "patch_torch_functions": True}
LONG = "encoder.layer.3.attention.self.query.weight"


def full_report() -> dict[str, Any]:
    """A report with something in each section, long names and long sentences."""
    whole = full()
    whole["functions"] += whole["functions"]
    whole["underflow"]["parameters"] = [{**whole["underflow"]["parameters"][0], "name": LONG, "elements": 1_234_567}]
    whole["lines"][0]["source"] = "x = self.fc(x)" * 9
    whole["notes"] = ["threads were not watched " * 9]
    return whole


@pytest.fixture(autouse=True)
def _ends() -> Any:
    torch.manual_seed(0)
    yield
    amp.deinitialize()
    assert (step_observers.observers, runtime.before_close) == ([], [])


def begun(model: nn.Module, lr: float = 1e-3, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    settings = {"half_dtype": "float16", "verbosity": 0, **options}
    return amp.initialize(model, optimizer, **settings)


def one_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def trained(model: nn.Module, inputs: Tensor, loss_fn: Any, steps: int = 1, **options: Any) -> dict[str, Any]:
    """The report of some steps."""
    model, optimizer = begun(model, **options)
    with amp.report() as watched:
        for _ in range(steps):
            one_step(model, optimizer, loss_fn(model(inputs)))
    amp.deinitialize()
    return watched.to_dict()


def mean_square(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def of_nothing() -> amp.Report:
    """A report of one operator."""
    with amp.report() as watched:
        torch.ones(2) + 1
    return watched


class TestReport:
    def test_a_report_has_settings_costs_steps_functions_and_underflow(self) -> None:
        model, optimizer = begun(nn.Linear(8, 8), loss_scale=8.0)
        with amp.report() as watched:
            one_step(model, optimizer, mean_square(model(torch.randn(4, 8))))
        found = watched.to_dict()
        assert (found["format"], found["version"]) == ("ampatch report", 1)
        assert (found["about"]["torch"], found["about"]["devices"]) == (torch.__version__, ["cpu"])
        assert found["settings"] == {**amp.settings()}
        assert found["cost"]["seconds"] >= found["cost"]["recording_seconds"] > 0  # an estimate, and at most all
        assert [(row["scale"], row["skipped"]) for row in found["steps"]] == [(8, False)]
        linear = next(row for row in found["functions"] if row["name"] == "torch.nn.functional.linear")
        assert (linear["rule"], linear["casts"] >= 3) == ("whitelist", True)
        assert found["underflow"]["half"] == "float16"
        json.dumps(found, allow_nan=False)

    def test_a_report_covers_its_block_and_can_be_read_inside(self) -> None:
        model, optimizer = begun(nn.Linear(8, 8))
        x = torch.randn(4, 8)
        one_step(model, optimizer, mean_square(model(x)))
        with amp.report() as watched:
            for number in (1, 2):
                one_step(model, optimizer, mean_square(model(x)))
                assert len(watched.to_dict()["steps"]) == number
                assert f"{number} step" in str(watched)
        before = watched.to_dict()
        one_step(model, optimizer, mean_square(model(x)))
        assert watched.to_dict() == before
        assert before["totals"]["calls"] > 0

    def test_a_report_is_readable_after_an_exception(self) -> None:
        model, optimizer = begun(nn.Linear(8, 8))
        watched = amp.report()

        def fails() -> None:
            with watched:
                one_step(model, optimizer, mean_square(model(torch.randn(4, 8))))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert len(watched.to_dict()["steps"]) == 1
        assert "the block ended with ZeroDivisionError" in watched.to_dict()["notes"][-1]
        with amp.report():  # the first one is closed
            pass

    @pytest.mark.parametrize("ends", [True, False])
    def test_the_settings_are_those_of_the_last_session(self, ends: bool) -> None:
        begun(nn.Linear(8, 8), opt_level="O2")
        with amp.report() as watched:
            amp.deinitialize()
            begun(nn.Linear(8, 8), opt_level="O1", loss_scale=4.0)
            if ends:
                amp.deinitialize()
            else:
                assert watched.to_dict()["settings"]["loss_scale"] == 4.0
        begun_after = watched.to_dict()["settings"]
        assert (begun_after["opt_level"], begun_after["loss_scales"]) == ("O1", [4.0])

    def test_a_report_of_code_without_amp_has_steps_and_no_settings(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with amp.report() as watched:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        found = watched.to_dict()
        assert (found["settings"], found["totals"]["casts"], len(found["steps"])) == (None, 0, 1)
        assert "amp was not set up" in str(watched)

    def test_a_report_changes_no_bit_of_training(self) -> None:
        weights = []
        for block in (contextlib.nullcontext(), amp.report()):
            torch.manual_seed(1)
            model, optimizer = begun(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
            with block:
                for _ in range(2):
                    one_step(model, optimizer, mean_square(model(torch.randn(4, 8))))
            amp.deinitialize()
            weights.append([*model.state_dict().values(), torch.randn(2)])
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

    def test_changes_to_the_returned_dict_change_no_report(self) -> None:
        watched = of_nothing()
        watched.to_dict()["functions"].clear()
        assert watched.to_dict()["functions"]

    def test_a_comparison_can_be_added(self) -> None:
        watched = of_nothing()
        result = amp.compare(nn.Linear(8, 8), torch.randn(4, 8), mean_square, "O0", "O1")
        watched.add_comparison(result)
        assert watched.to_dict()["comparison"] == result.to_dict()
        assert result.verdict[:60] in str(watched)

    def test_steps_that_amp_runs_itself_are_noted(self) -> None:
        with amp.report() as watched:
            amp.compare(nn.Linear(8, 8), torch.randn(4, 8), mean_square, "O0", "O1")
            amp.preflight(nn.Linear(8, 8), torch.randn(4, 8), mean_square, measure=False)
        notes = watched.to_dict()["notes"]
        assert [note.partition(" ran in the block")[0] for note in notes[-2:]] == ["amp.compare", "amp.preflight"]

    def test_saved_reports_are_compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("monday.json", "tuesday.json"):
            watched = of_nothing()
            watched.save(name)
            assert json_files.read(name) == watched.to_dict()
        result = amp.compare("monday.json", "tuesday.json")
        assert result.verdict.startswith("The reports agree in all")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["monday.json", "tuesday.json"]

    def test_a_report_is_written_as_a_page(self, tmp_path: Path) -> None:
        of_nothing().to_html(tmp_path / "report.html")
        assert "torch.Tensor.__add__" in (tmp_path / "report.html").read_text(encoding="utf-8")


class TestBadInput:
    @pytest.mark.parametrize(
        "read", [amp.Report.to_dict, str, lambda report: report.save("x.json"), lambda report: report.to_html("x.html")]
    )
    def test_a_report_that_was_not_entered_cannot_be_read(
        self, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match=r"Type `with amp.report\(\) as report:`"):
            read(amp.report())
        assert list(tmp_path.iterdir()) == []

    def test_a_report_cannot_be_entered_twice(self) -> None:
        with amp.report() as watched, pytest.raises(UsageError, match="entered before"):
            watched.__enter__()
        with pytest.raises(UsageError, match=r"Type amp.report\(\) for another one"):
            watched.__enter__()

    def test_two_reports_at_once_are_refused_in_any_thread(self) -> None:
        def enter() -> None:
            with pytest.raises(UsageError, match="a report was begun inside the block of another one"):
                amp.report().__enter__()

        with amp.report() as watched:
            enter()
            together([enter])
            torch.ones(2) + 1
        assert watched.to_dict()["totals"]["calls"]
        assert cast_observers.observer is None

    @pytest.mark.parametrize(
        ("method", "path", "fault"),
        [
            ("save", "report.html", "report.to_html('report.html') for a page"),
            ("save", "report", "does not end with .json"),
            ("save", "", "the path is empty; expected the name of a file, such as 'report.json'"),
            ("to_html", "report.json", "report.save('report.json') for a JSON file"),
            ("save", "nowhere/report.json", "there is no folder 'nowhere'"),
            ("save", "folder.json", "it is a folder"),
            ("save", 5, "the path is 5; expected the name of a file"),
        ],
    )
    def test_a_path_that_cannot_be_written_is_refused(
        self, method: str, path: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("folder.json").mkdir()
        with pytest.raises(OptionError) as error:
            getattr(of_nothing(), method)(path)
        assert fault in str(error.value)

    def test_a_comparison_of_another_kind_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"the comparison is 'dict'; expected what amp\.compare"):
            amp.report().add_comparison({})  # type: ignore[arg-type]

    def test_a_report_that_fails_to_open_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(_: object) -> None:
            raise RuntimeError

        monkeypatch.setattr("ampatch.diagnostics.report.calls.CallRecorder.__enter__", fails)
        with pytest.raises(RuntimeError):
            amp.report().__enter__()
        monkeypatch.undo()
        with amp.report():
            pass


class TestText:
    def test_gradients_that_are_only_rounded_to_zero_are_listed(self) -> None:
        whole = full_report()
        row = {**whole["underflow"]["parameters"][0], "name": "tiny", "rounded_to_zero": 1.0, "subnormal": 0.0}
        lines = text(whole | {"underflow": {**whole["underflow"], "parameters": [row]}}).splitlines()
        assert [line.split()[-2:] for line in lines if "tiny" in line] == [["100.0%", "0.0%"]]

    @pytest.mark.parametrize("width", [60, 80, 120, 200])
    def test_the_text_fits_the_terminal_with_whole_numbers(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        lines = text(full_report()).splitlines()
        assert max(map(len, lines)) <= width
        printed = "\n".join(lines)
        for title in ("What to do", "Casts by function (10 of 14", "Casts by line", "Matrix products"):
            assert f"\n{title}" in printed
        assert "\nMemory by module" in printed
        # Numbers are whole, at every width.
        assert "23,541 casts wrote 4.21 GiB in at most 4.98 s; the cache saved 1,200 casts" in " ".join(printed.split())
        assert "4096, 768, 50264" in printed
        assert "1,234,567" in printed

    def test_columns_that_a_narrow_terminal_lacks_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        narrow = text(full_report())
        assert "Casts by function (10 of 14; in a wider terminal also:" in narrow
        assert "whitelist" not in narrow
        monkeypatch.setenv("COLUMNS", "200")
        wide = text(full_report())
        assert "wider terminal" not in wide
        assert "whitelist" in wide

    def test_the_text_tells_skips_and_the_range_of_the_scale(self) -> None:
        steps = [step(1, scale=4.0, skipped=True, overflow=True, gradient_norm=None), step(2, scale=2.0)]
        printed = text(small(settings=None, steps=steps))
        assert "2 steps, 1 of them skipped. The loss scale went from 4 to 2, between 2 and 4." in printed
        assert "not finite" in printed
        assert "No step of an optimizer." in text(small(settings=None, steps=[]))

    def test_the_text_of_an_empty_report_has_no_shares(self) -> None:
        nothing = dict.fromkeys(NUMBERS, 0)
        empty = {name: [] for name in ("functions", "lines", "misaligned", "modules", "steps", "advice")}
        printed = text(small(settings=None, totals=nothing, cost=dict.fromkeys(small()["cost"], 0), **empty))
        assert "Nothing was cast." in printed
        assert "(-)" in printed  # no share of no time


# Advice


class Between(nn.Sequential):
    """A product, a function, and a product."""

    def __init__(self, function: Any) -> None:
        super().__init__(nn.Linear(8, 64), nn.Linear(64, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self.function(self[0](x)))


def advised(found: dict[str, Any], kind: str) -> str:
    """The sentence of a kind; empty if there is none."""
    told = [each for each in found["advice"] if each["kind"] == kind]
    assert len(told) <= 1
    return told[0]["text"] if told else ""


def typed(text: str) -> dict[str, Any]:
    """The arguments of `amp.initialize` that a sentence says to type."""
    call = text.partition("amp.initialize(..., ")[2]
    names = {"torch": torch, "dict": dict}
    end = next(place for place in range(1, len(call)) if call[place] == ")" and is_code(f"dict({call[: place + 1]}"))
    found: dict[str, Any] = eval(f"dict({call[: end + 1]}", names)
    return found


def is_code(text: str) -> bool:
    try:
        compile(text, "", "eval")
    except SyntaxError:
        return False
    return True


def times(factor: float) -> Any:
    return lambda output: mean_square(output) * factor


class TestAdvice:
    @pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
    def test_a_better_scale_loses_less(self, static: bool) -> None:
        name = "loss_scale" if static else "init_scale"
        inputs, loss = torch.randn(64, 8), times(1e-4)
        before = trained(nn.Linear(8, 8), inputs, loss, **{name: 2.0})
        changes = typed(advised(before, "underflow"))
        assert list(changes) == [name]
        after = trained(nn.Linear(8, 8), inputs, loss, **changes)
        assert after["underflow"]["lost"] < before["underflow"]["lost"] / 2
        assert (advised(after, "underflow"), after["steps"][0]["skipped"]) == ("", False)

    def test_a_scale_above_the_maximum_is_raised_with_the_maximum(self) -> None:
        inputs, loss = torch.randn(64, 8), times(1e-11)
        before = trained(nn.Linear(8, 8), inputs, loss, init_scale=2.0**24)
        after = trained(nn.Linear(8, 8), inputs, loss, **typed(advised(before, "underflow")))
        assert after["underflow"]["scale"] > 2**24
        assert after["underflow"]["lost"] < before["underflow"]["lost"] / 2

    @pytest.mark.parametrize("options", [{"init_scale": 1.0}, {"loss_scale": 1.0}], ids=str)
    def test_gradients_that_are_all_zero_get_a_scale(self, options: dict[str, float]) -> None:
        inputs, loss = torch.randn(16, 8), times(1e-7)
        before = trained(nn.Linear(8, 8), inputs, loss, **options)
        assert before["steps"][0]["gradient_norm"] == 0
        after = trained(nn.Linear(8, 8), inputs, loss, **typed(advised(before, "underflow")))
        assert after["steps"][0]["gradient_norm"] > 0

    def test_gradients_that_no_scale_covers_need_bfloat16(self) -> None:
        @with_gradient
        def wide(grad: Tensor) -> Tensor:
            return torch.logspace(-24, 13, grad.numel(), base=2).reshape(grad.shape).to(grad.dtype)

        def lost(**options: Any) -> dict[str, Any]:
            model = nn.Sequential(nn.Linear(8, 8))
            return trained(model, torch.eye(8), lambda x: wide(x.float()).sum(), init_scale=1.0, **options)

        changes = typed(advised(lost(), "underflow"))
        assert changes == {"half_dtype": torch.bfloat16}
        assert lost(**changes)["underflow"]["lost"] == 0

    def test_skipped_first_steps_get_a_lower_scale(self) -> None:
        inputs, loss = 10 * torch.randn(16, 8), times(100.0)
        before = trained(nn.Linear(8, 8), inputs, loss, steps=12, lr=1e-9)
        text = advised(before, "first skips")
        assert text.startswith(f"Type amp.initialize(..., init_scale={typed(text)['init_scale']}): steps 1 to ")
        after = trained(nn.Linear(8, 8), inputs, loss, steps=3, lr=1e-9, **typed(text))
        assert [row["skipped"] for row in after["steps"]] == [False] * 3

    @pytest.mark.filterwarnings("ignore:the loss of a skipped step")
    def test_steps_that_are_all_skipped_get_a_trace(self, caplog: pytest.LogCaptureFixture) -> None:
        inputs, loss = torch.randn(4, 8), lambda output: torch.log(output * 0).sum()
        before = trained(nn.Linear(8, 8), inputs, loss, steps=4)
        text = advised(before, "skips")
        assert "steps 1 to 4 were skipped, up to the last one" in text
        model, optimizer = begun(nn.Linear(8, 8), **typed(text))
        for _ in range(2):  # the loss is no part of the model, so that the second step is watched
            one_step(model, optimizer, loss(model(inputs)))
        assert "First inf: in torch.log" in caplog.text

    @pytest.mark.parametrize(
        ("skipped", "count", "told"),
        [
            ({30}, 59, ""),
            ({9, 10, 11}, 19, "steps 9 to 11 were skipped in a row"),
            (set(range(9, 60, 9)), 59, "6 of 59 steps were skipped"),
        ],
        ids=["one", "a row", "many"],
    )
    def test_skips_are_told_unless_there_is_only_one(self, skipped: set[int], count: int, told: str) -> None:
        steps = [step(number, skipped=number in skipped, overflow=number == 30) for number in range(1, count + 1)]
        found = {"advice": advice(small(settings=SETTINGS, steps=steps))}
        assert told in advised(found, "skips")
        assert len(found["advice"]) == bool(told)

    @pytest.mark.parametrize(
        ("skipped", "kind", "told"),
        [
            ({9, 10, 11}, "skips", "Run the script by `ampatch run --trace-overflow`, which names the function that"),
            ({1, 2, 3}, "first skips", "Type GradScaler(init_scale=8192.0): steps 1 to 3 were skipped until"),
        ],
        ids=["later", "at first"],
    )
    def test_skips_of_a_script_without_amp_get_what_it_can_type(self, skipped: set[int], kind: str, told: str) -> None:
        scales = {number: 2.0**16 / 2 ** sum(each < number for each in skipped) for number in range(1, 20)}
        steps = [step(number, loss_id=None, scale=scales[number], skipped=number in skipped) for number in scales]
        found = {"advice": advice(small(settings=None, steps=steps))}
        assert advised(found, kind).startswith(told)
        assert "amp.initialize" not in advised(found, kind)

    def test_gradients_that_are_not_finite_get_a_check(self) -> None:
        inputs = torch.full((4, 8), torch.nan)
        before = trained(nn.Linear(8, 8), inputs, mean_square, half_dtype="bfloat16")
        text = advised(before, "not finite")
        assert "step 1 had inf or NaN" in text
        after = trained(nn.Linear(8, 8), inputs, mean_square, half_dtype="bfloat16", **typed(text))
        assert ([row["skipped"] for row in after["steps"]], advised(after, "not finite")) == ([True], "")

    @pytest.mark.parametrize("half", ["float16", "bfloat16"])
    def test_weights_that_are_cast_again_are_frozen(self, half: str) -> None:
        model = amp.initialize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), half_dtype=half)
        found = []
        for context in (contextlib.nullcontext, lambda: amp.frozen_weights(model)):
            with amp.report() as watched, torch.no_grad(), context():
                for _ in range(3):
                    model(torch.randn(8, 8))
            found.append(watched.to_dict())
        before, after = found
        told = "3 forward passes without gradients cast the weights of 2 layers again"
        assert told in advised(before, "weights cast again")
        assert advised(after, "weights cast again") == ""
        assert after["totals"]["cast_bytes"] < before["totals"]["cast_bytes"]

    def test_weights_of_backward_passes_without_a_step_are_not_frozen(self) -> None:
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model, optimizer = amp.initialize(model, SGD(model.parameters()), half_dtype="float16", verbosity=0)
        with amp.report() as watched:
            for _ in range(3):
                with amp.scale_loss(mean_square(model(torch.randn(8, 8))), optimizer) as scaled:
                    scaled.backward()
        assert advised(watched.to_dict(), "weights cast again") == ""

    def test_a_cast_that_is_undone_is_left_out(self) -> None:
        before = trained(Between(lambda x: x.float()), torch.randn(8, 8), mean_square)
        assert advised(before, "undone").startswith("Leave out the cast to float32, such as x.float(): torch.nn.fun")
        after = trained(Between(lambda x: x), torch.randn(8, 8), mean_square)
        assert advised(after, "undone") == ""
        assert after["totals"]["cast_bytes"] < before["totals"]["cast_bytes"]

    def test_outputs_that_the_next_model_casts_back_stay_half(self) -> None:
        found = []
        for _ in range(2):
            options = typed(advised(found[0], "undone")) if found else {}
            models = [nn.Linear(8, 8), nn.Linear(8, 8)]
            first, second = amp.initialize(models, opt_level="O2", half_dtype="float16", **options)
            with amp.report() as watched:
                second(first(torch.randn(8, 8)))
            amp.deinitialize()
            found.append(watched.to_dict())
        assert (found[0]["advice"][0]["function"], advised(found[1], "undone")) == ("torch.nn.functional.linear", "")
        assert found[1]["totals"]["casts"] < found[0]["totals"]["casts"]

    @pytest.mark.parametrize("operator", [False, True])
    def test_an_in_place_function_that_rounds_is_replaced(self, operator: bool) -> None:
        bias = torch.randn(64)

        def in_place(x: Tensor) -> Tensor:
            if operator:
                x += bias
                return x
            return x.mul_(bias)

        before = trained(Between(in_place), torch.randn(8, 8), mean_square)
        text = advised(before, "rounded in place")
        better = "x + y" if operator else "x.mul(y)"
        assert text.startswith(f"Type x = {better} instead of {'x += y' if operator else 'x.mul_(y)'} at ")
        after = trained(Between(lambda x: eval(better, {"x": x, "y": bias})), torch.randn(8, 8), mean_square)
        assert advised(after, "rounded in place") == ""
        name = "torch.Tensor.__add__" if operator else "torch.Tensor.mul"
        types = next(row["types"] for row in after["functions"] if row["name"] == name)
        assert types[0]["out"] == ["float32"]

    def test_a_whitelisted_function_in_float32_is_told(self) -> None:
        def without_casts(x: Tensor) -> Tensor:
            with amp.disable_casts():
                return F.linear(x.float(), torch.ones(64, 64))

        before = trained(Between(without_casts), torch.randn(8, 8), mean_square)
        told = "torch.nn.functional.linear ran in float32 in 1 call, though the whitelist has it"
        assert told in advised(before, "not half")
        after = trained(Between(lambda x: F.linear(x, torch.ones(64, 64))), torch.randn(8, 8), mean_square)
        assert advised(after, "not half") == ""

    def test_sizes_that_are_no_multiples_of_8_are_padded(self) -> None:
        before = trained(nn.Sequential(nn.Linear(8, 30)), torch.randn(8, 8), mean_square)
        assert advised(before, "misaligned").startswith("Pad out_features from 30 to 32 in module 0 (Linear) at ")
        after = trained(nn.Sequential(nn.Linear(8, 32)), torch.randn(8, 8), mean_square)
        assert (advised(after, "misaligned"), after["misaligned"]) == ("", [])

    def test_channels_that_are_no_multiples_of_8_are_padded(self) -> None:
        inputs = torch.randn(2, 3, 8, 8)
        before = trained(nn.Sequential(nn.Conv2d(3, 16, 3)), inputs, mean_square)
        assert advised(before, "misaligned").startswith("Pad in_channels / groups from 3 to 8 in module 0 (Conv2d) at")
        after = trained(nn.Sequential(nn.Conv2d(8, 16, 3)), F.pad(inputs, (0, 0, 0, 0, 0, 5)), mean_square)
        assert advised(after, "misaligned") == ""
        by_channel = trained(nn.Sequential(nn.Conv2d(16, 16, 3, groups=16)), torch.randn(2, 16, 8, 8), mean_square)
        assert advised(by_channel, "misaligned") == ""

    def test_the_costliest_casts_are_avoided_by_a_list(self) -> None:
        targets = torch.randint(64, (64,))

        def loss(output: Tensor) -> Tensor:
            return F.cross_entropy(output, targets)

        before = trained(nn.Linear(8, 64), torch.randn(64, 8), loss)
        text = advised(before, "costly casts")
        call = text[text.index("amp.compare") : text.index(", which says")]
        names = {"amp": amp, "model": nn.Linear(8, 64), "inputs": torch.randn(64, 8), "loss_fn": loss}
        compared = eval(call, names)
        assert compared.b == "O1 float16 with cast_lists"
        lists = eval(call.replace("amp.compare(model, inputs, loss_fn, ", "(").replace("...", ""))[1]["cast_lists"]
        after = trained(nn.Linear(8, 64), torch.randn(64, 8), loss, cast_lists=lists)
        assert after["totals"]["cast_bytes"] < before["totals"]["cast_bytes"] / 2

    def test_code_without_amp_and_autocast_gets_a_call_of_initialize(self) -> None:
        with amp.report() as watched:
            nn.Linear(8, 8)(torch.randn(4, 8))
        assert "model, optimizer = amp.initialize(model, optimizer)" in advised(watched.to_dict(), "no amp")
        with amp.report() as watched, torch.autocast("cpu"):
            nn.Linear(8, 8)(torch.randn(4, 8))
        assert watched.to_dict()["advice"] == []

    def test_a_sound_training_gets_no_advice(self) -> None:
        for level in ("O1", "O2"):
            found = trained(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(8, 8), mean_square, opt_level=level)
            assert found["advice"] == []
