"""Module that pickled models name: Apex had two batch norms, and models mostly used the one of this module."""

from ampatch.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
