"""The one line that says that ampatch stands in for Apex, for scripts that have configured no logging.

Owns whether it was said. Must not say it to who imports from `ampatch.apex` by that name, and so knows.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist

from ampatch.opt_levels import HALVES, Properties

logger = logging.getLogger("ampatch")


class _Process:
    """What belongs to the process, as its standard error does."""

    has_said = False


def announce(properties: Properties) -> None:
    """Says it on standard error, the first time; in the first of several processes only, as Apex did.

    Args:
        properties: what the opt level and the overrides have come to.
    """
    if _Process.has_said or not _stands_in() or logger.hasHandlers() or not _is_first() or sys.stderr is None:
        return
    _Process.has_said = True
    is_half = properties.patch_torch_functions or properties.cast_model_type in HALVES
    dtype = str(properties.half_dtype if is_half else torch.float32).removeprefix("torch.")
    print(  # noqa: T201 - no logger would show it
        f"ampatch: stands in for apex, at opt_level {properties.opt_level} in {dtype}.", file=sys.stderr, flush=True
    )


def _stands_in() -> bool:
    """Returns whether `import apex` has led here."""
    return sys.modules.get("apex") is sys.modules[__name__.rpartition(".")[0]]


def _is_first() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
