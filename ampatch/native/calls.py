"""The compiled library of calls, where it is in use: who runs the calls of patched functions, and what else it has.

Owns the choice between it and the Python code, for the process, and the way there. What the C++ does and does not do
stands in csrc/calls/; it must never be asked for more than the Python code does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from ampatch import compilers, tracing
from ampatch.casting import cast_errors
from ampatch.casting.cast_store import CacheState, Store
from ampatch.errors import KernelError
from ampatch.native import extension
from ampatch.native.selection import Chosen, Selection
from ampatch.switch import Switch

CHOICES = ("auto", "compiled", "python")
_VARIABLE = "AMPATCH_CALLS"


def _choose(asked: str) -> Chosen[ModuleType]:
    python = "plain Python"
    if asked == "python":
        return Chosen(None, f"{python}, as {_VARIABLE}=python asks for")
    library = extension.find(extension.CALLS)
    if library is None:
        missing = (
            f"there is no compiled library for this version of ampatch, Python and torch in "
            f"{extension.cache_directory()}"
        )
        if asked == "compiled":
            raise KernelError(
                f"{_VARIABLE}=compiled asks for calls in C++, and {missing}. Type `ampatch build`; or leave the "
                "variable out, to go on in plain Python."
            )
        return Chosen(None, f"{python}, as {missing}. `ampatch build` compiles it")
    try:
        return Chosen(extension.load_calls(library), f"C++, the compiled library {library.path}")
    except KernelError as error:
        if asked == "compiled":
            raise
        return Chosen(None, f"{python}, as {error}")


_selection = Selection(_VARIABLE, CHOICES, _choose, "Patched functions are called by %s.")


#: "to": tensors are cast to a type. "via_dtype": so they are, but where the first one is half the function is told to
#: compute in that type. "promote": to the widest type among them.
Kind = Literal["to", "via_dtype", "promote"]


@dataclass(frozen=True, slots=True)
class PlainCast:
    """What is done to arguments that are nothing out of the ordinary.

    Attributes:
        kind: how they are cast.
        dtype: the type; None where types are promoted.
        positional: with more arguments by position than these, one of them is ``dtype`` or ``out``.
    """

    kind: Kind
    dtype: torch.dtype | None
    positional: int = sys.maxsize


def select(choice: str | None = None) -> None:
    """Chooses what runs the calls in sessions that begin from now on.

    Args:
        choice: "compiled", "python", or "auto", which is the compiled library where there is one; None: what the
            environment variable AMPATCH_CALLS says, or "auto".

    Raises:
        OptionError: it is none of these.
        KernelError: the compiled library was asked for, and there is none that can be loaded.
    """
    _selection.select(choice)
    compiled.cache_clear()


def prepare() -> None:
    """Chooses now, and not at first use, so that a choice which cannot be had is an error before anything is changed.

    Raises:
        OptionError: AMPATCH_CALLS has no such value.
        KernelError: it asks for a library that is not there.
    """
    _selection.current()


def in_use() -> str:
    """Returns what runs the calls of patched functions here, and why, in a sentence for people."""
    return _selection.current().why


@functools.cache  # so that it takes no frame: it is asked several times in every step
def compiled() -> ModuleType | None:
    """Returns the module in C++, for what every step asks of parameters and gradients; None where Python is in use."""
    return _selection.current().compiled


def new_store() -> Store:
    """Returns an empty store of the implementation in use."""
    module = compiled()
    return Store() if module is None else module.Store()


def new_cache_state() -> CacheState:
    """Returns an empty state of the implementation in use."""
    module = compiled()
    return CacheState() if module is None else module.CacheState()


class Accelerator:
    """Gives wrappers a body in C++, where that is in use.

    Args:
        state: that of the cache.
        cast: `WeightCache.cast`, for what the C++ leaves to it.
        switch: the session's.
        device_types: of the tensors that are cast.
    """

    def __init__(
        self,
        state: CacheState,
        cast: Callable[[Tensor, torch.dtype], Tensor],
        switch: Switch,
        device_types: Iterable[str],
    ) -> None:
        # By the state, so that no session is served by two implementations.
        self._module = None if type(state) is CacheState else _selection.current().compiled
        if self._module is not None:
            self._caster = self._module.Caster(state, switch, cast, tracing.is_capturing)
        self.serve(device_types)

    def serve(self, device_types: Iterable[str]) -> None:
        """From now on tensors on these types of devices are cast, and no others."""
        if self._module is not None:
            self._caster.serve(tuple(device_types))

    def accelerate(self, wrapper: Any, original: Callable[..., Any], plainly: PlainCast | None, reason: str) -> Any:
        """Returns a function called in C++ that passes for the wrapper; the wrapper itself if Python is in use.

        Args:
            wrapper: a function made by `wrappers.wrap`.
            original: what it wraps.
            plainly: what it does to arguments; None if only its own code knows.
            reason: the note for errors that a cast may have caused.
        """
        if self._module is None or plainly is None:
            return wrapper
        function = FunctionType(wrapper.__code__, wrapper.__globals__, closure=wrapper.__closure__)
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(function, name, getattr(wrapper, name))
        vars(function).update(vars(wrapper))
        how = (plainly.kind, plainly.dtype, plainly.positional)
        explain = functools.partial(cast_errors.add_note, reason)
        self._module.accelerate(function, wrapper, self._caster, original, *how, explain)
        if hasattr(function, "__ampatch_python__"):  # in Python 3.11: csrc/calls/calls.cpp
            compilers.trace_instead(function)
        return function
