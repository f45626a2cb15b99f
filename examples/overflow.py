"""Finds and cures an overflow: attention scores beyond float16's range.

    python examples/overflow.py            # the symptom: every step is skipped, and the loss scale falls
    python examples/overflow.py --trace    # the cause: the function that overflows, and what mends it
    python examples/overflow.py --mended   # the cure: the change that the trace suggests

To find it before training, in this folder:

    ampatch preflight overflow:one_step
"""

import argparse
import logging
import math

import torch
from torch import Tensor, nn

from ampatch import amp


class Attention(nn.Module):
    """Attention whose scores are scaled too late."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns each position's weighted mean over all positions."""
        # The fault: the scores are divided only after the product, which exceeds 65504.
        scores = (400 * self.query(x)) @ (400 * self.key(x)).transpose(-2, -1)
        return torch.softmax(scores / (400**2 * math.sqrt(x.shape[-1])), dim=-1) @ x


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), Attention(32), nn.Linear(32, 4))
    inputs = torch.randn(16, 6, 8)
    return model, inputs, inputs[..., :4].cumsum(dim=1)


def one_step():
    """Returns a model, its inputs and its loss function, for `ampatch preflight`."""
    model, inputs, targets = data()
    return model, inputs, lambda output: nn.functional.mse_loss(output, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="name the function that overflows")
    parser.add_argument("--mended", action="store_true", help="run it in float32")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")

    model, inputs, targets = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        half_dtype="float16",
        verbosity=int(options.trace),
        on_overflow="trace" if options.trace else "log",
        cast_lists={"blacklist": {"*": ["matmul"]}} if options.mended else None,
    )
    steps = 1 if options.trace else options.steps
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step in (1, steps) and not options.trace:
            print(f"step {step}: loss {loss.item():.3f}")
        if math.isnan(loss.item()) and step == 10:
            break
    print(f"{amp.skipped_steps(optimizer)} of {step} steps were skipped, the loss scale is {amp.get_loss_scale():g}")


if __name__ == "__main__":
    main()
