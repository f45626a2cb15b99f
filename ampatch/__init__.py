"""ampatch: mixed precision for PyTorch by patching its functions, with cast lists that users edit.

::

    from ampatch import amp
    from ampatch import GradScaler
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampatch import amp
    from ampatch.grad_scaler import GradScaler

__all__ = ["GradScaler", "__version__", "amp"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports what is public, and torch with it, only when somebody asks for it: `ampatch run` does not."""
    if name == "amp":
        return importlib.import_module("ampatch.amp")
    if name == "GradScaler":
        return importlib.import_module("ampatch.grad_scaler").GradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
