"""`fused_linear` against the same session without it: distributed training, compilers, and whole training loops.

On a CPU the node's products are those of torch's own nodes: every gradient and weight must have the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_state, dtype_name
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ampatch import GradScaler, amp

HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
QUIET = {"verbosity": 0, "loss_scale": "dynamic", "init_scale": 2.0**8}


class Net(nn.Module):
    """Layers with a bias and without, one that runs under a checkpoint, and one that only some inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.middle = nn.Linear(16, 16, bias=False)
        self.sometimes = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        if "checkpoint" in how:
            hidden = checkpoint(self.middle, hidden, use_reentrant="reentrant" in how)
        else:
            hidden = self.middle(hidden)
        if "skip" not in how:
            hidden = self.sometimes(hidden)
        return self.last(hidden)


def batch(number: int = 0, rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


def nodes_of(*tensors: Tensor) -> int:
    """Returns the number of fused nodes in the graphs of tensors."""
    seen, found = set(), 0
    left = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += node.name().startswith("FusedLinear")
        left += [each for each, _ in node.next_functions]
    return found


def set_up(model: nn.Module, half: torch.dtype, fused: bool, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, half_dtype=half, fused_linear=fused, **{**QUIET, **options})
    return optimizer


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def whole(tensors: Any) -> list[Tensor | None]:
    """Returns copies of tensors; of sharded ones, of this rank's piece."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return [None if each is None else each.detach().clone() for each in local]


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "grads": whole(each.grad for each in model.parameters()),
        "weights": whole(model.parameters()),
        "scale": amp.get_loss_scale(),
    }


def compared(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Calls a function with and without fused_linear, and asserts that it returns the same state.

    Args:
        function: takes ``args`` and whether linear layers are fused; returns a number of fused nodes, and a state.

    Returns:
        The number of fused nodes, and the state.
    """
    torch.manual_seed(0)
    none, unfused = function(*args, False)
    amp.deinitialize()
    torch._dynamo.reset()
    torch.manual_seed(0)
    found, fused = function(*args, True)
    amp.deinitialize()
    assert none == 0
    assert_same_state(fused, unfused)
    return found, fused


# --- several processes ----------------------------------------------------------------------------

DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "no_sync": {},
    "no_sync, bucket view": {"gradient_as_bucket_view": True},
    "fp16_compress": {},
    "power SGD": {},
    "checkpoint": {},
    "checkpoint, reentrant": {"static_graph": True},
}


def through_float16(_, bucket):  # torch looks at annotations, and knows no strings
    return default_hooks.fp16_compress_hook(None, bucket)


def replicated(kind: str, half: torch.dtype, fused: bool) -> tuple[int, list[Any]]:
    model = Net()
    optimizer = set_up(model, half, fused)
    replica = DistributedDataParallel(model, **DDP[kind])
    if kind == "fp16_compress":
        replica.register_comm_hook(None, through_float16)
    elif kind == "power SGD":
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
        replica.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    found, states = 0, []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            postponed = kind.startswith("no_sync") and micro == 0
            if micro == 0 and not postponed:
                continue
            how = "skip" if kind == "unused parameters" and step % 2 == dist.get_rank() else kind
            with replica.no_sync() if postponed else contextlib.nullcontext():
                out = replica(batch(10 * step + 2 * dist.get_rank() + micro), how)
                found += nodes_of(out)
                if step == 1 and dist.get_rank() == 1 and kind != "power SGD":  # it would keep the NaN
                    out.register_hook(lambda grad: grad * float("inf"))
                backward(loss_of(out), optimizer)
        states.append(state(model))
        optimizer.step()
        states.append((state(model), amp.step_was_skipped(optimizer)))
    return found, states


class TestDistributedDataParallel:
    @HALVES
    @pytest.mark.parametrize("kind", DDP)
    @pytest.mark.covering(1)
    def test_has_the_same_bits(self, two, kind, half):
        (found, first), (_, second) = two.run(compared, replicated, kind, half)
        assert found > 0
        for one, other in zip(first, second, strict=True):
            one, other = (each[0] if isinstance(each, tuple) else each for each in (one, other))
            assert_same_state(one["weights"], other["weights"])


FSDP = {
    "fully_shard": {},
    "fully_shard, gathered once": {"reshard_after_forward": False},
    "fully_shard, reduced in half": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "fully_shard, in half": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "fully_shard, checkpoint": {},
    "FSDP1": {"use_orig_params": True},
    "FSDP1 flat": {"use_orig_params": False},
}


def sharded(kind: str, half: torch.dtype, fused: bool) -> tuple[int, list[Any]]:
    model = nn.Sequential(Net(), nn.Linear(4, 4))
    if kind.startswith("FSDP1"):
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **FSDP[kind])
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0].first, model[0].middle, model[0], model[1], model):
            fully_shard(layer, mesh=mesh, **FSDP[kind])
    optimizer = set_up(model, half, fused)
    states, found = [], 0
    for step in range(3):
        optimizer.zero_grad()
        hidden = batch(2 * step + dist.get_rank())
        if "checkpoint" in kind:
            out = checkpoint(model, hidden, use_reentrant=False)
        else:
            out = model(hidden)
        found += nodes_of(out)
        if step == 1 and dist.get_rank() == 1:
            out.register_hook(lambda grad: grad * float("inf"))
        backward(loss_of(out), optimizer)
        states.append(state(model))
        amp.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        states.append((state(model), amp.step_was_skipped(optimizer)))
    return found, states


class TestFullySharded:
    @HALVES
    @pytest.mark.parametrize("kind", FSDP)
    @pytest.mark.covering(1)
    @pytest.mark.filterwarnings("ignore")
    def test_has_the_same_bits(self, two, kind, half):
        for found, states in two.run(compared, sharded, kind, half):
            assert [skipped for _, skipped in states[1::2]] == [False, True, False]
            # FSDP1 runs layers with views of its flat parameter, which are no parameters.
            assert (found == 0) == (kind.startswith("FSDP1") or kind == "fully_shard, in half")


def in_columns_and_rows(with_fsdp: bool, half: torch.dtype, fused: bool) -> tuple[int, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (2, 2) if with_fsdp else (2,), mesh_dim_names=("data", "model")[-1 - with_fsdp :])
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})  # whose result is not there yet
    if with_fsdp:
        fully_shard(model, mesh=mesh["data"])
    optimizer = set_up(model, half, fused)
    out = model(batch())
    found = nodes_of(out)
    backward(loss_of(out), optimizer)
    optimizer.step()
    return found, state(model)


class TestTensorParallel:
    """The layers that are split have DTensors as weights, and are called as without fused_linear."""

    @HALVES
    def test_has_the_same_bits(self, two, half):
        for found, _ in two.run(compared, in_columns_and_rows, False, half):
            assert found == 1  # the layer that is not split

    @HALVES
    @pytest.mark.slow
    @pytest.mark.either_way
    def test_has_the_same_bits_under_fsdp_too(self, four, half):
        for found, _ in four.run(compared, in_columns_and_rows, True, half):
            assert found == 1


def in_stages(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """Two ranks have a stage each, and send activations and gradients of micro-batches."""
    torch.manual_seed(dist.get_rank())
    is_first = dist.get_rank() == 0
    stage = nn.Sequential(nn.Linear(8, 16), nn.ReLU()) if is_first else nn.Linear(16, 4)
    optimizer = set_up(stage, half, fused, loss_scale=64.0)
    found, sent = 0, []
    for micro in range(2):
        if is_first:
            out = stage(batch(micro))
            activations = out.detach().float()
            sent.append((out, activations, dist.isend(activations, 1)))
        else:
            received = torch.empty(6, 16)
            dist.recv(received, 0)
            received.requires_grad_()
            out = stage(received)
            backward(loss_of(out), optimizer)
            dist.send(received.grad, 0)
        found += nodes_of(out)
    for out, _, sending in sent:
        sending.wait()
        grad = torch.empty(6, 16)
        dist.recv(grad, 1)
        with amp.scale_loss(torch.zeros(()), optimizer):
            out.backward(grad.to(out.dtype) * 64)
    optimizer.step()
    return found, state(stage)


def in_two_parts(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """The backward pass of a zero-bubble pipeline: gradients of inputs first, then those of weights."""
    model = Net()
    set_up(model, half, fused, loss_scale=1.0)
    x = batch().requires_grad_()
    loss = loss_of(model(x))
    found = nodes_of(loss)
    (of_input,), groups = stage_backward_input([loss], None, [x], iter(model.parameters()))
    stage_backward_weight(model.parameters(), groups)
    return found, (of_input.clone(), state(model))


class TestPipelines:
    @HALVES
    def test_of_two_ranks_have_the_same_bits(self, two, half):
        for found, _ in two.run(compared, in_stages, half):
            assert found == 2

    @HALVES
    def test_may_compute_gradients_of_weights_later(self, half):
        found, _ = compared(in_two_parts, half)
        assert found == 4
