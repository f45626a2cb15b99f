"""Drawn training loops of two ranks: the bits of the same loop in float32 without amp, and the same scales on both.

A loop draws what spreads it over the ranks, its optimizers and its level; then in each step the micro-batches, which of
them are reduced, which parts of the model each reaches, and the rank on which one overflows. All numbers are small
integers over powers of two, which every type holds. Gradients do not depend on weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import is_thorough
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp

STEPS = 5
FSDP1 = {"FSDP1": ShardingStrategy.FULL_SHARD, "FSDP1 kept whole": ShardingStrategy.SHARD_GRAD_OP}
SPREADS = ["DDP", "DDP, bucket views", "DDP of the first part", "ZeRO", "ZeRO, buckets", "fully_shard", *FSDP1]
LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "half_dtype": "float16"},
    "O2": {"opt_level": "O2", "half_dtype": "float16"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
}


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A forward pass and a block.

    Attributes:
        number: of the batch.
        is_reduced: whether the wrapper reduces it.
        reached: the parts that each rank reaches.
        overflows_on: the rank on which its loss is inf; None: on no rank.
    """

    number: int
    is_reduced: bool
    reached: tuple[tuple[int, ...], tuple[int, ...]]
    overflows_on: int | None


@dataclasses.dataclass(frozen=True)
class Program:
    """A loop.

    Attributes:
        spread: what spreads it over the ranks.
        level: the level.
        has_each: whether each part has an optimizer of its own.
        steps: the micro-batches of each step.
    """

    spread: str
    level: str
    has_each: bool
    steps: tuple[tuple[MicroBatch, ...], ...]

    @classmethod
    def drawn(cls, seed: int) -> Program:
        chance = random.Random(seed)
        spread = chance.choice(SPREADS)
        level = chance.choice(["O1"] if "FSDP" in spread or spread == "fully_shard" else list(LEVELS))
        numbers = iter(range(1000))

        def drawn_batch(is_last: bool) -> MicroBatch:
            both = tuple(sorted(chance.sample(range(2), chance.choice([1, 2]))))
            # Torch cannot accumulate, reduce or step if FSDP1 or a bucket was left out of a synchronised pass.
            if spread in FSDP1 or is_last:
                both = (0, 1)
            other = (chance.randrange(2),) if spread.startswith(("DDP", "ZeRO")) and not is_last else both
            bad = chance.randrange(2) if chance.random() < 0.25 else None
            return MicroBatch(next(numbers), is_last or not spread.startswith("ZeRO"), (both, other), bad)

        steps = []
        for _ in range(STEPS):
            count = chance.choice([1, 2, 3])
            drawn = [drawn_batch(index == count - 1) for index in range(count)]
            if level == "O5, split" or chance.random() < 0.7:
                drawn = [dataclasses.replace(each, is_reduced=each is drawn[-1]) for each in drawn]
            # A synchronised pass of DDP has to reach the same on all ranks, or parts get no gradient on one of them.
            steps.append(
                tuple(
                    dataclasses.replace(each, reached=(each.reached[0],) * 2) if each.is_reduced else each
                    for each in drawn
                )
            )
        return cls(spread, level, chance.random() < 0.5, tuple(steps))


class Part(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(first, first + 3.0))
        self.bias = nn.Parameter(torch.tensor([float(first)]))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.weight * x.sum(0).to(self.weight.dtype)).sum() + self.bias.sum() * 2).float()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(1), Part(2)])

    def forward(self, x: Tensor, reached: tuple[int, ...]) -> Tensor:
        return sum((self.parts[index](x) for index in reached), torch.tensor(0.0))


class Side:
    """A loop with amp, or the same without."""

    def __init__(self, program: Program, *, has_amp: bool) -> None:
        self.program, self.has_amp = program, has_amp
        self.model: Any = Parts()
        self.parts = list(self.model.parts)
        spread = program.spread
        if spread == "fully_shard":
            mesh = init_device_mesh("cpu", (2,))
            for module in (*self.parts, self.model):
                fully_shard(module, mesh=mesh)
        elif spread in FSDP1:
            options = {"use_orig_params": True, "device_id": torch.device("cpu")}
            self.model = FullyShardedDataParallel(self.model, sharding_strategy=FSDP1[spread], **options)
        owned = self.parts if program.has_each else [self.model]
        self.optimizers = [self._optimizer(list(each.parameters())) for each in owned]
        if has_amp:
            options = {"loss_scale": "dynamic", "init_scale": 8.0, "scale_window": 3, "max_loss_scale": 32.0}
            amp.initialize(self.model, self.optimizers, verbosity=0, **LEVELS[program.level], **options)
        self.replica: Any = self.model
        if spread.startswith(("DDP", "ZeRO")):
            wrapped = self.parts[0] if spread == "DDP of the first part" else self.model
            as_view = spread == "DDP, bucket views"
            self.replica = DistributedDataParallel(
                wrapped, find_unused_parameters=True, gradient_as_bucket_view=as_view
            )

    def _optimizer(self, parameters: list[Tensor]) -> Any:
        options = {"lr": 0.5, "momentum": 0.5}
        if not self.program.spread.startswith("ZeRO"):
            return torch.optim.SGD(parameters, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit is deprecated

        buckets = {"parameters_as_bucket_view": "buckets" in self.program.spread}
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **buckets, **options)

    @contextlib.contextmanager
    def _reducing(self, is_reduced: bool) -> Any:
        if is_reduced:
            yield
        elif self.program.spread == "fully_shard":
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        else:
            with self.replica.no_sync():
                yield

    def loss(self, batch: MicroBatch) -> Tensor:
        reached, beside = batch.reached[dist.get_rank()], self.program.spread == "DDP of the first part"
        # Ranks see the same where no wrapper reduces: their weights would go apart.
        generator = torch.Generator().manual_seed(2 * batch.number + (0 if beside else dist.get_rank()))
        x = torch.randint(-1, 2, (2, 3), generator=generator).float()
        called = {0: self.replica, 1: self.parts[1]}
        losses = [called[index](x) for index in reached] if beside else [self.replica(x, reached)]
        if self.has_amp and batch.overflows_on == dist.get_rank():
            losses[-1] = losses[-1] * math.inf
        return torch.stack(losses).sum()

    def backward(self, batch: MicroBatch) -> None:
        with self._reducing(batch.is_reduced):
            loss = self.loss(batch)
            if not self.has_amp:
                loss.backward()
                return
            with amp.scale_loss(loss, self.optimizers) as scaled_loss:
                scaled_loss.backward()

    def weights(self) -> list[list[float]]:
        tensors = self.model.parameters() if self.program.level == "O1" else self.model.state_dict().values()
        local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
        return [each.detach().float().tolist() for each in local]


def played(program: Program) -> list[Any]:
    """The weights after each step, with amp and without, where amp's loop tells which steps are skipped; its scales."""
    mixed, found = Side(program, has_amp=True), []
    for step in program.steps:
        for batch in step:
            mixed.backward(batch)
        skipped = []
        for optimizer in mixed.optimizers:
            optimizer.step()
            skipped.append(amp.step_was_skipped(optimizer))
            optimizer.zero_grad()
        found.append((mixed.weights(), skipped, amp.state_dict()))
    amp.deinitialize()
    plain, wanted = Side(program, has_amp=False), []
    for step, (_, skipped, _) in zip(program.steps, found, strict=True):
        for batch in step:
            plain.backward(batch)
        for optimizer, was_skipped in zip(plain.optimizers, skipped, strict=True):
            if not was_skipped:
                optimizer.step()
            optimizer.zero_grad()
        wanted.append(plain.weights())
    return [found, wanted]


def all_played(seeds: range) -> list[list[Any]]:
    found = []
    for seed in seeds:
        sys.stderr.write(f"seed {seed}\n")  # read only where a rank raises, dies or hangs
        found.append(played(Program.drawn(seed)))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ranks_train_to_the_bits_of_float32_with_the_same_scales(two: Workers) -> None:
    seeds = range(200 if is_thorough() else 40)
    for seed, *by_rank in zip(seeds, *two.run(all_played, seeds), strict=True):
        program = Program.drawn(seed)
        for found, wanted in by_rank:
            assert [weights for weights, _, _ in found] == wanted, f"seed {seed}: {program}"
        first, second = ([each[1:] for each in found] for found, _ in by_rank)
        assert first == second, f"seed {seed}: {program}"
        for step, (skipped, _) in zip(program.steps, first, strict=True):
            assert any(skipped) is any(each.overflows_on is not None for each in step), f"seed {seed}: {program}"
