"""The operators of `torch.ops.ampatch`, written with torch's own multi-tensor kernels; used if no extension is built.

Every function does what the operator of its name does, and is the reference for that operator in the tests. Its tensors
are on one device, are float16, bfloat16, float32 or float64, and have any strides. Must not choose an implementation:
`ampatch.native.kernels` does.
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
from torch.autograd.graph import increment_version

from ampatch.half_types import HALF_TYPES
from ampatch.torch_private import foreach
from ampatch.torch_private.autograd import unsafe_preserve_version_counter

# Half types for which `torch._amp_foreach_non_finite_check_and_unscale_` has kernels, by type of device (torch 2.13).
_UNSCALED_HALVES = {"cpu": (torch.float16, torch.bfloat16), "cuda": (torch.float16,)}

# Minimum length, in elements, of batches and of cut pieces, for operations that need temporary tensors.
_PIECE = 2**12

# As int32. `_INDEX_STEP` and `_HASH_STEPS` are those of `hashed` in csrc/operations.h.
_INDEX_STEP, _PIECE_STEP = 0x9E3779B1 - 2**32, 0x7FEB352D
_RANDOM_STEPS = 0x21F0AAAD, 0x735A2D97
_QUIET_NAN = 0x7FC0  # of bfloat16
_ROUNDED = 2**16  # elements that are rounded at a time: their temporary tensors stay in the caches
_HASH_STEPS = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Computes ``grads *= inv_scale`` in place; sets ``found_inf`` to 1 if an element of ``grads`` was not finite."""
    for (group,) in _by_dtype(grads):
        if _has_kernel(group[0]):
            foreach.non_finite_check_and_unscale_(group, found_inf, inv_scale)
        else:
            _unscale_in_float32(group, inv_scale, found_inf)
        increment_version(group)  # torch's operator does not (torch 2.13)


def _has_kernel(grad: Tensor) -> bool:
    """Returns True if torch's operator for unscaling has a kernel for the device and dtype of a gradient."""
    return grad.dtype not in HALF_TYPES or grad.dtype in _UNSCALED_HALVES.get(grad.device.type, ())


def _unscale_in_float32(halves: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Does what torch's operator does, bit for bit: both compute in float32 and round once."""
    for batch in _batches(halves):
        (pieces,) = batch.columns
        unscaled = [torch.empty_like(piece, dtype=torch.float32) for piece in pieces]
        unscale_copy(pieces, unscaled, inv_scale, found_inf, False)
        foreach.copy_(pieces, unscaled)


def unscale_copy(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Computes ``master_grads = grads * inv_scale`` in float32, and rounds them to ``grads`` if ``write_back``."""
    for narrow, wide in _by_dtype(grads, master_grads):
        foreach.copy_(wide, narrow)
        foreach.non_finite_check_and_unscale_(wide, found_inf, inv_scale)
        if write_back:
            copy_to_half_grads(wide, narrow)


def unscale_add(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Computes ``master_grads += grads * inv_scale`` in float32, and rounds them to ``grads`` if ``write_back``."""
    for narrow, wide in _by_dtype(grads, master_grads):
        for batch in _batches(narrow, wide):
            unscaled = [torch.empty_like(piece, dtype=torch.float32) for piece in batch.columns[0]]
            unscale_copy(batch.columns[0], unscaled, inv_scale, found_inf, False)
            foreach.add_(batch.columns[1], unscaled)
        if write_back:
            copy_to_half_grads(wide, narrow)


def copy_to_half_grads(master_grads: list[Tensor], grads: list[Tensor]) -> None:
    """Copies ``master_grads`` to ``grads``, rounded; nonzero elements stay nonzero instead of underflowing."""
    for narrow, wide in _by_dtype(grads, master_grads):
        if narrow[0].dtype not in HALF_TYPES:
            foreach.copy_(narrow, wide)
            continue
        for batch in _batches(narrow, wide):
            flat = _flat(batch.columns[1])
            foreach.copy_(batch.columns[0], _shaped_as(batch.columns[0], _shown(flat, narrow[0].dtype)))


def fingerprint(halves: list[Tensor], fingerprints: Tensor) -> None:
    """Writes a hash of each tensor's elements to ``fingerprints``.

    A change of a single element always changes the hash; other changes leave it the same in one case of 2**32.

    Args:
        halves: tensors of float16, bfloat16, float32 or float64, which counts in float32; none is empty.
        fingerprints: 1-dimensional float64, one element per tensor.
    """
    sums: list[Tensor] = []  # one for each piece, in the order of the tensors
    counts = [0] * len(halves)
    for batch in _batches(halves):
        pieces = batch.columns[0]
        lengths = [piece.numel() for piece in pieces]
        words = torch.cat([_bits(piece) for piece in pieces])
        table = _indices(1 << max(lengths).bit_length(), words.device)
        words += torch.cat([table[:length] for length in lengths])
        for index, part in zip(batch.indices, words.split(lengths), strict=True):
            if counts[index]:  # each piece of a tensor gets an offset of its own
                part.add_((counts[index] * _PIECE_STEP + 2**31) % 2**32 - 2**31)
            counts[index] += 1
        sums.append(_sums_of(_hashed_(words), lengths))
    if sums:
        fingerprints.copy_(_sums_of(torch.cat(sums), counts) & 0xFFFFFFFF)


def copy_edits(halves: list[Tensor], masters: list[Tensor], before: Tensor, now: Tensor, of_gradients: bool) -> None:
    """Copies elements that were edited from ``halves`` to ``masters``, in tensors whose fingerprint changed.

    An element was edited if it differs from its master rounded to the half dtype. Other elements of masters keep their
    bits.

    Args:
        halves: tensors of float16 or bfloat16, or converted gradients of float32 or float64; none is empty.
        masters: float32 tensors of the same number and shapes.
        before: earlier result of `fingerprint`, or other numbers; float64, one element per tensor.
        now: current result of `fingerprint`; tensors whose numbers in ``before`` and ``now`` are equal are skipped.
        of_gradients: True to round masters as `copy_to_half_grads` does.
    """
    changes = list((before != now).unbind())
    for narrow, wide, changed in _by_dtype(halves, masters, changes):
        for batch in _batches(narrow, wide):
            shown, full = map(_flat, batch.columns)
            own = _shown(full, shown.dtype) if of_gradients and shown.dtype in HALF_TYPES else full
            is_other = shown != own.to(shown.dtype)
            pieces = zip(batch.indices, batch.columns[0], strict=True)
            is_other &= torch.cat([changed[index].expand(piece.numel()) for index, piece in pieces])
            values = torch.where(is_other, shown, full)  # in float32 or float64, which hold both kinds exactly
            # Version counters stay as they are, as in the extension.
            with unsafe_preserve_version_counter(tuple(batch.columns[1])):
                foreach.copy_(batch.columns[1], _shaped_as(batch.columns[1], values))


def copy_differing(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """Copies elements of ``narrow`` to ``wide`` if they differ from those of ``wide`` rounded to the narrow dtype."""
    for half, master in zip(narrow, wide, strict=True):
        is_same = half == master.to(half.dtype)
        master.copy_(torch.where(is_same, master, half.to(master.dtype)))


def found_inf_norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """Adds the sum of ``(grads * inv_scale) ** 2`` to ``sum_of_squares``; sets ``found_inf`` as `unscale_` does."""
    for (group,) in _by_dtype([grad for grad in grads if grad.numel()]):
        norms = torch.stack(foreach.norm(group, 2, dtype=torch.float64))
        # In float64 the squares of finite float32 or half numbers cannot sum to infinity; those of float64 can.
        is_double = group[0].dtype is torch.float64
        peaks = torch.stack(foreach.norm(group, math.inf)) if is_double else norms
        found_inf.masked_fill_(~peaks.isfinite().all(), 1)
        sum_of_squares += (norms * inv_scale).square_().sum()


def clip_factor(sum_of_squares: Tensor, found_inf: Tensor, norm: Tensor, factor: Tensor, max_norm: float) -> None:
    """Writes the norm of gradients, and the factor that clips them; see `ampatch.native.kernels.clip_factor`."""
    exact = sum_of_squares.sqrt()
    norm.copy_(exact)
    factor.copy_(torch.ones_like(exact) if math.isinf(max_norm) else (max_norm / (exact + 1e-6)).clamp_(max=1))
    factor.masked_fill_(found_inf != 0, 1)


def copy_to_half(masters: list[Tensor], halves: list[Tensor]) -> None:
    """Copies ``masters`` to ``halves``, rounded."""
    if halves:
        foreach.copy_(halves, masters)


def join(halves: list[Tensor], remainders: list[Tensor], fulls: list[Tensor]) -> None:
    """Writes to ``fulls`` what `split` made ``halves`` and ``remainders`` of, bit for bit."""
    for half, remainder, full in zip(halves, remainders, fulls, strict=True):
        full.view(torch.int32).copy_(half.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)


def split(fulls: list[Tensor], halves: list[Tensor], remainders: list[Tensor]) -> None:
    """Writes ``fulls`` to bfloat16 ``halves``, ties rounded away from zero, and what this loses to ``remainders``.

    The bits of a finite number are those of its half times 2**16, plus the remainder: an int16, as a half that was
    rounded up has a negative one. NaN becomes the quiet NaN, without a remainder.
    """
    for batch in _batches(fulls, halves, remainders):
        for full, half, remainder in zip(*batch.columns, strict=True):
            bits, is_nan = full.view(torch.int32), full.isnan()
            half.view(torch.int16).copy_(((bits + 2**15) >> 16).masked_fill_(is_nan, _QUIET_NAN))
            remainder.copy_(bits).masked_fill_(is_nan, 0)


def round_stochastically(fulls: list[Tensor], halves: list[Tensor], keys: list[int]) -> None:
    """Rounds ``fulls`` to bfloat16 ``halves``: up with the probability of the distance from the lower neighbour.

    The random numbers are a hash of the element's index and of the key of its tensor, so that they are the same
    wherever they are computed. A finite number stays finite. See `random_bits` of csrc/operations.h.

    Args:
        fulls: float32 tensors.
        halves: bfloat16 tensors of the same number, shapes and strides.
        keys: one number of 32 bits for each tensor.
    """
    for full, half, key in zip(fulls, halves, keys, strict=True):
        # By the place in memory, for all layouts alike.
        flat, rounded = _in_memory_order(full), _in_memory_order(half)
        for start in range(0, flat.numel(), _ROUNDED):
            part = flat[start : start + _ROUNDED]
            index = torch.arange(start, start + part.numel(), device=part.device).to(torch.int32)
            words = index.mul_(_INDEX_STEP).add_((key + 2**31) % 2**32 - 2**31)
            bits = part.view(torch.int32)
            up = (bits + _random_bits_(words)) >> 16
            largest = (bits >> 16) | 0x7F
            up = torch.where((up & 0x7F80) == 0x7F80, largest & ~0x80, up)
            exact = part.to(torch.bfloat16).view(torch.int16)
            rounded.view(torch.int16)[start : start + _ROUNDED] = torch.where(part.isfinite(), up, exact)


def update_scale(scale: Tensor, unskipped: Tensor, hysteresis_left: Tensor, found_inf: Tensor, *policy: float) -> None:
    """Updates the loss scale and its counters in place by the rules of `ampatch.scaling.loss_scaler.next_state`."""
    growth, backoff, window, hysteresis, floor, ceiling = policy
    overflow = found_inf != 0
    hysteresis_left.sub_(overflow.to(torch.int32))
    unskipped.add_(1).masked_fill_(overflow, 0)
    backs_off = overflow & (hysteresis_left <= 0)
    grows = unskipped >= window
    unskipped.masked_fill_(grows, 0)
    hysteresis_left.masked_fill_(grows, hysteresis)
    # The exact product must be rounded only once. A float32 product is, if both factors are exact in float32.
    exact = scale if _float32_holds(growth) and _float32_holds(backoff) else scale.double()
    changed = torch.where(backs_off, exact * backoff, torch.where(grows, exact * growth, exact)).float()
    changed = changed.clamp_(floor, ceiling)
    scale.copy_(torch.where(changed.isfinite(), changed, scale) if math.isinf(ceiling) else changed)


@functools.cache
def _float32_holds(number: float) -> bool:
    return struct.unpack("f", struct.pack("f", number))[0] == number  # type: ignore[no-any-return]


class _Batch(NamedTuple):
    """Pieces of tensors that are processed together.

    Attributes:
        indices: for each piece, index of its tensor in the list.
        columns: for each list, its pieces.
    """

    indices: list[int]
    columns: Sequence[list[Tensor]]


def _batches(*lists: list[Tensor]) -> Iterator[_Batch]:
    """Yields batches of pieces, which share memory with the tensors, so that temporary tensors of a batch stay small.

    A batch holds up to 1/128 of all elements (at least `_PIECE`), or a single larger piece. Contiguous tensors are cut
    into pieces of 1/64 of their elements (at least `_PIECE`), independently of the other tensors in their list.
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
    """Splits a flat tensor into views with the shapes of ``tensors``."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _shown(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float32 gradients in which nonzero elements that would underflow in ``dtype`` are its smallest number."""
    if dtype is torch.float32:  # user code has made a half parameter float32: nothing underflows
        return full
    size = full.abs()
    vanishes = (size < HALF_TYPES[dtype].least).logical_and_(size != 0)
    return torch.where(vanishes, size.fill_(HALF_TYPES[dtype].least).copysign_(full), full)


def _bits(piece: Tensor) -> Tensor:
    """Returns the bits of the elements as a new flat int32 tensor."""
    if piece.dtype is torch.float64:  # gradients of a model that the user has converted
        piece = piece.float()
    bits = torch.int16 if piece.element_size() == 2 else torch.int32
    return piece.resolve_neg().reshape(-1).view(bits).to(torch.int32)


def _sums_of(numbers: Tensor, lengths: list[int]) -> Tensor:
    """Returns int64 sums of consecutive runs of ``numbers``, which have these lengths."""
    totals = numbers.cumsum(0, dtype=torch.int64)
    ends = torch.stack([totals[end - 1] for end in itertools.accumulate(lengths)])
    return ends.diff(prepend=ends.new_zeros(1))


def _hashed_(words: Tensor) -> Tensor:
    """Hashes int32 words in place, as `hashed` of csrc/operations.h does; masks make the shifts logical ones."""
    words.mul_(_HASH_STEPS[0])
    words ^= (words >> 15) & (2**17 - 1)
    words.mul_(_HASH_STEPS[1])
    words ^= (words >> 13) & (2**19 - 1)
    return words


def key_of(count: int, number: int) -> int:
    """Returns a hash of two numbers with 32 bits, by the steps of `_random_bits_`, as a key for `round_stochastically`.

    Args:
        count: number of the step, or a hash of weights.
        number: number of the tensor.
    """
    word = (count * _INDEX_STEP + number * _HASH_STEPS[0]) % 2**32
    for shift, factor in zip((16, 15), _RANDOM_STEPS, strict=True):
        word = (word ^ word >> shift) * factor % 2**32
    return word ^ word >> 15


def _random_bits_(words: Tensor) -> Tensor:
    """Replaces int32 words by random numbers of 16 bits, as `random_bits` of csrc/operations.h does."""
    words ^= (words >> 16) & (2**16 - 1)
    words.mul_(_RANDOM_STEPS[0])
    words ^= (words >> 15) & (2**17 - 1)
    words.mul_(_RANDOM_STEPS[1])
    words ^= (words >> 15) & (2**17 - 1)
    return words.bitwise_right_shift_(16).bitwise_and_(2**16 - 1)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor as a flat view, in the order in which they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


@functools.cache
def _indices(length: int, device: torch.device) -> Tensor:
    """Returns int32 numbers that are added to the bits of elements, by index, before hashing."""
    return torch.arange(length, dtype=torch.int32, device=device).mul_(_INDEX_STEP)


def _by_dtype(*lists: list[Tensor]) -> Iterator[Sequence[list[Tensor]]]:
    """Yields the lists in groups by the dtype in the first list, as torch's multi-tensor kernels require."""
    dtypes = {tensor.dtype for tensor in lists[0]}
    if len(dtypes) == 1:
        yield lists
        return
    for dtype in dtypes:
        rows = [row for row in zip(*lists, strict=True) if row[0].dtype is dtype]
        yield [list(column) for column in zip(*rows, strict=True)]
