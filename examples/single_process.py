"""One process, one device: the whole of mixed precision in a training loop, and in the evaluation after it.

Run it on a GPU or, where there is none, on the CPU:

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

    # The model goes to its device first. Names and objects stay what they were; at O1 the weights stay float32, too.
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)

    step = 0
    while step < options.steps:
        for inputs, targets in loader:
            step += 1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            # The loss is multiplied by a scale, so that small gradients do not become zero in float16. At the end of
            # the block the gradients are divided by it; where one overflowed the step is skipped and the scale halved.
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            if step in (1, options.steps):
                print(f"step {step}: loss {loss.item():.3f}")
            if step == options.steps:
                break

    # Without the block each weight would be cast once for every batch; in it, once.
    model.eval()
    right = 0
    with torch.inference_mode(), amp.frozen_weights(model):
        for inputs, targets in loader:
            right += int((model(inputs.to(device)).argmax(dim=1).cpu() == targets).sum())
    print(f"accuracy: {right / len(points):.1%}")


if __name__ == "__main__":
    main()
