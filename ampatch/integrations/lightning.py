"""``AmpatchPrecision``: amp for Lightning's Trainer, as ``Trainer(plugins=AmpatchPrecision("O1"))``.

Owns nothing but the choice of Lightning's package: ``lightning`` or ``pytorch_lightning``, whichever is imported, else
installed. With both imported it is for ``lightning``; `ampatch.integrations.pytorch_lightning` is for the other. Must
leave everything else to `ampatch.integrations.precision_plugin`.
"""

from __future__ import annotations

from ampatch.integrations.precision_plugin import PrecisionPlugin, precision_class

__all__ = ["AmpatchPrecision"]


class AmpatchPrecision(PrecisionPlugin, precision_class("lightning.pytorch", "pytorch_lightning")):  # type: ignore[misc]
    """Trains, validates, tests and predicts in mixed precision, in a ``Trainer``.

    ::

        trainer = Trainer(plugins=AmpatchPrecision("O1", half_dtype="float16"))

    Args:
        opt_level: "O0" to "O5", as for ``amp.initialize``.
        options: other arguments of ``amp.initialize``, except ``models``, ``optimizers``, ``enabled`` and
            ``num_losses``.

    Raises:
        OptionError: the level or the name of an option is unknown.
    """
