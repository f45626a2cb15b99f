"""Measures the host's time to pass a list of tensors to an operator, as tensors and as addresses.

Run as `python benchmarks/lists.py [--rounds N]`; needs both compiled libraries. The tensors are empty, so no
kernel processes anything, and the time is the host's. One process measures both ways in turn. Prints the least time of
the rounds in nanoseconds, divided by the number of tensors, or pairs of tensors. Asserts nothing.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from unittest import mock

import torch

from ampatch.native import calls, extension_kernels, kernels

COUNTS = (4, 25, 500)
CALLS = 5


def operators(count: int) -> dict[str, Callable[[], None]]:
    """Returns calls of operators on lists of ``count`` empty tensors."""
    halves = [torch.empty(0, dtype=torch.float16) for _ in range(count)]
    fulls = [torch.empty(0) for _ in range(count)]
    factor, flag = torch.tensor(0.5), torch.zeros(())
    return {
        "unscale_": functools.partial(extension_kernels.unscale_, halves, factor, flag),
        "unscale_copy, write back": functools.partial(
            extension_kernels.unscale_copy, halves, fulls, factor, flag, True
        ),
        "copy_to_half": functools.partial(extension_kernels.copy_to_half, fulls, halves),
    }


def nanoseconds(operator: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        operator()
    return (time.perf_counter_ns() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of each measurement (50)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels.select("extension")
    calls.select("compiled")
    module = calls.compiled()
    print(f"torch {torch.__version__}, nanoseconds a tensor, or a pair\n")
    print("| | number | as tensors | as addresses |\n|---|---|---|---|")
    for count in COUNTS:
        for name, operator in operators(count).items():
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.rounds):
                for has_addresses in (False, True):
                    with mock.patch.object(calls, "compiled", lambda has=has_addresses: module if has else None):
                        times[has_addresses].append(nanoseconds(operator))
            print(f"| {name} | {count} | " + " | ".join(f"{min(each) / count:.0f}" for each in times.values()) + " |")


if __name__ == "__main__":
    main()
