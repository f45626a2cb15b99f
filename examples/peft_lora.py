"""Trains PEFT's LoRA adapters on a frozen half base: a network that knows digits learns them lying on their side.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved:

    python examples/peft_lora.py --half float16 --epochs 20 --checkpoint digits.pt --adapter adapter
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.nn.functional import cross_entropy

from ampatch import amp
from ampatch.demo.digits import load, split

BATCH = 128


def batches(images, labels, epoch: int):
    """Yields the batches of an epoch, shuffled by its number."""
    torch.manual_seed(epoch)
    for chosen in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
        yield images[chosen], labels[chosen]


def pretrained(images, labels) -> nn.Module:
    """Returns a network that was trained in float32; in a script of yours, `from_pretrained` does this."""
    torch.manual_seed(0)
    layers = {"flatten": nn.Flatten(), "hidden": nn.Linear(64, 128), "relu": nn.ReLU(), "classes": nn.Linear(128, 10)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer.to(images.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for epoch in range(5):
        for inputs, targets in batches(images, labels, epoch):
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O1", "O2"], default="O1")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--adapter", type=Path, help="folder for the trained adapter, as PEFT saves it")
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    digits, held_out = split(load())
    images, labels = digits.images.reshape(-1, 8, 8).to(device), digits.labels.to(device)
    base = pretrained(images, labels).to(getattr(torch, options.half))  # 2 bytes a weight; amp makes no other copy
    images = images.rot90(dims=(1, 2))

    # PEFT makes adapters float32. At O2, amp makes them half, and gives them float32 masters.
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["hidden", "classes"]))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.005)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level, half_dtype=options.half)

    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        set_peft_model_state_dict(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        first = saved["epoch"]

    losses = []
    for epoch in range(first, options.epochs):
        for inputs, targets in batches(images, labels, epoch):
            loss = cross_entropy(model(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if options.checkpoint is not None:
            kept = {"adapter": get_peft_model_state_dict(model), "optimizer": optimizer.state_dict()}
            # A run that is killed while it writes leaves the previous checkpoint intact.
            beside = options.checkpoint.with_suffix(".new")
            torch.save({**kept, "amp": amp.state_dict(), "epoch": epoch + 1}, beside)
            beside.replace(options.checkpoint)
    for step in {1, len(losses)} if losses else ():
        print(f"step {step}: loss {losses[step - 1]:.3f}")

    with torch.no_grad(), amp.frozen_weights(model):
        found = model(held_out.images.reshape(-1, 8, 8).to(device).rot90(dims=(1, 2))).argmax(-1)
    print(f"accuracy: {(found.cpu() == held_out.labels).float().mean():.1%}")
    if options.adapter is not None:
        model.save_pretrained(options.adapter)  # float32 at every opt level


if __name__ == "__main__":
    main()
