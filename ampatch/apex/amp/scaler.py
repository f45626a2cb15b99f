"""`apex.amp.scaler`: a session's loss scaler, as scripts read and write it."""

from __future__ import annotations

import weakref

import torch

import ampatch.scaling.loss_scaler
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime

# By the session's, so that a script finds what it has set on one.
_known: weakref.WeakKeyDictionary[ampatch.scaling.loss_scaler.LossScaler, LossScaler] = weakref.WeakKeyDictionary()


class LossScaler:
    """What a script sees of the scale of one loss.

    Checkpoints of Apex's FP16_Optimizer hold one of theirs, whole: pickles of it are read, with its own attributes.

    Args:
        scaler: the session's.

    Raises:
        OptionError: it is something else.
    """

    def __init__(self, scaler: ampatch.scaling.loss_scaler.LossScaler) -> None:
        if not isinstance(scaler, ampatch.scaling.loss_scaler.LossScaler):
            raise OptionError(
                f"found {scaler!r}; expected the scaler of a session. For one of your own, type "
                "ampatch.amp.LossScaler(loss_scale)."
            )
        self._scaler = weakref.ref(scaler)
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    @classmethod
    def of(cls, scaler: ampatch.scaling.loss_scaler.LossScaler) -> LossScaler:
        """Returns the one of a scaler: what a script has set on it stays."""
        return _known.setdefault(scaler, cls(scaler))

    def loss_scale(self) -> float:
        """Returns the scale; waits for the device."""
        return self._there.state.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether it moves."""
        return self._there.dynamic

    @property
    def _scale_seq_len(self) -> int:
        """After how many clean steps it grows."""
        return self._there.policy.window

    @property
    def _min_loss_scale(self) -> float:
        """Its floor."""
        return self._there.policy.floor

    @property
    def _max_loss_scale(self) -> float:
        """Its ceiling."""
        return self._there.policy.ceiling

    @property
    def _loss_scale(self) -> float:
        """The scale, to be read and written; a dynamic one stays between its floor and its ceiling."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._there.load_state_dict({"loss_scale": float(value), "unskipped": self._unskipped})

    @property
    def _unskipped(self) -> int:
        """The steps since it last moved."""
        return self._there.state.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._there.load_state_dict({"loss_scale": self._loss_scale, "unskipped": value})

    def update_scale(self) -> bool:
        """Ends a pass of a script that has unscaled the gradients itself, with ``amp_C.multi_tensor_scale``.

        Returns:
            Whether they overflowed, as ``_overflow_buf`` says; waits for the device.
        """
        scaler, overflowed = self._there, self._overflow_buf.ne(0).any()
        if runtime.live is not None and scaler in runtime.live.scalers:
            runtime.live.judge(scaler, overflowed.to(scaler.snapshot()))
        return bool(overflowed)

    @property
    def _there(self) -> ampatch.scaling.loss_scaler.LossScaler:
        scaler = self._scaler()
        if scaler is None:
            raise UsageError(
                "this loss scaler is gone, since amp.deinitialize() was called. Take the new one from "
                "apex.amp._amp_state.loss_scalers."
            )
        return scaler
