"""Module that pickled models refer to: of Apex's two batch norms, models mostly used the one in this module."""

from ampatch.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
