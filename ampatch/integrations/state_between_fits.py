"""State that amp keeps for a net between fits: its loss scale, and whether amp is set up for it.

Owns the decision when to set amp up for a net, and when to set it up again. Must never keep the net's options, models
or optimizers, because it is copied and pickled with the net: it asks the net for them each time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.integrations.trainer_session import TrainerSession, uninterrupted


class AmpState:
    """State of the loss scale, or the scaler that replaces it, as ``net.amp_``; it survives from fit to fit.

    Attributes:
        scaler: scaler that ``amp__scaler`` gave; None for amp's own scale.
    """

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self._saved: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._session: TrainerSession | None = None
        self._users = 0
        self._holder: int | None = None  # id of the thread that opened `_session`, while that thread is in `held`
        self._is_outdated = False  # True if the user set parameters since `_session` was opened
        self._begins_afresh = False  # True if the present scale must not be kept

    def __repr__(self) -> str:
        scale = self.scaler if self.scaler is not None else self._saved
        return f"AmpState({scale or 'a fresh loss scale'})"

    @property
    def is_live(self) -> bool:
        """True if amp is set up for the net."""
        return self._session is not None

    def is_held_here(self, training: bool) -> bool:
        """Returns True if this thread is in `held` already, so that entering it again would be a no-op."""
        session = self._session
        if session is None or self._is_outdated:
            return False
        return self._holder == threading.get_ident() and (session.is_training or not training)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the batch that has just ended skipped its step; skorch's LRScheduler reads this name."""
        return self._session is not None and self._session.step_was_skipped and not self._is_after_batch

    _is_after_batch = False

    def note(self, event: str) -> None:
        """Records a notification of the net: schedulers must see a skipped step in `on_batch_end` only."""
        self._is_after_batch = event != "on_batch_end"

    def reset(self, scaler: Any) -> None:
        """Replaces the scaler, and starts with a fresh loss scale."""
        self.scaler = scaler
        self.outdate(scale_too=True)

    def outdate(self, *, scale_too: bool) -> None:
        """Makes the next training step or prediction set amp up again, after the user set parameters.

        Args:
            scale_too: True to drop the loss scale as well.
        """
        self._is_outdated = True
        if scale_too:
            self._saved, self._begins_afresh = {}, True

    @contextlib.contextmanager
    def held(self, net: Any, training: bool) -> Iterator[None]:
        """Sets amp up for a net while any thread is in such a block."""
        with self._lock:
            self._users += 1
            is_first = self._users == 1
        try:
            with self._lock:
                session = self._session
                if session is None:
                    self._reopen(net, training)
                elif (training and not session.is_training) or (self._is_outdated and not session.is_in_step):
                    self._reopen(net, training or session.is_training)
                if is_first:
                    self._holder = threading.get_ident()
            yield
        finally:  # also after the KeyboardInterrupt that `uninterrupted` raises late
            with self._lock:
                self._users -= 1
                if is_first:
                    self._holder = None
                if not self._users:
                    self._close()

    def _reopen(self, net: Any, training: bool) -> None:
        with uninterrupted():
            self._close()
            self._is_outdated = self._begins_afresh = False
            if net._amp_is_on():
                models, optimizers = net._amp_trained(training)
                given = optimizers if training else None
                session = TrainerSession(models, given, net._amp_options(), net._amp_wording, self.scaler)
                session.open(self._saved)
                self._session = session

    def _keep(self) -> None:
        state = None if self._session is None or self._begins_afresh else self._session.state_dict()
        self._saved = self._saved if state is None else state

    def _close(self) -> None:
        with uninterrupted():
            session = self._session
            if session is not None:
                try:
                    self._keep()
                finally:
                    self._session = None
                    session.close()

    @contextlib.contextmanager
    def step(self, net: Any) -> Iterator[None]:
        """Runs a training step; a nested one is a no-op.

        Sets amp up again first if the net's models, optimizers or amp parameters have changed.
        """
        session = self._session
        if session is None or session.is_in_step:
            yield
            return
        models, optimizers = net._amp_trained(True)
        if (
            self._is_outdated
            or list(map(id, optimizers)) != list(map(id, session.optimizers))
            or not all(any(model is part for part in models) for model in session.models)
        ):
            with self._lock:
                self._reopen(net, True)
            session = self._session
        with session.step() if session is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def suspended(self, net: Any) -> Iterator[None]:
        """Gives the net float32 weights while the block runs.

        Raises:
            UsageError: a training step is running, with half weights.
        """
        with self._lock:
            session = self._session
            if session is None or not session.converts:
                yield
                return
            if session.is_in_step:
                raise UsageError(
                    f"a net cannot be pickled or copied within a training step at opt_level="
                    f"{net._amp_options().get('opt_level')!r}, while its weights are half. Do it after the step: in "
                    "on_batch_end or on_epoch_end."
                )
            self._close()
            try:
                yield
            finally:
                self._reopen(net, session.is_training)

    # Saving: as tensors only, since safetensors saves nothing else.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the state as 0-dimensional tensors on the CPU; empty before the first fit."""
        self._keep()
        state = self._saved if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {
            f"{name}.{key}": torch.tensor(
                value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu"
            )
            for name, values in state.items()
            for key, value in values.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads a state that `state_dict` returned.

        Raises:
            OptionError: ``state_dict`` is not such a state; nothing was changed.
        """
        state: dict[str, Any] = {}
        for path, value in state_dict.items():
            name, _, key = str(path).partition(".")
            if not (key and isinstance(value, torch.Tensor) and value.numel() == 1):
                raise OptionError(
                    f"found {path!r} in the state of amp; expected a state saved by net.save_params(f_amp=...). Is it "
                    "another file, such as f_params?"
                )
            state.setdefault(name, {})[key] = value.item()
        if self.scaler is not None:
            if state and "scaler" not in state:
                raise OptionError(
                    f"the state was saved without amp__scaler, and this net has a {type(self.scaler).__name__}. Leave "
                    "f_amp or amp__scaler out."
                )
            if state:
                self.scaler.load_state_dict(state["scaler"])
            return
        state = {"loss_scaler0" if name == "scaler" else name: values for name, values in state.items()}
        for values in state.values():
            amp.LossScaler().load_state_dict(values)
        self._saved = state
        if self._session is not None and not self._begins_afresh:
            self._session.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        self._keep()
        return {"scaler": self.scaler, "_saved": self._saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
