"""Adds a hint at `ampatch run --cpu` to the errors of scripts that ask for a GPU on a computer without one.

Must not ask torch for a GPU before an error: after that question, a forked child process cannot use CUDA.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

HINT = "ampatch: torch finds no GPU here. To try the script on the CPU, type ampatch run --cpu instead of ampatch run."

_OF_GPUS = re.compile(r"cuda|cudnn|nccl|nvidia|accelerator device|(?<!\w)gpus?(?!\w)", re.IGNORECASE)
_MOST_CAUSES = 16  # a chain of causes may be a cycle


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
    causes = list(_causes(error))
    texts = [text for each in causes for text in (str(each), *getattr(each, "__notes__", ()))]
    if any(HINT in text for text in texts):
        return False
    # A CUDA extension that cannot be imported would be missing with --cpu too.
    return not isinstance(error, (ImportError, OSError)) and any(map(_names_a_gpu, causes))


def _names_a_gpu(error: BaseException) -> bool:
    text = str(error)
    if text and "dummy base class" not in text:  # torch's error for torch.cuda.Stream if it was built without CUDA
        return _OF_GPUS.search(text) is not None
    lines = traceback.extract_tb(error.__traceback__)
    return bool(lines) and _OF_GPUS.search(lines[-1].line or "") is not None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
