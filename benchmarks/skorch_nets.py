"""Measures the overhead of `AmpNetMixin` in a small skorch net: a training step, and a prediction.

Run as `python benchmarks/skorch_nets.py [--rounds N]`. One process measures all contenders in turn, since the speed of
machines varies from minute to minute. Prints medians, the 10th and 90th percentile, and ratios of medians. Asserts
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

import ampatch
from ampatch.integrations.skorch import AmpNetMixin

BATCH, BATCHES = 64, 50


class Net(AmpNetMixin, NeuralNetClassifier):
    pass


class Autocast(NeuralNetClassifier):
    """torch.autocast and GradScaler in a skorch net, as a user would write it."""

    def __init__(self, *args: Any, half: torch.dtype, **options: Any) -> None:
        super().__init__(*args, **options)
        self.half = half
        self.grad_scaler_ = torch.amp.GradScaler("cpu", enabled=half is torch.float16)

    def infer(self, x: Any, **fit_params: Any) -> Any:
        with torch.autocast("cpu", self.half):
            return super().infer(x, **fit_params).float()

    def get_loss(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", self.half):
            return super().get_loss(*args, **kwargs)

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        self._set_training(True)
        self.optimizer_.zero_grad()
        inputs, targets = batch
        outputs = self.infer(inputs, **fit_params)
        loss = self.get_loss(outputs, targets, X=inputs, training=True)
        self.grad_scaler_.scale(loss).backward()
        self.grad_scaler_.step(self.optimizer_)
        self.grad_scaler_.update()
        return {"loss": loss, "y_pred": outputs}


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


NETS: dict[str, tuple[type, dict[str, Any]]] = {
    "skorch": (NeuralNetClassifier, {}),
    "skorch, again": (NeuralNetClassifier, {}),
    "AmpNetMixin, off": (Net, {"amp__enabled": False}),
    "autocast by hand, bfloat16": (Autocast, {"half": torch.bfloat16}),
    "O1, bfloat16": (Net, {"amp__half_dtype": "bfloat16"}),
    "autocast by hand, float16": (Autocast, {"half": torch.float16}),
    "O1, float16": (Net, {"amp__half_dtype": "float16"}),
    "O1, float16, amp__scaler": (Net, {"amp__half_dtype": "float16", "amp__scaler": ampatch.GradScaler}),
    "O2, float16": (Net, {"amp__half_dtype": "float16", "amp__opt_level": "O2"}),
}


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread")
    random = np.random.default_rng(0)
    inputs = random.normal(size=(BATCH * BATCHES, 64)).astype("float32")
    targets = random.integers(0, 10, BATCH * BATCHES)

    nets = {}
    for contender, (kind, options) in NETS.items():
        nets[contender] = kind(
            MLP, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=0.1, batch_size=BATCH, max_epochs=1,
            train_split=None, verbose=0, callbacks="disable", **options,
        )  # fmt: skip
        nets[contender].fit(inputs, targets)

    def training(net: Any) -> Callable[[], object]:
        # The session is set up outside the timed code; the predictions below show its cost.
        iterator = list(net.get_iterator(net.get_dataset(inputs, targets), training=True))

        def epoch() -> None:
            for batch in iterator:
                net.train_step(batch)

        return epoch

    times: dict[str, list[float]] = {}
    epochs = {contender: training(net) for contender, net in nets.items()}
    for _ in range(rounds):
        for contender, net in nets.items():
            with net.amp_session(training=True) if isinstance(net, Net) else contextlib.nullcontext():
                times.setdefault(contender, []).append(seconds(epochs[contender]))
    report("training step, microseconds", times, 1e6 / BATCHES)

    times = {}
    for _ in range(rounds):
        for contender, net in nets.items():
            times.setdefault(contender, []).append(seconds(lambda net=net: net.predict(inputs[:BATCH])))
            if isinstance(net, Net):
                with net.amp_session():
                    net.predict(inputs[:BATCH])
                    in_session = seconds(lambda net=net: net.predict(inputs[:BATCH]))
                times.setdefault(f"{contender}, in a session", []).append(in_session)
    report("prediction of one batch, microseconds", times, 1e6)


def report(title: str, times: dict[str, list[float]], factor: float) -> None:
    baseline = statistics.median(times["skorch"])
    print(f"\n{title:42} {'median':>8} {'':24} ratio")
    for contender, found in times.items():
        low, *_, high = statistics.quantiles(found, n=10) if len(found) > 1 else found * 2
        spread = f"({low * factor:.0f} to {high * factor:.0f})"
        median = statistics.median(found)
        print(f"{contender:42} {median * factor:8.0f} {spread:24} {median / baseline:5.2f}")


if __name__ == "__main__":
    main()
