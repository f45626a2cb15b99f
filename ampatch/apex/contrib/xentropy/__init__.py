"""Apex's cross entropy with label smoothing."""

from __future__ import annotations

from ampatch.apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
