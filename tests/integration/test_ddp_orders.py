"""Forward and backward passes of `DistributedDataParallel` in any order leave what plain torch leaves, bit for bit.

A script is a list of events: forward passes with or without ``no_sync`` or past the wrapper, backward passes in blocks
and outside of them, gradients cleared, steps. Each runs in plain float32 torch and with amp. All numbers are small
integers over powers of two, which every type holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import is_thorough
from small_nets import EACH_LEVEL
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp
from ampatch.errors import AmpWarning, UsageError

AS_VIEW = pytest.mark.parametrize("as_view", [False, True], ids=["own gradients", "bucket views"])
EVENTS = 22

Event = tuple[Any, ...]


def forward(model: int = 0, *, sync: bool = True, head: int = 0, factor: float = 1.0) -> Event:
    """A forward pass; its loss waits for a backward pass."""
    return "forward", model, sync, head, factor


def past_wrapper(model: int = 0, factor: float = 2.0) -> Event:
    """A forward pass of the model inside the wrapper."""
    return "past_wrapper", model, factor


def block(loss: int = 0) -> Event:
    """A block of amp.scale_loss with the backward pass of one of the losses that wait."""
    return "block", loss


def plain(loss: int = 0) -> Event:
    """A backward pass outside of any block."""
    return "plain", loss


def assigned(model: int = 0) -> Event:
    """A forward pass past the wrapper, whose gradients the user assigns."""
    return "assigned", model


def clear(model: int = 0, how: str = "optimizer to None") -> Event:
    return "clear", model, how


def step(model: int = 0) -> Event:
    return "step", model


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a script runs in.

    Attributes:
        models: number of models.
        shares_optimizer: whether all have the same optimizer.
        has_heads: whether a forward pass uses one of two layers only.
        of_wrapper: options of the wrappers.
        hides_outputs: whether models return an object of a class that torch's trees do not know.
    """

    models: int = 1
    shares_optimizer: bool = True
    has_heads: bool = False
    of_wrapper: tuple[str, ...] = ()
    hides_outputs: bool = False


class Hidden:
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def float(self) -> Tensor:
        return self.value.float()


class Heads(nn.Module):
    def __init__(self, has_heads: bool, hides_outputs: bool) -> None:
        super().__init__()
        self.hides_outputs = hides_outputs
        self.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.has_heads = has_heads
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, x: Tensor, head: int) -> Tensor | Hidden:
        out = self.heads[head](x) if self.has_heads else self.heads[0](x) + self.heads[1](x)
        return Hidden(out) if self.hides_outputs else out


class World:
    """The models and optimizers of a script; without a level plain torch trains them."""

    def __init__(self, level: str | None, setting: Setting) -> None:
        self.is_plain = level is None
        self.models = [Heads(setting.has_heads, setting.hides_outputs) for _ in range(setting.models)]
        parameters = [list(model.parameters()) for model in self.models]
        if setting.shares_optimizer:
            parameters = [[each for of_model in parameters for each in of_model]]
        optimizers = [torch.optim.SGD(each, lr=0.25) for each in parameters]
        self.weights = [weight for each in parameters for weight in each]
        if level is not None:
            options: dict[str, Any] = {"half_dtype": torch.float16, "loss_scale": "dynamic", "init_scale": 8.0}
            amp.initialize(self.models, optimizers, opt_level=level, verbosity=0, **options)
            self.weights = [weight for each in optimizers for weight in amp.master_params(each)]
        self.optimizers = optimizers * (setting.models if setting.shares_optimizer else 1)
        self.wrappers = [
            DistributedDataParallel(each, **dict.fromkeys(setting.of_wrapper, True)) for each in self.models
        ]
        self.losses: list[tuple[int, Tensor]] = []
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def batch(self) -> Tensor:
        return torch.randint(-1, 2, (2, 2), generator=self.random).float()

    def forward(self, model: int, sync: bool, head: int, factor: float) -> None:
        wrapper = self.wrappers[model]
        with contextlib.nullcontext() if sync else wrapper.no_sync():
            self.losses.append((model, (wrapper(self.batch(), head).float() * factor).sum()))

    def past_wrapper(self, model: int, factor: float) -> None:
        self.losses.append((model, (self.models[model](self.batch(), 0).float() * factor).sum()))

    def block(self, loss: int) -> None:
        model, value = self.losses.pop(loss)
        with (
            contextlib.nullcontext(value) if self.is_plain else amp.scale_loss(value, self.optimizers[model]) as scaled
        ):
            scaled.backward()

    def assigned(self, model: int) -> None:
        parameters = list(self.models[model].parameters())
        self.past_wrapper(model, 2.0)
        for parameter, grad in zip(parameters, torch.autograd.grad(self.losses.pop()[1], parameters), strict=True):
            parameter.grad = grad.clone()

    def plain(self, loss: int) -> None:
        self.losses.pop(loss)[1].backward()

    def clear(self, model: int, how: str) -> None:
        owner: Any = self.optimizers[model] if how.startswith("optimizer") else self.models[model]
        owner.zero_grad(set_to_none=how.endswith("None"))

    def step(self, model: int) -> None:
        self.optimizers[model].step()
        self.optimizers[model].zero_grad()


def played(script: list[Event], setting: Setting, level: str | None) -> list[list[float] | str]:
    """The weights after each step of a script; last of all the error that ended it, if there was one."""
    found: list[list[float] | str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        warnings.filterwarnings("ignore", "this SGD steps with gradients that no", AmpWarning)
        world = World(level, setting)
        try:
            for name, *arguments in script:
                getattr(world, name)(*arguments)
                if name == "step":
                    found.append([value for weight in world.weights for value in weight.flatten().tolist()])
        except (UsageError, RuntimeError, AmpWarning) as error:
            found.append(f"{type(error).__name__}: {error}")
    warnings.simplefilter("ignore", AmpWarning)
    amp.deinitialize()
    return found


def both(script: list[Event], setting: Setting, level: str) -> tuple[list[list[float] | str], list[list[float] | str]]:
    return played(script, setting, None), played(script, setting, level)


ORDERS: dict[str, tuple[int, list[Event]]] = {
    "a forward under no_sync before the block of another": (
        1,
        [forward(), forward(sync=False), block(), step(), forward(), block(1), step()],
    ),
    "plain under no_sync, then a block": (1, [forward(sync=False), plain(), forward(), block(), step()]),
    "plain past the wrapper, then a block": (1, [past_wrapper(), plain(), forward(), block(), step()]),
    "assigned, then a block": (1, [assigned(), forward(), block(), step()]),
    "a block past the wrapper, then a block": (1, [past_wrapper(), block(), forward(), block(), step()]),
    "sum of a reduced block, then one that is not": (
        1,
        [forward(), forward(factor=2), block(), block(), forward(factor=-1), block(), step()],
    ),
    "plain under no_sync": (1, [forward(), block(), forward(sync=False), plain(), forward(factor=-1), block(), step()]),
    "plain of an older forward": (
        1,
        [forward(), forward(factor=2), block(), plain(), forward(factor=-1), block(), step()],
    ),
    "plain past the wrapper": (1, [forward(), block(), past_wrapper(), plain(), forward(factor=-1), block(), step()]),
    "plain, reduced and not": (
        1,
        [forward(), plain(), forward(sync=False), plain(), forward(factor=-1), block(), step()],
    ),
    "plain, reduced and older": (
        1,
        [forward(), forward(factor=2), plain(), plain(), forward(factor=-1), block(), step()],
    ),
    "plain, reduced, older, and a block under no_sync": (
        1,
        [forward(), forward(), plain(), plain(), forward(sync=False), block(), forward(factor=2), block(), step()],
    ),
    "cleared under no_sync": (
        1,
        [
            forward(sync=False),
            block(),
            clear(how="model to None"),
            forward(sync=False),
            plain(),
            forward(),
            block(),
            step(),
        ],
    ),
    "cleared, and a step without block": (
        1,
        [forward(sync=False), block(), clear(), forward(factor=2), plain(), step()],
    ),
    "two forwards, then two blocks": (
        2,
        [forward(0), forward(1, factor=2), block(), block(), step(), forward(0), forward(1), block(1), block(), step()],
    ),
    "a plain one of another model, then under no_sync": (
        2,
        [forward(1), plain(), forward(0, sync=False), block(), forward(0), block(), forward(0), plain(), step()],
    ),
    "two models, one of which accumulates": (
        2,
        [forward(0, sync=False), block(), forward(0, factor=2), forward(1), block(1), block(), step()],
    ),
}


@EACH_LEVEL
@AS_VIEW
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.covering(2)
def test_orders_of_passes_end_with_the_weights_of_plain_torch(two: Workers, level, as_view, order):
    models, script = ORDERS[order]
    setting = Setting(models, of_wrapper=("gradient_as_bucket_view",) if as_view else ())
    for wanted, found in two.run(both, script, setting, level):
        assert found == wanted
        assert all(isinstance(each, list) for each in wanted)


@EACH_LEVEL
@AS_VIEW
@pytest.mark.parametrize("shares_optimizer", [True, False], ids=["one optimizer", "two"])
@pytest.mark.covering(1)
def test_outputs_in_a_class_of_the_users_own_reduce_the_same(two: Workers, level, as_view, shares_optimizer):
    of_wrapper = ("gradient_as_bucket_view",) if as_view else ()
    setting = Setting(2, shares_optimizer, of_wrapper=of_wrapper, hides_outputs=True)
    script = [forward(0, sync=False), block(), forward(0, factor=2), forward(1), block(1), block(), step(0), step(1)]
    for wanted, found in two.run(both, script, setting, level):
        assert found == wanted


SETTINGS = [
    Setting(models, shares_optimizer, "find_unused_parameters" in graph, (*graph, *views))
    for views in ((), ("gradient_as_bucket_view",))
    for graph in ((), ("find_unused_parameters",), ("static_graph",))
    for models, shares_optimizer in ((1, True), (2, True), (2, False))
]


class Draw:
    """Draws a script after which ranks have the same weights in plain torch, and what it runs in."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.setting = self.chance.choice(SETTINGS)
        self.is_static = "static_graph" in self.setting.of_wrapper
        self.events: list[Event] = []
        self.waiting: list[int] = []  # the models of losses
        self.is_armed = [False] * self.setting.models  # whether the next backward pass reduces
        self.unreduced = [""] * self.setting.models  # the kind of backward pass whose gradients wait
        kinds = ["forward"] * 6 + ["backward"] * self.chance.choice([6, 8]) + ["step", "step", "clear"]
        self.is_all_in_blocks = self.chance.random() < 0.5
        # Torch itself raises if a pass beside the wrapper reaches parameters that it has found unused.
        self.may_pass_by = not self.is_static and not self.setting.has_heads and self.chance.random() < 0.5
        for _ in range(EVENTS):
            getattr(self, self.chance.choice(kinds))(self.chance.randrange(self.setting.models))

    def of_optimizer(self, model: int) -> list[int]:
        return list(range(self.setting.models)) if self.setting.shares_optimizer else [model]

    def forward(self, model: int) -> None:
        if self.is_static and self.waiting:  # torch counts the passes of a static graph
            return
        if self.may_pass_by and self.chance.random() < 0.2:
            self.events.append(past_wrapper(model))
        else:
            sync, head = self.chance.random() < 0.6, self.chance.randrange(2)
            self.events.append(forward(model, sync=sync, head=head, factor=self.chance.choice([1, 2, -1])))
            self.is_armed[model] |= sync
        self.waiting.append(model)

    def backward(self, _: int) -> None:
        if not self.waiting:
            return
        loss = self.chance.randrange(len(self.waiting))
        model = self.waiting[loss]
        kind = "block" if self.is_all_in_blocks or self.chance.random() < 0.75 else "plain"
        if kind == "plain" and any(self.unreduced[each] == "block" for each in self.of_optimizer(model)):
            return  # amp refuses to add it to what is scaled
        self.events.append((kind, loss))
        self.waiting.pop(loss)
        self.unreduced[model] = "" if self.is_armed[model] else kind
        self.is_armed[model] = False

    def step(self, model: int) -> None:
        if not any(self.unreduced[each] for each in self.of_optimizer(model)):
            self.events.append(step(model))

    def clear(self, model: int) -> None:
        how = self.chance.choice(["optimizer to None", "optimizer to zeros", "model to None", "model to zeros"])
        if self.setting.has_heads and how == "optimizer to zeros":
            how = "model to zeros"  # at O2 the former leaves None, and torch raises if an unused parameter has that
        self.events.append(clear(model, how))
        together = self.of_optimizer(model)
        # Of a shared optimizer's gradients amp leaves all scaled while some wait, even if those are cleared then.
        if how.endswith("None") and (how.startswith("optimizer") or together == [model]):
            for each in together:
                self.unreduced[each] = ""


def all_both(seeds: range, level: str) -> list[Any]:
    found = []
    for seed in seeds:
        sys.stderr.write(f"seed {seed}\n")  # read only where a rank raises, dies or hangs
        draw = Draw(seed)
        found.append(both(draw.events, draw.setting, level))
    return found


def check_random_orders(workers: Workers, level: str, seeds: range) -> None:
    first, second = workers.run(all_both, seeds, level)
    for seed, *by_rank in zip(seeds, first, second, strict=True):
        (wanted, _), (other, _) = by_rank
        is_refused = bool(wanted) and isinstance(wanted[-1], str)  # by torch, from here on
        steps = len(wanted) - is_refused
        assert wanted[:steps] == other[:steps], f"{level}, seed {seed}, plain torch: {vars(Draw(seed))}"
        for _, found in by_rank:
            assert found[: steps if is_refused else None] == wanted[:steps], f"{level}, seed {seed}: {vars(Draw(seed))}"


@EACH_LEVEL
@pytest.mark.slow
def test_random_orders_end_with_the_weights_of_plain_torch(two: Workers, level):
    check_random_orders(two, level, range(60 if is_thorough() else 8))


@EACH_LEVEL
@pytest.mark.slow
@pytest.mark.beyond_ci
def test_more_random_orders_end_with_the_weights_of_plain_torch(two: Workers, level):
    for begin in range(60, 200, 20):
        check_random_orders(two, level, range(begin, begin + 20))


def refused(level: str, as_view: bool, how: str) -> list[str]:
    """What amp says of a backward pass without scale, added to gradients that a block has left scaled."""
    world = World(level, Setting(2, False, of_wrapper=("gradient_as_bucket_view",) if as_view else ()))
    world.forward(0, False, 0, 1.0)
    world.block(0)
    loss = world.wrappers[0](world.batch(), 0).float().sum()
    begin = functools.partial(torch.autograd.backward, [loss]) if how == "autograd.backward" else loss.backward
    if how == "inputs":
        begin = functools.partial(loss.backward, inputs=[world.models[0].heads[1].weight])
    with pytest.raises(UsageError) as caught:
        begin()
    world.wrappers[1](world.batch(), 0).float().sum().backward()  # the other model has no scaled gradients
    world.clear(0, "model to None")
    world.forward(0, True, 0, 1.0)
    world.plain(0)
    grads = [each.grad.float().tolist() for each in world.models[0].parameters() if each.grad is not None]
    return [str(caught.value), str(grads)]


@EACH_LEVEL
@AS_VIEW
@pytest.mark.parametrize("how", ["backward", "autograd.backward", "inputs"])
@pytest.mark.covering(1)
def test_a_backward_pass_without_scale_after_an_unreduced_block_raises(two: Workers, level, as_view, how):
    first, second = two.run(refused, level, as_view, how)
    assert first == second
    assert "scaled_loss.backward()" in first[0]
    assert "waits, scaled, for DistributedDataParallel" in first[0]
