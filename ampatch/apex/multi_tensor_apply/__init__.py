"""``multi_tensor_applier``, through which scripts call the kernels of `amp_C`."""

from __future__ import annotations

from ampatch.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
