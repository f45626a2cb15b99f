"""ampatch: mixed precision for PyTorch. It patches torch's functions by cast lists that users can edit.

::

    from ampatch import amp
    from ampatch import GradScaler, MixedPrecision
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ampatch.version import __version__

if TYPE_CHECKING:
    from ampatch import amp
    from ampatch.interfaces.grad_scaler import GradScaler
    from ampatch.interfaces.mixed_precision import MixedPrecision

__all__ = ["GradScaler", "MixedPrecision", "__version__", "amp"]

_CLASSES = {"GradScaler": "ampatch.interfaces.grad_scaler", "MixedPrecision": "ampatch.interfaces.mixed_precision"}


def __getattr__(name: str) -> object:
    """Imports a public name, and torch with it, on first access, since `ampatch run` must not import torch."""
    if name == "amp":
        return importlib.import_module("ampatch.amp")
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
