"""`amp.report`: what it holds of a block, its text, and its advice, each of which is followed on a real model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_reports import NUMBERS, report, step
from torch import Tensor, nn

from ampatch import amp
from ampatch.diagnostics import report_file
from ampatch.diagnostics.report_text import text
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime
from ampatch.scaling import step_observers

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

LONG = "encoder.layer.3.attention.self.query.weight"


def full_report() -> dict[str, Any]:
    """A report with something in each section."""
    whole = report()
    settings = {"opt_level": "O1", "half_dtype": "float16", "loss_scale": "dynamic"}
    product = {"function": "torch.nn.functional.linear", "module": "head", "dtype": "float16", "calls": 3}
    place = {"file": "m.py", "line": 3, "source": "x = self.fc(x)" * 9}
    scales = [{"scale": 2.0**each, "zero": 0.1, "subnormal": 0.05, "overflow": 0.0} for each in range(8, 17)]
    parameter = {"name": LONG, "elements": 1_234_567, "zeros": 9, "zero": 0.1, "subnormal": 0.2, "exponents": []}
    return {
        **whole,
        "settings": settings,
        "functions": [{**whole["functions"][0], "name": f"torch.nn.functional.f{each}"} for each in range(12)],
        "lines": [{**whole["lines"][0], **place, "functions": {"torch.nn.functional.linear": 4}}],
        "misaligned": [{**product, **place, "size": [512, 768, 30522], "pads": [512, 768, 30528]}],
        "steps": [step(1, overflow=True, skipped=True, gradient_norm=None), *(step(each) for each in range(2, 9))],
        "underflow": {
            "half": "float16",
            "scale": 1024.0,
            "best_scale": 4096.0,
            "seen": 8,
            "lost": 0.15,
            "scales": scales,
            "exponents": [],
            "zeros": 9,
            "elements": 100,
            "parameters": [parameter],
        },
        "advice": [{"kind": "x", "text": "Type amp.initialize(..., init_scale=1024.0). " * 4, "file": None}],
        "notes": ["threads were not watched " * 9],
    }


@pytest.fixture(autouse=True)
def _ends() -> Any:
    torch.manual_seed(0)
    yield
    amp.deinitialize()
    assert (step_observers.observers, runtime.before_close) == ([], [])


def begun(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = {"half_dtype": "float16", "verbosity": 0, **options}
    return amp.initialize(model, optimizer, **settings)


def one_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
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


class TestReport:
    def test_of_a_block(self) -> None:
        model, optimizer = begun(nn.Linear(8, 8), loss_scale=8.0)
        with amp.report() as watched:
            one_step(model, optimizer, mean_square(model(torch.randn(4, 8))))
        found = watched.to_dict()
        assert (found["format"], found["version"]) == ("ampatch report", 1)
        assert (found["about"]["torch"], found["about"]["devices"]) == (torch.__version__, ["cpu"])
        assert found["settings"] == {**amp.settings()}
        assert found["cost"]["seconds"] > found["cost"]["recording_seconds"] > 0
        assert [(row["scale"], row["skipped"]) for row in found["steps"]] == [(8, False)]
        linear = next(row for row in found["functions"] if row["name"] == "torch.nn.functional.linear")
        assert (linear["rule"], linear["casts"] >= 3) == ("whitelist", True)
        assert found["underflow"]["half"] == "float16"
        json.dumps(found, allow_nan=False)

    def test_covers_its_block_only(self) -> None:
        model, optimizer = begun(nn.Linear(8, 8))
        x = torch.randn(4, 8)
        one_step(model, optimizer, mean_square(model(x)))
        with amp.report() as watched:
            one_step(model, optimizer, mean_square(model(x)))
        before = watched.to_dict()
        one_step(model, optimizer, mean_square(model(x)))
        assert watched.to_dict() == before
        assert len(before["steps"]) == 1

    def test_can_be_read_while_it_is_open(self) -> None:
        model, optimizer = begun(nn.Linear(8, 8))
        with amp.report() as watched:
            for number in (1, 2):
                one_step(model, optimizer, mean_square(model(torch.randn(4, 8))))
                assert len(watched.to_dict()["steps"]) == number
                assert f"{number} step" in str(watched)
        assert watched.to_dict()["totals"]["calls"] > 0

    def test_is_readable_after_an_exception(self) -> None:
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
    def test_has_the_settings_of_the_session_seen_last(self, ends: bool) -> None:
        begun(nn.Linear(8, 8), opt_level="O2")
        with amp.report() as watched:
            amp.deinitialize()
            begun(nn.Linear(8, 8), opt_level="O1", loss_scale=4.0)
            assert watched.to_dict()["settings"]["loss_scale"] == 4.0
            if ends:
                amp.deinitialize()
        begun_after = watched.to_dict()["settings"]
        assert (begun_after["opt_level"], begun_after["loss_scales"]) == ("O1", [4.0])

    def test_of_code_without_amp(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with amp.report() as watched:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        found = watched.to_dict()
        assert (found["settings"], found["totals"]["casts"], len(found["steps"])) == (None, 0, 1)
        assert "amp was not set up" in str(watched)

    def test_changes_no_bit(self) -> None:
        weights = []
        for is_watched in (False, True):
            torch.manual_seed(1)
            model, optimizer = begun(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
            watched = amp.report()
            if is_watched:
                watched.__enter__()
            for _ in range(2):
                one_step(model, optimizer, mean_square(model(torch.randn(4, 8))))
            if is_watched:
                watched.__exit__(None, None, None)
            amp.deinitialize()
            weights.append([*model.state_dict().values(), torch.randn(2)])
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

    def test_what_it_returns_is_the_callers(self) -> None:
        with amp.report() as watched:
            torch.ones(2) + 1
        watched.to_dict()["functions"].clear()
        assert watched.to_dict()["functions"]

    def test_a_comparison_is_part_of_it(self) -> None:
        with amp.report() as watched:
            torch.ones(2) + 1
        result = amp.compare(nn.Linear(8, 8), torch.randn(4, 8), mean_square, "O0", "O1")
        watched.add_comparison(result)
        assert watched.to_dict()["comparison"] == result.to_dict()
        assert result.verdict[:60] in str(watched)

    def test_is_saved_and_compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("monday.json", "tuesday.json"):
            with amp.report() as watched:
                torch.ones(2) + 1
            watched.save(name)
            assert report_file.read(name) == watched.to_dict()
        result = amp.compare("monday.json", "tuesday.json")
        assert result.verdict.startswith("The reports agree in all")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["monday.json", "tuesday.json"]

    def test_is_written_as_a_page(self, tmp_path: Path) -> None:
        with amp.report() as watched:
            torch.ones(2) + 1
        pytest.importorskip("ampatch.diagnostics.report_page")
        watched.to_html(tmp_path / "report.html")
        assert "torch.Tensor.__add__" in (tmp_path / "report.html").read_text(encoding="utf-8")


class TestBadInput:
    @pytest.mark.parametrize(
        "read",
        [
            amp.Report.to_dict,
            str,
            lambda watched: watched.save("x.json"),
            lambda watched: watched.to_html("x.html"),
        ],
    )
    def test_a_report_that_watched_nothing(self, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match=r"Type `with amp.report\(\) as report:`"):
            read(amp.report())
        assert list(tmp_path.iterdir()) == []

    def test_one_that_is_entered_twice(self) -> None:
        with amp.report() as watched, pytest.raises(UsageError, match="entered before"):
            watched.__enter__()
        with pytest.raises(UsageError, match=r"Type amp.report\(\) for another one"):
            watched.__enter__()

    def test_two_at_once(self) -> None:
        raised = []

        def other() -> None:
            try:
                amp.report().__enter__()
            except UsageError as error:
                raised.append(error)

        with amp.report() as watched:
            with pytest.raises(UsageError, match="a report is open already"):
                amp.report().__enter__()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            torch.ones(2) + 1
        assert len(raised) == 1
        assert watched.to_dict()["totals"]["calls"]

    @pytest.mark.parametrize(
        ("method", "path", "fault"),
        [
            ("save", "report.html", "Type report.to_html(...) for a page"),
            ("save", "report", "does not end with .json"),
            ("to_html", "report.json", "Type report.save(...) for a JSON file"),
            ("save", "nowhere/report.json", "there is no folder 'nowhere'"),
            ("save", "folder.json", "it is a folder"),
            ("save", 5, "the path is 5; expected the name of a file"),
        ],
    )
    def test_a_path_that_cannot_be_written(
        self, method: str, path: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("folder.json").mkdir()
        with amp.report() as watched:
            pass
        with pytest.raises(OptionError) as error:
            getattr(watched, method)(path)
        assert fault in str(error.value)

    def test_a_comparison_of_another_kind(self) -> None:
        with pytest.raises(OptionError, match=r"the comparison is 'dict'; expected what amp\.compare"):
            amp.report().add_comparison({})  # type: ignore[arg-type]

    def test_a_report_that_fails_to_open_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(_: object) -> None:
            raise RuntimeError

        monkeypatch.setattr("ampatch.diagnostics.report_calls.CallRecorder.__enter__", fails)
        with pytest.raises(RuntimeError):
            amp.report().__enter__()
        monkeypatch.undo()
        with amp.report():
            pass


class TestText:
    @pytest.mark.parametrize("width", [60, 80, 120, 200])
    def test_fits(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        lines = text(full_report()).splitlines()
        assert max(map(len, lines)) <= width
        printed = "\n".join(lines)
        for title in (
            "What to do",
            "Casts by function (10 of 12",
            "Casts by line",
            "Matrix products",
            "Memory by module",
        ):
            assert f"\n{title}" in printed
        # Numbers are whole, at every width.
        assert "8 casts wrote 4 KiB in 100 ms; the cache saved 2 casts of 64" in printed
        assert "512, 768, 30528" in printed
        assert "1,234,567" in printed

    def test_says_which_columns_a_narrow_terminal_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        narrow = text(full_report())
        assert "Casts by function (10 of 12; in a wider terminal also:" in narrow
        assert "whitelist" not in narrow
        monkeypatch.setenv("COLUMNS", "200")
        wide = text(full_report())
        assert "wider terminal" not in wide
        assert "whitelist" in wide

    def test_says_what_the_scale_did(self) -> None:
        steps = [step(1, scale=4.0, skipped=True, overflow=True, gradient_norm=None), step(2, scale=2.0)]
        printed = text(report(settings=None, steps=steps))
        assert "2 steps, 1 of them skipped. The loss scale went from 4 to 2, between 2 and 4." in printed
        assert "not finite" in printed
        assert "No step of an optimizer." in text(report(settings=None, steps=[]))

    def test_of_an_empty_report(self) -> None:
        nothing = dict.fromkeys(NUMBERS, 0)
        empty = {name: [] for name in ("functions", "lines", "misaligned", "modules", "steps", "advice")}
        printed = text(report(settings=None, totals=nothing, cost=dict.fromkeys(report()["cost"], 0), **empty))
        assert "0 casts wrote 0 B in 0" in printed
        assert "(-)" in printed  # no share of no time
