"""Warns of backward passes in a ``scale_loss`` block from losses that it did not scale: the block unscales those too.

Must never change a backward pass, nor keep its graph after the block.
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


def watch(ledger: PatchLedger, open_blocks: Callable[[], Sequence[ScaledBlock[Any]] | None]) -> None:
    """Makes torch's backward passes warn if they begin with another loss than the one that a block around them scaled.

    Args:
        ledger: records what is installed.
        open_blocks: returns the open blocks that warn; None: there are none.
    """
    # Tensor.backward and torch.autograd.backward call this one, and may have been bound by name before.
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(original)
    def run(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        result = original(outputs, *args, **kwargs)
        blocks = open_blocks()
        # Inside another backward pass, as in a checkpoint's, the gradients are scaled already.
        if blocks and kwargs.get("accumulate_grad") and torch._C._current_graph_task_id() == -1:
            _check(outputs, args[3] if len(args) > 3 else (), blocks)
        return result

    ledger.set(torch.autograd, "_engine_run_backward", run)


def _check(
    outputs: Iterable[Tensor | GradientEdge], inputs: Sequence[object], blocks: Sequence[ScaledBlock[Any]]
) -> None:
    """Warns, once for each block.

    Args:
        outputs: the tensors that the backward pass began with.
        inputs: the only leaves that receive gradients; empty: all leaves.
        blocks: the blocks around it.
    """
    scaled = {node for each in blocks for node in each.watched}
    for output in outputs:
        # A backward pass in pieces begins with an intermediate tensor and a gradient that is scaled already.
        if not isinstance(output, Tensor) or output.numel() != 1 or output.grad_fn is None:
            continue
        leaves = set(leaves_of(output.grad_fn, scaled))
        if inputs:
            leaves &= set(map(id, inputs))
        for each in blocks:
            if not each.has_warned and each.unscales_any_of(leaves):
                each.has_warned = True
                warn(
                    "this backward pass begins with another loss than the scaled one of the amp.scale_loss block "
                    "around it, and the block divides its gradients by the scale all the same. Type: with "
                    "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(); and for several losses "
                    "amp.scale_loss((loss, other), optimizer), which gives both scaled."
                )


def leaves_of(root: Node, scaled: Collection[Node] = ()) -> dict[int, Tensor]:
    """Returns the leaves of a graph, by id; empty if the graph contains a scaled loss.

    Args:
        root: the node that the backward pass begins with.
        scaled: the nodes of scaled losses.
    """
    return leaves_among(nodes_of(root, scaled))


def nodes_of(root: Node, scaled: Collection[Node] = ()) -> set[Node]:
    """Returns the nodes of a graph; empty if the graph contains a scaled loss.

    Walks the graph in Python, about a microsecond per node.

    Args:
        root: the node that the backward pass begins with.
        scaled: the nodes of scaled losses.
    """
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node in scaled:
            return set()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return seen


def leaves_among(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Returns the leaves whose gradients these nodes accumulate, by id."""
    leaves = (getattr(node, "variable", None) for node in nodes)  # of AccumulateGrad
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
