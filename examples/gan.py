"""Trains a generator and a discriminator: two optimizers, and three losses with a loss scale each.

Run it on a GPU or, without one, on the CPU:

    python examples/gan.py
"""

import argparse

import torch
from torch import nn

from ampatch import amp

REAL, FAKE, GENERATOR = range(3)  # the losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    centre = torch.tensor([2.0, -1.0], device=device)  # of the points that the generator learns

    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.9))
    # One call for all models and optimizers. Gradients of the three losses differ in size: each has its own scale.
    (generator, discriminator), (generator_optimizer, discriminator_optimizer) = amp.initialize(
        [generator, discriminator], [generator_optimizer, discriminator_optimizer], opt_level="O1", num_losses=3
    )
    # binary_cross_entropy on probabilities is unsafe in half, so amp raises an error. On logits it is safe.
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(128, 1, device=device), torch.zeros(128, 1, device=device)

    for step in range(1, options.steps + 1):
        real = centre + 0.3 * torch.randn(128, 2, device=device)
        fake = generator(torch.randn(128, 4, device=device)).float()

        # Two backward passes before one step accumulate unscaled gradients. An overflow in either skips the step.
        discriminator_optimizer.zero_grad()
        loss = criterion(discriminator(real), ones)
        with amp.scale_loss(loss, discriminator_optimizer, loss_id=REAL) as scaled_loss:
            scaled_loss.backward()
        loss = criterion(discriminator(fake.detach()), zeros)
        with amp.scale_loss(loss, discriminator_optimizer, loss_id=FAKE) as scaled_loss:
            scaled_loss.backward()
        discriminator_optimizer.step()

        # This backward pass also leaves scaled gradients in the discriminator; zero_grad clears them before its step.
        generator_optimizer.zero_grad()
        loss = criterion(discriminator(fake), ones)
        with amp.scale_loss(loss, generator_optimizer, loss_id=GENERATOR) as scaled_loss:
            scaled_loss.backward()
        generator_optimizer.step()

        if step in (1, options.steps):
            distance = (fake.detach().mean(dim=0) - centre).norm().item()
            print(f"step {step}: distance of the centres {distance:.3f}")


if __name__ == "__main__":
    main()
