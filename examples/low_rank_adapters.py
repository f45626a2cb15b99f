"""Trains adapters with float32 masters on a frozen half base, which takes 2 bytes per weight.

python examples/low_rank_adapters.py
"""

import argparse

import torch
from torch import Tensor, nn

from ampatch import amp


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank update (Hu et al., "LoRA", 2021)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        # The adapters have the base's dtype. amp keeps float32 masters of the parameters that the optimizer gets.
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, layer.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output plus the low-rank update."""
        return self.layer(x) + self.up(self.down(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    # No optimizer updates the base, so it has no masters.
    model = amp.initialize(model, opt_level="O2", half_dtype=torch.float16)
    model[0], model[2] = Adapted(model[0], rank=8), Adapted(model[2], rank=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = amp.initialize(
        model, torch.optim.AdamW(trained, lr=0.01), opt_level="O2", half_dtype=torch.float16
    )

    for step in range(options.steps):
        inputs = torch.randn(64, 16, device=device)
        targets = inputs.sin().sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, options.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")

    # The state dict holds the adapters in float32, with all bits of their masters.
    adapters = {name: value for name, value in model.state_dict().items() if ".down." in name or ".up." in name}
    print(f"{len(adapters)} adapter weights, {adapters['0.up.weight'].dtype}")


if __name__ == "__main__":
    main()
