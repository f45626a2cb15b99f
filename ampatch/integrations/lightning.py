"""``AmpatchPrecision``: amp for Lightning's Trainer, as ``Trainer(plugins=AmpatchPrecision("O1"))``; and a callback.

Owns nothing but the choice of Lightning's package: ``lightning`` or ``pytorch_lightning``, whichever is imported, else
installed. With both imported it is for ``lightning``; `ampatch.integrations.pytorch_lightning` is for the other. Must
leave everything else to `ampatch.integrations.precision_plugin`.
"""

from __future__ import annotations

from ampatch.integrations.precision_plugin import Monitor, PrecisionPlugin, bases

__all__ = ["AmpatchPrecision", "LossScaleMonitor"]

_Precision, _Callback = bases("lightning.pytorch", "pytorch_lightning")


class AmpatchPrecision(PrecisionPlugin, _Precision):  # type: ignore[misc, valid-type]
    """Trains, validates, tests and predicts in mixed precision, in a ``Trainer``.

    ::

        trainer = Trainer(plugins=AmpatchPrecision("O1", half_dtype="float16"))

    Args:
        opt_level: "O0" to "O6", as for ``amp.initialize``.
        options: other arguments of ``amp.initialize``, except ``models``, ``optimizers``, ``enabled`` and
            ``num_losses``.

    Raises:
        OptionError: the level or the name of an option is unknown.
    """


class LossScaleMonitor(Monitor, _Callback):  # type: ignore[misc, valid-type]
    """Logs ``loss_scale`` and ``skipped_steps`` to the Trainer's loggers, every ``log_every_n_steps`` steps.

    ::

        trainer = Trainer(plugins=AmpatchPrecision("O1", half_dtype="float16"), callbacks=LossScaleMonitor())

    Without a loss scale, as in bfloat16 or at O0, it logs nothing.
    """
