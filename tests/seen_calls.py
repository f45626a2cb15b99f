"""Modes that note what torch runs, for tests of what a call runs. They change nothing."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes every operator, and lets it run.

    Attributes:
        seen: of each call, such as ``torch.ops.aten.mm.default``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def names(self) -> list[str]:
        """Of each call, such as "aten.mm.default"."""
        return list(map(str, self.seen))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes every function that torch reports, and lets it run.

    Attributes:
        seen: of each call, such as ``torch.mm``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
