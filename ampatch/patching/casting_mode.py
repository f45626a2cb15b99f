"""Applies the cast lists without patches: through a `TorchFunctionMode`, to the calls of one thread.

torch calls the active mode instead of each of its functions. Owns how each function's arguments are cast under the
mode, and which object casts weights there. Must never change a function of torch: other threads, and this
thread without the mode, see plain torch.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, get_overridable_functions

from ampatch.cast_lists import spellings
from ampatch.cast_lists.paths import find_or
from ampatch.cast_lists.rules import Rule, Treatment, place
from ampatch.casting import cast_observers
from ampatch.casting.nested import Adapt, Arguments, TensorCast, cast_tensors
from ampatch.compilers import constant_while_traced, traced_within_others
from ampatch.function_wrapper import unwrapped
from ampatch.patching.adapters import Adapters, Function
from ampatch.patching.emulation import Casts
from ampatch.patching.wrappers import explain
from ampatch.switch import KINDS
from ampatch.torch_private.modes import len_dispatch_stack
from ampatch.torch_private.tensors import HOMES_OF_METHODS
from ampatch.tracing import is_below_operators


class Weights(Protocol):
    """An object that keeps the weights used under a mode."""

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a tensor, possibly a weight, cast to another floating type."""

    def full(self, weight: Tensor) -> Tensor:
        """Returns a weight in the form for functions that do not compute in half."""

    def dtype_of(self, weight: Tensor) -> torch.dtype:
        """Returns the type that the model's code sees for a weight."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """How calls of one function are handled.

    Attributes:
        adapt: function that returns the arguments that the rule asks for; None without a rule.
        always: treatment of every call; None without a rule, or if the treatment depends on the arguments.
        computes_in_half: True if the function gets half weights as they are, unless the call asks for another type.
        inside: for a function written in Python, a copy that does the same, but whose inner calls the mode casts too;
            None if the copy is not needed.
        reason: note for errors; names the function and the list.
    """

    adapt: Adapt | None = None
    always: Treatment | None = None
    computes_in_half: bool = False
    inside: Function | None = None
    reason: str = ""

    def changed_by(self, names: Mapping[Treatment, Set[str]]) -> Set[str]:
        """Returns the names of listed functions that might cast tensors of the type that this function computes in.

        Promotion casts nothing if all tensors have one type. A list casts no tensors that have its type already.

        Args:
            names: names of functions, by the list that they are in.
        """
        if self is _METADATA:
            return frozenset()
        unchanged = set() if self.always in (None, Treatment.BANNED) else {self.always, Treatment.PROMOTE}
        return frozenset().union(*(found for treatment, found in names.items() if treatment not in unchanged))


class CastRules:
    """The rules of cast lists for one half type, by function.

    Args:
        half_dtype: type that whitelisted functions compute in.
        rules: rules for this half type.
        registered: rules of functions that the user registered, each with its own half type or None. They take
            precedence.

    Attributes:
        half_dtype: the argument.
        adapters: adapters of decorated functions, by kind.
        outside_torch: rules of functions that do not belong to torch, so that torch does not report them to a mode.
        reported_as_other: rules of methods that torch reports to a mode as another function, which has another
            treatment in the lists; each maps to the name of that function.
    """

    def __init__(
        self, half_dtype: torch.dtype, rules: Iterable[Rule], registered: Iterable[tuple[Rule, torch.dtype | None]] = ()
    ) -> None:
        self.half_dtype = half_dtype
        self._rules, self._registered = tuple(rules), tuple(registered)
        adapters = Adapters(half_dtype, _CASTS_OF_THE_BLOCK, {*KINDS, "meta"}, hears_regions=False)
        self.adapters = adapters.by_kind()
        self.outside_torch: list[Rule] = []
        self.entries: dict[Any, _Entry] = {
            **dict.fromkeys(METADATA, _METADATA),
            Tensor.dtype.__get__: _TYPE,  # type: ignore[attr-defined]
        }
        names: dict[Treatment, set[str]] = {treatment: set() for treatment in Treatment}
        for rule in (*self._rules, *(rule for rule, _ in self._registered)):
            names[rule.treatment].add(rule.path.name)
        found: list[tuple[Rule, Any]] = []
        listings = [*((rule, None, False) for rule in self._rules), *((*each, True) for each in self._registered)]
        for rule, dtype, is_registered in listings:
            function = self._find(rule)
            if function is None:
                continue
            found.append((rule, function))
            if is_registered:
                adapter = adapters.for_registration(rule, dtype, function)
                reason = f"ampatch: {rule.path} is registered for the {rule.treatment.value}."
            else:
                adapter = adapters.for_rule(rule, function)
                reason = f"ampatch: {rule.path} is {place(rule)} ({rule.source})."
            always = rule.treatment if dtype in (None, half_dtype) and not rule.when else None
            in_half = always is Treatment.WHITELIST and not spellings.is_in_place(rule.path.name)
            self.entries[function] = _Entry(adapter.adapt, always, in_half, None, reason)
        listed = {function: rule.treatment for rule, function in found}
        reported = reported_functions()
        self.reported_as_other = [
            (rule, reported[function].__name__)
            for rule, function in found
            if reported.get(function, function) is not function and listed.get(reported[function]) is not rule.treatment
        ]
        for function in _functions_in_python():
            entry = self.entries.get(function, _UNLISTED)
            if not entry.changed_by(names).isdisjoint(_names_called_by(function)):
                self.entries[function] = replace(entry, inside=_without_override_check(function))
        self.by_name = {
            (function.__name__, getattr(function, "__module__", None)): entry
            for function, entry in self.entries.items()
            if function.__name__ != "__get__"
        }
        self.by_operator = {
            name: tuple(self.entries.get(reported.get(method), _UNLISTED) for method in methods)
            for name, *methods in _operators()
        }

    def _find(self, rule: Rule) -> Any:
        """Returns the function of a rule; None if it does not exist, or does not belong to torch."""
        function = find_or(rule.path)  # an optional one may be missing from this torch
        if function is None or rule.path.namespace.partition(".")[0] == "torch":
            return function
        self.outside_torch.append(rule)
        return None

    def computes_in_half(self, function: Function) -> bool:
        """Returns True if a function's floating-point arguments are all cast to half, whatever its other arguments."""
        entry = self.entries.get(function)
        return entry is not None and entry.computes_in_half

    def __reduce__(self) -> Any:
        return CastRules, (self.half_dtype, self._rules, self._registered)

    def __deepcopy__(self, memo: dict[int, Any]) -> CastRules:
        return self  # nothing ever changes it


@constant_while_traced
def _depth_of_blocks(if_off_on: tuple[str, ...] = ()) -> int:
    """Returns how many `torch.autocast` blocks this thread is in; 0 if autocast is on for one of the device types.

    Args:
        if_off_on: device types for which autocast must be off.
    """
    if any(map(torch.is_autocast_enabled, if_off_on)):
        return 0
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class CastingMode(TorchFunctionMode):
    """Casts the arguments of torch's functions while the mode is active, and outside of ``autocast(enabled=False)``.

    Args:
        rules: rules that say how each function's arguments are cast.
        weights: object that keeps the weights, and activates the mode.
        is_traced: True if a tracer may have replaced weights by tensors of other classes.

    Attributes:
        rules: the argument.
        weights: the argument.
        off: number of nested regions without casts around the current code; the mode casts if this is 0.
    """

    def __init__(self, rules: CastRules, weights: Weights, is_traced: bool) -> None:
        super().__init__()
        self.rules = rules
        self.weights = weights
        self.off = 0
        self._is_traced = is_traced
        self._running: Function | None = None
        self._blocks = _depth_of_blocks()

    def _is_guarded(self) -> bool:
        """Returns True within `torch.autocast(enabled=False)` of the model's own code, which wants types unchanged."""
        return _depth_of_blocks(KINDS) > self._blocks

    def _in_force(self, entry: _Entry) -> _Entry:
        return _UNLISTED if entry is not _TYPE and self._is_guarded() else entry

    @traced_within_others
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if self.off:
            return function(*args, **kwargs)
        if is_dynamo_compiling():
            return self._traced(function, args, kwargs)
        entry = self.rules.entries.get(function, _UNLISTED)
        if entry is _METADATA or function is self._running or (len_dispatch_stack() and _is_traced_below()):
            return function(*args, **kwargs)
        if entry is _UNLISTED and not kwargs and not self._may_hold_weights(args):
            return function(*args)  # most calls end here
        entry = self._in_force(entry)
        observer = cast_observers.observer
        if observer is not None and entry is not _TYPE and not observer.is_calling(function):
            return observer.call(function, self._again(function, types), args, kwargs)
        if entry is _TYPE:
            return self.weights.dtype_of(args[0]) if self._may_be_weight(args[0]) else function(*args)
        adapted = None
        try:
            adapted = self._adapted(entry, args, kwargs)
            if entry.inside is None:
                return function(*adapted[0], **adapted[1])
            before, self._running = self._running, function
            try:
                with self:
                    return entry.inside(*adapted[0], **adapted[1])
            finally:
                self._running = before
        except Exception as error:
            if entry.adapt is not None:
                explain(error, entry.reason, (args, kwargs), adapted)
            raise

    def _again(self, function: Any, types: Any) -> Function:
        return lambda *args, **kwargs: self.__torch_function__(function, types, args, kwargs)

    def _traced(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call under torch.compile, where a Python function is not always the same object."""
        name, module = getattr(function, "__name__", ""), getattr(function, "__module__", None)
        entry = self.rules.by_name.get((name, module), _UNLISTED)
        if module == "_operator":  # strict torch.export reports operator methods of tensors in this way
            entry, reflected = self.rules.by_operator.get(name, (_UNLISTED, _UNLISTED))
            if not isinstance(args[0], Tensor):
                reflected = self._in_force(reflected)
                (right, left), kwargs = self._adapted(reflected, args[::-1], kwargs)
                if reflected.inside is None:
                    return function(left, right)
                with self:
                    return reflected.inside(right, left)
        if entry is _METADATA:
            return function(*args, **kwargs)
        entry = self._in_force(entry)
        args, kwargs = self._adapted(entry, args, kwargs)
        if module == HOMES_OF_METHODS[1] and name in _METHODS_IN_PYTHON:
            return getattr(args[0], name)(*args[1:], **kwargs)  # the compiler knows only the method
        if entry.inside is None:
            return function(*args, **kwargs)
        with self:
            return entry.inside(*args, **kwargs)

    def _adapted(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # An out= or dtype= may ask for another type than half.
        in_half = entry.computes_in_half and not (kwargs and ("out" in kwargs or "dtype" in kwargs))
        if not in_half:
            args, kwargs = self._with_full_weights(args, kwargs)
        if entry.adapt is not None:
            args, kwargs = entry.adapt(args, kwargs)
        if in_half and entry.inside is not None:
            # The mode does not recognise a view as a weight. So functions called inside get it in half, listed or not.
            args, kwargs = _applied(self._anonymous, args, kwargs)
        return args, kwargs

    def adapt_decorated(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the cast arguments of a decorated function; ``kind`` is a key of `CastRules.adapters`."""
        if self.off or self._is_guarded():
            return args, kwargs
        if kind != Treatment.WHITELIST.value:
            args, kwargs = self._with_full_weights(args, kwargs)
        return self.rules.adapters[kind](args, kwargs)

    def _with_full_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if kwargs or self._may_hold_weights(args):
            return _applied(self._full, args, kwargs)
        return args, kwargs

    def _may_hold_weights(self, args: tuple[Any, ...]) -> bool:
        return self._is_traced or not _MAY_HOLD_WEIGHTS.isdisjoint(map(type, args))

    def _full(self, tensor: Tensor) -> Tensor:
        return self.weights.full(tensor) if self._may_be_weight(tensor) else tensor

    def _anonymous(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor) if self._may_be_weight(tensor) else tensor

    def _may_be_weight(self, tensor: object) -> bool:
        return type(tensor) is Parameter or self._is_traced


def _applied(cast: TensorCast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns arguments with ``cast`` applied to every tensor in them."""
    return (
        tuple([cast_tensors(value, cast) for value in args]),
        {name: cast_tensors(value, cast) for name, value in kwargs.items()},
    )


class _Thread(threading.local):
    def __init__(self) -> None:
        self.mode: CastingMode | None = None  # set in each thread from the start, since a compiler reads it


thread = _Thread()


class _CastsOfTheBlock(Casts):
    """Casts through the weights of the mode that is active in this thread."""

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        mode = thread.mode
        if is_dynamo_compiling() or mode is None:
            return tensor.to(dtype)
        return mode.weights.cast(tensor, dtype)


_CASTS_OF_THE_BLOCK = _CastsOfTheBlock()
_UNLISTED = _Entry()
# For functions that read neither a tensor's values nor its type (such as its shape), and for `Tensor.dtype`.
_METADATA = _Entry(reason="describes")
_TYPE = _Entry(reason="tells the type")
_MAY_HOLD_WEIGHTS = frozenset({Parameter, list, tuple, dict})

_PROPERTIES = (
    *("device", "shape", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "_version"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xpu"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "get_device", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "requires_grad_"),
)
#: Functions of tensors that read neither values nor types.
METADATA = frozenset(
    {*(getattr(Tensor, name).__get__ for name in _PROPERTIES), *(getattr(Tensor, name) for name in _METHODS)}
)
_METHODS_IN_PYTHON = frozenset(
    name
    for name, method in vars(Tensor).items()
    if isinstance(method, types.FunctionType) and not name.startswith("__")
)


_NO_OPERATORS = ("call", "delitem", "index", "setitem")

# If the left operand is a number, Python calls these methods of the right one: `3.0 < x` is `x.__gt__(3.0)`.
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _operators() -> Iterator[tuple[str, Any, Any]]:
    """Yields the name of each Python operator, and its methods for a tensor on the left and on the right (or None)."""
    for name, function in vars(operator).items():
        bare = name.strip("_")
        of_both = bare[1:] if bare.startswith("i") and hasattr(operator, f"__{bare[1:]}__") else bare
        left = getattr(Tensor, f"__{bare}__", None) or getattr(Tensor, f"__{of_both}__", None)
        if getattr(function, "__module__", None) == "_operator" and left is not None and bare not in _NO_OPERATORS:
            right = getattr(Tensor, f"__{_MIRRORED.get(bare, f'r{of_both}')}__", None)
            # A session may be live, and have patched them.
            yield function.__name__, unwrapped(left), None if right is None else unwrapped(right)


@functools.cache
def reported_functions() -> dict[Any, Any]:
    """Returns the function that torch reports to a mode, by operator method: ``Tensor.add`` for ``x + y``."""
    reported: dict[Any, Any] = {}

    class Listening(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reported.setdefault(method, unwrapped(function))
            return args[0]

    tensor = torch.ones((), device="cpu")
    for method in {method for _, *methods in _operators() for method in methods if method is not None}:
        for args in ((tensor, tensor), (tensor,)):
            with suppress(TypeError), Listening():
                method(*args)
    return reported


def _is_traced_below() -> bool:
    """Returns True if the caller is not user code: it implements an operator's kernel, and a tracer runs it."""
    frame: Any = sys._getframe(2)
    if frame.f_globals.get("__name__") == "torch.overrides":  # a Python function has called the mode through it
        frame = frame.f_back.f_back
    return is_below_operators(frame)


@functools.cache
def _names_called_by(function: types.FunctionType) -> frozenset[str]:
    """Returns the names in a function's code, and in the code of the functions of its module that it calls."""
    names: set[str] = set()
    followed, waiting = {function}, [function]
    while waiting:
        home = waiting.pop()
        here = {name for code in spellings.codes(home.__code__) for name in code.co_names}
        held = [cell.cell_contents for cell in home.__closure__ or ()]
        for value in [*map(home.__globals__.get, here - names), *held]:
            is_near = isinstance(value, types.FunctionType) and value.__globals__ is home.__globals__
            if is_near and value not in followed:
                followed.add(value)
                waiting.append(value)
        names |= here
    return frozenset(names)


@functools.cache
def _functions_in_python() -> tuple[types.FunctionType, ...]:
    """Returns torch's overridable functions that are written in Python."""
    listed = {unwrapped(function) for functions in get_overridable_functions().values() for function in functions}
    return tuple(function for function in listed if isinstance(function, types.FunctionType))


def _asks_nobody(*_: object) -> bool:
    return False


_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def _without_override_check(function: types.FunctionType) -> types.FunctionType:
    """Returns a function with the same code that does not check for overrides itself; functions that it calls do.

    torch reports a Python function to a mode once. It does not report the functions that this one calls, because the
    mode is off then. If the mode stays on while the code runs, torch reports them too. But the function would also
    report itself, endlessly.
    """
    # If a function holds itself in its closure, it needs itself only as an argument for overrides.
    cells = function.__closure__ or ()
    closure = [cell if cell.cell_contents is function else _cell_without_override_check(cell) for cell in cells]
    seen_through = types.FunctionType(
        function.__code__,
        _globals_without_override_check(function),
        function.__name__,
        function.__defaults__,
        tuple(closure),
    )
    seen_through.__kwdefaults__ = function.__kwdefaults__
    return seen_through


def _cell_without_override_check(cell: types.CellType) -> types.CellType:
    held = cell.cell_contents
    if isinstance(held, types.FunctionType) and any(name in held.__code__.co_names for name in _ASKING):
        return types.CellType(_without_override_check(held))
    return cell


_globals_by_module: dict[int, dict[str, Any]] = {}


def _globals_without_override_check(function: types.FunctionType) -> dict[str, Any]:
    key = id(function.__globals__)
    if key not in _globals_by_module:
        # A session may be live, and have patched them.
        originals = {name: unwrapped(value) for name, value in function.__globals__.items()}
        _globals_by_module[key] = {**originals, **dict.fromkeys(_ASKING, _asks_nobody)}
    return _globals_by_module[key]
