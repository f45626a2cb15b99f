"""Makes the CPU stand in for a GPU, so that a script written for CUDA runs without one: ``ampatch run --cpu``.

Owns when torch is patched for this and when the patches are undone; the submodules define the patches. It is for
debugging, and to find out whether a project runs at all. It must never be on unless the user asked for it, and must
never print.

Whatever the script calls a GPU is the CPU: a tensor "moved to CUDA" stays in main memory. Old scripts ask a tensor for
its device by ``x.is_cuda``, ``x.type()`` or ``x.get_device()``. To these, every tensor in main memory answers that it
is on a GPU, since most scripts only check ``assert x.is_cuda``. ``x.device`` truthfully is ``cpu``, because torch
itself relies on it.

Limits:
    - A move copies nothing. ``x.cuda()`` and ``x.cpu()`` return ``x`` itself, where a real GPU gives a copy. Later
      in-place writes to one therefore change the other: a snapshot of weights needs ``.clone()``.
    - ``x.device.type == "cuda"`` and ``x.device == torch.device("cuda")`` are false.
    - Only operators with CPU kernels run. Kernels of CUDA extensions and Triton do not, and halves are slow.
    - There are no measurements: GPU memory use is always 0 bytes, and times are the CPU's.
    - All streams are one: everything runs immediately, in program order. CUDA graphs raise an error.
    - Both devices share the CPU's random number generator. Saved states of GPU generators cannot be restored.
    - Code in C++ and compiled code is not patched: ``torch.device(0)`` with a bare number, ``torch.jit.load`` onto a
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
    """Patches of this process, which has one torch."""

    lock = threading.Lock()
    ledger: PatchLedger | None = None


def stand_in() -> PatchLedger:
    """Redirects every request to torch for a GPU to the CPU, on machines with a GPU too; see the limits above.

    Call it right after the first ``import torch``, if possible. A second call changes nothing. Every process must call
    it for itself, including processes started with ``spawn``.

    Returns:
        Ledger of the installed patches; its ``undo()`` restores torch. Deinitialize any ampatch session that was
        started meanwhile before calling ``undo()``.
    """
    with _Process.lock:
        if _Process.ledger is None:
            _Process.ledger = _install()
        return _Process.ledger


def _install() -> PatchLedger:
    # torch.compile and TorchScript build tables of torch's functions once; build them before any patch is in place.
    compilers.build_torch_tables()
    ledger = PatchLedger()
    replacements = Replacements(ledger)
    ledger.on_undo(_forget)
    compilers.prepare_for_patches(ledger, replacements.original_of)
    try:
        for module in (devices, torch_cuda, training, distributed):
            module.install(replacements)
        replacements.place()
    except BaseException:
        ledger.undo()
        raise
    logger.debug("the CPU stands in for CUDA, at %d places of torch", len(ledger.patches))
    return ledger


def _forget() -> None:
    _Process.ledger = None
