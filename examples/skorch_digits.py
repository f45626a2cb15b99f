"""Trains a skorch net with AmpNetMixin: fit, callbacks and checkpoints are skorch's own.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved:

    python examples/skorch_digits.py --half float16 --epochs 20 --checkpoint digits.pt
"""

import argparse
from pathlib import Path

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, GradientNormClipping
from torch import nn

from ampatch.demo.digits import load, split
from ampatch.integrations.skorch import AmpNetMixin

BATCH = 128


class Net(AmpNetMixin, NeuralNetClassifier):
    """skorch's classifier, in mixed precision."""


class Network(nn.Sequential):
    """Two layers for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


class Epochs(Callback):
    """Seeds each epoch by its number, and saves after it: a resumed run gets the same bits as an uninterrupted one."""

    def __init__(self, first: int, path: Path | None) -> None:
        self.first = first
        self.path = path

    def on_epoch_begin(self, net, **_) -> None:  # noqa: D102
        torch.manual_seed(self.first + len(net.history))

    def on_epoch_end(self, net, **_) -> None:  # noqa: D102
        if self.path is None:
            return
        kept = {"module": net.module_, "optimizer": net.optimizer_, "amp": net.amp_}
        saved = {name: each.state_dict() for name, each in kept.items()}
        # A run that is killed while it writes leaves the previous checkpoint intact.
        beside = self.path.with_suffix(".new")
        torch.save({**saved, "epoch": self.first + len(net.history)}, beside)
        beside.replace(self.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    digits, held_out = split(load())
    saved = None
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
    first = saved["epoch"] if saved else 0

    torch.manual_seed(0)
    net = Net(
        Network,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=0.005,
        max_epochs=options.epochs - first,
        batch_size=BATCH,
        iterator_train__shuffle=True,
        iterator_train__drop_last=True,
        train_split=None,
        device=str(device),
        verbose=0,
        callbacks=[Epochs(first, options.checkpoint), GradientNormClipping(1.0)],
        amp__opt_level=options.opt_level,
        amp__half_dtype=options.half,
    ).initialize()
    if saved:
        net.module_.load_state_dict(saved["module"])
        net.optimizer_.load_state_dict(saved["optimizer"])
        net.amp_.load_state_dict(saved["amp"])
    net.partial_fit(digits.images, digits.labels)

    losses = [batch["train_loss"] for batches in net.history[:, "batches"] for batch in batches]
    for step in {1, len(losses)} if losses else ():
        print(f"step {step}: loss {losses[step - 1]:.3f}")
    right = net.predict(held_out.images) == held_out.labels.numpy()
    print(f"accuracy: {right.mean():.1%}")


if __name__ == "__main__":
    main()
