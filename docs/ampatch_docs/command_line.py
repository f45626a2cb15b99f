"""The page of the command line as Markdown, from the parser of `ampatch`. Must only read it, and run no command."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from ampatch.cli import main


def sections() -> str:
    """Returns one section for each command, with subsections for those that have commands of their own."""
    names = list(_commands(main._parser([])))
    return "\n\n".join("\n\n".join(_section(_commands(main._parser([name]))[name], 2)) for name in names)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns a parser's commands by name."""
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def _section(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}"
    if parser.description:
        yield _text(parser.description)
    commands = _commands(parser)
    if not commands:
        yield f"```text\n{_usage(parser)}\n```"
    rows = [row for action in parser._actions for row in _row(action, parser)]
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows])
    if parser.epilog:
        yield _text(parser.epilog)
    for command in commands.values():
        yield from _section(command, level + 1)


def _usage(parser: argparse.ArgumentParser) -> str:
    words = parser.format_usage().removeprefix("usage: ").split()
    return textwrap.fill(" ".join(words), 88, subsequent_indent="    ", break_on_hyphens=False)


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
        return
    formatter = parser._get_formatter()
    name = formatter._format_action_invocation(action).replace("|", "\\|")
    yield f"| `{name}` | {_text(formatter._expand_help(action) if action.help else '')} |"


def _text(words: str) -> str:
    """Returns a help text as Markdown, in one line: its stars and angle brackets are no markup."""
    parts = re.split("(`.*?`)", " ".join(words.split()))
    return "".join(part if place % 2 else re.sub(r"([*_<|])", r"\\\1", part) for place, part in enumerate(parts))
