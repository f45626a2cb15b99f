"""Defines all subcommands of `ampatch` except `run`: their arguments, what they call and what they print.

They must never work anything out by themselves, nor catch what `main` turns into an exit status. Each imports what it
needs itself: `ampatch --help` must not wait for torch, nor the cast lists for what patches it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampatch.errors import CastListError, KernelError, OptionError

if TYPE_CHECKING:
    import torch

_FAULT = 1  # a fault in what the command read, or a warning where that is to count as one

# The half types of a peer that does not have both.
_PEER_HALF_DTYPES = {"apex": ["float16"]}

_DEMO = "Trains a small network in float32 and in mixed precision, and compares the two."
_LISTS = "Shows, checks and compares the cast lists."
_SHOW = "Prints the rules in force, each with the file and line it comes from."
_CHECK = "Says what is wrong with cast list files, one line a fault."
_DIFF = "Prints what another system, or a file of yours, casts otherwise than ampatch's own lists."
_DOCTOR = "Prints what a bug report needs: versions, devices, kernels, and who has patched what of torch."
_BUILD = "Compiles the extension, which amp uses from then on: kernels, and the calls of patched functions."


def add_to(commands: Any, command: str | None) -> None:
    """Adds these subcommands to a parser's.

    Args:
        commands: what ``add_subparsers`` gave.
        command: the one that is asked for, if any. Only that one gets its arguments, whose names and defaults come
            from modules that no other command should wait for.
    """
    for name, (sentence, add_arguments) in _COMMANDS.items():
        parser = commands.add_parser(name, help=sentence, description=sentence)
        if name == command:
            add_arguments(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from ampatch import demo

    demo.add_arguments(parser)
    parser.set_defaults(run=demo.run)


def _add_lists(parser: argparse.ArgumentParser) -> None:
    reports = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_show(reports.add_parser("show", help=_SHOW, description=_SHOW))
    _add_check(reports.add_parser("check", help=_CHECK, description=_CHECK))
    _add_diff(reports.add_parser("diff", help=_DIFF, description=_DIFF))


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="shows the rules of these functions alone: a name (softmax), a path (torch.softmax), a namespace "
        "(torch.fft) or a pattern ('*_loss')",
    )
    _add_half_dtype(parser, "the half type to show the rules of (default: both)")
    parser.add_argument(
        "--cast-lists",
        type=_file,
        action="append",
        default=[],
        metavar="FILE",
        help="a file to lay over ampatch's own lists; may be given several times",
    )
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import list_reports
    from ampatch.cast_lists.lists import shipped

    with _searching_here():
        lists = shipped().overlaid(arguments.cast_lists)
    _print(list_reports.policy(lists, arguments.half_dtype or list_reports.BOTH, arguments.names))
    return 0


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=_file,
        metavar="FILE",
        help="a file as `amp.initialize(cast_lists=...)` takes it; of several each is checked by itself, and the exit "
        "status is 1 if any has a fault",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with status 1 also where an edit is undone by what the function calls, of which "
        "`amp.initialize` warns",
    )
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import list_reports
    from ampatch.cast_lists.lists import shipped

    status = 0
    for file in arguments.files:
        try:
            with _searching_here():
                changed = shipped().overlaid(file)  # read once only: it may be a pipe
        except CastListError as error:
            _print(list_reports.faults(error))
            status = _FAULT
            continue
        checked = list_reports.checked(file, shipped(), changed)
        _print(checked.lines)
        if arguments.strict and checked.warns:
            status = _FAULT
    return status


def _add_diff(parser: argparse.ArgumentParser) -> None:
    from ampatch.cast_lists.lists import PEERS

    parser.add_argument(
        "other",
        type=_peer_or_file,
        metavar="SYSTEM | FILE",
        help=f"the system to compare with ({', '.join(PEERS)}), or a file as `amp.initialize(cast_lists=...)` takes it",
    )
    _add_half_dtype(parser, "the half type to compare in (default: those that the other system has)")
    parser.set_defaults(run=_diff)


def _peer_or_file(text: str) -> str:
    from ampatch.cast_lists.lists import PEERS
    from ampatch.cast_lists.yaml_tree import unexpanded
    from ampatch.errors import did_you_mean

    file = _file(text)
    if text in PEERS or Path(file).exists():
        return file
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither one of {', '.join(PEERS)}, nor a file that there is."
        f"{did_you_mean(text, PEERS)}{unexpanded(text)}"
    )


def _diff(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import list_reports
    from ampatch.cast_lists.lists import PEERS, peer, shipped
    from ampatch.opt_levels import HALF_DTYPES

    other = arguments.other
    of_peer = tuple(HALF_DTYPES[name] for name in _PEER_HALF_DTYPES.get(other, HALF_DTYPES))
    half_dtypes = arguments.half_dtype or of_peer
    if other in PEERS:
        _print(list_reports.difference(peer(other), shipped(), other, half_dtypes))
        return 0
    with _searching_here():
        changed = shipped().overlaid(other)
    _print(list_reports.changes(shipped(), changed, other, half_dtypes))
    return 0


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE",
        help="a module to import beforehand, such as your own or a plug-in that patches torch",
    )
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from ampatch import amp, doctor
    from ampatch.runtime import runtime

    _import(arguments.modules)
    if runtime.live is not None:  # by one of the modules
        _print(doctor.report())
        return 0
    try:
        handle = amp.init()
    except Exception:  # all the more does the report tell what there is to tell
        _print(doctor.report())
        raise
    with handle:
        _print(doctor.report())
    _print(["", "amp was set up for this report alone, with the defaults of amp.init()."])
    return 0


def _import(modules: Iterable[str]) -> None:
    with _searching_here():
        for module in modules:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # it may raise whatever it likes
                raise OptionError(
                    f"the module {module!r} cannot be imported ({type(error).__name__}: {error}). Type the name that "
                    "stands after `import`, such as package.module."
                ) from error


@contextmanager
def _searching_here() -> Iterator[None]:
    """Has the user's modules found in the current folder, as by `python -m`, whichever way the command was started."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove("")


def _add_build(parser: argparse.ArgumentParser) -> None:
    from ampatch.native import extension_build

    parser.add_argument(
        "--device",
        choices=extension_build.DEVICES,
        default="auto",
        help="cuda: kernels for the CPU and for GPUs; cpu: for the CPU alone; auto: for GPUs too if there is an nvcc",
    )
    parser.add_argument(
        "--arch",
        type=_list,
        default=None,
        metavar="LIST",
        help="architectures of the GPUs, as 80,90 (default: this machine's or, if it has none, "
        f"{','.join(extension_build.DEFAULT_ARCHITECTURES)})",
    )
    parser.add_argument(
        "--output",
        type=_file,
        default=None,
        metavar="DIR",
        help="where to put the library (default: the cache, where amp finds it)",
    )
    parser.add_argument("--force", action="store_true", help="build it even if it is there")
    parser.set_defaults(run=_build)


def _build(arguments: argparse.Namespace) -> int:
    from ampatch.native import extension, extension_build

    output = None if arguments.output is None else Path(arguments.output)
    plan = extension_build.plan(arguments.device, arguments.arch, output)
    if plan.note:
        _print([plan.note])
    gpus = f" and for GPUs of architecture {', '.join(plan.architectures)}" if plan.architectures else ""
    _print(
        [
            f"Compiler: {plan.compiler.version} ({plan.compiler.command[0]})",
            f"Kernels:  for the CPU{gpus}",
            f"Library:  {plan.directory / extension.LIBRARY}",
        ]
    )
    sys.stdout.flush()  # compiling takes a while, which a pipe would spend without a word
    built = extension_build.carry_out(plan, arguments.force)
    if built.was_cached:
        _print(["It is there already, built of these very sources. `ampatch build --force` builds it again."])
    else:
        _print([f"Built and tried out in {built.seconds:.0f} seconds."])
    found = extension.find()
    if output is None and found is not None and found.path != built.library.path:
        _print([f"Of the libraries that are there, amp takes {found.path}: it is for more GPUs."])
    if output is None:
        _build_calls(arguments.force)
    return 0


def _build_calls(force: bool) -> None:
    """Builds the part that is for this Python and this torch alone, which no package can bring along."""
    from ampatch.native import extension, extension_build

    try:
        plan = extension_build.plan_calls()
    except KernelError as error:
        _print([f"Calls of patched functions stay in plain Python: {error}"])
        return
    _print([f"Calls:    {plan.directory / extension.LIBRARY}"])
    sys.stdout.flush()
    built = extension_build.carry_out(plan, force)
    _print(["It is there already." if built.was_cached else f"Built and tried out in {built.seconds:.0f} seconds."])


def _list(text: str) -> list[str]:
    return text.split(",")


def _add_half_dtype(parser: argparse.ArgumentParser, help_text: str) -> None:
    from ampatch.opt_levels import HALF_DTYPES

    parser.add_argument(
        "--half-dtype", type=_half_dtype, default=None, metavar=f"{{{','.join(HALF_DTYPES)}}}", help=help_text
    )


def _half_dtype(text: str) -> tuple[torch.dtype]:
    from ampatch.opt_levels import check_half_dtype

    try:
        return (check_half_dtype(text, "the half type"),)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> str:
    # An empty name would be taken for the current folder.
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    # In quotes, or after an equals sign, the shell leaves "~" as it is.
    return os.path.expanduser(text)  # noqa: PTH111 - Path's raises for an unknown user


def _print(lines: Iterable[str]) -> None:
    """Prints lines; what the terminal's encoding lacks (in a file's name, say) comes out as an escape."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))


# What each command is for, and how it gets its arguments.
_COMMANDS = {
    "demo": (_DEMO, _add_demo),
    "lists": (_LISTS, _add_lists),
    "doctor": (_DOCTOR, _add_doctor),
    "build": (_BUILD, _add_build),
}
