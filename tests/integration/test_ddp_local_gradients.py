"""Gradients of a `DistributedDataParallel` that no synchronised backward has reduced: DDP reduces them later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizers import backward
from round_numbers import SCALE
from small_nets import EACH_HALF, EACH_LEVEL
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp


def batches(count: int) -> list[Tensor]:
    """Those of this process: ranks have different ones."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


class Beside(nn.Module):
    """Two layers, of which DDP knows one only."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(4, 2)
        self.beside = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.known(x) + self.beside(x)


def overflowing(level: str, half: torch.dtype, what: str) -> list[object]:
    """Whether each step was skipped, and the scales, where rank 1 alone overflows, and DDP does not reduce that."""
    torch.manual_seed(0)
    model = Beside()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, **SCALE)
    if what == "ignored":
        ignored = [name for name, _ in model.named_parameters() if name.startswith("beside")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    replica: Any = DistributedDataParallel(model if what != "unwrapped" else model.known)
    found: list[object] = []
    for step, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        if what == "module":
            backward(loss_of(replica.module, batch) * factor, optimizer)
            backward(loss_of(replica, batch), optimizer)
        else:
            typed = batch.to(model.beside.weight.dtype)  # parts of a model do not cast what they get
            backward(loss_of(replica, typed) + loss_of(model.beside, typed) * factor, optimizer)
        optimizer.step()
        found += [amp.step_was_skipped(optimizer), amp.get_loss_scale()]
    return found


@pytest.mark.parametrize("what", ["module", "ignored", "unwrapped"])
@EACH_HALF
@EACH_LEVEL
@pytest.mark.covering(1)
def test_gradients_that_overflow_on_one_rank_skip_the_step_of_all(two: Workers, level, half, what):
    first, second = two.run(overflowing, level, half, what)
    assert first == second
    assert first[::2] == [False, True, False]


def with_a_wrapper_inside(begins_beside_it: bool) -> list[object]:
    """A step of a model that has one part in a wrapper. What comes to that part beside it overflows in rank 1."""
    replica = DistributedDataParallel(nn.Linear(4, 2))
    model = nn.Sequential(replica, nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O1", half_dtype=torch.float16, **SCALE)
    first, second = batches(2)
    if begins_beside_it:
        loss = loss_of(replica.module, first) * (float("inf") if dist.get_rank() == 1 else 1)
        backward(loss, optimizer)
    backward(loss_of(model, second), optimizer)
    optimizer.step()
    with pytest.raises(amp.UsageError, match=r"under DistributedDataParallel.join\(\)"), replica.join():
        model(first)
    return [amp.step_was_skipped(optimizer), amp.get_loss_scale()]


@pytest.mark.parametrize(("begins_beside_it", "expected"), [(False, [False, 2.0**10]), (True, [True, 2.0**9])])
def test_gradients_of_a_wrapper_inside_a_model_overflow_on_all_ranks(two: Workers, begins_beside_it, expected):
    assert two.run(with_a_wrapper_inside, begins_beside_it) == [expected] * 2


def stepped_after_a_block_of_the_module() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=torch.float16, **SCALE)
    replica = DistributedDataParallel(model)
    backward(loss_of(replica.module, batches(1)[0]), optimizer)
    with pytest.raises(amp.UsageError, match=r"amp\.unscale_\(optimizer\)"):
        optimizer.step()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    amp.unscale_(optimizer)
    optimizer.step()


def test_a_step_with_gradients_that_nothing_reduces_raises(two: Workers):
    two.run(stepped_after_a_block_of_the_module)
