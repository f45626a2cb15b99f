"""What is added to errors of scripts that ask for a GPU where there is none: that `ampatch run --cpu` is there.

Must not ask torch for a GPU before there is an error: a process that has asked cannot fork and use one.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

HINT = (
    "ampatch: torch finds no GPU here. To try the script on the CPU, type ampatch run --cpu where ampatch run stands."
)

_OF_GPUS = re.compile(r"cuda|cudnn|nccl|nvidia|accelerator device|(?<!\w)gpus?(?!\w)", re.IGNORECASE)
_MOST_CAUSES = 16  # they may go round in a ring


def explain(error: BaseException) -> None:
    """Adds the hint to an error as a note, if the script asked for a GPU and there is none. Raises nothing."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and _asks_for_a_gpu(error) and not torch.cuda.is_available():
            error.add_note(HINT)
    except Exception:  # noqa: BLE001 - torch may be half imported; and what the user is to see is the error
        return


def watch_torch() -> None:
    """Has torch itself add the hint where it first looks for a GPU, until it has found one.

    `multiprocessing` and notebooks print errors by themselves, and ask no hook.
    """
    cuda: Any = sys.modules["torch.cuda"]
    cuda._lazy_init = _explained(cuda, cuda._lazy_init)


def _explained(cuda: Any, original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def _lazy_init() -> None:
        try:
            original()
        except Exception as error:
            explain(error)
            raise
        if cuda._lazy_init is _lazy_init:
            cuda._lazy_init = original

    return _lazy_init


def _asks_for_a_gpu(error: BaseException) -> bool:
    causes = list(_causes(error))
    texts = [text for each in causes for text in (str(each), *getattr(each, "__notes__", ()))]
    if any(HINT in text for text in texts):
        return False
    # A missing extension for CUDA is missing on the CPU as well.
    return not isinstance(error, (ImportError, OSError)) and any(map(_names_a_gpu, causes))


def _names_a_gpu(error: BaseException) -> bool:
    text = str(error)
    if text and "dummy base class" not in text:  # as torch says of torch.cuda.Stream where it was built without CUDA
        return _OF_GPUS.search(text) is not None
    lines = traceback.extract_tb(error.__traceback__)
    return bool(lines) and _OF_GPUS.search(lines[-1].line or "") is not None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
