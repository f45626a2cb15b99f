"""Leaves of losses that see scaled gradients: their hooks, inside of a block, and optimizers that amp has not adopted.

`torch.amp.GradScaler` leaves both to its users; here each is told once. Must not change gradients, nor keep a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ampatch.casting.nested import tensors_in
from ampatch.errors import warn
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.torch_private.autograd import hooks_of_leaf

_OF_TORCH_OR_AMP = ("torch", "ampatch")


class ScaledLeaves:
    """The leaves that the first block of each loss has reached, and that no adopted optimizer updates.

    Attributes:
        are_unscaled: True if an adapter unscales their gradients, too.
        looked: numbers of the losses whose leaves are known.
        found: these leaves, by id.
    """

    def __init__(self) -> None:
        self.are_unscaled = False
        self.looked: set[int] = set()
        self.found: dict[int, TensorWeakRef] = {}
        self._left: dict[int, TensorWeakRef] = {}  # their gradients after the last block, by the id of the leaf

    def check(self, loss_id: int, given: Any, losses: Iterable[Tensor], updated: Callable[[], Collection[int]]) -> None:
        """Looks at the leaves of a loss, in its first block: that takes a microsecond for each node of the graph.

        Args:
            loss_id: number of the loss.
            given: what the block was given: a loss that is a leaf may go backward in its hook, which is to scale.
            losses: the scaled losses.
            updated: returns the ids of the parameters that adopted optimizers update.

        Warns:
            AmpWarning: user code has hooked one of the leaves.
        """
        if self.are_unscaled:
            return
        self.looked.add(loss_id)
        leaves = leaves_among(nodes_of(loss.grad_fn for loss in losses if loss.grad_fn is not None))
        adopted = updated()
        self.found |= {key: TensorWeakRef(leaf) for key, leaf in leaves.items() if key not in adopted}
        with torch.DisableTorchFunction():  # subclasses may refuse to be read, as those of torch's ExpandedWeights do
            roots = set(map(id, tensors_in(given)))
            hooked = (leaf for key, leaf in leaves.items() if key not in roots and _has_hooks(leaf))
            shape = next((tuple(leaf.shape) for leaf in hooked), None)
        if shape is not None:
            warn(
                f"a hook of a leaf of shape {shape} runs inside of amp.scale_loss, where gradients are "
                "multiplied by the loss scale: a hook that clamps, compares or logs them sees scaled values. Change "
                "gradients after the block; or divide by amp.get_loss_scale() in the hook."
            )

    def end_block(self) -> None:
        """Notes the gradients that a block leaves scaled."""
        with torch.DisableTorchFunction():
            leaves = ((key, found()) for key, found in self.found.items())
            grads = {key: leaf.grad for key, leaf in leaves if leaf is not None}
        self._left = {key: TensorWeakRef(grad) for key, grad in grads.items() if grad is not None}

    def have(self, tensor: Tensor) -> bool:
        """Returns True if a block has left the gradient of a tensor scaled, and user code has not replaced it since."""
        found, left = self.found.get(id(tensor)), self._left.get(id(tensor))
        return found is not None and found() is tensor and left is not None and tensor.grad is left()


def _has_hooks(leaf: Tensor) -> bool:
    """Returns True if user code has hooked a leaf."""
    return any(_is_of_user(hook) for table in hooks_of_leaf(leaf) if table for hook in table.values())


def _is_of_user(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in _OF_TORCH_OR_AMP
