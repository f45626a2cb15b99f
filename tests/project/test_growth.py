"""Tests benchmarks/growth.py: what it computes from its measurements."""

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


@pytest.mark.parametrize("power", [0, 1, 1.5, 2])
def test_exponent_of_a_power_is_the_power(growth, power):
    assert growth.exponent((n, 3 * n**power) for n in (1, 10, 100)) == pytest.approx(power)


def test_negative_costs_have_no_exponent(growth):
    assert growth.exponent([(1, 1e-6), (10, -1e-6)]) is None


def test_last_exponent_shows_growth_beside_a_fixed_cost(growth):
    rows = [{"count": n, "seconds": 1000 + n**2} for n in (1, 10, 100, 1000)]
    found = growth.exponents(rows)
    assert found["exponent"] < 1.5 < found["last_exponent"]


@pytest.mark.slow
def test_plot_has_every_series_and_the_same_bytes_each_time(growth, tmp_path):
    files = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for file in files:
        growth.plot(result(growth), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    text = files[0].read_text(encoding="utf-8")
    assert all(series.title in text for series in growth.SERIES.values())
    assert text.count("exponent 2.00") == len(growth.SERIES) * len(growth.LEVELS)


@pytest.mark.slow
@pytest.mark.beyond_ci
def test_every_series_is_measured_at_each_level(growth, tmp_path):
    file = tmp_path / "growth.json"
    command = [sys.executable, str(BENCHMARKS / "growth.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads(file.read_text(encoding="utf-8"))["series"]
    assert list(found) == list(growth.SERIES)
    for name, series in growth.SERIES.items():
        for level in growth.LEVELS:
            assert [point["count"] for point in found[name][level]["points"]] == list(series.counts[::2])
