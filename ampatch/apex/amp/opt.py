"""`apex.amp.opt`: the wrapper around optimizers of before 2019, which says what to write instead."""

from __future__ import annotations

from ampatch.apex.amp.handle import NEW_FORM
from ampatch.errors import UsageError

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """Cannot be made any more.

    Raises:
        UsageError: always.
    """

    def __init__(self, *_: object, **__: object) -> None:

        raise UsageError(f"OptimWrapper is the form of 2018; optimizers stay what they are now. {NEW_FORM}")
