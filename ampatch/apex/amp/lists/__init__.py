"""`apex.amp.lists`: the cast lists as Python lists, which a script edits in place before ``initialize``.

Each module names the namespace that its lists are of. What was done to them is laid over the shipped YAML.
"""

from __future__ import annotations

from ampatch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampatch.apex.amp.lists._edits import changes_of

__all__ = ["changes", "functional_overrides", "tensor_overrides", "torch_overrides"]


def changes() -> dict[str, dict[str, list[str]]]:
    """Returns what was done to the lists so far, as ``cast_lists=`` takes it; empty if nothing was.

    Raises:
        OptionError: a name was put into two lists, or something else than a name into one.
    """
    return changes_of([functional_overrides, torch_overrides, tensor_overrides])
