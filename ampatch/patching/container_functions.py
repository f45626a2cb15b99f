"""Replaces functions in containers (such as a table of activations), in partials, and in traced graphs.

Changes lists and dicts in place, since other objects may hold them too; makes new tuples and partials. Owns no state.
Must not know which functions are replaced, or what replaces them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx, nn

# Returns the replacement of a function, and other values as they are. Called with every value found.
Replacement = Callable[[object], object]

#: Classes of objects whose contents are searched.
OPENED = frozenset(
    {list, collections.deque, dict, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace}
    | {tuple, functools.partial}
)
# Attributes that torch itself sets in every nn.Module.
_OF_MODULES = frozenset(vars(nn.Module()))


def replace_in_containers(holder: object, replacement_of: Replacement) -> bool:
    """Replaces functions in containers that an object's attributes hold, at any depth; not the attributes themselves.

    In a module that torch.fx has traced it also replaces the functions that the graph calls.

    Args:
        holder: module of a model, or Python module.
        replacement_of: function that returns the replacement of a function, and other values as they are.

    Returns:
        True if any function was replaced.
    """
    walk = _Walk(replacement_of)
    attributes: Mapping[str, object] = object.__getattribute__(holder, "__dict__")
    for name, value in list(attributes.items()):
        if type(value) in OPENED and not (name in _OF_MODULES and isinstance(holder, nn.Module)):
            replaced = walk.replaced(value)
            if replaced is not value:
                with contextlib.suppress(AttributeError):  # the owner's attributes are read-only
                    setattr(holder, name, replaced)
    if isinstance(holder, fx.GraphModule):
        called = [(node, walk.replaced(node.target)) for node in holder.graph.nodes if node.op == "call_function"]
        changed = [(node, target) for node, target in called if target is not node.target]
        for node, target in changed:
            node.target = target
        if changed:
            holder.recompile()
    return walk.has_replaced


class _Walk:
    def __init__(self, replacement_of: Replacement) -> None:
        self.has_replaced = False
        self._replacement_of = replacement_of
        self._open: set[int] = set()  # ids of containers being walked: one may contain itself

    def replaced(self, value: Any) -> Any:
        """Returns the value itself, or its replacement."""
        kind = type(value)
        if kind not in OPENED:
            replacement = self._replacement_of(value)
            self.has_replaced = self.has_replaced or replacement is not value
            return replacement
        if id(value) in self._open:
            return value
        self._open.add(id(value))
        try:
            if kind is tuple:
                items = tuple(map(self.replaced, value))
                return value if _are_same(items, value) else items
            if kind is functools.partial:
                return self._partial(value)
            self._replace_in_place(vars(value) if kind is types.SimpleNamespace else value)
            return value
        finally:
            self._open.discard(id(value))

    def _replace_in_place(self, container: Any) -> None:
        for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
            replaced = self.replaced(item)
            if replaced is not item:
                container[key] = replaced

    def _partial(self, partial: functools.partial[Any]) -> functools.partial[Any]:
        before = (partial.func, *partial.args, *partial.keywords.values())
        after = [self.replaced(item) for item in before]
        if _are_same(after, before):
            return partial
        split = 1 + len(partial.args)
        made = functools.partial(after[0], *after[1:split], **dict(zip(partial.keywords, after[split:], strict=True)))
        vars(made).update(vars(partial))
        return made


def _are_same(items: Iterable[object], others: Iterable[object]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))
