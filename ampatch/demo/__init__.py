"""`ampatch demo`: trains a small network on handwritten digits in float32 and in mixed precision, and compares the two.

This module owns the command: its arguments, its messages and its exit status. Every number it prints comes from
`training.run`, which uses the public API only; it must never bypass that function. After Ctrl-C the demo finishes the
step, saves and stops. `--resume` continues from there, on the CPU or a GPU. On the same CPU, with the same torch, it
reaches the same results.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ampatch.demo import checkpoints, digits, interrupts, progress, report, run_report, training
from ampatch.demo.checkpoints import Checkpoint
from ampatch.demo.plan import CHOICES, OPT_LEVELS, SETTINGS, Plan, Run
from ampatch.demo.run_report import RunReport
from ampatch.demo.training import Result, State
from ampatch.diagnostics import json_files
from ampatch.errors import OptionError
from ampatch.half_types import HALF_DTYPES

DEFAULTS = Plan()
# Test accuracy that every default level reaches with the default number of epochs.
GOAL = 0.97
DEFAULT_CHECKPOINT = Path("ampatch-demo.pt")
# What to say of the times, by device.
_TIMES = {
    "cpu": "The times are those of this CPU. Few CPUs have float16 arithmetic, so float16 is slow here; GPUs have it.",
    "cuda": "The times are those of this GPU. The network is too small to keep a GPU busy, so they show no speed-up.",
}
_NEXT = (
    "Next, a script of your own: ampatch run --report report.html train.py. In a training loop amp takes four lines: "
    "docs/guide/setting_up.md."
)

# The fields of a plan, and the arguments that set them.
_PLAN_ARGUMENTS = {"opt_levels": "--opt-levels", "half_dtypes": "--half-dtype", "epochs": "--epochs", "seed": "--seed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ampatch demo` to ``parser``, for `run`. An argument that is not given is None."""
    parser.add_argument(
        "--opt-levels",
        type=partial(
            _names,
            known=CHOICES,
            expected=f"{', '.join(SETTINGS)}, or a level alone for all of its half types",
            example="O0,O1",
        ),
        metavar="LEVELS",
        help=f"opt levels to train at, separated by commas, with or without a half type (default: "
        f"{_listed(DEFAULTS.opt_levels)}). A level alone means that level with each of its half types, so "
        f"{','.join(OPT_LEVELS)} means all runs",
    )
    parser.add_argument(
        "--half-dtype",
        dest="half_dtypes",
        type=partial(_names, known=HALF_DTYPES, expected=", ".join(HALF_DTYPES), example="bfloat16"),
        metavar="DTYPES",
        help="half types to train in, separated by commas, at levels given without one (default: "
        f"{_listed(DEFAULTS.half_dtypes)}); O0 always uses none, O4 and O5 always use bfloat16",
    )
    parser.add_argument(
        "--epochs",
        type=partial(_integer, minimum=1, maximum=1000, example=DEFAULTS.epochs),
        metavar="N",
        help=f"how often each run sees every digit (default: {DEFAULTS.epochs})",
    )
    parser.add_argument(
        "--seed",
        type=partial(_integer, minimum=0, maximum=2**32 - 1, example=DEFAULTS.seed),
        metavar="N",
        help=f"seed of the initial weights and of the order of the digits (default: {DEFAULTS.seed})",
    )
    parser.add_argument(
        "--device",
        type=_device,
        metavar="cpu|cuda",
        help="device to train on (default: cuda if torch sees a GPU, or else cpu)",
    )
    parser.add_argument("--json", type=_file, metavar="FILE", help="also write the results to FILE, as JSON")
    parser.add_argument(
        "--report",
        type=partial(_file, suffixes=json_files.PAGES, otherwise="Type for example report.html"),
        metavar="FILE.html",
        help="also record the first run in float16, or else in another half type, with amp.report, and write its page",
    )
    parser.add_argument(
        "--save",
        type=_file,
        metavar="FILE",
        help="file where Ctrl-C saves the progress; an existing file is replaced (default: the file given to "
        f"--resume, or {DEFAULT_CHECKPOINT})",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="continue from a file that Ctrl-C saved, with its arguments, to the same results",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains at every requested level, prints the table, and writes the files of `--json` and `--report` if given.

    Args:
        arguments: parsed command line, of a parser with `add_arguments`.

    Returns:
        The exit status: 0, or 1 if one of these files could not be written.

    Raises:
        CheckpointError: the demo cannot resume from the file given to `--resume`.
        OptionError: an argument contradicts that file.
        KeyboardInterrupt: after Ctrl-C; the demo has saved its progress, or printed why it could not.
    """
    try:
        with ExitStack() as restored, interrupts.held_back() as interrupt:
            # One thread is enough for 8 x 8 images, and faster than several on a busy machine.
            restored.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            start = _start(arguments)
            json = None if start.json is None else _still_writable("--json", start.json)
            recorded = _recorded(start, is_typed=arguments.report is not None)
            target = arguments.save or arguments.resume or DEFAULT_CHECKPOINT
            device = arguments.device or _default_device()
            results = _train(start, _Keeper(interrupt, start, target, device), recorded)
    except KeyboardInterrupt as interruption:
        _say(str(interruption) or "Interrupted: nothing was saved.")
        raise
    print(report.table(results))
    if (note := _still_learning(start.plan, results)) is not None:
        _say(note)
    _say(_TIMES[device])
    _say(_NEXT)
    if json is not None:
        try:
            json_files.write_text(report.as_json(results), json)
        except OSError as error:
            _say(f"The results could not be written: {error}")
            return 1
    return int(recorded is not None and recorded.failed)


def _start(arguments: argparse.Namespace) -> Checkpoint:
    """Returns the state to start from: an empty checkpoint, or the one of `--resume`."""
    given = {name: getattr(arguments, name) for name in _PLAN_ARGUMENTS if getattr(arguments, name) is not None}
    json = None if arguments.json is None else str(arguments.json.absolute())
    page = None if arguments.report is None else str(arguments.report.absolute())
    if arguments.resume is None:
        if "half_dtypes" in given and "opt_levels" not in given:
            # Run the default levels in the given half types; the default settings name half types of their own.
            given["opt_levels"] = list(dict.fromkeys(name.partition(":")[0] for name in DEFAULTS.opt_levels))
        return Checkpoint(replace(DEFAULTS, **given), json, finished=[], running=None, report=page)
    saved = checkpoints.load(arguments.resume)
    for name, value in given.items():
        before = getattr(saved.plan, name)
        if value != before:
            argument = _PLAN_ARGUMENTS[name]
            raise OptionError(
                f"{argument} {_listed(value)} contradicts {str(arguments.resume)!r}, which began with {argument} "
                f"{_listed(before)}. Leave {argument} out, or --resume to train from the start."
            )
    return replace(saved, json=json or saved.json, report=page or saved.report)


def _recorded(start: Checkpoint, *, is_typed: bool) -> RunReport | None:
    """Returns the report that is to be made, if any.

    Args:
        start: the state to start from.
        is_typed: True if `--report` is an argument of this command, and not only of the one that was interrupted.

    Raises:
        OptionError: there is no run to report on, or the page cannot be written.
    """
    if start.report is None:
        return None
    runs = start.plan.runs()
    run = run_report.reported(runs)
    if run is None:
        raise OptionError(
            f"--report is of a run in a half type, and --opt-levels {_listed(start.plan.opt_levels)} has none. Type "
            "for example --opt-levels O0,O1"
        )
    if runs.index(run) < len(start.finished):
        if is_typed:
            raise OptionError(
                f"--report is of {run}, which had ended before the demo was interrupted. Leave --report out, or "
                "--resume to train from the start."
            )
        return None  # its page was written when it ended
    return RunReport(run, _still_writable("--report", start.report, json_files.PAGES))


def _still_writable(option: str, file: str, suffixes: Sequence[str] = ()) -> Path:
    """Returns the file of an option, which may be that of a demo that was interrupted long ago."""
    try:
        return json_files.checked_path(file, suffixes, "")
    except OptionError as error:
        raise OptionError(f"the demo began with {option}: {error} Or type {option} with another file.") from error


def _train(start: Checkpoint, keeper: _Keeper, recorded: RunReport | None) -> list[Result]:
    train, test = (part.to(keeper.device) for part in digits.split(digits.load()))
    plan, results, state = start.plan, list(start.finished), start.running
    where = "the CPU" if keeper.device == "cpu" else f"the GPU ({torch.cuda.get_device_name()})"
    _say(f"Training on {len(train)} digits, testing on {len(test)}, on {where}, {_epochs(plan.epochs)} a run.")
    runs = plan.runs()
    if results or state is not None:
        _say(f"Resuming after {len(results)} of {len(runs)} runs{'' if state is None else ' and a part of the next'}.")
    is_drawn = progress.is_drawn()
    # No time is measured for a bar that is not drawn.
    times = {
        run: training.seconds_per_step(train, run.opt_level, run.dtype, seed=plan.seed) if is_drawn else 1.0
        for run in runs
    }
    steps = plan.epochs * training.steps_per_epoch(train)
    done_before = 0 if state is None else training.steps_done(state)  # now, as the next run adds to this state
    with progress.shown(times, steps, finished=len(results), steps_done=done_before) as shown:

        def after_step(run: Run, loss: float, state: Callable[[], State]) -> None:
            shown.step(run, loss)
            keeper.stop_if_asked(results, state)

        for planned in runs[len(results) :]:
            recording = recorded if recorded is not None and planned == recorded.run else None
            result = training.run(
                train,
                test,
                planned.opt_level,
                planned.dtype,
                epochs=plan.epochs,
                seed=plan.seed,
                on_step=partial(after_step, planned),
                resume_from=state,
                recording=None if recording is None else recording.recording,
            )
            if recording is not None:
                # At once, since Ctrl-C may end the demo before its other runs.
                for line in recording.write(done_before):
                    shown.say(line)
            shown.say(f"{planned}: {result.test_accuracy:.2%} of the test digits recognised.")
            results, state, done_before = [*results, result], None, 0
            keeper.stop_if_asked(results, None)
    return results


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Saves the demo's progress after Ctrl-C.

    Attributes:
        interrupt: record of whether Ctrl-C was pressed.
        start: checkpoint that the demo started from.
        target: file to save to.
        device: "cpu" or "cuda": device of the runs.
    """

    interrupt: interrupts.Interrupt
    start: Checkpoint
    target: Path
    device: str

    def stop_if_asked(self, finished: list[Result], state: Callable[[], State] | None) -> None:
        """Saves and stops if Ctrl-C was pressed.

        Args:
            finished: results of the finished runs.
            state: function that returns the state of the present run; None between runs.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; its message is the line to print.
        """
        if not self.interrupt.requested:
            return
        reached = replace(self.start, finished=finished, running=None if state is None else state())
        try:
            checkpoints.save(reached, self.target)
        except (OSError, OptionError) as error:
            raise KeyboardInterrupt(
                f"Interrupted, and the progress could not be saved: {error}. Type --save FILE to save it elsewhere "
                "next time."
            ) from error
        # Python by its path: `ampatch` need not be on the user's PATH.
        command = [sys.executable, "-m", "ampatch", "demo", "--resume", str(self.target)]
        device = [] if self.device == _default_device() else ["--device", self.device]
        raise KeyboardInterrupt(f"Interrupted. To go on, type: {shlex.join([*command, *device])}")


def _still_learning(plan: Plan, results: Sequence[Result]) -> str | None:
    """Returns a note if accuracies are low for lack of epochs, not because of mixed precision; else None."""
    if plan.epochs >= DEFAULTS.epochs or all(result.test_accuracy >= GOAL for result in results):
        return None
    return (
        f"After {_epochs(plan.epochs)} the network is still learning, in float32 (O0) as in mixed precision. The "
        f"default of {DEFAULTS.epochs} epochs reaches {GOAL:.0%}: type --epochs {DEFAULTS.epochs} or more."
    )


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def _say(line: str) -> None:
    """Prints a line to standard error, since standard output is for the table only."""
    print(line, file=sys.stderr, flush=True)


def _listed(value: list[str] | int) -> str:
    """Returns a value as it is typed on the command line."""
    return ",".join(value) if isinstance(value, list) else str(value)


def _names(text: str, known: Collection[str], expected: str, example: str) -> list[str]:
    """Parses names separated by commas; drops repeated ones."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {expected}. Type for example {example}")
    return list(dict.fromkeys(names))


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(text: str) -> str:
    if text not in _TIMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_TIMES)}. Type for example cpu")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here. Type cpu, or leave --device out")
    return text


def _integer(text: str, minimum: int, maximum: int, example: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {minimum} to {maximum}. Type for example {example}"
        )
    return number


def _file(text: str, suffixes: Sequence[str] = (), otherwise: str = "") -> Path:
    """Parses the name of a file to write, and raises before any training; see `json_files.checked_path`."""
    try:
        return json_files.checked_path(text, suffixes, otherwise)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
