"""Trains a LightningModule with AmpatchPrecision: loop, clipping and checkpoints are Lightning's own.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved:

    python examples/lightning_digits.py --half float16 --epochs 20 --checkpoint digits.ckpt
    python examples/lightning_digits.py --devices 2
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ampatch.demo.digits import Digits, load, split
from ampatch.integrations.lightning import AmpatchPrecision

BATCH = 128


class Network(pl.LightningModule):
    """Two layers for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
        self.losses: list[float] = []

    def training_step(self, batch, _):  # noqa: D102
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch, _):  # noqa: D102
        return self.net(batch[0]).argmax(1) == batch[1]

    def configure_optimizers(self):  # noqa: D102
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.005)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Shuffled(Sampler):
    """Draws each epoch's order from its number: a resumed run gets the same batches as an uninterrupted one."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Saving(pl.Callback):
    """Saves after each epoch. A run that is killed while it writes leaves the previous checkpoint intact."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, _) -> None:  # noqa: D102
        beside = self.path.with_suffix(".new")
        trainer.save_checkpoint(beside)
        if trainer.is_global_zero:
            beside.replace(self.path)


def batches(digits: Digits, sampler: Sampler | None = None) -> DataLoader:
    return DataLoader(
        TensorDataset(digits.images, digits.labels), BATCH, sampler=sampler, drop_last=sampler is not None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")

    digits, held_out = split(load())
    torch.manual_seed(0)
    model = Network()
    trainer = pl.Trainer(
        plugins=AmpatchPrecision(options.opt_level, half_dtype=options.half),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        callbacks=[Saving(options.checkpoint)] if options.checkpoint else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    resumes = options.checkpoint is not None and options.checkpoint.exists()
    trainer.fit(model, batches(digits, Shuffled(len(digits))), ckpt_path=options.checkpoint if resumes else None)

    right = torch.cat(trainer.predict(model, batches(held_out)))
    if trainer.is_global_zero:
        for step in {1, len(model.losses)} if model.losses else ():
            print(f"step {step}: loss {model.losses[step - 1]:.3f}")
        print(f"accuracy: {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
