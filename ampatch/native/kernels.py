"""Operators on lists of gradients and masters, and the update of the loss scale.

Alone chooses between the operators of the compiled extension (`csrc/`, `torch.ops.ampatch`) and torch's own
multi-tensor kernels. Functions work on the devices of their tensors. They must never sync with the device, except for
tensors on the CPU that need a number from a GPU.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.native import calls, extension, extension_kernels, torch_kernels
from ampatch.native.host_copy import on_device
from ampatch.native.selection import Chosen, NotBuiltError, Selection
from ampatch.torch_private import foreach
from ampatch.torch_private.tensors import reciprocal, uncoalesced_values

logger = logging.getLogger("ampatch")

CHOICES = ("auto", "extension", "torch")
_VARIABLE = "AMPATCH_KERNELS"

# Types and dtypes that the extension's kernels accept. torch's kernels process other subclasses of Tensor, which may
# override operators.
_TYPES = frozenset({Tensor, nn.Parameter})
_DTYPES = frozenset({*HALVES, torch.float32})

# For `map` over all tensors of a list, because a line of Python for each tensor would cost more than the kernels.
_KIND = operator.attrgetter("dtype", "device", "layout")
_DTYPE = operator.attrgetter("dtype")
_ADDRESS = Tensor.data_ptr
_IS_RECORDED = operator.attrgetter("requires_grad")


def _load() -> Chosen[extension.Library]:
    library = extension.loaded() or extension.find()
    if library is None:
        where = extension.cache_directory()
        raise NotBuiltError(f"there is no compiled extension of this version for this machine in {where}")
    extension.load(library)
    return Chosen(library, f"the compiled extension {library.path}")


_selection = Selection(_VARIABLE, CHOICES, "torch's own multi-tensor kernels", _load, "Gradients are unscaled by %s.")


def select(choice: str | None = None) -> None:
    """Chooses the kernels that this process uses from now on.

    Args:
        choice: "extension", "torch", or "auto", which uses the extension if there is one; None for the value of the
            environment variable AMPATCH_KERNELS, "auto" by default.

    Raises:
        OptionError: the choice has another value.
        KernelError: "extension" was chosen, and no extension can be loaded.
    """
    _selection.select(choice)
    _runs_on.cache_clear()


def prepare() -> None:
    """Chooses now instead of at first use, so that an impossible choice raises before amp changes anything.

    Raises:
        OptionError: AMPATCH_KERNELS has an invalid value.
        KernelError: AMPATCH_KERNELS asks for the extension, and none can be loaded.
    """
    _selection.current()


def in_use() -> str:
    """Returns a readable sentence that says which kernels are in use here, and why."""
    return _selection.current().why


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Returns True if the extension is in use and its kernels run on a device; warns if a GPU cannot run them."""
    library = _selection.current().compiled
    if library is None or device.type == "cpu":
        return library is not None
    if device.type != "cuda" or not library.architectures:
        return False
    capability = torch.cuda.get_device_capability(device)
    fault = None
    if not library.serves(capability):
        fault = f"it has no kernels for compute capability {capability[0]}.{capability[1]}"
    else:
        try:
            _try_out(device)
        except RuntimeError as error:
            fault = str(error)
    if fault is not None:
        logger.warning(
            "The compiled extension %s does not run on %s: %s. torch's own kernels are used there. Type `ampatch "
            "build --force` on this machine.",
            library.path,
            torch.cuda.get_device_name(device),
            fault,
        )
    return fault is None


def _try_out(device: torch.device) -> None:
    """Runs an operator on a GPU; raises RuntimeError if its driver is too old for the library's CUDA version."""
    one = torch.ones((), dtype=torch.float32, device=device)
    found_inf = torch.zeros_like(one)
    extension_kernels.unscale_([torch.ones_like(one)], one, found_inf)


# Gradients


def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies every tensor by a scalar tensor in place; rounds each product once.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        factor: number to multiply by; 0-dimensional float32.
    """
    for group in _by_kind(grads):
        there, dtype = on_device(factor, group[0].device), group[0].dtype
        if dtype not in HALVES:
            # On a GPU a factor of another dtype would take a launch for each tensor (torch 2.13).
            foreach.mul_(group, there.to(dtype))
        elif torch.is_grad_enabled() and any(map(_IS_RECORDED, group)):
            for grad in group:
                grad.copy_(grad.float() * there)
        else:
            # On a GPU `_foreach_mul_` would also round the factor to half: 2**16 would be inf in float16.
            for operators, _, (some,) in _by_implementation(group):
                operators.unscale_(some, there, torch.zeros_like(there))


def unscale_(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Computes ``grads *= inv_scale`` in place; sets ``found_inf`` to 1 if any element was not finite.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device; sparse ones are coalesced.
        inv_scale: reciprocal of the loss scale; 0-dimensional float32.
        found_inf: overflow flag, which is never reset; 0-dimensional float32.
    """
    plain = list(grads)
    recorded: list[Tensor] = []
    if _ordinary_device(plain, may_require_grad=False) is None:
        for grad in plain:
            if grad.is_sparse and not grad.is_coalesced():
                grad.copy_(grad.coalesce())  # the sum of two entries of one index may overflow
        # Gradients of backward(create_graph=True) have a graph of their own, which must record this multiplication.
        recorded = [grad for grad in plain if grad.requires_grad]
        plain = [values_of(grad) for grad in plain if not grad.requires_grad]
    for operators, device, (group,) in _by_implementation(plain):
        with _ResultOn(device, found_inf, torch.maximum) as flag:
            operators.unscale_(group, on_device(inv_scale, device), flag)
    for grad in recorded:
        finite = values_of(grad.detach()).isfinite().all()
        found_inf.masked_fill_(~on_device(finite, found_inf.device), 1)
    multiply_(recorded, inv_scale)


def unscale_by_(grads: list[Tensor], scale: Tensor) -> Tensor:
    """Unscales gradients in place: `unscale_` with the reciprocal of a scale.

    Args:
        grads: tensors to unscale, as in `unscale_`.
        scale: loss scale; 0-dimensional float32.

    Returns:
        Overflow flag on the device of the scale, 0-dimensional float32: 1 if any element was not finite, else 0.
    """
    found_inf = torch.zeros_like(scale)
    if not grads:  # all gradients belong to masters
        return found_inf
    inv_scale = reciprocal(scale)
    device = _ordinary_device(grads, may_require_grad=False)
    if device == scale.device:  # nearly every step: saves the Python frames of `unscale_`
        _operators_on(device).unscale_(grads, inv_scale, found_inf)
    else:
        unscale_(grads, inv_scale, found_inf)
    return found_inf


def float32_like(tensors: list[Tensor]) -> list[Tensor]:
    """Returns new float32 tensors, one like each dense tensor of a list, without values."""
    compiled = calls.compiled()
    found: list[Tensor] | None = None if compiled is None else compiled.float32_like(tensors)
    return [torch.empty_like(each, dtype=torch.float32) for each in tensors] if found is None else found


def unscale_copy(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Computes ``master_grads = grads * inv_scale``; sets ``found_inf`` as `unscale_` does.

    Args:
        grads: dense tensors of float16, bfloat16 or float32, of any shape and device.
        master_grads: float32 tensors of the same number, shapes and devices; their values are overwritten unread.
        inv_scale: reciprocal of the loss scale; 0-dimensional float32.
        found_inf: overflow flag; 0-dimensional float32.
        write_back: True to copy the results back to ``grads``, as `copy_to_half_grads` does. If several of these share
            memory, all are read before the first is written.
    """
    _unscale_into("unscale_copy", grads, master_grads, inv_scale, found_inf, write_back)


def unscale_add(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Computes ``master_grads += grads * inv_scale``; otherwise like `unscale_copy`.

    ``found_inf`` reports overflows in ``grads`` only, not in the earlier values of ``master_grads``.
    """
    _unscale_into("unscale_add", grads, master_grads, inv_scale, found_inf, write_back)


def _unscale_into(
    name: str, grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    # If gradients share memory, a kernel might read one after it has written to another.
    are_apart = not write_back or len(set(map(_ADDRESS, grads))) == len(grads)
    for operators, device, (narrow, wide) in _by_implementation(grads, master_grads):
        with _ResultOn(device, found_inf, torch.maximum) as flag:
            getattr(operators, name)(narrow, wide, on_device(inv_scale, device), flag, write_back and are_apart)
    if not are_apart:
        copy_to_half_grads(master_grads, grads)


def copy_to_half_grads(master_grads: list[Tensor], grads: list[Tensor]) -> None:
    """Copies ``master_grads`` to ``grads``, rounded; nonzero elements stay nonzero instead of underflowing.

    Args:
        master_grads: dense float32 tensors.
        grads: tensors of float16, bfloat16 or float32, of the same number, shapes and devices.
    """
    for operators, _, (narrow, wide) in _by_implementation(grads, master_grads):
        operators.copy_to_half_grads(wide, narrow)


def fingerprints(halves: list[Tensor]) -> Tensor:
    """Returns a hash of the elements of each tensor, which shows whether the tensor was changed.

    A change of a single element always changes the hash; other changes leave it the same in one case of 2**32.

    Args:
        halves: one or more dense tensors of float16, bfloat16 or float32 on one device; none is empty.

    Returns:
        1-dimensional float64, one element per tensor.
    """
    found = torch.empty(len(halves), dtype=torch.float64, device=halves[0].device)
    _implementation_of_all(halves).fingerprint(halves, found)
    return found


def copy_edits(halves: list[Tensor], masters: list[Tensor], before: Tensor, now: Tensor, *, of_gradients: bool) -> None:
    """Copies elements that were edited from ``halves`` to ``masters``, in tensors whose fingerprint changed.

    An element was edited if it differs from its master rounded to the half dtype. Other elements of masters keep their
    bits.

    Args:
        halves: dense tensors of float16, bfloat16 or float32 on one device; none is empty.
        masters: float32 tensors of the same number, shapes and device.
        before: result of `fingerprints` when the halves last were the rounded masters.
        now: current result of `fingerprints`; tensors whose numbers in ``before`` and ``now`` are equal are skipped.
        of_gradients: True to round masters as `copy_to_half_grads` does.
    """
    _implementation_of_all(halves).copy_edits(halves, masters, before, now, of_gradients)


def copy_differing(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """Copies elements of ``narrow`` to ``wide`` if they differ from those of ``wide`` rounded to the narrow dtype.

    Other elements of ``wide`` keep their bits.

    Args:
        narrow: dense floating tensors.
        wide: tensors of the same number, shapes and devices, of a dtype that holds all values of the narrow one.
    """
    if all(tensor.dtype is torch.float32 for tensor in wide):
        for operators, _, (halves, masters) in _by_implementation(narrow, wide):
            operators.copy_differing(halves, masters)
    else:
        torch_kernels.copy_differing(narrow, wide)


def found_inf_norm(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """Adds the sum of ``(grads * inv_scale) ** 2`` to ``sum_of_squares``; sets ``found_inf`` as `unscale_` does.

    The extension reads gradients only once. It squares in float32, as torch's norms of float32 do: unscaled elements
    above 1.8e19 make the sum infinite, and elements below 1e-19 gradually lose precision and vanish.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        inv_scale: reciprocal of the loss scale; 0-dimensional float32.
        found_inf: overflow flag; 0-dimensional float32.
        sum_of_squares: sum to add to; 0-dimensional float64, on the device of ``found_inf``.
    """
    values = list(grads)
    if _ordinary_device(values, may_require_grad=False) is None:
        values = [values_of(_coalesced(grad.detach())) for grad in values]
    for operators, device, (group,) in _by_implementation(values):
        with _ResultOn(device, found_inf, torch.maximum) as flag, _ResultOn(device, sum_of_squares, torch.add) as total:
            operators.found_inf_norm(group, on_device(inv_scale, device), flag, total)


def flag_and_squares(grads: Iterable[Tensor], device: torch.device, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Reads gradients as `found_inf_norm` does, and returns the flag and the sum of squares, both on ``device``."""
    scale = torch.full((), factor, dtype=torch.float32, device=device)
    found_inf, sum_of_squares = torch.zeros_like(scale), torch.zeros_like(scale, dtype=torch.float64)
    found_inf_norm(grads, scale, found_inf, sum_of_squares)
    return found_inf, sum_of_squares


def clip_factor(sum_of_squares: Tensor, found_inf: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Computes the factor that clips gradients, with the margin of ``torch.nn.utils.clip_grad_norm_``.

    Args:
        sum_of_squares: sum over all gradients; 0-dimensional float64.
        found_inf: overflow flag; 0-dimensional float32, on the same device.
        max_norm: norm to which gradients with a greater norm are scaled down; inf for no clipping.

    Returns:
        The norm and the factor, both 0-dimensional float32. After an overflow the factor is 1. Otherwise an inf in one
        gradient would turn all gradients into NaN.
    """
    norm, factor = torch.empty_like(found_inf), torch.empty_like(found_inf)
    _operators_on(found_inf.device).clip_factor(sum_of_squares, found_inf, norm, factor, max_norm)
    return norm, factor


def zero_after_overflow_(grads: Iterable[Tensor], found_inf: Tensor) -> None:
    """Zeroes every tensor in place if ``found_inf`` is not 0.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        found_inf: overflow flag; 0-dimensional float32.
    """
    for group in _by_kind(grads):
        overflow = on_device(found_inf, group[0].device) != 0
        for grad in group:
            grad.masked_fill_(overflow, 0)


# Weights


def copy_to_half(masters: list[Tensor], halves: list[Tensor]) -> None:
    """Copies ``masters`` to ``halves``, rounded; if these are parameters, call it under ``torch.no_grad()``.

    Args:
        masters: dense float32 tensors.
        halves: tensors of float16 or bfloat16, of the same number, shapes and devices.
    """
    for operators, _, (narrow, wide) in _by_implementation(halves, masters):
        operators.copy_to_half(wide, narrow)


def join(halves: list[Tensor], remainders: list[Tensor], fulls: list[Tensor]) -> None:
    """Writes to ``fulls`` the numbers that `split` made ``halves`` and ``remainders`` of, bit for bit.

    Args:
        halves: dense bfloat16 tensors of any shape and device.
        remainders: int16 tensors of the same number, shapes, strides and devices.
        fulls: float32 tensors of the same number, shapes, strides and devices; their values are overwritten unread.
    """
    for operators, _, lists in _by_implementation(halves, remainders, fulls):
        operators.join(*lists)


def split(fulls: list[Tensor], halves: list[Tensor], remainders: list[Tensor]) -> None:
    """Rounds ``fulls`` to ``halves``, ties away from zero, and writes to ``remainders`` what `join` needs to undo it.

    NaN becomes the quiet NaN, with a remainder of 0. If these are parameters, call it under ``torch.no_grad()``.

    Args:
        fulls: dense float32 tensors of any shape and device.
        halves: bfloat16 tensors of the same number, shapes, strides and devices.
        remainders: int16 tensors of the same number, shapes, strides and devices.
    """
    for operators, _, lists in _by_implementation(fulls, halves, remainders):
        operators.split(*lists)


def round_stochastically(fulls: list[Tensor], halves: list[Tensor], keys: list[int]) -> None:
    """Rounds ``fulls`` to one of the two nearest ``halves``, at random, so that the mean of the results is the number.

    The result depends only on the number, on its place in memory within its tensor, and on the key. Finite numbers stay
    finite. If these are parameters, call it under ``torch.no_grad()``.

    Args:
        fulls: dense float32 tensors of any shape and device.
        halves: bfloat16 tensors of the same number, shapes and devices.
        keys: a random number of 32 bits for each tensor, a new one for each call.
    """
    apart = [place for place, full in enumerate(fulls) if full.stride() != halves[place].stride()]
    if apart:  # those have gaps in memory, or another order
        fulls, given, halves = list(fulls), halves, list(halves)
        for place in apart:
            fulls[place] = fulls[place].contiguous()
            halves[place] = torch.empty_like(fulls[place], dtype=torch.bfloat16)
    for operators, _, lists in _by_implementation(fulls, halves, keys):
        operators.round_stochastically(*lists)
    for place in apart:
        given[place].copy_(halves[place])


# The scale


def update_scale(scale: Tensor, unskipped: Tensor, hysteresis_left: Tensor, found_inf: Tensor, *policy: float) -> None:
    """Updates the loss scale and its counters in place by the rules of `ampatch.scaling.loss_scaler.next_state`.

    Args:
        scale: loss scale; 0-dimensional float32.
        unskipped: number of steps without overflow since the last overflow or growth; 0-dimensional int32.
        hysteresis_left: number of overflows left before the scale backs off; 0-dimensional int32.
        found_inf: overflow flag, not 0 after an overflow; 0-dimensional float32.
        policy: growth factor, backoff factor, steps without overflow before the scale grows, overflows before it backs
            off, smallest scale, largest scale. If the last is inf, the scale stays finite.
    """
    _operators_on(scale.device).update_scale(scale, unskipped, hysteresis_left, found_inf, *policy)


# What the lists are made of


def _coalesced(grad: Tensor) -> Tensor:
    """Returns a gradient with one value per element: coalesces a sparse gradient, in float32 if it is half."""
    if not grad.is_sparse:
        return grad
    return (grad.to(torch.float32) if grad.dtype in HALVES else grad).coalesce()


def values_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as a dense real tensor that shares its memory; of a DTensor, this rank's part."""
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = uncoalesced_values(tensor)
    elif tensor.layout is not torch.strided:  # compressed rows or columns
        tensor = tensor.values()
    if tensor.is_complex():
        # A conjugated view has no real view; the tensor below it has one.
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor


def _ordinary_device(tensors: list[Tensor], *, may_require_grad: bool = True) -> torch.device | None:
    """Returns the device of a list of ordinary dense tensors, or None if they are on several or some are not ordinary.

    For such tensors `values_of` is the identity, and one implementation handles the whole list.

    Args:
        tensors: tensors of any kind.
        may_require_grad: False to return None also if a tensor requires a gradient.
    """
    compiled = calls.compiled()
    if compiled is not None:
        return compiled.ordinary_device(tensors, may_require_grad)  # type: ignore[no-any-return]
    if not _TYPES.issuperset(map(type, tensors)) or (not may_require_grad and any(map(_IS_RECORDED, tensors))):
        return None
    kinds = set(map(_KIND, tensors))
    devices = {device for _, device, _ in kinds}
    is_usual = all(dtype in _DTYPES and layout is torch.strided for dtype, _, layout in kinds)
    return devices.pop() if len(devices) == 1 and is_usual and not any(map(Tensor.is_neg, tensors)) else None


def _by_kind(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Returns the `values_of` tensors, grouped by device and dtype for torch's multi-tensor kernels."""
    tensors = list(tensors)
    if len(set(map(_DTYPE, tensors))) == 1 and _ordinary_device(tensors) is not None:
        return [tensors]
    return grouped(((values.device, values.dtype), values) for values in map(values_of, tensors)).values()


def _by_implementation(*lists: list[Any]) -> Iterator[tuple[ModuleType, torch.device, Sequence[list[Any]]]]:
    """Groups the rows of equally long lists by the device and implementation of the tensor in the first list.

    Yields:
        Module with the operators, device, and the lists of one group.
    """
    device = _ordinary_device(lists[0])
    if device is not None:
        yield _operators_on(device), device, lists
        return
    kinds = [(type(tensor), tensor.dtype, tensor.device, tensor.is_neg()) for tensor in lists[0]]
    where = {kind: (_implementation(*kind), kind[2]) for kind in set(kinds)}
    groups: dict[tuple[ModuleType, torch.device], tuple[list[Any], ...]] = {}
    for kind, row in zip(kinds, zip(*lists, strict=True), strict=True):
        group = groups.setdefault(where[kind], tuple([] for _ in row))
        for column, tensor in zip(group, row, strict=True):
            column.append(tensor)
    for (operators, device), group in groups.items():
        yield operators, device, group


def _implementation(kind: type, dtype: torch.dtype, device: torch.device, is_negated: bool) -> ModuleType:
    """Returns the module with the operators for tensors of this type, dtype and device."""
    is_ordinary = kind in _TYPES and dtype in _DTYPES and not is_negated
    return _operators_on(device) if is_ordinary else torch_kernels


def _implementation_of_all(tensors: list[Tensor]) -> ModuleType:
    """Returns the module with operators for all tensors of a list, which are on one device."""
    device = _ordinary_device(tensors)
    return torch_kernels if device is None else _operators_on(device)


def _operators_on(device: torch.device) -> ModuleType:
    """Returns the module with the operators for ordinary tensors on a device."""
    return extension_kernels if _runs_on(device) else torch_kernels


class _ResultOn:
    """Context manager that gives a 0-dimensional result on ``device``; on exit merges it into one on another device."""

    __slots__ = ("_combine", "_result", "_there")

    def __init__(self, device: torch.device, result: Tensor, combine: Callable[..., Tensor]) -> None:
        self._result = result
        self._there = result if result.device == device else torch.zeros_like(result, device=device)
        self._combine = combine

    def __enter__(self) -> Tensor:
        return self._there

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._there is not self._result:
            self._combine(self._result, on_device(self._there, self._result.device), out=self._result)
