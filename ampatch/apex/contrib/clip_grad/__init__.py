"""``clip_grad_norm_``, torch's own, which uses torch's multi-tensor kernels."""

from __future__ import annotations

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
