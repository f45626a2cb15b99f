"""Chooses whether C++ or Python runs the calls of patched functions, and gives access to the compiled library.

Owns that choice for the process. csrc/calls/ documents what the C++ does and does not do. The C++ must never do more
than the Python code does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ampatch import switch as switches
from ampatch.casting import cast_errors
from ampatch.casting.cast_store import CacheState, Store
from ampatch.function_wrapper import FunctionWrapper
from ampatch.native import extension
from ampatch.native.selection import Chosen, NotBuiltError, Selection
from ampatch.switch import Switch
from ampatch.torch_private.devices import is_current_stream_capturing

_W = TypeVar("_W", bound=FunctionWrapper)

CHOICES = ("auto", "compiled", "python")
_VARIABLE = "AMPATCH_CALLS"


def _load() -> Chosen[ModuleType]:
    library = extension.find(extension.CALLS)
    if library is None:
        where = extension.cache_directory()
        raise NotBuiltError(f"there is no compiled library for this version of ampatch, Python and torch in {where}")
    return Chosen(extension.load_calls(library), f"C++, the compiled library {library.path}")


_selection = Selection(_VARIABLE, CHOICES, "plain Python", _load, "Patched functions are called by %s.")


#: "to": casts tensors to a dtype. "for_models": the same, but outside of regions only in calls whose arguments belong
#: to a model. "via_dtype": as "to", but if the first tensor is half, passes `dtype=` to the function instead.
#: "promote": casts tensors to the widest dtype among them. "beside_half": if one of them is half, casts the others to
#: its dtype; if both half types occur, to `PlainCast.dtype`. "normalise": leaves calls without half weights as they
#: are, and hands all others to Python. "unmixed": leaves calls without half beside float32 as they are, and hands all
#: others to Python.
Kind = Literal["to", "for_models", "via_dtype", "promote", "beside_half", "normalise", "unmixed"]


@dataclass(frozen=True, slots=True)
class PlainCast:
    """How a patched function casts ordinary arguments.

    Attributes:
        kind: kind of cast.
        dtype: dtype to cast to; None for "promote".
        positional: largest number of positional arguments that cannot include ``dtype`` or ``out``.
        product: for linear layers that may become one node, how weight gradients are computed; None for all others.
        for_half: True to cast only in the state `ampatch.switch.IN_HALF`.
    """

    kind: Kind
    dtype: torch.dtype | None
    positional: int = sys.maxsize
    product: str | None = None
    for_half: bool = False


def select(choice: str | None = None) -> None:
    """Chooses what runs the calls of patched functions in sessions that begin from now on.

    Args:
        choice: "compiled", "python", or "auto", which uses the compiled library if there is one; None for the value of
            the environment variable AMPATCH_CALLS, "auto" by default.

    Raises:
        OptionError: the choice has another value.
        KernelError: "compiled" was chosen, and no compiled library can be loaded.
    """
    _selection.select(choice)
    compiled.cache_clear()


def prepare() -> None:
    """Chooses now instead of at first use, so that an impossible choice raises before amp changes anything.

    Raises:
        OptionError: AMPATCH_CALLS has an invalid value.
        KernelError: AMPATCH_CALLS asks for a compiled library, and none can be loaded.
    """
    _selection.current()


def in_use() -> str:
    """Returns a readable sentence that says what runs the calls of patched functions here, and why."""
    return _selection.current().why


@functools.cache  # a cached call creates no Python frame: every step makes several
def compiled() -> ModuleType | None:
    """Returns the C++ module, whose functions every step calls on parameters and gradients; None for plain Python."""
    return _selection.current().compiled


def new_store() -> Store:
    """Returns an empty `Store` of the implementation in use."""
    module = compiled()
    return Store() if module is None else module.Store()


def new_cache_state() -> CacheState:
    """Returns a new `CacheState` of the implementation in use."""
    module = compiled()
    return CacheState() if module is None else module.CacheState()


class Accelerator:
    """Replaces wrappers by functions whose calls C++ runs, if C++ is in use.

    Args:
        state: state of the session's weight cache.
        cast: `WeightCache.cast`, which the C++ calls in rare cases.
        switch: switch of the session.
        device_types: types of the devices whose tensors are cast.
    """

    def __init__(
        self,
        state: CacheState,
        cast: Callable[[Tensor, torch.dtype], Tensor],
        switch: Switch,
        device_types: Iterable[str],
    ) -> None:
        # Depends on the type of the state, so that no session uses two implementations.
        self._module = None if type(state) is CacheState else _selection.current().compiled
        switches.run_in(self._module)
        if self._module is not None:
            self._caster = self._module.Caster(state, switch, cast, is_current_stream_capturing)
        self.set_device_types(device_types)

    def set_device_types(self, device_types: Iterable[str]) -> None:
        """Casts only tensors on devices of these types from now on."""
        if self._module is not None:
            self._caster.set_device_types(tuple(device_types))

    def class_of(self, wrapper: type[_W]) -> type[_W]:
        """Returns the class of wrappers whose calls C++ runs, if C++ is in use.

        The C++ calls the class's own ``__call__`` in rare cases, and torch.compile traces that.
        """
        return wrapper.derived(*([] if self._module is None else [self._module.Call]))

    def accelerate(self, wrapper: FunctionWrapper, plain_cast: PlainCast, reason: str) -> None:
        """Makes calls of a wrapper run in C++, if C++ is in use.

        Args:
            wrapper: instance of a class that `class_of` has returned.
            plain_cast: how the wrapper casts ordinary arguments.
            reason: note for errors that a cast may have caused.
        """
        if self._module is not None:
            how = (plain_cast.kind, plain_cast.dtype, plain_cast.positional)
            explain = functools.partial(cast_errors.add_note, reason)
            further = (plain_cast.product, plain_cast.for_half)
            in_python: Any = type(wrapper).__call__
            self._module.accelerate(wrapper, in_python, self._caster, wrapper.original, *how, explain, *further)
