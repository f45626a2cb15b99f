"""`ZeroRedundancyOptimizer`: each process updates some of the parameters, and an overflow skips the step in all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_state
from optimizers import backward
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL, net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampatch import MixedPrecision, amp

SCALE = {"loss_scale": "dynamic", "init_scale": 2.0**10, "verbosity": 0}
OVERFLOWS = {2: 0, 5: 1}  # by step, the rank in which it happens


def zero(parameters: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit is deprecated

    return ZeroRedundancyOptimizer(parameters, kind, **options)


def train(half: torch.dtype, device: str, level: str, sharded: bool) -> dict[str, Any]:
    model = net().to(device)
    adam = functools.partial(zero, kind=torch.optim.AdamW) if sharded else torch.optim.AdamW
    optimizer = adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, **SCALE)
    replica = DistributedDataParallel(model)
    skipped = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = replica(torch.randn(4, 8, generator=generator).to(device)).float().square().mean()
        if OVERFLOWS.get(step) == dist.get_rank():
            loss = loss * float("nan")
        optimizer.zero_grad()
        backward(loss, optimizer)
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
@EACH_DEVICE
@EACH_HALF
@EACH_LEVEL
def test_a_zero_optimizer_trains_as_the_optimizer_inside_it(two, level, half, device):
    for sharded, whole in two.run(both, half, device, level):
        assert_same_state(sharded, whole)
        assert [step for step, was_skipped in enumerate(sharded["skipped"]) if was_skipped] == list(OVERFLOWS)


def resumed(bucketed: bool) -> None:
    ends = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        optimizer = zero(model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=bucketed)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype="bfloat16", verbosity=0)
        for step in range(4):
            if step == 2 and resumes:
                optimizer.consolidate_state_dict(to=0)
                saved = [[model.state_dict(), optimizer.state_dict()]] if dist.get_rank() == 0 else [None]
                dist.broadcast_object_list(saved, src=0)
                model.load_state_dict(saved[0][0])
                optimizer.load_state_dict(saved[0][1])
            optimizer.zero_grad()
            backward(model(torch.ones(2, 8)).float().square().mean(), optimizer)
            optimizer.step()
        ends.append([each.detach().clone() for each in amp.master_params(optimizer)])
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        amp.deinitialize()
    assert_same_state(*ends)


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_zero_optimizer_resumes_with_masters(two, bucketed):
    two.run(resumed, bucketed)


def sent_from_buckets(how: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights after two steps of a sharded optimizer that keeps parameters in buckets, and of one that does not."""
    ends = []
    for bucketed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        if how in ("half before", "MixedPrecision"):
            model.bfloat16()
        optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.25, parameters_as_bucket_view=bucketed)
        if how == "MixedPrecision":
            optimizer = MixedPrecision(optimizer)
        else:
            level = "O3" if how == "O3" else "O5"
            masters = {"master_weights": how} if how in ("split", "stochastic") else {}
            amp.initialize(model, optimizer, opt_level=level, half_dtype="bfloat16", verbosity=0, **masters)
        replica = DistributedDataParallel(model)
        for _ in range(2):
            optimizer.zero_grad()
            loss = replica(torch.ones(2, 4, dtype=model[0].weight.dtype)).float().square().sum()
            loss.backward()
            optimizer.step()
        ends.append([each.detach().float() for each in model.parameters()])
        amp.deinitialize()
    return ends[0], ends[1]


@pytest.mark.filterwarnings("ignore::ampatch.errors.AmpWarning")
@pytest.mark.parametrize("how", ["half before", "MixedPrecision", "O3", "split", "stochastic"])
def test_weights_in_other_memory_than_the_buckets_are_sent(two, how):
    (first, wanted), (second, _) = two.run(sent_from_buckets, how)
    assert_same_state(first, second)
    assert_same_state(first, wanted)
