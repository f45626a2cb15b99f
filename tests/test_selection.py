"""Which implementation a process uses, and that a choice nobody made is told once."""

from __future__ import annotations

import logging
import pickle

import pytest

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


def test_what_is_not_built_is_told_in_another_process_too() -> None:
    error = pickle.loads(pickle.dumps(NotBuiltError("Type `ampatch build`.", "there is no library")))
    assert (str(error), error.why) == ("Type `ampatch build`.", "there is no library")
