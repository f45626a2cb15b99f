"""The operators of the compiled extension, with version counters kept up to date.

Each calls the operator of its name in `torch.ops.ampatch`, with the arguments of the function of that name in
`ampatch.native.torch_kernels`; csrc/operators.cpp has the schemas. Then it increments the version counters of the
tensors it wrote, so that autograd and the cache of casts notice the writes: torch does so for its own operators only.
`copy_edits` increments none, because a change of version means that user code wrote to the master. Must not choose an
implementation: `ampatch.native.kernels` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


def _operator(name: str, written: int | None = None) -> Callable[..., None]:
    """Returns an operator of the extension.

    Args:
        name: its name in `torch.ops.ampatch`, which `ampatch.native.extension` loads later.
        written: position of the list of tensors that it writes and whose version counters are incremented.
    """

    def call(*arguments: Any) -> None:
        getattr(torch.ops.ampatch, name)(*arguments)
        if written is not None:
            increment_version(arguments[written])

    call.__name__ = call.__qualname__ = name
    return call


def _unless_empty(operator: Callable[..., None]) -> Callable[..., None]:
    """Returns an operator that accepts empty lists: the dispatcher picks a kernel by the tensors in them."""

    def call(first: list[Tensor], second: list[Tensor]) -> None:
        if first:
            operator(first, second)

    return call


unscale_ = _operator("unscale_", 0)
found_inf_norm = _operator("found_inf_norm")  # squares in float32, and torch_kernels in float64
copy_to_half = _unless_empty(_operator("copy_to_half", 1))
copy_to_half_grads = _unless_empty(_operator("copy_to_half_grads", 1))
fingerprint = _operator("fingerprint")  # its numbers differ from those of torch_kernels
copy_edits = _operator("copy_edits")

_unscale_copy = _operator("unscale_copy", 1)
_unscale_add = _operator("unscale_add", 1)


def unscale_copy(grads: list[Tensor], *others: Any) -> None:
    """Calls the operator, which also writes ``grads`` if its last argument ``write_back`` is true."""
    _unscale_copy(grads, *others)
    if others[-1]:
        increment_version(grads)


def unscale_add(grads: list[Tensor], *others: Any) -> None:
    """Calls the operator, which also writes ``grads`` if its last argument ``write_back`` is true."""
    _unscale_add(grads, *others)
    if others[-1]:
        increment_version(grads)


def update_scale(*arguments: Any) -> None:
    """Calls the operator, which writes its first three arguments."""
    torch.ops.ampatch.update_scale(*arguments)
    increment_version(arguments[:3])


def copy_differing(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """Does what `ampatch.native.torch_kernels.copy_differing` does, by `copy_edits`."""
    some = [index for index, half in enumerate(narrow) if half.numel()]
    if some:
        numbers = torch.zeros(len(some), dtype=torch.float64, device=narrow[0].device)
        # Different fingerprints: `copy_edits` treats every tensor as changed.
        copy_edits([narrow[index] for index in some], [wide[index] for index in some], numbers, numbers + 1, False)
