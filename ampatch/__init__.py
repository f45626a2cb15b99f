"""ampatch: mixed precision for PyTorch by patching its functions, with cast lists that users edit.

::

    from ampatch import amp
    from ampatch import GradScaler, MixedPrecision
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampatch import amp
    from ampatch.interfaces.grad_scaler import GradScaler
    from ampatch.interfaces.mixed_precision import MixedPrecision

__all__ = ["GradScaler", "MixedPrecision", "__version__", "amp"]

_CLASSES = {"GradScaler": "ampatch.interfaces.grad_scaler", "MixedPrecision": "ampatch.interfaces.mixed_precision"}

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports what is public, and torch with it, only when somebody asks for it: `ampatch run` does not."""
    if name == "amp":
        return importlib.import_module("ampatch.amp")
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
