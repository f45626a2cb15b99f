"""FSDP2 (`fully_shard`) and `FullyShardedDataParallel`: each process has pieces of weights and gradients only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import DEVICES_OF_EACH, HALF_DTYPES, assert_same_state
from optimizers import backward
from round_numbers import MICRO_BATCHES, SCALE, data, round_weights
from small_nets import EACH_HALF, net
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard

from ampatch import GradScaler, MixedPrecision, amp
from ampatch.native.kernels import values_of
from ampatch.runtime import runtime

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES_OF_EACH)
EACH_KIND = pytest.mark.parametrize("kind", ["fully_shard", "FSDP1", "FSDP1 flat"])


class Exact(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        round_weights(self)


def mesh_of(device: str, *shape: int) -> DeviceMesh:
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=("replicas", "pieces")[-len(shape) :])


def sharded(model: nn.Module, kind: str, device: str) -> nn.Module:
    model = model.to(device)
    if not kind.startswith("FSDP1"):
        mesh = mesh_of(device, *[int(size) for size in kind.split() if size.isdigit()])
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "gathered in half" else None
        options = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
        for module in model:
            fully_shard(module, **options)
        return fully_shard(model, **options)
    kwargs = {"use_orig_params": kind != "FSDP1 flat", "device_id": torch.device(device)}
    if kind == "FSDP1 whole after forward":
        kwargs["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    return FullyShardedDataParallel(model, process_group=dist.group.WORLD, **kwargs)


@contextlib.contextmanager
def postponed(model: Any, kind: str = "") -> Iterator[None]:
    """Has backward passes reduce nothing; on a mesh, has them reduce over pieces and not over replicas."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
    elif kind.startswith("mesh"):
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def set_up(kind: str, half: torch.dtype, device: str, make: Any = Exact, fused: bool = False) -> tuple[Any, Any]:
    model = sharded(make(), kind, device)
    # torch has no fused SGD for DTensors.
    kind_of = functools.partial(torch.optim.AdamW, fused=True) if fused else torch.optim.SGD
    optimizer = kind_of(model.parameters(), lr=0.5)
    level = {"opt_level": "O4"} if half is None else {"opt_level": "O1", "half_dtype": half}
    amp.initialize(model, optimizer, **level, **SCALE)
    return model, optimizer


def pieces(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """What this process has of them."""
    there = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return [None if tensor is None else tensor.detach().cpu() for tensor in there]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    return {name: tensor.cpu() for name, tensor in get_model_state_dict(model, options=options).items()}


def alone(half: torch.dtype, device: str) -> dict[str, Tensor]:
    """The weights after a step of one process on the whole batch."""
    model = Exact().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, half_dtype=half, **SCALE)
    batches = [batch for rank in range(dist.get_world_size()) for batch in data(device, rank)]
    backward(model(torch.cat(batches)).float().sum() / dist.get_world_size(), optimizer)
    optimizer.step()
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    amp.deinitialize()
    return weights


def together(
    kind: str, half: torch.dtype, device: str, postpone: bool
) -> tuple[dict[str, Tensor], set[torch.dtype], int]:
    """The weights after the same step of all of them, the types that the last layer gave, and how many passes ended."""
    model, optimizer = set_up(kind, half, device)
    found = set()
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_hook(lambda _, __, out: found.add(out.dtype))
    for number, batch in enumerate(data(device, dist.get_rank())):
        with postponed(model) if postpone and number < MICRO_BATCHES - 1 else contextlib.nullcontext():
            backward(model(batch).float().sum(), optimizer)
    assert runtime.live is not None
    passes = len(runtime.live.adopted.record_of(optimizer).gradients.verdicts.pending)
    optimizer.step()
    return whole_weights(model), found, passes


def both(kind: str, half: torch.dtype, device: str, postpone: bool) -> Any:
    return alone(half, device), *together(kind, half, device, postpone)


def check_one_step(workers, kind, half, device, postpone):
    for one, several, dtypes, passes in workers.run(both, kind, half, device, postpone):
        assert dtypes == {half}
        assert passes == (1 if postpone else MICRO_BATCHES)
        if several:  # FSDP1 gives the whole state to the first process only
            assert_same_state(several, one)
        assert not torch.equal(one["0.weight"], Exact()[0].weight)


@EACH_DEVICE
@EACH_HALF
@pytest.mark.parametrize(
    "kind", ["fully_shard", "FSDP1", "FSDP1 flat", "FSDP1 whole after forward", "gathered in half"]
)
@pytest.mark.parametrize("postpone", [False, True])
@pytest.mark.covering(1)
def test_two_ranks_step_to_the_bits_of_one_process(two, kind, half, device, postpone):
    check_one_step(two, kind, half, device, postpone)


@EACH_DEVICE
@EACH_HALF
@pytest.mark.parametrize("kind", ["fully_shard", "mesh 2 2"])
@pytest.mark.slow
@pytest.mark.either_way
def test_four_ranks_step_to_the_bits_of_one_process(four, kind, half, device):
    check_one_step(four, kind, half, device, True)


def overflow_in_one_piece(kind: str, half: torch.dtype, device: str, how: str) -> Any:
    """Three steps, in the second of which one process alone has a gradient that is not finite."""
    model, optimizer = set_up(kind, half, device, fused=how == "fused")
    weights, skipped, scales = [whole_weights(model)], [], []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(data(device, dist.get_rank())[step]).float().sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=how == "clipped") as scaled_loss:
            scaled_loss.backward()
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                grad = next(p.grad for p in model.parameters() if p.grad is not None)
                values_of(grad).view(-1)[0] = float("inf")
        if how == "clipped":
            amp.clip_grad_norm_(optimizer, 100.0)
        optimizer.step()
        weights.append(whole_weights(model))
        skipped.append(amp.step_was_skipped(optimizer))
        scales.append(amp.get_loss_scale())
    return weights, skipped, scales


@EACH_DEVICE
class TestAnOverflowInOnePiece:
    @EACH_KIND
    @pytest.mark.parametrize("how", ["plain", "fused", "clipped"])
    @pytest.mark.parametrize("half", [*HALF_DTYPES, None], ids=["float16", "bfloat16", "O4"])
    @pytest.mark.covering(1)
    def test_an_overflow_in_one_piece_skips_the_step_of_all_ranks(self, two, kind, half, device, how):
        for weights, skipped, scales in two.run(overflow_in_one_piece, kind, half, device, how):
            assert skipped == [False, True, False]
            assert scales == [2.0**10, 2.0**9, 2.0**9]
            if weights[0]:
                assert_same_state(weights[1], weights[2])
                assert not torch.equal(weights[2]["0.weight"], weights[3]["0.weight"])

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_an_overflow_in_one_piece_skips_the_step_of_all_replicas(self, four, device):
        for _, skipped, _ in four.run(overflow_in_one_piece, "mesh 2 2", torch.float16, device, "plain"):
            assert skipped == [False, True, False]


def clipped(kind: str, device: str, how: str) -> Any:
    model, optimizer = set_up(kind, torch.float16, device)
    before = whole_weights(model)
    batch = data(device, dist.get_rank())[0]
    if how == "off":
        amp.deinitialize()
        model(batch).sum().backward()
    else:
        backward(model(batch).float().sum(), optimizer, delay_unscale=how == "delayed")
    if how == "off" and kind.startswith("FSDP1"):
        with pytest.raises(amp.UsageError, match=r"Pass it to amp\.initialize"):
            amp.clip_grad_norm_(optimizer, 0.25)
        return None
    norm = float(amp.clip_grad_norm_(optimizer, 0.25))
    optimizer.step()
    return before, whole_weights(model), norm


def norm_of(loss: Tensor, model: nn.Module) -> float:
    return float(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]).norm())


def check_clipping(workers, kind, device, how):
    model = Exact()
    loss = sum(model(data("cpu", rank)[0]).sum() for rank in range(workers.count)) / workers.count
    expected = pytest.approx(norm_of(loss, model), rel=1e-5)
    for outcome in workers.run(clipped, kind, device, how):
        if outcome is None:
            continue
        before, after, norm = outcome
        assert norm == expected
        if before:
            moved = torch.cat([(before[name] - after[name]).flatten() for name in before]).norm()
            assert float(moved) == pytest.approx(0.25 * 0.5, rel=1e-3)  # the norm times the learning rate


@EACH_DEVICE
@pytest.mark.parametrize("how", ["unscaled", "delayed", "off"])
@EACH_KIND
@pytest.mark.covering(1)
def test_clipping_is_by_the_norm_of_all_pieces(two, kind, device, how):
    check_clipping(two, kind, device, how)


# On four ranks some have no piece of a bias; on the mesh the norm counts replicas once.
@EACH_DEVICE
@pytest.mark.slow
@pytest.mark.either_way
@pytest.mark.parametrize(
    ("kind", "how"), [("mesh 2 2", "delayed"), ("fully_shard", "unscaled"), ("fully_shard", "delayed")]
)
def test_clipping_on_four_ranks_counts_each_piece_once(four, kind, device, how):
    check_clipping(four, kind, device, how)


def overflowed_under_a_static_scale(kind: str) -> list[bool]:
    """Whether gradients that are finite here stay as they are, where a piece of another process is not."""
    model = sharded(Exact(), kind, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, half_dtype=torch.float16, loss_scale=8.0)
    backward(model(data("cpu", dist.get_rank())[0]).float().sum(), optimizer)
    grads = [values_of(p.grad) for p in model.parameters() if p.grad is not None and p.grad.numel()]
    if dist.get_rank() == 1:
        grads[0].view(-1)[0] = float("inf")
    before = [grad.clone() for grad in grads]
    amp.clip_grad_norm_(optimizer, 0.25)
    return [bool(grad.any()) and torch.equal(grad, was) for grad, was in zip(grads, before, strict=True)]


@EACH_KIND
def test_clipping_after_an_overflow_in_one_piece_changes_no_piece(two, kind):
    for are_left in two.run(overflowed_under_a_static_scale, kind):
        assert any(are_left)
        assert all(are_left)


def clipped_twice(device: str, fused: bool) -> dict[str, Tensor]:
    model = sharded(Exact(), "fully_shard", device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=fused)
    amp.initialize(model, optimizer, half_dtype=torch.float16, **SCALE)
    for batch in data(device, dist.get_rank()):
        optimizer.zero_grad()
        backward(model(batch).float().sum(), optimizer, delay_unscale=True)
        amp.clip_grad_norm_(optimizer, 0.25)
        optimizer.step()
    return whole_weights(model)


@EACH_DEVICE
def test_fused_optimizers_clip_pieces_as_plain_ones_do(two, device):
    for fused, plain in zip(two.run(clipped_twice, device, True), two.run(clipped_twice, device, False), strict=True):
        torch.testing.assert_close(fused, plain)


def train(model: Any, optimizer: Any, steps: range, device: str) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 8, generator=generator).to(device)
        optimizer.zero_grad()
        backward(model(x).float().square().mean(), optimizer)
        optimizer.step()


def begun(kind: str, device: str) -> tuple[Any, Any]:
    model = sharded(net(), kind, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Overflows at first, so that the scale is part of what has to be saved.
    amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0, scale_window=3)
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "amp": amp.state_dict()}


def interrupted(kind: str, device: str, directory: str) -> Any:
    model, optimizer = begun(kind, device)
    train(model, optimizer, range(8), device)
    expected = pieces(model.parameters()), amp.state_dict()
    amp.deinitialize()

    model, optimizer = begun(kind, device)
    train(model, optimizer, range(5), device)
    dcp.save(state_of(model, optimizer), checkpoint_id=directory)
    amp.deinitialize()

    model, optimizer = begun(kind, device)
    loaded = state_of(model, optimizer)
    dcp.load(loaded, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    train(model, optimizer, range(5, 8), device)
    return expected, (pieces(model.parameters()), amp.state_dict())


@EACH_DEVICE
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("kind", ["fully_shard", "FSDP1"])
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_ends_with_the_same_bits(two, kind, device, tmp_path: Path):
    for expected, found in two.run(interrupted, kind, device, str(tmp_path)):
        assert_same_state(found, expected)


def raised_after_a_postponed_pass(kind: str) -> Any:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    batch = data("cpu", dist.get_rank())[0]
    with postponed(model, kind):
        backward(model(batch).float().sum(), optimizer)
    with contextlib.suppress(KeyError), amp.scale_loss(torch.zeros(()), optimizer):
        raise KeyError
    backward(model(batch).float().sum(), optimizer)
    return pieces(p.grad for p in model.parameters())


def one_pass(kind: str) -> Any:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    backward(model(data("cpu", dist.get_rank())[0]).float().sum(), optimizer)
    return pieces(p.grad for p in model.parameters())


def refused(kind: str, level: str) -> None:
    model = sharded(Exact(), kind, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(amp.OptionError, match=r"sharded over ranks, and opt_level='O.' would convert"):
        amp.initialize(model, optimizer, opt_level=level)


def half_shards_refused(masters: bool | str) -> None:
    model = sharded(Exact().bfloat16(), "fully_shard", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(
        amp.OptionError, match=r"are DTensors, as of FSDP2, and MixedPrecision cannot make torch\.float32"
    ):
        MixedPrecision(optimizer, masters=masters)
    assert not optimizer.state
    whole = MixedPrecision(torch.optim.SGD(Exact().bfloat16().parameters(), lr=0.5), masters=masters)
    with pytest.raises(amp.OptionError, match="are DTensors"):
        whole.add_param_group({"params": list(model.named_parameters())})
    assert len(whole.param_groups) == 1


def unknown(kind: str) -> None:
    model = sharded(Exact(), kind, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.init()
    with pytest.raises(amp.UsageError, match=r"Pass it to amp\.initialize together with the optimizer"):
        backward(model(data("cpu", dist.get_rank())[0]).float().sum(), optimizer)


def another_scale() -> None:
    model = sharded(Exact(), "fully_shard", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, half_dtype=torch.float16, num_losses=2, **SCALE)
    amp.load_state_dict(
        {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}, "loss_scaler1": amp.state_dict()["loss_scaler1"]}
    )
    batch = data("cpu", dist.get_rank())[0]
    with postponed(model):
        backward(model(batch).float().sum(), optimizer)
    with pytest.raises(amp.UsageError, match="scaled by loss scaler 0"):
        backward(model(batch).float().sum(), optimizer, loss_id=1)


class TestBadUse:
    @EACH_KIND
    @pytest.mark.parametrize("level", ["O2", "O3", "O5"])
    def test_levels_with_half_weights_raise(self, two, kind, level):
        two.run(refused, kind, level)

    @pytest.mark.parametrize("masters", [True, "split", "stochastic"])
    def test_masters_of_half_shards_raise(self, two, masters):
        two.run(half_shards_refused, masters)

    @pytest.mark.parametrize("kind", ["FSDP1", "FSDP1 flat"])
    def test_a_module_without_amp_raises(self, two, kind):
        two.run(unknown, kind)

    def test_passes_at_two_scales_raise(self, two):
        two.run(another_scale)

    @EACH_KIND
    def test_a_block_that_raises_forgets_a_postponed_pass(self, two, kind):
        assert_same_state(two.run(raised_after_a_postponed_pass, kind), two.run(one_pass, kind))


def casts_of_weights(kind: str) -> tuple[int, int]:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    kept = 0
    for _ in range(2):
        loss = model(data("cpu", dist.get_rank())[0]).float().sum()
        kept = max(kept, len(runtime.live.cache))  # the end of the block would drop them
        backward(loss, optimizer)
    return amp.cast_counts().cache_hits, kept


@EACH_KIND
def test_casts_of_gathered_weights_are_not_cached(two, kind):
    assert two.run(casts_of_weights, kind) == [(0, 0)] * 2


def scaler_by_itself() -> tuple[bool, float]:
    model = sharded(Exact(), "fully_shard", "cpu")
    scaler = amp.LossScaler(init_scale=8.0)
    scaler.scale(model(data("cpu", dist.get_rank())[0]).sum()).backward()
    if dist.get_rank() == 1:
        values_of(next(model.parameters()).grad).view(-1)[0] = float("inf")
    overflow = bool(scaler.unscale_(p.grad for p in model.parameters()))
    scaler.update()
    return overflow, scaler.state_dict()["loss_scale"]


def test_a_loss_scaler_sees_an_overflow_in_another_piece(two):
    assert two.run(scaler_by_itself) == [(True, 4.0)] * 2


def grad_scaler_by_itself(how: str, device: str) -> tuple[bool, float]:
    """Whether a step left this process's pieces as they were, and the scale after it."""
    model = sharded(Exact(), "fully_shard", device)
    fused = functools.partial(torch.optim.AdamW, fused=True)
    optimizer = (fused if "fused" in how else torch.optim.SGD)(model.parameters(), lr=0.5)
    scaler = GradScaler(device, init_scale=8.0)
    before = [values_of(parameter.detach()).clone() for parameter in model.parameters()]

    def closure() -> Tensor:
        loss = model(data(device, dist.get_rank())[0]).sum()
        scaler.scale(loss).backward()
        if dist.get_rank() == 1:
            values_of(next(model.parameters()).grad).view(-1)[0] = float("inf")
        elif "no gradients beside" in how:
            optimizer.zero_grad()
        return loss

    if how == "closure":
        scaler.step(optimizer, closure)
    else:
        closure()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    same = all(map(torch.equal, map(values_of, model.parameters()), before))
    return same, scaler.get_scale()


@EACH_DEVICE
@pytest.mark.parametrize(
    "how", ["plain", "unscaled", "closure", "fused", "no gradients beside", "no gradients beside, fused"]
)
@pytest.mark.slow
@pytest.mark.either_way
def test_a_grad_scaler_skips_the_step_of_all_ranks(two, how, device):
    assert two.run(grad_scaler_by_itself, how, device) == [(True, 4.0)] * 2


def norm_beside_whole_weights(how: str) -> float:
    model, options = Exact(), {"device_id": torch.device("cpu"), "use_orig_params": True}
    if how == "another strategy inside":
        model[0] = FullyShardedDataParallel(model[0], sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    else:
        options["ignored_modules"] = [model[0]]
    outer = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.5)
    amp.initialize(outer, optimizer, half_dtype=torch.float16, **SCALE)
    batch = data("cpu", 0)[0]  # the same everywhere, so that what is not reduced is equal too
    backward(outer(batch).float().sum(), optimizer, delay_unscale=True)
    return float(amp.clip_grad_norm_(optimizer, 1e9))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["another strategy inside", "ignored modules"])
def test_the_norm_counts_whole_weights_beside_pieces_once(two, how):
    model = Exact()
    expected = norm_of(model(data("cpu", 0)[0]).sum(), model)
    assert two.run(norm_beside_whole_weights, how) == [pytest.approx(expected, rel=1e-5)] * 2


def step_after_a_postponed_pass(kind: str) -> None:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    with postponed(model, kind):
        backward(model(data("cpu", dist.get_rank())[0]).float().sum(), optimizer)
    with pytest.raises(amp.UsageError, match="under no_sync"):
        amp.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(amp.UsageError, match="under no_sync"):
        optimizer.step()


def sharded_after_conversion() -> None:
    model = Exact()
    amp.initialize(model, opt_level="O2", **SCALE)
    model = sharded(model, "fully_shard", "cpu")
    with pytest.raises(amp.OptionError, match="sharded over ranks"):
        amp.initialize([], torch.optim.SGD(model.parameters(), lr=0.5), opt_level="O2", **SCALE)


class TestPostponedPasses:
    @EACH_KIND
    def test_a_step_after_a_postponed_pass_raises(self, two, kind):
        two.run(step_after_a_postponed_pass, kind)

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_a_step_before_replicas_are_reduced_raises(self, four):
        four.run(step_after_a_postponed_pass, "mesh 2 2")

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_a_block_that_raises_forgets_a_pass_without_all_reduce(self, four):
        assert_same_state(four.run(raised_after_a_postponed_pass, "mesh 2 2"), four.run(one_pass, "mesh 2 2"))


def test_sharding_a_converted_model_raises(two):
    two.run(sharded_after_conversion)
