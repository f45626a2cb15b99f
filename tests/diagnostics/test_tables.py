"""The text of the diagnostics' results is plain, wherever it is asked for."""

from __future__ import annotations

import pytest
from rich import console

from ampatch.diagnostics.tables import Column, printed, shown_number, table


@pytest.mark.parametrize("where", ["colours are forced", "a notebook"])
def test_text_is_the_same_everywhere(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["before", *table("Losses", [Column("step", str)], [1, 2])]
    usual = printed(parts)
    if where == "a notebook":
        monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    else:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert printed(parts) == usual
    assert "step" in usual


@pytest.mark.parametrize(("given", "told"), [(65536.0, "65,536"), (0.5, "0.5"), (float("inf"), "inf"), (2e-9, "2e-09")])
def test_whole_numbers_have_all_their_digits(given: float, told: str) -> None:
    assert shown_number(given) == told
