"""Which implementation a process uses, and that a choice made at first use is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from ampatch.errors import KernelError, OptionError
from ampatch.native.selection import Chosen, NotBuiltError, Selection


def selection(load: Callable[[], Chosen[str]]) -> Selection[str]:
    return Selection("AMPATCH_PROBE", ("auto", "compiled", "plain"), "plain probes", load, "Probes are read by %s.")


def none_built() -> Chosen[str]:
    raise NotBuiltError("there is no library in /cache")


def not_loaded() -> Chosen[str]:
    raise KernelError("the library is truncated")


def test_a_compiled_choice_and_one_that_was_asked_for_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampatch")
    selection(lambda: Chosen("a library", "it suits")).current()
    asked_for = selection(none_built)
    asked_for.select("auto")
    asked_for.current()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("load", "why", "message"),
    [
        (
            none_built,
            "there is no library in /cache. `ampatch build` compiles it",
            (
                "AMPATCH_PROBE=compiled asks for compiled code, and there is no library in /cache. "
                "Type `ampatch build`; or leave the variable out, to go on with plain probes."
            ),
        ),
        (not_loaded, "the library is truncated", "the library is truncated"),
    ],
)
def test_a_missing_library_is_an_error_only_if_it_is_asked_for(
    load: Callable[[], Chosen[str]], why: str, message: str
) -> None:
    probes = selection(load)
    assert probes.select("plain").why == "plain probes, as AMPATCH_PROBE=plain asks for"
    assert probes.select("auto") == Chosen(None, f"plain probes, as {why}")
    with pytest.raises(KernelError) as raised:
        probes.select("compiled")
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("value", "advice"), [("compield", " Did you mean 'compiled'?"), ("Plain", " Did you mean 'plain'?"), ("", "")]
)
def test_an_invalid_choice_is_an_error_with_the_nearest(
    value: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPATCH_PROBE", value)
    with pytest.raises(OptionError) as raised:
        selection(none_built).current()
    assert str(raised.value) == f"AMPATCH_PROBE is {value!r}; expected auto, compiled, plain.{advice}"
