"""Plain Python functions around the original, each with an adapter of its rule.

Plain, and not a wrapt proxy, because torch.compile looks through proxies and would drop the cast without a word. A
wrapper holds no state: it sees the session's switch, and calls its adapter. After the session is gone a wrapper that
somebody kept forwards every call unchanged.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.overrides import get_overridable_functions, handle_torch_function, has_torch_function

from ampatch.casting.cast_errors import may_come_of_casts
from ampatch.casting.nested import tensors_in
from ampatch.compilers import give_own_code
from ampatch.patching.adapters import Adapt, Adapter, Arguments, Function
from ampatch.switch import Switch
from ampatch.tracing import is_below_operators


def wrap(original: Function, adapter: Adapter, switch: Switch, reason: str) -> Function:
    """Returns a plain function that adapts its arguments while casts are on, then calls the original.

    Args:
        original: what is wrapped.
        adapter: what is done to the arguments.
        switch: the session's.
        reason: names the function and the list entry; added as a note to errors that come out of a cast call.
    """
    thread, adapt = switch.thread, adapter.adapt
    overridden = _asking_overrides(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.active:
            return original(*args, **kwargs)
        if is_dynamo_compiling() or thread.off or _len_torch_dispatch_stack():
            if switch.is_signalled_off():
                return overridden(*args, **kwargs)
            # A tracer runs the Python code that stands for an operator's kernel: what that calls is not the user's.
            if not is_dynamo_compiling() and _len_torch_dispatch_stack() and is_below_operators(sys._getframe(1)):
                with switch.disabled():
                    return original(*args, **kwargs)
        adapted = None
        try:
            if has_torch_function((*args, *kwargs.values()) if kwargs else args):
                adapted = _adapted_for_override(adapt, args, kwargs)
                return overridden(*adapted[0], **adapted[1])
            adapted = adapt(args, kwargs)
            return original(*adapted[0], **adapted[1])
        except Exception as error:
            explain(error, reason, (args, kwargs), adapted)
            raise

    give_own_code(wrapper, original)
    return wrapper


def _asking_overrides(original: Function) -> Function:
    """Returns the original, for calls with a ``__torch_function__`` among the arguments or in a mode.

    Who overrides a function of torch knows the original, but torch's functions in Python name themselves by their
    global name, where the wrapper stands. So they are not left to ask. Other functions do not ask.
    """
    if id(original) not in _overridable():
        return original

    def overridden(*args: Any, **kwargs: Any) -> Any:
        relevant = (*args, *kwargs.values())
        if has_torch_function(relevant):
            return handle_torch_function(original, relevant, *args, **kwargs)
        return original(*args, **kwargs)

    return overridden


@functools.cache
def _overridable() -> frozenset[int]:
    """Returns the ids of the functions that torch lets ``__torch_function__`` override; torch keeps them alive."""
    return frozenset(id(function) for functions in get_overridable_functions().values() for function in functions)


def explain(error: Exception, reason: str, given: Arguments, adapted: Arguments | None) -> None:
    """Adds ``reason`` to an error as a note, if a cast may be the cause.

    Args:
        error: what was raised.
        reason: names the function and why it casts.
        given: the arguments of the call.
        adapted: what the adapter made of them; None where the adapter itself raised.
    """
    if adapted is None:
        error.add_note(reason)
        return
    before, after = ([*args, *kwargs.values()] for args, kwargs in (given, adapted))
    changed = [
        (old.dtype, new.dtype) for old, new in zip(tensors_in(before), tensors_in(after), strict=True) if old is not new
    ]
    # `via_dtype` casts no tensor, and tells the kernel to.
    told = adapted[1].get("dtype")
    if told is not None and not any(isinstance(value, torch.dtype) for value in before):
        changed += [(tensor.dtype, told) for tensor in tensors_in(before[:1])]
    if changed and may_come_of_casts(error, {old for old, _ in changed}, {new for _, new in changed}):
        error.add_note(reason)


def _adapted_for_override(adapt: Adapt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments where a class among them, or a mode, has a ``__torch_function__``.

    Objects that stand for a tensor without being one cannot be cast, and then nothing beside them is.
    """
    overriding = [value for value in (*args, *kwargs.values()) if hasattr(type(value), "__torch_function__")]
    return adapt(args, kwargs) if all(isinstance(value, Tensor) for value in overriding) else (args, kwargs)
