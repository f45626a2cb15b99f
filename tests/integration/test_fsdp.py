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
from helpers import DEVICES_OF_EACH, HALF_DTYPES, assert_same_state, dtype_name
from round_numbers import MICRO_BATCHES, SCALE, data, round_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard

from ampatch import GradScaler, amp
from ampatch.native.kernels import values_of
from ampatch.runtime import runtime

HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
ON_DEVICES = pytest.mark.parametrize("device", DEVICES_OF_EACH)
KINDS = pytest.mark.parametrize("kind", ["fully_shard", "FSDP1", "FSDP1 flat"])


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
    kwargs = {"use_orig_params": kind == "FSDP1", "device_id": torch.device(device)}
    return FullyShardedDataParallel(model, process_group=dist.group.WORLD, **kwargs)


@contextlib.contextmanager
def postponed(model: Any) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


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
    passes = len(runtime.live.adopted.record_of(optimizer).gradients.pending)
    optimizer.step()
    return whole_weights(model), found, passes


def both(kind: str, half: torch.dtype, device: str, postpone: bool) -> Any:
    return alone(half, device), *together(kind, half, device, postpone)


@ON_DEVICES
@HALVES
class TestOneStep:
    """Bit for bit what one process does on the whole batch."""

    @KINDS
    @pytest.mark.parametrize("postpone", [False, True])
    @pytest.mark.covering(1)
    def test_of_two_processes(self, two, kind, half, device, postpone):
        self.check(two, kind, half, device, postpone)

    def test_of_weights_that_are_gathered_in_half(self, two, half, device):
        self.check(two, "gathered in half", half, device, False)

    @pytest.mark.parametrize("kind", ["fully_shard", "mesh 2 2"])
    @pytest.mark.slow
    @pytest.mark.either_way
    def test_of_four_processes(self, four, kind, half, device):
        self.check(four, kind, half, device, True)

    def check(self, workers, kind, half, device, postpone):
        for one, several, dtypes, passes in workers.run(both, kind, half, device, postpone):
            assert dtypes == {half}
            assert passes == (1 if postpone else MICRO_BATCHES)
            if several:  # FSDP1 gives the whole state to the first process only
                assert_same_state(several, one)
            assert not torch.equal(one["0.weight"], Exact()[0].weight)


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


@ON_DEVICES
class TestAnOverflowInOnePiece:
    @KINDS
    @pytest.mark.parametrize("how", ["plain", "fused", "clipped"])
    @pytest.mark.parametrize("half", [*HALF_DTYPES, None], ids=["float16", "bfloat16", "O4"])
    @pytest.mark.covering(1)
    def test_skips_the_step_in_all(self, two, kind, half, device, how):
        for weights, skipped, scales in two.run(overflow_in_one_piece, kind, half, device, how):
            assert skipped == [False, True, False]
            assert scales == [2.0**10, 2.0**9, 2.0**9]
            if weights[0]:
                assert_same_state(weights[1], weights[2])
                assert not torch.equal(weights[2]["0.weight"], weights[3]["0.weight"])

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_skips_it_in_all_replicas_too(self, four, device):
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


@ON_DEVICES
class TestClipping:
    @pytest.mark.parametrize("how", ["unscaled", "delayed", "off"])
    @KINDS
    @pytest.mark.covering(1)
    def test_is_by_the_norm_of_all_pieces(self, two, kind, device, how):
        self.check(two, kind, device, how)

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_counts_replicas_once(self, four, device):
        self.check(four, "mesh 2 2", device, "delayed")

    @pytest.mark.slow
    @pytest.mark.either_way
    @pytest.mark.parametrize("how", ["unscaled", "delayed"])
    def test_counts_processes_that_have_nothing_of_some(self, four, device, how):
        self.check(four, "fully_shard", device, how)

    def check(self, workers, kind, device, how):
        model = Exact()
        loss = sum(model(data("cpu", rank)[0]).sum() for rank in range(workers.count)) / workers.count
        expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]).norm()
        for outcome in workers.run(clipped, kind, device, how):
            if outcome is None:
                continue
            before, after, norm = outcome
            assert norm == pytest.approx(float(expected), rel=1e-5)
            if before:
                moved = torch.cat([(before[name] - after[name]).flatten() for name in before]).norm()
                assert float(moved) == pytest.approx(0.25 * 0.5, rel=1e-3)  # the norm times the learning rate


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


@KINDS
def test_clipping_leaves_all_pieces_as_they_are_where_one_has_overflowed(two, kind):
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


@ON_DEVICES
def test_an_optimizer_clips_pieces_in_its_own_kernel(two, device):
    for fused, plain in zip(two.run(clipped_twice, device, True), two.run(clipped_twice, device, False), strict=True):
        torch.testing.assert_close(fused, plain)


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model: Any, optimizer: Any, steps: range, device: str) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 8, generator=generator).to(device)
        optimizer.zero_grad()
        backward(model(x).float().square().mean(), optimizer)
        optimizer.step()


def begun(kind: str, device: str) -> tuple[Any, Any]:
    torch.manual_seed(7)
    model = sharded(Classifier(), kind, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Overflows at first, so that the scale is part of what has to be saved.
    amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0, scale_window=3)
    return model, optimizer


def interrupted(kind: str, device: str, directory: str) -> Any:
    model, optimizer = begun(kind, device)
    train(model, optimizer, range(8), device)
    expected = pieces(model.parameters()), amp.state_dict()
    amp.deinitialize()

    model, optimizer = begun(kind, device)
    train(model, optimizer, range(5), device)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True), amp=amp.state_dict())
    dcp.save(saved, checkpoint_id=directory)
    amp.deinitialize()

    model, optimizer = begun(kind, device)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True), amp=amp.state_dict())
    dcp.load(loaded, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    train(model, optimizer, range(5, 8), device)
    return expected, (pieces(model.parameters()), amp.state_dict())


@ON_DEVICES
class TestCheckpoints:
    @pytest.mark.slow_on_cpu
    @pytest.mark.parametrize("kind", ["fully_shard", "FSDP1"])
    @pytest.mark.filterwarnings("ignore")
    def test_go_on_as_if_nothing_had_happened(self, two, kind, device, tmp_path: Path):
        for expected, found in two.run(interrupted, kind, device, str(tmp_path)):
            assert_same_state(found, expected)


def raised_after_a_postponed_pass(kind: str) -> Any:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    batch = data("cpu", dist.get_rank())[0]
    with postponed(model):
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
    @KINDS
    @pytest.mark.parametrize("level", ["O2", "O3", "O5"])
    def test_half_weights_are_refused(self, two, kind, level):
        two.run(refused, kind, level)

    @pytest.mark.parametrize("kind", ["FSDP1", "FSDP1 flat"])
    def test_a_module_that_amp_does_not_know_is_refused(self, two, kind):
        two.run(unknown, kind)

    def test_two_scales_are_not_added_up_out_of_sight(self, two):
        two.run(another_scale)

    @KINDS
    def test_a_block_that_raises_leaves_nothing_behind(self, two, kind):
        assert_same_state(two.run(raised_after_a_postponed_pass, kind), two.run(one_pass, kind))


def casts_of_weights(kind: str) -> tuple[int, int]:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    kept = 0
    for _ in range(2):
        loss = model(data("cpu", dist.get_rank())[0]).float().sum()
        kept = max(kept, len(runtime.live.cache))  # the end of the block would drop them
        backward(loss, optimizer)
    return amp.cast_counts().cache_hits, kept


@KINDS
def test_gathered_weights_are_not_kept_in_half_either(two, kind):
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


def test_a_scaler_by_itself_hears_of_other_pieces(two):
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


@ON_DEVICES
@pytest.mark.parametrize(
    "how", ["plain", "unscaled", "closure", "fused", "no gradients beside", "no gradients beside, fused"]
)
@pytest.mark.slow
@pytest.mark.either_way
def test_a_grad_scaler_by_itself_skips_in_all(two, how, device):
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
    grads = torch.autograd.grad(model(data("cpu", 0)[0]).sum(), list(model.parameters()))
    expected = float(torch.cat([grad.flatten() for grad in grads]).norm())
    assert two.run(norm_beside_whole_weights, how) == [pytest.approx(expected, rel=1e-5)] * 2


def step_after_a_postponed_pass(kind: str) -> None:
    model, optimizer = set_up(kind, torch.float16, "cpu")
    if kind.startswith("mesh"):
        model.set_requires_all_reduce(False)
        backward(model(data("cpu", dist.get_rank())[0]).float().sum(), optimizer)
        model.set_requires_all_reduce(True)
    else:
        with postponed(model):
            backward(model(data("cpu", dist.get_rank())[0]).float().sum(), optimizer)
    with pytest.raises(amp.UsageError, match="under no_sync"):
        amp.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(amp.UsageError, match="under no_sync"):
        optimizer.step()


def raised_after_a_half_reduced_pass() -> Any:
    model, optimizer = set_up("mesh 2 2", torch.float16, "cpu")
    batch = data("cpu", dist.get_rank())[0]
    model.set_requires_all_reduce(False)
    backward(model(batch).float().sum(), optimizer)
    model.set_requires_all_reduce(True)
    with contextlib.suppress(KeyError), amp.scale_loss(torch.zeros(()), optimizer):
        raise KeyError
    backward(model(batch).float().sum(), optimizer)
    return pieces(p.grad for p in model.parameters())


def sharded_after_conversion() -> None:
    model = Exact()
    amp.initialize(model, opt_level="O2", **SCALE)
    model = sharded(model, "fully_shard", "cpu")
    with pytest.raises(amp.OptionError, match="sharded over ranks"):
        amp.initialize([], torch.optim.SGD(model.parameters(), lr=0.5), opt_level="O2", **SCALE)


class TestAPostponedPass:
    @KINDS
    def test_is_no_end_of_an_iteration(self, two, kind):
        two.run(step_after_a_postponed_pass, kind)

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_is_none_where_replicas_are_left_to_be_reduced(self, four):
        four.run(step_after_a_postponed_pass, "mesh 2 2")

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_leaves_nothing_behind_where_a_block_raises(self, four):
        assert_same_state(four.run(raised_after_a_half_reduced_pass), four.run(one_pass, "mesh 2 2"))


def test_a_model_that_was_converted_is_not_to_be_sharded(two):
    two.run(sharded_after_conversion)
