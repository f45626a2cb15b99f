"""A report as lines and tables that fit a terminal.

Owns the wording and the order of the sections. Must never compute what the report does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ampatch.diagnostics.report_numbers import in_terminal, seconds, size
from ampatch.diagnostics.report_steps import share_lost, underflow_told
from ampatch.diagnostics.shown_names import shown_function, shown_module, shown_path
from ampatch.diagnostics.tables import ROWS, Column, item, printed, table

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
    yield f"Report of {_seconds(cost['seconds'])}, begun {about['began']}: {about['command']}"
    yield f"ampatch {about['ampatch']}, torch {about['torch']}, on {', '.join(about['devices'])}; {_set_up(settings)}"
    part = _share(cost["recording_seconds"], cost["seconds"])
    yield (
        f"The recording took an estimated {_seconds(cost['recording_seconds'])} of that ({part}), and watched "
        f"{_counted(cost['operators'], 'operator')}."
    )
    totals = data["totals"]
    if not totals["casts"] and not totals["cache_hits"]:
        yield "Nothing was cast."
        return
    yield (
        f"{_counted(totals['casts'], 'cast')} wrote {_bytes(totals['cast_bytes'])} in "
        f"{_seconds(totals['cast_seconds'])}; the cache saved {_counted(totals['cache_hits'], 'cast')} of "
        f"{_bytes(totals['cache_hit_bytes'])}."
    )


def _set_up(settings: Mapping[str, Any] | None) -> str:
    if settings is None:
        return "amp was not set up"
    return f"amp at {settings['opt_level']} in {settings['half_dtype']}, loss_scale={settings['loss_scale']!r}"


def _advice(advice: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    if advice:
        yield "\nWhat to do"
        yield from (item(each["text"], f"{number}. ") for number, each in enumerate(advice, 1))
    yield ""


def _functions(functions: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    rows = _with_casts(functions)
    columns = [
        Column("function"),
        Column("rule", rank=3),
        Column("types", rank=4),
        Column("calls", is_number=True, rank=2),
        *_NUMBERS,
        Column("undone", is_number=True, rank=1),
    ]
    cells = [
        (
            shown_function(row["name"]),
            row["rule"] or "-",
            _types(row["types"]),
            f"{row['calls']:,}",
            *_numbers(row),
            f"{row['undone']:,}" if row["undone"] else "-",
        )
        for row in rows[:ROWS]
    ]
    yield from table("Casts by function", columns, cells, len(rows))
    others = len(functions) - len(rows)
    if others:
        yield f"{_counted(others, 'other function')} had no casts.\n"


def _types(types: Sequence[Mapping[str, Any]]) -> str:
    """Returns the types of most calls, and how many others there are."""
    if not types:
        return ""
    first = max(types, key=lambda each: each["calls"])
    more = f" and {len(types) - 1} more" if len(types) > 1 else ""
    return f"{_list(first['in'])} -> {_list(first['out'])}{more}"


def _list(types: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(types)) or "none"


def _with_casts(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["casts"] or row["cache_hits"]]


def _lines(lines: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    rows = _with_casts(lines)
    columns = [Column("line"), Column("functions", rank=3), Column("calls", is_number=True, rank=2), *_NUMBERS]
    cells = [
        (
            _place(row, row["source"]),
            _few([shown_function(name) for name in row["functions"]]),
            f"{row['calls']:,}",
            *_numbers(row),
        )
        for row in rows[:ROWS]
    ]
    yield from table("Casts by line", columns, cells, len(rows))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


_NUMBERS = (
    Column("casts", is_number=True),
    Column("written", is_number=True),
    Column("time", is_number=True, rank=2),
    Column("cached", is_number=True, rank=1),
)


def _numbers(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Returns the cells of `_NUMBERS`."""
    return (
        f"{row['casts']:,}",
        _bytes(row["cast_bytes"]),
        _seconds(row["cast_seconds"]),
        f"{row['cache_hits']:,}",
    )


def _misaligned(rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    columns = [
        Column("product"),
        Column("where", rank=1),
        Column("type", rank=2),
        Column("m, k, n"),
        Column("padded"),
        Column("calls", is_number=True, rank=3),
    ]
    cells = [
        (
            shown_function(row["function"] or "-"),
            "\n".join(filter(None, (shown_module(row["module"]), _place(row)))),
            row["dtype"],
            ", ".join(map(str, row["size"])),
            ", ".join(map(str, row["pads"])),
            f"{row['calls']:,}",
        )
        for row in rows[:ROWS]
    ]
    yield from table("Matrix products with sizes that tensor cores pad", columns, cells, len(rows))


def _modules(rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    columns = [
        Column("module"),
        Column("class", rank=3),
        Column("in", rank=2),
        Column("out"),
        Column("activations", rank=1),
        Column("weights", rank=2),
        Column("saved", is_number=True),
    ]
    cells = [
        (
            shown_module(row["name"]),
            row["class"],
            _list(list(row["in"])),
            _list(list(row["out"])),
            _by_type(row["activation_bytes"]),
            _by_type(row["weight_bytes"]),
            _bytes(row["saved_bytes"]),
        )
        for row in rows[:ROWS]
    ]
    yield from table("Memory by module", columns, cells, len(rows))


def _by_type(memory: Mapping[str, int]) -> str:
    return "\n".join(f"{kind} {_bytes(held)}" for kind, held in memory.items() if held) or "-"


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    if not rows:
        yield "No step of an optimizer."
        return
    skipped, scales = [row for row in rows if row["skipped"]], [row["scale"] for row in rows]
    kept = f"The loss scale was {_scale(scales[0])} throughout."
    if min(scales) != max(scales):
        first, last, least, greatest = map(_scale, (scales[0], scales[-1], min(scales), max(scales)))
        kept = f"The loss scale went from {first} to {last}, between {least} and {greatest}."
    yield f"{_counted(len(rows), 'step')}, {len(skipped):,} of them skipped. {kept}"
    overflows = [row for row in rows if row["overflow"]]
    yield from _table_of_steps("The last overflows", overflows[-ROWS:], len(overflows))
    yield from _table_of_steps("The last steps", rows[-_LAST_STEPS:], len(rows))


def _table_of_steps(title: str, rows: Sequence[Mapping[str, Any]], count: int) -> Iterator[Any]:
    columns = [
        Column("step", is_number=True),
        Column("loss_id", is_number=True, rank=1),
        Column("scale", is_number=True),
        Column("skipped"),
        Column("gradient norm", is_number=True),
    ]
    cells = [
        (
            f"{row['step']:,}",
            "-" if row["loss_id"] is None else str(row["loss_id"]),
            _scale(row["scale"]),
            "skipped" if row["skipped"] else "overflow" if row["overflow"] else "",
            "not finite" if row["gradient_norm"] is None else f"{row['gradient_norm']:.4g}",
        )
        for row in rows
    ]
    yield from table(title, columns, cells, count)


def _underflow(found: Mapping[str, Any]) -> Iterator[Any]:
    yield (
        f"Gradients of {_counted(found['seen'], 'backward pass', 'es')}: {underflow_told(found)}. Elements that are "
        "zero already do not count."
    )
    columns = [
        Column("scale", True),
        *(Column(name, True) for name in ("rounded to zero", "subnormal", "overflow")),
        Column(""),
    ]
    cells = [
        (_scale(row["scale"]), *(_percent(row[name]) for name in _SHARES), ", ".join(_marks(row["scale"], found)))
        for row in found["scales"]
    ]
    yield from table(f"What {found['half']} loses, by loss scale", columns, cells, len(cells))
    losing = sorted((row for row in found["parameters"] if share_lost(row)), key=lambda row: -share_lost(row))
    columns = [
        Column("parameter"),
        Column("elements", is_number=True),
        Column("zero already", is_number=True, rank=1),
        Column("rounded to zero", is_number=True),
        Column("subnormal", is_number=True),
    ]
    shown = [
        (
            row["name"],
            f"{row['elements']:,}",
            *(_percent(row[name]) for name in ("zero", "rounded_to_zero", "subnormal")),
        )
        for row in losing[:ROWS]
    ]
    yield from table("Gradients that lose most, over all these passes", columns, shown, len(losing))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else "<0.1%"


def _scale(number: float) -> str:
    return f"{number:,.0f}" if number >= 1 and number % 1 == 0 else f"{number:g}"


_SHARES = ("zero", "subnormal", "overflow")


def _marks(scale: float, found: Mapping[str, Any]) -> Iterable[str]:
    return [name for name, key in (("now", "scale"), ("best", "best_scale")) if found[key] == scale]


def _comparison(found: Mapping[str, Any]) -> Iterator[Any]:
    yield f"Comparison: {found['title']}"
    yield found["verdict"]
    columns = [
        Column("function"),
        *(Column(name, is_number=True) for name in ("calls", "above noise", "error")),
    ]
    differing = [row for row in found["functions"] if row["error"]]
    cells = [
        (shown_function(row["name"]), f"{row['calls']:,}", f"{row['above']:,}", _error(row["error"]))
        for row in differing[:ROWS]
    ]
    yield from table("Errors by function", columns, cells, len(differing))


def _error(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.2g}"


def _place(row: Mapping[str, Any], source: str = "") -> str:
    if row["file"] is None:
        return ""
    place = f"{shown_path(row['file'])}:{row['line']}"
    return f"{place}\n{source}" if source else place


def _seconds(number: float) -> str:
    return in_terminal(seconds(number))


def _bytes(number: float) -> str:
    return in_terminal(size(number))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _counted(number: int, one: str, plural: str = "s") -> str:
    return f"{number:,} {one}{'' if number == 1 else plural}"
