"""Accumulates gradients: several backward passes, one clipping of their sum, one step.

Run it on a GPU or, without one, on the CPU:

    python examples/accumulation.py
"""

import argparse

import torch
from torch import nn

from ampatch import amp

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--opt-level", default="O1")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)

    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for _ in range(MICRO_BATCHES):
            inputs = torch.randn(64, 16, device=device)
            targets = inputs.sin().sum(dim=1, keepdim=True)
            loss = nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES
            # Gradients stay scaled while they accumulate, which saves an unscaling for every micro-batch.
            with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
                scaled_loss.backward()
            total += loss.detach()
        # Checks for overflow, unscales and clips, in two passes over the gradients. Returns the norm of the unscaled
        # gradients; after an overflow it is not finite, and the step is skipped.
        norm = amp.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()
        if step in (1, options.steps):
            print(f"step {step}: loss {total.item():.3f}, norm of the gradients {norm.item():.3f}")


if __name__ == "__main__":
    main()
