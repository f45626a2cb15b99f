"""Tables in a terminal.

Owns the width of text and the look of tables. Drops columns where a terminal is too narrow for all of them, and says
so. Must know nothing of what the tables are about.
"""

from __future__ import annotations

import io
import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Rows of each table that is printed.
ROWS = 10
#: Width for a file or a pipe, which has none of its own.
_WIDTH_OF_PIPE = 120
#: Text columns are folded down to this width before a column is dropped.
_FOLDED = 16


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        head: its heading.
        cell: returns its text for a row.
        is_number: whether its cells are aligned right, and never folded.
        rank: columns of the greatest rank are dropped first; those of rank 0 never.
    """

    head: str
    cell: Callable[[Any], str]
    is_number: bool = False
    rank: int = 0


def number(head: str, value: Callable[[Any], Any], form: str | Callable[[Any], str] = ",", rank: int = 0) -> Column:
    """Returns a column of numbers, in a format or as a function spells them.

    Texts in their place, such as "inf", stay, and None is "-".
    """

    def cell(row: Any) -> str:
        found = value(row)
        if found is None or isinstance(found, str):
            return "-" if found is None else found
        return form(found) if callable(form) else format(found, form)

    return Column(head, cell, is_number=True, rank=rank)


def shown_number(number: float) -> str:
    """Returns a number, with all digits if it is whole."""
    return f"{number:,.0f}" if math.isfinite(number) and number % 1 == 0 else f"{number:g}"


class Whole(str):
    """Text whose lines `printed` does not fold, so that one can copy them."""


def printed(parts: Iterable[Any]) -> str:
    """Returns lines and tables as text that fits the terminal.

    Args:
        parts: text, and functions that return text or a table of `rich` for a width.
    """
    # It takes a tenth of a second to import.
    from rich.console import Console

    width = shutil.get_terminal_size((_WIDTH_OF_PIPE, 24)).columns
    with io.StringIO() as text:
        console = Console(
            file=text,
            width=width,
            highlight=False,
            markup=False,
            emoji=False,
            force_terminal=False,  # whatever FORCE_COLOR says
            force_jupyter=False,  # in a notebook rich would show the text, and write nothing
        )
        for each in parts:
            console.print(each(width) if callable(each) else each, soft_wrap=isinstance(each, Whole))
        lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return lines.encode("utf-8", "backslashreplace").decode("utf-8")  # a path may have bytes that are no text


def table(title: str, columns: Sequence[Column], rows: Sequence[Any], count: int | None = None) -> Iterator[Any]:
    """Yields a table for `printed`; nothing if it has no rows.

    Args:
        title: what the table shows; the table adds how many rows it leaves out.
        columns: its columns.
        rows: its rows; the table shows the first `ROWS`.
        count: number of all rows, if ``rows`` are those to show.
    """
    shown = rows[:ROWS] if count is None else rows
    cells = [[column.cell(row) for column in columns] for row in shown]
    if cells:
        yield lambda width: _made(title, columns, cells, len(rows) if count is None else count, width)


def item(text: str, mark: str = "- ") -> Callable[[int], str]:
    """Returns an item of a list for `printed`: its further lines stand below the first one's text."""
    indent = " " * len(mark)
    return lambda width: textwrap.fill(
        text, width, initial_indent=mark, subsequent_indent=indent, break_on_hyphens=False
    )


def _made(title: str, columns: Sequence[Column], cells: Sequence[Sequence[str]], count: int, width: int) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    kept = _that_fit(columns, cells, width)
    notes = [f"{len(cells)} of {count}"] if count > len(cells) else []
    dropped = [column.head for index, column in enumerate(columns) if index not in kept]
    if dropped:
        notes.append(f"in a wider terminal also: {', '.join(dropped)}")
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index in kept:
        head, is_number = columns[index].head, columns[index].is_number
        made.add_column(head, overflow="fold", justify="right" if is_number else "left", no_wrap=is_number)
    for row in cells:
        made.add_row(*(row[index] for index in kept))
    return Group(title + (f" ({'; '.join(notes)})" if notes else ""), made)


def _that_fit(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Returns the numbers of the columns that a terminal has room for."""
    widths = []
    for index, column in enumerate(columns):
        lines = [line for row in cells for line in row[index].splitlines()]
        longest = max(map(len, [column.head, *lines]))
        widths.append(2 + (longest if column.is_number else min(longest, _FOLDED)))
    kept = list(range(len(columns)))
    droppable = [index for index in kept if columns[index].rank]
    for index in sorted(droppable, key=lambda index: (columns[index].rank, index), reverse=True):
        if sum(widths[each] for each in kept) > width:
            kept.remove(index)
    return kept
