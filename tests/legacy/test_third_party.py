"""Tests that published code written for Apex trains in half behind `ampatch run`."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from apart import installed
from launching import Run, carry_out, carry_out_all

DRIVERS = Path(__file__).parent / "third_party"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def third_party() -> Path:
    """The folder with what requirements.txt names, which stays there for the next time."""
    return installed("legacy", ["-r", str(REQUIREMENTS)], REQUIREMENTS.read_bytes())


def finding(installed: Path) -> tuple[tuple[str, str], ...]:
    """What is set in the environment of a Python that is to find what was installed there."""
    already = os.environ.get("PYTHONPATH")
    return (("PYTHONPATH", os.pathsep.join([str(installed), *([already] if already else [])])),)


def falls(losses: list[float]) -> bool:
    return statistics.mean(losses[-3:]) < 0.75 * statistics.mean(losses[:3])


class TestIgnite:
    def report(self, installed: Path, where: Path, *options: str, driver: str = "ignite_trainer") -> dict[str, Any]:
        by_ampatch = driver == "ignite_trainer"
        run = Run(DRIVERS / f"{driver}.py", options, where, environment=finding(installed), by_ampatch=by_ampatch)
        return json.loads(carry_out(run).stdout.splitlines()[-1])

    def test_ignite_trains_in_half_and_accumulates_gradients(self, third_party, tmp_path):
        once, at_o2 = (self.report(third_party, tmp_path, "--opt-level", level) for level in ("O1", "O2"))
        for report in (once, at_o2):
            assert falls(report["losses"])
            assert report["accuracy"] > 0.8
            assert report["dtypes"] == ["torch.float16"]
            assert report["amp"] == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 48}}
        twice = self.report(third_party, tmp_path, "--opt-level", "O1", "--accumulate", "2")
        assert falls(twice["losses"])
        assert twice["losses"][1] != once["losses"][1], "without a step in between"

    def test_ignite_trains_if_the_script_installs_ampatch_itself(self, third_party, tmp_path):
        report = self.report(third_party, tmp_path, driver="ignite_after_install")
        assert falls(report["losses"])
        assert report["dtypes"] == ["torch.float16"]


class TestTimm:
    def reports(self, installed: Path, where: Path, *options: list[str]) -> list[dict[str, Any]]:
        """What it reported with each of the lists of options."""
        driver, environment = DRIVERS / "timm_scaler.py", finding(installed)
        runs = [Run(driver, each, where / str(i), environment=environment) for i, each in enumerate(options)]
        return [json.loads(done.stdout.splitlines()[-1]) for done in carry_out_all(runs)]

    def test_apex_scaler_of_timm_trains_and_saves_and_loads_the_scale(self, third_party, tmp_path):
        for report in self.reports(third_party, tmp_path, ["--opt-level", "O1"], ["--opt-level", "O2"]):
            assert falls(report["losses"])
            assert report["saved"] == {"amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 24}}}
            assert report["loaded"] == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 24}}

    def test_timm_clips_the_masters(self, third_party, tmp_path):
        options = ["--opt-level", "O2", "--clip-mode", "agc", "--clip-grad", "1e-6"]  # it reads the parameters as well
        [report] = self.reports(third_party, tmp_path, options)
        # Clipped to almost nothing, it learns nothing: the seventeenth batch is the first once more.
        assert report["losses"][16] == pytest.approx(report["losses"][0], rel=1e-2)

    def test_timm_accumulates_gradients(self, third_party, tmp_path):
        [report] = self.reports(third_party, tmp_path, ["--grad-accum-steps", "4"])
        assert falls(report["losses"])


class TestTransformers:
    def report(self, installed: Path, where: Path, *options: str) -> dict[str, Any]:
        carry_out(Run(DRIVERS / "transformers_trainer.py", options, where, environment=finding(installed)))
        return json.loads((where / "report.json").read_text())

    @pytest.mark.parametrize(("level", "optimizer"), [("O1", "adamw_torch"), ("O2", "adamw_apex_fused")])
    def test_trainer_of_transformers_trains_in_half_and_resumes(self, level, optimizer, third_party, tmp_path):
        options = ["--opt-level", level, "--optim", optimizer]
        report = self.report(third_party, tmp_path, *options)
        losses = list(report["losses"].values())
        assert len(losses) == 12
        assert falls(losses)
        assert max(report["grad_norms"]) > 1.0, "something was clipped"
        assert report["dtypes"] == ["torch.float16"]
        assert report["amp"]["loss_scaler0"]["loss_scale"] == 65536.0
        assert ("ampatch" in report["optimizer"]) == (optimizer == "adamw_apex_fused")

        # It notes what it logged before, too, and then logs six steps of its own.
        resumed = self.report(third_party, tmp_path, *options, "--resume", "checkpoints/checkpoint-6")
        assert resumed["amp"]["loss_scaler0"]["unskipped"] == report["amp"]["loss_scaler0"]["unskipped"] / 2
        assert resumed["grad_norms"] == report["grad_norms"]
