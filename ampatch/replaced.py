"""Models and optimizers of sessions that a later one has replaced: the user is told, once, where they are trained on.

Owns the hooks that hear of it, which are on those models and optimizers only. Must not change what they do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ampatch.errors import UsageError, warn
from ampatch.ledger import PatchLedger
from ampatch.session import Session

_ADVICE = (
    "Hand everything to one call: models, optimizers = amp.initialize([model, other], [optimizer, other_optimizer], "
    "...); or give every call the same arguments."
)


@dataclass(slots=True)
class _Watched:
    """A model or an optimizer.

    Attributes:
        reference: to it.
        why: what the settings of the later session differ in.
        ledger: has its hook.
        is_silent: whether there is nothing more to tell.
    """

    reference: weakref.ref[Any]
    why: str
    ledger: PatchLedger
    is_silent: bool = False


class Replaced:
    """What the replaced sessions of a process have left.

    Args:
        before_forward: the hook that models get. It leads to `hear`.
        before_step: the same for optimizers. Both stand at the top of a module, so that models pickle with them.
    """

    def __init__(self, before_forward: Callable[..., None], before_step: Callable[..., None]) -> None:
        self._before_forward, self._before_step = before_forward, before_step
        self._watched: dict[int, _Watched] = {}  # by id: an optimizer may not be hashable

    def watch(self, models: Iterable[nn.Module], optimizers: Iterable[Any], why: str) -> None:
        """Listens to models and optimizers of a session that was taken down.

        Args:
            models: that it had.
            optimizers: that it had.
            why: what the settings of the later session differ in.
        """
        for model in models:
            ledger = self._add(model, why)
            ledger.on_undo(model.register_forward_pre_hook(self._before_forward).remove, model)
        for optimizer in optimizers:
            ledger = self._add(optimizer, why)
            if hasattr(optimizer, "register_step_pre_hook"):
                ledger.on_undo(optimizer.register_step_pre_hook(self._before_step).remove, optimizer)
            else:
                ledger.set(optimizer, "step", functools.partial(_announced, self._before_step, optimizer.step))

    def hear(self, trained: Any, live: Session | None) -> None:
        """Takes note that a model runs forward in training mode, or that an optimizer steps.

        Args:
            trained: the one of the two.
            live: the session that there is now; None: amp was switched off by the later call.

        Warns:
            AmpWarning: it is one of those that are watched, and the live session does not have it.
        """
        watched = self._find(trained)
        if watched is None or watched.is_silent or (live is not None and live.settings.adopts_on_use):
            return
        # The hooks stay: torch is going through those of an optimizer.
        if live is not None and _has(live, trained):
            watched.is_silent = True
            return
        for each in list(self._watched.values()):
            each.is_silent = True
        warn(
            f"this {type(trained).__name__} is trained on without amp: a later amp.initialize has replaced the "
            f"one that it was handed to, since its settings are others ({watched.why}). {_ADVICE}"
        )

    def check(self, optimizer: Any, live: Session) -> None:
        """Raises where a loss is scaled, or an answer asked for, for an optimizer that the live session does not have.

        Raises:
            UsageError: it is one of a replaced session.
        """
        watched = self._find(optimizer)
        if watched is not None and not live.settings.adopts_on_use and not live.has_adopted(optimizer):
            raise UsageError(
                f"this {type(optimizer).__name__} was handed to an amp.initialize that a later one has replaced, since "
                f"its settings are others ({watched.why}). {_ADVICE}"
            )

    def end(self) -> None:
        """Takes every hook out, and forgets everything."""
        for each in list(self._watched.values()):
            each.ledger.undo()
        self._watched.clear()

    def _add(self, owner: Any, why: str) -> PatchLedger:
        known = self._find(owner)
        if known is not None:
            known.ledger.undo()
        forget = functools.partial(_forget, self._watched, id(owner))
        watched = _Watched(weakref.ref(owner, forget), why, PatchLedger())
        self._watched[id(owner)] = watched
        return watched.ledger

    def _find(self, owner: Any) -> _Watched | None:
        watched = self._watched.get(id(owner))
        return watched if watched is not None and watched.reference() is owner else None


def _has(session: Session, trained: Any) -> bool:
    """Returns whether a session has adopted an optimizer, or a model that is the given one or contains it."""
    if not isinstance(trained, nn.Module):
        return session.has_adopted(trained)
    return any(trained in model.modules() for model in session.models)


def _forget(watched: dict[int, _Watched], key: int, reference: weakref.ref[Any]) -> None:
    """Runs when a model or an optimizer has died; another one may have its id by now."""
    if key in watched and watched[key].reference is reference:
        del watched[key]


def _announced(before: Callable[[Any], None], step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Announces and makes the step of an optimizer that has no hooks for it, being none of torch's."""
    before(getattr(step, "__self__", None))
    return step(*args, **kwargs)
