"""The command `ampatch`: parses the command line, calls the subcommand, and turns errors into exit statuses.

Must never compute results itself. An AmpError, a closed pipe or Ctrl-C must never end in a traceback. Must never import
torch for `ampatch run`: that process becomes another Python, whose script imports torch itself.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ampatch import __version__
from ampatch.cli.run import run
from ampatch.errors import AmpError, did_you_mean, faults

_FAULT = 1  # argparse exits with 2 if the command line is wrong
# Exit statuses that a shell reports for a program ended by a signal: 128 + SIGINT, 128 + SIGPIPE.
_INTERRUPTED = 130
_PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: command line without the program's name; None for that of `sys.argv`.

    Returns:
        The exit status: 0 for success, or 1 if the command found a fault in its input or could not write. It is 130
        after Ctrl-C, and 141 if the reader of its output closed the pipe.

    Raises:
        SystemExit: after `--help` and `--version` (0), and if the command line itself is wrong (2).
    """
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            # At the interpreter's exit, an error of this flush could no longer be caught.
            if sys.stdout is not None:  # None after the shell's `>&-`
                sys.stdout.flush()
    except AmpError as error:
        for line in faults(error):
            _print_error(line)
        return _FAULT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return _PIPE_CLOSED
    except OSError as error:
        _discard_output()
        _print_error(str(error))
        return _FAULT


def _run(arguments: list[str]) -> int:
    own, of_script = _split(arguments)
    parsed = _parser(own).parse_args(own, argparse.Namespace(arguments=of_script))
    return int(parsed.run(parsed))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line of ``ampatch run`` after the script or module; the script's own arguments stay as typed."""
    words = [
        place
        for place, argument in enumerate(arguments)
        if (not argument.startswith("-") or argument == "-") and arguments[max(place - 1, 0)] not in _WITH_VALUE
    ]
    if len(words) < 2 or arguments[words[0]] != "run":
        return arguments, []
    return arguments[: words[1] + 1], arguments[words[1] + 1 :]


#: Options of ``ampatch run`` whose values are the next argument.
_WITH_VALUE = ("--report",)


class _Parser(argparse.ArgumentParser):
    """A parser that says which choice or option was meant."""

    #: What follows the error if an unknown argument resembles no option of this command.
    advice = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown arguments in the command's own parser, which knows what could have been meant."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], re.findall(r"--[\w-]+", self.format_usage()))
            told = hint or self.advice
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'.' if told else ''}{told}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the usage and an error, and exits with 2."""
        refused = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(refused[1], re.findall(r"[\w-]+", refused[2])) if refused else ""
        super().error(message + hint)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="ampatch", description="Mixed precision for PyTorch, with cast lists that users can edit.")
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands.add_parser("run", help=_RUN, description=_RUN, usage=_RUN_USAGE, allow_abbrev=False))
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command != "run":
        if command != "doctor":  # doctor imports the user's modules and must show what is wrong here
            # Without numpy, torch warns on import. None of these commands uses numpy.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
        from ampatch.cli import commands as others

        others.add_to(commands, command)
    return parser


_RUN = (
    "Runs any training script, and on request reports what its mixed precision did, or explains skipped steps. A "
    "script that imports Apex gets ampatch in its place. Options come before SCRIPT; the script gets all that follows."
)
_RUN_USAGE = "ampatch run [-h] [--cpu] [--force] [--trace-overflow] [--report FILE] (SCRIPT | -m MODULE) ..."


def _add_run(parser: _Parser) -> None:
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="keep on the CPU whatever the script sends to a GPU, to try the script on a computer without one",
    )
    parser.add_argument("--force", action="store_true", help="replace Apex even if the installed Apex has amp")
    parser.add_argument(
        "--trace-overflow",
        action="store_true",
        help="at each skipped step, log the function that first produced inf or NaN, with its line and its remedy",
    )
    parser.add_argument(
        "--report",
        type=_not_empty,
        metavar="FILE",
        help="write what amp did in the whole script to FILE.html, a page, or FILE.json",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "target", type=_not_empty, metavar="SCRIPT | MODULE", help="script or module to run, and then its arguments"
    )
    parser.advice = " Python's own go in front: python -u -m ampatch run SCRIPT ..."
    parser.set_defaults(run=run)


def _not_empty(text: str) -> str:
    # Python would read an empty name as the current folder.
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def _print_error(line: str) -> None:
    print(f"ampatch: error: {line}", file=sys.stderr)


def _discard_output() -> None:
    """Discards the unwritten output, which the interpreter would otherwise try to write again at exit."""
    with suppress(OSError, ValueError):  # sys.stdout might have no file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
