"""Finds and cures NaN in bfloat16: one bad batch destroys the weights.

python examples/nan_batch.py                  # the symptom: the loss is nan for good
python examples/nan_batch.py --check-finite   # the cure: the step of that batch is skipped, and the log says so
"""

import argparse
import logging
import math

import torch
from torch import nn

from ampatch import amp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-finite", action="store_true", help="skip steps with inf or NaN in their gradients")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O5", check_finite=options.check_finite, verbosity=int(options.check_finite)
    )
    points = torch.randn(64, 8)
    for step in range(1, options.steps + 1):
        inputs = points.clone()
        if step == 10:
            inputs[0, 0] = math.nan  # as from a division by zero in a pipeline
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), points[:, :4])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step in (1, options.steps):
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"{amp.skipped_steps(optimizer)} steps were skipped")


if __name__ == "__main__":
    main()
