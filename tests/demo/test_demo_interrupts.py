"""`interrupts.held_back` notes Ctrl-C instead of raising KeyboardInterrupt."""

from __future__ import annotations

import signal

import pytest
from helpers import together

from ampatch.demo import interrupts

pytest_plugins = ["demo_digits"]
pytestmark = pytest.mark.usefixtures("ctrl_c_raises")


def test_ctrl_c_is_noted_while_it_is_held_back() -> None:
    with interrupts.held_back() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested


def test_ctrl_c_raises_again_afterwards() -> None:
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


def test_in_another_thread_the_handler_stays() -> None:
    found = []

    def elsewhere() -> None:
        with interrupts.held_back() as interrupt:
            found.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    together([elsewhere])
    assert found == [(False, signal.default_int_handler)]
