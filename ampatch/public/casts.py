"""Registers functions, turns casts off, keeps casts of weights, and makes half copies of models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ampatch.cast_lists import rules
from ampatch.cast_lists.lists import Overlay
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Treatment
from ampatch.errors import OptionError, UsageError, did_you_mean
from ampatch.interfaces.inference_copy import convert
from ampatch.opt_levels import as_flag
from ampatch.patching import adopted_model
from ampatch.patching.function_patches import Registration
from ampatch.patching.weight_cache import CastCounts
from ampatch.public import arguments
from ampatch.public.arguments import checks_names
from ampatch.runtime import decorate, register, runtime
from ampatch.switch import OFF, WithoutCasts, in_graph

_F = TypeVar("_F")
_Model = TypeVar("_Model", bound=nn.Module)


def half_function(function: _F) -> _F:
    """Decorates a function: casts its floating arguments to the half type while amp patches functions.

    If the function writes to an argument, the write reaches the caller's tensor or container.
    """
    return decorate(function, "whitelist")  # type: ignore[no-any-return]


def bfloat16_function(function: _F) -> _F:
    """Decorates a function: casts its floating arguments to bfloat16; see `half_function`."""
    return decorate(function, "bfloat16")  # type: ignore[no-any-return]


def float_function(function: _F) -> _F:
    """Decorates a function: casts its half arguments to float32, and casts nothing inside; see `half_function`."""
    return decorate(function, "blacklist")  # type: ignore[no-any-return]


def promote_function(function: _F) -> _F:
    """Decorates a function: casts mixed floating arguments to the widest type; see `half_function`."""
    return decorate(function, "promote")  # type: ignore[no-any-return]


def register_half_function(module: Any, name: str) -> None:
    """Registers a function to cast its floating arguments to the half type, from the next ``initialize``.

    Unlike functions on the whitelist, which cast only in models, it casts wherever it is called.

    Args:
        module: the module or class that owns it, torch's or not.
        name: its name there.

    Raises:
        ValueError: the module has no function of that name.
        UsageError: amp is set up already.
    """
    _register(module, name, Treatment.WHITELIST)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Does the same as `register_half_function`, but casts to bfloat16 whatever the half type is."""
    _register(module, name, Treatment.WHITELIST, torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """Registers a function to run on float32 casts of its half arguments, without casts inside.

    See `register_half_function`.
    """
    _register(module, name, Treatment.BLACKLIST)


def register_promote_function(module: Any, name: str) -> None:
    """Registers a function to cast mixed floating arguments to the widest type; see `register_half_function`."""
    _register(module, name, Treatment.PROMOTE)


def _register(owner: Any, name: Any, treatment: Treatment, dtype: torch.dtype | None = None) -> None:
    if runtime.live is not None and not runtime.may_replace:
        raise UsageError("functions are registered before amp.initialize; type amp.deinitialize() first.")
    if isinstance(owner, str):
        raise OptionError(
            f"found the text {owner!r}; expected the module or class itself: import it, and leave the quotes out."
        )
    if not isinstance(name, str):
        given = getattr(name, "__name__", "name")
        raise OptionError(f"found {name!r}; expected the function's name, such as {given!r}.")
    found = getattr(owner, name, None)
    where = getattr(owner, "__name__", repr(owner))
    if found is None:
        raise OptionError(f"{where} has no {name!r} to register.{did_you_mean(name, dir(owner))}")
    if not callable(found):
        raise OptionError(f"{where}.{name} is {type(found).__name__!r}; expected a function.")
    unfit = rules.unlistable_reason(Path(where, name), owner, found)
    if unfit:
        raise OptionError(unfit)
    register(Registration(owner, name, treatment, dtype))


@overload
def disable_casts(function: None = None) -> WithoutCasts: ...
@overload
def disable_casts(function: _F) -> _F: ...
def disable_casts(function: Any = None) -> Any:
    """Turns casts off in this thread: as a context manager, or as a decorator, with parentheses or without.

    `torch.autocast` is turned off as well. ``torch.autocast(device_type, enabled=False)`` does the same for one device
    type.

    Blocks may be nested, and the same object may be entered again. Casts come back when the block ends, also through an
    exception. In a decorated generator or coroutine casts are off while it runs, and not between its steps. The block
    also works if amp is set up inside it.

    Args:
        function: function, generator function or coroutine function to decorate.

    Raises:
        OptionError: it decorates something else, such as a class.
    """
    if function is not None:
        return WithoutCasts()(function)
    return in_graph(OFF) if is_dynamo_compiling() else WithoutCasts()


@contextlib.contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Keeps the casts of a model's weights until the block ends, for calls that record no gradients.

    ::

        with torch.inference_mode(), amp.frozen_weights(model):
            for batch in loader:
                predictions = model(batch)

    Each weight is cast only once, instead of in every call. Calls that record gradients are unaffected. A weight that
    changes is cast again at its next use. Writes through a view of its memory (numpy, DLPack, a storage) are invisible
    to torch: call `clear_cache` after them. Blocks may be nested, for one model or for several. Threads share the
    casts. The end of the block drops them, and so does `deinitialize`.

    The block is a no-op if no functions are patched or amp is off. Code compiled by torch.compile makes its own casts
    and does not cache them. As a decorator it opens and closes a block with every call.

    Args:
        model: a model passed to ``amp.initialize``, a part of it, or a wrapper around it.

    Raises:
        OptionError: it is not a module.
        UsageError: it was never passed to ``amp.initialize``.
    """
    checked = adopted_model.check_module(model)
    live = runtime.live
    with contextlib.nullcontext() if live is None else live.casts.frozen_weights(checked):
        yield


def clear_cache() -> None:
    """Drops the cast weights.

    Call it after a write to a weight through a view of its memory (numpy, DLPack, a storage), which torch does not
    count. This is necessary only between two forward passes with gradients and without a step, and inside
    `frozen_weights`.
    """
    live = runtime.live
    if live is not None:
        live.cache.clear()


def cast_counts() -> CastCounts:
    """Returns the number of casts since amp was set up, and the number of weight casts that the cache saved.

    Casts in compiled code are not counted.
    """
    live = runtime.live
    return CastCounts(0, 0) if live is None else live.cache.counts()


@checks_names
def convert_model(
    model: _Model,
    half_dtype: torch.dtype | str | None = None,
    excluded: Any = (),
    cast_lists: Overlay | None = None,
    *,
    keep_float32: bool = True,
) -> _Model:
    """Makes a copy of a model for inference, with half weights and a forward pass that casts by the lists.

    It patches nothing else in the process, leaves the model unchanged, and does not need `initialize`. The copy is in
    evaluation mode, and its results equal those of the model at O1 bit for bit. Run it under
    ``torch.inference_mode()`` or ``torch.no_grad()``.

    A weight becomes half if only whitelisted functions read it. For torch's own layers this is known at once, for other
    modules after the first forward pass. Other weights stay float32: those of embeddings and norms, and weights that
    are shared with them.

    Args:
        model: float32, and not wrapped or compiled.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``, or its name; None: float16 if the parameters are on a GPU,
            else bfloat16.
        excluded: parts that compute in float32, one or a list. A submodule, its name, a pattern (``"*.head"``) or a
            class: nothing in it is cast, and its inputs are cast to float32. Or a function: ``torch.softmax``,
            ``"softmax"`` for all its spellings, or ``"torch.nn.functional.softmax"`` for one.
        cast_lists: as for `initialize`.
        keep_float32: whether the copy keeps the float32 values of its half weights in main memory, 4 bytes per weight.
            Without them, its state dict holds rounded values in float32, and a half weight that a function needs in
            float32 raises `UsageError`.

    Returns:
        A model of the same class. Its state dict is float32 and equals the model's.

    Raises:
        OptionError: an argument has a value that is not allowed, or the model cannot be copied.
        CastListError: the cast lists have faults.
    """
    kept = as_flag("keep_float32", keep_float32)
    half = arguments.half_dtype_of(half_dtype, None, "", "O1", [adopted_model.check_module(model)])
    return convert(model, half, () if excluded is None else excluded, arguments.lists_of(cast_lists), kept)  # type: ignore[return-value]
