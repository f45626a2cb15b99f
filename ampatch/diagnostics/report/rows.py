"""The counts of a report: calls and casts by function and line, with the times of casts.

Owns the counts. Must never hold a tensor, nor sync with a device before it is asked for numbers.
"""

from __future__ import annotations

import linecache
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampatch.diagnostics.recorder.functions import name_of
from ampatch.diagnostics.recorder.operands import bytes_of
from ampatch.grouping import grouped
from ampatch.opt_levels import dtype_name

#: Types of tensors in the arguments of a call, and in its result.
Types = tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]

#: Casts on a GPU whose times are not read yet. From then on, the times of casts that have ended are read.
_UNREAD = 2000


@dataclass(slots=True, eq=False, kw_only=True)
class Numbers:
    """Counts of calls and casts.

    Attributes:
        calls: number of calls.
        casts: number of tensors cast.
        cast_bytes: bytes that casts wrote.
        cast_seconds: time that casts took at most: on the device on a GPU, by the clock on the CPU.
        cache_hits: number of uses of a cast that was made before.
        cache_hit_bytes: bytes that these would have written.
    """

    calls: int = 0
    casts: int = 0
    cast_bytes: int = 0
    cast_seconds: float = 0.0
    cache_hits: int = 0
    cache_hit_bytes: int = 0

    def add_hits(self, kept: list[Tensor]) -> None:
        """Counts uses of casts that were made before."""
        self.cache_hits += len(kept)
        self.cache_hit_bytes += sum(map(bytes_of, kept))


@dataclass(slots=True, eq=False)
class Row(Numbers):
    """What one line of user code caused by one function.

    Attributes:
        function: the function, or a text that stands for one.
        code: code of the line; None if no user code called the function.
        line: number of the line.
        types: number of calls, or of casts of a forward pass, by the types of their tensors.
        undone: number of casts that undid another.
        forward: the forward pass that was counted last as a call.
    """

    function: Any
    code: types.CodeType | None
    line: int
    types: Counter[Types] = field(default_factory=Counter)
    undone: int = 0
    forward: Any = None


#: A kind of matrix product in half whose size is no multiple of 8: the function and the line, the module that it runs
#: in as `report_modules` knows it, the half type, m, k and n, and the multiples of 8 to pad these to.
Product = tuple[Row | None, Any, torch.dtype, tuple[int, int, int], tuple[int, int, int]]


class Rows:
    """All counts of a report.

    Attributes:
        products: numbers of matrix products that need padding.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, int, int], Row] = {}
        self._unread: deque[tuple[Row, Any, Any]] = deque()
        self.products = Counter[Product]()

    def row(self, function: Any, frame: types.FrameType | None) -> Row:
        """Returns the row of a function that is called from a line of user code.

        Args:
            function: the function.
            frame: the frame that runs the line; None without user code.
        """
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        key = function, id(code), line
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Row(function, code, line)  # keeps the code, so that no other gets its id
        return row

    def timed(self, row: Row | None, is_on_gpu: bool, make: Callable[[], Any]) -> Any:
        """Runs a cast, and adds its time to a row if one is given; the caller has taken off the modes that record."""
        if row is None:
            return make()
        if is_on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            made = make()
            end.record()
            self._unread.append((row, begin, end))
            if len(self._unread) > _UNREAD:
                self._read_ended()
            return made
        before = time.perf_counter()
        made = make()
        row.cast_seconds += time.perf_counter() - before
        return made

    def _read_ended(self) -> None:
        while self._unread and self._unread[0][2].query():
            row, begin, end = self._unread.popleft()
            row.cast_seconds += begin.elapsed_time(end) / 1000

    def read(self) -> list[Row]:
        """Returns the rows that count something; waits for casts on GPUs that still run."""
        for *_, end in list(self._unread):
            end.synchronize()
        self._read_ended()
        return [row for row in self._rows.values() if row.calls or row.casts or row.cache_hits]


def totals(rows: Iterable[Row]) -> dict[str, Any]:
    """Returns the sum of rows as plain data."""
    summands = [Numbers(), *rows]  # the first, since no rows have a time of 0.0 seconds
    return {name: sum(getattr(each, name) for each in summands) for name in Numbers.__slots__}


def functions(rows: Iterable[Row], rules: dict[Any, str], formats: dict[Any, str]) -> list[dict[str, Any]]:
    """Returns rows by function as plain data; first the functions whose casts write most.

    Args:
        rows: the rows.
        rules: the list that rules each function.
        formats: the number formats of each function that has some.
    """
    found = []
    for name, of_function in grouped((name_of(row.function), row) for row in rows).items():
        types = sum((row.types for row in of_function), Counter[Types]())
        found.append(
            {
                "name": name,
                "rule": next((rules[row.function] for row in of_function if row.function in rules), None),
                "format": next((formats[row.function] for row in of_function if row.function in formats), None),
                "types": [
                    {"in": [dtype_name(each) for each in given], "out": [dtype_name(each) for each in out], "calls": n}
                    for (given, out), n in types.most_common()
                ],
                **totals(of_function),
                "undone": sum(row.undone for row in of_function),
            }
        )
    return sorted(found, key=_importance)


def lines(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Returns rows by line as plain data; first the lines whose casts write most."""
    found = []
    by_line = grouped(((row.code.co_filename, row.line), row) for row in rows if row.code is not None)
    for of_line in by_line.values():
        calls = Counter[str]()
        for row in of_line:
            calls[name_of(row.function)] += row.calls
        found.append(
            {
                **place_of(of_line[0]),
                "function": of_line[0].code.co_name,  # type: ignore[union-attr]
                "functions": dict(calls.most_common()),
                **totals(of_line),
            }
        )
    return sorted(found, key=_importance)


def misaligned(products: Counter[Product], module_names: Mapping[Any, str]) -> list[dict[str, Any]]:
    """Returns products as plain data, first those that run most often."""
    return [
        {
            "function": None if row is None else name_of(row.function),
            **place_of(row),
            "module": module_names[module],
            "dtype": dtype_name(dtype),
            "size": list(size),
            "calls": calls,
            "pads": list(pads),
        }
        for (row, module, dtype, size, pads), calls in products.most_common()
    ]


def place_of(row: Row | None) -> dict[str, Any]:
    """Returns a row's line as plain data; None for each field if there is none."""
    if row is None or row.code is None:
        return {"file": None, "line": None, "source": None}
    file = row.code.co_filename
    return {"file": file, "line": row.line, "source": linecache.getline(file, row.line).strip()}


def _importance(entry: dict[str, Any]) -> tuple[Any, ...]:
    return -entry["cast_bytes"], -entry["casts"], -entry["calls"]
