"""The calls of two watched steps: matches them, and measures how far the results of each pair are apart.

Owns the noise that rounding explains. Must never change a tensor of the two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ampatch.diagnostics.compare.result import FLUSHED_SHARE, ComparedRow
from ampatch.diagnostics.overflow.examiner import Examiner
from ampatch.diagnostics.overflow.trace import NamedOp
from ampatch.diagnostics.recorder.operands import floating_in
from ampatch.diagnostics.recorder.recorder import paused
from ampatch.diagnostics.recorder.records import WatchedOp
from ampatch.diagnostics.recorder.watch import Watch, measured, run_again
from ampatch.diagnostics.trial_steps.steps import flushed_of, relative
from ampatch.grouping import grouped
from ampatch.half_types import needs_scale
from ampatch.opt_levels import dtype_name
from ampatch.torch_private.operators import CAST, tree_flatten, tree_unflatten

#: Errors within this multiple of the unit roundoff are rounding. An operator whose two inputs and result are rounded
#: has an error of 0.7 units in the 2-norm, and sums that cancel a little have some units.
_ROUNDINGS = 4.0

#: The share of its digits that a itself has lost where an error says nothing about b.
_LOST = 0.05

#: Operators between a call that flushes elements to zero and one that shows it.
_STEPS_BACK = 3

#: Masks are made of a type's most negative number, to which scores may have been added, or of -inf.
_MASK = -1e30
_HALF_MASK = 0.9 * torch.finfo(torch.float16).min


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operator of a step in the user's terms.

    Attributes:
        op: the operator.
        named: its names.
        depth: the greatest number of roundings to half on a way from the inputs of the step to its results.
    """

    op: WatchedOp
    named: NamedOp
    depth: int

    @property
    def function(self) -> tuple[Hashable, ...]:
        """The key by which two steps match calls of one function, or its casts, in one module from one line."""
        named = self.named
        return self.op.direction, named.module, named.function, named.file, named.line, self.is_cast

    @property
    def is_cast(self) -> bool:
        """True for casts, which amp inserts."""
        return self.op.op_name == CAST

    @property
    def is_sum(self) -> bool:
        """True for sums in a backward pass: the engine adds up gradients in the order in which they arrive."""
        return self.op.is_backward and self.op.op_name in ("add", "add_")

    @property
    def type(self) -> str:
        """The type of the first result."""
        return dtype_name(self.op.results[0].dtype) if self.op.results else ""


class Pair(NamedTuple):
    """A call of a and its counterpart in b; None where a step has none.

    ``results`` is the number of results to compare. In a forward pass it is 1, since further results are statistics;
    for two different operators it is 1, too.
    """

    a: Call | None
    b: Call | None
    results: int = 0


def calls_of(watch: Watch, examiner: Examiner) -> list[Call]:
    """Returns the calls of a watched step, in the order in which they ran."""
    depths: dict[int, int] = {}
    found = []
    for op in watch.ops:
        before = max((depths.get(id(writer), 0) for writer in op.writers), default=0)
        depths[id(op)] = before + op.ran_in_half
        found.append(Call(op, examiner.named(op), depths[id(op)]))
    return found


# Matching


def matched(a: Sequence[Call], b: Sequence[Call]) -> list[Pair]:
    """Matches the calls of two steps.

    Calls of one function from one line of one module are counterparts in their order; if the shapes of their results
    differ, the sequences of shapes are aligned. A function that runs other operators in another type, such as another
    kernel of attention, has counterparts only where one result on each side has a shape.

    Returns:
        All calls of both steps, in the order of b. A call of a without a counterpart follows the pair before it.
    """
    pairs: list[Pair] = []
    # Sums have counterparts in another order.
    others = ([call for call in calls if not call.is_sum] for calls in (a, b))
    for of_a, of_b in _grouped(others, attrgetter("function")):
        if {call.named.operator for call in of_a} == {call.named.operator for call in of_b}:
            pairs += _in_step(of_a, of_b, lambda call: (call.named.operator, *_shapes(call)))
        else:
            pairs += (
                Pair(one[0], other[0], 1)
                for one, other in _grouped((of_a, of_b), lambda call: _shapes(call)[:1])
                if len(one) == len(other) == 1 and one[0].op.results
            )
    return _in_order(a, b, [*pairs, *_sums(a, b, pairs)])


def _sums(a: Sequence[Call], b: Sequence[Call], pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yields pairs of sums of the same gradients, in whatever order they are added."""
    numbers = {id(call.op): number for number, pair in enumerate(pairs) for call in pair[:2] if call is not None}
    terms: dict[int, frozenset[int]] = {}
    for call in (*a, *b):
        op = call.op
        if call.is_sum or call.is_cast:  # a cast of a gradient is that gradient
            terms[id(op)] = frozenset().union(*(terms[id(writer)] for writer in op.writers))
        else:
            terms[id(op)] = frozenset({numbers.get(id(op), -1 - id(op))})
    sums = ([call for call in calls if call.is_sum] for calls in (a, b))
    for of_a, of_b in _grouped(sums, lambda call: terms[id(call.op)]):
        yield from _in_step(of_a, of_b, _shapes)


def _shapes(call: Call) -> tuple[Hashable, ...]:
    return tuple(tuple(each.shape) for each in call.op.results)


def _grouped(
    sides: Iterable[Sequence[Call]], key: Callable[[Call], Hashable]
) -> Iterator[tuple[list[Call], list[Call]]]:
    """Yields the calls of both sides with the same key."""
    of_a, of_b = (grouped((key(call), call) for call in calls) for calls in sides)
    yield from ((of_a.get(each, []), of_b.get(each, [])) for each in {**of_a, **of_b})


def _in_step(a: Sequence[Call], b: Sequence[Call], signature: Callable[[Call], Hashable]) -> Iterator[Pair]:
    """Yields pairs with the same signature, in the same order."""
    matcher = SequenceMatcher(None, [*map(signature, a)], [*map(signature, b)], autojunk=False)
    for start_a, start_b, size in matcher.get_matching_blocks():
        for one, other in zip(a[start_a : start_a + size], b[start_b : start_b + size], strict=True):
            yield Pair(one, other, len(one.op.results) if one.op.is_backward else 1)


def _in_order(a: Sequence[Call], b: Sequence[Call], pairs: Iterable[Pair]) -> list[Pair]:
    """Returns pairs in the order of b, with all other calls of both steps, those of a behind the pair before them."""
    by_b = {id(pair.b): pair for pair in pairs}
    placed = [(place, by_b.get(id(call), Pair(None, call))) for place, call in enumerate(b)]
    places, last = {id(pair.a): place for place, pair in placed}, -1
    for call in a:
        last = places.get(id(call), last)
        if id(call) not in places:
            placed.append((last, Pair(call, None)))
    return [pair for _, pair in sorted(placed, key=itemgetter(0))]


# Measuring


class Distance(NamedTuple):
    """How far tensors are apart, in the terms of `ComparedRow`.

    Attributes:
        error: |b - a| / |a|, in 2-norms.
        max_error: greatest |b - a| of an element.
        finite_a: False if a has inf or NaN, -inf of a mask excepted.
        finite_b: the same for b.
        flushed: share of a's elements that are not zero, and that float16 flushed to zero in b.
    """

    error: float
    max_error: float
    finite_a: bool
    finite_b: bool
    flushed: float


def distance(a: Tensor, b: Tensor) -> Distance:
    """Returns how far a tensor is from another one; syncs with the device."""
    if not a.numel():
        return Distance(0.0, 0.0, True, True, 0.0)
    with torch.no_grad(), paused():
        difference, size, greatest, unlike_a, unlike_b, nonzero, flushed = _numbers(a, b)
    if math.isnan(difference):  # of inf and NaN
        difference = greatest = math.inf
    return Distance(
        relative(difference, size), greatest, not unlike_a, not unlike_b, flushed / nonzero if nonzero else 0.0
    )


def _greatest(distances: Sequence[Distance], precision: Precision) -> Distance:
    """Returns the greatest error of several tensors, those excepted of which a has no correct digit."""
    telling = [each for each in distances if not precision.is_cancelled(each.error)] or list(distances)
    return Distance(
        max((each.error for each in telling), default=0.0),
        max((each.max_error for each in telling), default=0.0),
        all(each.finite_a for each in distances),
        all(each.finite_b for each in distances),
        max((each.flushed for each in telling), default=0.0),
    )


def _numbers(a: Tensor, b: Tensor) -> list[float]:
    """Returns |b - a|, |a|, the greatest |b - a| of an element, and counts of elements.

    These are elements of a and of b that are not finite, those of a that are not zero, and those that b flushed.
    """
    flushed = (b == 0) & flushed_of(a, 1.0) if needs_scale(b.dtype) else torch.zeros_like(b, dtype=torch.bool)
    a, b = ((torch.view_as_real(each) if each.is_complex() else each).double() for each in (a, b))
    masked = ((a < _MASK) & (b <= _HALF_MASK)) | ((b < _MASK) & (a <= _HALF_MASK))
    a, b = a.masked_fill(masked, 0.0), b.masked_fill(masked, 0.0)
    is_same = (a == b) | (a.isnan() & b.isnan())
    difference = (b - a).masked_fill(is_same, 0.0)
    sizes = a.masked_fill(~a.isfinite(), 0.0)
    numbers = [torch.linalg.vector_norm(difference), torch.linalg.vector_norm(sizes), difference.abs().max()]
    numbers += [each.sum().double() for each in (~a.isfinite(), ~b.isfinite(), a != 0, flushed)]
    return torch.stack(numbers).tolist()


def rows_of(pairs: Iterable[Pair], precision: Precision) -> Iterator[ComparedRow]:
    """Yields a row for each pair.

    Args:
        pairs: the calls of both steps.
        precision: the types of both steps.
    """
    for number, pair in enumerate(pairs, 1):
        call = pair.b or pair.a
        assert call is not None
        type_a, type_b = ("" if each is None else each.type for each in pair[:2])
        row = ComparedRow(number=number, phase=call.op.direction, **asdict(call.named), type_a=type_a, type_b=type_b)
        if pair.a is None or pair.b is None:
            yield replace(row, unmatched=1)
        else:
            yield _measured(row, pair.a, pair.b, pair.results, precision)


def _measured(row: ComparedRow, a: Call, b: Call, results: int, precision: Precision) -> ComparedRow:
    """Returns the row of two calls with the distance of their first results."""
    found = _greatest([*map(distance, a.op.results[:results], b.op.results[:results])], precision)
    own, inputs = (None if each is None else _greatest(each, precision) for each in _own_and_inputs(a, b, results))
    noise = precision.noise(a.depth + b.depth)
    cancelled = precision.is_cancelled(found.error)
    return replace(
        row,
        **found._asdict(),
        own_error=None if own is None else own.error,
        input_error=None if inputs is None else inputs.error,
        noise=noise,
        starts=int(not cancelled and _starts(found, own, inputs, noise, precision)),
        cancelled=int(cancelled),
    )


def first_of(pairs: Sequence[Pair], rows: Sequence[ComparedRow]) -> ComparedRow | None:
    """Returns the row where b parts from a first; None if it does not.

    A result may have lost small elements only, so that the error shows where another function reads them, such as a
    logarithm. Then the call that flushed them comes first.
    """
    starting = [(pair, row) for pair, row in zip(pairs, rows, strict=True) if row.starts]
    for pair, row in starting:
        if row.has_error and pair.b is not None:
            return _flushed_before(pair.b, row, pairs, rows) or row
    return next((row for _, row in starting), None) or next((row for row in rows if row.is_above_noise), None)


def _flushed_before(
    call: Call, row: ComparedRow, pairs: Sequence[Pair], rows: Sequence[ComparedRow]
) -> ComparedRow | None:
    """Returns the row of the call that flushed inputs of a call to zero; None if there is none.

    Follows zeros, and a few operators before a call that is exact on a's inputs.
    """
    by_op = {id(pair.b.op): row for pair, row in zip(pairs, rows, strict=True) if pair.b is not None}
    is_exact = row.own_error is not None and row.own_error <= (row.noise or 0.0)
    waiting, seen = [(call.op, 0)], set()
    for op, steps in waiting:  # which grows meanwhile
        for writer in (each for each in op.writers if id(each) not in seen):
            seen.add(id(writer))
            written = by_op[id(writer)]
            if written.is_flushed and written.starts:
                return written
            if written.is_flushed or writer.op_name == CAST or (is_exact and steps < _STEPS_BACK):
                waiting.append((writer, steps + 1))
    return None


@dataclass(frozen=True, slots=True)
class Precision:
    """The unit roundoffs of the least precise types in two steps.

    Attributes:
        a: that of a.
        b: that of b.
    """

    a: float
    b: float

    @classmethod
    def of(cls, a: Sequence[Call], b: Sequence[Call]) -> Precision:
        """Returns the unit roundoffs of the least precise types in which operators of both steps ran."""
        types = ([each.dtype for call in calls for each in call.op.results] for calls in (a, b))
        return cls(*(max((torch.finfo(each).eps / 2 for each in of_side), default=0.0) for of_side in types))

    def noise(self, depth: int) -> float:
        """Returns the error that rounding explains: it grows with the square root of the number of operators in half.

        Args:
            depth: number of operators.
        """
        return _ROUNDINGS * max(self.a, self.b) * math.sqrt(max(depth, 1))

    def is_cancelled(self, error: float) -> bool:
        """Returns True if a itself has lost its digits where b has a finite error: a's error is a known share of it."""
        return self.a < self.b and _LOST * self.b / self.a < error < math.inf


def _starts(found: Distance, own: Distance | None, inputs: Distance | None, noise: float, precision: Precision) -> bool:
    """Returns True if a call adds an error above the noise, or makes it of inputs that were within the noise."""
    if inputs is None:
        return False
    loses = found.flushed > FLUSHED_SHARE >= inputs.flushed
    adds = own is not None and (own.error > precision.noise(2) or own.finite_a != own.finite_b)
    is_half_finite = found.finite_a != found.finite_b
    amplifies = inputs.finite_a == inputs.finite_b if is_half_finite else inputs.error <= noise
    return loses or (found.error > noise and (adds or amplifies))


def _own_and_inputs(a: Call, b: Call, results: int) -> tuple[list[Distance] | None, list[Distance] | None]:
    """Runs the operator of b on the inputs of a, and compares its results with those of a; compares the inputs too.

    Returns:
        None for inputs that do not correspond; None for results if these do not, if the operator is random, or if it
        raises for the types of a's other arguments.
    """
    op, kept = b.op.op, [call.op.kept_arguments for call in (a, b)]
    if a.op.op is not op or None in kept:
        return None, None
    (of_a, _), (of_b, tree) = map(tree_flatten, kept)
    # Other arguments may differ: where a function is on the blacklist, the operator may get dtype=float32 for a cast.
    mine, theirs = ([each for each in leaves if isinstance(each, Tensor)] for leaves in (of_a, of_b))
    if [each.shape for each in mine] != [each.shape for each in theirs]:
        return None, None
    floating = (floating_in(list(pair)) for pair in zip(mine, theirs, strict=True))
    inputs = [distance(*pair) for pair in floating if len(pair) == 2]
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None, inputs
    # Copies, since the operator may write to them.
    copies = (one.to(other.dtype, copy=True) for one, other in zip(mine, theirs, strict=True))
    leaves = [next(copies) if isinstance(each, Tensor) else each for each in of_b]
    result = run_again(op, *tree_unflatten(leaves, tree))
    own = None if result is None else [*map(distance, a.op.results[:results], measured(result)[:results])]
    return own, inputs
