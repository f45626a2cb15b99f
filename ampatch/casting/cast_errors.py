"""Decides if a cast may be the cause of an error. Only then does the error name the function and the list's line.

Reads the error's text and the dtypes of the arguments. Must not repeat a call to find out: calls have side effects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch

from ampatch.casting.nested import CASTABLE, tensors_in
from ampatch.half_types import HALF_TYPES, HALVES

_NAMES = {
    **{row.dtype: (row.name, *row.aliases, *row.spellings) for row in HALF_TYPES.values()},
    torch.float32: ("Float", "float32", "fp32"),
    torch.float64: ("Double", "float64"),
    # amp casts neither from these nor to them, so all of them share one key.
    torch.int64: ("Long", "Int", "Short", "Char", "Byte", "Bool", "long int", r"u?int(?:8|16|32|64)"),
}
_TYPES = {
    dtype: re.compile(rf"(?<!\w)(?:torch\.|cuda\.|c10::|at::|CPU|CUDA)*(?:{'|'.join(names)})(?:Tensor|Type)?(?!\w)")
    for dtype, names in _NAMES.items()
}
# Also Python's name for a number ("must be float, not str"). So it counts only beside the name of a dtype.
_CPP_FLOATS = {torch.float32: re.compile(r"(?<!\w)float(?!\w)"), torch.float64: re.compile(r"(?<!\w)double(?!\w)")}

_OF_TYPES = re.compile(r"(?<!\w)(?:dtypes?|(?:data|scalar) types?)(?!\w)")
_OF_KERNELS = re.compile(r"not implemented for|not supported|unsupported dtype", re.IGNORECASE)
_OF_NUMBERS = re.compile(r"without overflow|out of bounds for|for input dtype")
_OF_VALUES = re.compile(
    r"(?<!\w)(?:inf|nan|(?:non-?)?finite|infinity|overflow|underflow|converge|singular|positive-definite)(?!\w)",
    re.IGNORECASE,
)
# Errors of torch's argument parser: for example, an argument is not a tensor and should be one, or the reverse.
_OF_SIGNATURE = re.compile(r"\(\): argument |invalid combination of arguments|keyword argument|positional argument")


def add_note(reason: str, error: BaseException, given: object, made: torch.dtype | None) -> None:
    """Adds ``reason`` to an error as a note, if a cast to one dtype may be the cause.

    Args:
        reason: sentence that names the function, and why it casts.
        error: error that the call raised.
        given: arguments before the cast.
        made: dtype that they were cast to; None if the cast itself raised.
    """
    if made is None:
        error.add_note(reason)
        return
    before = {tensor.dtype for tensor in tensors_in(given)} & CASTABLE - {made}
    if may_be_caused_by_casts(error, before, {made}):
        error.add_note(reason)


def may_be_caused_by_casts(
    error: BaseException, before: Collection[torch.dtype], after: Collection[torch.dtype]
) -> bool:
    """Returns True if casts may be the cause of an error, judged by its text.

    A text that names dtypes blames a cast only if it names a new dtype. If it names other dtypes too, an old one must
    be among them: a float64 input of a float32 layer, or an integer target, is an error without any cast.

    Args:
        error: error that a call raised.
        before: dtypes that tensors were cast from.
        after: dtypes that they were cast to.
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


def may_be_of_mixed_types(error: BaseException, half: torch.dtype) -> bool:
    """Returns True if half weights beside float32 tensors may be the cause of an error, judged by its text.

    Some of torch's errors name both types, others one of them or none ("mixed dtype (CPU): expect parameter to have
    scalar type of Float", "scatter(): Expected self.dtype to be equal to src.dtype").

    Args:
        error: error that the forward of a model with half weights raised.
        half: type of the weights.
    """
    text = str(error)
    named = {dtype for dtype, pattern in _TYPES.items() if pattern.search(text)}
    named |= {dtype for dtype, pattern in _CPP_FLOATS.items() if pattern.search(text)}
    if half in named and not named.isdisjoint(_CPP_FLOATS):
        return True
    return named <= {half, *_CPP_FLOATS} and _OF_TYPES.search(text) is not None


def note_half(error: BaseException, half: torch.dtype, in_backward: str = "") -> None:
    """Adds a note, which says what to write, to an error about half tensors that amp has made.

    Args:
        error: error of a forward or backward pass. It gets a note only if its text names a number that is too large for
            the half type or, in a backward pass, both this type and float32.
        half: the half type.
        in_backward: arguments for ``amp.initialize`` that keep a layer in float32; empty for a forward pass.
    """
    text = str(error)
    if _OF_NUMBERS.search(text) and _TYPES[half].search(text):
        note = (
            f"ampatch: amp has made tensors {half}, which holds no number beyond {torch.finfo(half).max:g}. Type "
            "torch.finfo(x.dtype).min in place of a number such as -1e9, with the tensor of this call as x; or call "
            "the function on x.float()."
        )
    elif in_backward and may_be_of_mixed_types(error, half):
        note = (
            f"ampatch: amp has made tensors {half}, and the backward pass of a function met float32 beside them. Keep "
            f"its layer in float32: type amp.initialize(..., {in_backward}), as for a batch norm under torch.func. Or "
            "decorate the forward and backward of your autograd.Function by amp.float_function."
        )
    else:
        return
    if note not in getattr(error, "__notes__", ()):  # a model in this one, or nested backward passes, may have added it
        error.add_note(note)


def names_missing_kernel(error: BaseException, half: torch.dtype) -> bool:
    """Returns True if an error says that torch has no kernel of a half type for a function."""
    return _OF_KERNELS.search(str(error)) is not None and _TYPES[half].search(str(error)) is not None


def _narrows(before: Iterable[torch.dtype], after: Collection[torch.dtype]) -> bool:
    """Returns True if a cast to half may have made values infinite, or rounded them."""
    return not HALVES.isdisjoint(after) and any(dtype not in after for dtype in before)
