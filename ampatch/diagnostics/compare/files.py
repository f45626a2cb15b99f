"""`amp.compare` of two saved reports: reads them, and says in which numbers they differ most.

Owns which numbers of a report are compared. Must never run a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ampatch.diagnostics import json_files
from ampatch.diagnostics.compare.result import ComparedRow, Comparison, owner_of
from ampatch.errors import OptionError
from ampatch.grouping import grouped

#: What a number of a report counts, and the fields of `ComparedRow` that say of what.
_Key = tuple[str, tuple[tuple[str, Any], ...]]


def compare(a: object, b: object) -> Comparison:
    """Compares two saved reports.

    Args:
        a: path of the first file.
        b: path of the second file.

    Raises:
        OptionError: one is no report, or not of this version.
    """
    (report_a, numbers_a), (report_b, numbers_b) = _read("a", a), _read("b", b)
    # A number is weighed by the greatest of its kind.
    both = [*numbers_a.items(), *numbers_b.items()]
    kinds = grouped((quantity, abs(value)) for (quantity, _), value in both if math.isfinite(value))
    wholes = {quantity: max(values) for quantity, values in kinds.items()}
    rows = tuple(
        _row(number, key, numbers_a.get(key), numbers_b.get(key), wholes.get(key[0], 0.0))
        for number, key in enumerate({**numbers_a, **numbers_b}, 1)
    )
    differing = [row for row in rows if row.error]
    worst = max(differing, key=lambda row: row.error or 0.0, default=None)
    first = min((row for row in differing if row.step is not None), key=lambda row: row.step or 0, default=None)
    return Comparison(
        f"Two reports: {a} (a) and {b} (b)",
        str(a),
        str(b),
        _verdict(rows, differing, first, worst),
        rows,
        first,
        worst,
        notes=tuple(_notes(report_a, report_b)),
    )


def _read(letter: str, path: object) -> tuple[dict[str, Any], dict[_Key, float]]:
    """Returns a report, and its numbers by what they count, and of what.

    Raises:
        OptionError: the file is no report; or a field is missing, or holds something else than `Report.to_dict` writes.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(
            f"{letter} is {type(path).__name__!r}; expected the file of another report, as the first argument is one."
        )
    try:
        report = json_files.read(path)
        numbers = {(quantity, tuple(of.items())): float(value) for quantity, of, value in _numbers(report)}
        _ = [report[section] and dict(report[section]) for section in ("about", "settings")]
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except OptionError:  # the file is no report
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f"{path} is a damaged report: its fields are not those that report.save(...) writes "
            f"({type(error).__name__}: {error}). Write it again."
        ) from error
    return report, numbers


#: What a number counts, the fields of `ComparedRow` that say of what, and the number.
_Numbers = Iterator[tuple[str, dict[str, Any], Any]]


def _numbers(report: Mapping[str, Any]) -> _Numbers:
    """Yields the numbers of a report that do not depend on the machine: no times."""
    for each in report["functions"]:
        for name in ("calls", "casts", "cast_bytes", "cache_hits", "cache_hit_bytes", "undone"):
            yield _words(name), {"function": each["name"]}, each[name]
        for types in each["types"]:
            types_in_words = f"{', '.join(types['in'])} -> {', '.join(types['out'])}"
            yield f"calls with {types_in_words}", {"function": each["name"]}, types["calls"]
    for each in report["lines"]:
        for name in ("casts", "cast_bytes"):
            yield f"{_words(name)} of a line", {key: each[key] for key in ("file", "line", "source")}, each[name]
    for each in report["modules"]:
        for name in ("operators", "activation_bytes", "weight_bytes"):
            for kind, value in each[name].items():
                yield f"{_words(name)} in {kind}", {"module": each["name"]}, value
    yield from _numbers_of_steps(report["steps"])
    yield from _numbers_of_underflow(report["underflow"])


def _numbers_of_steps(steps: Iterable[Mapping[str, Any]]) -> _Numbers:
    for step in steps:
        of_loss = f" of loss {step['loss_id']}" if step["loss_id"] else ""
        for name in ("scale", "overflow", "skipped", "gradient_norm"):
            if step[name] is not None:
                yield _words(name) + of_loss, {"step": step["step"]}, step[name]


def _numbers_of_underflow(underflow: Mapping[str, Any] | None) -> _Numbers:
    if underflow is not None:
        for name in ("lost", "best_scale"):
            yield f"underflow: {_words(name)}", {}, underflow[name]
        for parameter in underflow["parameters"]:
            for name in ("zero", "subnormal"):
                yield f"gradient: {name} share", {"parameter": parameter["name"]}, parameter[name]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _row(number: int, key: _Key, a: float | None, b: float | None, whole: float) -> ComparedRow:
    difference = abs((b or 0.0) - (a or 0.0))
    if math.isnan(difference):  # both inf, or NaN
        difference = 0.0 if str(a) == str(b) else math.inf
    return ComparedRow(
        number=number,
        phase="report",
        **dict(key[1]),
        error=difference / whole if whole else difference,
        max_error=difference,
        unmatched=int(a is None or b is None),
        quantity=key[0],
        value_a=a,
        value_b=b,
    )


def _verdict(
    rows: tuple[ComparedRow, ...], differing: list[ComparedRow], first: ComparedRow | None, worst: ComparedRow | None
) -> str:
    if worst is None:
        return f"The reports agree in all {len(rows)} numbers; times are not compared."
    steps = "" if first is None else f" Their steps part at step {first.step}, in {first.quantity}."
    owner = owner_of(worst)
    most = f"{worst.quantity} of {owner}" if owner else worst.quantity
    return f"The reports differ in {len(differing)} of {len(rows)} numbers, most in {most}.{steps}"


def _notes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yields the versions and settings in which two reports differ."""
    are_on = [bool(report["settings"]) for report in (a, b)]
    if any(are_on) and not all(are_on):
        yield f"amp was off in {'b' if are_on[0] else 'a'}"
    for section in ("about", "settings") if all(are_on) else ("about",):
        one, other = (report[section] or {} for report in (a, b))
        for name in sorted({*one, *other} - {"began", "command"}):
            if one.get(name) != other.get(name):
                yield f"{name} is {one.get(name)!r} in a and {other.get(name)!r} in b"
