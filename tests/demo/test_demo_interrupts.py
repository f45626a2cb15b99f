"""Ctrl-C is noted, and raises nothing, while it is held back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ampatch.demo import interrupts


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """As in a program that was started at a terminal, whoever started these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_it_is_noted_however_often() -> None:
    with interrupts.held_back() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested


def test_afterwards_it_raises_again() -> None:
    with pytest.raises(RuntimeError), interrupts.held_back():
        raise RuntimeError

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "somebody_elses"])
def test_another_handler_is_left_alone(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts.held_back() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)

    assert not interrupt.requested


def test_in_another_thread_there_is_nothing_to_hold_back() -> None:
    found = []

    def elsewhere() -> None:
        with interrupts.held_back() as interrupt:
            found.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()

    assert found == [(False, signal.default_int_handler)]
