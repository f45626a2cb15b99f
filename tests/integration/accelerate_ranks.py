"""Trains in two processes with Accelerate, in several ways, for tests/integration/test_accelerate.py.

Runs under torchrun. Its argument is the folder for the results, one file for each rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ampatch import amp
from ampatch.errors import AmpWarning, UsageError
from ampatch.integrations.accelerate import prepare

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(256, 8, generator=RANDOM)
Y = X[:, :3] * 1.2345


class Run:
    """An Accelerator with its objects; each rank starts from other weights, which DDP makes equal."""

    def __init__(self, level: str, half: str = "float16", **given: Any) -> None:
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, **given)
        torch.manual_seed(self.accelerator.process_index)
        self.raw = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(self.raw.parameters(), lr=0.05)
        objects = (self.raw, optimizer, DataLoader(TensorDataset(X, Y), batch_size=8), StepLR(optimizer, 1, 0.999))
        prepared = prepare(self.accelerator, *objects, opt_level=level, half_dtype=half, init_scale=1024.0)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        assert isinstance(self.model, DistributedDataParallel)
        self.skipped: list[bool] = []

    def train(self, bad_batch: int | None = None) -> None:
        for index, (x, y) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                is_bad = index == bad_batch and self.accelerator.process_index == 1
                self.accelerator.backward(self.loss(x, y) * (torch.inf if is_bad else 1))
                self.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    def step(self) -> None:
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.skipped.append(self.accelerator.optimizer_step_was_skipped)

    def result(self) -> dict[str, Any]:
        """Ends the training, and returns what came of it."""
        scale = amp.get_loss_scale() if amp.is_on() else None
        self.accelerator.free_memory()
        assert {each.dtype for each in self.raw.parameters()} == {torch.float32}
        weights = torch.cat([each.detach().reshape(-1) for each in self.raw.parameters()])
        epochs = self.scheduler.scheduler.last_epoch
        return {"weights": weights.tolist(), "skipped": self.skipped, "scale": scale, "epochs": epochs}


def accumulated(level: str) -> Run:
    run = Run(level, gradient_accumulation_steps=3)
    run.train()
    return run


def synchronised(level: str) -> Run:
    """Reduces gradients in every batch of a step."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    run = Run(level, gradient_accumulation_plugin=plugin)
    run.train()
    return run


def triggered(level: str) -> Run:
    """Decides only before the last backward pass that it reduces."""
    run = Run(level)
    batches = iter(run.loader)
    for _ in range(8):
        with run.accelerator.no_sync(run.model):
            first, second = run.loss(*next(batches)), run.loss(*next(batches))
            run.accelerator.backward(first)
        with run.accelerator.trigger_sync_in_backward(run.model):
            run.accelerator.backward(second)
        run.step()
    return run


def overflow(level: str) -> Run:
    """Overflows on one rank, in a batch whose gradients are not reduced yet."""
    run = Run(level, gradient_accumulation_steps=2)
    run.train(bad_batch=2)
    return run


def adversarial(level: str, every: int = 1) -> dict[str, Any]:
    """Two models with an optimizer each; the first one's forward pass precedes the other's backward pass."""
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    torch.manual_seed(accelerator.process_index)
    raw = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), nn.Linear(3, 1)]
    objects = (*raw, *(torch.optim.SGD(each.parameters(), lr=0.05) for each in raw))
    batches = DataLoader(TensorDataset(X, Y), batch_size=8)
    prepared = prepare(accelerator, *objects, batches, opt_level=level, half_dtype="float16", init_scale=1024.0)
    maker, critic, of_maker, of_critic, loader = prepared
    for x, y in loader:
        with accelerator.accumulate(maker, critic):
            made = maker(x)
            accelerator.backward(critic(made.detach()).square().mean() + (critic(y) - 1).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(critic.parameters(), 1.0)
            of_critic.step()
            of_critic.zero_grad()
            accelerator.backward(F.mse_loss(made, y) - 0.01 * critic(made).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(maker.parameters(), 1.0)
            of_maker.step()
            of_maker.zero_grad()
    accelerator.free_memory()
    weights = torch.cat([each.detach().reshape(-1) for model in raw for each in model.parameters()])
    return {"weights": weights.tolist(), "skipped": [], "epochs": 0}


class Checkpointing(nn.Sequential):
    """Runs its last layer in a reentrant checkpoint, so that the graph of the loss does not show its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self[2], self[1](self[0](x)), use_reentrant=True)  # type: ignore[no-any-return]


def partly_trained(level: str, kind: type[nn.Sequential] = nn.Sequential) -> dict[str, Any]:
    """Gradients, after each accumulation, of a layer in the wrapper that no optimizer updates."""
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    raw = kind(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, batches = torch.optim.SGD(raw[0].parameters(), lr=0.05), DataLoader(TensorDataset(X, Y), batch_size=8)
    options: dict[str, Any] = {"half_dtype": "float16", "init_scale": 1024.0}
    model, optimizer, loader = prepare(accelerator, raw, optimizer, batches, opt_level=level, **options)
    grads: list[float] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                grads += torch.cat([each.grad.float().flatten() for each in raw[2].parameters()]).tolist()
            optimizer.step()
            if accelerator.sync_gradients:
                model.zero_grad()
    accelerator.free_memory()
    return {"weights": grads, "skipped": [], "epochs": 0}


def refused() -> dict[str, str]:
    """What cannot work without the reduction, and says so."""
    told = {}
    run = Run("O2", gradient_accumulation_steps=2)
    batches = iter(run.loader)
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.loss(*next(batches)))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            try:
                getattr(run.accelerator, name)(run.model.parameters(), 1.0)
            except UsageError as error:
                told[name] = str(error)
    run.raw.zero_grad()
    run.accelerator.free_memory()
    run = Run("O2")
    try:
        with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=4):
            run.accelerator.backward(run.loss(*next(iter(run.loader))))
            run.optimizer.step()
    except UsageError as error:
        told["LocalSGD"] = str(error)
    run.raw.zero_grad()
    run.accelerator.free_memory()
    return told


def local() -> Run:
    """Averages weights instead of gradients, which works without a scale and without masters."""
    run = Run("O1", "bfloat16")
    with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=4) as sgd:
        for x, y in run.loader:
            run.accelerator.backward(run.loss(x, y))
            run.optimizer.step()
            run.optimizer.zero_grad()
            sgd.step()
    return run


if __name__ == "__main__":
    warnings.simplefilter("error", AmpWarning)
    warnings.filterwarnings("ignore", "the loss of a skipped step is")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for level in ("O0", "O1", "O2"):
        results[f"adversarial {level}"] = adversarial(level)
        results[f"adversarial-accumulated {level}"] = adversarial(level, every=2)
        results[f"partly-trained {level}"] = partly_trained(level)
        results[f"partly-trained-hidden {level}"] = partly_trained(level, Checkpointing)
    for way in (accumulated, synchronised, triggered, overflow):
        for level in ("O0", "O1", "O2"):
            if (way, level) != (overflow, "O0"):
                results[f"{way.__name__} {level}"] = way(level).result()
    results["local"] = local().result()
    results["refused"] = refused()
    last = Run("O2")
    last.accelerator.end_training()
    assert not amp.is_on()
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")
