"""Trains and evaluates on one device: the loop to begin with.

Run it on a GPU or, without one, on the CPU:

    python examples/single_process.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampatch import amp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--opt-level", default="O1")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    points = torch.rand(1024, 2) * 2 - 1
    inside = (points.norm(dim=1) < 0.7).long()
    loader = DataLoader(TensorDataset(points, inside), batch_size=128, shuffle=True)

    # Move the model to its device first. amp.initialize returns the same objects; at O1 the weights stay float32.
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)

    step = 0
    while step < options.steps:
        for inputs, targets in loader:
            step += 1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            # Multiplies the loss by a scale, so that small gradients do not underflow in float16. At the end of the
            # block amp divides the gradients by the scale. After an overflow it skips the step and halves the scale.
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            if step in (1, options.steps):
                print(f"step {step}: loss {loss.item():.3f}")
            if step == options.steps:
                break

    # Without frozen_weights, amp would cast each weight once per batch; with it, once in all.
    model.eval()
    right = 0
    with torch.inference_mode(), amp.frozen_weights(model):
        for inputs, targets in loader:
            right += int((model(inputs.to(device)).argmax(dim=1).cpu() == targets).sum())
    print(f"accuracy: {right / len(points):.1%}")


if __name__ == "__main__":
    main()
