"""`apex.amp.lists`: the cast lists as Python lists, which a script edits in place before ``initialize``.

Each module holds the lists of one namespace, ``MODULE``. The edits are an overlay on the shipped YAML lists.
"""

from __future__ import annotations

from ampatch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampatch.apex.amp.lists._edits import changes_of

__all__ = ["changes", "functional_overrides", "tensor_overrides", "torch_overrides"]


def changes() -> dict[str, dict[str, list[str]]]:
    """Returns the edits of the lists so far, in the form that ``cast_lists=`` takes; empty if there are none.

    Raises:
        OptionError: a script added a name to two lists, or an entry that is not a name.
    """
    return changes_of([functional_overrides, torch_overrides, tensor_overrides])
