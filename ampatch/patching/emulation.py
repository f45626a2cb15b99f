"""A function that computes in a number format because amp rounds around its calls.

Owns what is rounded in a call, and in which type the call computes and returns. Must not round itself, nor know formats
by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampatch.cast_lists.rules import Formats, Rule
from ampatch.cast_lists.signatures import ArgumentReader, argument_reader, parameter_names
from ampatch.cast_lists.spellings import is_in_place
from ampatch.casting.nested import CASTABLE, Arguments, TensorCast, cast_tensors, tensors_of_call
from ampatch.casting.rounding import as_argument, as_result
from ampatch.errors import BannedFunctionError
from ampatch.formats import Format
from ampatch.patching.recurrent_weights import Layout, is_recurrent


class Casts:
    """Casts tensors and rounds them to formats. A subclass may keep what is made of a weight."""

    def kept(self, tensor: Tensor, dtype: torch.dtype | None, make: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002
        """Returns ``make()``. A cache may return what it made of a weight for ``dtype`` before; None: never."""
        return make()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of a castable type, cast to ``dtype``."""
        return tensor.to(dtype)

    def cast_together(
        self,
        weights: Sequence[Tensor],
        dtype: torch.dtype,
        layout_of: Callable[[], Layout],  # noqa: ARG002 - for caches that lay them out
    ) -> list[Tensor]:
        """Returns the weights of a recurrent layer, cast to ``dtype``, each in its own memory.

        Compilers do not trace it: in compiled code, the weights are cast like all other arguments.
        """
        return [weight if weight.dtype is dtype else self.cast(weight, dtype) for weight in weights]

    def round(self, tensor: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of a castable type, rounded to a format, in ``dtype``; no rounded weight is kept."""
        return self.kept(tensor, None, lambda: as_argument(tensor, format, dtype))


class Operands:
    """Tells which arguments in calls of one function a format is for.

    Args:
        name: name of the function.
        original: the function.
    """

    def __init__(self, name: str, original: Callable[..., Any]) -> None:
        # Devices add biases and masks to sums of products, which they keep in float32.
        addends = [each for each in parameter_names(original) if each == "bias" or each.endswith(("_bias", "_mask"))]
        addends += ["b_ih", "b_hh", *(["input"] if name in _SUMS else [])]
        read = functools.partial(argument_reader, original)
        self._statistics = [*filter(None, map(read, ("running_mean", "running_var")))]
        self._inplace, self._max_norm = map(read, ("inplace", "max_norm"))
        self._is_in_place, self._is_recurrent = is_in_place(name), is_recurrent(original)
        # By position and by keyword, as one tensor may be given twice: x + x @ w.
        self._addends = _places(filter(None, map(read, addends)))
        self._kept = _places(self._statistics)

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if a call writes to a tensor that would be rounded."""
        if self._max_norm is not None and self._max_norm(args, kwargs) is not None:
            return True
        return self._is_in_place or (self._inplace is not None and bool(self._inplace(args, kwargs)))

    def statistics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Returns the running statistics that a call updates."""
        values = (reader(args, kwargs) for reader in self._statistics)
        return [value for value in values if isinstance(value, Tensor)]

    def changed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operand: TensorCast,
        addend: TensorCast,
        statistic: TensorCast = lambda tensor: tensor,
    ) -> Arguments:
        """Returns the arguments of a call with their tensors changed, by a function for each kind.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            operand: changes what a format is for.
            addend: changes biases and masks.
            statistic: changes running statistics, which the call updates.
        """

        def of_recurrent(tensor: Tensor) -> Tensor:  # whose weights and biases are in one list
            return addend(tensor) if tensor.dim() == 1 else operand(tensor)

        def change(place: int | str, value: Any) -> Any:
            if place in self._kept:
                return cast_tensors(value, statistic)
            if place in self._addends:
                return cast_tensors(value, addend)
            return cast_tensors(value, of_recurrent if self._is_recurrent else operand)

        return (
            tuple([change(place, value) for place, value in enumerate(args)]),
            {name: change(name, value) for name, value in kwargs.items()},
        )


#: The functions that add their first argument to a product.
_SUMS = ("addmm", "addbmm", "baddbmm", "addmv", "addr")


def _places(readers: Iterable[ArgumentReader]) -> set[int | str]:
    """Returns the positions and keywords of arguments."""
    return {place for each in readers for place in (each.position, each.name, *each.aliases) if place is not None}


class Emulation:
    """How calls of one function are emulated.

    Arguments are rounded from their own type, without a cast in between, except for those that `Operands` excepts. A
    call with statistics computes in their type. Any other computes in its type by the lists if that type has all
    numbers of the format, and otherwise in float32. Its result has its type by the lists.

    Args:
        rule: rule of the function.
        formats: formats of arguments, and of gradients of results.
        original: the function.
        type_of_call: function that returns the type that a call computes in by the lists; None: it is not cast.
        type_of: function that returns that type for one tensor, given the type of the call; None: it is not cast.
        casts: object that casts and rounds tensors.
    """

    def __init__(
        self,
        rule: Rule,
        formats: Formats,
        original: Callable[..., Any],
        type_of_call: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype | None],
        type_of: Callable[[Tensor, torch.dtype], torch.dtype | None],
        casts: Casts,
    ) -> None:
        self._format, self._grad = formats
        self._computes_in = {dtype: dtype if self._format.is_within(dtype) else torch.float32 for dtype in CASTABLE}
        self._type_of_call, self._type_of, self._casts = type_of_call, type_of, casts
        self._operands = Operands(rule.path.name, original)
        self._refusal = (
            f"{rule.path} ({rule.source}) computes in {self._format}, and cannot write to an argument. Call the form "
            "that returns its result, without inplace=True or max_norm, or take the format out of the cast lists."
        )

    def adapt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments of a call rounded to the format.

        Raises:
            BannedFunctionError: the call would write to an argument.
        """
        dtype = self._type_of_call(args, kwargs)
        if dtype is None:
            return args, kwargs
        if self._operands.writes(args, kwargs):
            raise BannedFunctionError(self._refusal)
        statistics = self._operands.statistics(args, kwargs)

        def computes_in(tensor: Tensor) -> torch.dtype | None:
            wanted = self._type_of(tensor, dtype)
            return wanted and (statistics[0].dtype if statistics else self._computes_in[wanted])

        def rounded(tensor: Tensor) -> Tensor:
            wanted = computes_in(tensor)
            return tensor if wanted is None else self._casts.round(tensor, self._format, wanted)

        def cast(tensor: Tensor) -> Tensor:
            wanted = computes_in(tensor)
            return tensor if wanted in (None, tensor.dtype) else self._casts.cast(tensor, wanted)

        return self._operands.changed(args, kwargs, rounded, cast)

    def finish(self, given: Arguments, adapted: Arguments, result: Any) -> Any:
        """Returns the result of a call in its type; its gradient will be rounded. See `Adapter.finish`."""
        dtype = self._type_of_call(*given)
        pairs = zip(tensors_of_call(*given), tensors_of_call(*adapted), strict=True)
        is_obeyed = any(adapted[1].get(name) is not None for name in ("dtype", "out"))
        if dtype is None or is_obeyed or all(old is new for old, new in pairs):
            return result
        return cast_tensors(
            result,
            lambda tensor: (
                as_result(tensor, self._grad, self._type_of(tensor, dtype) or dtype)
                if tensor.dtype in CASTABLE
                else tensor
            ),
        )
