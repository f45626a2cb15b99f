"""A function that computes in a number format because amp rounds around its calls.

Owns what is rounded in a call, and in which type the call computes and returns. Must not round itself, nor know formats
by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ampatch.cast_lists.rules import Formats, Rule
from ampatch.cast_lists.signatures import argument_reader, parameter_names
from ampatch.cast_lists.spellings import is_in_place
from ampatch.casting.nested import CASTABLE, Arguments, cast_tensors, tensors_of_call
from ampatch.casting.rounding import as_argument, as_result
from ampatch.errors import BannedFunctionError
from ampatch.formats import Format
from ampatch.patching.recurrent_weights import is_recurrent


class Rounds(Protocol):
    """An object that rounds tensors to formats, and may keep what is made of a weight."""

    def kept(self, tensor: Tensor, dtype: torch.dtype | None, make: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002
        """Returns ``make()``. A cache may return what it made of a weight for ``dtype`` before; None: never."""
        return make()

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
        added = [each for each in parameter_names(original) if each == "bias" or each.endswith(("_bias", "_mask"))]
        added += ["b_ih", "b_hh", *(["input"] if name in _SUMS else [])]
        self._added, self._updated, self._written = (
            [reader for each in names if (reader := argument_reader(original, each)) is not None]
            for names in (added, ("running_mean", "running_var"), ("inplace", "max_norm"))
        )
        self._is_in_place, self._is_recurrent = is_in_place(name), is_recurrent(original)

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if a call writes to a tensor that would be rounded."""
        # Not `in (None, False)`: an argument may be a tensor, by mistake.
        values = [reader(args, kwargs) for reader in self._written]
        return self._is_in_place or not all(value is None or value is False for value in values)

    def added(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Returns the ids of biases and masks, which are only cast."""
        found = {id(reader(args, kwargs)) for reader in self._added}
        if self._is_recurrent:  # whose weights and biases are in one list
            found |= {id(each) for each in tensors_of_call(args, kwargs) if each.dim() == 1}
        return found

    def updated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Returns running statistics, which stay as they are: the call updates them."""
        values = (reader(args, kwargs) for reader in self._updated)
        return [value for value in values if isinstance(value, Tensor)]


#: The functions that add their first argument to a product.
_SUMS = ("addmm", "addbmm", "baddbmm", "addmv", "addr")


class Emulation:
    """How calls of one function are emulated.

    Arguments are rounded from what they are, without a cast in between, but for those that `Operands` excepts. A call
    computes in the type of its statistics, or else in the one that it has by the lists, if that has all numbers of the
    format, and otherwise in float32; its result has the type that it has by the lists.

    Args:
        rule: rule of the function.
        formats: formats of arguments, and of gradients of results.
        original: the function.
        type_of_call: function that returns the type that a call computes in by the lists; None: it is not cast.
        type_of: function that returns that type for one tensor, given the type of the call; None: it is not cast.
        cast: function that casts a tensor.
        round: function that rounds a tensor to a format, in a type.
    """

    def __init__(
        self,
        rule: Rule,
        formats: Formats,
        original: Callable[..., Any],
        type_of_call: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype | None],
        type_of: Callable[[Tensor, torch.dtype], torch.dtype | None],
        cast: Callable[[Tensor, torch.dtype], Tensor],
        round: Callable[[Tensor, Format, torch.dtype], Tensor],
    ) -> None:
        self._format, self._grad = formats
        self._computes_in = {dtype: dtype if self._format.is_within(dtype) else torch.float32 for dtype in CASTABLE}
        self._type_of_call, self._type_of, self._cast, self._round = type_of_call, type_of, cast, round
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
        added, updated = self._operands.added(args, kwargs), self._operands.updated(args, kwargs)

        def rounded(tensor: Tensor) -> Tensor:
            wanted = self._type_of(tensor, dtype)
            if wanted is None or any(tensor is each for each in updated):
                return tensor
            computes_in = updated[0].dtype if updated else self._computes_in[wanted]
            if id(tensor) in added:
                return self._cast(tensor, computes_in)
            return self._round(tensor, self._format, computes_in)

        return tuple([cast_tensors(value, rounded) for value in args]), {
            name: cast_tensors(value, rounded) for name, value in kwargs.items()
        }

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
