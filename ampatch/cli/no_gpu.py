"""Adds a hint at `ampatch run --cpu` to the errors of scripts that ask for a GPU on a computer without one.

Must not ask torch for a GPU before an error: after that question, a forked child process cannot use CUDA.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

HINT = "ampatch: torch finds no GPU here. To try the script on the CPU, type ampatch run --cpu instead of ampatch run."

#: A dummy base class is what torch has in place of torch.cuda.Stream if it was built without CUDA.
_OF_GPUS = re.compile(r"cuda|cudnn|nccl|nvidia|accelerator device|dummy base class|(?<!\w)gpus?(?!\w)", re.IGNORECASE)


def add_hint(error: BaseException) -> None:
    """Adds the hint to an error as a note, if the script asked for a GPU and torch finds none. Never raises."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and _asks_for_a_gpu(error) and not torch.cuda.is_available():
            error.add_note(HINT)
    except Exception:  # noqa: BLE001 - torch may be half imported, and the user must see the original error
        return


def add_hint_to_torch_errors() -> None:
    """Patches torch.cuda._lazy_init to add the hint to its errors, until it first succeeds.

    `multiprocessing` and notebooks print errors themselves, without sys.excepthook.
    """
    cuda: Any = sys.modules["torch.cuda"]
    original: Callable[[], None] = cuda._lazy_init

    @functools.wraps(original)
    def _lazy_init() -> None:
        try:
            original()
        except Exception as error:
            add_hint(error)
            raise
        if cuda._lazy_init is _lazy_init:
            cuda._lazy_init = original

    cuda._lazy_init = _lazy_init


def _asks_for_a_gpu(error: BaseException) -> bool:
    text = "".join(traceback.format_exception(error, limit=0))  # with its causes and notes, without lines of code
    lines = traceback.extract_tb(error.__traceback__)
    if lines and not str(error):  # as of `assert torch.cuda.is_available()`
        text += lines[-1].line or ""
    # A CUDA extension that cannot be imported would be missing with --cpu too.
    return HINT not in text and not isinstance(error, (ImportError, OSError)) and _OF_GPUS.search(text) is not None
