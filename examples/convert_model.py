"""Trains a model at O1, and serves a copy with half weights, which amp.convert_model makes.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved. With
--program it writes the exported program, which runs without ampatch:

    python examples/convert_model.py --half float16 --epochs 20 --checkpoint digits.pt --program digits.pt2
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from ampatch import amp
from ampatch.demo.digits import load, split

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--program", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    digits, held_out = split(load())
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU()),
        *(nn.Linear(256, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", half_dtype=options.half, verbosity=0)

    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        first = saved["epoch"]

    steps = len(digits) // BATCH
    for epoch in range(first, options.epochs):
        # Seeded by the epoch, so that a resumed run sees the same batches as an uninterrupted one.
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(epoch))
        for step in range(steps):
            batch = digits[order[step * BATCH : (step + 1) * BATCH]]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.images.to(device)), batch.labels.to(device))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            count = epoch * steps + step + 1
            if count in (1, options.epochs * steps):
                print(f"step {count}: loss {loss.item():.3f}")
        if options.checkpoint is not None:
            # A run that is killed while it writes leaves the previous checkpoint intact.
            beside = options.checkpoint.with_suffix(".new")
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            torch.save({**kept, "epoch": epoch + 1}, beside)
            beside.replace(options.checkpoint)
    amp.deinitialize()

    # From here on torch is unpatched, and the model is plain float32. The copy casts by itself.
    served = amp.convert_model(model, options.half)
    images = held_out.images.to(device)
    with torch.inference_mode():
        right = served(images).argmax(dim=1).cpu() == held_out.labels
    print(f"accuracy: {right.float().mean():.1%}")
    sizes = [sum(each.numel() * each.element_size() for each in made.parameters()) for made in (model, served)]
    print(f"weights: {sizes[0]:,} bytes, of the copy {sizes[1]:,}")
    if options.program is not None:
        with torch.no_grad():
            torch.export.save(torch.export.export(served, (images,)), options.program)


if __name__ == "__main__":
    main()
