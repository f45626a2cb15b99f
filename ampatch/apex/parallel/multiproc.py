"""What ``python -m apex.parallel.multiproc train.py`` meets: says that ``torchrun`` starts processes now.

Must start none: the processes of Apex's launcher had a rendezvous that torch does not know any more. To import this is
no error, as to stand in for Apex imports all there is.
"""

import shlex
import sys

import torch


def instead(arguments: list[str]) -> str:
    """Returns what to type, in a sentence.

    Args:
        arguments: those of the launcher: a script and its own.
    """
    count = torch.cuda.device_count() or "N"
    script = shlex.join(arguments) or "train.py ..."
    return (
        "apex.parallel.multiproc starts no processes any more, torchrun does. "
        f"Type: torchrun --nproc-per-node {count} -m ampatch run {script}"
    )


if __name__ == "__main__":
    sys.exit(instead(sys.argv[1:]))
