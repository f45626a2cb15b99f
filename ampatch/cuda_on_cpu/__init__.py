"""A CPU standing in for a GPU, so that a script written for CUDA runs where there is none: ``ampatch run --cpu``.

Owns when torch is changed for that and when it is put back; the modules below know what is changed. It is for finding
out whether a project runs at all, and for a debugger. It must never be on unless somebody asked for it, and prints
nothing.

What the script calls a GPU is the CPU: a tensor "moved to CUDA" stays in main memory. Where a script asks a tensor as
old scripts do (``x.is_cuda``, ``x.type()``, ``x.get_device()``), every tensor in main memory says that it is on a GPU,
since ``assert x.is_cuda`` is what these are mostly used for. ``x.device`` tells the truth, ``cpu``: torch decides by
it.

Limits:
    - A move copies nothing. ``x.cuda()`` and ``x.cpu()`` give ``x`` itself where a GPU gives a copy, so that what is
      written to one of them later is seen in the other: a snapshot of weights needs ``.clone()``.
    - ``x.device.type == "cuda"`` is false, and so is ``x.device == torch.device("cuda")``.
    - Only what the CPU has kernels for runs: kernels of CUDA extensions and Triton do not, and halves are slow.
    - There are no figures: memory is always 0 bytes, and time is the CPU's.
    - Streams are one: everything runs in order, at once. CUDA graphs are refused.
    - Random numbers are the CPU's generator's, for "both" devices; states of GPU generators cannot be restored.
    - What runs in C++ or was compiled is not changed: ``torch.device(0)`` with a bare number, ``torch.jit.load`` onto a
      GPU, and devices inside functions compiled by TorchScript.
    - Several GPUs are one: ``DataParallel`` runs the model once, with the whole batch.
"""

from __future__ import annotations

import logging
import threading

from ampatch import compilers
from ampatch.cuda_on_cpu import devices, distributed, torch_cuda, training
from ampatch.cuda_on_cpu.replacements import Replacements
from ampatch.ledger import PatchLedger

__all__ = ["stand_in"]

logger = logging.getLogger("ampatch")


class _Process:
    """What this process has in place, for it has one torch."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ledger: PatchLedger | None = None


_process = _Process()


def stand_in() -> PatchLedger:
    """Has everything that asks torch for a GPU get the CPU, on machines with a GPU too; the limits stand above.

    Best called right after the first ``import torch``. Calling it again changes nothing. Every process has to call it
    for itself, those started with ``spawn`` included.

    Returns:
        What was installed; its ``undo()`` gives torch back as it was. An ampatch session that was started meanwhile has
        to be deinitialized before that.
    """
    with _process.lock:
        if _process.ledger is None:
            _process.ledger = _install()
        return _process.ledger


def _install() -> PatchLedger:
    # torch.compile and TorchScript keep tables of torch's functions, which are read before anything takes their place.
    compilers.read_tables()
    ledger = PatchLedger()
    replacements = Replacements(ledger)
    ledger.on_undo(_forget)
    compilers.instruct(ledger, replacements.original_of, hooks=())
    try:
        for room in (devices, torch_cuda, training, distributed):
            room.install(replacements)
        replacements.place()
    except BaseException:
        ledger.undo()
        raise
    logger.debug("the CPU stands in for CUDA, at %d places of torch", len(ledger.patches))
    return ledger


def _forget() -> None:
    _process.ledger = None
