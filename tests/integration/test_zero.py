"""`ZeroRedundancyOptimizer`: each process updates some of the parameters, and an overflow skips the step in all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import DEVICES, HALF_DTYPES, assert_same_state, dtype_name
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampatch import amp

HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)

SCALE = {"loss_scale": "dynamic", "init_scale": 2.0**10, "verbosity": 0}
OVERFLOWS = {2: 0, 5: 1}  # by step, the rank in which it happens


def zero(parameters: Any, kind: type[torch.optim.Optimizer], lr: float) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit is deprecated

    return ZeroRedundancyOptimizer(parameters, kind, lr=lr)


def train(half: torch.dtype, device: str, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    if sharded:
        optimizer = zero(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, half_dtype=half, **SCALE)
    replica = DistributedDataParallel(model)
    skipped = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = replica(torch.randn(4, 8, generator=generator).to(device)).float().square().mean()
        if OVERFLOWS.get(step) == dist.get_rank():
            loss = loss * float("nan")
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    weights = [p.detach().cpu() for p in model.parameters()]
    scale = amp.get_loss_scale()
    amp.deinitialize()
    return {"weights": weights, "skipped": skipped, "scale": scale}


def both(half: torch.dtype, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(half, device, sharded=True), train(half, device, sharded=False)


@pytest.mark.slow_on_cpu
@ON_DEVICES
@HALVES
def test_trains_as_the_optimizer_inside_it(two, half, device):
    for sharded, whole in two.run(both, half, device):
        assert_same_state(sharded, whole)
        assert [step for step, was_skipped in enumerate(sharded["skipped"]) if was_skipped] == list(OVERFLOWS)


def refused(level: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(amp.OptionError, match="an optimizer of its own, which would not update float32 masters"):
        amp.initialize(model, optimizer, opt_level=level)
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_are_refused(two, level):
    two.run(refused, level)
