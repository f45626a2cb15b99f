"""Apex's optimizers, which use torch's own updates if these are the same, and torch's multi-tensor kernels if not."""

from __future__ import annotations

from ampatch.apex.optimizers.fp16_optimizer import FP16_Optimizer
from ampatch.apex.optimizers.fused_adagrad import FusedAdagrad
from ampatch.apex.optimizers.fused_adam import FusedAdam
from ampatch.apex.optimizers.fused_lamb import FusedLAMB
from ampatch.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from ampatch.apex.optimizers.fused_novograd import FusedNovoGrad
from ampatch.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
