"""The framework that an adapter needs: whether it is installed, and in which version."""

from __future__ import annotations

import importlib
import re

from ampatch.errors import IntegrationError


def need(adapter: str, framework: str, module: str, least: tuple[int, ...], install: str | None = None) -> None:
    """Imports a framework; raises if it is not installed or too old.

    Args:
        adapter: what needs it, for the message.
        framework: name of its package.
        module: name of its module.
        least: oldest version that the adapter works with: major and minor number, and the micro number if it matters.
        install: sentence that says what to type; None: to install that package alone.

    Raises:
        IntegrationError: it is older, or a module is missing.
    """
    needed = ".".join(map(str, least))
    install = install or f"Type pip install '{framework}>={needed}'."
    try:
        found = importlib.import_module(module).__version__
    except ModuleNotFoundError as error:
        raise IntegrationError(f"{adapter} needs {framework}, but {error.name} is missing. {install}") from error
    if tuple(map(int, re.findall(r"\d+", found)[: len(least)])) < least:
        raise IntegrationError(f"{adapter} needs {framework} {needed}, but found {found}. {install}")
