"""Compares training with several models, losses and optimizers to plain float32: every step has the same numbers.

A run is a script of passes and steps, played twice: by plain torch, which skips by the rule below, and under amp.

The rule: if a pass overflowed, the next step of every optimizer handed to its `scale_loss` is skipped, and of no other;
a skipped step leaves everything bit for bit as it was. The scale of the passes reacts once at the first step that has
them, however many they are.

The numbers are small integers at first, batches are of one, learning rates powers of two: every weight, output and
gradient fits the eight bits of bfloat16's significand, and so nothing is ever rounded. The plain run asserts that. So
no comparison here needs a tolerance, unless it says why.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_state, combinations, dtype_name, few_of
from torch import Tensor, nn

from ampatch import amp
from ampatch.runtime import runtime
from ampatch.scaling.loss_scaler import ScaleState, first_state, make_policy, next_state
from ampatch.weights import optimizer_state

ITERATIONS = 3
OVERFLOW = 1e38  # times every scale in this file it is beyond float32

# Gradients of up to 2**6 at this scale, and after it has grown four times, are within float16.
POLICY = make_policy("dynamic", init_scale=2.0**6, scale_window=2)


@dataclass(frozen=True, slots=True)
class Level:
    opt_level: str
    half_dtype: torch.dtype = torch.bfloat16

    @property
    def weights(self) -> torch.dtype:
        return self.half_dtype if self.opt_level in ("O2", "O3", "O5") else torch.float32

    @property
    def updated(self) -> torch.dtype:
        """Of what the optimizer updates: the weights, or their masters."""
        return self.half_dtype if self.opt_level == "O3" else torch.float32

    @property
    def has_masters(self) -> bool:
        return self.opt_level in ("O2", "O5")

    @property
    def outputs(self) -> torch.dtype:
        return self.half_dtype if self.opt_level in ("O1", "O4") else torch.float32


LEVELS = {
    "O0": Level("O0"),
    **{f"{name}-{dtype_name(half)}": Level(name, half) for name in ("O1", "O2", "O3") for half in HALF_DTYPES},
    "O4": Level("O4"),
    "O5": Level("O5"),
}
every_level = pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)


def at(level: Level, *settings: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Those combinations of settings that are a level's turn."""
    return [case for own, *case in combinations(tuple(LEVELS.values()), *settings) if own is level]


class World:
    """Models and their optimizers.

    Attributes:
        outputs: the type that outputs must have; None: any.
        kept: what one event leaves for another, such as outputs that two losses share.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.outputs: torch.dtype | None = None
        self.kept: dict[str, Any] = {}

    def call(self, model: nn.Module, argument: Tensor) -> Any:
        """A model's outputs, in float32 to compute a loss from."""
        outputs = model(argument)
        found = outputs if isinstance(outputs, list) else [outputs]
        assert all(self.outputs in (None, output.dtype) for output in found), [output.dtype for output in found]
        return [output.float() for output in found] if isinstance(outputs, list) else outputs.float()


@dataclass(frozen=True, slots=True)
class Pass:
    """A backward pass.

    Attributes:
        loss: makes the loss.
        handed: which optimizers are given to `scale_loss`.
        reaches: to the parameters of which of these there are gradients; None: of all.
    """

    loss: Callable[[World], Tensor]
    handed: tuple[int, ...]
    reaches: tuple[int, ...] | None = None
    loss_id: int = 0
    overflows: bool = False
    delay_unscale: bool = False
    retain_graph: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    optimizer: int


@dataclass(frozen=True, slots=True)
class Do:
    """Anything else that both runs do."""

    action: Callable[[World], object]


Script = list[Pass | Step | Do]


def clear(*optimizers: int) -> Do:
    return Do(lambda world: [world.optimizers[index].zero_grad() for index in optimizers])


@dataclass(slots=True)
class Book:
    """What the rule says of skipped steps and scales.

    Attributes:
        scales: the state of each.
        delayed: of each, whether a pass has overflowed whose gradients are scaled still.
        unused: by optimizer, the passes since its last step: number of the scale, and whether they overflowed. All
            optimizers of a pass have one object, which is emptied once the scale has reacted.
        skipping: optimizers whose next step is skipped.
        skipped: how many steps of each have been.
    """

    scales: list[ScaleState]
    delayed: list[bool]
    unused: dict[int, list[list[tuple[int, bool]]]] = field(default_factory=dict)
    skipping: set[int] = field(default_factory=set)
    skipped: dict[int, int] = field(default_factory=dict)

    def note_pass(self, event: Pass) -> None:
        self.delayed[event.loss_id] |= event.overflows
        if event.overflows:
            self.skipping |= set(event.handed)
        if not event.delay_unscale:
            overflow, self.delayed[event.loss_id] = self.delayed[event.loss_id], False
            use = [(event.loss_id, overflow)]
            for optimizer in event.handed:
                self.unused.setdefault(optimizer, []).append(use)

    def skips(self, optimizer: int) -> bool:
        overflowed: dict[int, bool] = {}
        for use in self.unused.pop(optimizer, []):
            for loss_id, overflow in use:
                overflowed[loss_id] = overflowed.get(loss_id, False) or overflow
            use.clear()
        for loss_id, overflow in overflowed.items():
            self.scales[loss_id] = next_state(self.scales[loss_id], overflow, POLICY)
        skips = optimizer in self.skipping
        self.skipping.discard(optimizer)
        self.skipped[optimizer] = self.skipped.get(optimizer, 0) + skips
        return skips


@dataclass(frozen=True, slots=True)
class Moment:
    """What is to be after an event.

    Attributes:
        gradients: by optimizer, where they are unscaled and finite.
        weights: those of all models.
        updated: what the optimizer that stepped updates, and its state.
    """

    scales: list[float]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    skipped: bool = False
    skipped_steps: int = 0
    weights: Tensor | None = None
    updated: Tensor | None = None
    state: Tensor | None = None


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(tensor.detach().float().flatten() for tensor in tensors)])


def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it updates: at O2 the masters, as they are, for `amp.master_params` copies edits."""
    live = runtime.live
    is_adopted = live is not None and live.adopted.has(optimizer)
    return list(live.adopted.record_of(optimizer).gradients.updated.parameters()) if is_adopted else held(optimizer)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in parameters(optimizer) if parameter.grad is not None]


def weights(world: World) -> list[Tensor]:
    return [parameter for model in world.models for parameter in model.parameters()]


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = [optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in held(optimizer)]
    return [buffer for buffer in found if buffer is not None]


def assert_exact(tensors: Sequence[Tensor]) -> None:
    """Neither half type rounds these, and the scaled ones are within float16."""
    numbers = flat(tensors)
    assert all(torch.equal(numbers, numbers.to(half).float()) for half in HALF_DTYPES)
    assert numbers.abs().max().item() < 2.0**6 if len(numbers) else True


def play_plainly(world: World, script: Script, scalers: int) -> list[Moment]:
    """Without amp; a pass that overflows under amp has its gradients here, and the rule says who skips."""
    book = Book([first_state(POLICY)] * scalers, [False] * scalers)
    moments = []
    for event in script:
        match event:
            case Do():
                event.action(world)
                continue
            case Pass():
                before = [flat(gradients(optimizer)) for optimizer in world.optimizers]
                event.loss(world).backward(retain_graph=event.retain_graph)
                after = [flat(gradients(optimizer)) for optimizer in world.optimizers]
                for index in event.handed if event.reaches is None else event.reaches:
                    assert not torch.equal(before[index], after[index]), "a pass whose loss would not be missed"
                book.note_pass(event)
                known = () if event.delay_unscale else set(event.handed) - book.skipping
                moment = Moment([], {index: after[index] for index in known})
                assert_exact(after)
            case Step(index):
                optimizer, skips = world.optimizers[index], book.skips(event.optimizer)
                if not skips:
                    optimizer.step()
                moment = Moment(
                    [],
                    skipped=skips,
                    skipped_steps=book.skipped[index],
                    weights=flat(weights(world)),
                    updated=flat(parameters(optimizer)),
                    state=flat(state(optimizer)),
                )
                assert_exact([*weights(world), *state(optimizer)])
        moment.scales.extend(scale.loss_scale for scale in book.scales)
        moments.append(moment)
    return moments


def play(world: World, script: Script, expected: Sequence[Moment], level: Level) -> None:
    """Under amp, in step with the plain run."""
    moments = iter(expected)
    for number, event in enumerate(script):
        if isinstance(event, Do):
            event.action(world)
            continue
        moment = next(moments)
        with noting(number=number, event=event):
            if isinstance(event, Pass):
                play_pass(world, event)
                for index, wanted in moment.gradients.items():
                    found = gradients(world.optimizers[index])
                    assert {gradient.dtype for gradient in found} <= {level.updated}
                    assert torch.equal(flat(found), wanted)
            else:
                play_step(world, event, moment)
                # A step takes the masters' gradients away, skipped or not.
                assert not level.has_masters or gradients(world.optimizers[event.optimizer]) == []
            assert [amp.get_loss_scale(index) for index in range(len(moment.scales))] == moment.scales
    assert {weight.dtype for weight in weights(world)} == {level.weights}
    assert {parameter.dtype for each in world.optimizers for parameter in parameters(each)} == {level.updated}


def play_pass(world: World, event: Pass) -> None:
    optimizers = [world.optimizers[index] for index in event.handed]
    with amp.scale_loss(
        event.loss(world) * (OVERFLOW if event.overflows else 1),
        optimizers if len(optimizers) > 1 else optimizers[0],
        event.loss_id,
        delay_unscale=event.delay_unscale,
    ) as scaled_loss:
        scaled_loss.backward(retain_graph=event.retain_graph)


def play_step(world: World, event: Step, moment: Moment) -> None:
    optimizer = world.optimizers[event.optimizer]

    def now() -> Any:
        return [weights(world), parameters(optimizer), optimizer.state_dict()]

    before = copy.deepcopy(now()) if moment.skipped else None
    optimizer.step()
    if moment.skipped:
        assert_same_state(now(), before)
    assert amp.step_was_skipped(optimizer) is moment.skipped
    assert amp.skipped_steps(optimizer) == moment.skipped_steps
    assert torch.equal(flat(weights(world)), moment.weights)
    assert torch.equal(flat(list(amp.master_params(optimizer))), moment.updated)
    assert torch.equal(flat(state(optimizer)), moment.state)


@contextlib.contextmanager
def noting(**what: object) -> Iterator[None]:
    """A failure inside says which of the cases of its test it was."""
    try:
        yield
    except Exception as error:
        error.add_note(", ".join(f"{name}={value}" for name, value in what.items()))
        raise


def begin(world: World, level: Level, scalers: int) -> None:
    """Sets amp up, or has models and optimizers join; the scales begin anew."""
    amp.initialize(
        world.models,
        world.optimizers,
        opt_level=level.opt_level,
        half_dtype=level.half_dtype,
        loss_scale="dynamic",
        init_scale=POLICY.init_scale,
        scale_window=POLICY.scale_window,
        num_losses=scalers,
        verbosity=0,
    )
    fresh = {"loss_scale": POLICY.init_scale, "unskipped": 0}
    amp.load_state_dict({f"loss_scaler{index}": fresh for index in range(scalers)})


def assert_plays_alike(make: Callable[[], World], script: Script, level: Level, scalers: int) -> None:
    expected = play_plainly(make(), script, scalers)
    world = make()
    begin(world, level, scalers)
    world.outputs = level.outputs
    play(world, script, expected, level)
    # An adopted optimizer refers to itself. What is left of it would slow the other cases down, which share a session.
    del world
    gc.collect(1)


# Numbers


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def layer(seed: int, inputs: int = 2, outputs: int = 2) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    with torch.no_grad():
        made.weight.copy_(integers(-1, 1, outputs, inputs, seed=seed))
        made.bias.copy_(integers(-1, 1, outputs, seed=seed + 100))
    return made


def batch(number: int) -> tuple[Tensor, Tensor]:
    """An input without zeros, and a target that is out of reach, so that every pass has gradients."""
    return 2 * integers(0, 1, 1, 2, seed=number) - 1, 3 + integers(0, 1, 1, 2, seed=number + 100)


# At these, the numbers of all runs neither grow beyond what `assert_exact` asks for nor need more digits.
RATES = (0.25, 0.5)


class Together(nn.Module):
    """Several layers in one model."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, argument: Tensor) -> list[Tensor]:
        return [layer(argument) for layer in self.layers]


def two_layers(models: int, optimizers: int, fused: bool | None, rates: tuple[float, float] = RATES) -> World:
    """Two layers in one model or in a model each; updated by one optimizer, or by one each.

    They are small because torch 2.13's fused SGD on the CPU updates of half tensors only what fills no vector.
    """
    layers = [layer(0), layer(1)]
    first = functools.partial(torch.optim.SGD, lr=rates[0], momentum=0.5, fused=fused)
    second = functools.partial(torch.optim.SGD, lr=rates[1], fused=fused)
    if optimizers == 1:
        made = [first([parameter for each in layers for parameter in each.parameters()])]
    else:
        made = [first(layers[0].parameters()), second(layers[1].parameters())]
    return World([Together(layers)] if models == 1 else layers, made)


def outputs(world: World, argument: Tensor) -> list[Tensor]:
    """Of both layers."""
    if len(world.models) == 1:
        return world.call(world.models[0], argument)
    return [world.call(model, argument) for model in world.models]


def squared(residual: Tensor) -> Tensor:
    return residual.square().sum() / 2


def loss_of_both(number: int) -> Callable[[World], Tensor]:
    def loss(world: World) -> Tensor:
        argument, target = batch(number)
        one, other = outputs(world, argument)
        return squared(one - other - target)

    return loss


def loss_of_one(number: int, index: int) -> Callable[[World], Tensor]:
    def loss(world: World) -> Tensor:
        argument, target = batch(number)
        if len(world.models) == 1:
            return squared(outputs(world, argument)[index] - target)
        return squared(world.call(world.models[index], argument) - target)

    return loss


# The scripts


# A case is a tuple of settings, of which the last is the number of the pass that overflows, or None.
Cases = Sequence[tuple[Any, ...]]


def assert_all_play_alike(
    build: Callable[..., tuple[Callable[[], World], Script]], cases: Cases, level: Level, scalers: int = 1
) -> None:
    """Plays the script that ``build`` makes of the settings of each case."""
    for *settings, overflow_at in cases:
        make, script = build(*settings)
        passes = [number for number, event in enumerate(script) if isinstance(event, Pass)]
        if overflow_at is not None:
            script[passes[overflow_at]] = replace(script[passes[overflow_at]], overflows=True)
        with noting(settings=settings, overflow_at=overflow_at):
            assert_plays_alike(make, script, level, scalers)


# There is a session of amp for each row and level. The other axes are loops, since to set amp up takes the most time.
LOSSES = {"1-loss": (1, 1), "2-losses-1-scaler": (2, 1), "2-losses-2-scalers": (2, 2)}


def cases(losses: int) -> Cases:
    """Numbers of optimizers and models, whether fused, the reach of a loss, the optimizers handed in, the overflow."""
    every = []
    for optimizers, models, fused in itertools.product((1, 2), (1, 2), (None, True)):
        ways = [("both", "all")]
        if losses == 2:
            ways.append(("own", "all"))
        if losses == optimizers == 2:
            ways.append(("own", "own"))
        for (reach, handed), overflow_at in itertools.product(ways, (None, *range(ITERATIONS * losses))):
            every.append((optimizers, models, fused, reach, handed, overflow_at))
    return few_of(every)


@every_level
@pytest.mark.parametrize(("losses", "scalers"), LOSSES.values(), ids=LOSSES)
@pytest.mark.covering(1)
def test_every_step_is_that_of_float32_whichever_pass_overflows(losses, scalers, level):
    def build(optimizers, models, fused, reach, handed):
        script: Script = []
        everyone = tuple(range(optimizers))
        for iteration in range(ITERATIONS):
            script.append(clear(*everyone))
            for index in range(losses):
                number = iteration * losses + index
                reached = everyone if reach == "both" or optimizers == 1 else (index,)
                loss = loss_of_both(number) if reach == "both" else loss_of_one(number, index)
                script.append(Pass(loss, everyone if handed == "all" else reached, reached, loss_id=index % scalers))
            script.extend(Step(index) for index in everyone)
        return functools.partial(two_layers, models, optimizers, fused), script

    assert_all_play_alike(build, cases(losses), level, scalers)


# Several passes before a step


CHECKED, DELAYED = {}, {"delay_unscale": True}
SECOND_LOSS = {"loss_id": 1}
ACCUMULATIONS = {
    "unscaled-each-time": (CHECKED, CHECKED, CHECKED),
    "unscaled-at-the-end": (DELAYED, DELAYED, CHECKED),
    "unscaled-after-two": (DELAYED, CHECKED, CHECKED),
    "delayed-in-the-middle": (CHECKED, DELAYED, CHECKED),
    "of-two-scales": (CHECKED, SECOND_LOSS, {**SECOND_LOSS, **DELAYED}, SECOND_LOSS),
}


@every_level
def test_micro_batches_add_up_however_late_they_are_unscaled(level):
    def build(name, optimizers_and_fused):
        optimizers, fused = optimizers_and_fused
        everyone = tuple(range(optimizers))
        script: Script = []
        numbers = itertools.count()
        for _ in range(2):
            script += [Pass(loss_of_both(next(numbers)), everyone, **options) for options in ACCUMULATIONS[name]]
            script += [*(Step(index) for index in everyone), clear(*everyone)]
        return functools.partial(two_layers, 2, optimizers, fused), script

    settings = tuple(ACCUMULATIONS), ((1, None), (2, True)), (None, *range(4))
    assert_all_play_alike(build, at(level, *settings), level, scalers=2)


@every_level
@pytest.mark.parametrize("scalers", [1, 2])
@pytest.mark.covering(1)
def test_two_losses_go_backward_through_a_graph_that_they_share(scalers, level):
    def keep(number: int) -> Do:
        return Do(lambda world: world.kept.update(outputs=outputs(world, batch(number)[0])))

    def loss_of_shared(number: int, of_both: bool) -> Callable[[World], Tensor]:
        def loss(world: World) -> Tensor:
            one, other = world.kept["outputs"]
            return squared(one - other - batch(number)[1] if of_both else one - batch(number)[1])

        return loss

    def build(models, fused):
        script: Script = []
        for iteration in range(ITERATIONS):
            script += [
                clear(0, 1),
                keep(iteration),
                Pass(loss_of_shared(2 * iteration, of_both=True), (0, 1), retain_graph=True),
                Pass(loss_of_shared(2 * iteration + 1, of_both=False), (0,), loss_id=scalers - 1),
                Step(0),
                Step(1),
            ]
        return functools.partial(two_layers, models, 2, fused), script

    assert_all_play_alike(build, at(level, (1, 2), (None, True), (None, *range(2 * ITERATIONS))), level, scalers)


# After amp, and after models


@every_level
def test_deinitialize_leaves_models_and_accumulated_gradients_in_float32(level):
    for cleared in (True, False):
        world = two_layers(1, 1, None)
        begin(world, level, 1)
        for number in range(2):
            play_pass(world, Pass(loss_of_both(number), (0,)))
        wanted = flat(gradients(world.optimizers[0]))
        if cleared:
            world.optimizers[0].zero_grad()
        with noting(cleared=cleared):
            amp.deinitialize()
            if cleared:
                for number in range(2):
                    loss_of_both(number)(world).backward()
            assert {parameter.dtype for parameter in weights(world)} == {torch.float32}
            assert {gradient.dtype for gradient in gradients(world.optimizers[0])} == {torch.float32}
            assert torch.equal(flat(gradients(world.optimizers[0])), wanted)


def test_dropped_models_and_optimizers_may_be_collected_during_initialize(monkeypatch):
    level, original = LEVELS["O2-float16"], optimizer_state.parameters_of

    def collect_first(optimizer: object) -> Iterator[Tensor]:
        gc.collect(1)  # of what is as young as these
        return original(optimizer)

    keeper = two_layers(2, 2, None)
    begin(keeper, level, 1)
    gc.disable()
    try:
        for _ in range(2):
            begin(two_layers(2, 2, None), level, 1)
        monkeypatch.setattr(optimizer_state, "parameters_of", collect_first)
        world = two_layers(2, 2, None)
        begin(world, level, 1)
    finally:
        gc.enable()
    play_pass(world, Pass(loss_of_both(0), (0, 1)))
    world.optimizers[0].step()
    assert not amp.step_was_skipped(world.optimizers[0])


# Optimizers that take turns


def adversaries(fused: bool | None) -> World:
    """A generator, and a critic of what it makes."""
    models = [layer(2), layer(3, outputs=1)]
    return World(models, [torch.optim.SGD(model.parameters(), lr=0.5, fused=fused) for model in models])


def loss_of_critic(number: int) -> Callable[[World], Tensor]:
    def loss(world: World) -> Tensor:
        noise, real = batch(number)
        generator, critic = world.models
        made = world.call(generator, noise).detach()
        return (world.call(critic, made) - world.call(critic, real)).sum()

    return loss


def loss_of_generator(number: int) -> Callable[[World], Tensor]:
    def loss(world: World) -> Tensor:
        generator, critic = world.models
        return -world.call(critic, world.call(generator, batch(number)[0])).sum()

    return loss


@every_level
@pytest.mark.parametrize("scalers", [1, 2])
@pytest.mark.covering(1)
def test_generator_and_critic_step_in_turns(scalers, level):
    generator, critic = 0, 1
    # The loss of the generator leaves gradients of the critic, which are cleared in two ways.
    clear_critic = [clear(critic), Do(lambda world: world.models[critic].zero_grad())]

    def build(fused):
        script: Script = []
        for number in range(6):
            if number % 3 == 2:
                loss = Pass(loss_of_generator(number), (generator,), loss_id=scalers - 1)
                script += [clear(generator), loss, Step(generator)]
            else:
                script += [clear_critic[number // 3], Pass(loss_of_critic(number), (critic,)), Step(critic)]
        return functools.partial(adversaries, fused), script

    assert_all_play_alike(build, at(level, (None, True), (None, *range(6))), level, scalers)


@every_level
def test_optimizer_that_steps_less_often_skips_for_an_earlier_overflow(level):
    def build(fused):
        script: Script = []
        for number in range(4):
            script += [clear(0), Pass(loss_of_both(number), (0, 1)), Step(0)]
            if number % 2:
                script += [Step(1), clear(1)]
        return functools.partial(two_layers, 2, 2, fused, (0.5, 0.5)), script

    assert_all_play_alike(build, at(level, (None, True), (None, *range(4))), level)
