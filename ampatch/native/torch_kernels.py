"""The operators of `torch.ops.ampatch` on torch's own multi-tensor kernels: what runs where there is no extension.

Every function does what the operator of its name does, and is what the tests compare that with. Its tensors are on one
device, of float16, bfloat16, float32 or float64, and of any strides. Must not choose: `ampatch.native.kernels` does.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

# The least number above zero that a type has.
_LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}

# The least number of elements that are worked on at once where that takes temporary tensors.
_PIECE = 2**12

# As in csrc/operations.h, as int32.
_INDEX_STEP, _PIECE_STEP = 0x9E3779B1 - 2**32, 0x7FEB352D
_HASH_STEPS = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grads *= inv_scale`` in place; sets ``found_inf`` where an element of ``grads`` was not finite."""
    for (group,) in _by_dtype(grads):
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inv_scale)
        increment_version(group)  # which this one of torch's own operators does not (torch 2.13)


def unscale_copy(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """``master_grads = grads * inv_scale`` in float32; with ``write_back`` then `show`."""
    for narrow, wide in _by_dtype(grads, master_grads):
        torch._foreach_copy_(wide, narrow)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inv_scale)
        if write_back:
            show(wide, narrow)


def unscale_add(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """``master_grads += grads * inv_scale`` in float32; with ``write_back`` then `show`."""
    for narrow, wide in _by_dtype(grads, master_grads):
        for batch in _batches(narrow, wide):
            unscaled = [torch.empty_like(piece, dtype=torch.float32) for piece in batch.columns[0]]
            unscale_copy(batch.columns[0], unscaled, inv_scale, found_inf, False)
            torch._foreach_add_(batch.columns[1], unscaled)
        if write_back:
            show(wide, narrow)


def show(master_grads: list[Tensor], grads: list[Tensor]) -> None:
    """``grads = master_grads``, rounded, but that nothing becomes zero which is not zero."""
    for narrow, wide in _by_dtype(grads, master_grads):
        if narrow[0].dtype not in _LEAST:
            torch._foreach_copy_(narrow, wide)
            continue
        for batch in _batches(narrow, wide):
            flat = _flat(batch.columns[1])
            torch._foreach_copy_(batch.columns[0], _shaped_as(batch.columns[0], _shown(flat, narrow[0].dtype)))


def fingerprint(halves: list[Tensor], fingerprints: Tensor) -> None:
    """Sets a number for each tensor which is another one if one element is, and else but for one case in 2**32.

    Args:
        halves: of float16, bfloat16 or float32; none is empty.
        fingerprints: float64, as many as there are tensors.
    """
    sums: list[Tensor] = []  # of pieces, tensor by tensor
    counts = [0] * len(halves)
    for batch in _batches(halves):
        pieces = batch.columns[0]
        lengths = [piece.numel() for piece in pieces]
        words = torch.cat([_bits(piece) for piece in pieces])
        table = _indices(1 << max(lengths).bit_length(), words.device)
        words += torch.cat([table[:length] for length in lengths])
        for index, part in zip(batch.indices, words.split(lengths), strict=True):
            if counts[index]:  # each piece of a tensor counts differently
                part.add_((counts[index] * _PIECE_STEP + 2**31) % 2**32 - 2**31)
            counts[index] += 1
        sums.append(_sums_of(_hashed_(words), lengths))
    if sums:
        fingerprints.copy_(_sums_of(torch.cat(sums), counts) & 0xFFFFFFFF)


def follow(halves: list[Tensor], masters: list[Tensor], before: Tensor, now: Tensor, of_gradients: bool) -> None:
    """``masters = halves`` in the elements in which these are not the masters', rounded, of some tensors.

    Args:
        halves: of float16 or bfloat16; none is empty.
        masters: as many of float32, of the same shapes.
        before: what `fingerprint` once found, or other numbers: float64, as many as there are tensors.
        now: what it finds at present. The tensors for which the two are the same are left alone.
        of_gradients: whether they are rounded as `show` does it.
    """
    changes = list((before != now).unbind())
    for narrow, wide, changed in _by_dtype(halves, masters, changes):
        for batch in _batches(narrow, wide):
            shown, full = map(_flat, batch.columns)
            own = _shown(full, shown.dtype) if of_gradients else full
            is_other = shown != own.to(shown.dtype)
            pieces = zip(batch.indices, batch.columns[0], strict=True)
            is_other &= torch.cat([changed[index].expand(piece.numel()) for index, piece in pieces])
            values = torch.where(is_other, shown, full)  # in float32, which holds both
            # Uncounted, as by the extension.
            with _unsafe_preserve_version_counter(tuple(batch.columns[1])):
                torch._foreach_copy_(batch.columns[1], _shaped_as(batch.columns[1], values))


def follow_by_value(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """``wide = narrow`` in the elements in which these are not ``wide``, rounded."""
    for half, master in zip(narrow, wide, strict=True):
        is_same = half == master.to(half.dtype)
        master.copy_(torch.where(is_same, master, half.to(master.dtype)))


def found_inf_norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """Adds the sum of ``(grads * inv_scale) ** 2`` to ``sum_of_squares``, and sets ``found_inf`` as `unscale_` does."""
    for (group,) in _by_dtype([grad for grad in grads if grad.numel()]):
        norms = torch.stack(torch._foreach_norm(group, 2, dtype=torch.float64))
        # No sum of squares of the other types is infinite in float64, unless there is something that is not finite.
        is_double = group[0].dtype is torch.float64
        peaks = torch.stack(torch._foreach_norm(group, math.inf)) if is_double else norms
        found_inf.masked_fill_(~peaks.isfinite().all(), 1)
        sum_of_squares += (norms * inv_scale).square_().sum()


def copy_to_half(masters: list[Tensor], halves: list[Tensor]) -> None:
    """``halves = masters``, rounded."""
    if halves:
        torch._foreach_copy_(halves, masters)


def update_scale(
    scale: Tensor,
    unskipped: Tensor,
    hysteresis_left: Tensor,
    found_inf: Tensor,
    growth: float,
    backoff: float,
    window: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    """Makes the transition of `ampatch.scaling.loss_scaler.next_state`, in place on the device."""
    overflow = found_inf != 0
    hysteresis_left.sub_(overflow.to(torch.int32))
    unskipped.add_(1).masked_fill_(overflow, 0)
    backs_off = overflow & (hysteresis_left <= 0)
    grows = unskipped >= window
    unskipped.masked_fill_(grows, 0)
    hysteresis_left.masked_fill_(grows, hysteresis)
    # Rounded once, from the exact product: float32 does that where it holds the factors.
    exact = scale if _float32_holds(growth) and _float32_holds(backoff) else scale.double()
    changed = torch.where(backs_off, exact * backoff, torch.where(grows, exact * growth, exact)).float()
    changed = changed.clamp_(floor, ceiling)
    scale.copy_(torch.where(changed.isfinite(), changed, scale) if math.isinf(ceiling) else changed)


@functools.cache
def _float32_holds(number: float) -> bool:
    return struct.unpack("f", struct.pack("f", number))[0] == number  # type: ignore[no-any-return]


class _Batch(NamedTuple):
    """Pieces of some tensors that are worked on together.

    Attributes:
        indices: of the tensors in their list.
        columns: the pieces, of each list.
    """

    indices: list[int]
    columns: Sequence[list[Tensor]]


def _batches(*lists: list[Tensor]) -> Iterator[_Batch]:
    """Pieces that share memory with the tensors of lists, in batches that are small beside all of them.

    So are temporary tensors of a batch. How a tensor is cut does not depend on what else is in its list.
    """
    room = max(_PIECE, sum(tensor.numel() for tensor in lists[0]) // 128)
    batch, elements = _Batch([], [[] for _ in lists]), 0
    for index, tensors in enumerate(zip(*lists, strict=True)):
        length = max(_PIECE, -(-tensors[0].numel() // 64))
        is_cut = length < tensors[0].numel() and all(tensor.is_contiguous() for tensor in tensors)
        rows = zip(*(tensor.view(-1).split(length) for tensor in tensors), strict=True) if is_cut else [tensors]
        for row in rows:
            if batch.indices and elements + row[0].numel() > room:
                yield batch
                batch, elements = _Batch([], [[] for _ in lists]), 0
            batch.indices.append(index)
            for column, piece in zip(batch.columns, row, strict=True):
                column.append(piece)
            elements += row[0].numel()
    if batch.indices:
        yield batch


def _flat(pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _shaped_as(tensors: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Pieces of a flat tensor, with the shapes of tensors that have as many elements in all."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _shown(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what rounds to what is shown of gradients in a half type."""
    size = full.abs()
    vanishes = (size < _LEAST[dtype]).logical_and_(size != 0)
    return torch.where(vanishes, size.fill_(_LEAST[dtype]).copysign_(full), full)


def _bits(piece: Tensor) -> Tensor:
    """Returns the bits of elements as a new flat tensor of int32."""
    bits = torch.int16 if piece.element_size() == 2 else torch.int32
    return piece.resolve_neg().reshape(-1).view(bits).to(torch.int32)


def _sums_of(numbers: Tensor, lengths: list[int]) -> Tensor:
    """Returns sums of so many numbers each: int64."""
    totals = numbers.cumsum(0, dtype=torch.int64)
    ends = torch.stack([totals[end - 1] for end in itertools.accumulate(lengths)])
    return ends.diff(prepend=ends.new_zeros(1))


def _hashed_(words: Tensor) -> Tensor:
    """Changes int32 words as `hashed` of csrc/operations.h does; shifts bring in zeros."""
    words.mul_(_HASH_STEPS[0])
    words ^= (words >> 15) & (2**17 - 1)
    words.mul_(_HASH_STEPS[1])
    words ^= (words >> 13) & (2**19 - 1)
    return words


@functools.cache
def _indices(length: int, device: torch.device) -> Tensor:
    """Returns what the index of an element adds to its bits in a fingerprint: int32."""
    return torch.arange(length, dtype=torch.int32, device=device).mul_(_INDEX_STEP)


def _by_dtype(*lists: list[Tensor]) -> Iterator[Sequence[list[Tensor]]]:
    """Lists in groups in which the first has one dtype, as torch's multi-tensor kernels want it."""
    dtypes = {tensor.dtype for tensor in lists[0]}
    if len(dtypes) == 1:
        yield lists
        return
    for dtype in dtypes:
        rows = [row for row in zip(*lists, strict=True) if row[0].dtype is dtype]
        yield [list(column) for column in zip(*rows, strict=True)]
