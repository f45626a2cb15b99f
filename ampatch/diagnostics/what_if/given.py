"""The formats that users name, as rows of `ampatch.formats`. Must accept what cast lists accept, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ampatch.errors import AmpError, OptionError
from ampatch.formats import Format, chosen, named


def checked_formats(given: object) -> list[Format]:
    """Returns the formats that a user names, each once.

    Raises:
        OptionError: there is none, or one is none.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise OptionError(f"formats is {given!r}; expected a list of formats, such as ['float8_e4m3', 'e3m4'].")
    formats = list(dict.fromkeys(map(format_of, given)))
    if not formats:
        raise OptionError("formats is empty; expected at least one format, such as ['float8_e4m3'].")
    return formats


def format_of(given: object) -> Format:
    """Returns a format that a user names.

    Raises:
        OptionError: there is no such format.
    """
    try:
        if isinstance(given, str):
            return named(given)
        is_text = isinstance(given, Mapping) and all(isinstance(each, str) for pair in given.items() for each in pair)
        if not isinstance(given, Mapping) or not is_text or "name" not in given:
            example = "{'name': 'float8_e4m3', 'scale': 'row'}"
            raise AmpError(f"found {given!r}; expected a name, or a mapping of text with a name, such as {example}.")
        return chosen(given)
    except AmpError as error:
        raise OptionError(f"in formats: {error}") from None
