"""Leaves of a backward pass that no optimizer updates: ``amp.scale_loss`` would leave their gradients scaled.

Owns the gradients that they had before, and unscales what the pass adds. Finds leaves that the graph of the loss does
not show, too: a reentrant checkpoint, or an ``autograd.Function``, runs a backward pass within the backward pass. Must
never touch leaves that an optimizer updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.weak import TensorWeakRef

from ampatch import amp
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.native.host_copy import on_device
from ampatch.torch_private.autograd import get_stashed, is_stashed, stash_for_backward, unstash

# torch copies these entries to its threads for a GPU's nodes and to the passes within; a threading.local stays behind.
_ENTRY = "ampatch.leaves_without_optimizer"


@dataclass(frozen=True)
class _Existing:
    """The gradient that a leaf had before.

    Attributes:
        leaf: weak, because a checkpoint's recomputed inputs are leaves too, and would stay until the pass ends.
        scale: the scale of the loss.
        gradient: the gradient if it was set aside; None: there was none, or it was scaled.
    """

    leaf: TensorWeakRef
    scale: Tensor
    gradient: Tensor | None


@dataclass
class OtherLeaves:
    """The leaves of one backward pass that no optimizer updates.

    Attributes:
        updated: returns ids of the leaves, among those given by id, that an optimizer updates.
        reduced: returns the leaves, among those given, whose gradients DDP reduces.
        scale_for: returns the scale of the loss for a leaf, 0-dimensional, without a sync.
    """

    updated: Callable[[Mapping[int, Tensor]], Container[int]]
    reduced: Callable[[Iterable[Tensor]], list[Tensor]]
    scale_for: Callable[[Tensor], Tensor]
    _existing: dict[int, _Existing] = field(default_factory=dict)

    @contextlib.contextmanager
    def unscaled(self, leaves: Mapping[int, Tensor]) -> Iterator[None]:
        """Unscales, when the block ends, what a backward pass in it adds.

        Args:
            leaves: the leaves that the graph of the loss shows, by id.
        """
        self.add(leaves)
        stash_for_backward(_ENTRY, self)
        try:
            yield
        finally:
            unstash(_ENTRY)
            self._unscale()

    def add(self, leaves: Mapping[int, Tensor]) -> None:
        """Scales the gradients that leaves have, or sets them aside, unless an earlier call did."""
        new = {key: leaf for key, leaf in leaves.items() if not self._has(key, leaf)}
        if not new:
            return
        updated = self.updated(new)
        others = {key: leaf for key, leaf in new.items() if key not in updated}
        # DDP reduces existing gradients together with new ones, so the existing ones have to be scaled as well.
        reduced = set(map(id, self.reduced(others.values())))
        with torch.no_grad(), amp.disable_casts():
            for key, leaf in others.items():
                scale = self.scale_for(leaf)
                self._existing[key] = _Existing(TensorWeakRef(leaf), scale, None if key in reduced else leaf.grad)
                if key not in reduced:
                    leaf.grad = None
                elif leaf.grad is not None:
                    leaf.grad.mul_(on_device(scale, leaf.grad.device))

    def _has(self, key: int, leaf: Tensor) -> bool:
        existing = self._existing.get(key)
        return existing is not None and existing.leaf() is leaf

    def _unscale(self) -> None:
        if not self._existing:
            return
        with torch.no_grad(), amp.disable_casts():
            for existing in self._existing.values():
                leaf = existing.leaf()
                if leaf is None:
                    continue
                before = existing.gradient
                if leaf.grad is None:
                    leaf.grad = before
                else:
                    leaf.grad.div_(on_device(existing.scale, leaf.grad.device))
                    leaf.grad = leaf.grad if before is None else before.add_(leaf.grad)


def note(tensors: Any) -> None:
    """Notes the leaves of a backward pass that is about to run within another one; a no-op outside of an `unscaled`.

    Args:
        tensors: what it begins with: a tensor or gradient edge, or a sequence of them.
    """
    others = get_stashed(_ENTRY) if is_stashed(_ENTRY) else None
    if others is not None:
        given = [tensors] if isinstance(tensors, (Tensor, GradientEdge)) else list(tensors)
        roots = [each.node if isinstance(each, GradientEdge) else each.grad_fn for each in given]
        own = {id(each): each for each in given if isinstance(each, Tensor) and each.is_leaf and each.requires_grad}
        others.add(own | leaves_among(nodes_of(root for root in roots if root is not None)))
