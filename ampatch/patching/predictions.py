"""Predicts what amp would do to the arguments of a call, without making the call or a cast.

The dtypes come from the adapters themselves, which get empty tensors in place of casts. Owns the sentences that say why
an argument stays unchanged. Must never call the function, cast a tensor, or touch the cache of a session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule, Treatment, typed_conditions
from ampatch.cast_lists.signatures import argument_reader, first_argument_reader, parameter_names
from ampatch.cast_lists.spellings import is_in_place
from ampatch.casting.nested import CASTABLE, Adapt, tensors_in, tensors_of_call
from ampatch.errors import BannedFunctionError
from ampatch.formats import Format
from ampatch.half_types import HALF_DTYPES, HALVES
from ampatch.opt_levels import dtype_name
from ampatch.patching.adapters import Adapters, Function, InHalf, lacks_half_products
from ampatch.patching.emulation import Casts
from ampatch.patching.function_patches import Registration
from ampatch.patching.wrappers import adapted_for_override, is_overridden_by_others


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor among the arguments of a call.

    Attributes:
        name: name of the argument, with its place in nested arguments: "weight", "tensors[0]".
        before: dtype that the caller passes.
        after: dtype that the function gets.
        why: reason why the dtype does not change; None if it does.
    """

    name: str
    before: torch.dtype
    after: torch.dtype
    why: str | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a call would do to its arguments.

    Attributes:
        arguments: its tensors, in order.
        passes_dtype: dtype that is passed to the function as ``dtype=`` instead of a cast; None if there is none.
        error: text of the error that the call would raise; None if it would run.
    """

    arguments: tuple[Argument, ...]
    passes_dtype: torch.dtype | None = None
    error: str | None = None


class _Stand(Casts):
    """Gives an empty tensor of the requested dtype in place of a cast."""

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - the interface of a cache
        return _EMPTY[dtype]

    def round(self, tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - as above
        """Gives an empty tensor of the requested dtype in place of a rounded one."""
        return _EMPTY[dtype]


_EMPTY = {dtype: torch.empty(0, dtype=dtype, device="meta") for dtype in (*CASTABLE, torch.float64)}


def unchanged(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Prediction:
    """Returns the prediction for a call whose arguments all stay unchanged for the same reason."""
    return Prediction(
        tuple(Argument(name, tensor.dtype, tensor.dtype, why) for name, tensor in _named(function, args, kwargs))
    )


class Predictor:
    """Predicts calls for one half dtype.

    Args:
        half_dtype: type that whitelisted functions compute in.
        device_types: device types whose tensors are cast.
        allow_banned: True if banned functions run in float32 instead of raising.
        for_half_models: True at levels with half weights, where most functions cast only beside a half argument.
    """

    def __init__(
        self,
        half_dtype: torch.dtype,
        device_types: Set[str],
        allow_banned: bool = False,
        for_half_models: bool = False,
    ) -> None:
        self._adapters = Adapters(
            half_dtype, _Stand(), device_types, allow_banned=allow_banned, hears_regions=not for_half_models
        )

    def by_rule(self, rule: Rule, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prediction:
        """Predicts a call of a listed function.

        Args:
            rule: rule of the function.
            function: the function, without amp.
            args: arguments by position.
            kwargs: arguments by keyword.
        """
        unmet = _unmet(rule, function, args, kwargs)
        call = _Call(self._adapters, function, args, kwargs, rule.path.name, rule.treatment, unmet)
        return call.predicted(self._adapters.for_rule(rule, function).adapt)

    def beside_half(
        self, path: Path, how: InHalf, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Prediction:
        """Predicts a call of a function whose arguments get one type in models with half weights."""
        has_half = any(tensor.dtype in HALVES for tensor in tensors_of_call(args, kwargs))
        treatment = Treatment.PROMOTE if how is InHalf.PROMOTE else Treatment.WHITELIST
        unmet = None if has_half else "no argument is half"
        call = _Call(self._adapters, function, args, kwargs, path.name, treatment, unmet, "torch takes it beside half")
        return call.predicted(self._adapters.in_half(how, path, function).adapt)

    def by_registration(
        self, known: Registration, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Prediction:
        """Predicts a call of a registered function."""
        call = _Call(self._adapters, function, args, kwargs, known.path.name, known.treatment)
        return call.predicted(self._adapters.for_registration(known.rule, known.dtype, function).adapt)

    def by_decoration(self, kind: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prediction:
        """Predicts a call of a decorated function; ``kind`` is the name of a list or of a half dtype."""
        treatment = Treatment.WHITELIST if kind in HALF_DTYPES else Treatment(kind)
        return _Call(self._adapters, function, args, kwargs, None, treatment).predicted(self._adapters.by_kind()[kind])


@dataclass(frozen=True, slots=True)
class _Call:
    """A call.

    Attributes:
        name: the function's name; None for a decorated function.
        unmet: the condition of the rule that the call does not meet, as a sentence; None if it meets all.
        otherwise: what is said of an argument that stays as it is for no other reason.
    """

    adapters: Adapters
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None
    treatment: Treatment
    unmet: str | None = None
    otherwise: str = "the result may be a view of it"

    def predicted(self, adapt: Adapt) -> Prediction:
        """Runs an adapter, and says why tensors stay unchanged."""
        args, kwargs, is_foreign = self.args, self.kwargs, False
        try:
            if self.name is not None and has_torch_function((*args, *kwargs.values())):
                adapted = adapted_for_override(adapt, args, kwargs)
                is_foreign = is_overridden_by_others(args, kwargs)
            else:
                adapted = adapt(args, kwargs)
        except BannedFunctionError as error:
            return replace(unchanged(self.function, args, kwargs, "the call raises"), error=str(error))
        after = tensors_of_call(*adapted)
        told = adapted[1].get("dtype")
        passed = None if told is None or told is kwargs.get("dtype") else told

        def reason(tensor: Tensor) -> str:
            reasons = self._reasons(tensor, is_foreign, passed)
            return next(filter(None, reasons), self.otherwise)

        arguments = tuple(
            Argument(label, tensor.dtype, new.dtype, None if new is not tensor else reason(tensor))
            for (label, tensor), new in zip(_named(self.function, args, kwargs), after, strict=True)
        )
        return Prediction(arguments, passed if self.explicit_dtype() is None else None)

    def _reasons(self, tensor: Tensor, is_foreign: bool, passed: torch.dtype | None) -> Iterator[str | None]:
        """Yields reasons, in the order in which the adapters check them, and None for those that do not hold."""
        yield self.unmet
        if is_foreign:
            yield "an argument that is no tensor overrides torch's functions"
        if self.written() is tensor:
            yield "the call writes to it, so it keeps its type"
        if any(tensor is each for each in self.out()):
            yield "out= is never cast; it decides the type"
        if tensor.dtype not in CASTABLE:
            yield f"{dtype_name(tensor.dtype)} is never cast"
        if not self.is_cast_on(tensor.device):
            yield f"it is on {tensor.device.type!r}; amp casts on {' and '.join(sorted(self.adapters.device_types))}"
        dtype = self.explicit_dtype()
        if isinstance(dtype, torch.dtype):
            yield f"the call's own dtype={dtype_name(dtype)} is obeyed"
        if passed is not None:
            yield f"dtype={dtype_name(passed)} is passed instead: the kernel casts"
        yield _by_target(self, tensor)
        yield _by_treatment(self, tensor)

    def is_cast_on(self, device: torch.device) -> bool:
        """Returns True if tensors on a device are cast."""
        return device.type in self.adapters.device_types

    @property
    def is_banned(self) -> bool:
        """True if the call raises for half tensors, rather than run in float32."""
        return self.treatment is Treatment.BANNED and not self.adapters.allow_banned

    def explicit_dtype(self) -> object:
        """Returns the value that the caller passes for ``dtype``; None if there is none."""
        if self.written() is not None or self.is_banned:
            return None
        by_position = (value for value in self.args if isinstance(value, torch.dtype))
        return _read(self.function, "dtype", self.args, self.kwargs) or next(by_position, None)

    def out(self) -> list[Tensor]:
        """Returns the tensors in ``out=``."""
        return list(tensors_in(_read(self.function, "out", self.args, self.kwargs)))

    def written(self) -> Tensor | None:
        """Returns the tensor that an in-place call writes to; None if the call is not in-place."""
        if self.name is None:
            return None  # amp knows nothing about a decorated function
        if not is_in_place(self.name) and not _read(self.function, "inplace", self.args, self.kwargs):
            return None
        reader = first_argument_reader(self.function)
        first = self.args[0] if self.args else None if reader is None else reader(self.args, self.kwargs)
        return first if isinstance(first, Tensor) else None


def _by_target(call: _Call, tensor: Tensor) -> str | None:
    target = call.written() if call.written() is not None else next(iter(call.out()), None)
    if target is None:
        return None
    return f"the tensor written to is {dtype_name(target.dtype)}{' too' * (target.dtype is tensor.dtype)}"


def _by_treatment(call: _Call, tensor: Tensor) -> str | None:
    given = tensors_of_call(call.args, call.kwargs)
    if call.treatment is Treatment.PROMOTE:
        dtypes = {each.dtype for each in given if call.is_cast_on(each.device)} & _EMPTY.keys()
        widest = f"{dtype_name(tensor.dtype)} is the widest type"
        return "all that could be cast has one type" if len(dtypes) < 2 else widest
    if call.is_banned:
        return "the ban is for half tensors only"
    is_half = call.treatment is Treatment.WHITELIST
    if is_half and any(map(lacks_half_products, given)):
        return "torch has no half kernel for products with this sparse tensor"
    return f"it is {dtype_name(tensor.dtype)} already" if is_half is (tensor.dtype in HALVES) else None


def _unmet(rule: Rule, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns the condition of a rule that a call does not meet, as a sentence; None if it meets all."""
    for name, values in rule.when:
        value = _read(function, name, args, kwargs)
        if isinstance(value, Tensor) or getattr(value, "ndim", False) or value not in values:
            found = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            return f"{name} is {found}; the rule is for {typed_conditions(((name, values),))}"
    return None


def _read(function: Function, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    reader = argument_reader(function, name)
    return kwargs.get(name) if reader is None else reader(args, kwargs)


def _named(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Returns the tensors in the arguments of a call with the names of their places, in the order of `tensors_in`."""
    names: dict[int, str] = {}
    for name in parameter_names(function):
        reader = argument_reader(function, name)
        if reader is not None and reader.position is not None:
            names.setdefault(reader.position, name)
    given = [(names.get(index, f"argument {index + 1}"), value) for index, value in enumerate(args)]
    return [found for name, value in (*given, *kwargs.items()) for found in _within(name, value)]


def _within(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _within(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _within(f"{name}[{key!r}]", item)
