"""The questions that a session asks each part, and the state that all parts share.

Must hold no state of one part only.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from ampatch.distributed import Ranks
from ampatch.ledger import PatchLedger
from ampatch.parts.adopted import Adopted
from ampatch.patching.adopted_model import Hooks
from ampatch.patching.weight_cache import WeightCache
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.settings import Settings
from ampatch.switch import Switch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="Part")


@dataclass(frozen=True, slots=True)
class Shared:
    """What the parts of a session share.

    Attributes:
        settings: the settings of the session.
        hooks: the hooks for models and wrappers.
        device_types: device types of the tensors to cast.
        switch: whether casts are on.
        cache: casts of weights.
        ledger: the record of all patches.
        ranks: the ranks that may share gradients.
        adopted: the adopted models and optimizers.
    """

    settings: Settings
    hooks: Hooks
    device_types: set[str]
    switch: Switch
    cache: WeightCache
    ledger: PatchLedger
    ranks: Ranks
    adopted: Adopted


class Part:
    """A part of a session; each of its answers may be to do nothing.

    Attributes:
        before_forward: runs before the forward of an adopted model, except where torch.compile traces it; None: this
            part has nothing to do there.
        after_forward: runs after the forward, whether it returned or raised.
    """

    before_forward: Callable[[nn.Module], None] | None = None
    after_forward: Callable[[nn.Module], None] | None = None

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.settings, self.ledger = shared.settings, shared.ledger

    def install(self) -> None:
        """Patches torch, before the session's first adoption; the ledger records how to undo that."""

    def prepare(self, optimizers: Collection[OptimizerLike]) -> None:
        """Prepares for an adoption. What this does stays if the adoption fails."""

    def mark(self) -> Callable[[], None]:
        """Returns a function that undoes what an adoption has done to this part since, beside the ledger's patches."""
        return _do_nothing

    def adopt_model(self, model: nn.Module, is_new: bool) -> None:
        """Adopts a model, or what a known model got since it was adopted."""

    def finish(self, models: Collection[nn.Module], optimizers: Collection[OptimizerLike]) -> None:
        """Does the part of an adoption that cannot be undone, after all else has succeeded."""

    def explain(self, model: nn.Module, inputs: object, error: BaseException) -> None:
        """Adds a note to an error that the forward of an adopted model raised, if this part has caused it."""

    def release(self) -> None:
        """Ends what is pending, before the patches are undone. May warn."""

    def restore(self) -> None:
        """Gives back what the ledger does not, after the patches were undone."""

    def while_active(self, method: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Binds a bound method weakly, for code that may keep it; it returns None once the session is taken down."""
        reference, switch = weakref.WeakMethod(method), self.shared.switch

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            bound: Callable[_P, _T] | None = reference()
            return bound(*args, **kwargs) if bound is not None and switch.active else None

        return call


def with_casts_off(method: Callable[Concatenate[_Self, _P], _T]) -> Callable[Concatenate[_Self, _P], _T]:
    """Returns a method during which casts are off, so that cast lists never apply to amp's own arithmetic."""

    @functools.wraps(method)
    def run(part: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with part.shared.switch.suspended():
            return method(part, *args, **kwargs)

    return run


def _do_nothing() -> None:
    """Undoes nothing."""
