"""Formats the demo's results as a table and as JSON.

Must not train, or compute numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ampatch.demo.training import Result

_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("level", lambda result: result.opt_level),
    ("half dtype", lambda result: result.half_dtype or "-"),
    ("test accuracy", lambda result: f"{result.test_accuracy:.2%}"),
    ("final loss", lambda result: f"{result.final_loss:.4f}"),
    ("ms a step", lambda result: f"{result.ms_per_step:.2f}"),
    ("peak memory (MiB)", lambda result: f"{result.peak_memory_mib:.2f}"),
    ("casts a step", lambda result: f"{result.casts_per_step:.1f}"),
    ("cache hits a step", lambda result: f"{result.cache_hits_per_step:.1f}"),
    ("skipped steps", lambda result: str(result.skipped_steps)),
    ("loss scale", lambda result: f"{result.loss_scale:g}"),
)
# Columns of words, which are aligned left; columns of numbers are aligned right.
_WORDS = 2


def table(results: Sequence[Result]) -> str:
    """Returns the results as lines of text: a line of titles, then one line per run."""
    lines = [[title for title, _ in _COLUMNS]]
    lines += [[cell(result) for _, cell in _COLUMNS] for result in results]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    row = "  ".join(f"{{:{'<' if column < _WORDS else '>'}{width}}}" for column, width in enumerate(widths))
    return "\n".join(row.format(*line).rstrip() for line in lines)


def as_json(results: Sequence[Result]) -> str:
    """Returns the results as a JSON list of objects with the fields of ``Result``; inf and NaN become null."""
    objects = [{key: _or_null(value) for key, value in asdict(result).items()} for result in results]
    return json.dumps(objects, indent=2, allow_nan=False) + "\n"


def _or_null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
