"""Trains a loop written for Hugging Face Accelerate: prepare() sets amp up, and the rest is Accelerate's own.

Run it on a GPU or, without one, on the CPU. With --checkpoints it saves every epoch, and resumes from the last one. For
several processes type torchrun or, on GPUs, accelerate launch:

    python examples/accelerate_digits.py --half float16 --epochs 20 --checkpoints digits
    torchrun --nproc-per-node 2 examples/accelerate_digits.py --opt-level O2
    accelerate launch --num_processes 2 examples/accelerate_digits.py --opt-level O2
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from ampatch.demo.digits import load, split
from ampatch.integrations.accelerate import prepare


def batches(digits, size: int, **options) -> DataLoader:
    return DataLoader(TensorDataset(digits.images.reshape(-1, 64), digits.labels), batch_size=size, **options)


def last_epoch(folder: Path) -> int:
    """Returns the number of the last epoch that was saved, 0 for none."""
    return max((int(each.suffix[1:]) for each in folder.glob("epoch.*[0-9]")), default=0)


def save(accelerator: Accelerator, folder: Path) -> None:
    """Saves the state under another name first: a run that is killed meanwhile leaves no half checkpoint."""
    accelerator.save_state(folder.with_suffix(folder.suffix + ".new"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.with_suffix(folder.suffix + ".new").rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path)
    options = parser.parse_args()

    set_seed(0)
    digits, held_out = split(load())
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # without it, Accelerate runs a single process on the CPU
        gradient_accumulation_steps=options.accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the order depends on the epoch only
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    model, optimizer, scheduler, training, testing = prepare(
        accelerator,
        model,
        optimizer,
        StepLR(optimizer, 50, 0.9),
        batches(digits, 64, shuffle=True),
        batches(held_out, 128),
        opt_level=options.opt_level,
        half_dtype=options.half,
    )
    first = last_epoch(options.checkpoints) if options.checkpoints else 0
    if first:
        accelerator.load_state(options.checkpoints / f"epoch.{first}")

    step = 0
    for epoch in range(first, options.epochs):
        training.set_epoch(epoch)
        for images, labels in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            if step == 1:
                accelerator.print(f"step 1: loss {loss.item():.3f}")
        if options.checkpoints:
            save(accelerator, options.checkpoints / f"epoch.{epoch + 1}")
    if step > 1:
        accelerator.print(f"step {step}: loss {loss.item():.3f}")

    model.eval()
    right = []
    with torch.inference_mode():
        for images, labels in testing:
            right.append(accelerator.gather_for_metrics(model(images).argmax(-1) == labels))
    accelerator.print(f"accuracy: {torch.cat(right).float().mean():.1%}")
    if options.checkpoints:
        accelerator.save_model(model, options.checkpoints / "model")  # float32 at every opt level
    accelerator.end_training()


if __name__ == "__main__":
    main()
