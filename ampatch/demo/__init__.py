"""`ampatch demo`: trains a small network on handwritten digits in float32 and in mixed precision, and compares the two.

This file owns the command: its arguments, what it says while it runs, and how it ends. All it tells of precision
comes from `training.run`, which uses the public API only; it must never reach behind that. Ctrl-C is waited for until a
step has ended, and then saves: `--resume` goes on from there and, on the same machine with the same torch, comes to the
same results.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ampatch.demo import checkpoints, digits, interrupts, progress, report, training
from ampatch.demo.checkpoints import Checkpoint
from ampatch.demo.digits import Digits
from ampatch.demo.plan import CHOICES, OPT_LEVELS, SETTINGS, Plan, Run
from ampatch.demo.training import Result, State
from ampatch.errors import OptionError
from ampatch.opt_levels import HALF_DTYPES

DEFAULTS = Plan()
# What every default level reaches with the default number of epochs.
GOAL = 0.97
DEFAULT_CHECKPOINT = Path("ampatch-demo.pt")
# The arguments that a plan is made of, by its fields.
_PLAN_ARGUMENTS = {
    "opt_levels": "--opt-levels",
    "half_dtypes": "--half-dtype",
    "epochs": "--epochs",
    "seed": "--seed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ampatch demo` to ``parser``, for `run`. None stands for those that were not given."""
    parser.add_argument(
        "--opt-levels",
        type=_one_or_more(CHOICES, f"{', '.join(SETTINGS)}, or a level alone for all of its half types", "O0,O1"),
        metavar="LEVELS",
        help=f"opt levels to train at, separated by commas, with or without a half type (default: "
        f"{_listed(DEFAULTS.opt_levels)}). A level alone stands for all half types that it has, so that "
        f"{','.join(OPT_LEVELS)} is all there is",
    )
    parser.add_argument(
        "--half-dtype",
        dest="half_dtypes",
        type=_one_or_more(HALF_DTYPES, ", ".join(HALF_DTYPES), "bfloat16"),
        metavar="DTYPES",
        help="half types to train in, separated by commas, at levels given without one (default: "
        f"{_listed(DEFAULTS.half_dtypes)}); O0 uses none, and O4 and O5 bfloat16 whatever stands here",
    )
    parser.add_argument(
        "--epochs",
        type=_integer(1, 1000, DEFAULTS.epochs),
        metavar="N",
        help=f"how often each run sees every digit (default: {DEFAULTS.epochs})",
    )
    parser.add_argument(
        "--seed",
        type=_integer(0, 2**32 - 1, DEFAULTS.seed),
        metavar="N",
        help=f"decides the first weights and the order of the digits (default: {DEFAULTS.seed})",
    )
    parser.add_argument(
        "--json", type=_writable(report.check_writable), metavar="FILE", help="also write the results to FILE, as JSON"
    )
    parser.add_argument(
        "--save",
        type=_writable(checkpoints.check_target),
        metavar="FILE",
        help="where Ctrl-C saves how far it has come, in place of what is there (default: the file given to --resume, "
        f"or {DEFAULT_CHECKPOINT})",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="go on from what Ctrl-C saved, with the arguments that it began with, to the same results",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains at every level asked for, prints the table, and writes the JSON report if there is to be one.

    Args:
        arguments: what a parser with `add_arguments` made of the command line.

    Returns:
        The exit status: 0, or 1 if the JSON report could not be written after all.

    Raises:
        CheckpointError: the file given to `--resume` cannot be resumed from.
        OptionError: an argument contradicts that file.
        KeyboardInterrupt: after Ctrl-C; it was saved, or has been said why not.
    """
    try:
        with _one_thread(), interrupts.held_back() as interrupt:
            start = _start(arguments)
            target = arguments.save or arguments.resume or DEFAULT_CHECKPOINT
            results = _train(start, _Keeper(interrupt, start, target))
    except KeyboardInterrupt as interruption:
        _say(str(interruption) or "Interrupted: nothing was saved.")
        raise
    print(report.table(results))
    if (note := _still_learning(start.plan, results)) is not None:
        _say(note)
    _say("The times are this processor's. Few have arithmetic for float16, so that it is slow here; GPUs have.")
    if start.json is not None:
        try:
            Path(start.json).write_text(report.as_json(results), encoding="utf-8")
        except OSError as error:
            _say(f"The results could not be written: {error}")
            return 1
    return 0


def _start(arguments: argparse.Namespace) -> Checkpoint:
    """Returns where to begin: with nothing, or with what was saved."""
    given = {name: getattr(arguments, name) for name in _PLAN_ARGUMENTS if getattr(arguments, name) is not None}
    json = None if arguments.json is None else str(arguments.json.absolute())
    if arguments.resume is None:
        if "half_dtypes" in given and "opt_levels" not in given:
            # The default levels, in these half types rather than in those of the default settings.
            given["opt_levels"] = list(dict.fromkeys(name.partition(":")[0] for name in DEFAULTS.opt_levels))
        return Checkpoint(replace(DEFAULTS, **given), json, finished=[], running=None)
    saved = checkpoints.load(arguments.resume)
    for name, value in given.items():
        before = getattr(saved.plan, name)
        if value != before:
            argument = _PLAN_ARGUMENTS[name]
            raise OptionError(
                f"{argument} {_listed(value)} contradicts {str(arguments.resume)!r}, which began with {argument} "
                f"{_listed(before)}. Leave {argument} out, or --resume to train from the start."
            )
    if json is None and saved.json is not None:
        try:
            report.check_writable(Path(saved.json))
        except OSError as error:
            raise OptionError(
                f"{str(arguments.resume)!r} began with --json {saved.json}, which cannot be written "
                f"({error.strerror or error}). Type --json with another file."
            ) from error
    return replace(saved, json=json or saved.json)


def _train(start: Checkpoint, keeper: _Keeper) -> list[Result]:
    train, test = digits.split(digits.load())
    plan, results, state = start.plan, list(start.finished), start.running
    _say(f"Training on {len(train)} digits, testing on {len(test)}, on the CPU, {_epochs(plan.epochs)} a run.")
    runs = plan.runs()
    if results or state is not None:
        _say(f"Going on after {len(results)} of {len(runs)} runs{'' if state is None else ' and a part of the next'}.")
    times = _seconds_per_step(runs, train, plan.seed)
    steps, steps_done = (
        plan.epochs * training.steps_per_epoch(train),
        0 if state is None else training.steps_done(state),
    )
    with progress.shown(times, steps, finished=len(results), steps_done=steps_done) as shown:
        for planned in runs[len(results) :]:
            result = training.run(
                train,
                test,
                planned.opt_level,
                planned.dtype,
                epochs=plan.epochs,
                seed=plan.seed,
                on_step=partial(_after_step, partial(shown.step, planned), keeper, results),
                resume_from=state,
            )
            shown.say(f"{planned}: {result.test_accuracy:.2%} of the test digits recognised.")
            results, state = [*results, result], None
            keeper.stop_if_asked(results, None)
    return results


def _seconds_per_step(runs: list[Run], train: Digits, seed: int) -> dict[Run, float]:
    """Returns the time of a step of each run; all are 1 if no progress bar is drawn."""
    if not progress.is_drawn():
        return dict.fromkeys(runs, 1.0)
    return {run: training.seconds_per_step(train, run.opt_level, run.dtype, seed=seed) for run in runs}


def _after_step(
    show: Callable[[float], None],
    keeper: _Keeper,
    finished: list[Result],
    loss: float,
    state: Callable[[], State],
) -> None:
    show(loss)
    keeper.stop_if_asked(finished, state)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Saves where Ctrl-C was pressed.

    Attributes:
        interrupt: tells whether it was.
        start: what the demo began with.
        target: the file to save to.
    """

    interrupt: interrupts.Interrupt
    start: Checkpoint
    target: Path

    def stop_if_asked(self, finished: list[Result], state: Callable[[], State] | None) -> None:
        """Saves and stops, if Ctrl-C was pressed.

        Args:
            finished: the results so far.
            state: gives the state of the run that has begun; None where none has.

        Raises:
            KeyboardInterrupt: with the last words on it.
        """
        if not self.interrupt.requested:
            return
        reached = replace(self.start, finished=finished, running=None if state is None else state())
        try:
            checkpoints.save(reached, self.target)
        except OSError as error:
            raise KeyboardInterrupt(
                f"Interrupted, and how far it had come could not be saved: {error}. Type --save to have it saved "
                "elsewhere next time."
            ) from error
        raise KeyboardInterrupt(
            f"Interrupted. To go on, type: {_program()} demo --resume {shlex.quote(str(self.target))}"
        )


def _program() -> str:
    """Returns how this program was called, for a line that can be typed as it stands."""
    called = Path(sys.argv[0])
    if called.parts[-2:] == ("ampatch", "__main__.py"):
        return f"{shlex.quote(sys.executable)} -m ampatch"
    found = shutil.which("ampatch")
    if called.name != "ampatch" or (found is not None and called.absolute() == Path(found).absolute()):
        return "ampatch"
    return shlex.quote(str(called))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Uses one thread: enough for 8 x 8 images, and on a busy machine several would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _still_learning(plan: Plan, results: Sequence[Result]) -> str | None:
    """Returns a sentence on accuracies that only look like a fault of mixed precision; None if there are none."""
    if plan.epochs >= DEFAULTS.epochs or all(result.test_accuracy >= GOAL for result in results):
        return None
    return (
        f"After {_epochs(plan.epochs)} the network is still learning, in float32 (O0) as in mixed precision. The "
        f"default of {DEFAULTS.epochs} epochs reaches {GOAL:.0%}: type --epochs {DEFAULTS.epochs} or more."
    )


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def _say(line: str) -> None:
    """Progress and trouble go to standard error, so that standard output is the table alone."""
    print(line, file=sys.stderr, flush=True)


def _listed(value: list[str] | int) -> str:
    """As it is typed."""
    return ",".join(value) if isinstance(value, list) else str(value)


def _one_or_more(known: Collection[str], expected: str, example: str) -> Callable[[str], list[str]]:
    """Reads names separated by commas; a name that comes twice counts once."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {expected}. Type for example {example}")
        return list(dict.fromkeys(names))

    return read


def _integer(minimum: int, maximum: int, example: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {minimum} to {maximum}. Type for example {example}"
            )
        return number

    return read


def _writable(check: Callable[[Path], None]) -> Callable[[str], Path]:
    """Fails while the arguments are read, and not after a minute of training."""

    def read(text: str) -> Path:
        path = Path(text)
        try:
            check(path)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror or error}") from None
        return path

    return read
