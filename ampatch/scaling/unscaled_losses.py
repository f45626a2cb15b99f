"""Watches backward passes: warns or raises if one from a loss without scale adds gradients that amp would unscale.

Amp would unscale them in a ``scale_loss`` block, and after a block that has left its gradients scaled. Also notes for
the block whether a backward pass went through its scaled loss, and which gradients DDP has not reduced. Must never
change a backward pass, nor keep its graph after the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ampatch.errors import UsageError, warn
from ampatch.graph_nodes import leaves_among, nodes_of
from ampatch.ledger import PatchLedger
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.scale_use import has_scaled
from ampatch.scaling.scaled_block import Blocks, ScaledBlock
from ampatch.torch_private.autograd import ENGINE_RUN_BACKWARD, current_graph_task_id


def watch(ledger: PatchLedger, active: Callable[[], Blocks | None], explain: Callable[[BaseException], None]) -> None:
    """Makes torch's backward passes report to blocks, and warn or raise if they would mix scaled and other gradients.

    Args:
        ledger: records what is installed.
        active: returns what the blocks of the live session share; None: there is no such session.
        explain: called with each error of torch's in a backward pass, to which it may add a note.
    """
    # Tensor.backward and torch.autograd.backward call this one, and may have been bound by name before.
    original = getattr(*ENGINE_RUN_BACKWARD)

    @functools.wraps(original)
    def run(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        blocks = active()
        # Inside another backward pass, as in a checkpoint's, the gradients are scaled already.
        if blocks is None or current_graph_task_id() != -1:
            return original(outputs, *args, **kwargs)
        accumulates = bool(kwargs.get("accumulate_grad"))
        if accumulates and not blocks.open and any(map(_is_scaled, outputs)):
            raise UsageError(
                "this backward pass begins with a loss that amp.scale_loss has scaled, and the block has ended: its "
                "gradients would stay scaled. Type it inside of the block: with amp.scale_loss(loss, optimizer) as "
                "scaled_loss: scaled_loss.backward()."
            )
        inputs = frozenset(map(id, args[3])) if len(args) > 3 else frozenset()
        if accumulates:
            _check_left_scaled(outputs, inputs, blocks)
        may_reduce = accumulates and blocks.ranks.has_wrappers
        before = blocks.ranks.before_backward(bool(blocks.open)) if may_reduce else []
        try:
            result = original(outputs, *args, **kwargs)
        except RuntimeError as error:
            explain(error)
            raise
        if before:
            blocks.ranks.after_backward(before)
        watched = blocks.watched
        if watched:
            scaled = {node: each for each in watched for node in each.watched}
            for output in outputs:
                _follow(output, scaled, watched, inputs, accumulates)
        return result

    ledger.set(*ENGINE_RUN_BACKWARD, run)


def _is_scaled(output: Tensor | GradientEdge) -> bool:
    node = output.node if isinstance(output, GradientEdge) else output.grad_fn
    return node is not None and has_scaled(node)


def _check_left_scaled(outputs: Sequence[Tensor | GradientEdge], inputs: Collection[int], blocks: Blocks) -> None:
    """Raises if a backward pass from a loss without scale would add to gradients that a block has left scaled.

    Args:
        outputs: what the backward pass begins with.
        inputs: ids of the only leaves that receive gradients; empty: all leaves.
        blocks: what all blocks share.

    Raises:
        UsageError: the backward pass would add to such gradients.
    """
    left = blocks.left_scaled()
    if not left or (blocks.open and not blocks.watched):  # a block that is not watched may be the loss's own
        return
    for gradients in left:
        gradients.note_dropped_while_scaled()
    left = [each for each in left if each.scaled_by is not None and not each.scaled_by.is_one]
    scaled = {node for each in blocks.watched for node in each.watched}
    for output in outputs if left else ():
        # A backward pass in pieces begins with an intermediate tensor and a gradient that is scaled already.
        if not isinstance(output, Tensor) or output.numel() != 1 or output.grad_fn is None:
            continue
        leaves, found = _walk(output.grad_fn, scaled, inputs)
        for each in left if found is None else ():
            reached = next((own for own in each.updated.model_parameters() if id(own) in leaves), None)
            if reached is not None:
                raise _reaches_scaled(each, reached)


def _reaches_scaled(gradients: OptimizerGradients, parameter: Tensor) -> UsageError:
    why = (
        "which waits, scaled, for DistributedDataParallel or FSDP to reduce it together with that of a later block"
        if gradients.scaled_by is not None and gradients.scaled_by.is_postponed
        else "which a block of amp.scale_loss with delay_unscale=True has left scaled"
    )
    return UsageError(
        f"this backward pass would add to the gradient of {gradients.masters.name_of(parameter)}, {why}; that block "
        "would divide the sum by the scale. Type: with amp.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward(); or, to drop the scaled gradients, optimizer.zero_grad(), which has to set them to "
        "None."
    )


def _follow(
    output: Tensor | GradientEdge,
    scaled: Mapping[Node, ScaledBlock[Any]],
    blocks: Sequence[ScaledBlock[Any]],
    inputs: Collection[int],
    accumulates: bool,
) -> None:
    """Notes which block's loss a backward pass went through; warns, once for each block, if it began with another loss.

    A hook on the loss would note it too, but costs six times as much.

    Args:
        output: what the backward pass began with.
        scaled: the blocks, by the nodes of their scaled losses.
        blocks: the blocks around the backward pass.
        inputs: ids of the only leaves that receive gradients; empty: all leaves.
        accumulates: whether it adds to the gradients of leaves.
    """
    node = output.node if isinstance(output, GradientEdge) else output.grad_fn
    if node is None:
        return
    if node in scaled:
        scaled[node].is_used = True
        return
    # A backward pass in pieces begins with an intermediate tensor and a gradient that is scaled already.
    is_loss = accumulates and isinstance(output, Tensor) and output.numel() == 1
    if not is_loss and all(each.is_used for each in blocks):
        return
    leaves, found = _walk(node, scaled, inputs)
    if found is not None:
        scaled[found].is_used = True
    elif is_loss:
        for each in blocks:
            if not each.has_warned and each.unscales_any_of(leaves):
                each.has_warned = True
                warn(
                    "this backward pass begins with another loss than the scaled one of the amp.scale_loss block "
                    "around it, and the block divides its gradients by the scale all the same. Type: with "
                    "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(); and for several losses "
                    "amp.scale_loss((loss, other), optimizer), which gives both scaled."
                )


def _walk(root: Node, ends: Collection[Node], inputs: Collection[int]) -> tuple[Collection[int], Node | None]:
    """Walks a graph in Python, about a microsecond per node.

    Args:
        root: the node that the backward pass begins with.
        ends: nodes to stop at.
        inputs: ids of the only leaves that receive gradients; empty: all leaves.

    Returns:
        The ids of the leaves that receive gradients, and None; or nothing, and the first of ``ends``.
    """
    seen = set()
    for node in nodes_of([root]):
        seen.add(node)
        if node in ends:
            return (), node
    leaves = leaves_among(seen).keys()
    return leaves & inputs if inputs else leaves, None
