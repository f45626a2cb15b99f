"""A report as lines and tables that fit a terminal.

Owns the wording and the order of the sections. Must never compute what the report does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ampatch.diagnostics.compare.result import BY_FUNCTION, ComparedGroup
from ampatch.diagnostics.report.numbers import seconds_in_text, size_in_text
from ampatch.diagnostics.report.steps import course_of_scale, share_lost, underflow_told
from ampatch.diagnostics.shown_names import counted, few, shown_function, shown_module, shown_place
from ampatch.diagnostics.tables import ROWS, Column, item, number, printed, shown_number, table

_LAST_STEPS = 5
_NAMES = 4  # of functions on a line


def text(data: Mapping[str, Any]) -> str:
    """Returns a report's tables, for the width of the terminal.

    Args:
        data: what `Report.to_dict` returns.
    """
    return printed(_parts(data))


def _parts(data: Mapping[str, Any]) -> Iterator[Any]:
    yield from _head(data)
    yield from _advice(data["advice"])
    yield from _functions(data["functions"])
    yield from _lines(data["lines"])
    yield from _misaligned(data["misaligned"])
    yield from _modules(data["modules"])
    yield from _steps(data["steps"])
    if data["underflow"] is not None:
        yield from _underflow(data["underflow"])
    if data["comparison"] is not None:
        yield from _comparison(data["comparison"])
    yield from (item(note, "note: ") for note in data.get("notes", ()))


def _head(data: Mapping[str, Any]) -> Iterator[Any]:
    about, cost, settings = data["about"], data["cost"], data["settings"]
    yield f"Report of {seconds_in_text(cost['seconds'])}, begun {about['began']}: {about['command']}"
    set_up = "amp was not set up"
    if settings is not None:
        set_up = f"amp at {settings['opt_level']} in {settings['half_dtype']}, loss_scale={settings['loss_scale']!r}"
    yield f"ampatch {about['ampatch']}, torch {about['torch']}, on {', '.join(about['devices'])}; {set_up}"
    part = f"{cost['recording_seconds'] / cost['seconds']:.0%}" if cost["seconds"] else "-"
    yield (
        f"The recording took an estimated {seconds_in_text(cost['recording_seconds'])} of that ({part}), and watched "
        f"{counted(cost['operators'], 'operator')}."
    )
    totals = data["totals"]
    if not totals["casts"] and not totals["cache_hits"]:
        yield "Nothing was cast."
        return
    yield (
        f"{counted(totals['casts'], 'cast')} wrote {size_in_text(totals['cast_bytes'])} in at most "
        f"{seconds_in_text(totals['cast_seconds'])}; the cache saved {counted(totals['cache_hits'], 'cast')} of "
        f"{size_in_text(totals['cache_hit_bytes'])}."
    )


def _advice(advice: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    if advice:
        yield "\nWhat to do"
        yield from (item(each["text"], f"{number}. ") for number, each in enumerate(advice, 1))
    yield ""


def _functions(functions: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    rows = _with_casts(functions)
    columns = [
        Column("function", lambda row: shown_function(row["name"])),
        Column("rule", lambda row: ", ".join(filter(None, (row["rule"], row.get("format")))) or "-", rank=3),
        Column("types", lambda row: _types(row["types"]), rank=4),
        *_NUMBERS,
        number("undone", lambda row: row["undone"] or None, rank=1),
    ]
    yield from table("Casts by function", columns, rows)
    others = len(functions) - len(rows)
    if others:
        yield f"{counted(others, 'other function')} had no casts.\n"


def _types(types: Sequence[Mapping[str, Any]]) -> str:
    """Returns the types of most calls, and how many others there are."""
    by_calls = sorted(types, key=lambda each: -each["calls"])
    return few([f"{_list(each['in'])} -> {_list(each['out'])}" for each in by_calls], 1)


def _list(types: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(types)) or "none"


def _with_casts(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["casts"] or row["cache_hits"]]


def _lines(lines: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    rows = _with_casts(lines)
    columns = [
        Column("line", lambda row: "\n".join(filter(None, (_place(row), row["source"])))),
        Column("functions", lambda row: few([shown_function(name) for name in row["functions"]], _NAMES), rank=3),
        *_NUMBERS,
    ]
    yield from table("Casts by line", columns, rows)


_NUMBERS = (
    number("calls", itemgetter("calls"), rank=2),
    number("casts", itemgetter("casts")),
    number("written", itemgetter("cast_bytes"), size_in_text),
    number("time", itemgetter("cast_seconds"), seconds_in_text, rank=2),
    number("cached", itemgetter("cache_hits"), rank=1),
)


def _misaligned(rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    columns = [
        Column("product", lambda row: shown_function(row["function"] or "-")),
        Column("where", lambda row: "\n".join(filter(None, (shown_module(row["module"]), _place(row)))), rank=1),
        Column("type", lambda row: row["dtype"], rank=2),
        Column("m, k, n", lambda row: ", ".join(map(str, row["size"]))),
        Column("padded", lambda row: ", ".join(map(str, row["pads"]))),
        number("calls", itemgetter("calls"), rank=3),
    ]
    yield from table("Matrix products with sizes that tensor cores pad", columns, rows)


def _modules(rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    columns = [
        Column("module", lambda row: shown_module(row["name"])),
        Column("class", lambda row: row["class"], rank=3),
        Column("in", lambda row: _list(row["in"]), rank=2),
        Column("out", lambda row: _list(row["out"])),
        Column("activations", lambda row: _by_type(row["activation_bytes"]), rank=1),
        Column("weights", lambda row: _by_type(row["weight_bytes"]), rank=2),
        number("saved", itemgetter("saved_bytes"), size_in_text),
    ]
    yield from table("Memory by module", columns, rows)


def _by_type(memory: Mapping[str, int]) -> str:
    return "\n".join(f"{kind} {size_in_text(held)}" for kind, held in memory.items() if held) or "-"


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    if not rows:
        yield "No step of an optimizer."
        return
    skipped = sum(row["skipped"] for row in rows)
    yield f"{counted(len(rows), 'step')}, {skipped:,} of them skipped. {course_of_scale(rows, shown_number)}."
    columns = [
        number("step", itemgetter("step")),
        number("loss_id", itemgetter("loss_id"), rank=1),
        number("scale", itemgetter("scale"), shown_number),
        Column("skipped", lambda row: "skipped" if row["skipped"] else "overflow" if row["overflow"] else ""),
        number("gradient norm", lambda row: "not finite" if (norm := row["gradient_norm"]) is None else norm, ".4g"),
    ]
    overflows = [row for row in rows if row["overflow"]]
    yield from table("The last overflows", columns, overflows[-ROWS:], len(overflows))
    yield from table("The last steps", columns, rows[-_LAST_STEPS:], len(rows))


def _underflow(found: Mapping[str, Any]) -> Iterator[Any]:
    yield (
        f"Gradients of {counted(found['seen'], 'backward pass', 'es')}: {underflow_told(found)}. Elements that are "
        "zero already do not count."
    )
    columns = [
        number("scale", itemgetter("scale"), shown_number),
        _share("rounded to zero", "zero"),
        _share("subnormal", "subnormal"),
        _share("overflow", "overflow"),
        Column("", lambda row: ", ".join(_marks(row["scale"], found))),
    ]
    scales = found["scales"]
    yield from table(f"What {found['half']} loses, by loss scale", columns, scales, len(scales))
    columns = [
        Column("parameter", lambda row: row["name"]),
        number("elements", itemgetter("elements")),
        _share("zero already", "zero", rank=1),
        _share("rounded to zero", "rounded_to_zero"),
        _share("subnormal", "subnormal"),
    ]
    losing = sorted((row for row in found["parameters"] if share_lost(row)), key=lambda row: -share_lost(row))
    yield from table("Gradients that lose most, over all these passes", columns, losing)


def _share(head: str, name: str, rank: int = 0) -> Column:
    return number(head, itemgetter(name), _percent, rank)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else "<0.1%"


def _marks(scale: float, found: Mapping[str, Any]) -> Iterable[str]:
    return [name for name, key in (("now", "scale"), ("best", "best_scale")) if found[key] == scale]


def _comparison(found: Mapping[str, Any]) -> Iterator[Any]:
    yield f"Comparison: {found['title']}"
    yield found["verdict"]
    differing = [ComparedGroup(**row) for row in found["functions"] if row["error"]]
    yield from table("Errors by function", BY_FUNCTION, differing)


def _place(row: Mapping[str, Any]) -> str:
    return shown_place(row["file"], row["line"])
