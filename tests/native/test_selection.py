"""Which implementation a process uses, and that a choice nobody made is told once."""

from __future__ import annotations

import logging
import re

import pytest

from ampatch.errors import KernelError
from ampatch.native.selection import Chosen, NotBuiltError, Selection


def selection(compiled: str | None) -> Selection[str]:
    choices = ("auto", "compiled", "plain")
    return Selection("AMPATCH_PROBE", choices, "plain", lambda: Chosen(compiled, "it suits"), "Probes are read by %s.")


def test_that_nothing_compiled_is_there_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampatch")
    probes = selection(None)
    assert probes.current() is probes.current()
    assert caplog.messages == ["Probes are read by it suits."]


def test_what_is_compiled_or_was_asked_for_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampatch")
    selection("a library").current()
    asked_for = selection(None)
    asked_for.select("auto")
    asked_for.current()
    assert caplog.messages == []


def test_what_is_not_built_is_an_error_only_where_it_is_asked_for() -> None:
    def load() -> Chosen[str]:
        raise NotBuiltError("there is no library in /cache")

    choices = ("auto", "compiled", "plain")
    probes = Selection("AMPATCH_PROBE", choices, "plain probes", load, "Probes are read by %s.")
    why = "plain probes, as there is no library in /cache. `ampatch build` compiles it"
    assert probes.select("auto") == Chosen(None, why)
    message = (
        "AMPATCH_PROBE=compiled asks for compiled code, and there is no library in /cache. Type `ampatch build`; or "
        "leave the variable out, to go on with plain probes."
    )
    with pytest.raises(KernelError, match=re.escape(message)):
        probes.select("compiled")
