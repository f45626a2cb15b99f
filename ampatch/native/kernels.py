"""Gradient work on lists of tensors, and the update of the scale: the only file that chooses who does it.

There are two who can: the operators of the compiled extension (`csrc/`, `torch.ops.ampatch`), where one is built; and
torch's own multi-tensor kernels. Every function works on the devices the tensors are on and reads nothing back to the
host.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

from ampatch.errors import KernelError
from ampatch.native import calls, extension, extension_kernels, torch_kernels
from ampatch.native.selection import Chosen, Selection
from ampatch.opt_levels import HALVES

logger = logging.getLogger("ampatch")

CHOICES = ("auto", "extension", "torch")
_VARIABLE = "AMPATCH_KERNELS"

# What the extension's kernels work on. Subclasses of tensors have ways of their own, and are left to torch.
_TYPES = frozenset({Tensor, nn.Parameter})
_DTYPES = frozenset({*HALVES, torch.float32})

# Asked of all tensors of a list by `map`, since a line of Python for each costs more than the kernels do.
_KIND = operator.attrgetter("dtype", "device", "layout")
_DTYPE = operator.attrgetter("dtype")
_IS_RECORDED = operator.attrgetter("requires_grad")


def _choose(asked: str) -> Chosen[extension.Library]:
    torchs = "torch's own multi-tensor kernels"
    if asked == "torch":
        return Chosen(None, f"{torchs}, as {_VARIABLE}=torch asks for")
    library = extension.loaded() or extension.find()
    if library is None:
        if asked == "extension":
            raise KernelError(
                f"{_VARIABLE}=extension asks for the compiled extension, and there is none of this version of ampatch "
                f"for this machine in {extension.cache_directory()}. Type `ampatch build`; or leave the variable out, "
                "to go on with torch's own kernels."
            )
        return Chosen(
            None,
            f"{torchs}, as there is no compiled extension of this version for this machine in "
            f"{extension.cache_directory()}: at O2 they pass over gradients three times, where the extension does so "
            "once. `ampatch build` compiles it",
        )
    try:
        extension.load(library)
    except KernelError as error:
        if asked == "extension":
            raise
        return Chosen(None, f"{torchs}, as {error}")
    return Chosen(library, f"the compiled extension {library.path}")


_selection = Selection(_VARIABLE, CHOICES, _choose, "Gradients are unscaled by %s.")


def select(choice: str | None = None) -> None:
    """Chooses the kernels that this process uses from now on.

    Args:
        choice: "extension", "torch", or "auto", which is the extension where there is one; None: what the environment
            variable AMPATCH_KERNELS says, or "auto".

    Raises:
        OptionError: it is none of these.
        KernelError: the extension was asked for, and there is none that can be loaded.
    """
    _selection.select(choice)
    _runs_on.cache_clear()


def prepare() -> None:
    """Chooses now, and not at first use, so that a choice which cannot be had is an error before anything is changed.

    Raises:
        OptionError: AMPATCH_KERNELS has no such value.
        KernelError: it asks for an extension that is not there.
    """
    _selection.current()


def in_use() -> str:
    """Returns which kernels do the work here, and why, in a sentence for people."""
    return _selection.current().why


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Returns whether the extension is in use, and does its work on a device."""
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
            "The compiled extension %s does not run on %s: %s. torch's own kernels do the work there. Type `ampatch "
            "build --force` on this machine.",
            library.path,
            torch.cuda.get_device_name(device),
            fault,
        )
    return fault is None


def _try_out(device: torch.device) -> None:
    """Runs an operator on a GPU, whose driver may be older than the compiler's libraries want it: RuntimeError then."""
    one = torch.ones((), dtype=torch.float32, device=device)
    found_inf = torch.zeros_like(one)
    extension_kernels.unscale_([torch.ones_like(one)], one, found_inf)


# Gradients


def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies every tensor by a scalar tensor in place.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        factor: 0-dimensional float32.
    """
    for group in _by_kind(grads):
        torch._foreach_mul_(group, _moved(factor, group[0].device))


def unscale_(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grads *= inv_scale`` in place, and ``found_inf = 1`` if any element was not finite; it is never reset.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device; sparse ones are coalesced.
        inv_scale: 0-dimensional float32.
        found_inf: 0-dimensional float32.
    """
    grads = list(grads)
    if not grads:  # where all are masters'
        return
    device = _ordinary_device(grads, may_be_recorded=False)
    if device is not None:
        _unscale(_operators_on(device), device, grads, inv_scale, found_inf)
        return
    plain: list[Tensor] = []
    recorded: list[Tensor] = []
    for grad in grads:
        if grad.is_sparse and not grad.is_coalesced():
            grad.copy_(grad.coalesce())  # two entries of one index may overflow in their sum
        # Gradients of backward(create_graph=True) have a graph of their own, which this multiplication has to be in.
        if grad.requires_grad:
            recorded.append(grad)
        else:
            plain.append(values_of(grad))
    for operators, device, (group,) in _by_implementation(plain):
        _unscale(operators, device, group, inv_scale, found_inf)
    for grad in recorded:
        finite = values_of(grad.detach()).isfinite().all()
        found_inf.masked_fill_(~finite.to(found_inf.device, non_blocking=True), 1)
    multiply_(recorded, inv_scale)


def _unscale(
    operators: ModuleType, device: torch.device, grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor
) -> None:
    with _On(device, found_inf, torch.maximum) as flag:
        operators.unscale_(grads, _moved(inv_scale, device), flag)


def unscale_by_(grads: list[Tensor], scale: Tensor) -> Tensor:
    """Divides gradients by a scale in place: `unscale_` by its reciprocal.

    Args:
        grads: as of `unscale_`.
        scale: 0-dimensional float32.

    Returns:
        The verdict: 0-dimensional float32 beside the scale, 1 if any element was not finite, else 0.
    """
    found_inf = torch.zeros_like(scale)
    if not grads:  # where all are masters'
        return found_inf
    inv_scale = scale.reciprocal()
    device = _ordinary_device(grads, may_be_recorded=False)
    if device == scale.device:  # as in nearly every step, which does without the frames of what follows
        _operators_on(device).unscale_(grads, inv_scale, found_inf)
    else:
        unscale_(grads, inv_scale, found_inf)
    return found_inf


def unscale_copy(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """``master_grads = grads * inv_scale``, and ``found_inf`` as in `unscale_`.

    Args:
        grads: dense tensors of float16, bfloat16 or float32, of any shape and device.
        master_grads: as many of float32, of the same shapes and devices; what they hold does not count.
        inv_scale: 0-dimensional float32.
        found_inf: 0-dimensional float32.
        write_back: whether ``grads`` then become the master gradients, rounded.
    """
    for operators, device, (narrow, wide) in _by_implementation(grads, master_grads):
        with _On(device, found_inf, torch.maximum) as flag:
            operators.unscale_copy(narrow, wide, _moved(inv_scale, device), flag, write_back)


def unscale_add(
    grads: list[Tensor], master_grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """``master_grads += grads * inv_scale``, and for the rest as `unscale_copy`.

    Only ``grads`` are looked at: ``found_inf`` is the verdict on what is added, and not on what was there before.
    """
    for operators, device, (narrow, wide) in _by_implementation(grads, master_grads):
        with _On(device, found_inf, torch.maximum) as flag:
            operators.unscale_add(narrow, wide, _moved(inv_scale, device), flag, write_back)


def show(master_grads: list[Tensor], grads: list[Tensor]) -> None:
    """``grads = master_grads``, rounded, but that nothing becomes zero which is not zero.

    Args:
        master_grads: dense tensors of float32.
        grads: as many of float16, bfloat16 or float32, of the same shapes and devices.
    """
    for operators, _, (narrow, wide) in _by_implementation(grads, master_grads):
        operators.show(wide, narrow)


def fingerprints(halves: list[Tensor]) -> Tensor:
    """Returns a float64 number for each tensor, which differs if elements differ, but for one case in 2**32.

    Args:
        halves: dense tensors of float16, bfloat16 or float32, of one device; one or more, none of them empty.
    """
    found = torch.empty(len(halves), dtype=torch.float64, device=halves[0].device)
    _implementation_of_all(halves).fingerprint(halves, found)
    return found


def follow(halves: list[Tensor], masters: list[Tensor], before: Tensor, now: Tensor, *, of_gradients: bool) -> None:
    """``masters = halves`` in the elements in which these are not the masters', rounded, of some tensors.

    Where half and master are the same but for the rounding the master keeps its bits.

    Args:
        halves: as of `fingerprints`.
        masters: as many of float32, of the same shapes and device.
        before: of each, what `fingerprints` gave when it was the master's.
        now: what it gives now; a tensor for which the two are the same is left alone.
        of_gradients: whether they are rounded as `show` does it.
    """
    _implementation_of_all(halves).follow(halves, masters, before, now, of_gradients)


def follow_by_value(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """``wide = narrow`` in the elements in which these are not ``wide``, rounded; the others keep their bits.

    Args:
        narrow: dense floating tensors.
        wide: as many of a type that holds theirs, of the same shapes and devices.
    """
    if all(tensor.dtype is torch.float32 for tensor in wide):
        for operators, _, (halves, masters) in _by_implementation(narrow, wide):
            operators.follow_by_value(halves, masters)
    else:
        torch_kernels.follow_by_value(narrow, wide)


def found_inf_norm(grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """``sum_of_squares += sum((grads * inv_scale) ** 2)``, and ``found_inf`` as in `unscale_`; reads once.

    The extension squares in float32, as torch's norms of float32 do: what is above 1.8e19 counts as infinite, and what
    is below 1e-19 is lost by and by.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        inv_scale: 0-dimensional float32.
        found_inf: 0-dimensional float32.
        sum_of_squares: 0-dimensional float64, on the device of ``found_inf``.
    """
    values = [values_of(_summed(grad.detach())) for grad in grads]
    for operators, device, (group,) in _by_implementation(values):
        with _On(device, found_inf, torch.maximum) as flag, _On(device, sum_of_squares, torch.add) as total:
            operators.found_inf_norm(group, _moved(inv_scale, device), flag, total)


def zero_after_overflow_(grads: Iterable[Tensor], found_inf: Tensor) -> None:
    """Zeroes every tensor in place if ``found_inf`` is not 0.

    Args:
        grads: floating or complex tensors of any shape, layout, dtype and device.
        found_inf: 0-dimensional float32.
    """
    for group in _by_kind(grads):
        overflow = found_inf.to(group[0].device, non_blocking=True) != 0
        for grad in group:
            grad.masked_fill_(overflow, 0)


# Weights


def copy_to_half(masters: list[Tensor], halves: list[Tensor]) -> None:
    """``halves = masters``, rounded; in a ``torch.no_grad()`` block, where these are parameters.

    Args:
        masters: dense tensors of float32.
        halves: as many of float16 or bfloat16, of the same shapes and devices.
    """
    for operators, _, (narrow, wide) in _by_implementation(halves, masters):
        operators.copy_to_half(wide, narrow)


# The scale


def update_scale(
    scale: Tensor,
    unskipped: Tensor,
    hysteresis_left: Tensor,
    found_inf: Tensor,
    *,
    growth: float,
    backoff: float,
    window: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    """Makes the transition of `ampatch.scaling.loss_scaler.next_state`, in place on the device.

    Args:
        scale: 0-dimensional float32.
        unskipped: 0-dimensional int32, clean steps since the last change.
        hysteresis_left: 0-dimensional int32.
        found_inf: 0-dimensional float32, not 0 after an overflow.
        growth: what the scale is multiplied by when it grows.
        backoff: what it is multiplied by when it backs off.
        window: clean steps before it grows.
        hysteresis: overflows before it backs off.
        floor: the least scale.
        ceiling: the greatest; may be inf, and the scale then grows as long as it stays finite.
    """
    _operators_on(scale.device).update_scale(
        scale, unskipped, hysteresis_left, found_inf, growth, backoff, window, hysteresis, floor, ceiling
    )


# What the lists are made of


def _summed(grad: Tensor) -> Tensor:
    """Returns a gradient with one value an element: sums a sparse one's entries of one index, at least in float32."""
    if not grad.is_sparse:
        return grad
    return (grad.to(torch.float32) if grad.dtype in HALVES else grad).coalesce()


def values_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as a dense, real one that shares its memory; of a DTensor, those of this rank."""
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:  # compressed rows or columns
        tensor = tensor.values()
    if tensor.is_complex():
        # A conjugated view has no real view, and the tensor that it conjugates will do.
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor


def _ordinary_device(tensors: list[Tensor], *, may_be_recorded: bool = True) -> torch.device | None:
    """Returns the device of a list of dense tensors of usual types, if all are on one, as in most lists; else None.

    Those are their own `values_of`, and one implementation does for all of them.

    Args:
        tensors: of any kind.
        may_be_recorded: whether they may require gradients.
    """
    compiled = calls.compiled()
    if compiled is not None:
        return compiled.ordinary_device(tensors, may_be_recorded)  # type: ignore[no-any-return]
    if not _TYPES.issuperset(map(type, tensors)) or (not may_be_recorded and any(map(_IS_RECORDED, tensors))):
        return None
    kinds = set(map(_KIND, tensors))
    devices = {device for _, device, _ in kinds}
    is_usual = all(dtype in _DTYPES and layout is torch.strided for dtype, _, layout in kinds)
    return devices.pop() if len(devices) == 1 and is_usual and not any(map(Tensor.is_neg, tensors)) else None


def _by_kind(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Returns the values of tensors in groups of one device and dtype, for torch's multi-tensor kernels."""
    tensors = list(tensors)
    if len(set(map(_DTYPE, tensors))) == 1 and _ordinary_device(tensors) is not None:
        return [tensors]
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = values_of(tensor)
        groups.setdefault((values.device, values.dtype), []).append(values)
    return groups.values()


def _by_implementation(*lists: list[Tensor]) -> Iterator[tuple[ModuleType, torch.device, Sequence[list[Tensor]]]]:
    """Lists of equal length in as few groups as can be: of one device and, by the first list, one implementation.

    Yields:
        What has the operators, the device, and the lists.
    """
    device = _ordinary_device(lists[0])
    if device is not None:
        yield _operators_on(device), device, lists
        return
    kinds = [(type(tensor), tensor.dtype, tensor.device, tensor.is_neg()) for tensor in lists[0]]
    where = {kind: (_implementation(*kind), kind[2]) for kind in set(kinds)}
    groups: dict[tuple[ModuleType, torch.device], tuple[list[Tensor], ...]] = {}
    for kind, row in zip(kinds, zip(*lists, strict=True), strict=True):
        group = groups.setdefault(where[kind], tuple([] for _ in row))
        for column, tensor in zip(group, row, strict=True):
            column.append(tensor)
    for (operators, device), group in groups.items():
        yield operators, device, group


def _implementation(kind: type, dtype: torch.dtype, device: torch.device, is_negated: bool) -> ModuleType:
    """Returns what has the operators for tensors of a class, and so on."""
    is_ordinary = kind in _TYPES and dtype in _DTYPES and not is_negated
    return _operators_on(device) if is_ordinary else torch_kernels


def _implementation_of_all(tensors: list[Tensor]) -> ModuleType:
    """Returns what has the operators for tensors that are handed over in one list, being of one device."""
    device = _ordinary_device(tensors)
    return torch_kernels if device is None else _operators_on(device)


def _operators_on(device: torch.device) -> ModuleType:
    """Returns what has the operators for ordinary tensors on a device."""
    return extension_kernels if _runs_on(device) else torch_kernels


def _moved(number: Tensor, device: torch.device) -> Tensor:
    """Returns a 0-dimensional tensor on a device; itself if it lies there."""
    return number if number.device == device else number.to(device, non_blocking=True)


class _On:
    """What stands for a 0-dimensional result on a device; where that lies elsewhere, they are combined at the end."""

    __slots__ = ("_combine", "_result", "_there")

    def __init__(self, device: torch.device, result: Tensor, combine: Callable[..., Tensor]) -> None:
        self._result = result
        self._there = result if result.device == device else torch.zeros_like(result, device=device)
        self._combine = combine

    def __enter__(self) -> Tensor:
        return self._there

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._there is not self._result:
            self._combine(self._result, _moved(self._there, self._result.device), out=self._result)
