"""Trains a compiled model: torch.compile traces the casts with the rest of the graph, and fuses them.

Run it on a GPU or, without one, on the CPU:

    python examples/compile.py
"""

import argparse

import torch
from torch import nn

from ampatch import amp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; without a C++ compiler: aot_eager")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

    # torch.compile also works before amp.initialize; torch then compiles the model again, with casts.
    compiled = torch.compile(model, backend=options.backend)

    for step in range(1, options.steps + 1):
        inputs = torch.randn(64, 16, device=device)
        targets = inputs.sin().sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(compiled(inputs), targets)
        # Backward pass, scaling and step are not compiled: write them as without torch.compile.
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step in (1, options.steps):
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
