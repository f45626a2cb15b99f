"""Reports what amp does in sixty steps of a training loop, and what to do about it.

python examples/report.py                     # prints the report
python examples/report.py --html report.html  # writes it as a page
python examples/report.py --mended            # the same model, after two of the report's sentences were followed
"""

import argparse

import torch
from torch import Tensor, nn

from ampatch import amp


class Cipher(nn.Module):
    """A small transformer that learns to replace each letter by the next one."""

    def __init__(self, letters: int, is_mended: bool) -> None:
        super().__init__()
        self.is_mended = is_mended
        self.embed, self.position = nn.Embedding(letters, 64), nn.Parameter(0.02 * torch.randn(16, 64))
        self.body = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.widen, self.head = nn.Linear(64, 128), nn.Linear(128, letters)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the logits of each letter, at each position."""
        hidden = torch.relu(self.widen(self.body(self.embed(text) + self.position)))
        if not self.is_mended:
            hidden = hidden.float()  # the head casts it back to half
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--mended", action="store_true", help="follow two of the report's sentences")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Cipher(32 if options.mended else 30, options.mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer = amp.initialize(model, optimizer, half_dtype="float16", verbosity=0)
    with amp.report() as report:
        for step in range(1, options.steps + 1):
            text = torch.randint(30, (64, 16))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(text).flatten(0, 1), (text.flatten() + 1) % 30)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            if step in (1, options.steps):
                print(f"step {step}: loss {loss.item():.3f}")
    print(report)
    if options.html:
        report.to_html(options.html)


if __name__ == "__main__":
    main()
