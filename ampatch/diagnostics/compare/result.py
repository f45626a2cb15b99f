"""What `amp.compare` returns, as frozen values, and their text.

Owns the wording and the table. Must never run a model, nor compare a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ampatch.diagnostics.json_files import plain
from ampatch.diagnostics.overflow.trace import NamedOp
from ampatch.diagnostics.shown_names import module_and_line, shown_call, shown_function, shown_module, shown_place
from ampatch.diagnostics.tables import ROWS, Column, number, printed, shown_number, table
from ampatch.grouping import grouped

#: The share of a call's elements that may be flushed to zero before its result counts as another one.
FLUSHED_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow(NamedOp):
    """One call in both steps, or one number of two saved reports.

    Attributes:
        number: position among all rows, from 1.
        phase: "forward", "backward", or "report" for a number of two saved reports.
        type_a: type of the first result in a; "" if a has no such call.
        type_b: the same in b.
        error: |b - a| / |a|, in 2-norms: of the first result in a forward pass, the greatest of all results in a
            backward pass. inf if only one of them is finite, or if a is zero; None if only one step has the call. Of
            saved reports |b - a| / the greatest number of this kind in both.
        max_error: greatest |b - a| of an element; None if `error` is.
        own_error: the error of b's operator on a's inputs: the part of `error` that this call adds. None if the
            operator could not run again: it is random, another one, or its inputs were written to.
        flushed: share of a's elements that are not zero, and that float16 flushed to zero in b.
        noise: error that rounding explains: it grows with the number of calls in half before this one.
        input_error: greatest error of its inputs; None if it is unknown.
        starts: 1 if b parts from a here: the error is above `noise`, and the inputs were within theirs, or the call's
            own error is above what its own rounding explains. Or this call flushes more than 10 % to zero.
        cancelled: 1 if a itself has no correct digit here, as in a sum that is zero but for rounding. Such an error
            says nothing about b.
        finite_a: False if a has inf or NaN here; -inf of a mask excepted.
        finite_b: the same for b.
        unmatched: 1 if only one step has the call.
        quantity: which number of saved reports; "" for a call.
        value_a: the number in a.
        value_b: the number in b.
        step: the step that the number belongs to.
        parameter: the parameter that it belongs to.
    """

    number: int
    phase: str
    type_a: str = ""
    type_b: str = ""
    error: float | None = None
    max_error: float | None = None
    own_error: float | None = None
    input_error: float | None = None
    flushed: float | None = None
    noise: float | None = None
    starts: int = 0
    cancelled: int = 0
    finite_a: bool | None = None
    finite_b: bool | None = None
    unmatched: int = 0
    quantity: str = ""
    value_a: float | None = None
    value_b: float | None = None
    step: int | None = None
    parameter: str = ""

    @property
    def place(self) -> str:
        """The line as "file:number", the path as short as it can be; empty if no user code called it."""
        return shown_place(self.file, self.line)

    @property
    def is_above_noise(self) -> bool:
        """True if rounding does not explain the difference, and the difference says something about b."""
        return not self.cancelled and (self.has_error or self.is_flushed)

    @property
    def has_error(self) -> bool:
        """True if the error is above the noise."""
        return self.error is not None and self.error > (self.noise or 0.0)

    @property
    def is_flushed(self) -> bool:
        """True if b lost a good part of a's elements to zero."""
        return (self.flushed or 0.0) > FLUSHED_SHARE


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """The rows of one function or of one module.

    Attributes:
        name: path of the function, or name of the module.
        calls: number of rows that both sides have.
        unmatched: number of rows that one side has.
        above: number of rows above their noise.
        error: greatest error.
        own_error: greatest error of a call on a's inputs; None if unknown.
    """

    name: str
    calls: int
    unmatched: int
    above: int
    error: float
    own_error: float | None


@dataclass(frozen=True, slots=True)
class GradientError:
    """The error of a parameter's unscaled gradient: |b - a| / |a|, in 2-norms; ``cancelled`` as in `ComparedRow`."""

    parameter: str
    error: float
    cancelled: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `amp.compare` found out; prints as tables that fit the terminal.

    Attributes:
        title: what was compared.
        a: name of the first side, such as "O0".
        b: name of the second side, such as "O1 bfloat16".
        verdict: one or two sentences: whether b is within the noise of its precision, and where it parts from a.
        loss_a: the loss of a; None for saved reports.
        loss_b: the loss of b.
        loss_scale: the loss scale of both steps; None for saved reports.
        gradient_error: |gradients of b - those of a| / |those of a|, over all parameters.
        noise: the gradient error that rounding explains.
        first: the first row where b parts from a; None if there is none.
        worst: the row with the greatest error; None if all are equal.
        rows: all rows: the calls of both steps, in the order of b.
        gradients: errors by parameter, the greatest first.
        notes: warnings that amp gave, and what was not compared.
    """

    title: str
    a: str
    b: str
    verdict: str
    rows: tuple[ComparedRow, ...]
    first: ComparedRow | None = None
    worst: ComparedRow | None = None
    loss_a: float | None = None
    loss_b: float | None = None
    loss_scale: float | None = None
    gradient_error: float | None = None
    noise: float | None = None
    gradients: tuple[GradientError, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def functions(self) -> tuple[ComparedGroup, ...]:
        """The rows by function, those with the greatest error first."""
        return _grouped(self.rows, lambda row: row.function)

    @property
    def modules(self) -> tuple[ComparedGroup, ...]:
        """The rows by innermost module, those with the greatest error first."""
        return _grouped(self.rows, lambda row: row.module)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON: text, numbers, booleans, None, lists and dicts. inf and NaN are texts."""
        found: dict[str, Any] = plain(asdict(self))
        found["loss"] = {"a": found.pop("loss_a"), "b": found.pop("loss_b")}
        for name in ("functions", "modules"):
            found[name] = plain([asdict(group) for group in getattr(self, name)])
        return found

    def __str__(self) -> str:
        return printed(parts(self))


def _grouped(rows: Iterable[ComparedRow], name_of: Callable[[ComparedRow], str | None]) -> tuple[ComparedGroup, ...]:
    groups = []
    for name, members in grouped((name, row) for row in rows if (name := name_of(row)) is not None).items():
        telling = [row for row in members if not row.cancelled]
        group = ComparedGroup(
            name,
            sum(not row.unmatched for row in members),
            sum(row.unmatched for row in members),
            sum(row.is_above_noise for row in members),
            max((row.error for row in telling if row.error is not None), default=0.0),
            max((row.own_error for row in telling if row.own_error is not None), default=None),
        )
        groups.append(group)
    return tuple(sorted(groups, key=lambda group: (-group.error, -(group.own_error or 0.0))))


# Text

_ERROR = number("error", lambda row: row.error, ".2g")
#: The columns of a table of functions, each a `ComparedGroup`.
BY_FUNCTION = (
    Column("function", lambda group: shown_function(group.name)),
    number("calls", lambda group: group.calls),
    number("above noise", lambda group: group.above),
    _ERROR,
)


def parts(result: Comparison) -> Iterator[Any]:
    """Yields the lines and tables that `printed` prints."""
    yield result.title
    yield result.verdict
    if result.loss_a is not None and result.loss_b is not None:
        yield f"loss: {result.loss_a:.6g} and {result.loss_b:.6g}, both at a loss scale of {result.loss_scale:g}"
    if result.first is not None and result.first.source:
        lost = f" ({result.first.flushed:.0%} flushed to zero)" if result.first.is_flushed else ""
        yield f"first at {result.first.place}: {result.first.source}{lost}"
    yield from (_table_of_numbers if are_numbers(result.rows) else _tables_of_calls)(result)
    for note in result.notes:
        yield f"note: {note}"


def _table_of_numbers(result: Comparison) -> Iterator[Any]:
    columns = [
        Column("number", lambda row: row.quantity),
        Column("of", owner_of),
        number("a", lambda row: row.value_a, shown_number),
        number("b", lambda row: row.value_b, shown_number),
    ]
    yield from table("What differs most", columns, *telling_rows(result.rows, result.first, result.worst, ROWS))


def _tables_of_calls(result: Comparison) -> Iterator[Any]:
    own = number("own", lambda row: row.own_error, ".2g")
    columns = [
        number("#", lambda row: row.number, "d"),
        Column("pass", lambda row: row.phase),
        Column("function", lambda row: shown_call(row.function, row.operator)),
        Column("module and line", module_and_line),
        Column("type", lambda row: row.type_b),
    ]
    shown = telling_rows(result.rows, result.first, result.worst, ROWS)
    yield from table("Calls above the noise", [*columns, _ERROR, own], *shown)
    groups = [group for group in result.functions if group.error > 0]
    yield from table("By function", [*BY_FUNCTION, own], groups)
    gradients = [each for each in result.gradients if each.error > 0 and not each.cancelled]
    yield from table("By gradient", [Column("parameter", lambda row: row.parameter), _ERROR], gradients)
    casts = [row for row in result.rows if row.unmatched and row.operator == "cast"]
    others = sum(row.unmatched for row in result.rows) - len(casts)
    yield (
        f"Of {len(result.rows)} calls, {len(casts)} casts and {others} others are in one step only. result.to_dict() "
        "has all."
    )


def are_numbers(rows: Iterable[ComparedRow]) -> bool:
    """Returns True for the rows of two saved reports."""
    return all(row.phase == "report" for row in rows)


def telling_rows(
    rows: Sequence[ComparedRow], first: ComparedRow | None, worst: ComparedRow | None, most: int
) -> tuple[list[ComparedRow], int]:
    """Returns the rows that tell most, and the number of all that tell something.

    Of numbers these are those that differ most. Of calls they are those above the noise, in their order: the first, the
    worst and those where b parts from a come before others.
    """
    if are_numbers(rows):
        differing = sorted((row for row in rows if row.error), key=lambda row: -(row.error or 0.0))
        return differing[:most], len(differing)
    above = [row for row in rows if row.is_above_noise]
    ranked = sorted(above, key=lambda row: (not row.starts, -(row.error or 0.0)))
    told = dict.fromkeys([row for row in (first, worst) if row in above] + ranked)
    return sorted([*told][:most], key=lambda row: row.number), len(told)


def owner_of(row: ComparedRow) -> str:
    """Returns what a number of a report belongs to: a function, a module, a parameter, a line or a step."""
    step = "" if row.step is None else f"step {row.step}"
    module = f"module {row.module}" if row.module else shown_module(row.module)
    return shown_function(row.function) or module or row.parameter or row.place or step


def where(row: ComparedRow) -> str:
    """Returns a row's call in words: pass, function, module and line."""
    module = f", module {shown_module(row.module)}" if row.module is not None else ""
    place = f", at {row.place}" if row.file is not None else ""
    return f"the {row.phase} of {shown_call(row.function, row.operator)}{module}{place}"
