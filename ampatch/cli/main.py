"""The command `ampatch`: reads the command line, calls what does the work, and turns errors into exit statuses.

It must never work anything out by itself, nor let an error that ampatch raises on purpose, a closed pipe or Ctrl-C end
in a traceback; nor import torch for `ampatch run`, whose script will do that once more.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from ampatch import __version__
from ampatch.cli.run import run
from ampatch.errors import AmpError

_FAULT = 1  # argparse itself ends with 2 where the command line is wrong
# What a shell reports of a program that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
_INTERRUPTED = 130
_PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program's name; None takes it from `sys.argv`.

    Returns:
        The exit status: 0; 1 where there is a fault in what the command read, or it could not write; 130 after Ctrl-C;
        141 where whatever reads the output has stopped reading.

    Raises:
        SystemExit: after `--help` and `--version` (0), and where the command line itself is wrong (2).
    """
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            # Not left to the interpreter's end, where an error could not be caught any more.
            if sys.stdout is not None:  # as it is after the shell's `>&-`
                sys.stdout.flush()
    except AmpError as error:
        from ampatch.cast_lists import list_reports

        for line in list_reports.faults(error):
            _complain(line)
        return _FAULT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return _PIPE_CLOSED
    except OSError as error:
        _abandon_output()
        _complain(str(error))
        return _FAULT


def _run(arguments: list[str]) -> int:
    own, of_script = _split(arguments)
    parser = _parser(own)
    parsed, unknown = parser.parse_known_args(own, argparse.Namespace(arguments=of_script, refuse=parser.error))
    if unknown:
        parsed.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = parsed.run(parsed)
    return status


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns a command line up to the script that ``ampatch run`` is to run, and what stands behind it, untouched."""
    words = [place for place, argument in enumerate(arguments) if not argument.startswith("-") or argument == "-"]
    if len(words) < 2 or arguments[words[0]] != "run":
        return arguments, []
    return arguments[: words[1] + 1], arguments[words[1] + 1 :]


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampatch", description="Mixed precision for PyTorch, with cast lists that users can edit."
    )
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands.add_parser("run", help=_RUN, description=_RUN, usage=_RUN_USAGE, allow_abbrev=False))
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command != "run":
        if command != "doctor":  # which shows what is wrong here, and imports modules of the user's
            # Without numpy, torch warns on import. None of these commands uses it.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
        from ampatch.cli import commands as others

        others.add_to(commands, command)
    return parser


_RUN = "Runs a script that was written for Apex, with ampatch in Apex's place."
_RUN_USAGE = "ampatch run [-h] [--cpu] [--force] (SCRIPT | -m MODULE) ..."


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="keep on the CPU what the script sends to a GPU: to try it out, where there is none",
    )
    parser.add_argument("--force", action="store_true", help="stand in for an Apex that has amp, too")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "target", type=_not_empty, metavar="SCRIPT | MODULE", help="what to run; its own arguments follow"
    )

    def refuse(message: str) -> None:
        parser.error(f"{message}. Python's own go in front: python -u -m ampatch run SCRIPT ...")

    parser.set_defaults(run=_run_script, refuse=refuse)


def _not_empty(text: str) -> str:
    # Python would take an empty name for the current folder.
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def _run_script(arguments: argparse.Namespace) -> int:
    run(
        arguments.target,
        arguments.arguments,
        is_module=arguments.is_module,
        force=arguments.force,
        cpu=arguments.cpu,
    )


def _complain(line: str) -> None:
    print(f"ampatch: error: {line}", file=sys.stderr)


def _abandon_output() -> None:
    """Lets what could not be written go, or the interpreter would try once more as it ends."""
    with suppress(OSError, ValueError):  # not every standard output is a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
