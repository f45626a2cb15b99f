"""What benchmarks/growth.py makes of its measurements; these are for people to judge."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("growth")


def result(growth: ModuleType) -> dict[str, Any]:
    """A result in which everything grows with the square of its number."""
    points = [{"count": count, "seconds": count**2 * 1e-6} for count in (1, 10, 100)]
    found = {"points": points, **growth.exponents(points)}
    return {"title": "", "series": {name: dict.fromkeys(growth.LEVELS, found) for name in growth.SERIES}}


class TestExponent:
    @pytest.mark.parametrize("power", [0, 1, 1.5, 2])
    def test_of_a_power_it_is_the_power(self, growth: ModuleType, power: float) -> None:
        assert growth.exponent((n, 3 * n**power) for n in (1, 10, 100)) == pytest.approx(power)

    def test_there_is_none_where_a_cost_drowns_in_noise(self, growth: ModuleType) -> None:
        assert growth.exponent([(1, 1e-6), (10, -1e-6)]) is None

    def test_the_last_two_points_tell_what_a_fixed_cost_hides(self, growth: ModuleType) -> None:
        rows = [{"count": n, "seconds": 1000 + n**2} for n in (1, 10, 100, 1000)]
        found = growth.exponents(rows)
        assert found["exponent"] < 1.5 < found["last_exponent"]


class TestPlot:
    @pytest.mark.slow
    def test_the_same_figures_give_the_same_bytes(self, growth: ModuleType, tmp_path: Path) -> None:
        files = [tmp_path / "first.svg", tmp_path / "second.svg"]
        for file in files:
            growth.plot(result(growth), file)
        assert files[0].read_bytes() == files[1].read_bytes()

    @pytest.mark.slow
    def test_it_has_a_title_for_everything_that_grows(self, growth: ModuleType, tmp_path: Path) -> None:
        growth.plot(result(growth), tmp_path / "plot.svg")
        text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
        assert all(series.title in text for series in growth.SERIES.values())
        assert text.count("exponent 2.00") == len(growth.SERIES) * len(growth.LEVELS)


@pytest.mark.slow
@pytest.mark.beyond_ci
class TestGrowth:
    def test_it_measures_everything_at_each_level(self, growth: ModuleType, tmp_path: Path) -> None:
        file = tmp_path / "growth.json"
        command = [sys.executable, str(BENCHMARKS / "growth.py"), "--quick", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

        found = json.loads(file.read_text(encoding="utf-8"))["series"]
        assert list(found) == list(growth.SERIES)
        for name, series in growth.SERIES.items():
            for level in growth.LEVELS:
                assert [point["count"] for point in found[name][level]["points"]] == list(series.counts[::2])
