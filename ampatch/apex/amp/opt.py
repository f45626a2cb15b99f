"""`apex.amp.opt`: Apex's wrapper around optimizers from before 2019, which raises and says what to write instead."""

from __future__ import annotations

from ampatch.apex.amp.handle import NEW_FORM
from ampatch.errors import UsageError

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """Raises an error that says what to write instead.

    Raises:
        UsageError: always.
    """

    def __init__(self, *_: object, **__: object) -> None:

        raise UsageError(f"OptimWrapper is the API of 2018; optimizers need no wrapper now. {NEW_FORM}")
