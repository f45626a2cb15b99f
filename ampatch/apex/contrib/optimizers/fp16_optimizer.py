"""`FP16_Optimizer` of `ampatch.apex.optimizers` under its later name."""

from __future__ import annotations

from ampatch.apex.optimizers import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
