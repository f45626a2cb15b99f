"""Measures the time and the peak memory of steps of copies of a model, at several opt levels side by side.

Must never touch the user's model, nor leave a session.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ampatch.diagnostics.peak_memory import peak_allocated
from ampatch.diagnostics.preflight_steps import OpenedCopy, Setup, noting_warnings, opened_copy, text_of
from ampatch.diagnostics.preflight_subject import RandomState, Subject

_ROUNDS = 3


@dataclass(slots=True)
class Measured:
    """What steps with one setup cost.

    Attributes:
        seconds: the time of each step.
        peak_bytes: peak memory of a step, with the weights; None if unknown.
        notes: why something could not be measured.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def milliseconds(self) -> float | None:
        """The median time of a step."""
        return statistics.median(self.seconds) * 1e3 if self.seconds else None


def measured(subject: Subject, setups: Sequence[Setup | None], state: RandomState) -> list[Measured]:
    """Measures steps: forward pass, loss, backward pass, and the step of SGD.

    Goes through all setups three times, so that noise of the machine hits all alike. Each time a step to warm up comes
    first. A setup that is None gets no numbers.
    """
    found = [Measured() for _ in setups]
    for last in [False] * _ROUNDS + [True]:
        for setup, numbers in zip(setups, found, strict=True):
            if setup is None or numbers.notes:
                continue
            try:
                with noting_warnings([]):  # those of amp are in the verdict's notes
                    if last:
                        numbers.peak_bytes = _peak_bytes(subject, setup, state)
                    else:
                        numbers.seconds.append(_seconds(subject, setup, state))
            except Exception as error:  # noqa: BLE001 - a report without a number is better than none
                numbers.notes.append(f"not measured further: {text_of(error)}")
    return found


def _seconds(subject: Subject, setup: Setup, state: RandomState) -> float:
    """Returns the time of a step, after one to warm up."""
    gpus = {each.device for each in subject.model.parameters() if each.is_cuda}
    with opened_copy(subject, setup) as opened:
        step = _warmed_up(opened, subject, state)
        for device in gpus:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        step()
        for device in gpus:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun


def _warmed_up(opened: OpenedCopy, subject: Subject, state: RandomState) -> Callable[[], object]:
    """Runs a step of a copy, and returns a function that runs another one, on the same random numbers."""
    state.restore()
    opened.whole_step(subject, subject.arguments())
    opened.optimizer.zero_grad(set_to_none=True)
    arguments = subject.arguments()
    state.restore()
    return functools.partial(opened.whole_step, subject, arguments)


def _peak_bytes(subject: Subject, setup: Setup, state: RandomState) -> int:
    """Returns the peak memory of a step, with the weights of the copy, and without the user's own model."""
    gpu = next((each.device for each in subject.model.parameters() if each.is_cuda), None)
    before = 0 if gpu is None else torch.cuda.memory_allocated(gpu)
    with contextlib.ExitStack() as stack:

        def prepare() -> Callable[[], object]:
            return _warmed_up(stack.enter_context(opened_copy(subject, setup)), subject, state)

        if gpu is None:
            return peak_allocated(prepare)
        step = prepare()
        torch.cuda.reset_peak_memory_stats(gpu)
        step()
        return torch.cuda.max_memory_allocated(gpu) - before
