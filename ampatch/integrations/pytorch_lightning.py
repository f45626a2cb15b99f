"""``AmpatchPrecision`` and its callback for ``pytorch_lightning``, where ``lightning`` is imported as well.

Owns nothing but that choice. Must leave everything else to `ampatch.integrations.precision_plugin`.
"""

from __future__ import annotations

from ampatch.integrations.precision_plugin import Monitor, PrecisionPlugin, bases

__all__ = ["AmpatchPrecision", "LossScaleMonitor"]

_Precision, _Callback = bases("pytorch_lightning")


class AmpatchPrecision(PrecisionPlugin, _Precision):  # type: ignore[misc, valid-type]
    """`ampatch.integrations.lightning.AmpatchPrecision`, for the Trainer of ``pytorch_lightning``."""


class LossScaleMonitor(Monitor, _Callback):  # type: ignore[misc, valid-type]
    """`ampatch.integrations.lightning.LossScaleMonitor`, for the Trainer of ``pytorch_lightning``."""
