"""The operators of the compiled extension, with version counters kept up to date.

Each calls the operator of its name in `torch.ops.ampatch`, with the arguments of the function of that name in
`ampatch.native.torch_kernels`; csrc/operators.cpp has the schemas. It also increments the version counters of the
tensors that the operator writes, because torch does so for its own operators only. Autograd and the cache of casts
notice the writes by these counters. `copy_edits` increments none: a change of version means that user code wrote to the
master. Must not choose an implementation: `ampatch.native.kernels` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ampatch.native import calls


def _operator(name: str, lists: str, written: str = "") -> Callable[..., None]:
    """Returns a function that calls an operator, with addresses in place of tensors if the compiled calls accept all.

    Args:
        name: its name in `torch.ops.ampatch`, which `ampatch.native.extension` loads.
        lists: the lists that it takes before other arguments, in this order: "narrow" for half or float32 tensors,
            "wide" for float32 tensors, "third" for int16 tensors or numbers.
        written: those that it writes, whose version counters are incremented.
    """
    kinds, written_kinds = lists.split(), written.split()

    def call(*arguments: Any) -> None:
        given, others = arguments[: len(kinds)], arguments[len(kinds) :]
        if not any(given):  # the dispatcher picks a kernel by the tensors
            return
        compiled, by_kind = calls.compiled(), dict(zip(kinds, given, strict=True))
        more = None if compiled is None else compiled.pieces(*map(by_kind.get, ("narrow", "wide", "third")))
        if more is None:
            _found(name)(*arguments)
        else:  # the first tensors show the device; the lists keep all tensors alive
            _found(name)(*(tensors[:1] for tensors in given), *others, more)
        for kind in written_kinds:
            _count_writes(by_kind[kind])

    return call


@functools.cache
def _found(name: str) -> Any:
    return getattr(torch.ops.ampatch, name)


def _count_writes(tensors: list[Tensor]) -> None:
    """Increments the version counters of tensors."""
    compiled = calls.compiled()
    (increment_version if compiled is None else compiled.increment_versions)(tensors)


def _unscale_into(name: str) -> Callable[..., None]:
    """Returns the function of an operator that writes the narrow tensors too, if its last argument is true."""
    into, back_too = _operator(name, "narrow wide", "wide"), _operator(name, "narrow wide", "wide narrow")
    return lambda *arguments: (back_too if arguments[-1] else into)(*arguments)


unscale_ = _operator("unscale_", "narrow", "narrow")
unscale_copy = _unscale_into("unscale_copy")
unscale_add = _unscale_into("unscale_add")
found_inf_norm = _operator("found_inf_norm", "narrow")  # squares in float32; `torch_kernels` squares in float64
copy_to_half = _operator("copy_to_half", "wide narrow", "narrow")
copy_to_half_grads = _operator("copy_to_half_grads", "wide narrow", "narrow")
fingerprint = _operator("fingerprint", "narrow")  # its numbers differ from those of `torch_kernels`
copy_edits = _operator("copy_edits", "narrow wide")
join = _operator("join", "narrow third wide", "wide")
split = _operator("split", "wide narrow third", "narrow third")
round_stochastically = _operator("round_stochastically", "wide narrow third", "narrow")


def clip_factor(*arguments: Any) -> None:
    """Calls the operator, which writes ``norm`` and ``factor``: new tensors, whose versions no code has read."""
    _found("clip_factor")(*arguments)


def update_scale(*arguments: Any) -> None:
    """Calls the operator, which writes its first three arguments."""
    _found("update_scale")(*arguments)
    _count_writes(list(arguments[:3]))


def copy_differing(narrow: list[Tensor], wide: list[Tensor]) -> None:
    """Does what `ampatch.native.torch_kernels.copy_differing` does, by `copy_edits`."""
    some = [index for index, half in enumerate(narrow) if half.numel()]
    if some:
        numbers = torch.zeros(len(some), dtype=torch.float64, device=narrow[0].device)
        # The fingerprints differ, so `copy_edits` treats every tensor as changed.
        copy_edits([narrow[index] for index in some], [wide[index] for index in some], numbers, numbers + 1, False)
