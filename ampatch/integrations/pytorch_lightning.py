"""``AmpatchPrecision`` for the Trainer of ``pytorch_lightning``, where ``lightning`` is imported as well.

Owns nothing but that choice. Must leave everything else to `ampatch.integrations.precision_plugin`.
"""

from __future__ import annotations

from ampatch.integrations.precision_plugin import PrecisionPlugin, precision_class

__all__ = ["AmpatchPrecision"]


class AmpatchPrecision(PrecisionPlugin, precision_class("pytorch_lightning")):  # type: ignore[misc]
    """`ampatch.integrations.lightning.AmpatchPrecision`, for the Trainer of ``pytorch_lightning``."""
