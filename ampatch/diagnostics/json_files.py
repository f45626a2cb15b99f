"""The files of results: reports as JSON, which names its format and version.

Owns both names, the checks of paths, and that a file is written as a whole. Must never change what a report says.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ampatch.errors import OptionError

FORMAT = "ampatch report"
VERSION = 1
#: The endings of a page's name.
PAGES = (".html", ".htm")
_WRITE_ONE = "Write one with report.save('report.json'), or with `ampatch run --report report.json SCRIPT`."


def checked_path(path: object, suffixes: Sequence[str], otherwise: str) -> Path:
    """Returns the path of a file that can be written, without writing it.

    Args:
        path: of the file, which is replaced if it exists; "~" is the user's home.
        suffixes: the endings that its name may have; empty for any.
        otherwise: what to type for a file of another kind.

    Raises:
        OptionError: it is no path, has another ending, is no ordinary file, or is in a folder that is missing or cannot
            be written.
    """
    if not isinstance(path, (str, PathLike)) or not os.fsdecode(path):
        found = "empty" if path == "" else repr(path)
        example = f"report{''.join(suffixes[:1])}"
        raise OptionError(f"the path is {found}; expected the name of a file, such as {example!r}.")
    file = Path(os.path.expanduser(os.fsdecode(path)))  # noqa: PTH111 - Path's raises for an unknown user
    if suffixes and file.suffix.lower() not in suffixes:
        endings = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise OptionError(f"{str(file)!r} does not end with {endings}. {otherwise}")
    folder = file.parent
    if not folder.is_dir():
        raise OptionError(f"{str(file)!r} cannot be written: there is no folder {str(folder)!r}. Make it first.")
    if file.exists() and not file.is_file():
        kind = "a folder" if file.is_dir() else "no ordinary file"
        raise OptionError(f"{str(file)!r} cannot be written: it is {kind}. Give another name.")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise OptionError(f"{str(file)!r} cannot be written: permission denied. Give another name.")
    return file


def checked_list(path: object) -> Path:
    """Returns the path of a cast list that can be written, without writing it; raises as `checked_path`."""
    return checked_path(path, (".yaml", ".yml"), "Type 'casts.yaml'.")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context that writes a file as a whole: yields the path to write to, and puts that file in place at the end.

    Another process that reads the file meanwhile finds it as it was. After an error it stays so. A link stays a link.
    """
    target = path.resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> None:
    """Writes a file as a whole.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as unfinished:
        # The path of a file may hold bytes that are no text. JSON reads their escapes back.
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")


def write(data: dict[str, Any], path: str | PathLike[str]) -> None:
    """Writes a report to a file.

    Args:
        data: what `Report.to_dict` returns.
        path: of the file, which is replaced if it exists.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n", Path(path))


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads the report that `write` has written to a file.

    Raises:
        OptionError: the file is no report, or one of another version.
        OSError: the file cannot be read.
    """
    name = fspath(path)
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
    except (ValueError, RecursionError) as error:  # no JSON, no text, or another JSON
        raise OptionError(f"{name} is no report ({error}). {_WRITE_ONE}") from error
    if data.get("version") != VERSION:
        about = data.get("about")
        writer = about.get("ampatch", "unknown") if isinstance(about, dict) else "unknown"
        raise OptionError(
            f"{name} is a report of version {data.get('version')!r}; this ampatch reads version {VERSION}. Read it "
            f"with the ampatch that wrote it ({writer}), or write it again."
        )
    return data


def plain(value: Any) -> Any:
    """Returns plain data with inf and NaN as text, which JSON has no numbers for, and sets as sorted lists."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, frozenset)):
        return [plain(each) for each in (sorted(value) if isinstance(value, frozenset) else value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
