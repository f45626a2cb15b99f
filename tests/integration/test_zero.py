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


def zero(parameters: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit is deprecated

    return ZeroRedundancyOptimizer(parameters, kind, **options)


def train(half: torch.dtype, device: str, level: str, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    if sharded:
        optimizer = zero(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, **SCALE)
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
    weights = [p.detach().cpu() for p in amp.master_params(optimizer)]
    scale = amp.get_loss_scale()
    amp.deinitialize()
    return {"weights": weights, "skipped": skipped, "scale": scale}


def both(half: torch.dtype, device: str, level: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(half, device, level, sharded=True), train(half, device, level, sharded=False)


@pytest.mark.slow_on_cpu
@ON_DEVICES
@HALVES
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_trains_as_the_optimizer_inside_it(two, level, half, device):
    for sharded, whole in two.run(both, half, device, level):
        assert_same_state(sharded, whole)
        assert [step for step, was_skipped in enumerate(sharded["skipped"]) if was_skipped] == list(OVERFLOWS)


def resumed(bucketed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    options = {"parameters_as_bucket_view": bucketed}
    ends = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        optimizer = zero(model.parameters(), torch.optim.Adam, lr=0.01, **options)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype="bfloat16", verbosity=0)
        for step in range(4):
            if step == 2 and resumes:
                optimizer.consolidate_state_dict(to=0)
                saved = [[model.state_dict(), optimizer.state_dict()]] if dist.get_rank() == 0 else [None]
                dist.broadcast_object_list(saved, src=0)
                model.load_state_dict(saved[0][0])
                optimizer.load_state_dict(saved[0][1])
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(2, 8)).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        ends.append([each.detach().clone() for each in amp.master_params(optimizer)])
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        amp.deinitialize()
    assert_same_state(*ends)


@pytest.mark.parametrize("bucketed", [False, True])
def test_resumes_with_masters(two, bucketed):
    two.run(resumed, bucketed)
