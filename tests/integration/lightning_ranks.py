"""Trains in two processes with Lightning's DDP strategy, in several ways, for tests/integration/test_lightning.py."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ampatch import amp
from ampatch.errors import AmpWarning
from ampatch.integrations.lightning import AmpatchPrecision

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(256, 8, generator=RANDOM)
Y = X[:, :3] * 1.2345


class Automatic(pl.LightningModule):
    """A net that learns by automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.skipped: list[int] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        assert batch[1].dtype is torch.float32  # DDP calls the step by way of the module's forward
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(Automatic):
    """Two nets that learn by manual optimization, with gradients summed over batches before they are reduced."""

    def __init__(self, every: int, overflows: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        self.every, self.overflows = every, overflows

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        of_net, of_critic = self.optimizers()
        steps = index % self.every == self.every - 1
        with of_net.toggle_model(sync_grad=steps):
            output = self.net(batch[0])
            loss = F.mse_loss(output, batch[1]) - 0.01 * self.critic(output).mean()
            # In a pass whose gradients are not reduced yet.
            is_bad = self.overflows and self.global_rank == 1 and index == self.every and self.current_epoch == 0
            self.manual_backward(loss * (torch.inf if is_bad else 1))
            self.step(of_net, steps, index)
        with of_critic.toggle_model(sync_grad=steps):
            output = self.net(batch[0]).detach()
            self.manual_backward(self.critic(output).square().mean() + (self.critic(batch[1]) - 1).square().mean())
            self.step(of_critic, steps, None)

    def step(self, optimizer: Any, steps: bool, index: int | None) -> None:
        if steps:
            optimizer.step()
            optimizer.zero_grad()
            if index is not None and amp.is_on() and amp.step_was_skipped(optimizer):
                self.skipped.append(index // self.every)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.net, self.critic)]


class Reporting(pl.Callback):
    """Writes what came of a run into a file for each rank."""

    def __init__(self, mode: str, level: str) -> None:
        self.name = f"{mode} {level}"

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        assert not amp.is_on()
        assert type(trainer.strategy.model) is type(module)
        scale = trainer.precision_plugin.state_dict().get("loss_scaler0", {}).get("loss_scale")
        weights = torch.cat([each.detach().reshape(-1) for each in module.parameters()])
        result = {"skipped": module.skipped, "scale": scale, "weights": weights.tolist()}
        Path(f"{self.name} {trainer.global_rank}.json").write_text(json.dumps(result), encoding="utf-8")


def run(mode: str, level: str) -> None:
    torch.manual_seed(0)
    module, options = Automatic(), {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    strategy = "ddp_fork"
    if mode != "accumulated":
        module, options = Manual(2, mode == "overflow"), {}
        strategy = "ddp_fork_find_unused_parameters_true"
    if level != "float32":
        options["plugins"] = AmpatchPrecision(level, half_dtype="float16", init_scale=1024.0)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, callbacks=[Reporting(mode, level)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    data = DataLoader(TensorDataset(X, Y), batch_size=16)
    trainer.fit(module, data, data)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    warnings.simplefilter("error", AmpWarning)
    warnings.filterwarnings("ignore", "the loss of a skipped step is")
    torch.set_num_threads(1)
    for each in itertools.product(("accumulated", "unsynchronised"), ("float32", "O1", "O2")):
        run(*each)
    for each in ("O1", "O2"):
        run("overflow", each)
