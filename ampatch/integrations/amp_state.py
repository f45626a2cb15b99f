"""What amp keeps of a net from fit to fit: its loss scale, and whether amp is set up for it.

Owns when amp is set up for a net, and set up anew. Asks the net for its options, models and optimizers each time, and
keeps none of them: it is copied and pickled with the net.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.integrations.live import Live, uninterrupted


class AmpState:
    """What amp keeps of a net from fit to fit, as ``net.amp_``: the loss scale, or the scaler in its place.

    Attributes:
        scaler: what ``amp__scaler`` has given; None: amp's own scale.
    """

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self._saved: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._users = 0
        self._holder: int | None = None  # the thread that has opened it, as long as it is in `held`
        self._is_outdated = False  # whether parameters were set since it was opened
        self._begins_afresh = False  # whether the scale of what is open now is of no account any more

    def __repr__(self) -> str:
        scale = self.scaler if self.scaler is not None else self._saved
        return f"AmpState({scale or 'a fresh loss scale'})"

    @property
    def is_live(self) -> bool:
        """Returns whether amp is set up for the net."""
        return self._live is not None

    def is_held_here(self, training: bool) -> bool:
        """Returns whether this thread is in `held` already, so that to enter it again would do nothing."""
        live = self._live
        if live is None or self._is_outdated:
            return False
        return self._holder == threading.get_ident() and (live.is_training or not training)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Returns whether the batch that has just ended skipped its step; skorch's schedulers ask by this name."""
        return self._live is not None and self._live.step_was_skipped and not self._is_after_batch

    _is_after_batch = False

    def note(self, event: str) -> None:
        """Hears of a net's notification: a skipped step concerns the schedulers of its batch only."""
        self._is_after_batch = event != "on_batch_end"

    def reset(self, scaler: Any) -> None:
        """Begins with a fresh loss scale."""
        self.scaler = scaler
        self.outdate(scale_too=True)

    def outdate(self, *, scale_too: bool) -> None:
        """Has the next training step set amp up anew, since parameters were set."""
        self._is_outdated = True
        if scale_too:
            self._saved, self._begins_afresh = {}, True

    @contextlib.contextmanager
    def held(self, net: Any, training: bool) -> Iterator[None]:
        """Sets amp up for a net while somebody is in the block."""
        with self._lock:
            self._users += 1
            is_first = self._users == 1
            try:
                live = self._live
                if live is None:
                    self._reopen(net, training)
                elif (training and not live.is_training) or (self._is_outdated and not live.is_in_step):
                    self._reopen(net, training or live.is_training)
            except BaseException:  # a Ctrl-C that had to wait, among others
                self._users -= 1
                if not self._users:
                    self._close()
                raise
            if is_first:
                self._holder = threading.get_ident()
        try:
            yield
        finally:
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
                live = Live(models, optimizers if training else None, net._amp_options(), self.scaler)
                live.open(self._saved)
                self._live = live

    def _keep(self) -> None:
        state = None if self._live is None or self._begins_afresh else self._live.state_dict()
        self._saved = self._saved if state is None else state

    def _close(self) -> None:
        with uninterrupted():
            live = self._live
            if live is not None:
                try:
                    self._keep()
                finally:
                    self._live = None
                    live.close()

    @contextlib.contextmanager
    def step(self, net: Any) -> Iterator[None]:
        """Runs a training step; one within another does nothing of its own."""
        live = self._live
        if live is None or live.is_in_step:
            yield
            return
        models, optimizers = net._amp_trained(True)
        if (
            self._is_outdated
            or list(map(id, optimizers)) != list(map(id, live.optimizers))
            or not all(any(model is part for part in models) for model in live.models)
        ):
            with self._lock:
                self._reopen(net, True)
            live = self._live
        with live.step() if live is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def suspended(self, net: Any) -> Iterator[None]:
        """Weights are float32 in the block."""
        with self._lock:
            live = self._live
            if live is None or not live.converts:
                yield
                return
            if live.is_in_step:
                raise UsageError(
                    f"a net cannot be pickled or copied within a training step at opt_level="
                    f"{net._amp_options().get('opt_level')!r}, while its weights are half. Do it after the step: in "
                    "on_batch_end or on_epoch_end."
                )
            self._close()
            try:
                yield
            finally:
                self._reopen(net, live.is_training)

    # Saving. Tensors only, which skorch saves with torch and with safetensors alike.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the state as 0-dimensional tensors on the CPU; empty before the first fit."""
        self._keep()
        state = self._saved if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {
            f"{name}.{key}": torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
            for name, values in state.items()
            for key, value in values.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state_dict` has returned.

        Raises:
            OptionError: it is something else; nothing was changed.
        """
        state: dict[str, Any] = {}
        for path, value in state_dict.items():
            name, _, key = str(path).partition(".")
            if not (key and isinstance(value, torch.Tensor) and value.numel() == 1):
                raise OptionError(
                    f"found {path!r} in the state of amp; expected what net.save_params(f_amp=...) has saved. Is it "
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
        if self._live is not None and not self._begins_afresh:
            self._live.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        self._keep()
        return {"scaler": self.scaler, "_saved": self._saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
