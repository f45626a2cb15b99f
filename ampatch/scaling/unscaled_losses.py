"""Backward passes within a ``scale_loss`` block from losses that it did not scale: the block divides these too.

Owns the look at where a backward pass begins, and at which parameters it ends. Must never change a pass, nor keep its
graph after the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ampatch.errors import warn
from ampatch.ledger import PatchLedger
from ampatch.scaling.scaled_block import ScaledBlock


def watch(ledger: PatchLedger, open_blocks: Callable[[], Sequence[ScaledBlock] | None]) -> None:
    """Has torch's backward passes warn where they begin with another loss than the one that a block around them scaled.

    Args:
        ledger: takes note of what is installed.
        open_blocks: gives the blocks that are open, and are to be warned of; None: there are none.
    """
    # Below Tensor.backward and torch.autograd.backward, which some have bound before.
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(original)
    def run(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        result = original(outputs, *args, **kwargs)
        blocks = open_blocks()
        # Within another backward pass, as in checkpoints, it begins with gradients that have the scale already.
        if blocks and kwargs.get("accumulate_grad") and torch._C._current_graph_task_id() == -1:
            _check(outputs, args[3] if len(args) > 3 else (), blocks)
        return result

    ledger.set(torch.autograd, "_engine_run_backward", run)


def _check(outputs: Iterable[Tensor | GradientEdge], inputs: Sequence[object], blocks: Sequence[ScaledBlock]) -> None:
    """Warns, once for each block.

    Args:
        outputs: what backward has begun with.
        inputs: where alone it has left gradients; none: in all leaves.
        blocks: the blocks around it.
    """
    scaled = {node for each in blocks for node in each.watched}
    for output in outputs:
        # Backward passes in pieces hand gradients from one to the next, and those have the scale.
        if not isinstance(output, Tensor) or output.numel() != 1 or output.grad_fn is None:
            continue
        leaves = set(leaves_of(output.grad_fn, scaled))
        if inputs:
            leaves &= set(map(id, inputs))
        for each in blocks:
            if not each.has_told and each.works_on(leaves):
                each.has_told = True
                warn(
                    "this backward pass begins with another loss than the scaled one of the amp.scale_loss block "
                    "around it, and the block divides its gradients by the scale all the same. Type: with "
                    "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(); and for several losses "
                    "amp.scale_loss((loss, other), optimizer), which gives both scaled."
                )


def leaves_of(root: Node, scaled: Collection[Node] = ()) -> dict[int, Tensor]:
    """Returns the leaves that a graph leads to, by id; none if it leads through a scaled loss.

    It walks the graph in Python, which takes about a microsecond a node.

    Args:
        root: where backward begins.
        scaled: the nodes of scaled losses.
    """
    seen, leaves, waiting = {root}, {}, [root]
    while waiting:
        node = waiting.pop()
        if node in scaled:
            return {}
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor):
            leaves[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves
