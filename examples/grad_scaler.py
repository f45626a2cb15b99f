"""Trains a loop written for torch.amp: ampatch.GradScaler replaces torch's, with clipping and a checkpoint.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved:

    python examples/grad_scaler.py --epochs 20 --checkpoint digits.pt
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from ampatch import GradScaler
from ampatch.demo.digits import load, split

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    half = getattr(torch, options.half)

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    digits, held_out = split(load())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    # bfloat16 has float32's range, so its gradients need no scale: the same loop runs with the scaler disabled.
    scaler = GradScaler(device.type, enabled=half is torch.float16)

    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["epoch"]

    steps = len(digits) // BATCH
    for epoch in range(first, options.epochs):
        # Seeded by the epoch, so that a resumed run sees the same batches as an uninterrupted one.
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(epoch))
        for step in range(steps):
            batch = digits[order[step * BATCH : (step + 1) * BATCH]]
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = nn.functional.cross_entropy(model(batch.images.to(device)), batch.labels.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            count = epoch * steps + step + 1
            if count in (1, options.epochs * steps):
                print(f"step {count}: loss {loss.item():.3f}")
        if options.checkpoint is not None:
            # A run that is killed while it writes leaves the previous checkpoint intact.
            beside = options.checkpoint.with_suffix(".new")
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save({**states, "epoch": epoch + 1}, beside)
            beside.replace(options.checkpoint)

    with torch.inference_mode():
        right = model(held_out.images.to(device)).argmax(dim=1).cpu() == held_out.labels
    print(f"accuracy: {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
