"""Makes *adapters*: functions that turn the arguments of a call into the arguments that a rule asks for.

An adapter depends on the arguments, the thread's region and grad mode, and the cache of casts. Must not know patches,
switches or sessions.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Formats, Rule, Treatment
from ampatch.cast_lists.signatures import ArgumentReader, argument_reader, first_argument_reader, may_have
from ampatch.cast_lists.spellings import IN_PLACE_OPERATORS, is_in_place
from ampatch.casting.nested import (
    CASTABLE,
    PLAIN,
    Adapt,
    Arguments,
    TensorCast,
    cast_tensors,
    tensors_in,
    tensors_of_call,
)
from ampatch.errors import BannedFunctionError, CastListError, Fault
from ampatch.half_types import HALF_DTYPES, HALVES
from ampatch.native.calls import PlainCast
from ampatch.patching import recurrent_weights
from ampatch.patching.cast_labels import named
from ampatch.patching.emulation import Casts, Emulation
from ampatch.patching.fused_linear import LinearCalls
from ampatch.patching.scaled_products import ScaledProducts
from ampatch.switch import dtype_in_region, is_in_region, is_set_by_autocast
from ampatch.torch_private.operators import LINEAR

Function = Callable[..., Any]
# Given a call's arguments, returns the half type to cast them to; None if they are not cast.
_Chosen = Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype | None]

# The layouts of sparse tensors whose products have half kernels on CUDA, from cuSPARSE; and all sparse layouts.
_WITH_HALF_KERNELS = {torch.sparse_csr, torch.sparse_csc}
_SPARSE = {*_WITH_HALF_KERNELS, torch.sparse_coo, torch.sparse_bsr, torch.sparse_bsc}
# The listed functions that return a view of their argument, each with the calls in which it does. They compute nothing.
_VIEWS: dict[Function, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    torch.einsum: lambda args, _: len(tensors_of_call(args, {})) == 1,
    Tensor.sum_to_size: lambda args, kwargs: _has_size(*args, *kwargs.values()),
}
# The nodes between an embedding and the sum with a table of positions: dropout, scaling, other embeddings, views.
_OF_STREAMS = ("Add", "Div", "Mul", "NativeDropout", "Permute", "Slice", "Transpose", "Unsafe", "View")
_MOST_NODES = 6


class InHalf(enum.Enum):
    """How arguments get one type, in models with half weights, for functions of torch that demand it."""

    BESIDE = "beside half"  # to the type of a half argument
    PROMOTE = "promote"  # to the widest type
    NORMALISE = "normalise"  # see `_MixedArguments.normalising`
    ATTENTION = "attention"  # beside half, but a mask keeps finite values finite
    ADD_TABLE = "add a table"  # see `_MixedArguments.adding_table`


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one function under its rule.

    Attributes:
        adapt: function that turns the arguments of a call into the arguments that the rule asks for.
        plain_cast: description of the cast, from which the C++ code casts ordinary arguments itself; None if ``adapt``
            depends on more than the arguments' types.
        call: function that makes the call in place of the original, given the arguments before and after ``adapt``;
            None if the original makes it, with the arguments after ``adapt``. Compiled code calls the original.
        finish: function that returns the call's result, given the arguments before and after ``adapt`` and what the
            call has returned; None if the result stays as it is.
        instead: function that makes the call in place of everything else, given its arguments; returns None if it
            cannot make this call. None if the call is always made with the arguments after ``adapt``.
        may_write: True if the function may write to its arguments, so that its writes are copied to the caller's.
        choose: function that returns the adapter of a call; None if this one is that of every call.
    """

    adapt: Adapt
    plain_cast: PlainCast | None = None
    call: Callable[[Arguments, Arguments], Any] | None = None
    finish: Callable[[Arguments, Arguments, Any], Any] | None = None
    instead: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    may_write: bool = False
    choose: Callable[[tuple[Any, ...], dict[str, Any]], Adapter] | None = None

    @classmethod
    def choosing(cls, choose: Callable[[tuple[Any, ...], dict[str, Any]], Adapter], *among: Adapter) -> Adapter:
        """Returns an adapter that chooses another one for each call, by the call's arguments or the thread's state.

        Args:
            choose: returns the adapter of a call.
            among: those that it may return, if one of them has a `call`: a session asks for that before any call.
        """
        call = next((each.call for each in among if each.call is not None), None)
        return cls(lambda args, kwargs: choose(args, kwargs).adapt(args, kwargs), call=call, choose=choose)


#: For functions without a rule.
UNCHANGED = Adapter(lambda args, kwargs: (args, kwargs))


def _has_size(tensor: Tensor, *size: Any) -> bool:
    return [*tensor.shape] == [*(size[0] if isinstance(size[0], (list, tuple)) else size)]


def lacks_half_products(tensor: Tensor) -> bool:
    """Returns True for a sparse tensor if torch has no half kernels for products with it, or only for a few of them."""
    layout = tensor.layout
    return layout in _SPARSE and not (layout in _WITH_HALF_KERNELS and tensor.device.type == "cuda")


def _instead_of_in_place(name: str) -> str:
    """Returns advice for the user: what to write instead of an in-place call."""
    if name == "__setitem__":
        return "Call it on tensor.float()."
    form = name.removeprefix("__i").removesuffix("__") if name in IN_PLACE_OPERATORS else name[:-1]
    other = f"Use the out-of-place form ({form})" if is_in_place(name) else "Pass inplace=False"
    return f"{other}, or call it on tensor.float()."


@dataclass(eq=False)
class TensorCasts:
    """Casts single tensors: decides by its device, and by the region that the thread is in, if a tensor is cast.

    Args:
        half_dtype: half type of the session.
        cache: object that casts tensors, and keeps the casts of weights.
        device_types: device types whose tensors are cast (``"cpu"``, ``"cuda"``); the set may grow.
        hears_regions: True to cast nothing in regions in which autocast is off.
    """

    half_dtype: torch.dtype
    cache: Casts
    device_types: Set[str]
    hears_regions: bool = True

    def __post_init__(self) -> None:
        # Devices of these types, because a set lookup is faster than reading a device's type. All existing devices are
        # added now, because torch.compile would recompile after the set has grown.
        self._devices = {
            torch.device(kind, index)
            for kind in self.device_types
            for index in (None, *range(torch.accelerator.device_count() if kind != "cpu" else 0))
        }
        # float64 is never cast, but promotion may end in it.
        self._casts = {dtype: self._tensor_cast(dtype) for dtype in (*CASTABLE, torch.float64)}

    def _tensor_cast(self, dtype: torch.dtype) -> TensorCast:
        cache, is_cast_here = self.cache, self._is_cast_here

        def cast(tensor: Tensor) -> Tensor:
            found = tensor.dtype
            if found is dtype or found not in CASTABLE or not is_cast_here(tensor):
                return tensor
            return cache.cast(tensor, dtype)

        return cast

    def _cast_in_region(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in CASTABLE or not self._is_cast_on(tensor.device):
            return tensor
        dtype = self._half_dtype_for(tensor)
        return tensor if dtype is None or tensor.dtype is dtype else self.cache.cast(tensor, dtype)

    def _half_dtype_for(self, tensor: Tensor) -> torch.dtype | None:
        """Returns the half type to cast a tensor to here; None if it is not cast."""
        dtype = dtype_in_region(tensor.device.type)
        return self.half_dtype if dtype is None and not (self.hears_regions and is_in_region()) else dtype

    def _is_cast_here(self, tensor: Tensor) -> bool:
        device = tensor.device
        return self._is_cast_on(device) and (
            not self.hears_regions or not is_in_region() or dtype_in_region(device.type) is not None
        )

    def _is_cast_on(self, device: torch.device) -> bool:
        if device in self._devices:
            return True
        is_new = device.type in self.device_types
        if is_new:
            self._devices.add(device)
        return is_new

    def _is_half(self, tensor: Tensor) -> bool:
        return tensor.dtype in HALVES and self._is_cast_here(tensor)


@dataclass(eq=False)
class _MixedArguments:
    """What happens to arguments of several types, in models with half weights: casts of calls, by `InHalf`.

    Args:
        half_dtype: half type of the session.
        casts: casts of a tensor, by type.
        to: casts of all arguments, by type.
        tables: the tables of models; the list may grow.
    """

    half_dtype: torch.dtype
    casts: Mapping[torch.dtype, TensorCast]
    to: Mapping[torch.dtype, Adapt]
    tables: Sequence[weakref.ref[Tensor]]

    def beside_half(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Casts to the half type that an argument has; casts nothing if none has, or all have one type.

        If both half types occur, one argument comes from a part that computes in another type than the model. The
        arguments of a product with a sparse matrix are cast to float32 if torch has no half kernel for it.
        """
        found = tensors_of_call(args, kwargs)
        dtypes = [tensor.dtype for tensor in found if tensor.dtype in CASTABLE]
        halves = [dtype for dtype in dtypes if dtype in HALVES]
        if not halves or all(dtype is dtypes[0] for dtype in dtypes):
            return args, kwargs
        dtype = halves[0] if all(half is halves[0] for half in halves) else self.half_dtype
        if not is_compiling() and any(tensor.layout is not torch.strided for tensor in found):
            dtype = torch.float32 if any(map(lacks_half_products, found)) else dtype
        return self.to[dtype](args, kwargs)

    def attending(self, original: Function) -> Adapt:
        """Returns an adapter for attention, which casts beside half, and keeps the finite values of masks finite.

        Masks often hold float32's lowest number. In half it would be -inf, and a row of such numbers would become NaN.
        """
        found = [argument_reader(original, name) for name in ("attn_mask", "key_padding_mask")]
        readers = [reader for reader in found if reader is not None]

        def attending(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            cast = self.beside_half(args, kwargs)
            for reader in readers:
                mask: Any = reader(args, kwargs)
                made: Any = reader(*cast)
                if made is not mask and mask.dtype is torch.float32:
                    least = mask.clamp(min=torch.finfo(made.dtype).min).to(made.dtype)
                    cast = _with_argument(cast, made, torch.where(mask.isneginf(), made, least))
            return cast

        return attending

    def adding_table(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Casts a table of a model that is added to looked-up half activations, so that the sum is not float32."""
        if len(args) == 2 and all(isinstance(each, Tensor) for each in args):
            for half, other in (args, args[::-1]):
                is_mixed = half.dtype in HALVES and other.dtype is torch.float32
                # In compiled code `compilers.trace_additions` handles additions.
                if is_mixed and is_looked_up(half) and not is_compiling():
                    base = other if other._base is None else other._base
                    if any(each() is base for each in self.tables):
                        return _with_argument((args, kwargs), other, self.casts[half.dtype](other))
        return args, kwargs

    def normalising(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Casts the arguments of a normalisation by statistics, whose kernels take half inputs and float32 weights.

        With half weights the input is cast to their type. If the statistics are float32, the weights are cast to
        float32. The statistics themselves must not be cast, since the function updates them.
        """
        values = [*args, *kwargs.values()]
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor):
            return args, kwargs
        others = [each.dtype for each in values if isinstance(each, Tensor) and each is not given]
        half = next((dtype for dtype in others if dtype in HALVES), None)
        if half is None:
            return args, kwargs
        of_others = self.casts[half if all(dtype is half for dtype in others) else torch.float32]

        def cast(value: Any) -> Any:
            return (self.casts[half] if value is given else of_others)(value) if isinstance(value, Tensor) else value

        return tuple([cast(value) for value in args]), {name: cast(value) for name, value in kwargs.items()}


@dataclass(eq=False)
class Adapters(TensorCasts):
    """Makes adapters for one half dtype.

    Args:
        half_dtype: type that whitelisted functions compute in.
        cache: object that casts tensors, and keeps the casts of weights.
        device_types: device types whose tensors are cast (``"cpu"``, ``"cuda"``); the set may grow.
        allow_banned: True to run banned functions in float32 instead of raising.
        labelled: True if the cache labels casts with the function's name; then `Adapter.plain_cast` is always None.
        linear: object that makes calls of linear layers whose arguments were cast to half; None if torch makes them.
        hears_regions: True to cast nothing in regions in which autocast is off.
        for_models: True if rules of the whitelist cast in regions, and outside of regions only tensors of a model.

    Attributes:
        tables: the tables of models with half weights.
    """

    allow_banned: bool = False
    labelled: bool = False
    linear: LinearCalls | None = None
    for_models: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tables: list[weakref.ref[Tensor]] = []
        # Shared by all functions with the same treatment.
        self._to = {dtype: _casting(cast) for dtype, cast in self._casts.items()}
        self._mixed = _MixedArguments(self.half_dtype, self._casts, self._to, self.tables)
        self._half_of_all: _Chosen = lambda *_: self.half_dtype
        self._float32_of_all: _Chosen = lambda *_: torch.float32
        self._to_half = self._make_to_half(self._half_of_all)
        self._chosen = self._half_of_models if self.for_models else self._half_of_all
        self._to_half_listed = self._make_to_half(self._chosen) if self.for_models else self._to_half
        self._obeying_keywords: dict[Adapt, Adapt] = {}

    def for_rule(self, rule: Rule, original: Function) -> Adapter:
        """Returns the adapter of one function under its rule.

        Raises:
            CastListError: the rule has a condition on an argument that the function does not have.
        """
        if rule.formats is None:
            adapter = self._labelled(self.for_treatment(rule, original, is_listed=True), rule.path)
        else:
            adapter = self._in_formats(rule, rule.formats, original)
        if not rule.when:
            return adapter
        readers: list[tuple[ArgumentReader, tuple[object, ...]]] = []
        for argument, values in rule.when:
            reader = argument_reader(original, argument)
            if reader is None:  # the function's module was imported after the list was read
                raise CastListError([Fault(rule.source, f"{rule.path} has no argument {argument!r}.")])
            readers.append((reader, values))

        def applies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            for reader, values in readers:
                value = reader(args, kwargs)
                # Comparing a tensor or an array would compare its elements. It equals none of the rule's values.
                if isinstance(value, Tensor) or getattr(value, "ndim", False) or value not in values:
                    return False
            return True

        # With half weights, the arguments of other calls still need one type.
        is_half = rule.formats is not None and not self.hears_regions
        otherwise = self.in_half(InHalf.BESIDE, rule.path, original) if is_half else UNCHANGED
        return Adapter.choosing(lambda *given: adapter if applies(*given) else otherwise, adapter)

    def for_registration(self, rule: Rule, dtype: torch.dtype | None, original: Function) -> Adapter:
        """Returns the adapter of a registered function.

        Args:
            rule: what the user registered.
            dtype: half type to cast to instead of the session's, if given. In-place functions ignore it.
            original: the function.
        """
        path = rule.path
        if dtype is None or is_in_place(path.name):
            return self._labelled(self.for_treatment(rule, original), path)
        adapter = self._obeying(self._to[dtype], original, PlainCast("to", dtype))
        return self._labelled(self._unless_in_place(adapter, path, original, refuse_half=False), path)

    def _labelled(self, adapter: Adapter, path: Path) -> Adapter:
        """Returns an adapter that labels its casts if asked for; drops `plain_cast`, as C++ sets none."""
        return replace(adapter, adapt=named(adapter.adapt, str(path)), plain_cast=None) if self.labelled else adapter

    def for_treatment(self, rule: Rule, original: Function | None = None, is_listed: bool = False) -> Adapter:
        """Returns the adapter of a function under a rule without formats and conditions.

        A function that no list names always casts: the user has decorated or registered it.
        """
        path, treatment = rule.path, rule.treatment
        if treatment is Treatment.BANNED and not self.allow_banned:
            return Adapter(self._banned(path, rule.instead))
        if is_in_place(path.name):
            return Adapter(self._in_place(path, original, refuse_half=treatment is Treatment.BLACKLIST))
        if treatment is Treatment.WHITELIST:
            to_half = self._to_half_listed if is_listed else self._to_half
            plain_cast = PlainCast("to" if to_half is self._to_half else "for_models", self.half_dtype)
            adapter = self._obeying(to_half, original, plain_cast)
            if original is not None and recurrent_weights.is_recurrent(original):
                chosen = self._chosen if is_listed else self._half_of_all
                return Adapter(self._with_weights_together(adapter.adapt, original, chosen))
            if original is LINEAR and self.linear is not None:
                return Adapter(adapter.adapt, replace(plain_cast, product=self.linear.product), self.linear.call)
        elif treatment is Treatment.PROMOTE:
            adapter = self._obeying(self._to_widest, original, PlainCast("promote", None))
        elif rule.via_dtype:
            adapter = self._obeying(self._via_dtype, original, PlainCast("via_dtype", torch.float32))
        else:
            adapter = self._obeying(self._to[torch.float32], original, PlainCast("to", torch.float32))
        return self._unless_in_place(adapter, path, original, refuse_half=treatment is Treatment.BLACKLIST)

    def _in_formats(self, rule: Rule, formats: Formats, original: Function) -> Adapter:
        """Returns the adapter of a function that computes in a format: torch does, the device, or calls are emulated.

        Calls that are not for a format compute as without one.
        """
        chosen: _Chosen = self._chosen if self.hears_regions else _beside(self.half_dtype)
        # With half weights, only functions without half kernels compute in float32.
        if rule.treatment is Treatment.BLACKLIST and (self.hears_regions or rule.needs_float32):
            chosen = self._float32_of_all
        if self.hears_regions:
            otherwise = self._labelled(self.for_treatment(rule, original, is_listed=True), rule.path)
        else:
            otherwise, chosen = self.in_half(InHalf.BESIDE, rule.path, original), _unless_disabled(chosen)

        def for_format(adapter: Adapter) -> Adapter:
            return Adapter.choosing(lambda *given: otherwise if chosen(*given) is None else adapter)

        def type_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype | None:
            if tensor.dtype not in CASTABLE or not self._is_cast_here(tensor):
                return None
            return self._half_dtype_for(tensor) if dtype is self.half_dtype else dtype

        if formats.format.is_torchs and formats.grad == formats.format:
            return for_format(self.for_registration(rule, formats.format.dtype, original))
        if formats.are_devices:
            # Half weights change without notice, for example when a master is written.
            kept = self.cache.kept if self.hears_regions else None
            products = ScaledProducts(rule.path, formats, chosen, type_of, kept)
            call = named(products.call, str(rule.path)) if self.labelled else products.call
            return replace(otherwise, plain_cast=None, instead=call)
        emulation = Emulation(rule, formats, original, chosen, type_of, self.cache)
        adapt = self._obeying(emulation.adapt, original, PlainCast("to", None)).adapt
        return for_format(self._labelled(Adapter(adapt, finish=emulation.finish), rule.path))

    def in_half(self, treatment: InHalf, path: Path, original: Function) -> Adapter:
        """Returns the adapter of a function for models with half weights."""
        unmixed = PlainCast("unmixed", self.half_dtype, for_half=True)
        if is_in_place(path.name):
            adapter = Adapter(self._in_place(path, original, refuse_half=False), unmixed)
        elif treatment is InHalf.NORMALISE:
            adapter = Adapter(self._mixed.normalising, PlainCast("normalise", self.half_dtype, for_half=True))
        elif treatment is InHalf.ATTENTION:
            adapter = Adapter(self._mixed.attending(original), unmixed)
        elif treatment is InHalf.ADD_TABLE:
            adapter = Adapter(self._mixed.adding_table, unmixed)
        else:
            adapt, plain_cast = self._mixed.beside_half, PlainCast("beside_half", self.half_dtype, for_half=True)
            if treatment is InHalf.PROMOTE:
                adapt, plain_cast = self._to_widest, PlainCast("promote", None, for_half=True)
            obeying = self._obeying(adapt, original, plain_cast)
            adapter = self._unless_in_place(obeying, path, original, refuse_half=False)
        return self._labelled(adapter, path)

    def by_kind(self) -> dict[str, Adapt]:
        """Returns the adapters of decorated functions, by the name of a list or of a half type."""
        decorated = Path("decorated", "function")
        kinds = (kind for kind in Treatment if kind is not Treatment.BANNED)
        adapters = {kind.value: self.for_treatment(Rule(decorated, kind, "decorated")) for kind in kinds}
        for name, dtype in HALF_DTYPES.items():
            adapters[name] = self._obeying(self._to[dtype], None, PlainCast("to", dtype))
        return {name: adapter.adapt for name, adapter in adapters.items()}

    def _make_to_half(self, chosen: _Chosen) -> Adapt:
        """Makes the cast to half, or to float32 if an argument is sparse and torch has no half kernel for it.

        In a region it casts to the region's type.
        """
        cast = _casting(self._cast_in_region)
        in_float32, strided = self._to[torch.float32], torch.strided

        def to_half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            if not is_compiling():  # compilers reject sparse tensors, and Dynamo traces no layouts in a backward pass
                for value in (*args, *kwargs.values()) if kwargs else args:
                    if isinstance(value, Tensor) and value.layout is not strided and lacks_half_products(value):
                        return in_float32(args, kwargs)
            dtype = chosen(args, kwargs)
            if dtype is None:
                return args, kwargs
            return (cast if dtype is self.half_dtype else self._to[dtype])(args, kwargs)

        return to_half

    def _half_of_models(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Returns the half type for a call that belongs to a model; None for other calls.

        Every call in a region belongs to a model. Outside of regions, one of its arguments must be half already, or
        autograd must record the call through one of them. In half, other float32 products could lose digits that their
        caller needs, for example when a product counts. Arguments of another half type than the session's belong to a
        model that computes in that type.
        """
        if is_set_by_autocast(self.device_types):
            return self.half_dtype
        records, is_recorded = torch.is_grad_enabled(), False
        halves: list[torch.dtype] = []
        for tensor in tensors_of_call(args, kwargs):
            if tensor.dtype in HALVES and tensor.dtype not in halves:
                halves.append(tensor.dtype)
            is_recorded = is_recorded or (records and tensor.requires_grad)
        if len(halves) == 1:
            return halves[0]
        return self.half_dtype if halves or is_recorded else None

    def _with_weights_together(self, to_half: Adapt, original: Function, chosen: _Chosen) -> Adapt:
        """Returns an adapter that casts the weights of a recurrent layer into one buffer, the rest by ``to_half``."""

        def with_weights_together(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            place = None if is_compiling() else recurrent_weights.place_of_weights(args)
            if place is not None and args[place]:
                weights, dtype = args[place], chosen(args, kwargs)
                if dtype is self.half_dtype:
                    dtype = self._half_dtype_for(weights[0])
                if (
                    dtype is not None
                    and recurrent_weights.can_share_memory(weights, dtype)
                    and self._is_cast_here(weights[0])
                ):
                    layout_of = functools.partial(recurrent_weights.layout_of, original, args, place, dtype)
                    casts = self.cache.cast_together(weights, dtype, layout_of)
                    args = (*args[:place], casts, *args[place + 1 :])
            return to_half(args, kwargs)

        return with_weights_together

    def _to_widest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Casts to the widest type among the arguments."""
        found = tensors_of_call(args, kwargs)
        if len({tensor.dtype for tensor in found}) < 2:
            return args, kwargs
        dtypes = {tensor.dtype for tensor in found if tensor.dtype in self._to and self._is_cast_here(tensor)}
        if len(dtypes) < 2:
            return args, kwargs
        return self._to[functools.reduce(torch.promote_types, dtypes)](args, kwargs)

    def _via_dtype(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Casts to float32, except a half first argument: the kernel reads half and computes in float32."""
        tensor, cast = args[0] if args else kwargs.get("input"), self._to[torch.float32]
        if not isinstance(tensor, Tensor) or not self._is_half(tensor) or tensor.is_nested:
            # Not half, or passed under another name. With dtype=, torch's kernel on CUDA rejects nested tensors.
            return cast(args, kwargs)
        for value in args[1:]:
            if isinstance(value, torch.dtype):
                return args, kwargs
            if value is None:  # None may be the positional dtype, so dtype= cannot be passed as well
                return cast(args, kwargs)
        return args, {**kwargs, "dtype": torch.float32}

    def _obeying(self, adapt: Adapt, original: Function | None, plain_cast: PlainCast) -> Adapter:
        """Returns an adapter that obeys an explicit ``dtype=`` or ``out=``, and otherwise does what ``adapt`` does.

        With ``dtype=`` it casts nothing. With ``out=`` it casts to the type of that tensor, which is itself never cast.

        Args:
            adapt: adapter for calls with neither argument.
            original: the function; None if the adapter serves several.
            plain_cast: what ``adapt`` does to ordinary arguments.
        """
        # Builtins take both by keyword only (except softmax, see `_via_dtype`); some Python functions do not.
        names: tuple[str, ...] = ()
        positions: list[int] = []
        if isinstance(original, types.FunctionType):
            code = original.__code__
            names = code.co_varnames[: code.co_argcount]
            positions = [names.index(name) for name in ("dtype", "out") if name in names[code.co_posonlyargcount :]]

        def obeying_by_keyword(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            if kwargs:
                if kwargs.get("dtype") is not None:
                    return args, kwargs
                out = kwargs.get("out")
                written = None if out is None else next(tensors_in(out), None)
                if written is not None:
                    return self._as_written(written, args, kwargs)
            return adapt(args, kwargs)

        obeying = self._obeying_keywords.setdefault(adapt, obeying_by_keyword)
        if not positions:
            return Adapter(obeying, plain_cast)
        first = min(positions)

        def obeying_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            if first < len(args) <= len(names):
                args, named = args[:first], zip(names[first:], args[first:], strict=False)
                kwargs = {**dict(named), **kwargs}
            return obeying(args, kwargs)

        return Adapter(obeying_by_name, replace(plain_cast, positional=first))

    def _as_written(self, written: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        cast = self._casts.get(written.dtype)
        if cast is None:
            return args, kwargs
        args = tuple([value if type(value) in PLAIN else cast_tensors(value, cast) for value in args])
        if kwargs:
            kwargs = {name: value if name == "out" else cast_tensors(value, cast) for name, value in kwargs.items()}
        return args, kwargs

    def _unless_in_place(self, adapter: Adapter, path: Path, original: Function | None, refuse_half: bool) -> Adapter:
        """Treats calls with ``inplace=True`` as in-place: after a cast they would write to a copy, not to the input.

        If a call returns a view of an argument, that argument is not cast, for the same reason.
        """
        is_view = next((is_view for function, is_view in _VIEWS.items() if function is original), None)
        if is_view is not None:
            return Adapter(lambda *given: given if is_view(*given) else adapter.adapt(*given))
        asked = argument_reader(original, "inplace") if original is not None and may_have(original, "inplace") else None
        if asked is None:
            return adapter
        otherwise, in_place = adapter.adapt, self._in_place(path, original, refuse_half)

        def unless_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            return in_place(args, kwargs) if asked(args, kwargs) else otherwise(args, kwargs)

        return Adapter(unless_in_place)

    def _in_place(self, path: Path, original: Function | None, refuse_half: bool) -> Adapt:
        first = first_argument_reader(original) if original is not None else None
        advice = _instead_of_in_place(path.name)

        def in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            written = args[0] if args else None if first is None else first(args, kwargs)
            if not isinstance(written, Tensor):
                return args, kwargs
            if refuse_half and self._is_half(written):
                raise BannedFunctionError(
                    f"{path} would write to a tensor of {written.dtype}, but is computed in float32 under amp. {advice}"
                )
            return self._as_written(written, args, kwargs)

        return in_place

    def _banned(self, path: Path, instead: str | None) -> Adapt:
        def banned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            if any(map(self._is_half, tensors_of_call(args, kwargs))):
                advice = f" {instead[0].upper()}{instead[1:].rstrip('.')}." if instead else ""
                raise BannedFunctionError(
                    f"amp does not let {path} run on half tensors: its result would be unsafe.{advice} "
                    "To run it in float32, cast its arguments with .float() or move it to the blacklist in your "
                    "cast lists."
                )
            return args, kwargs

        return banned


def _beside(half_dtype: torch.dtype) -> _Chosen:
    """Returns a function that chooses the half type for calls with a half argument; parts kept in float32 have none."""

    def beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        return half_dtype if any(tensor.dtype in HALVES for tensor in tensors_of_call(args, kwargs)) else None

    return beside


def _unless_disabled(chosen: _Chosen) -> _Chosen:
    """Returns a function that chooses no type in a block of `amp.disable_casts`, and otherwise as another one does."""

    def unless_disabled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        if is_in_region() and all(dtype_in_region(each.device.type) is None for each in tensors_of_call(args, kwargs)):
            return None
        return chosen(args, kwargs)

    return unless_disabled


def is_looked_up(tensor: Tensor) -> bool:
    """Returns True if autograd's graph shows that a tensor comes from an embedding, as the words of a sequence do."""
    node = tensor.grad_fn
    for _ in range(_MOST_NODES):
        name = "" if node is None else node.name()
        if node is None or not name.startswith(_OF_STREAMS):
            return name.startswith("Embedding")
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return False


def _with_argument(given: Arguments, old: object, new: object) -> Arguments:
    """Returns arguments with one of them exchanged for another."""
    args, kwargs = given
    return (
        tuple([new if value is old else value for value in args]),
        {name: new if value is old else value for name, value in kwargs.items()},
    )


def _casting(cast: TensorCast) -> Adapt:
    """Returns an adapter that casts every tensor in the arguments."""

    def to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # Every call of a listed function runs this: tensors and plain values skip the walk through containers.
        items: list[Any] = []
        before = done = None
        for value in args:
            if isinstance(value, Tensor):
                # In self-attention, query, key and value are one tensor. They get one cast, because torch compares
                # them by identity to project them at once.
                if value is before:
                    items.append(done)
                    continue
                items.append(cast(value))
                if items[-1] is not value:
                    before, done = value, items[-1]
            else:
                items.append(value if type(value) in PLAIN else cast_tensors(value, cast))
        if kwargs:
            kwargs = {name: cast_tensors(value, cast) for name, value in kwargs.items()}
        return tuple(items), kwargs

    return to
