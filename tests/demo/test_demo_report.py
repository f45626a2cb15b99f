"""`ampatch demo --report`: the page of one run, and of a resumed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import ampatch
from demo_digits import CHECKPOINT, STEPS_OF_A_RUN, press_ctrl_c, results

from ampatch.demo.plan import SETTINGS, Plan, Run
from ampatch.demo.run_report import reported
from ampatch.diagnostics import json_files
from ampatch.diagnostics.report import page as report_page

pytest_plugins = ["demo_digits"]
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("few_digits", "ctrl_c_raises")]  # once: without the libraries

CHOSEN = ("--opt-levels", "O0,O1:float16,O4", "--epochs", "2")


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


class TestReport:
    @pytest.mark.slow
    def test_the_report_is_of_the_training_in_float16_and_changes_no_result(self, shown: list[dict[str, Any]]) -> None:
        assert ampatch("demo", *CHOSEN, "--json", "results.json").status == 0
        without = results()
        assert shown == []
        status, _, err = ampatch("demo", *CHOSEN, "--json", "results.json", "--report", "r.html")
        assert (status, results()) == (0, without)
        (data,) = shown
        assert Path("r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        assert (data["settings"]["opt_level"], data["settings"]["half_dtype"]) == ("O1", "float16")
        assert len(data["steps"]) == STEPS_OF_A_RUN
        assert data["totals"]["cache_hits"] == without[1]["cache_hits_per_step"] * STEPS_OF_A_RUN
        # The network that measures memory is another.
        assert [row["parent"] for row in data["modules"]].count(None) == 1
        told = f"The report of O1 float16 is in {Path('r.html').absolute()}; a browser shows it."
        assert any(line.startswith(told) for line in err.splitlines())

    @pytest.mark.parametrize(
        ("levels", "run"),
        [
            (["O0", "O1", "O2"], SETTINGS["O1:float16"]),
            (["O4", "O1:bfloat16", "O2:float16"], SETTINGS["O2:float16"]),
            (["O0", "O5"], SETTINGS["O5:bfloat16"]),
            (["O0"], None),
        ],
    )
    def test_the_reported_run_is_the_first_in_float16_or_else_in_half(self, levels: list[str], run: Run | None) -> None:
        assert reported(Plan(levels).runs()) == run

    @pytest.mark.parametrize(
        ("arguments", "status", "told"),
        [
            (
                ["--opt-levels", "O0", "--report", "r.html"],
                1,
                "--opt-levels O0 has none. Type for example --opt-levels",
            ),
            (["--report", "r.txt"], 2, "'r.txt' does not end with .html or .htm. Type for example report.html"),
            (["--report", "none/r.html"], 2, "there is no folder 'none'"),
        ],
    )
    def test_an_impossible_report_is_told_before_any_training(
        self, arguments: list[str], status: int, told: str
    ) -> None:
        ended = ampatch("demo", *arguments)
        assert ended.status == status
        assert told in ended.err

    @pytest.mark.slow
    def test_a_report_that_cannot_be_written_leaves_the_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write_text = json_files.write_text

        def full(text: str, path: Path) -> None:
            if path.suffix == ".html":
                raise OSError("No space left on device")
            write_text(text, path)

        monkeypatch.setattr(json_files, "write_text", full)
        status, out, err = ampatch("demo", *CHOSEN, "--json", "results.json", "--report", "r.html")
        assert status == 1
        assert "O4" in out
        assert "The report could not be written: No space left on device" in err.splitlines()
        assert len(results()) == 3


class TestResumed:
    @pytest.mark.slow
    def test_a_report_of_a_part_of_a_run_tells_its_steps(
        self, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        press_ctrl_c(monkeypatch, STEPS_OF_A_RUN + 3)
        assert ampatch("demo", *CHOSEN, "--report", "r.html").status == 130
        assert not Path("r.html").exists()
        status, _, err = ampatch("demo", "--resume", CHECKPOINT)
        (data,) = shown
        told = "The report covers steps 4 to 10 of O1 float16: the demo was interrupted before, and resumed."
        assert status == 0
        assert told in err.splitlines()
        assert data["notes"][-1] == told
        assert told in Path("r.html").read_text(encoding="utf-8")
        assert len(data["steps"]) == STEPS_OF_A_RUN - 3

    @pytest.mark.slow
    def test_a_run_that_has_not_begun_is_reported_as_a_whole(
        self, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        press_ctrl_c(monkeypatch, 3)
        assert ampatch("demo", *CHOSEN).status == 130
        assert ampatch("demo", "--resume", CHECKPOINT, "--report", "r.html").status == 0
        (data,) = shown
        assert len(data["steps"]) == STEPS_OF_A_RUN
        assert not [note for note in data["notes"] if "covers steps" in note]

    @pytest.mark.slow
    def test_a_run_that_has_ended_is_not_reported_again(
        self, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        press_ctrl_c(monkeypatch, 2 * STEPS_OF_A_RUN + 3)
        assert ampatch("demo", *CHOSEN, "--report", "r.html").status == 130
        written = Path("r.html").read_bytes()
        status, _, err = ampatch("demo", "--resume", CHECKPOINT, "--report", "other.html")
        assert status == 1
        assert "--report is of O1 float16, which had ended before the demo was interrupted" in err
        assert ampatch("demo", "--resume", CHECKPOINT).status == 0
        assert Path("r.html").read_bytes() == written
        assert len(shown) == 1

    def test_a_missing_folder_for_the_report_is_told_before_any_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("pages").mkdir()
        press_ctrl_c(monkeypatch, 3)
        assert ampatch("demo", *CHOSEN, "--report", "pages/r.html").status == 130
        Path("pages").rmdir()
        status, _, err = ampatch("demo", "--resume", CHECKPOINT)
        assert status == 1
        assert "the demo began with --report: " in err
