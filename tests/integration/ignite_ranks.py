"""Trains in two processes of ignite.distributed, in several ways, for tests/integration/test_ignite.py."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import ignite.distributed as idist
import ignite.engine
import torch
from ignite.engine import Events
from ignite.handlers import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ampatch import amp
from ampatch.errors import AmpWarning
from ampatch.integrations.ignite import AmpHandler, create_supervised_trainer

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(256, 8, generator=RANDOM)
Y = X[:, :3] * 1.2345


def train(mode: str, level: str) -> None:
    """Trains, and writes what came of it into a file for each rank."""
    rank = idist.get_rank()
    torch.manual_seed(rank)  # DDP sends rank 0's weights
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.05))
    is_amp = level != "float32"
    if is_amp:
        amp.initialize(net, optimizer, opt_level=level, half_dtype="float16", init_scale=1024.0)
    model = idist.auto_model(net)
    assert model is not net
    data = idist.auto_dataloader(TensorDataset(X, Y), batch_size=32, shuffle=False)
    batches = itertools.count()

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_bad = mode == "overflow" and rank == 1 and next(batches) == 2  # in a pass that is not the step's last
        return F.mse_loss(output, targets) * (torch.inf if is_bad else 1)

    create = create_supervised_trainer if is_amp else ignite.engine.create_supervised_trainer
    trainer = create(model, optimizer, loss_fn, gradient_accumulation_steps=2)
    handler = AmpHandler()
    if is_amp:
        handler.attach(trainer)
        to_save = {"model": model, "optimizer": optimizer, "amp": handler}
        trainer.add_event_handler(Events.COMPLETED, ModelCheckpoint(f"saved/{mode} {level}"), to_save)
    trainer.run(data, max_epochs=2)
    assert not amp.is_on()
    state = trainer.state.amp if is_amp else {}
    weights = torch.cat([each.detach().reshape(-1) for each in net.parameters()]).tolist()
    result = {"skipped": state.get("skipped_steps"), "scale": state.get("loss_scale"), "weights": weights}
    Path(f"{mode} {level} {rank}.json").write_text(json.dumps(result), encoding="utf-8")


def main(local_rank: int) -> None:
    warnings.simplefilter("error", AmpWarning)
    warnings.filterwarnings("ignore", "the loss of a skipped step is")
    warnings.filterwarnings("ignore", "the weights of a model that is in a DistributedDataParallel have the types back")
    torch.set_num_threads(1)
    for level in ("float32", "O1", "O2"):
        train("accumulated", level)
    for level in ("O1", "O2"):
        train("overflow", level)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(main)
