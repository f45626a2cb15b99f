"""`initialize` and `init` as scripts for Apex call them: those of `ampatch.amp`, with Apex's half dtype.

A call with other settings replaces an earlier call, as in Apex: each fold of a cross-validation makes one call.

Must hold no state. Scripts read the state in `_amp_state`, which takes it from the session.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ampatch import amp, opt_levels
from ampatch.amp import load_state_dict, state_dict
from ampatch.apex._announcement import announce
from ampatch.apex.amp import _stash, lists
from ampatch.apex.amp._amp_state import _amp_state
from ampatch.apex.amp.handle import AmpHandle
from ampatch.runtime import replacing, runtime

__all__ = [
    "init",
    "initialize",
    "load_state_dict",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "state_dict",
]

_R = TypeVar("_R", bound=Callable[[Any, str], None])


@functools.wraps(amp.initialize)
def _initialize(*args: Any, **kwargs: Any) -> Any:
    given = _by_name(amp.initialize, args, kwargs)
    # For an unknown level, amp.initialize raises.
    level = opt_levels.LEVELS.get(str(given.get("opt_level")), opt_levels.LEVELS["O1"])
    if level.half_dtype is None and opt_levels.dtype_of(given.get("cast_model_type")) is not torch.bfloat16:
        _mean_float16(given, "patch_torch_functions_type")
    patches = given.get("patch_torch_functions")
    if level.patched if patches is None else patches:
        _lay_over(given)
    with replacing():
        result = amp.initialize(**given)
    session = runtime.live
    if given.get("enabled", True) and session is not None:
        _amp_state.verbosity = given.get("verbosity", 1)
        if _amp_state.verbosity > 0:
            announce(session.settings.properties)
        optimizers = given.get("optimizers")
        for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            if optimizer is not None:
                _stash.attach(optimizer, session)
    return result


if TYPE_CHECKING:  # this signature keeps the classes of models and optimizers
    from ampatch.amp import initialize
else:
    initialize = _initialize


@functools.wraps(amp.init)
def init(*args: Any, **kwargs: Any) -> AmpHandle:  # noqa: D103 - functools.wraps copies the docstring
    given = _by_name(amp.init, args, kwargs)
    _mean_float16(given, "patch_type")
    _lay_over(given)
    with replacing():
        amp.init(**given)
    session = runtime.live if given.get("enabled", True) else None
    if session is not None:
        announce(session.settings.properties)
    return AmpHandle(session)


def _for_the_next(register: _R) -> _R:
    """Returns a register function that also works while amp is on; it takes effect at the next `initialize`."""

    @functools.wraps(register)
    def register_function(module: Any, name: str) -> None:
        with replacing():
            register(module, name)

    return register_function  # type: ignore[return-value]


register_half_function = _for_the_next(amp.register_half_function)
register_bfloat16_function = _for_the_next(amp.register_bfloat16_function)
register_float_function = _for_the_next(amp.register_float_function)
register_promote_function = _for_the_next(amp.register_promote_function)


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by their names, for a function of `ampatch.amp`."""
    signature = inspect.signature(function)
    opt_levels.check_names(kwargs, signature.parameters, f"amp.{function.__name__} got")
    return signature.bind(*args, **kwargs).arguments


def _mean_float16(given: dict[str, Any], alias: str) -> None:
    """Sets the half dtype to float16 unless the caller named one, also on the CPU, because Apex had no other."""
    if given.get("half_dtype") is None and given.get(alias) is None:
        given["half_dtype"] = torch.float16


def _lay_over(given: dict[str, Any]) -> None:
    """Puts the script's edits of the cast lists into ``cast_lists``, before the caller's own lists."""
    changes = lists.changes()
    if changes:
        own = given.get("cast_lists")
        several = isinstance(own, (list, tuple))
        given["cast_lists"] = [changes, *([] if own is None else own if several else [own])]
