"""Apex's optimizers: on torch's own updates where these are the same, and on its multi-tensor kernels otherwise."""

from __future__ import annotations

from ampatch.apex.optimizers.fused_adagrad import FusedAdagrad
from ampatch.apex.optimizers.fused_adam import FusedAdam
from ampatch.apex.optimizers.fused_lamb import FusedLAMB
from ampatch.apex.optimizers.fused_novograd import FusedNovoGrad
from ampatch.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
