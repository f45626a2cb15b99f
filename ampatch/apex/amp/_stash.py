"""`optimizer._amp_stash`, and the methods beside it: what scripts read of an optimizer that amp has adopted."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampatch.opt_levels import HALVES
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
    def fp16_groups(self) -> list[list[Tensor]]:
        """By group, the model's half parameters that are trained."""
        return [[model for model, _ in group if model.dtype in HALVES] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """By group, their float32 masters in the same order, where the level has masters."""
        return [[own for model, own in group if own is not model] for group in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """By group, those that are trained and float32 in the model as well."""
        return [[model for model, _ in group if model.dtype not in HALVES] for group in self._groups()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """`fp16_groups`, without the groups."""
        return list(itertools.chain.from_iterable(self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """`fp32_from_fp16_groups`, without the groups."""
        return list(itertools.chain.from_iterable(self.fp32_from_fp16_groups))

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """`fp32_from_fp32_groups`, without the groups."""
        return list(itertools.chain.from_iterable(self.fp32_from_fp32_groups))

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The same, under the name that they had where there were no masters."""
        return self.all_fp32_from_fp32_params

    def _groups(self) -> list[list[tuple[Tensor, Tensor]]]:
        """By group, the model's parameters that are trained, each with the tensor that the optimizer updates for it."""
        optimizer, session = self._optimizer(), self._session()
        if optimizer is None or session is None or not session.has_adopted(optimizer):
            return []
        masters = session.adopted(optimizer).masters
        masters.complete()
        return [
            [(masters.parameter_of(own), own) for own in group["params"] if masters.parameter_of(own).requires_grad]
            for group in optimizer.param_groups
        ]


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
