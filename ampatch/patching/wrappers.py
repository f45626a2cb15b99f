"""Wraps patched functions, each with the adapter of its rule.

A wrapper is not a wrapt proxy, because torch.compile looks through proxies and would silently drop the cast. If user
code keeps a wrapper after the session, it passes on every call unchanged. Must hold no state of a call.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import get_overridable_functions, handle_torch_function, has_torch_function

from ampatch.casting import cast_observers, write_back
from ampatch.casting.cast_errors import may_be_caused_by_casts
from ampatch.casting.nested import Adapt, Arguments, cast_tensors, tensors_in, tensors_of_call, with_versions
from ampatch.compilers import traced_within_others
from ampatch.function_wrapper import NO_SLOTS, FunctionWrapper, unwrapped
from ampatch.half_types import HALVES
from ampatch.patching.adapters import Adapter, Function
from ampatch.switch import Switch, WithoutCasts, is_in_backward_of_region, is_in_half, is_in_region
from ampatch.torch_private.modes import DisableAutocast, is_function_mode_enabled, len_dispatch_stack
from ampatch.tracing import is_below_operators

_NOTHING = nullcontext()

#: A note for errors: names a function and the list entry that applies. A function returns the entry in force.
Reason = str | Callable[[], str]


class PatchedFunction(FunctionWrapper):
    """A function that adapts its arguments while casts are on, then calls the original.

    Args:
        original: function to wrap.
        adapter: adapter of the function's rule.
        switch: switch of the session.
        reason: note that names the function and the list entry; added to errors that a cast may have caused.
        needs_block: True if functions that the original calls must cast nothing. Otherwise only builtins run without
            torch's autocast, which has its own lists. In graphs they may run with it, if its casts are the same.
    """

    __slots__ = NO_SLOTS
    state = (*FunctionWrapper.state, "adapter", "is_python", "overridden", "reason", "run", "switch")

    def __init__(
        self, original: Function, adapter: Adapter, switch: Switch, reason: Reason, needs_block: bool = False
    ) -> None:
        super().__init__(original)
        self.switch, self.adapter, self.reason = switch, adapter, reason
        self.is_python = isinstance(original, types.FunctionType)
        self.run = without_casts(original, self.is_python) if needs_block else original
        self.overridden = _let_override(original) if id(original) in overridable() else None

    @traced_within_others
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original with arguments cast by the adapter, while casts are on."""
        if not self.switch.active:
            return self.original(*args, **kwargs)
        in_region = is_in_region()
        if is_dynamo_compiling() or in_region or len_dispatch_stack():
            if in_region and self.is_off():
                return self.uncast(args, kwargs)
            # Under a tracer, Python code may run in place of an operator's kernel: its calls are not user code.
            if not is_dynamo_compiling() and len_dispatch_stack() and is_below_operators(sys._getframe(1)):
                with self.switch.disabled():
                    return self.original(*args, **kwargs)
            # Dynamo must not guard the observer, which keeps a dispatch mode on the stack so that calls come here.
            observer = None if is_dynamo_compiling() else cast_observers.observer
            if observer is not None and not observer.is_calling(self.original):
                return observer.call(self.original, self, args, kwargs)
        overrides = _may_override(args, kwargs)
        if overrides and self.overridden is not None:
            return self.overridden(self, args, kwargs)
        adapter, adapted = self.adapter, None
        try:
            while adapter.choose is not None:
                adapter = adapter.choose(args, kwargs)
            result = None if adapter.instead is None or overrides else adapter.instead(args, kwargs)
            if result is not None:
                return result
            adapt = functools.partial(with_versions, adapter.adapt) if self.adapter.may_write else adapter.adapt
            adapted = adapted_for_override(adapt, args, kwargs) if overrides else adapt(args, kwargs)
            result = self._call_adapted(adapter, (args, kwargs), adapted, in_region)
            return result if adapter.finish is None else adapter.finish((args, kwargs), adapted, result)
        except Exception as error:
            explain(error, self.reason, (args, kwargs), adapted)
            raise

    def is_off(self) -> bool:
        """Returns True if the region that this thread is in casts nothing."""
        return self.switch.is_off()

    def uncast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the original without casts; ``__torch_function__`` may override the call."""
        if self.overridden is not None and _may_override(args, kwargs):
            return self.overridden(self, args, kwargs)
        return self.original(*args, **kwargs)

    def _call_adapted(self, adapter: Adapter, given: Arguments, adapted: Arguments, in_region: bool) -> Any:
        if self.adapter.may_write:
            return write_back.call(self.run, given, adapted)
        if self.is_python or is_dynamo_compiling():
            return self.run(*adapted[0], **adapted[1])
        with DisableAutocast() if in_region else _NOTHING:
            call = adapter.call
            return self.original(*adapted[0], **adapted[1]) if call is None else call(given, adapted)


def _may_override(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if is_dynamo_compiling() and is_function_mode_enabled():  # Dynamo's `has_torch_function` ignores function modes
        return True
    return has_torch_function(_in_lists((*args, *kwargs.values()) if kwargs else args))


def _in_lists(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the values, and the values in lists and tuples, in which torch looks for overrides too."""
    for value in values:
        if isinstance(value, (list, tuple)):
            values += tuple(value)
    return values


def _let_override(original: Function) -> Callable[[FunctionWrapper, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a function that passes a call to ``__torch_function__``, with the object that now has that name.

    torch itself looks up methods in C++ by name, and may use another name: for ``x @ y`` it is `Tensor.matmul`.
    """
    if isinstance(original, types.MethodDescriptorType):
        return lambda _, args, kwargs: original(*args, **kwargs)
    return lambda wrapper, args, kwargs: handle_torch_function(
        wrapper, _in_lists((*args, *kwargs.values())), *args, **kwargs
    )


def without_casts(function: Function, always: bool) -> Function:
    """Returns a function that runs without casts: always, or only in a region."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return WithoutCasts()(function)  # in each step of a generator

    def enclosed(*args: Any, **kwargs: Any) -> Any:
        if always or is_in_region():
            with Switch.disabled():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return enclosed


class FunctionInHalf(PatchedFunction):
    """A function that demands arguments of one type, for models with half weights: casts only in their forwards.

    It also casts in the backward passes of users' functions that ran in these forwards. It casts even where casts are
    off, because torch cannot multiply a half weight by float32.
    """

    __slots__ = NO_SLOTS

    @traced_within_others
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original; in the forward of a model with half weights, with arguments cast by the adapter."""
        if not self.switch.active:
            return self.original(*args, **kwargs)
        if not (is_in_half() or is_in_backward_of_region()):
            return self.uncast(args, kwargs)
        return PatchedFunction.__call__(self, *args, **kwargs)

    def is_off(self) -> bool:
        """Returns False."""
        return False


class HalfModelFunction(PatchedFunction):
    """A function for models with half weights: it computes in float32, and gives half arguments half results.

    If all floating arguments were of one half type, a float32 result is cast back to that type, because the next layers
    have half weights. Three kinds of results stay as they are:

    - complex ones, since bfloat16 has no complex type;
    - results of a call with ``dtype=``;
    - tensors without dimensions, such as losses, which promote no half tensor to float32.

    Args:
        original: function to wrap.
        adapter: adapter that casts half arguments to float32.
        switch: switch of the session.
        reason: note that names the function and the list entry.
        devices: device types on which the original has no half kernel; `EVERY_DEVICE` for all.
        otherwise: function for calls without a cast to float32; None for the original.
    """

    __slots__ = NO_SLOTS
    state = (*PatchedFunction.state, "devices", "otherwise")

    def __init__(
        self,
        original: Function,
        adapter: Adapter,
        switch: Switch,
        reason: Reason,
        devices: Set[str],
        otherwise: FunctionInHalf | None = None,
    ) -> None:
        super().__init__(original, adapter, switch, reason)
        self.devices, self.otherwise = devices, otherwise

    @traced_within_others
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original; with half arguments, in float32."""
        if not self.switch.active:
            return self.original(*args, **kwargs)
        given = [tensor for tensor in tensors_of_call(args, kwargs) if tensor.dtype.is_floating_point]
        devices = self.devices
        if not any(tensor.dtype in HALVES and ("*" in devices or tensor.device.type in devices) for tensor in given):
            return self.uncast(args, kwargs)
        result = PatchedFunction.__call__(self, *args, **kwargs)
        half = given[0].dtype
        if any(tensor.dtype is not half for tensor in given) or kwargs.get("dtype") is not None:
            return result
        return cast_tensors(result, lambda tensor: tensor.to(half) if _is_float32_array(tensor) else tensor)

    def uncast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the original without casts to float32; ``__torch_function__`` may override the call."""
        return super().uncast(args, kwargs) if self.otherwise is None else self.otherwise(*args, **kwargs)


def _is_float32_array(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.dim() > 0


@functools.cache
def overridable() -> frozenset[int]:
    """Returns the ids of functions that ``__torch_function__`` can override; torch keeps these functions alive."""
    told = itertools.chain.from_iterable(get_overridable_functions().values())
    # torch does not name all of its functions in C++; `torch.exp_` is missing, for example.
    every = (unwrapped(value) for module in (torch, torch.sparse) for value in vars(module).values())
    in_cpp = (value for value in every if isinstance(value, types.BuiltinFunctionType))
    return frozenset(map(id, (*told, *in_cpp)))


def explain(error: Exception, reason: Reason, given: Arguments, adapted: Arguments | None) -> None:
    """Adds ``reason`` to an error as a note, if a cast may be the cause.

    Args:
        error: exception that the call raised.
        reason: note that names the function and why its arguments are cast.
        given: arguments of the call.
        adapted: arguments that the adapter returned; None if the adapter itself raised.
    """
    if is_dynamo_compiling():  # some versions of torch.compile do not trace what judges the error
        return
    if adapted is None:
        error.add_note(_text_of(reason))
        return
    tensors = zip(tensors_of_call(*given), tensors_of_call(*adapted), strict=True)
    changed = [(old.dtype, new.dtype) for old, new in tensors if old is not new]
    # `via_dtype` casts no tensor: it passes dtype= to the kernel.
    before, told = [*given[0], *given[1].values()], adapted[1].get("dtype")
    if told is not None and not any(isinstance(value, torch.dtype) for value in before):
        changed += [(tensor.dtype, told) for tensor in tensors_in(before[:1])]
    if changed and may_be_caused_by_casts(error, {old for old, _ in changed}, {new for _, new in changed}):
        error.add_note(_text_of(reason))


def _text_of(reason: Reason) -> str:
    return reason if isinstance(reason, str) else reason()


def adapted_for_override(adapt: Adapt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the adapted arguments of a call that an argument's ``__torch_function__`` or a mode may override.

    If such an argument is not a tensor, it cannot be cast. Then the other arguments are not cast either.
    """
    return (args, kwargs) if is_overridden_by_others(args, kwargs) else adapt(args, kwargs)


def is_overridden_by_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if an argument that is not a tensor overrides torch's functions."""
    overriding = [value for value in (*args, *kwargs.values()) if hasattr(type(value), "__torch_function__")]
    return not all(isinstance(value, Tensor) for value in overriding)
