"""One training run at one opt level and half type, through the public API and nothing else.

This is the loop that a user would write, so it must never reach behind `ampatch.amp`. It leaves torch as it found it,
whatever happens in between; it prints nothing, and tells a callback how it gets on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.demo.digits import Digits
from ampatch.demo.network import DigitsNetwork

BATCH_SIZE = 64
# The peak of the one-cycle schedule; found by trying, as was the number of epochs that `ampatch demo` takes by default.
LEARNING_RATE = 3e-3


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to; the keys of the JSON report, in the order of the table.

    Attributes:
        opt_level: the opt level.
        half_dtype: the half type's name, without "torch."; None where the level uses none.
        test_accuracy: share of the test digits that were recognised, 0 to 1.
        final_loss: mean training loss over the last epoch.
        ms_per_step: median time of a training step, in milliseconds.
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
    casts_per_step: float
    cache_hits_per_step: float
    skipped_steps: int
    loss_scale: float


def steps_per_epoch(digits: Digits) -> int:
    """How many batches an epoch over ``digits`` has; the last one may be smaller."""
    return -(-len(digits) // BATCH_SIZE)


def run(
    train: Digits,
    test: Digits,
    opt_level: str,
    half_dtype: torch.dtype | None,
    *,
    epochs: int,
    seed: int,
    on_step: Callable[[float], None] = lambda _loss: None,
) -> Result:
    """Trains a new network and tests it.

    Args:
        train: the digits to train on.
        test: the digits to test on.
        opt_level: handed to ``amp.initialize``.
        half_dtype: handed to ``amp.initialize``; None where the level uses none.
        epochs: how often every digit of ``train`` is seen, at least 1.
        seed: decides the first weights and the order of the digits.
        on_step: called after every step with its loss.

    Raises:
        AmpError: ``amp.initialize`` refuses the level or the half type.
    """
    model = _new_network(seed)
    # Every step has the same learning rate at every level, so that the runs differ in nothing but their precision.
    steps = epochs * steps_per_epoch(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, verbosity=0)
    try:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        generator = torch.Generator().manual_seed(seed)
        losses, seconds = [], []
        model.train()
        for _epoch in range(epochs):
            for batch in torch.randperm(len(train), generator=generator).split(BATCH_SIZE):
                images, labels = train.images[batch], train.labels[batch]
                started = time.perf_counter()
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                seconds.append(time.perf_counter() - started)
                scheduler.step()
                losses.append(loss.item())
                on_step(losses[-1])
        # Read before testing, whose casts are not those of a training step.
        counts = amp.cast_counts()
        return Result(
            opt_level=opt_level,
            half_dtype=None if half_dtype is None else str(half_dtype).removeprefix("torch."),
            test_accuracy=accuracy(model, test),
            final_loss=fmean(losses[-steps_per_epoch(train) :]),
            ms_per_step=1000 * median(seconds),
            casts_per_step=counts.casts / steps,
            cache_hits_per_step=counts.cache_hits / steps,
            skipped_steps=amp.skipped_steps(optimizer),
            loss_scale=amp.get_loss_scale(),
        )
    finally:
        amp.deinitialize()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of ``digits`` that the model recognises, 0 to 1. Leaves the model in eval mode."""
    model.eval()
    scores: Tensor = model(digits.images)
    recognised = (scores.argmax(dim=1) == digits.labels).sum().item()
    return recognised / len(digits)


def _new_network(seed: int) -> DigitsNetwork:
    """A network whose first weights depend on ``seed`` alone; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitsNetwork()
