"""Walks the graphs that autograd has recorded. Must never change a graph, nor keep one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node


def nodes_of(roots: Iterable[Node], enters: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """Yields the nodes of graphs, each once.

    Args:
        roots: the nodes that a backward pass begins with.
        enters: False leaves out a node, and those that only it leads to; None: all nodes are walked through.
    """
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if enters is not None and not enters(node):
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def leaf_of(node: Node) -> Tensor | None:
    """Returns the leaf whose gradient a node accumulates; None for any other node."""
    leaf = getattr(node, "variable", None)  # of AccumulateGrad
    return leaf if isinstance(leaf, Tensor) else None


def leaves_among(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Returns the leaves whose gradients these nodes accumulate, by id."""
    return {id(leaf): leaf for leaf in map(leaf_of, nodes) if leaf is not None}
