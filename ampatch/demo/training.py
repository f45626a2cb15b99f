"""One training run at one opt level and half type, through the public API only.

This is the loop that a user would write, so it must never bypass `ampatch.amp`. It must always leave torch as it found
it, and must not print: it calls a callback after every step. The callback can get the state of the run, and a run that
starts from that state reaches the same result: on the CPU bit for bit.
"""

from __future__ import annotations

import time
import timeit
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.demo.digits import Digits
from ampatch.demo.network import DigitsNetwork
from ampatch.diagnostics.peak_memory import peak_allocated

# Gives 45 steps per epoch. With half as many, one epoch was too short for batch norm's running statistics. The network
# then recognised 80% of the test digits with the statistics of their batch, but 10% (chance) with the running ones.
BATCH_SIZE = 32
# The peak of the one-cycle schedule; found by trial, as was the default number of epochs of `ampatch demo`.
LEARNING_RATE = 3e-3
# AdamW's default of 1e-8 is zero in float16. At O3 the optimizer computes in float16, and would divide by zero.
EPSILON = 1e-4
# After these steps, gradients and optimizer state exist, even if the first steps overflow and are skipped.
_STEPS_UNTIL_MEASURED = 3

# State to resume a run from: plain numbers, lists, dicts and tensors, for `torch.load(weights_only=True)`.
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a run; the fields are the keys of the JSON report, in the order of the table.

    Attributes:
        opt_level: opt level.
        half_dtype: half type's name, without "torch."; None if the level uses none.
        test_accuracy: share of the test digits that the network recognised, 0 to 1.
        final_loss: mean training loss over the last epoch.
        ms_per_step: median time of a training step, in milliseconds.
        peak_memory_mib: largest memory that torch has allocated for tensors at any moment of a training step, in MiB.
            Counts the batch, weights and their half or float32 copies, gradients, the optimizer's state, tensors saved
            for the backward pass, and temporary memory of operations. Excludes libraries, Python and the other digits.
        casts_per_step: mean number of tensors cast to another dtype in a training step.
        cache_hits_per_step: mean number of casts that the weight cache saved in a training step.
        skipped_steps: number of optimizer steps skipped after an overflow.
        loss_scale: loss scale at the end.
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
    """Returns the number of batches in an epoch over ``digits``; the last one might be smaller."""
    return -(-len(digits) // BATCH_SIZE)


def steps_done(state: State) -> int:
    """Returns the number of steps that a run has done."""
    return len(state["losses"])


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
    recording: AbstractContextManager[object] | None = None,
) -> Result:
    """Trains a new network and tests it.

    Args:
        train: training set, on the device to train on.
        test: test set, on the same device.
        opt_level: argument of ``amp.initialize``.
        half_dtype: argument of ``amp.initialize``; None if the level uses none.
        epochs: number of epochs over ``train``, at least 1.
        seed: seed of the initial weights and of the order of the digits.
        on_step: callback after every step. Its arguments are the step's loss and a function that returns the state of
            the run. That state refers to the run's own tensors: save or copy them before the next step changes them.
        resume_from: state of a run with the same arguments, to resume from.
        recording: what is entered around the training, without the measurement of memory before it and the test.

    Raises:
        AmpError: ``amp.initialize`` does not accept the level or the half type.
    """
    peak_memory_mib = peak_memory(train, opt_level, half_dtype, seed=seed) / 2**20
    with ExitStack() as recorded:
        if recording is not None:
            recorded.enter_context(recording)
        model, optimizer = _set_up(opt_level, half_dtype, seed, train.images.device)
        try:
            # A step has the same learning rate at every level, so that the runs differ in precision only.
            steps = epochs * steps_per_epoch(train)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "amp": amp}
            losses: list[float] = []
            seconds: list[float] = []
            counted = Counter[str]()
            if resume_from is not None:
                for name, part in parts.items():
                    part.load_state_dict(resume_from["parts"][name])
                losses, seconds = list(resume_from["losses"]), list(resume_from["seconds"])
                counted = Counter(resume_from["counts"])

            def state() -> State:
                state_dicts = {name: part.state_dict() for name, part in parts.items()}
                counts = dict(counted + _counts(optimizer))
                return {"losses": losses, "seconds": seconds, "counts": counts, "parts": state_dicts}

            model.train()
            for batch in _batches(len(train), epochs, seed)[len(losses) :]:
                batch_of_digits = train[batch]
                started = time.perf_counter()
                losses.append(_step(model, optimizer, batch_of_digits).item())  # waits for a GPU
                seconds.append(time.perf_counter() - started)
                scheduler.step()
                on_step(losses[-1], state)
            # Must be read before the test, whose casts do not count.
            counts = counted + _counts(optimizer)
            recorded.close()
            return Result(
                opt_level=opt_level,
                half_dtype=None if half_dtype is None else str(half_dtype).removeprefix("torch."),
                test_accuracy=accuracy(model, test),
                final_loss=fmean(losses[-steps_per_epoch(train) :]),
                ms_per_step=1000 * median(seconds),
                peak_memory_mib=peak_memory_mib,
                casts_per_step=counts["casts"] / steps,
                cache_hits_per_step=counts["cache_hits"] / steps,
                skipped_steps=counts["skipped_steps"],
                loss_scale=amp.get_loss_scale(),
            )
        finally:
            amp.deinitialize()


def peak_memory(digits: Digits, opt_level: str, half_dtype: torch.dtype | None, *, seed: int) -> int:
    """Returns the largest number of bytes allocated at any moment of a training step, its batch included.

    Measures a separate network, so that no other run is affected. Gradients and optimizer state exist before the
    measured step, as before every step but the first.

    Args:
        digits: digits whose first batch the step uses.
        opt_level: argument of ``amp.initialize``.
        half_dtype: argument of ``amp.initialize``; None if the level uses none.
        seed: seed of the weights.
    """

    def prepare() -> Callable[[], Tensor]:
        step = _first_step(digits, opt_level, half_dtype, seed)
        for _ in range(_STEPS_UNTIL_MEASURED):
            step()
        return step

    try:
        if digits.images.is_cuda:
            prepare()  # CUDA's libraries allocate memory at their first use, and keep it
            amp.deinitialize()
        return peak_allocated(prepare)
    finally:
        amp.deinitialize()


def seconds_per_step(digits: Digits, opt_level: str, half_dtype: torch.dtype | None, *, seed: int) -> float:
    """Returns the time of a training step in seconds, measured on a separate network.

    Args:
        digits: digits whose first batch the steps use.
        opt_level: argument of ``amp.initialize``.
        half_dtype: argument of ``amp.initialize``; None if the level uses none.
        seed: seed of the weights.
    """
    step = _first_step(digits, opt_level, half_dtype, seed)
    try:
        # The minimum: the first step includes setup, and other processes can slow down any step.
        return min(timeit.repeat(lambda: step().item(), number=1, repeat=_STEPS_UNTIL_MEASURED))
    finally:
        amp.deinitialize()


def _first_step(digits: Digits, opt_level: str, half_dtype: torch.dtype | None, seed: int) -> Callable[[], Tensor]:
    """Returns a function that trains a network of its own on the first batch; it takes a step, and returns the loss."""
    model, optimizer = _set_up(opt_level, half_dtype, seed, digits.images.device)
    return partial(_step, model, optimizer, digits[torch.arange(min(BATCH_SIZE, len(digits)))])


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Returns the share of ``digits`` that the model recognises, 0 to 1. Puts the model into eval mode."""
    model.eval()
    scores: Tensor = model(digits.images)
    recognised = (scores.argmax(dim=1) == digits.labels).sum().item()
    return recognised / len(digits)


def _set_up(
    opt_level: str, half_dtype: torch.dtype | None, seed: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a network and its optimizer from amp.initialize; the initial weights depend on ``seed`` only."""
    with torch.random.fork_rng(devices=[]):  # keep the caller's random number state
        torch.manual_seed(seed)
        model = DigitsNetwork().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, verbosity=0)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits) -> Tensor:
    """Runs one training step, and returns its loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(digits.images), digits.labels)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss


def _counts(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Returns amp's counts of casts, cache hits and skipped steps since amp.initialize."""
    counts = amp.cast_counts()
    return Counter(casts=counts.casts, cache_hits=counts.cache_hits, skipped_steps=amp.skipped_steps(optimizer))


def _batches(count: int, epochs: int, seed: int) -> list[Tensor]:
    """Returns the numbers of the digits in each batch of a run; a run that resumes has the same ones."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return [batch for order in orders for batch in order.split(BATCH_SIZE)]
