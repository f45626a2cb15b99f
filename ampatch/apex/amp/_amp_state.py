"""`apex.amp._amp_state`: what scripts read of the live session, and the little that they write.

Everything is taken from the session when it is asked for; only what Apex kept and ampatch has no use for is kept here.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ampatch.amp import master_params
from ampatch.apex.amp.handle import AmpHandle
from ampatch.apex.amp.scaler import LossScaler
from ampatch.opt_levels import LossScale
from ampatch.runtime import runtime

__all__ = ["AmpState", "master_params", "maybe_print", "warn_or_err"]

logger = logging.getLogger("ampatch")


@dataclass(frozen=True, slots=True)
class OptProperties:
    """What an opt level and the overrides have come to; as here, with ``enabled=False``.

    Attributes:
        enabled: whether amp is on.
        opt_level: "O0" to "O5".
        half_dtype: the half type of casts and weights.
        cast_model_type: the type that the weights were converted to; None: they were not.
        patch_torch_functions: whether torch's functions cast.
        keep_batchnorm_fp32: whether batch norm stays in float32; None where weights are not converted.
        master_weights: whether optimizers update float32 masters; None where weights are not converted.
        loss_scale: a number, or "dynamic".
    """

    enabled: bool = False
    opt_level: str | None = None
    half_dtype: torch.dtype | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: LossScale = 1.0


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
        if runtime.live is not None:
            return OptProperties(enabled=True, **asdict(runtime.live.settings.properties))
        if runtime.disabled:
            return OptProperties()
        raise AttributeError("apex.amp._amp_state has opt_properties once amp.initialize was called.")

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scale of each loss."""
        return [] if runtime.live is None else [LossScaler.of(scaler) for scaler in runtime.live.scalers]

    @property
    def min_loss_scale(self) -> float | None:
        """The floor of dynamic scales."""
        return None if runtime.live is None else runtime.live.settings.scale_policy.floor

    @property
    def max_loss_scale(self) -> float:
        """Their ceiling."""
        return 2.0**24 if runtime.live is None else runtime.live.settings.scale_policy.ceiling

    @property
    def handle(self) -> AmpHandle:
        """What undoes it.

        Raises:
            AttributeError: before ``initialize``.
        """
        if runtime.live is not None or runtime.disabled:
            return AmpHandle(runtime.live)
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
