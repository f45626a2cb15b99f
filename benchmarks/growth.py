"""Measures how a training step's cost grows with parameters, patched functions, nested arguments and live models.

Run as `python benchmarks/growth.py`; `--plot FILE.svg` draws the results (`pip install .[bench]`). Prints the time that
amp adds to a step: the step under amp minus the same step in float32 without amp, measured before and after. Every
tensor has one element, so that arithmetic takes almost no time. The minimum over many steps counts for each part, since
other work of the machine can only add time. Asserts nothing.

A cost that grows as n**e is a line of slope e on logarithmic axes. Prints the slope of the line through all points, and
the slope between the last two, where constant costs matter least. 1 is linear, 0 is no growth.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ampatch import amp
from ampatch.cast_lists.lists import shipped

LEVELS = ("O1", "O2")
HALF = torch.bfloat16
LAYERS = 10  # of a model, unless the number of layers grows
CALLS = 20  # in one measurement, since one call takes microseconds

#: Seconds of each part of one step.
Times = dict[str, float]
Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """The step that is measured at one point.

    Attributes:
        models: models to pass to `amp.initialize`.
        step: function that runs one step; its argument is True if amp scales the loss.
        optimizers: one optimizer per trained model.
        options: further arguments of `amp.initialize`.
    """

    models: list[nn.Module]
    step: Callable[[bool], Times]
    optimizers: list[Optimizer] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


# Training steps


class Chain(nn.Module):
    """Layers with a single weight of 1, so that values and gradients stay the same at any depth."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(1, 1)) for _ in range(layers)]
        for index, weight in enumerate(self.weights):
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight)
        return x


def chains(count: int, layers: int = LAYERS) -> tuple[list[nn.Module], list[Optimizer]]:
    models: list[nn.Module] = [Chain(layers) for _ in range(count)]
    return models, [torch.optim.SGD(model.parameters(), lr=1e-9, fused=True) for model in models]


def train(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], scaled: bool) -> Times:
    """Runs a step of models that share one loss, and returns the time of each part."""
    times: Times = {}
    began = time.perf_counter()

    def ended(part: str) -> None:
        nonlocal began
        now = time.perf_counter()
        times[part] = now - began
        began = now

    x = torch.ones(1, 1)
    loss = torch.stack([model(x).float().sum() for model in models]).sum()
    ended("forward")
    if scaled:
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            ended("block entry")
            scaled_loss.backward()
            ended("backward")
        ended("block exit")
    else:
        loss.backward()
        ended("backward")
    for optimizer in optimizers:
        optimizer.step()
    ended("step")
    for optimizer in optimizers:
        optimizer.zero_grad()
    ended("zero_grad")
    return times


def parameters(count: int) -> Workload:
    models, optimizers = chains(1, count)
    return Workload(models, lambda scaled: train(models, optimizers, scaled), optimizers)


def functions(count: int) -> Workload:
    """Patches `F.linear` and ``count`` - 1 functions of a generated module, and no other function."""
    module = types.ModuleType("many_functions")
    names = [f"function{index}" for index in range(count - 1)]
    exec("\n".join(f"def {name}(x): return x" for name in names), vars(module))
    sys.modules[module.__name__] = module
    others: dict[str, list[str]] = {}
    for path in shipped().for_half(HALF):
        namespace, _, name = str(path).rpartition(".")
        if name != "linear":
            others.setdefault(namespace, []).append(name)
    lists = {"unlisted": others, "whitelist": {module.__name__: names}}
    models, optimizers = chains(1)
    options = {"cast_lists": lists, "patch_torch_functions": True}
    return Workload(models, lambda scaled: train(models, optimizers, scaled), optimizers, options)


def one_of_models(count: int) -> Workload:
    models, optimizers = chains(count)
    return Workload(models, lambda scaled: train(models[:1], optimizers[:1], scaled), optimizers)


def models_in_turn(count: int) -> Workload:
    models, optimizers = chains(count)

    def step(scaled: bool) -> Times:
        each = [train([model], [optimizer], scaled) for model, optimizer in zip(models, optimizers, strict=True)]
        return {part: sum(times[part] for times in each) for part in each[0]}

    return Workload(models, step, optimizers)


def models_of_one_loss(count: int) -> Workload:
    models, optimizers = chains(count)
    return Workload(models, lambda scaled: train(models, optimizers, scaled), optimizers)


# Calls with nested arguments


def take(_: object) -> None:
    """Does nothing; amp casts its arguments, as a user's registered function."""


class Taking(nn.Module):
    """A model that passes its nested argument to `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, value: object) -> None:
        take(value)


def taking(value: object) -> Workload:
    """Returns calls with a nested value: at O1 amp casts the tensors for `take`, at O2 for the model."""
    model = Taking()
    amp.register_half_function(sys.modules[__name__], "take")

    def step(_: bool) -> Times:
        began = time.perf_counter()
        for _ in range(CALLS):
            model(value)
        return {"call": (time.perf_counter() - began) / CALLS}

    return Workload([model], step)


def depth(count: int) -> Workload:
    value: object = torch.ones(1)
    for level in range(count):
        value = ([value], (value,), {"inner": value})[level % 3]
    return taking(value)


def width(count: int) -> Workload:
    return taking([torch.ones(1) for _ in range(count)])


# Measuring


@dataclass(frozen=True)
class Series:
    """A quantity that grows.

    Attributes:
        title: title of the table and the plot.
        axis: name of the quantity.
        counts: values of the quantity to measure at.
        workload: function that makes the workload for a count.
    """

    title: str
    axis: str
    counts: tuple[int, ...]
    workload: Callable[[int], Workload]


DECADES = (10, 30, 100, 300, 1000, 3000, 10_000)
MODELS = (1, 3, 10, 30, 100)
SERIES = {
    "parameters": Series("a step, by parameters", "parameters", DECADES, parameters),
    "functions": Series("a step, by patched functions", "functions", DECADES, functions),
    "depth": Series("a call, by depth of its argument", "containers in one another", (1, 2, 4, 8, 16, 32, 64), depth),
    "width": Series("a call, by width of its argument", "tensors in a list", (1, 10, 100, 1000), width),
    "models": Series("a step of one model, by live models", "models", MODELS, one_of_models),
    "turns": Series("a step of each model in turn", "models", MODELS, models_in_turn),
    "one_loss": Series("a step of models that share a loss", "models", MODELS, models_of_one_loss),
}


def measured(step: Callable[[], Times], seconds: float) -> dict[str, list[float]]:
    """Returns times of each part and of whole steps: as many as fit into the given seconds, at least seven."""
    found: dict[str, list[float]] = {}
    step()
    step()  # two warm-up steps: the first makes the optimizer's state
    gc.collect()
    end = time.perf_counter() + seconds
    for number in itertools.count():
        if number >= 7 and time.perf_counter() > end:
            return found
        times = step()
        for part, value in {**times, "whole": sum(times.values())}.items():
            found.setdefault(part, []).append(value)
    raise AssertionError


def point(series: Series, count: int, level: str, seconds: float) -> Row:
    """Returns the seconds that amp adds to each part of a step, and those of initialize and deinitialize."""
    workload = series.workload(count)
    try:
        bare = measured(lambda: workload.step(False), seconds / 2)
        began = time.perf_counter()
        amp.initialize(
            workload.models,
            workload.optimizers,
            opt_level=level,
            half_dtype=HALF,
            loss_scale="dynamic",
            verbosity=0,
            **workload.options,
        )
        initialized = time.perf_counter()
        under_amp = measured(lambda: workload.step(True), seconds)
        left = time.perf_counter()
        amp.deinitialize()
        deinitialized = time.perf_counter()
        for part, values in measured(lambda: workload.step(False), seconds / 2).items():
            bare[part] += values
    finally:
        amp.deinitialize()
    added = {part: min(values) - min(bare.get(part, [0])) for part, values in under_amp.items()}
    return {
        "count": count,
        "level": level,
        "seconds": added.pop("whole"),
        "bare_seconds": min(bare["whole"]),
        "parts": added,
        "initialize": initialized - began,
        "deinitialize": deinitialized - left,
    }


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Returns the slope of the line through points on logarithmic axes; None if any cost is zero or less."""
    points = list(points)
    if any(cost <= 0 for _, cost in points):
        return None
    return statistics.linear_regression(*zip(*((math.log(n), math.log(cost)) for n, cost in points), strict=True)).slope


def exponents(rows: Sequence[Row]) -> dict[str, float | None]:
    points = [(row["count"], row["seconds"]) for row in rows]
    return {"exponent": exponent(points), "last_exponent": exponent(points[-2:])}


# Output


def described(slope: float | None) -> str:
    return "none, as a cost is within the noise" if slope is None else f"{slope:.2f}"


def show(series: Series, level: str, rows: Sequence[Row]) -> None:
    print(f"\n{series.title}, {level}")
    parts = list(rows[0]["parts"])
    print(
        f"{series.axis:>26}{'µs added':>12}{'without amp':>13}{'initialize':>12}" + "".join(f"{p:>13}" for p in parts)
    )
    for row in rows:
        costs = "".join(f"{row['parts'][part] * 1e6:>13,.1f}" for part in parts)
        whole, bare, set_up = row["seconds"] * 1e6, row["bare_seconds"] * 1e6, row["initialize"] * 1e3
        print(f"{row['count']:>26,}{whole:>12,.1f}{bare:>13,.1f}{set_up:>9,.1f} ms{costs}", flush=True)
    found = exponents(rows)
    print(f"exponent: {described(found['exponent'])}; of the last two: {described(found['last_exponent'])}")


def plot(result: dict[str, Any], file: Path) -> None:
    """Draws a result; the same result always gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "ampatch", "svg.fonttype": "none", "font.size": 8})
    shown = [(series, result["series"][name]) for name, series in SERIES.items() if name in result["series"]]
    columns = min(4, len(shown))
    figure = Figure(figsize=(2.9 * columns, 2.6 * math.ceil(len(shown) / columns)), layout="constrained")
    for index, (series, of_level) in enumerate(shown):
        axes = figure.add_subplot(math.ceil(len(shown) / columns), columns, index + 1)
        for level, color in zip(LEVELS, ("tab:blue", "tab:orange"), strict=True):
            rows = [row for row in of_level[level]["points"] if row["seconds"] > 0]
            found = of_level[level]["exponent"]
            label = level if found is None else f"{level}: exponent {found:.2f}"
            counts = [row["count"] for row in rows]
            axes.loglog(counts, [row["seconds"] * 1e6 for row in rows], "o-", ms=3, lw=1, color=color, label=label)
        points = [row for level in LEVELS for row in of_level[level]["points"] if row["seconds"] > 0]
        last = max(points, key=lambda row: (row["count"], row["seconds"]))
        first = min(row["count"] for row in points)
        linear = [last["seconds"] * 1e6 * count / last["count"] for count in (first, last["count"])]
        axes.loglog((first, last["count"]), linear, ":", lw=1, color="gray", label="linear")
        axes.set(title=series.title, xlabel=series.axis, ylabel="µs that amp adds")
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SERIES, nargs="+", default=list(SERIES), help="what is to grow")
    parser.add_argument("--quick", action="store_true", help="fewer points, and fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw them, as SVG")
    parser.add_argument("--read", type=Path, metavar="FILE", help="draw what --json wrote, and measure nothing")
    options = parser.parse_args()
    if options.read:
        result = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        result = measure(options.only, options.quick)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(result, options.plot)


def measure(names: Sequence[str], quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    title = f"torch {torch.__version__}, Python {platform.python_version()}, one thread"
    print(title)
    gc.disable()  # no collection may fall into a timed step
    found: dict[str, Any] = {}
    for name in names:
        series = SERIES[name]
        counts = series.counts[::2] if quick else series.counts
        for level in LEVELS:
            rows = [point(series, count, level, 0.1 if quick else 1.0) for count in counts]
            show(series, level, rows)
            found.setdefault(name, {})[level] = {"points": rows, **exponents(rows)}
    return {"title": title, "series": found}


if __name__ == "__main__":
    main()
