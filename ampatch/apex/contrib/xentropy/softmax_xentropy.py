"""Apex's cross entropy with label smoothing, computed by torch's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class SoftmaxCrossEntropyLoss:
    """Cross entropy of each row, in float32; scripts call `apply`, like that of a ``torch.autograd.Function``."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Returns the cross entropy of each row.

        Args:
            logits: floating-point tensor of shape (rows, classes).
            labels: int64 tensor of shape (rows,).
            smoothing: part of each label that is spread over all classes.
            padding_idx: label of rows whose loss is 0. Mind the default: with 0, rows of class 0 do not count.
            half_to_float: ignored: losses are float32, as in Apex.

        Returns:
            A float32 tensor of shape (rows,).
        """
        return F.cross_entropy(
            logits.float(), labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing
        )
