"""`apex.amp._amp_state`: state of the live session that scripts read, and the few attributes that they write.

Each access reads the session. This module must store only those of Apex's attributes that ampatch itself does not use.
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
    """Result of the opt level and the overrides; the defaults are those of ``enabled=False``.

    Attributes:
        enabled: True if amp is on.
        opt_level: "O0" to "O6".
        half_dtype: half dtype of casts and weights.
        cast_model_type: dtype that the weights were converted to; None if they were not converted.
        patch_torch_functions: True if torch's functions cast.
        keep_batchnorm_fp32: True if batch norm stays in float32; None if weights are not converted.
        master_weights: True if optimizers update float32 masters; None if weights are not converted.
        loss_scale: number, or "dynamic".
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
    """State of the live session under Apex's names; `_amp_state` is the only instance.

    Attributes:
        verbosity: number given to ``initialize``; 0 silences `maybe_print`.
        allow_incoming_model_not_fp32: flag without effect: half models are always allowed.
        hard_override: True makes `warn_or_err` log instead of raise; no other effect.
    """

    def __init__(self) -> None:
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False
        self.hard_override = False

    @property
    def opt_properties(self) -> OptProperties:
        """Result of the opt level and the overrides.

        Raises:
            AttributeError: ``initialize`` was not called, so that ``hasattr`` returns False.
        """
        if runtime.live is not None:
            return OptProperties(enabled=True, **asdict(runtime.live.settings.properties))
        if runtime.disabled:
            return OptProperties()
        raise AttributeError("apex.amp._amp_state has opt_properties only after a call of amp.initialize.")

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """Loss scaler of each loss; empty without a session."""
        return [] if runtime.live is None else [LossScaler.of(scaler) for scaler in runtime.live.losses.scalers]

    @property
    def min_loss_scale(self) -> float | None:
        """Lower limit of dynamic loss scales; None without a session."""
        return None if runtime.live is None else runtime.live.settings.scale_policy.min_loss_scale

    @property
    def max_loss_scale(self) -> float:
        """Upper limit of dynamic loss scales; 2**24 without a session."""
        return 2.0**24 if runtime.live is None else runtime.live.settings.scale_policy.max_loss_scale

    @property
    def handle(self) -> AmpHandle:
        """Handle that undoes ``initialize`` or ``init``.

        Raises:
            AttributeError: neither of them was called.
        """
        if runtime.live is not None or runtime.disabled:
            return AmpHandle(runtime.live)
        raise AttributeError("apex.amp._amp_state has a handle only after a call of amp.initialize or amp.init.")

    master_params = staticmethod(master_params)

    def maybe_print(self, msg: str, rank0: bool = False) -> None:
        """Prints a message, unless ``verbosity`` is 0.

        Args:
            msg: text to print.
            rank0: True to print on rank 0 only.
        """
        if self.verbosity > 0 and not (rank0 and dist.is_initialized() and dist.get_rank() != 0):
            print(msg)  # noqa: T201 - scripts call this to see it

    def warn_or_err(self, msg: str) -> None:
        """Raises `RuntimeError` with a message; if ``hard_override`` is set, only logs it."""
        if not self.hard_override:
            raise RuntimeError(msg)
        logger.warning(msg)


_amp_state = AmpState()
maybe_print = _amp_state.maybe_print
warn_or_err = _amp_state.warn_or_err
