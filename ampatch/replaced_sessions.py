"""Models and optimizers of replaced sessions: warns once if user code goes on training them.

Owns the hooks that notice this, on these models and optimizers only. Must not change their behaviour.
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
    """A model or an optimizer of a replaced session.

    Attributes:
        reference: weak reference to it.
        why: differences of the later session's settings, for messages.
        is_silent: True if no warning is due any more.
    """

    reference: weakref.ref[Any]
    why: str
    is_silent: bool = False


class Replaced:
    """The models and optimizers of a process's replaced sessions.

    Args:
        before_forward: forward pre-hook for models, which leads to `hear`.
        before_step: step pre-hook for optimizers, which leads to `hear`. Both must be module-level functions, so that
            models pickle with them.
    """

    def __init__(self, before_forward: Callable[..., None], before_step: Callable[..., None]) -> None:
        self._before_forward, self._before_step = before_forward, before_step
        self._watched: dict[int, _Watched] = {}  # by id: an optimizer might not be hashable
        self._ledger = PatchLedger()

    def watch(self, models: Iterable[nn.Module], optimizers: Iterable[Any], why: str) -> None:
        """Hooks models and optimizers of a session that was taken down.

        Args:
            models: models that the session had adopted.
            optimizers: optimizers that the session had adopted.
            why: differences of the later session's settings, for messages.
        """
        for model in models:
            if self._is_new(model, why):
                self._ledger.on_undo(model.register_forward_pre_hook(self._before_forward).remove, model)
        for optimizer in optimizers:
            if self._is_new(optimizer, why):
                if hasattr(optimizer, "register_step_pre_hook"):
                    self._ledger.on_undo(optimizer.register_step_pre_hook(self._before_step).remove, optimizer)
                else:
                    step = functools.partial(_announced, self._before_step, optimizer.step)
                    self._ledger.set(optimizer, "step", step)

    def warn_of_training(self, trained: Any, live: Session | None) -> None:
        """Warns, once, if a watched model or optimizer goes on training without the live session.

        Args:
            trained: model whose forward begins in training mode, or optimizer whose step begins.
            live: session that is live now; None if the later call disabled amp.

        Warns:
            AmpWarning: ``trained`` is watched, and the live session has not adopted it.
        """
        watched = self._find(trained)
        if watched is None or watched.is_silent or (live is not None and live.settings.adopts_on_use):
            return
        # The hooks stay, because torch is iterating over the optimizer's hooks now.
        if live is not None and _has(live, trained):
            watched.is_silent = True
            return
        for each in list(self._watched.values()):
            each.is_silent = True
        warn(
            f"this {type(trained).__name__} now trains without amp: a later amp.initialize has replaced the one that "
            f"it was handed to, since the settings differ ({watched.why}). {_ADVICE}"
        )

    def check(self, optimizer: Any, live: Session) -> None:
        """Raises if an optimizer belongs to a replaced session only; called before amp scales a loss for it.

        Raises:
            UsageError: the optimizer is watched, and the live session has not adopted it.
        """
        watched = self._find(optimizer)
        if watched is not None and not live.settings.adopts_on_use and not live.adopted.has(optimizer):
            raise UsageError(
                f"this {type(optimizer).__name__} was handed to an amp.initialize that a later one has replaced, since "
                f"the settings differ ({watched.why}). {_ADVICE}"
            )

    def end(self) -> None:
        """Removes every hook, and forgets all models and optimizers."""
        self._ledger.undo()
        self._watched.clear()

    def _is_new(self, owner: Any, why: str) -> bool:
        """Notes a model or an optimizer; returns True if it has no hook yet."""
        is_new = self._find(owner) is None
        forget = functools.partial(_forget, self._watched, id(owner))
        self._watched[id(owner)] = _Watched(weakref.ref(owner, forget), why)
        return is_new

    def _find(self, owner: Any) -> _Watched | None:
        watched = self._watched.get(id(owner))
        return watched if watched is not None and watched.reference() is owner else None


def _has(session: Session, trained: Any) -> bool:
    """Returns True if a session has adopted an optimizer, or a model that is the given one or contains it."""
    if not isinstance(trained, nn.Module):
        return session.adopted.has(trained)
    return any(trained in model.modules() for model in session.adopted.models)


def _forget(watched: dict[int, _Watched], key: int, reference: weakref.ref[Any]) -> None:
    """Forgets a model or an optimizer that has died, unless another one is watched under its id by now."""
    if key in watched and watched[key].reference is reference:
        del watched[key]


def _announced(before: Callable[[Any], None], step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``before``, then the step of an optimizer that has no step hooks because its class is not torch's."""
    before(getattr(step, "__self__", None))
    return step(*args, **kwargs)
