"""Gradients of a `DistributedDataParallel` that no synchronised backward has reduced: DDP reduces them later."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import HALF_DTYPES, dtype_name
from round_numbers import SCALE
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}

Scaled = Any  # of the signature of amp.scale_loss


def unscaled(loss: Tensor, _: object) -> contextlib.AbstractContextManager[Tensor]:
    return contextlib.nullcontext(loss)


def batches(count: int) -> list[Tensor]:
    """Those of this process: ranks have different ones."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def by_no_sync(replica: Any, _: Any, batch: Tensor, __: Scaled) -> None:
    with replica.no_sync():
        loss_of(replica, batch).backward()


def by_autograd_grad(replica: Any, _: Any, batch: Tensor, __: Scaled) -> None:
    parameters = list(replica.parameters())
    for parameter, grad in zip(
        parameters, torch.autograd.grad(loss_of(replica.module, batch), parameters), strict=True
    ):
        parameter.grad = grad.clone()


def by_the_module(replica: Any, _: Any, batch: Tensor, __: Scaled) -> None:
    loss_of(replica.module, batch).backward()


def by_a_block_of_the_module(replica: Any, optimizer: Any, batch: Tensor, scale_loss: Scaled) -> None:
    with scale_loss(loss_of(replica.module, batch), optimizer) as loss:
        loss.backward()


WAYS = {
    "no_sync": by_no_sync,
    "autograd.grad": by_autograd_grad,
    "module": by_the_module,
    "block of the module": by_a_block_of_the_module,
}


def trained(level: str | None, half: torch.dtype, way: str, as_view: bool) -> list[list[float]]:
    """The weights after steps that each begin with gradients that are not reduced; with plain torch without a level."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scale_loss: Scaled = unscaled
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, half_dtype=half, **SCALE)
        scale_loss = amp.scale_loss
    replica = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    own = iter(batches(6))
    for begins in (False, True, True):
        optimizer.zero_grad()
        if begins:
            WAYS[way](replica, optimizer, next(own), scale_loss)
        with scale_loss(loss_of(replica, next(own)), optimizer) as loss:
            loss.backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.state_dict().values()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.covering(1)
@HALVES
@LEVELS
def test_are_reduced_with_the_next_pass(two: Workers, level, half, way, as_view):
    wanted, other = two.run(trained, None, half, way, as_view)
    assert wanted == other
    first, second = two.run(trained, level, half, way, as_view)
    assert first == second
    for found, expected in zip(first, wanted, strict=True):
        assert found == pytest.approx(expected, rel=0, abs=TOLERANCES[half])


class Beside(nn.Module):
    """Two layers, of which DDP is to know one only."""

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
            with amp.scale_loss(loss_of(replica.module, batch) * factor, optimizer) as loss:
                loss.backward()
            with amp.scale_loss(loss_of(replica, batch), optimizer) as loss:
                loss.backward()
        else:
            typed = batch.to(model.beside.weight.dtype)  # parts of a model do not cast what they get
            loss = loss_of(replica, typed) + loss_of(model.beside, typed) * factor
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        found += [amp.step_was_skipped(optimizer), amp.get_loss_scale()]
    return found


@pytest.mark.parametrize("what", ["module", "ignored", "unwrapped"])
@HALVES
@LEVELS
@pytest.mark.covering(1)
def test_that_overflow_on_one_rank_skip_the_step_of_all(two: Workers, level, half, what):
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
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    with amp.scale_loss(loss_of(model, second), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return [amp.step_was_skipped(optimizer), amp.get_loss_scale()]


@pytest.mark.parametrize(("begins_beside_it", "expected"), [(False, [False, 2.0**10]), (True, [True, 2.0**9])])
def test_of_a_wrapper_inside_a_model_are_found(two: Workers, begins_beside_it, expected):
    assert two.run(with_a_wrapper_inside, begins_beside_it) == [expected] * 2


def stepped_after_a_block_of_the_module() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=torch.float16, **SCALE)
    replica = DistributedDataParallel(model)
    by_a_block_of_the_module(replica, optimizer, batches(1)[0], amp.scale_loss)
    with pytest.raises(amp.UsageError, match=r"amp\.unscale_\(optimizer\)"):
        optimizer.step()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    amp.unscale_(optimizer)
    optimizer.step()


def test_that_nothing_reduces_are_not_stepped_with(two: Workers):
    two.run(stepped_after_a_block_of_the_module)
