"""Tensor parallelism: DTensors forward and backward at O1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import DEVICES_OF_EACH, assert_same_state
from round_numbers import SCALE
from small_nets import EACH_HALF
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ampatch import amp

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES_OF_EACH)


class Block(nn.Module):
    """What a transformer has that is not attention: a norm, and two matrices that are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


COLUMNS_AND_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}
# The norm's weights are whole, its inputs are pieces, and its gradients are sums that are yet to be done.
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def parallel(plan: str, device: str) -> nn.Module:
    model = Block().to(device)
    if plan == "with FSDP":
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "model"))
        parallelize_module(model, mesh["model"], COLUMNS_AND_ROWS)
        return fully_shard(model, mesh=mesh["data"])
    return parallelize_module(
        model, init_device_mesh(device, (2,)), SEQUENCE if plan == "sequence" else COLUMNS_AND_ROWS
    )


def batch(device: str) -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).to(device)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def loss_of(model: nn.Module, device: str, plan: str) -> Tensor:
    x = batch(device)
    # Of a sequence each process is given its piece.
    out = model(x.chunk(2, dim=1)[dist.get_rank()] if plan == "sequence" else x)
    return out.float().square().sum()  # a DTensor if the model's output is one


def trained(plan: str, half: torch.dtype, device: str, clip: bool, overflow: bool) -> dict[str, Any]:
    model = Block().to(device) if plan == "none" else parallel(plan, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, half_dtype=half, **SCALE)
    found = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.dtype}))
    with amp.scale_loss(loss_of(model, device, plan), optimizer, delay_unscale=clip) as scaled_loss:
        scaled_loss.backward()
        if overflow and dist.get_rank() == 1:
            model.up.weight.grad.to_local()[0, 0] = math.nan
    norm = float(amp.clip_grad_norm_(optimizer, 0.5)) if clip else None
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    optimizer.step()
    return {
        "dtypes": found,
        "grads": grads,
        "norm": norm,
        "skipped": amp.step_was_skipped(optimizer),
        "weights": {name: whole(p) for name, p in model.named_parameters()},
    }


def both(plan: str, half: torch.dtype, device: str, clip: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    one = trained("none", half, device, clip, False)
    amp.deinitialize()
    return one, trained(plan, half, device, clip, False)


def check_training(workers, plan, half, device, clip):
    for one, several in workers.run(both, plan, half, device, clip):
        assert several["dtypes"] == one["dtypes"] == {"norm": torch.float32, "up": half, "down": half}
        # Sums are taken in another order, in half.
        tolerance = {"rtol": 0, "atol": 0.02 * max(float(grad.abs().max()) for grad in one["grads"].values())}
        torch.testing.assert_close(several["grads"], one["grads"], **tolerance)
        torch.testing.assert_close(several["weights"], one["weights"], **tolerance)
        assert several["norm"] == (pytest.approx(one["norm"], rel=0.01) if clip else None)
        assert not several["skipped"]


@EACH_DEVICE
@EACH_HALF
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.covering(1)
class TestTensorParallelism:
    @pytest.mark.slow_on_cpu
    @pytest.mark.parametrize("plan", ["columns and rows", "sequence"])
    def test_split_layers_train_as_in_one_process(self, two, plan, half, device, clip):
        check_training(two, plan, half, device, clip)

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_split_layers_under_fsdp_train_as_in_one_process(self, four, half, device, clip):
        check_training(four, "with FSDP", half, device, clip)

    def test_an_overflow_in_one_piece_skips_the_step_of_all_ranks(self, two, half, device, clip):
        first, second = two.run(trained, "columns and rows", half, device, clip, True)
        assert first["skipped"]
        assert second["skipped"]
        assert_same_state(first["weights"], dict(Block().state_dict()))
