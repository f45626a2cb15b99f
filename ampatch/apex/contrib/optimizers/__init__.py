"""Apex's optimizers as they were in early 2019."""

from __future__ import annotations

from ampatch.apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
from ampatch.apex.contrib.optimizers.fused_adam import FusedAdam

__all__ = ["FP16_Optimizer", "FusedAdam"]
