"""Leaves that the graph of a loss does not show: a backward pass within its backward pass reaches them.

A reentrant checkpoint, or an ``autograd.Function``, runs such a pass; torch runs it in any thread, on a GPU's nodes in
a thread of the engine. Owns the gradients that these leaves had before, and unscales what is added. Must never touch
leaves that an optimizer updates: ``amp.scale_loss`` unscales those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.weak import TensorWeakRef

from ampatch import amp
from ampatch.native.host_copy import on_device
from ampatch.scaling.unscaled_losses import leaves_among, nodes_of

# torch copies these entries to the threads and to the backward passes within; contextvars and threading.local stay.
_ENTRY = "ampatch.hidden_leaves"

_Excluded: TypeAlias = Callable[[Mapping[int, Tensor]], Container[int]]
_ScaleFor: TypeAlias = Callable[[Tensor], Tensor]


class _Hidden:
    """Hidden leaves of one backward pass.

    Args:
        excluded: returns ids of the leaves, among those given by id, whose gradients other code unscales.
        scale_for: returns the present scale of the loss for a leaf.
    """

    def __init__(self, excluded: _Excluded, scale_for: _ScaleFor) -> None:
        self._excluded = excluded
        self._scale_for = scale_for
        # Weak references: a checkpoint's recomputed inputs are leaves too, and would stay until the pass ends.
        self._found: dict[int, tuple[TensorWeakRef, Tensor | None, Tensor]] = {}

    def set_aside(self, leaves: Mapping[int, Tensor]) -> None:
        """Sets the present gradients of leaves aside, unless an earlier call did."""
        known = {key for key in leaves.keys() & self._found.keys() if self._found[key][0]() is leaves[key]}
        new = {key: leaf for key, leaf in leaves.items() if key not in known}
        excluded = self._excluded(new)
        for key, leaf in new.items():
            if key not in excluded:
                # The scale of now: at the end of the pass it may have reacted to an overflow.
                self._found[key] = TensorWeakRef(leaf), leaf.grad, self._scale_for(leaf)
                leaf.grad = None

    def unscale(self) -> None:
        """Divides what was added by the scale, and adds it to the gradients that were set aside."""
        with torch.no_grad(), amp.disable_casts():
            for reference, before, scale in self._found.values():
                leaf = reference()
                if leaf is None:
                    continue
                if leaf.grad is None:
                    leaf.grad = before
                else:
                    leaf.grad.div_(on_device(scale, leaf.grad.device))
                    leaf.grad = leaf.grad if before is None else before.add_(leaf.grad)


@contextlib.contextmanager
def unscaled(excluded: _Excluded, scale_for: _ScaleFor) -> Iterator[None]:
    """Unscales the gradients of hidden leaves when the block ends, in which a backward pass runs.

    Args:
        excluded: returns ids of the leaves, among those given by id, whose gradients other code unscales.
        scale_for: returns the present scale of the loss for a leaf: 0-dimensional, read without a sync. It is called
            only if there are hidden leaves.
    """
    hidden = _Hidden(excluded, scale_for)
    torch._C._stash_obj_in_tls(_ENTRY, hidden)
    try:
        yield
    finally:
        # Before torch 2.13 entries cannot be removed.
        getattr(torch._C, "_remove_obj_from_tls", _empty)(_ENTRY)
        hidden.unscale()


def _empty(entry: str) -> None:
    torch._C._stash_obj_in_tls(entry, None)


def note(tensors: Any) -> None:
    """Notes the leaves of a backward pass that is about to run within another one; a no-op outside of `unscaled`.

    Args:
        tensors: what it begins with, as for ``torch.autograd.backward``.
    """
    hidden = torch._C._get_obj_in_tls(_ENTRY) if torch._C._is_key_in_tls(_ENTRY) else None
    if hidden is not None:
        hidden.set_aside(reached(tensors))


def reached(tensors: Any) -> dict[int, Tensor]:
    """Returns the leaves that the graphs of tensors show, by id.

    Args:
        tensors: a tensor or gradient edge, or a sequence of them.
    """
    given = [tensors] if isinstance(tensors, (Tensor, GradientEdge)) else list(tensors)
    nodes = [each.node if isinstance(each, GradientEdge) else each.grad_fn for each in given]
    found = leaves_among(node for root in nodes if root is not None for node in nodes_of(root))
    own = {id(each): each for each in given if isinstance(each, Tensor) and each.is_leaf and each.requires_grad}
    return found | own
