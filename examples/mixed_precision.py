"""Trains with ampatch.MixedPrecision: half weights, and float32 masters in the optimizer's own state.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved:

    python examples/mixed_precision.py --half float16 --epochs 20 --checkpoint digits.pt
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from ampatch import GradScaler, MixedPrecision
from ampatch.demo.digits import load, split

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    half = getattr(torch, options.half)

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    digits, held_out = split(load())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    # The masters start from the float32 weights. Without masters_from they would start from the rounded ones.
    precise = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(half)
    optimizer = MixedPrecision(torch.optim.AdamW(model.parameters(), lr=0.005), masters_from=precise)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    # bfloat16 has float32's range, so its gradients need no scale: the same loop runs with the scaler disabled.
    scaler = GradScaler(device.type, enabled=half is torch.float16)

    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # the masters are in it
        scheduler.load_state_dict(saved["scheduler"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["epoch"]

    steps = len(digits) // BATCH
    for epoch in range(first, options.epochs):
        # Seeded by the epoch, so that a resumed run sees the same batches as an uninterrupted one.
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(epoch))
        for step in range(steps):
            batch = digits[order[step * BATCH : (step + 1) * BATCH]]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.images.to(device, half)).float(), batch.labels.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            count = epoch * steps + step + 1
            if count in (1, options.epochs * steps):
                print(f"step {count}: loss {loss.item():.3f}")
        scheduler.step()
        if options.checkpoint is not None:
            # A run that is killed while it writes leaves the previous checkpoint intact.
            beside = options.checkpoint.with_suffix(".new")
            kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
            torch.save({**{name: each.state_dict() for name, each in kept.items()}, "epoch": epoch + 1}, beside)
            beside.replace(options.checkpoint)

    # The trained weights in float32: the bits of the masters.
    weights = optimizer.master_state_dict(model)
    model.float().load_state_dict(weights)
    with torch.inference_mode():
        right = model(held_out.images.to(device)).argmax(dim=1).cpu() == held_out.labels
    print(f"accuracy: {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
