"""`apex.amp._amp_state`: what scripts read of the live session, and the little that they write.

Everything is taken from the session when it is asked for; only what Apex kept and ampatch has no use for is kept here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from ampatch.amp import master_params
from ampatch.apex.amp.handle import AmpHandle
from ampatch.apex.amp.scaler import LossScaler
from ampatch.opt_levels import LossScale, Properties
from ampatch.process import process

__all__ = ["AmpState", "master_params", "maybe_print", "warn_or_err"]

logger = logging.getLogger("ampatch")


@dataclass(frozen=True, slots=True)
class OptProperties:
    """What an opt level and the overrides have come to; with ``enabled=False`` there is nothing more to say.

    The attributes are those of `ampatch.opt_levels.Properties`, and ``enabled``.
    """

    enabled: bool
    _properties: Properties | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._properties, name)

    @property
    def opt_level(self) -> str | None:
        """One of "O0" to "O5"."""
        return None if self._properties is None else self._properties.opt_level

    @property
    def loss_scale(self) -> LossScale:
        """A number, or "dynamic"."""
        return 1.0 if self._properties is None else self._properties.loss_scale

    @property
    def master_weights(self) -> bool:
        """Whether the optimizers update float32 masters."""
        return self._properties is not None and bool(self._properties.master_weights)


class AmpState:
    """The one object of this module.

    Attributes:
        verbosity: as given to ``initialize``.
        allow_incoming_model_not_fp32: without effect: models may be half.
        hard_override: without effect.
    """

    def __init__(self) -> None:
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False
        self.hard_override = False

    @property
    def opt_properties(self) -> OptProperties:
        """What the opt level and the overrides have come to.

        Raises:
            AttributeError: before ``initialize``, so that ``hasattr`` tells.
        """
        if process.live is not None:
            return OptProperties(True, process.live.settings.properties)
        if process.disabled:
            return OptProperties(False)
        raise AttributeError("apex.amp._amp_state has opt_properties once amp.initialize was called.")

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scale of each loss."""
        return [] if process.live is None else [LossScaler.of(scaler) for scaler in process.live.scalers]

    @property
    def handle(self) -> AmpHandle:
        """What undoes it.

        Raises:
            AttributeError: before ``initialize``.
        """
        if process.live is not None or process.disabled:
            return AmpHandle(process.live)
        raise AttributeError("apex.amp._amp_state has a handle once amp.initialize or amp.init was called.")

    master_params = staticmethod(master_params)

    def maybe_print(self, msg: str, rank0: bool = False) -> None:
        """Prints, unless ``verbosity`` is 0.

        Args:
            msg: what to print.
            rank0: only in the first of several processes.
        """
        if self.verbosity > 0 and not (rank0 and dist.is_initialized() and dist.get_rank() != 0):
            print(msg)  # noqa: T201 - scripts call this to see it

    def warn_or_err(self, msg: str) -> None:
        """Raises `RuntimeError`, or with ``hard_override`` only logs what it would have said."""
        if not self.hard_override:
            raise RuntimeError(msg)
        logger.warning(msg)


_amp_state = AmpState()
maybe_print = _amp_state.maybe_print
warn_or_err = _amp_state.warn_or_err
