"""`optimizer._amp_stash` and the methods beside it: parameter lists that scripts read from an adopted optimizer."""

from __future__ import annotations

import itertools
import operator
import weakref
from typing import Any

from torch import Tensor

from ampatch.half_types import HALVES
from ampatch.session import Session


def _without_groups(name: str) -> Any:
    """Returns a property with the parameters of all groups in one list."""
    groups = operator.attrgetter(name)
    return property(lambda stash: list(itertools.chain.from_iterable(groups(stash))), doc=f"`{name}`, without groups.")


class AmpStash:
    """Parameters of one optimizer, by kind; each access makes new lists.

    Args:
        optimizer: the user's optimizer; held by a weak reference.
        session: session that adopted the optimizer; held by a weak reference.

    Attributes:
        lazy_init_called: flag without effect, which scripts set: amp initializes nothing lazily.
    """

    def __init__(self, optimizer: Any, session: Session) -> None:
        self.lazy_init_called = True
        self._optimizer = weakref.ref(optimizer)
        self._session = weakref.ref(session)

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Trained half parameters of the model, one list per group."""
        return [[model for model, _ in group if model.dtype in HALVES] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Float32 masters of `fp16_groups`, in the same order; empty lists if the opt level has no masters."""
        return [[own for model, own in group if own is not model] for group in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """Trained parameters that are not half in the model, one list per group."""
        return [[model for model, _ in group if model.dtype not in HALVES] for group in self._groups()]

    all_fp16_params = _without_groups("fp16_groups")
    all_fp32_from_fp16_params = _without_groups("fp32_from_fp16_groups")
    all_fp32_from_fp32_params = _without_groups("fp32_from_fp32_groups")
    #: Apex's name for opt levels without masters.
    all_fp32_params = all_fp32_from_fp32_params

    def _groups(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Returns, by group, pairs of a trained parameter of the model and the tensor that the optimizer updates."""
        optimizer, session = self._optimizer(), self._session()
        if optimizer is None or session is None or not session.adopted.has(optimizer):
            return []
        masters = session.adopted.record_of(optimizer).masters
        masters.make_missing()
        return [
            [
                pair
                for pair in zip(group["params"], masters.masters_of(group["params"]), strict=True)
                if pair[0].requires_grad
            ]
            for group in optimizer.param_groups
        ]


def attach(optimizer: Any, session: Session) -> None:
    """Adds a stash and the lazy methods to an adopted optimizer, until the session ends."""
    session.ledger.set(optimizer, "_amp_stash", AmpStash(optimizer, session))
    for name in ("_amp_lazy_init", "_lazy_init_maybe_master_weights"):
        session.ledger.set(optimizer, name, _initialize_lazily)


def _initialize_lazily() -> None:
    """Does nothing: `initialize` has already made the masters."""
