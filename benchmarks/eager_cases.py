"""What `eager_overhead.py` has each peer do: calls, steps of small models, and what a step or a call is made of.

A case is sent to a worker, set up there, and tried, so that results can be compared; then it measures a round whenever
it is asked to. It knows one peer, its worker's, and compares nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
import timeit
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from peers import APEX, Batch, MakeOptimizer, Peer
from torch import Tensor, nn
from torch.nn import functional as F

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


# Models


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(0, 1), nn.Linear(32, 10)
    )


def convnet() -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Model(NamedTuple):
    """A model that is small enough for its calls to cost more than what they compute.

    Attributes:
        make: makes it.
        inputs: the shape of a batch.
        targets: how many there are.
        steps: done in a round.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    targets: int
    steps: int

    def batch(self) -> Batch:
        return Batch(torch.randn(self.inputs), torch.randint(10, (self.targets,)))


MODELS = {
    "transformer": Model(transformer, (4, 8, 32), 32, steps=8),
    "convnet": Model(convnet, (4, 1, 8, 8), 4, steps=15),
    "MLP": Model(mlp, (8, 32), 8, steps=40),
}


# Cases


class Figure(NamedTuple):
    """What was measured in a round.

    Attributes:
        seconds: of the whole.
        without: of the same without what is looked for, in the same process; 0 where there is no such thing.
    """

    seconds: float
    without: float = 0.0

    @property
    def over(self) -> float:
        return self.seconds - self.without


Figures = dict[str, Figure]


class Evidence(NamedTuple):
    """What a peer computed, for comparison with the others.

    Attributes:
        dtype: of the result; empty where there is none.
        values: the result's, or those of several.
    """

    dtype: str
    values: list[float]

    @classmethod
    def of(cls, result: Tensor, *values: Tensor) -> Evidence:
        flat = [each.detach().double().flatten() for each in (values or (result,))]
        return cls(str(result.dtype).removeprefix("torch."), torch.cat(flat).tolist())

    def is_close_to(self, other: Evidence) -> bool:
        mine, theirs = torch.tensor(self.values), torch.tensor(other.values)
        return bool((mine - theirs).norm() <= 0.02 * theirs.norm())  # not so if anything is not finite


class Opened(NamedTuple):
    """A case in a worker: what the peer computed, by the names of its figures, and what measures a round."""

    evidence: dict[str, Evidence]
    measure: Callable[[], Figures]


class Case:
    """Something that the contenders are to do.

    Attributes:
        half: the half type's name.
        section: of the report.
        subject: what `Contender.skips` goes by.
        not_for: the names of contenders that cannot do it.
        reopens: whether it is set up anew for every round.
    """

    half: str
    section: str
    subject: str
    not_for: Collection[str] = ()
    reopens = False

    def opened(self, make: Callable[..., Peer], share: float) -> contextlib.AbstractContextManager[Opened]:
        """The case, set up for a peer until the block ends; of a full round it measures this share."""
        raise NotImplementedError


@contextlib.contextmanager
def set_up(make: Callable[..., Peer], model: nn.Module, half: str, optimizer: str = "SGD") -> Iterator[Peer]:
    peer = make(model, OPTIMIZERS[optimizer], HALVES[half])
    try:
        yield peer
    finally:
        peer.close()


def seconds(action: Callable[[], object], times: int) -> float:
    """The mean of so many, with what garbage is collected meanwhile."""
    start = time.perf_counter()
    for _ in repeat(None, times):
        action()
    return (time.perf_counter() - start) / times


def seconds_of(statement: str, names: dict[str, Any], share: float) -> float:
    """The least of five means, each of a thousand in a full round."""
    times = full(1000, share)
    return min(timeit.Timer(statement, globals=names).repeat(5, times)) / times


def full(times: int, share: float) -> int:
    """How often something is done that a full round does so many times."""
    return max(1, int(times * share))


# Calls


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of torch.

    Attributes:
        name: of the row.
        statement: as a user of mixed precision writes it.
        unpatched: on tensors that are of the right types already; empty: the same.
        aim: the most nanoseconds that it is to take over the unpatched one; None: there is none.
    """

    name: str
    statement: str
    unpatched: str = ""
    aim: int | None = None


CALLS = (
    Call("F.linear, half input, weights cached", "F.linear(h, w, b)", "F.linear(h, hw, hb)", 150),
    Call("F.linear, float32 input, weights cached", "F.linear(x, w, b)", "F.linear(h, hw, hb)", 645),
    Call("F.linear, half input and weights", "F.linear(h, hw, hb)"),
    Call("F.conv2d, half input, weights cached", "F.conv2d(h_image, kernel)", "F.conv2d(h_image, h_kernel)"),
    Call("torch.matmul, half inputs", "torch.matmul(h, h)", aim=100),
    Call("Tensor.matmul, half inputs", "h.matmul(h)"),
    Call("h @ h, half inputs", "h @ h"),
    Call("F.softmax, float32", "F.softmax(x, -1)", aim=100),
    Call("F.softmax, half input", "F.softmax(h, -1)", "F.softmax(x, -1)"),
    Call("F.layer_norm, float32", "F.layer_norm(x, (4,), b, b)"),
    Call("F.layer_norm, half input", "F.layer_norm(h, (4,), b, b)", "F.layer_norm(x, (4,), b, b)"),
    Call("F.cross_entropy, float32", "F.cross_entropy(x, target)"),
    Call("torch.dot, mixed types (promote)", "torch.dot(x[0], h[0])", "torch.dot(x[0], x[0])"),
    Call("torch.cat, mixed types", "torch.cat([x, h])"),
    Call("x + y", "x + y", aim=0),
    Call("torch.add", "torch.add(x, y)", aim=0),
)


def names_of(layer: nn.Linear, kernel: nn.Parameter, half: torch.dtype) -> dict[str, Any]:
    """What the statements speak of. Half weights are casts, as they are where they come out of a cache."""
    x, y, image = torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 1, 3, 3)
    return {
        "torch": torch,
        "F": F,
        "half": half,
        "x": x,
        "y": y,
        "h": x.to(half),
        "w": layer.weight,
        "b": layer.bias,
        "hw": layer.weight.to(half),
        "hb": layer.bias.to(half),
        "h_image": image.to(half),
        "kernel": kernel,
        "h_kernel": kernel.to(half),
        "target": torch.randint(4, (4,)),
    }


@dataclass
class CallsCase(Case):
    """All calls, each beside the unpatched one as it is in the same process, before the peer does anything.

    In two processes that do the same a call may take 200 ns more in one of them, from beginning to end: as long as what
    is looked for. It goes by where the system puts the libraries.
    """

    half: str
    section = subject = "calls"
    reopens = True

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        layer, kernel = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 1, 3, 3))
        names = names_of(layer, kernel, HALVES[self.half])
        unpatched = {call.name: call.unpatched or call.statement for call in CALLS}
        without = {name: seconds_of(statement, names, share) for name, statement in unpatched.items()}
        with set_up(make, layer, self.half) as peer, peer.casts():
            statements = unpatched if type(peer) is Peer else {call.name: call.statement for call in CALLS}
            evidence = {name: tried(statement, names) for name, statement in statements.items()}

            def measure() -> Figures:
                return {
                    name: Figure(seconds_of(statement, names, share), without[name])
                    for name, statement in statements.items()
                    if evidence[name].dtype
                }

            yield Opened(evidence, measure)


def tried(statement: str, names: dict[str, Any]) -> Evidence:
    """What a call comes to; without a type where torch refuses it, for types that nothing has cast."""
    try:
        return Evidence.of(eval(statement, names))
    except RuntimeError:
        return Evidence("", [])


# Steps


def forward(peer: Peer, batch: Batch) -> Tensor:
    loss = peer.loss(batch)
    peer.forget_casts()
    return loss


def forward_and_backward(peer: Peer, batch: Batch) -> Tensor:
    peer.zero_grad()
    loss = peer.loss(batch)
    loss.backward()
    peer.forget_casts()
    return loss


def whole_step(peer: Peer, batch: Batch) -> Tensor:
    return peer.step(batch)


@torch.no_grad()
def no_grad(peer: Peer, batch: Batch) -> Tensor:
    return peer.outputs(batch.input)


@torch.inference_mode()
def inference_mode(peer: Peer, batch: Batch) -> Tensor:
    return peer.outputs(batch.input)


class Work(NamedTuple):
    """What is done with a model.

    Attributes:
        do: does it once.
        optimizer: the optimizer's name.
        is_training: in which mode the model is.
        aim: the most that it may take of the reference's time, at O1; None: there is no aim.
    """

    do: Callable[[Peer, Batch], Tensor]
    optimizer: str = "SGD"
    is_training: bool = True
    aim: float | None = None


WORK = {
    "forward": Work(forward),
    "forward and backward": Work(forward_and_backward),
    **{f"whole step, {name}": Work(whole_step, name, aim=0.95) for name in OPTIMIZERS},
    "inference, no_grad": Work(no_grad, is_training=False),
    "inference, inference_mode": Work(inference_mode, is_training=False),
}


@dataclass
class StepCase(Case):
    subject: str
    work: str
    half: str
    section = "steps"

    def __post_init__(self) -> None:
        # To end an iteration without a step Apex has nothing public.
        self.not_for = () if WORK[self.work].do is whole_step else APEX

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        work, model = WORK[self.work], MODELS[self.subject]
        batch = model.batch()
        with set_up(make, model.make().train(work.is_training), self.half, work.optimizer) as peer:
            with torch.no_grad():
                outputs = peer.outputs(batch.input)
            # Of steps, one after the other: what one learns the next one shows.
            results = [work.do(peer, batch) for _ in range(5)]
            name, do = f"{self.subject}: {self.work}", functools.partial(work.do, peer, batch)
            yield Opened(
                {name: Evidence.of(outputs, *results)}, lambda: {name: Figure(seconds(do, full(model.steps, share)))}
            )


# Layers


class Phases:
    """Adds up the seconds of each phase of what it is handed to.

    Args:
        act: is told whom to call at the end of each phase.
        name: what the figures' names begin with.
        times: how often that is done.
    """

    def __init__(self, act: Callable[[Callable[[str], None]], object], name: str, times: int) -> None:
        self._act, self._name, self._times = act, name, times
        self._totals: dict[str, float] = {}
        self._since = 0.0

    def measure(self) -> Figures:
        self._totals.clear()
        for _ in range(self._times):
            self._since = time.perf_counter()
            self._act(self._note)
        return {f"{self._name}: {phase}": Figure(total / self._times) for phase, total in self._totals.items()}

    def _note(self, phase: str) -> None:
        self._totals[phase] = self._totals.get(phase, 0.0) + time.perf_counter() - self._since
        self._since = time.perf_counter()


@dataclass
class PhasesCase(Case):
    """A step of the transformer, phase by phase."""

    optimizer: str
    half: str
    section = subject = "layers"

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        model = MODELS["transformer"]
        batch = model.batch()
        with set_up(make, model.make(), self.half, self.optimizer) as peer:
            losses = [peer.step(batch) for _ in range(5)]
            phases = Phases(functools.partial(peer.step, batch), self.optimizer, full(model.steps, share))
            yield Opened({self.optimizer: Evidence.of(losses[0], *losses)}, phases.measure)


@dataclass
class GradientsCase(Case):
    """Unscaling and the scaler's update by themselves, with as many gradients as the transformer has."""

    half: str
    section = subject = "layers"

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        with set_up(make, transformer(), self.half) as peer:
            peer.step(MODELS["transformer"].batch())  # makes what is made at first use
            for parameter in [*peer.model.parameters(), *peer.optimizer.param_groups[0]["params"]]:
                parameter.grad = torch.zeros_like(parameter)
            yield Opened({}, Phases(peer.work_on_gradients, "by itself", full(100, share)).measure)


# A statement, and what it does beside the layer.
CALL_LAYERS = {
    "a cast": ("F.linear(x, hw)", "F.linear(h, hw)"),
    "a cached weight's look-up": ("F.linear(h, w)", "F.linear(h, hw)"),
    "a weight's cast that misses": ("forget(); F.linear(h, w)", "forget(); F.linear(h, hw)"),
}
UNPATCHED_LAYERS = {"a cast": ("x.to(half)", "pass"), "a weight's cast that misses": ("w.to(half)", "pass")}
FORWARD_LAYERS = {"casts around a forward": ("peer.outputs(x)", "module(h)")}


@dataclass
class CastsCase(Case):
    """What there is in a call, or around the forward of a model of half weights."""

    half: str
    section = subject = "layers"

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        half = HALVES[self.half]
        layer, kernel, module = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 1, 3, 3)), nn.Linear(4, 4).to(half)
        names = names_of(layer, kernel, half)
        with set_up(make, layer, self.half) as peer, peer.casts():
            names |= {"peer": peer, "module": module, "forget": peer.forget_casts}
            has_half_weights = layer.weight.dtype is half
            layers = FORWARD_LAYERS if has_half_weights else UNPATCHED_LAYERS if type(peer) is Peer else CALL_LAYERS

            def measure() -> Figures:
                return {
                    name: Figure(seconds_of(whole, names, share), seconds_of(rest, names, share))
                    for name, (whole, rest) in layers.items()
                }

            yield Opened({}, measure)


def all_cases(sections: Collection[str]) -> Iterator[Case]:
    for half in HALVES:
        if "calls" in sections:
            yield CallsCase(half)
        if "steps" in sections:
            yield from (StepCase(model, work, half) for model in MODELS for work in WORK)
        if "layers" in sections:
            yield CastsCase(half)
            yield from (PhasesCase(optimizer, half) for optimizer in OPTIMIZERS)
            yield GradientsCase(half)
