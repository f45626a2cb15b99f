"""Makes wrappers: plain Python functions around an original, each with the adapter of its rule.

A wrapper is no wrapt proxy, because torch.compile looks through proxies and would silently drop the cast. It must hold
no state: it reads the session's switch and calls its adapter. After the session, a wrapper that user code kept forwards
every call unchanged.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.overrides import get_overridable_functions, handle_torch_function, has_torch_function

from ampatch.casting import cast_observers, write_back
from ampatch.casting.cast_errors import may_be_caused_by_casts
from ampatch.casting.nested import cast_tensors, tensors_in
from ampatch.compilers import give_own_code
from ampatch.opt_levels import HALVES
from ampatch.patching.adapters import Adapt, Adapter, Arguments, Function
from ampatch.switch import Switch, is_in_region
from ampatch.tracing import is_below_operators

_without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast

_NOTHING = nullcontext()

#: A note for errors: names a function and the list entry that applies. A function returns the entry in force.
Reason = str | Callable[[], str]


def wrap(
    original: Function,
    adapter: Adapter,
    switch: Switch,
    reason: Reason,
    needs_block: bool = False,
) -> Function:
    """Returns a plain function that adapts its arguments while casts are on, then calls the original.

    Args:
        original: function to wrap.
        adapter: adapter of the function's rule.
        switch: switch of the session.
        reason: note that names the function and the list entry; added to errors that a cast may have caused.
        needs_block: True if what the original calls must cast nothing. Otherwise only builtins run without torch's
            autocast, which has lists of its own; and graphs need not, where its casts are the same.
    """
    adapt, call, may_write = adapter.adapt, adapter.call, adapter.may_write
    is_python = isinstance(original, types.FunctionType)
    enclosed = without_casts if needs_block else _as_it_is
    overridden, run = enclosed(_asking_overrides(original), is_python), enclosed(original, is_python)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.active:
            return original(*args, **kwargs)
        in_region = is_in_region()
        if is_dynamo_compiling() or in_region or _len_torch_dispatch_stack():
            if in_region and switch.is_off():
                return overridden(*args, **kwargs)
            # Under a tracer, Python code may run in place of an operator's kernel: its calls are not user code.
            if not is_dynamo_compiling() and _len_torch_dispatch_stack() and is_below_operators(sys._getframe(1)):
                with switch.disabled():
                    return original(*args, **kwargs)
            # Dynamo must not guard the observer. It keeps a dispatch mode on the stack, so that calls come here.
            observer = None if is_dynamo_compiling() else cast_observers.observer
            if observer is not None and not observer.is_calling(original):
                return observer.call(original, itself(), args, kwargs)  # type: ignore[arg-type]
        adapted = None
        try:
            overrides = has_torch_function((*args, *kwargs.values()) if kwargs else args)
            adapted = adapted_for_override(adapt, args, kwargs) if overrides else adapt(args, kwargs)
            if may_write or overrides:
                return (write_back.call if may_write else _call)(overridden, (args, kwargs), adapted)
            if is_python or is_dynamo_compiling():
                return run(*adapted[0], **adapted[1])
            with _without_autocast() if in_region else _NOTHING:
                return original(*adapted[0], **adapted[1]) if call is None else call((args, kwargs), adapted)
        except Exception as error:
            explain(error, reason, (args, kwargs), adapted)
            raise

    give_own_code(wrapper, original)
    itself = weakref.ref(wrapper)  # weak, so that a wrapper dies with its session
    return wrapper


def without_casts(function: Function, always: bool) -> Function:
    """Returns a function that runs without casts: always, or only in a region."""

    def enclosed(*args: Any, **kwargs: Any) -> Any:
        if always or is_in_region():
            with Switch.disabled():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return enclosed


def _as_it_is(function: Function, _: bool) -> Function:
    return function


def _call(function: Function, _: Arguments, adapted: Arguments) -> Any:
    return function(*adapted[0], **adapted[1])


def wrap_for_half_models(
    original: Function, adapter: Adapter, switch: Switch, reason: Reason, devices: Set[str]
) -> Function:
    """Returns a wrapper for models with half weights: it computes in float32, and gives half arguments half results.

    If all floating arguments were of one half type, a float32 result is cast back to it: the layers behind have half
    weights. Three kinds of results stay as they are:

    - complex ones, since bfloat16 has no complex type;
    - results of a call with ``dtype=``;
    - tensors without dimensions, such as losses, which promote no half tensor to float32.

    Args:
        original: function to wrap.
        adapter: adapter that casts half arguments to float32.
        switch: switch of the session.
        reason: note that names the function and the list entry.
        devices: device types on which the original has no half kernel; `EVERY_DEVICE` for all.
    """
    in_float32 = wrap(original, adapter, switch, reason)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.active:
            return original(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dtype.is_floating_point]
        if not any(tensor.dtype in HALVES and ("*" in devices or tensor.device.type in devices) for tensor in given):
            return original(*args, **kwargs)
        result = in_float32(*args, **kwargs)
        half = given[0].dtype
        if any(tensor.dtype is not half for tensor in given) or kwargs.get("dtype") is not None:
            return result
        return cast_tensors(result, lambda tensor: tensor.to(half) if _is_float32_array(tensor) else tensor)

    give_own_code(wrapper, original)
    return wrapper


def _is_float32_array(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.dim() > 0


def _asking_overrides(original: Function) -> Function:
    """Returns a function that first lets ``__torch_function__`` override the call, and passes it the original.

    Overrides know the original. But torch's Python functions pass on the object under their global name, which is the
    wrapper now. So the returned function checks for overrides first. If torch allows none, it is the original itself.
    """
    if id(original) not in overridable():
        return original

    def overridden(*args: Any, **kwargs: Any) -> Any:
        relevant = (*args, *kwargs.values())
        if has_torch_function(relevant):
            return handle_torch_function(original, relevant, *args, **kwargs)
        return original(*args, **kwargs)

    return overridden


@functools.cache
def overridable() -> frozenset[int]:
    """Returns the ids of functions that ``__torch_function__`` can override; torch keeps these functions alive."""
    return frozenset(id(function) for functions in get_overridable_functions().values() for function in functions)


def explain(error: Exception, reason: Reason, given: Arguments, adapted: Arguments | None) -> None:
    """Adds ``reason`` to an error as a note, if a cast may be the cause.

    Args:
        error: exception that the call raised.
        reason: note that names the function and why its arguments are cast.
        given: arguments of the call.
        adapted: arguments that the adapter returned; None if the adapter itself raised.
    """
    if adapted is None:
        error.add_note(_text_of(reason))
        return
    before, after = ([*args, *kwargs.values()] for args, kwargs in (given, adapted))
    changed = [
        (old.dtype, new.dtype) for old, new in zip(tensors_in(before), tensors_in(after), strict=True) if old is not new
    ]
    # `via_dtype` casts no tensor: it passes dtype= to the kernel.
    told = adapted[1].get("dtype")
    if told is not None and not any(isinstance(value, torch.dtype) for value in before):
        changed += [(tensor.dtype, told) for tensor in tensors_in(before[:1])]
    if changed and may_be_caused_by_casts(error, {old for old, _ in changed}, {new for _, new in changed}):
        error.add_note(_text_of(reason))


def _text_of(reason: Reason) -> str:
    return reason if isinstance(reason, str) else reason()


def adapted_for_override(adapt: Adapt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the adapted arguments of a call that an argument's ``__torch_function__`` or a mode may override.

    If such an argument is no tensor, it cannot be cast. Then no other argument is cast either.
    """
    overriding = [value for value in (*args, *kwargs.values()) if hasattr(type(value), "__torch_function__")]
    return adapt(args, kwargs) if all(isinstance(value, Tensor) for value in overriding) else (args, kwargs)
