"""State of the process: the live session, the functions that the user registered, and hooks that find the live session.

A process has at most one live session, since its threads share torch's functions. Hooks and decorated functions look
the session up here at every call. Must not do a session's work.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ampatch import compilers
from ampatch.cast_lists.rules import Treatment
from ampatch.casting import cast_observers, write_back
from ampatch.casting.nested import Adapt, with_versions
from ampatch.errors import OptionError, UsageError
from ampatch.patching import cast_labels, casting_mode
from ampatch.patching.adopted_model import Hooks
from ampatch.patching.function_patches import Registration
from ampatch.patching.wrappers import explain, without_casts
from ampatch.replaced_sessions import Replaced
from ampatch.scaling.users_optimizer import OptimizerLike
from ampatch.session import Session
from ampatch.settings import Settings


@dataclass(slots=True)
class Runtime:
    """State that belongs to the process, not to a session.

    Attributes:
        live: live session; None if there is none.
        disabled: True if ``initialize(enabled=False)`` was the last call while no session was live.
        registered: functions that the user registered, for all later sessions.
        may_replace: True if a session with other settings replaces the live one, as in Apex; if False, that raises.
        replaced: models and optimizers of replaced sessions; None if no session was replaced.
        before_close: called with the live session before it is taken down; `amp.report` notes its settings.
    """

    live: Session | None = None
    disabled: bool = False
    registered: list[Registration] = field(default_factory=list)
    may_replace: bool = False
    replaced: Replaced | None = None
    before_close: list[Callable[[Session], None]] = field(default_factory=list)

    def required(self, what: str) -> Session:
        """Returns the live session; raises if there is none, naming the function that needs it."""
        if self.live is None:
            raise UsageError(
                f"{what} was called before amp.initialize. Type model, optimizer = amp.initialize(model, optimizer) "
                "first."
            )
        return self.live

    def session_of(self, optimizer: OptimizerLike, what: str) -> Session:
        """Returns the live session; raises if it is not the one that has the optimizer."""
        live = self.required(what)
        if self.replaced is not None:
            self.replaced.check(optimizer, live)
        return live


runtime = Runtime()

_F = TypeVar("_F", bound=Callable[..., Any])

_setting_up = threading.RLock()
# A child process must not inherit a lock that another thread holds, nor functions of torch that it was patching.
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    _release = _setting_up.release
    os.register_at_fork(before=_setting_up.acquire, after_in_parent=_release, after_in_child=_release)


def in_one_thread(function: _F) -> _F:
    """Decorates what opens, joins or ends a session: a second thread waits until the first has returned.

    Otherwise it would take the first one's wrappers for torch's own functions, and nothing could restore torch.
    """

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _setting_up:
            return function(*args, **kwargs)

    return alone  # type: ignore[return-value]


@in_one_thread
def open_session(settings: Settings, device_types: Iterable[str]) -> Session:
    """Makes a session and installs it. If that fails, undoes everything; but a replaced session stays replaced.

    Raises:
        UsageError: another session is live, and must not be replaced.
    """
    live = runtime.live
    if live is not None:
        if not runtime.may_replace:
            properties = live.settings.properties
            raise UsageError(
                f"amp is set up already, at opt_level={properties.opt_level!r} in {properties.half_dtype}; type "
                "amp.deinitialize() first."
            )
        replace_session(difference(live, settings) or "amp.init was called again")
    session = Session(settings, device_types, _HOOKS, runtime.registered)
    try:
        session.install()
    except BaseException:
        session.take_down()
        raise
    runtime.live = session
    return session


@in_one_thread
def close_session(session: Session) -> None:
    """Takes a session down if it is the live one; otherwise does nothing."""
    if session is runtime.live:
        for told in runtime.before_close:
            told(session)
        runtime.live = None
        session.take_down()


@contextlib.contextmanager
def replacing() -> Iterator[None]:
    """Lets a session that is opened in the block, with other settings, replace the live one."""
    with _setting_up:
        before, runtime.may_replace = runtime.may_replace, True
        try:
            yield
        finally:
            runtime.may_replace = before


def difference(session: Session, settings: Settings) -> str:
    """Returns the differences between a session and one opened now, for a message; empty if there are none."""
    parts = [session.settings.difference(settings)]
    if set(session.casts.registered) != set(runtime.registered):
        parts.append("registered functions")
    return ", ".join(part for part in parts if part)


def replace_session(why: str) -> None:
    """Takes the live session down for another one, and hooks its models and optimizers to warn of further training.

    Args:
        why: differences of the other session's settings, for messages.
    """
    live = runtime.live
    if live is None:
        return
    models, optimizers = live.adopted.models, live.adopted.optimizers
    close_session(live)
    if runtime.replaced is None:
        runtime.replaced = Replaced(before_replaced_forward, before_replaced_step)
    runtime.replaced.watch(models, optimizers, why)


def disable() -> None:
    """Turns amp off for ``enabled=False``, unless a session is live that must not be replaced."""
    if runtime.may_replace:
        replace_session("enabled=False")
    runtime.disabled = runtime.live is None


@in_one_thread
def turn_off() -> None:
    """Undoes everything, as `amp.deinitialize` describes."""
    runtime.disabled = False
    replaced, runtime.replaced = runtime.replaced, None
    if replaced is not None:
        replaced.end()
    if runtime.live is not None:
        close_session(runtime.live)


def register(registration: Registration) -> None:
    """Registers a function for later sessions; replaces an earlier registration of the same function."""
    same = (registration.owner, registration.name)
    runtime.registered[:] = [known for known in runtime.registered if (known.owner, known.name) != same]
    runtime.registered.append(registration)


def decorate(function: Any, kind: str) -> Any:
    """Returns a function that casts its arguments while a live session patches functions.

    Args:
        function: function, builtin, static method or class method to decorate.
        kind: key of `Casts.adapters`.

    Raises:
        OptionError: ``function`` is none of these.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorate(function.__func__, kind))
    if not callable(function):
        raise OptionError(f"found {function!r} to decorate; expected a function. Type the decorator above its `def`.")
    name = getattr(function, "__qualname__", repr(function))
    reason = f"ampatch: {name} is decorated for the {kind}."
    enclosed = without_casts(function, True) if kind == Treatment.BLACKLIST.value else function  # in float32, all of it

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        session, mode = runtime.live, casting_mode.thread.mode
        if mode is not None:  # in a forward of an `amp.convert_model` copy, where the session's casts are off
            adapt: Adapt = functools.partial(mode.adapt_decorated, kind)
        elif (
            session is None
            or not session.settings.properties.patch_torch_functions  # torch.compile reads no property
            or not session.switch.active
            or session.switch.is_off()
        ):
            return function(*args, **kwargs)
        else:
            adapt = session.casts.adapters[kind]
            if session.settings.profile_casts:
                adapt = cast_labels.named(adapt, name)
        observer = None if is_dynamo_compiling() else cast_observers.observer
        if observer is not None and not observer.is_calling(function):
            return observer.call(function, itself(), args, kwargs)  # type: ignore[arg-type]
        adapted = None
        try:
            adapted = with_versions(adapt, args, kwargs)
            return write_back.call(enclosed if mode is None else function, (args, kwargs), adapted)
        except Exception as error:
            explain(error, reason, (args, kwargs), adapted)
            raise

    compilers.give_own_code(wrapper, function)
    itself = weakref.ref(wrapper)
    _kinds[wrapper] = kind
    return wrapper


# The kinds of decorated functions, for messages. A call never looks here.
_kinds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def decoration_of(function: object) -> str | None:
    """Returns the kind that a function was decorated for by `decorate`; None if it was not."""
    return _kinds.get(function) if type(function) is types.FunctionType else None


def decorated() -> dict[str, list[str]]:
    """Returns the kinds of all decorated functions that are alive, by the module and name of the function."""
    found: dict[str, set[str]] = {}
    for function, kind in list(_kinds.items()):
        found.setdefault(f"{function.__module__}.{function.__qualname__}", set()).add(kind)
    return {name: sorted(kinds) for name, kinds in found.items()}


# Hooks of adopted models: without state, so that a model deep-copies and pickles with them.


@compilers.traced_within_others
def before_forward(model: nn.Module, _: object) -> None:
    """Runs before the forward of an adopted model, or of a copy of one."""
    session = runtime.live
    if session is not None:
        session.before_forward(model)


@compilers.traced_within_others
def after_forward(model: nn.Module, inputs: object, outputs: object) -> None:
    """Runs after the forward of an adopted model, whether it returned or raised."""
    session = runtime.live
    if session is not None and not torch.compiler.is_compiling():
        # If the forward raised, torch is still handling the error.
        session.after_forward(model, inputs, sys.exc_info()[1] if outputs is None else None)


@compilers.traced_within_others
def before_replaced_forward(model: nn.Module, _: object) -> None:
    """Runs before the forward of a model whose session was replaced, or of a copy of one."""
    if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
        before_replaced_step(model)


def before_replaced_step(trained: object, *_: object) -> None:
    """Runs before the step of an optimizer whose session was replaced."""
    if runtime.replaced is not None and (runtime.live is not None or runtime.disabled):
        runtime.replaced.warn_of_training(trained, runtime.live)


def before_replicated_forward(wrapper: Any, _: object) -> None:
    """Runs before every forward of a DistributedDataParallel wrapper whose gradients are views of its buckets."""
    session = runtime.live
    if session is not None:
        session.wrappers.expect_moved_gradients(wrapper)


def after_replicated_forward(wrapper: Any, *_: object) -> None:
    """Runs after every forward of a DistributedDataParallel wrapper."""
    session = runtime.live
    if session is not None:
        session.wrappers.note_forward(wrapper)


def after_state_dict(module: nn.Module, saved: dict[str, Any], prefix: str, _: object) -> None:
    """Runs for every submodule of a converted model when it is saved."""
    session = runtime.live
    if session is not None:
        session.state_dicts.after_save(module, saved, prefix)


def before_load_state_dict(
    module: nn.Module, saved: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: object
) -> None:
    """Runs for every submodule of a converted model, before it loads a state dict."""
    session = runtime.live
    if session is not None:
        assigns = bool(local_metadata.get("assign_to_params_buffers"))
        session.state_dicts.before_load(module, saved, prefix, assigns)


def after_load_state_dict(module: nn.Module, _: object) -> None:
    """Runs after a submodule of a converted model has loaded a state dict."""
    session = runtime.live
    if session is not None:
        session.state_dicts.after_load(module)


_HOOKS = Hooks(
    before_forward,
    after_forward,
    before_replicated_forward,
    after_replicated_forward,
    after_state_dict,
    before_load_state_dict,
    after_load_state_dict,
)
