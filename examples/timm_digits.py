"""Trains a small vision transformer with timm's parts and AmpatchScaler.

Run it on a GPU or, without one, on the CPU. With --checkpoints it saves every epoch, and resumes from the last one:

    python examples/timm_digits.py --half float16 --epochs 20 --checkpoints digits
"""

import argparse
from pathlib import Path

import timm
import torch
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, accuracy
from torch import nn

from ampatch import amp
from ampatch.demo.digits import load, split
from ampatch.integrations.timm import AmpatchScaler

BATCH = 128
SHAPE = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
WIDTH = {"embed_dim": 32, "depth": 2, "num_heads": 4, "class_token": False, "global_pool": "avg"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--checkpoints", type=Path)
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    digits, held_out = split(load())
    images, labels = digits.images.to(device), digits.labels.to(device)
    updates = len(digits) // BATCH

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE, **WIDTH).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.01, weight_decay=0.05, layer_decay=0.9)
    # Where timm's train.py sets up its scaler: before resuming, averaging and DistributedDataParallel.
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=options.opt_level, half_dtype=options.half, verbosity=0
    )
    loss_scaler = AmpatchScaler()
    average = ModelEmaV3(model, decay=0.95)

    first, saver = 0, None
    if options.checkpoints is not None:
        options.checkpoints.mkdir(exist_ok=True)
        saver = CheckpointSaver(
            model,
            optimizer,
            model_ema=average,
            amp_scaler=loss_scaler,
            checkpoint_dir=str(options.checkpoints),
            max_history=1,
        )
        last = options.checkpoints / "last.pth.tar"
        if last.exists():
            first = resume_checkpoint(model, str(last), optimizer, loss_scaler)
            load_checkpoint(average.module, str(last), use_ema=True)
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=options.epochs, step_on_epochs=False, updates_per_epoch=updates
    )
    scheduler.step_update(first * updates)

    criterion = nn.CrossEntropyLoss()
    for epoch in range(first, options.epochs):
        torch.manual_seed(epoch)  # a resumed run gets the same batches as an uninterrupted one
        order = torch.randperm(len(digits)).to(device)
        model.train()
        for index in range(updates):
            batch = order[index * BATCH : (index + 1) * BATCH]
            loss = criterion(model(images[batch]).float(), labels[batch])
            optimizer.zero_grad()
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            update = epoch * updates + index + 1
            average.update(model)
            scheduler.step_update(update)
            if update in (1, options.epochs * updates):
                print(f"step {update}: loss {loss.item():.3f}")
        if saver is not None:
            saver.save_checkpoint(epoch)

    with torch.no_grad():
        (right,) = accuracy(average.module(held_out.images.to(device)).float(), held_out.labels.to(device))
    print(f"accuracy: {right:.1f}%")


if __name__ == "__main__":
    main()
