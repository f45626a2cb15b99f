"""Replaces functions in containers (such as a table of activations), in partials, closures and traced graphs.

Changes what is mutable in place, since other objects may hold it too; makes new tuples and partials. Owns no state.
Must not know which functions are replaced, or what replaces them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn

# Returns the replacement of a function, and other values as they are. Called with every value found.
Replacement = Callable[[object], object]

#: Classes of objects whose contents are searched, beside named tuples, data classes and functions of users.
OPENED = frozenset(
    {list, collections.deque, dict, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace}
    | {tuple, functools.partial}
)
# Classes of values that hold nothing, and that containers may have many of, such as a vocabulary.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, Tensor, nn.Parameter})
# Attributes that torch itself sets in every nn.Module.
_OF_MODULES = frozenset(vars(nn.Module()))


def replace_in_containers(holder: object, replacement_of: Replacement) -> bool:
    """Replaces functions in what an object's attributes hold, at any depth; not the attributes themselves.

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
        if not (name in _OF_MODULES and isinstance(holder, nn.Module)):
            replaced = walk.contents_replaced(value)
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
        # By id, containers that were found, with what replaces them: one may be in several places, and in itself.
        self._known: dict[int, tuple[object, object]] = {}

    def replaced(self, value: Any) -> Any:
        """Returns the value itself, or its replacement."""
        replacement = self._replacement_of(value)
        if replacement is not value:
            self.has_replaced = True
            return replacement
        return self.contents_replaced(value)

    def contents_replaced(self, value: Any) -> Any:
        """Returns the value, in which functions were replaced; for a tuple or a partial, a new one if there are any."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, value
            self._known[id(value)] = value, self._opened(value)
        return self._known[id(value)][1]

    def _opened(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            items = tuple(map(self.replaced, value))
            return value if _are_same(items, value) else items if kind is tuple else kind(*items)
        if kind is functools.partial:
            return self._partial(value)
        if kind is types.FunctionType:
            self._replace_captured(value)
        elif kind in OPENED:
            contents = vars(value) if kind is types.SimpleNamespace else value
            found = contents.items() if isinstance(contents, dict) else enumerate(contents)
            self._replace_in_place(list(found), contents.__setitem__)
        elif dataclasses.is_dataclass(kind) and not issubclass(kind, nn.Module):
            fields = [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(kind)]
            self._replace_in_place(fields, functools.partial(object.__setattr__, value))  # it may be frozen
        return value

    def _replace_in_place(self, items: Iterable[tuple[Any, Any]], put: Callable[[Any, Any], object]) -> None:
        for key, item in items:
            replaced = self.replaced(item)
            if replaced is not item:
                put(key, replaced)

    def _replace_captured(self, function: types.FunctionType) -> None:
        """Replaces functions in the closure and the default arguments of a function, unless it is torch's own."""
        if str(function.__module__).partition(".")[0] in ("torch", "ampatch"):
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is still empty
                self._replace_in_place([("cell_contents", cell.cell_contents)], functools.partial(setattr, cell))
        defaults = [(name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__")]
        self._replace_in_place(defaults, functools.partial(setattr, function))

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
