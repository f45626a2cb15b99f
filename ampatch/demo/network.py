"""The demo's network: small, with one layer of each kind that mixed precision treats differently.

Half types speed up convolutions, linear layers and attention; batch norm, layer norm and the softmax of the loss must
stay in float32. Must never refer to precision: it is an ordinary module, as a user would write it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch.demo.digits import CLASSES, SIDE

# Wide enough for 99% of the digits; a wider network only takes longer on a CPU without float16 arithmetic.
WIDTH = 32
HEADS = 4
# The transformer block runs twice with the same weights: the second time, their casts come from the cache.
ROUNDS = 2
_TOKENS = (SIDE // 2) ** 2


class DigitsNetwork(nn.Module):
    """Two convolutions, then a transformer block that runs twice over the 16 positions of the pooled image.

    Maps images of shape (batch, 1, 8, 8) to scores of shape (batch, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTH, kernel_size=3, padding=1),
            nn.BatchNorm2d(WIDTH),
            nn.GELU(),
            # First, since on a CPU without float16 arithmetic the next backward pass takes nearly all the time.
            nn.MaxPool2d(2),
            nn.Conv2d(WIDTH, WIDTH, kernel_size=3, padding=1),
            nn.BatchNorm2d(WIDTH),
            nn.GELU(),
        )
        self.position = nn.Parameter(torch.zeros(_TOKENS, WIDTH))
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.feedforward_norm = nn.LayerNorm(WIDTH)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Returns scores of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        x = self.stem(images).flatten(start_dim=2).transpose(1, 2) + self.position
        for _ in range(ROUNDS):
            x = x + self.attention(self.attention_norm(x))
            x = x + self.feedforward(self.feedforward_norm(x))
        scores: Tensor = self.head(self.head_norm(x).mean(dim=1))
        return scores


class SelfAttention(nn.Module):
    """Multi-head self-attention over inputs of shape (batch, tokens, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attention output, of the shape of ``x``."""
        batch, tokens, width = x.shape
        heads = self.query_key_value(x).view(batch, tokens, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = self.output(gathered.transpose(1, 2).reshape(batch, tokens, width))
        return mixed
