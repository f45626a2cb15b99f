"""The version of a framework that an adapter needs.

Must not import a framework: the adapter does.
"""

from __future__ import annotations

import re

from ampatch.errors import IntegrationError


def check(adapter: str, framework: str, found: str, least: tuple[int, ...], install: str) -> None:
    """Raises if the version of a framework is too old.

    Args:
        adapter: what needs it, for the message.
        framework: name of its module.
        found: its version, such as "2.6.6" or "1.4.0.dev1".
        least: oldest version that the adapter works with: major and minor number, and the micro number if it matters.
        install: sentence that says what to type.

    Raises:
        IntegrationError: it is older.
    """
    if tuple(map(int, re.findall(r"\d+", found)[: len(least)])) < least:
        needed = ".".join(map(str, least))
        raise IntegrationError(f"{adapter} needs {framework} {needed}, but found {found}. {install}")
