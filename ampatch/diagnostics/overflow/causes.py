"""Finds the operator that first produced inf or NaN, and what would have kept its result finite.

Judges what a `Watch` recorded, after the fact. Must never watch or change anything itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampatch.diagnostics.recorder.operands import floating_in, with_types
from ampatch.diagnostics.recorder.records import Values, WatchedOp
from ampatch.diagnostics.recorder.watch import run_again
from ampatch.half_types import HALVES
from ampatch.torch_private.operators import CAST, tree_map_only

#: Masks are made of numbers that are greater than this; torch.finfo(torch.float32).min is 3.4e38.
_MASKED = 1e30


def origins(ops: Sequence[WatchedOp]) -> dict[int, WatchedOp]:
    """Returns the origin of each result that is not finite: the operator that made it from finite inputs.

    Inf that an operator was given on purpose, such as by ``masked_fill(mask, -inf)``, has no origin. The first operator
    that turns it into NaN or +inf is one.

    Args:
        ops: operators in the order in which they ran, with values that were read.

    Returns:
        The origins by the id of the `Values` of a result. Results whose inf is on purpose have none.
    """
    found: dict[int, WatchedOp] = {}
    origin: WatchedOp | None
    for op in ops:
        if all(values.is_finite for values in op.outputs):
            continue
        given = [values for values in op.inputs if not values.is_finite]
        if _makes_a_mask(op, given):
            continue
        # Of a tensor itself, or of the parts of which it consists.
        earlier = [found[id(each)] for values in given for each in values.results if id(each) in found]
        unwatched = [each for each in given if not each.results and not each.is_mask]
        if earlier:
            origin = min(earlier, key=lambda each: each.number)
        elif unwatched or not given:
            # An input that no watched operator wrote was not finite to begin with: this is where it enters.
            origin = None if not given and op.has_inf_argument else op
        else:  # inf on purpose, which an operator may turn into NaN, or beside which it may overflow
            origin = op if _adds_to(given, op.outputs) else None
        if origin is not None:
            for values in op.outputs:
                if not values.is_finite:
                    found[id(values)] = origin
    return found


def _makes_a_mask(op: WatchedOp, given: Sequence[Values]) -> bool:
    """Returns True if a cast makes -inf of a mask that consists of float32's most negative numbers."""
    is_cast = op.op_name == CAST and not given and all(values.is_mask for values in op.outputs)
    return is_cast and any((values.largest or 0) > _MASKED for values in op.inputs)


def _adds_to(given: Sequence[Values], results: Sequence[Values]) -> bool:
    """Returns True if results have NaN or +inf that no input has; masks have -inf."""
    if any(values.has_nan for values in results) and not any(values.has_nan for values in given):
        return True
    return any(values.highest == math.inf for values in results) and not any(
        values.highest == math.inf for values in given
    )


def in_float32(op: WatchedOp) -> float | None:
    """Runs an operator again on its inputs in float32.

    Returns:
        The greatest absolute value of its results, which may be inf or NaN. None if the inputs were not kept, or the
        operator cannot run in float32.
    """
    kept = op.kept_arguments
    # A random operator would advance the generator.
    if kept is None or torch.Tag.nondeterministic_seeded in op.op.tags:
        return None

    def run(*args: Any, **kwargs: Any) -> list[float]:
        norm = torch.ops.aten.linalg_vector_norm.default
        return [float(norm(each, math.inf)) for each in floating_in(op.op(*args, **kwargs))]

    # Copies: batch norm writes to its running statistics, of which its schema says nothing.
    copies = with_types(tree_map_only(Tensor, Tensor.clone, kept), dict.fromkeys(HALVES, torch.float32))
    largest = run_again(run, *copies) or []  # None for an operator of half tensors only
    return math.nan if any(map(math.isnan, largest)) else max(largest, default=None)
