"""The module that pickled models name: Apex had two batch norms, and this was the one that was mostly used."""

from ampatch.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
