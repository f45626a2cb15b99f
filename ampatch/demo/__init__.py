"""`ampatch demo`: trains a small network on handwritten digits in float32 and in mixed precision, and compares the two.

This file owns the command: its arguments, what it says while it runs, and how it ends. All it tells of precision
comes from `training.run`, which uses the public API only; it must never reach behind that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ampatch.demo import digits, report, training
from ampatch.demo.training import Result
from ampatch.opt_levels import HALF_DTYPES

# The levels that the demo offers, with the half types that each is for (None is none at all).
OPT_LEVELS: dict[str, Sequence[str | None]] = {"O0": [None], "O1": list(HALF_DTYPES), "O4": ["bfloat16"]}
DEFAULT_OPT_LEVELS = ["O0", "O1"]
DEFAULT_EPOCHS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ampatch demo` to ``parser``, for `run`."""
    parser.add_argument(
        "--opt-levels",
        type=_one_or_more(OPT_LEVELS),
        default=DEFAULT_OPT_LEVELS,
        metavar="LEVELS",
        help=f"opt levels to train at, of {', '.join(OPT_LEVELS)}, separated by commas (default: "
        f"{','.join(DEFAULT_OPT_LEVELS)})",
    )
    parser.add_argument(
        "--half-dtype",
        type=_one_or_more(HALF_DTYPES),
        default=list(HALF_DTYPES),
        metavar="DTYPES",
        help=f"half types to train in, separated by commas (default: {','.join(HALF_DTYPES)}); O0 uses none, and O4 "
        "bfloat16 whatever stands here",
    )
    parser.add_argument(
        "--epochs",
        type=_integer(1, 1000),
        default=DEFAULT_EPOCHS,
        metavar="N",
        help="how often each run sees every digit (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="decides the first weights and the order of the digits (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=_writable_file, default=None, metavar="FILE", help="also write the results to FILE, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains at every level asked for, prints the table, and writes the JSON report if there is to be one.

    Args:
        arguments: what a parser with `add_arguments` made of the command line.

    Returns:
        The exit status: 0, or 1 if the JSON report could not be written after all.
    """
    try:
        with _one_thread():
            results = list(_results(arguments))
    except KeyboardInterrupt:
        _say("Interrupted: nothing was written.")
        raise
    print(report.table(results))
    if arguments.json is not None:
        try:
            arguments.json.write_text(report.as_json(results), encoding="utf-8")
        except OSError as error:
            _say(f"The results could not be written: {error}")
            return 1
    return 0


def _results(arguments: argparse.Namespace) -> Iterator[Result]:
    train, test = digits.split(digits.load())
    _say(f"Training on {len(train)} digits, testing on {len(test)}, on the CPU, {arguments.epochs} epochs a run.")
    for opt_level in arguments.opt_levels:
        possible = OPT_LEVELS[opt_level]
        for name in [name for name in arguments.half_dtype if name in possible] or possible:
            label = f"{opt_level} {name}" if name else opt_level
            half_dtype = HALF_DTYPES[name] if name else None
            # tqdm draws the bar on a terminal only; elsewhere the plain line below stands for it.
            bar = tqdm(desc=label, total=arguments.epochs * training.steps_per_epoch(train), unit="step", disable=None)
            with bar:
                result = training.run(
                    train,
                    test,
                    opt_level,
                    half_dtype,
                    epochs=arguments.epochs,
                    seed=arguments.seed,
                    on_step=partial(_advance, bar),
                )
            if bar.disable:
                _say(f"{label}: {result.test_accuracy:.2%} of the test digits recognised.")
            yield result


def _advance(bar: tqdm, loss: float) -> None:
    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    bar.update()


@contextmanager
def _one_thread() -> Iterator[None]:
    """One is enough for 8 x 8 images; where others use the machine too, several would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _say(line: str) -> None:
    """Progress and trouble go to standard error, so that standard output is the table alone."""
    print(line, file=sys.stderr, flush=True)


def _one_or_more(known: Collection[str]) -> Callable[[str], list[str]]:
    """Reads names separated by commas; a name that comes twice counts once."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return read


def _integer(minimum: int, maximum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} to {maximum}")
        return number

    return read


def _writable_file(text: str) -> Path:
    """Fails while the arguments are read, and not after a minute of training."""
    path = Path(text)
    try:
        report.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    return path
