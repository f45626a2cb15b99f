"""The user's optimizer, of any class: what it must have, its own step, and the hooks around that.

Must not know gradients, scales or verdicts: `AdoptedOptimizer` decides whether the step runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ampatch.errors import OptionError, UsageError
from ampatch.torch_private.optimizers import (
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
    WRAPPED_BY_SCHEDULER,
    global_post_hooks,
    global_pre_hooks,
)
from ampatch.weights.exchange import ExchangedMasters, note_lost_graph

#: The attribute that marks amp's own hooks for all optimizers.
OWN_HOOK = "_is_of_ampatch"

_NO_OPTIONS: dict[str, Any] = {}


class OptimizerLike(Protocol):
    """An optimizer of any class, torch's or not."""

    @property
    def param_groups(self) -> Any:
        """Mappings with the parameters under "params"."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the parameters from their gradients."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Clears the gradients."""


def check_optimizer(optimizer: object) -> OptimizerLike:
    """Returns ``optimizer`` if it behaves like one.

    Raises:
        OptionError: it lacks ``param_groups``, ``step`` or ``zero_grad``, or its groups are no list.
    """
    missing = [name for name in ("param_groups", "step", "zero_grad") if not hasattr(optimizer, name)]
    if missing:
        found = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise OptionError(
            f"found {found} as an optimizer, which lacks {', '.join(missing)}; expected an "
            "object with param_groups, step() and zero_grad(), such as torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    groups = optimizer.param_groups  # type: ignore[attr-defined]
    if not hasattr(groups, "__iter__"):
        raise OptionError(
            f"found {type(optimizer).__name__} as an optimizer, whose param_groups is {type(groups).__name__!r}; "
            "expected a list of mappings, each with its parameters under 'params', as torch's optimizers have it."
        )
    return optimizer  # type: ignore[return-value]


def check_not_stepping(optimizer: OptimizerLike) -> None:
    """Raises `UsageError` if an optimizer's step is running in this thread, since an overflow could not skip it."""
    frame = sys._getframe().f_back
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is optimizer:
            kind = type(optimizer).__name__
            raise UsageError(
                f"the first amp.scale_loss for this {kind} stands in the closure of its step(), which has begun "
                "already, so that an overflow could not skip it. Hand it in before that: type model, optimizer = "
                "amp.initialize(model, optimizer) where amp.init() stands."
            )
        frame = frame.f_back


def hooks_of(optimizer: Any) -> list[tuple[Any, int, Any]]:
    """Returns the hooks around an optimizer's step, but amp's own: their tables, keys and functions."""
    own = vars(optimizer)
    tables = (global_pre_hooks, global_post_hooks, own.get(STEP_PRE_HOOKS, {}), own.get(STEP_POST_HOOKS, {}))
    return [(table, key, hook) for table in tables for key, hook in table.items() if not hasattr(hook, OWN_HOOK)]


def has_own_step(optimizer: Any) -> bool:
    """Returns True if user code has put a function of its own in place of an optimizer's step, on the object."""
    return "step" in vars(optimizer) and not hasattr(optimizer.step, WRAPPED_BY_SCHEDULER)


class OwnStep:
    """An optimizer's own step, on the masters if there are any. Keeps the optimizer alive, so only that may keep it.

    Args:
        optimizer: the optimizer.
        exchange: what its parameters stand for while it steps.
    """

    def __init__(self, optimizer: OptimizerLike, exchange: ExchangedMasters) -> None:
        self._original = optimizer.step
        self._optimizer, self._exchange = optimizer, exchange
        self._is_of_user = has_own_step(optimizer)

    def __call__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] = _NO_OPTIONS) -> Any:
        """Steps, and returns what the optimizer's own step does."""
        if not self._exchange.wanted:
            return self._original(*args, **kwargs)

        def step(swap_in: Callable[[], object]) -> Any:
            with self._hooks_aside():
                swap_in()
                return self._original(*args, **kwargs)

        def is_whole() -> bool:
            has_arguments = any(each is not None for each in (*args, *kwargs.values()))
            return has_arguments or self._is_of_user or bool(hooks_of(self._optimizer))

        try:
            return self._exchange.run(step, is_whole)
        except RuntimeError as error:
            note_lost_graph(error)
            raise

    @contextlib.contextmanager
    def _hooks_aside(self) -> Iterator[None]:
        """Context in which the hooks around the optimizer's step see half weights, while it steps masters."""
        hooks: list[tuple[Any, int, Any, Any]] = [
            (table, key, hook, functools.partial(self._run_aside, hook))
            for table, key, hook in hooks_of(self._optimizer)
        ]
        try:
            for table, key, _, aside in hooks:
                table[key] = aside
            yield
        finally:
            for table, key, hook, aside in hooks:
                if table.get(key) is aside:  # the hook has not removed itself
                    table[key] = hook

    def _run_aside(self, hook: Callable[..., Any], optimizer: Any, *args: Any) -> Any:
        if optimizer is not self._optimizer:  # one that steps at the same time
            return hook(optimizer, *args)
        with self._exchange.swapped_out():
            return hook(optimizer, *args)
