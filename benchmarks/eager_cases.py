"""The cases of `eager_overhead.py`: calls, steps of small models, and the layers of a step or a call.

`eager_overhead.py` sends a case to a worker, which sets it up and runs it once, so that results can be compared. Then
the case measures a round on each request. It must know only its worker's peer, and must not compare.
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

from ampatch import amp

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


# Models


def transformer(width: int = 32, heads: int = 4, layers: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Flatten(0, 1), nn.Linear(width, 10)
    )


def convnet() -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Model(NamedTuple):
    """A model so small that its calls cost more than its arithmetic.

    Attributes:
        make: function that makes the model.
        inputs: shape of a batch.
        targets: number of targets in a batch.
        steps: number of steps in a round.
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
    """Times of one round.

    Attributes:
        seconds: seconds of the whole work.
        without: seconds of the same work without the measured part, in the same process; 0 if there is none.
    """

    seconds: float
    without: float = 0.0

    @property
    def over(self) -> float:
        return self.seconds - self.without


Figures = dict[str, Figure]


class Evidence(NamedTuple):
    """A peer's result, for comparison with those of the others.

    Attributes:
        dtype: dtype of the result; empty if there is no result.
        values: values of one or several results.
    """

    dtype: str
    values: list[float]

    @classmethod
    def of(cls, result: Tensor, *values: Tensor) -> Evidence:
        flat = [each.detach().double().flatten() for each in (values or (result,))]
        return cls(str(result.dtype).removeprefix("torch."), torch.cat(flat).tolist())

    def is_close_to(self, other: Evidence) -> bool:
        mine, theirs = torch.tensor(self.values), torch.tensor(other.values)
        return bool((mine - theirs).norm() <= 0.02 * theirs.norm())  # False if any value is not finite


class Opened(NamedTuple):
    """A case set up in a worker: the peer's results by figure, and a function that measures a round."""

    evidence: dict[str, Evidence]
    measure: Callable[[], Figures]


class Case:
    """Work for the contenders.

    Attributes:
        half: name of the half type.
        section: section of the report.
        subject: name that `Contender.skips` refers to.
        not_for: names of contenders that cannot do it.
        reopens: True if the case is set up again for every round.
    """

    half: str
    section: str
    subject: str
    not_for: Collection[str] = ()
    reopens = False

    def opened(self, make: Callable[..., Peer], share: float) -> contextlib.AbstractContextManager[Opened]:
        """Sets the case up for a peer while the block runs.

        Args:
            make: function that makes the peer.
            share: share of a full round to measure, 0 to 1.
        """
        raise NotImplementedError


@contextlib.contextmanager
def set_up(make: Callable[..., Peer], model: nn.Module, half: str, optimizer: str = "SGD") -> Iterator[Peer]:
    peer = make(model, OPTIMIZERS[optimizer], HALVES[half])
    try:
        yield peer
    finally:
        peer.close()


def seconds(action: Callable[[], object], times: int) -> float:
    """Returns the mean seconds of an action, garbage collection included."""
    start = time.perf_counter()
    for _ in repeat(None, times):
        action()
    return (time.perf_counter() - start) / times


def seconds_of(statement: str, names: dict[str, Any], share: float) -> float:
    """Returns the least of five means, each of a thousand runs in a full round."""
    times = full(1000, share)
    return min(timeit.Timer(statement, globals=names).repeat(5, times)) / times


def full(times: int, share: float) -> int:
    """Returns the number of repetitions in a share of a round; a full round has ``times``."""
    return max(1, int(times * share))


# Calls


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a torch function.

    Attributes:
        name: name of the row.
        statement: call as a user of mixed precision writes it.
        unpatched: call on tensors that already have the right dtypes; empty if it is the same.
        aim: maximum nanoseconds over the unpatched call; None for no aim.
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
    """Returns the names in the statements. Half weights are casts of float32 ones, like those from a cache."""
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
    """All calls, each compared with the unpatched call in the same process, timed before the peer is set up.

    Two identical processes can differ by 200 ns per call throughout, as much as the measured overhead: it depends on
    the addresses at which the system loads the libraries.
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
    """Returns a call's result; without a dtype if torch raises, because nothing cast mixed dtypes."""
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
    """Work on a model.

    Attributes:
        do: function that does the work once.
        optimizer: name of the optimizer.
        is_training: True if the model is in training mode.
        aim: maximum ratio to the reference's time, at O1; None for no aim.
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
        # Apex has no public function that ends an iteration without a step.
        self.not_for = () if WORK[self.work].do is whole_step else APEX

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        work, model = WORK[self.work], MODELS[self.subject]
        batch = model.batch()
        with set_up(make, model.make().train(work.is_training), self.half, work.optimizer) as peer:
            with torch.no_grad():
                outputs = peer.outputs(batch.input)
            # Several steps in turn: the loss of a step shows the weights that the previous one left.
            results = [work.do(peer, batch) for _ in range(5)]
            name, do = f"{self.subject}: {self.work}", functools.partial(work.do, peer, batch)
            yield Opened(
                {name: Evidence.of(outputs, *results)}, lambda: {name: Figure(seconds(do, full(model.steps, share)))}
            )


# Layers


class Phases:
    """Sums the seconds of each phase of some work.

    Args:
        act: function that does the work; it gets a callback to call at the end of each phase.
        name: prefix of the figures' names.
        times: number of repetitions.
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
    """Measures a step of the transformer, phase by phase."""

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
    """Measures unscaling and the scaler's update alone, on zero gradients of the transformer's shapes."""

    half: str
    section = subject = "layers"

    @contextlib.contextmanager
    def opened(self, make: Callable[..., Peer], share: float) -> Iterator[Opened]:
        torch.manual_seed(0)
        with set_up(make, transformer(), self.half) as peer:
            peer.step(MODELS["transformer"].batch())  # so that state made at first use exists
            for parameter in [*peer.model.parameters(), *amp.master_params(peer.optimizer)]:
                parameter.grad = torch.zeros_like(parameter)
            yield Opened({}, Phases(peer.work_on_gradients, "by itself", full(100, share)).measure)


# By layer: a statement, and the same work without that layer.
CALL_LAYERS = {
    "a cast": ("F.linear(x, hw)", "F.linear(h, hw)"),
    "a cached weight's look-up": ("F.linear(h, w)", "F.linear(h, hw)"),
    "a weight's cast that misses": ("forget(); F.linear(h, w)", "forget(); F.linear(h, hw)"),
}
UNPATCHED_LAYERS = {"a cast": ("x.to(half)", "pass"), "a weight's cast that misses": ("w.to(half)", "pass")}
FORWARD_LAYERS = {"casts around a forward": ("peer.outputs(x)", "module(h)")}


@dataclass
class CastsCase(Case):
    """Measures the layers of a call, or the casts around the forward pass of a model with half weights."""

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
