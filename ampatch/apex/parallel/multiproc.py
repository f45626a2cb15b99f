"""Answers ``python -m apex.parallel.multiproc train.py`` with the command to type instead: ``torchrun``.

Must not start processes, because Apex's launcher used a rendezvous that torch no longer supports. Must fail only when
run, not when imported.
"""

import shlex
import sys

import torch


def instead(arguments: list[str]) -> str:
    """Returns a sentence that says what to type.

    Args:
        arguments: arguments of the launcher: a script and the script's own arguments.
    """
    count = torch.cuda.device_count() or "N"
    script = shlex.join(arguments) or "train.py ..."
    return (
        "apex.parallel.multiproc starts no processes any more, torchrun does. "
        f"Type: torchrun --nproc-per-node {count} -m ampatch run {script}"
    )


if __name__ == "__main__":
    sys.exit(instead(sys.argv[1:]))
