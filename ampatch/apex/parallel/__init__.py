"""Replaces ``apex.parallel``: training on several ranks, built on torch's own modules.

``LARC`` and ``multiproc`` are modules, as in Apex: ``from apex.parallel.LARC import LARC``.
"""

from torch.distributed import ReduceOp

from ampatch.apex.parallel.distributed import DistributedDataParallel, Reducer
from ampatch.apex.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
