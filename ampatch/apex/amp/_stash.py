"""`optimizer._amp_stash`, and the methods beside it: what scripts read of an optimizer that amp has adopted."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampatch.opt_levels import HALVES
from ampatch.optimizer_state import parameters_of
from ampatch.session import Session


class AmpStash:
    """The parameters of one optimizer, by kind; lists are made anew each time they are asked for.

    Args:
        optimizer: the user's; referred to weakly.
        session: that adopted it; referred to weakly.

    Attributes:
        lazy_init_called: may be set, without effect: nothing is lazy here.
    """

    def __init__(self, optimizer: Any, session: Session) -> None:
        self.lazy_init_called = True
        self._optimizer = weakref.ref(optimizer)
        self._session = weakref.ref(session)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's half parameters that the optimizer updates, or that it updates masters of."""
        return [model for model, _ in self._pairs() if model.dtype in HALVES]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The float32 masters of those that have one, in the same order."""
        return [own for model, own in self._pairs() if own is not model]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that are float32 in the model as well."""
        return [model for model, _ in self._pairs() if model.dtype not in HALVES]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The same, under the name that they had where there were no masters."""
        return self.all_fp32_from_fp32_params

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The model's parameters, each with the tensor that the optimizer updates for it."""
        optimizer, session = self._optimizer(), self._session()
        if optimizer is None or session is None:
            return []
        adopted = session.adopted(optimizer)
        adopted.masters.complete()
        return [(adopted.masters.parameter_of(own), own) for own in parameters_of(optimizer)]


def attach(optimizer: Any, session: Session) -> None:
    """Puts a stash on an adopted optimizer, until the session ends."""
    session.ledger.set(optimizer, "_amp_stash", AmpStash(optimizer, session))
    for name in ("_amp_lazy_init", "_lazy_init_maybe_master_weights"):
        session.ledger.set(optimizer, name, types.MethodType(_LAZY[name], optimizer))


def _amp_lazy_init(optimizer: Any) -> None:
    """Without effect: nothing is lazy."""


def _lazy_init_maybe_master_weights(optimizer: Any) -> None:
    """Without effect: masters are there from `initialize` on."""


_LAZY: dict[str, Callable[[Any], None]] = {
    function.__name__: function for function in (_amp_lazy_init, _lazy_init_maybe_master_weights)
}
