"""Gradients of a `DistributedDataParallel` that no synchronised backward has reduced: DDP reduces them later."""

from __future__ import annotations

import contextlib
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
    """Two layers, of which DDP knows one only; a pass may reach one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(4, 2)
        self.beside = nn.Linear(4, 2)

    def forward(self, x: Tensor, part: int | None = None) -> Tensor:
        if part is None:
            return self.known(x) + self.beside(x)
        return (self.known, self.beside)[part](x)


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


def reached_by_chance(level: str, half: torch.dtype, what: str) -> list[object]:
    """Whether steps were skipped, scales and weights, where under no_sync ranks reach different parameters.

    Args:
        level: the level.
        half: the half type.
        what: "a part in no wrapper": rank 0 reaches only the part that DDP does not know, which is in the same
            optimizer. "an optimizer for each part": DDP knows both parts, and each rank reaches one.
    """
    torch.manual_seed(0)
    model = Beside()
    has_each = what == "an optimizer for each part"
    owners = [model.known, model.beside] if has_each else [model]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in owners]
    amp.initialize(model, optimizers, opt_level=level, half_dtype=half, **SCALE)
    replica = DistributedDataParallel(model if has_each else model.known, find_unused_parameters=True)
    found: list[object] = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = (batch.to(model.known.weight.dtype) for batch in batches(2))
        with replica.no_sync():
            if has_each:
                loss = loss_of(lambda x: replica(x, part=dist.get_rank()), first)
            else:
                loss = loss_of(model.beside, first)
                if dist.get_rank() == 1:
                    loss = loss + loss_of(replica, first)
            backward(loss, optimizers)
        backward(loss_of(replica, second) + (0 if has_each else loss_of(model.beside, second)), optimizers)
        for optimizer in optimizers:
            optimizer.step()
        found += [*map(amp.step_was_skipped, optimizers), *amp.state_dict().values()]
    return [*found, [each.tolist() for each in [*amp.master_params(optimizers[0])][:2]]]


@pytest.mark.parametrize("what", ["a part in no wrapper", "an optimizer for each part"])
@EACH_HALF
@EACH_LEVEL
@pytest.mark.covering(1)
def test_ranks_that_reach_different_parameters_under_no_sync_agree(two: Workers, level, half, what):
    first, second = two.run(reached_by_chance, level, half, what)
    assert first == second


def judged_beside_an_accumulation(level: str, half: torch.dtype) -> list[object]:
    """As `overflowing`, but the part beside the wrapper has its own optimizer, and overflows under no_sync."""
    torch.manual_seed(0)
    model = Beside()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model.known, model.beside)]
    amp.initialize(model, optimizers, opt_level=level, half_dtype=half, **SCALE)
    replica = DistributedDataParallel(model.known)
    found: list[object] = []
    for step in range(3):
        for is_last, batch in enumerate(batches(2)):
            typed = batch.to(model.beside.weight.dtype)
            factor = float("inf") if step == 1 and not is_last and dist.get_rank() == 1 else 1.0
            with contextlib.nullcontext() if is_last else replica.no_sync():
                backward(loss_of(replica, typed) + loss_of(model.beside, typed) * factor, optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found += [*map(amp.step_was_skipped, optimizers), amp.get_loss_scale()]
    return [*found, [each.tolist() for each in [*amp.master_params(optimizers[0])][:2]]]


@EACH_HALF
@EACH_LEVEL
@pytest.mark.covering(1)
def test_an_overflow_beside_an_accumulation_moves_the_scale_of_all_ranks(two: Workers, level, half):
    first, second = two.run(judged_beside_an_accumulation, level, half)
    assert first == second
    assert first[:-1] == [False, False, 2.0**10, False, True, 2.0**9, False, False, 2.0**9]


def in_a_block_of_its_own(loss_id: int) -> list[object]:
    """Scales and wrapped weights where a part in no wrapper overflows on rank 1, in a block of its own."""
    torch.manual_seed(0)
    model = Beside()
    known, beside = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model.known, model.beside))
    amp.initialize(model, [known, beside], half_dtype=torch.float16, num_losses=2, **SCALE)
    replica = DistributedDataParallel(model.known)
    found: list[object] = []
    for step, batch in enumerate(batches(3)):
        with amp.scale_loss(
            loss_of(model.beside, batch) * (float("inf") if step == 1 == dist.get_rank() else 1.0), beside, loss_id
        ) as scaled_loss:
            scaled_loss.backward()
        backward(loss_of(replica, batch), known)
        for optimizer in (known, beside):
            optimizer.step()
            optimizer.zero_grad()
        found.append(amp.state_dict()["loss_scaler0"])
    return [*found, [each.tolist() for each in model.known.parameters()]]


def test_a_loss_scale_of_its_own_keeps_an_overflow_beside_the_wrapper_from_others(two: Workers):
    first, second = two.run(in_a_block_of_its_own, 1)
    assert first == second
