"""Reports in one line that ampatch replaces Apex, for scripts that have not configured logging.

Owns whether the line was printed. Must not print it for scripts that import `ampatch.apex` by that name, because their
users know.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist

from ampatch.half_types import HALVES
from ampatch.opt_levels import Properties

logger = logging.getLogger("ampatch")


class _Process:
    """State of this process, which has one standard error."""

    has_said = False


def announce(properties: Properties) -> None:
    """Prints the line to standard error, once per process and on rank 0 only, as Apex did.

    Does nothing if logging is configured, or if the script did not import ``apex``.

    Args:
        properties: result of the opt level and the overrides.
    """
    stands_in = sys.modules.get("apex") is sys.modules[__name__.rpartition(".")[0]]  # `import apex` gave this package
    if _Process.has_said or not stands_in or logger.hasHandlers() or not _is_first() or sys.stderr is None:
        return
    _Process.has_said = True
    is_half = properties.patch_torch_functions or properties.cast_model_type in HALVES
    dtype = str(properties.half_dtype if is_half else torch.float32).removeprefix("torch.")
    print(  # noqa: T201 - no logger would show it
        f"ampatch: stands in for apex, at opt_level {properties.opt_level} in {dtype}.", file=sys.stderr, flush=True
    )


def _is_first() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
