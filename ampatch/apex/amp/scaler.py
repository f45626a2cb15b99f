"""`apex.amp.scaler`: a session's loss scaler under Apex's names, which scripts read and write."""

from __future__ import annotations

import operator
import weakref
from dataclasses import replace

import torch

import ampatch.scaling.loss_scaler
from ampatch.errors import OptionError, UsageError
from ampatch.opt_levels import check_count
from ampatch.runtime import runtime

# Keyed by the session's scaler: a script gets the same object again, with the attributes that it has set.
_known: weakref.WeakKeyDictionary[ampatch.scaling.loss_scaler.LossScaler, LossScaler] = weakref.WeakKeyDictionary()


class LossScaler:
    """The loss scale of one loss, under Apex's names.

    Checkpoints of Apex's FP16_Optimizer contain a pickled LossScaler of Apex. Unpickling gives an object of this class
    with Apex's attributes.

    Args:
        scaler: loss scaler of a session.

    Raises:
        OptionError: ``scaler`` is something else.
    """

    def __init__(self, scaler: ampatch.scaling.loss_scaler.LossScaler) -> None:
        if not isinstance(scaler, ampatch.scaling.loss_scaler.LossScaler):
            raise OptionError(
                f"found {scaler!r}; expected the scaler of a session. For one of your own, type "
                "ampatch.amp.LossScaler(loss_scale)."
            )
        self._scaler = weakref.ref(scaler)
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device="cpu")

    @classmethod
    def of(cls, scaler: ampatch.scaling.loss_scaler.LossScaler) -> LossScaler:
        """Returns the object of a session's scaler, always the same one, so that it keeps what a script sets."""
        return _known.setdefault(scaler, cls(scaler))

    def loss_scale(self) -> float:
        """Returns the loss scale; syncs with the device."""
        return self._there.state.loss_scale

    @property
    def dynamic(self) -> bool:
        """True if the loss scale is dynamic."""
        return self._there.dynamic

    # The limits of the scale.
    _min_loss_scale = property(operator.attrgetter("_there.policy.min_loss_scale"))
    _max_loss_scale = property(operator.attrgetter("_there.policy.max_loss_scale"))

    @property
    def _scale_seq_len(self) -> int:
        """Number of steps without overflow after which the scale grows, which scripts read and write."""
        return self._there.policy.scale_window

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._there.policy = replace(self._there.policy, scale_window=check_count("_scale_seq_len", value))

    @property
    def _loss_scale(self) -> float:
        """Loss scale, which scripts read and write; a dynamic scale stays within its limits."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._there.load_state_dict({"loss_scale": float(value), "unskipped": self._unskipped})

    @property
    def _unskipped(self) -> int:
        """Number of steps since the scale last changed."""
        return self._there.state.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._there.load_state_dict({"loss_scale": self._loss_scale, "unskipped": value})

    def update_scale(self) -> bool:
        """Updates the scale for a script that has unscaled the gradients itself, with ``amp_C.multi_tensor_scale``.

        Returns:
            True if the gradients overflowed, according to ``_overflow_buf``; syncs with the device.
        """
        scaler, overflowed = self._there, self._overflow_buf.ne(0).any()
        if runtime.live is not None and scaler in runtime.live.losses.all_scalers():
            runtime.live.gradients.replace_verdicts(scaler, overflowed.to(scaler.snapshot()))
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
