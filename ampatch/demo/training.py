"""One training run at one opt level and half type, through the public API and nothing else.

This is the loop that a user would write, so it must never reach behind `ampatch.amp`. It leaves torch as it found it,
whatever happens in between; it prints nothing, and tells a callback how it gets on. The callback may take the state of
the run after any step: a run that starts from there comes to the same result, bit for bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.demo.digits import Digits
from ampatch.demo.memory import peak_allocated
from ampatch.demo.network import DigitsNetwork

# Gives 45 steps an epoch. With half as many, one epoch was too short for batch norm's running statistics: the network
# recognised 80% of the test digits with the statistics of their batch, but 10%, as by chance, with the running ones.
BATCH_SIZE = 32
# The peak of the one-cycle schedule; found by trying, as was the number of epochs that `ampatch demo` takes by default.
LEARNING_RATE = 3e-3
# Adam's usual 1e-8 is zero in float16, in which the optimizer itself computes at O3: it would divide by zero.
EPSILON = 1e-4
# Until then there are gradients and the optimizer's state, even if the first steps overflow and are skipped.
_STEPS_UNTIL_MEASURED = 3

# What a run needs to go on: plain numbers, lists, dicts and tensors, for `torch.load(weights_only=True)`.
State = dict[str, Any]


class StateError(amp.AmpError, ValueError):
    """A state is of another network, optimizer or schedule than the run that is to go on from it."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to; the keys of the JSON report, in the order of the table.

    Attributes:
        opt_level: the opt level.
        half_dtype: the half type's name, without "torch."; None where the level uses none.
        test_accuracy: share of the test digits that were recognised, 0 to 1.
        final_loss: mean training loss over the last epoch.
        ms_per_step: median time of a training step, in milliseconds.
        peak_memory_mib: the most that torch has allocated for tensors at any moment of a training step, in MiB: the
            batch, weights with their half or float32 copies, gradients, the optimizer's state, what is kept for
            backward, and what operations take for a while. Not the libraries, Python, or the other digits.
        casts_per_step: tensors converted to another type in a training step, on average.
        cache_hits_per_step: conversions that the weight cache saved in a training step, on average.
        skipped_steps: optimizer steps left out because gradients overflowed.
        loss_scale: the loss scale at the end.
    """

    opt_level: str
    half_dtype: str | None
    test_accuracy: float
    final_loss: float
    ms_per_step: float
    peak_memory_mib: float
    casts_per_step: float
    cache_hits_per_step: float
    skipped_steps: int
    loss_scale: float


def steps_per_epoch(digits: Digits) -> int:
    """Returns how many batches an epoch over ``digits`` has; the last one may be smaller."""
    return -(-len(digits) // BATCH_SIZE)


def steps_done(state: State) -> int:
    """Returns how many steps a run has behind it."""
    return len(state["progress"]["losses"])


@dataclass(slots=True)
class _Progress:
    """How far a run has come, beside what its parts know of themselves.

    Attributes:
        epoch: epochs that are over.
        step: steps of the present one that are over.
        losses: the loss of every step.
        seconds: its time.
    """

    epoch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run(
    train: Digits,
    test: Digits,
    opt_level: str,
    half_dtype: torch.dtype | None,
    *,
    epochs: int,
    seed: int,
    on_step: Callable[[float, Callable[[], State]], None] = lambda _loss, _state: None,
    resume_from: State | None = None,
) -> Result:
    """Trains a new network and tests it.

    Args:
        train: the digits to train on.
        test: the digits to test on.
        opt_level: handed to ``amp.initialize``.
        half_dtype: handed to ``amp.initialize``; None where the level uses none.
        epochs: how often every digit of ``train`` is seen, at least 1.
        seed: decides the first weights and the order of the digits.
        on_step: called after every step with its loss, and with a function that returns the state of the run. The
            state's tensors are those of the run itself: save them, or copy them, before the next step changes them.
        resume_from: a state of a run with the same arguments, to go on from there.

    Raises:
        AmpError: ``amp.initialize`` refuses the level or the half type.
        StateError: ``resume_from`` is the state of another run than this.
    """
    peak_memory_mib = peak_memory(train, opt_level, half_dtype, seed=seed) / 2**20
    model, optimizer = _set_up(opt_level, half_dtype, seed)
    try:
        # Every step has the same learning rate at every level, so that the runs differ in nothing but their precision.
        steps = epochs * steps_per_epoch(train)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        generator = torch.Generator().manual_seed(seed)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "amp": amp}
        so_far, counted = _Progress(), Counter[str]()
        if resume_from is not None:
            so_far, counted = _restore(parts, generator, resume_from)

        def state() -> State:
            state_dicts = {name: part.state_dict() for name, part in parts.items()}
            counts = dict(counted + _counts(optimizer))
            return {"progress": asdict(so_far), "counts": counts, "generator": order_from, "parts": state_dicts}

        model.train()
        while so_far.epoch < epochs:
            # The order of a whole epoch is drawn here, and drawn again by a run that goes on in the middle of it.
            order_from = generator.get_state()
            for batch in torch.randperm(len(train), generator=generator).split(BATCH_SIZE)[so_far.step :]:
                batch_of_digits = train[batch]
                started = time.perf_counter()
                loss = _step(model, optimizer, batch_of_digits)
                so_far.seconds.append(time.perf_counter() - started)
                scheduler.step()
                so_far.losses.append(loss.item())
                so_far.step += 1
                on_step(so_far.losses[-1], state)
            so_far.epoch, so_far.step = so_far.epoch + 1, 0
        # Read before testing, whose casts are not those of a training step.
        counts = counted + _counts(optimizer)
        return Result(
            opt_level=opt_level,
            half_dtype=None if half_dtype is None else str(half_dtype).removeprefix("torch."),
            test_accuracy=accuracy(model, test),
            final_loss=fmean(so_far.losses[-steps_per_epoch(train) :]),
            ms_per_step=1000 * median(so_far.seconds),
            peak_memory_mib=peak_memory_mib,
            casts_per_step=counts["casts"] / steps,
            cache_hits_per_step=counts["cache_hits"] / steps,
            skipped_steps=counts["skipped_steps"],
            loss_scale=amp.get_loss_scale(),
        )
    finally:
        amp.deinitialize()


def peak_memory(digits: Digits, opt_level: str, half_dtype: torch.dtype | None, *, seed: int) -> int:
    """Returns the most bytes that are allocated at any moment of a training step, those of its batch included.

    It is measured on a network of its own, so that no other run is influenced: in a step that finds gradients and the
    optimizer's state there, as every step but the first does.

    Args:
        digits: the step takes the first batch of these.
        opt_level: handed to ``amp.initialize``.
        half_dtype: handed to ``amp.initialize``; None where the level uses none.
        seed: decides the weights.
    """

    def prepare() -> Callable[[], Tensor]:
        model, optimizer = _set_up(opt_level, half_dtype, seed)
        model.train()
        step = partial(_step, model, optimizer, digits[torch.arange(min(BATCH_SIZE, len(digits)))])
        for _ in range(_STEPS_UNTIL_MEASURED):
            step()
        return step

    try:
        return peak_allocated(prepare)
    finally:
        amp.deinitialize()


def seconds_per_step(digits: Digits, opt_level: str, half_dtype: torch.dtype | None, *, seed: int) -> float:
    """Returns the time of a training step in seconds, measured on a network of its own.

    Args:
        digits: the steps take the first batch of these.
        opt_level: handed to ``amp.initialize``.
        half_dtype: handed to ``amp.initialize``; None where the level uses none.
        seed: decides the weights.
    """
    model, optimizer = _set_up(opt_level, half_dtype, seed)
    try:
        model.train()
        batch = digits[torch.arange(min(BATCH_SIZE, len(digits)))]
        seconds = []
        for _ in range(_STEPS_UNTIL_MEASURED):
            started = time.perf_counter()
            _step(model, optimizer, batch)
            seconds.append(time.perf_counter() - started)
        # The first step sets up what later ones use again, and another process may hold up any of them.
        return min(seconds)
    finally:
        amp.deinitialize()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Returns the share of ``digits`` that the model recognises, 0 to 1. Leaves the model in eval mode."""
    model.eval()
    scores: Tensor = model(digits.images)
    recognised = (scores.argmax(dim=1) == digits.labels).sum().item()
    return recognised / len(digits)


def _set_up(opt_level: str, half_dtype: torch.dtype | None, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a network whose first weights depend on ``seed`` alone, and its optimizer, both in the hands of amp."""
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = DigitsNetwork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, verbosity=0)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits) -> Tensor:
    """Runs one training step; returns its loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(digits.images), digits.labels)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss


def _counts(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Returns what amp has counted since it was set up."""
    counts = amp.cast_counts()
    return Counter(casts=counts.casts, cache_hits=counts.cache_hits, skipped_steps=amp.skipped_steps(optimizer))


def _restore(parts: dict[str, Any], generator: torch.Generator, state: State) -> tuple[_Progress, Counter[str]]:
    """Puts the parts of a run where they were in another one; how far that had come, and what amp had counted.

    Raises:
        StateError: the state does not fit the parts.
    """
    try:
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        generator.set_state(state["generator"])
        return _Progress(**state["progress"]), Counter(state["counts"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            "found the saved state of another network, optimizer or schedule; expected that of this version's. Train "
            "from the start."
        ) from error
