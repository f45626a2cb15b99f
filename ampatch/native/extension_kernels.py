"""The operators of the compiled extension, with version counters kept up to date.

Each calls the operator of its name in `torch.ops.ampatch`, with the arguments of the function of that name in
`ampatch.native.torch_kernels`; csrc/operators.cpp has the schemas. It also increments the version counters of the
tensors that the operator writes, because torch does so for its own operators only. Autograd and the cache of casts
notice the writes by these counters. `copy_edits` increments none: a change of version means that user code wrote to the
master. Must not choose an implementation: `ampatch.native.kernels` does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ampatch.native import calls

_Tensors = list[Tensor]

# The order in which operators take their lists, if it is not: narrow, wide, third.
_ORDERS = {
    "copy_to_half": (1, 0),
    "copy_to_half_grads": (1, 0),
    "join": (0, 2, 1),
    "split": (1, 0, 2),
    "round_stochastically": (1, 0, 2),
}


def _run(
    name: str,
    narrow: _Tensors,
    wide: _Tensors | None,
    written: Sequence[_Tensors],
    *others: Any,
    third: list[Any] | None = None,
) -> None:
    """Calls an operator, with addresses in place of tensors if the compiled calls accept all tensors.

    Args:
        name: its name in `torch.ops.ampatch`, which `ampatch.native.extension` loads.
        narrow: half or float32 tensors.
        wide: float32 tensors; None if the operator takes one list only.
        written: the lists that it writes and whose version counters are incremented.
        others: its other arguments.
        third: int16 tensors, or numbers; None if the operator takes no third list.
    """
    if not (narrow or wide):  # the dispatcher picks a kernel by the tensors
        return
    operator, compiled = _operator(name), calls.compiled()
    lists = [each for each in (narrow, wide, third) if each is not None]
    lists = [lists[place] for place in _ORDERS.get(name, range(len(lists)))]
    more = None if compiled is None else compiled.pieces(narrow, wide, third)
    if more is None:
        operator(*lists, *others)
    else:  # the first tensors show the device; the lists keep all tensors alive
        operator(*(tensors[:1] for tensors in lists), *others, more)
    for tensors in written:
        _count_writes(tensors)


@functools.cache
def _operator(name: str) -> Any:
    return getattr(torch.ops.ampatch, name)


def _count_writes(tensors: _Tensors) -> None:
    """Increments the version counters of tensors."""
    compiled = calls.compiled()
    (increment_version if compiled is None else compiled.increment_versions)(tensors)


def unscale_(grads: _Tensors, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Calls the operator, which writes ``grads``."""
    _run("unscale_", grads, None, [grads], inv_scale, found_inf)


def _unscale_into(
    name: str, grads: _Tensors, master_grads: _Tensors, inv_scale: Tensor, found_inf: Tensor, write_back: bool
) -> None:
    """Calls an operator that writes ``master_grads``, and ``grads`` if ``write_back`` is true."""
    written = [master_grads, grads] if write_back else [master_grads]
    _run(name, grads, master_grads, written, inv_scale, found_inf, write_back)


unscale_copy = functools.partial(_unscale_into, "unscale_copy")
unscale_add = functools.partial(_unscale_into, "unscale_add")


def found_inf_norm(grads: _Tensors, inv_scale: Tensor, found_inf: Tensor, sum_of_squares: Tensor) -> None:
    """Calls the operator, which squares in float32; `torch_kernels` squares in float64."""
    _run("found_inf_norm", grads, None, [], inv_scale, found_inf, sum_of_squares)


def clip_factor(*arguments: Any) -> None:
    """Calls the operator, which writes ``norm`` and ``factor``: new tensors, whose versions no code has read."""
    _operator("clip_factor")(*arguments)


def copy_to_half(masters: _Tensors, halves: _Tensors) -> None:
    """Calls the operator, which writes ``halves``."""
    _run("copy_to_half", halves, masters, [halves])


def copy_to_half_grads(master_grads: _Tensors, grads: _Tensors) -> None:
    """Calls the operator, which writes ``grads``."""
    _run("copy_to_half_grads", grads, master_grads, [grads])


def fingerprint(halves: _Tensors, fingerprints: Tensor) -> None:
    """Calls the operator, whose numbers differ from those of `torch_kernels`."""
    _run("fingerprint", halves, None, [], fingerprints)


def copy_edits(halves: _Tensors, masters: _Tensors, before: Tensor, now: Tensor, of_gradients: bool) -> None:
    """Calls the operator, which writes ``masters``."""
    _run("copy_edits", halves, masters, [], before, now, of_gradients)


def join(halves: _Tensors, remainders: _Tensors, fulls: _Tensors) -> None:
    """Calls the operator, which writes ``fulls``."""
    _run("join", halves, fulls, [fulls], third=remainders)


def split(fulls: _Tensors, halves: _Tensors, remainders: _Tensors) -> None:
    """Calls the operator, which writes ``halves`` and ``remainders``."""
    _run("split", halves, fulls, [halves, remainders], third=remainders)


def round_stochastically(fulls: _Tensors, halves: _Tensors, keys: list[int]) -> None:
    """Calls the operator, which writes ``halves``."""
    _run("round_stochastically", halves, fulls, [halves], third=keys)


def update_scale(*arguments: Any) -> None:
    """Calls the operator, which writes its first three arguments."""
    _operator("update_scale")(*arguments)
    _count_writes(list(arguments[:3]))


def copy_differing(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """Does what `ampatch.native.torch_kernels.copy_differing` does, by `copy_edits`."""
    some = [index for index, half in enumerate(narrow) if half.numel()]
    if some:
        numbers = torch.zeros(len(some), dtype=torch.float64, device=narrow[0].device)
        # The fingerprints differ, so `copy_edits` treats every tensor as changed.
        copy_edits([narrow[index] for index in some], [wide[index] for index in some], numbers, numbers + 1, False)
