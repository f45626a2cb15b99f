"""`ampatch demo --report`: the page of one run, and what it says of an interrupted one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import demo_digits
import pytest

from ampatch.cli import main as cli
from ampatch.demo.plan import SETTINGS, Plan, Run
from ampatch.demo.run_report import reported
from ampatch.diagnostics import json_files
from ampatch.diagnostics.report import page as report_page

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

STEPS_OF_A_RUN = 10
CHOSEN = ("--opt-levels", "O0,O1:float16,O4", "--epochs", "2")
DEFAULT = "ampatch-demo.pt"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with demo_digits.few():
        yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The data of the pages that are made."""
    made: list[dict[str, Any]] = []
    page = report_page.page

    def noting(data: dict[str, Any]) -> str:
        made.append(data)
        return page(data)

    monkeypatch.setattr(report_page, "page", noting)
    return made


@pytest.fixture
def ctrl_c_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Presses Ctrl-C in the so-and-so-many-th step from now."""
    return lambda steps: demo_digits.press_ctrl_c(monkeypatch, steps, times=1)


def results() -> list[dict[str, Any]]:
    """The results, but for their times."""
    found = json.loads(Path("results.json").read_text())
    return [{key: value for key, value in entry.items() if key != "ms_per_step"} for entry in found]


class TestReport:
    def test_it_is_of_the_training_in_float16_and_changes_no_result(
        self, shown: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["demo", *CHOSEN, "--json", "results.json"]) == 0
        without = results()
        assert shown == []
        assert cli.main(["demo", *CHOSEN, "--json", "results.json", "--report", "r.html"]) == 0
        assert results() == without
        (data,) = shown
        assert Path("r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        assert (data["settings"]["opt_level"], data["settings"]["half_dtype"]) == ("O1", "float16")
        assert len(data["steps"]) == STEPS_OF_A_RUN
        assert data["totals"]["cache_hits"] == without[1]["cache_hits_per_step"] * STEPS_OF_A_RUN
        assert [row["parent"] for row in data["modules"]].count(None) == 1, (
            "the network that measures memory is another"
        )
        told = f"The report of O1 float16 is in {Path('r.html').absolute()}; a browser shows it."
        assert any(line.startswith(told) for line in capsys.readouterr().err.splitlines())

    @pytest.mark.parametrize(
        ("levels", "run"),
        [
            (["O0", "O1", "O2"], SETTINGS["O1:float16"]),
            (["O4", "O1:bfloat16", "O2:float16"], SETTINGS["O2:float16"]),
            (["O0", "O5"], SETTINGS["O5:bfloat16"]),
            (["O0"], None),
        ],
    )
    def test_its_run_is_the_first_in_float16(self, levels: list[str], run: Run | None) -> None:
        assert reported(Plan(levels).runs()) == run

    def test_without_a_run_in_half_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["demo", "--opt-levels", "O0", "--report", "r.html"]) == 1
        assert "--opt-levels O0 has none. Type for example --opt-levels O0,O1" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("r.txt", "'r.txt' does not end with .html or .htm. Type for example report.html"),
            ("none/r.html", "there is no folder 'none'"),
        ],
    )
    def test_a_page_that_cannot_be_written_is_said_before_any_training(
        self, name: str, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            cli.main(["demo", *CHOSEN, "--report", name])
        assert told in capsys.readouterr().err

    @pytest.mark.slow
    def test_or_no_longer_does_not_lose_the_results(
        self, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_text = json_files.write_text

        def full(text: str, path: Path) -> None:
            if path.suffix == ".html":
                raise OSError("No space left on device")
            write_text(text, path)

        monkeypatch.setattr(json_files, "write_text", full)
        assert cli.main(["demo", *CHOSEN, "--json", "results.json", "--report", "r.html"]) == 1
        printed = capsys.readouterr()
        assert "O4" in printed.out
        assert "The report could not be written: No space left on device" in printed.err.splitlines()
        assert len(results()) == 3


class TestResumed:
    @pytest.mark.slow
    def test_a_part_of_a_run_is_told_to_be_one(
        self, shown: list[dict[str, Any]], ctrl_c_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        ctrl_c_after(STEPS_OF_A_RUN + 3)
        assert cli.main(["demo", *CHOSEN, "--report", "r.html"]) == 130
        assert not Path("r.html").exists()
        assert cli.main(["demo", "--resume", DEFAULT]) == 0
        (data,) = shown
        told = "The report covers steps 4 to 10 of O1 float16: the demo was interrupted before, and resumed."
        assert told in capsys.readouterr().err.splitlines()
        assert data["notes"][-1] == told
        assert told in Path("r.html").read_text(encoding="utf-8")
        assert len(data["steps"]) == STEPS_OF_A_RUN - 3

    @pytest.mark.slow
    def test_a_run_that_has_not_begun_is_reported_as_a_whole(
        self, shown: list[dict[str, Any]], ctrl_c_after: Callable[[int], None]
    ) -> None:
        ctrl_c_after(3)
        assert cli.main(["demo", *CHOSEN]) == 130
        assert cli.main(["demo", "--resume", DEFAULT, "--report", "r.html"]) == 0
        (data,) = shown
        assert len(data["steps"]) == STEPS_OF_A_RUN
        assert not [note for note in data["notes"] if "covers steps" in note]

    @pytest.mark.slow
    def test_a_run_that_has_ended_was_reported_then(
        self, shown: list[dict[str, Any]], ctrl_c_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        ctrl_c_after(2 * STEPS_OF_A_RUN + 3)
        assert cli.main(["demo", *CHOSEN, "--report", "r.html"]) == 130
        written = Path("r.html").read_bytes()
        assert cli.main(["demo", "--resume", DEFAULT, "--report", "other.html"]) == 1
        assert "--report is of O1 float16, which had ended before the demo was interrupted" in capsys.readouterr().err
        assert cli.main(["demo", "--resume", DEFAULT]) == 0
        assert Path("r.html").read_bytes() == written
        assert len(shown) == 1

    def test_a_folder_that_is_gone_is_said_before_any_training(
        self, ctrl_c_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("pages").mkdir()
        ctrl_c_after(3)
        assert cli.main(["demo", *CHOSEN, "--report", "pages/r.html"]) == 130
        Path("pages").rmdir()
        assert cli.main(["demo", "--resume", DEFAULT]) == 1
        assert "the demo began with --report: " in capsys.readouterr().err
