"""Trains with a gradient penalty: the loss contains gradients of the output, so autograd differentiates twice.

Run it on a GPU or, without one, on the CPU:

    python examples/gradient_penalty.py
"""

import argparse

import torch
from torch import nn

from ampatch import amp

# torch.autograd.grad computes the gradients in the loss before amp scales the loss. This factor keeps small ones from
# underflowing in float16. The division by it is in float32, and exact, since the factor is a power of two.
FACTOR = 2.0**8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    critic = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    critic.to(device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.002)
    critic, optimizer = amp.initialize(critic, optimizer, opt_level="O1")

    for step in range(1, options.steps + 1):
        real = 0.3 * torch.randn(128, 2, device=device) + 1
        fake = 0.3 * torch.randn(128, 2, device=device) - 1
        share = torch.rand(128, 1, device=device)
        between = (share * real + (1 - share) * fake).requires_grad_()

        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(critic(between).float().sum() * FACTOR, between, create_graph=True)
        penalty = ((gradient.float() / FACTOR).norm(dim=1) - 1).square().mean()
        loss = critic(fake).float().mean() - critic(real).float().mean() + 10 * penalty
        # The outer backward pass differentiates the inner one, and amp scales it as usual.
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step in (1, options.steps):
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
