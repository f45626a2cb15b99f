"""Whether a cast may be the cause of an error: only then does the error name the function and the line of the list.

Reads the error's text and the types of the arguments. Must not call anything again to find out: calls have effects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch

from ampatch.casting.nested import CASTABLE, tensors_in
from ampatch.opt_levels import HALVES

_NAMES = {
    torch.float16: ("Half", "half", "float16", "fp16"),
    torch.bfloat16: ("BFloat16", "bfloat16", "bf16"),
    torch.float32: ("Float", "float32", "fp32"),
    torch.float64: ("Double", "float64"),
    # No cast leads from these, or to them: which of them it is does not matter.
    torch.int64: ("Long", "Int", "Short", "Char", "Byte", "Bool", "long int", r"u?int(?:8|16|32|64)"),
}
_TYPES = {
    dtype: re.compile(rf"(?<!\w)(?:torch\.|cuda\.|c10::|at::|CPU|CUDA)*(?:{'|'.join(names)})(?:Tensor|Type)?(?!\w)")
    for dtype, names in _NAMES.items()
}
# Python's own name for a number, too: "must be float, not str". So it counts only beside another name.
_CPP_FLOATS = {torch.float32: re.compile(r"(?<!\w)float(?!\w)"), torch.float64: re.compile(r"(?<!\w)double(?!\w)")}

_OF_TYPES = re.compile(r"(?<!\w)(?:dtypes?|(?:data|scalar) types?)(?!\w)")
_OF_VALUES = re.compile(
    r"(?<!\w)(?:inf|nan|(?:non-?)?finite|infinity|overflow|underflow|converge|singular|positive-definite)(?!\w)",
    re.IGNORECASE,
)
# Torch has read the arguments, and found one that is no tensor where a tensor is expected, or the other way round.
_OF_SIGNATURE = re.compile(r"\(\): argument |invalid combination of arguments|keyword argument|positional argument")


def add_note(reason: str, error: BaseException, given: object, made: torch.dtype | None) -> None:
    """Adds ``reason`` to an error as a note, if a cast to one type may be the cause.

    Args:
        reason: names the function and why it casts.
        error: what the call raised.
        given: the arguments before the cast.
        made: the type that they were cast to; None if the cast itself raised.
    """
    if made is None:
        error.add_note(reason)
        return
    before = {tensor.dtype for tensor in tensors_in(given)} & CASTABLE - {made}
    if may_come_of_casts(error, before, {made}):
        error.add_note(reason)


def may_come_of_casts(error: BaseException, before: Collection[torch.dtype], after: Collection[torch.dtype]) -> bool:
    """Returns whether an error may come of casts, as far as its text tells.

    A text that names types accuses a cast only if it names the new type. Beside other types it does so only if the old
    type is among them: the float64 input of a float32 layer, or an integer target, is an error without any cast.

    Args:
        error: what a call raised.
        before: the types that tensors were cast from.
        after: the types that they were cast to.
    """
    text = str(error)
    if not text:  # such as a bare `assert x.dtype is torch.float32`
        return True
    named = {dtype for dtype, pattern in _TYPES.items() if pattern.search(text)}
    if isinstance(error, TypeError) and _OF_SIGNATURE.search(text):
        return False
    if named:
        named |= {dtype for dtype, pattern in _CPP_FLOATS.items() if pattern.search(text)}
        others = named - set(after)
        return others != named and (not others or not others.isdisjoint(before))
    if _OF_TYPES.search(text):
        return True
    return _narrows(before, after) and _OF_VALUES.search(text) is not None


def is_of_types(error: BaseException, half: torch.dtype) -> bool:
    """Returns whether an error's text names a half type beside another floating type."""
    named = {dtype for dtype, pattern in _TYPES.items() if pattern.search(str(error))}
    named |= {dtype for dtype, pattern in _CPP_FLOATS.items() if pattern.search(str(error))}
    return half in named and not named.isdisjoint(set(_CPP_FLOATS))


def _narrows(before: Iterable[torch.dtype], after: Collection[torch.dtype]) -> bool:
    """Returns whether values may have become infinite, or been rounded to what they were not."""
    return not HALVES.isdisjoint(after) and any(dtype not in after for dtype in before)
