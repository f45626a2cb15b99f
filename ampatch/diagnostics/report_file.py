"""The files of reports: JSON, which names its format and version.

Owns both names. Must never change what a report says.
"""

from __future__ import annotations

import json
import math
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ampatch.errors import OptionError

FORMAT = "ampatch report"
VERSION = 1


def write(data: dict[str, Any], path: str | PathLike[str]) -> None:
    """Writes a report to a file.

    Args:
        data: what `Report.to_dict` returns.
        path: of the file, which is replaced if it exists.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads the report that `write` has written to a file.

    Raises:
        OptionError: the file is no report, or one of another version.
        OSError: the file cannot be read.
    """
    name = fspath(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text
        raise OptionError(f"{name} is no report: it is not JSON ({error}). Write one with report.save(...).") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise OptionError(
            f"{name} is JSON, and no report: its format is not {FORMAT!r}. Write one with report.save(...)."
        )
    if data.get("version") != VERSION:
        raise OptionError(
            f"{name} is a report of version {data.get('version')!r}; this ampatch reads version {VERSION}. Read it "
            f"with the ampatch that wrote it ({data.get('about', {}).get('ampatch', 'unknown')}), or write it again."
        )
    return data


def plain(value: Any) -> Any:
    """Returns plain data with inf and NaN as text, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
