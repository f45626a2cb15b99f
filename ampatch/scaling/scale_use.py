"""One use of a loss scale, and its overflow verdict.

Values stay on the device until the host reads them; `send` copies them without a sync. Must never touch gradients: it
knows only the verdict on them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ampatch.casting.nested import tensors_in
from ampatch.graph_nodes import nodes_of
from ampatch.grouping import grouped
from ampatch.native.host_copy import HostCopy, on_device, stacked
from ampatch.scaling import overflows
from ampatch.scaling.loss_scaler import LossScaler, back_off, loads_of, scaled
from ampatch.scaling.overflows import NonFiniteGradient, ScaleChange
from ampatch.torch_private.modes import is_functorch_wrapped_tensor

# The mark of the nodes that have scaled a loss; torch keeps it as long as the node.
_SCALED = "ampatch: has scaled a loss"

#: Types of devices whose values the host reads without a sync.
AT_HAND = frozenset({"cpu"})


def has_scaled(node: Node) -> bool:
    """Returns True if a node of a graph has multiplied a loss by a scale, in a block of ``amp.scale_loss``."""
    # Reading the attribute allocates a dict, so only nodes of multiplications are asked.
    return type(node).__name__ == "MulBackward0" and _SCALED in node.metadata  # type: ignore[operator]


def is_scaled(loss: Any, searches: bool) -> bool:
    """Returns True if a loss was scaled before by a block of ``amp.scale_loss``.

    Args:
        loss: a tensor, or nested lists, tuples and dicts of them.
        searches: True looks for a scaled loss in the whole graph, as for ``scaled_loss + other``; False looks at the
            last node only.
    """
    last = [each.grad_fn for each in _losses_in(loss) if each.grad_fn is not None]
    return any(map(has_scaled, nodes_of(last) if searches else last))


def _losses_in(loss: Any) -> list[Tensor]:
    """Returns the losses, without those inside transforms of `torch.func`: they take no hooks, and have no values."""
    found = (loss,) if isinstance(loss, Tensor) else tensors_in(loss)
    return [each for each in found if not is_functorch_wrapped_tensor(each)]


class _Done:
    """What was done about a use of a scale, once for all optimizers that have it.

    Attributes:
        reacted: True if the scale has reacted.
        counted: True if its overflow was counted in the scaler.
        announced: True if the skipped step was logged.
        named: True if an optimizer of this rank had gradients of it that are inf or NaN.
    """

    reacted = False
    counted = False
    announced = False
    named = False


class ScaleUse:
    """One use of a loss scale.

    Args:
        scaler: the scaler of a loss.
        scaler_id: its number, for messages.
        is_checked: whether steps look for inf and NaN under a static scale too.

    Attributes:
        is_open: True inside its block.
        is_shared: True if several optimizers have gradients of it.
        is_mixed: True if its gradients are sums of scaled and unscaled ones, so that nothing may use them.
        main: the use by the block itself, if these gradients are of an optimizer that it was not handed; else None.
        is_postponed: True if DDP is going to reduce its gradients together with those of a later backward pass.
        is_judged_elsewhere: True if user code judges the gradients by itself.
        is_confirmed: True if an overflow counts even after the gradients were cleared.
        is_of_others: True if an optimizer without gradients remembers it.
        is_captured: True if a CUDA graph captured the verdict, so that each replay finds another one.
        is_one: True if the scale is static and 1, so that scaling changes nothing.
        is_checked: True if a step may be skipped because of these gradients.
        floor: the least scale.
        scale: snapshot of the scale: 0-dimensional float32, on the device.
        done: what was done about it once; its copies share it.
        non_finite: the gradients that overflowed, if they were zeroed for a later backward pass and counted before.
        found_inf: 0-dimensional float32, not 0 after an overflow; None before unscaling, and under a static scale.
    """

    is_open = False
    is_mixed = False
    is_shared = False
    _dropped: Tensor | None = None
    main: ScaleUse | None = None
    is_postponed = False
    is_judged_elsewhere = False
    is_confirmed = False
    is_of_others = False
    is_captured = False
    non_finite: tuple[NonFiniteGradient, ...] = ()
    found_inf: Tensor | None = None
    _original: ScaleUse | None = None
    _overflowed: bool | None = None
    _sent: HostCopy | None = None

    def __init__(self, scaler: LossScaler, scaler_id: int, is_checked: bool = False) -> None:
        self.scaler = scaler
        self.scaler_id = scaler_id
        self.floor = scaler.policy.min_loss_scale
        self.is_one = scaler.is_one
        self.is_checked = is_checked or scaler.dynamic
        self.scale = scaler.snapshot()
        self._age, self._loads = scaler.age, loads_of(scaler)
        self.done = _Done()
        self._losses: list[Tensor] = []

    def apply(self, loss: Any) -> tuple[Any, list[Tensor]]:
        """Multiplies losses by the scale of this use; see `scaled`.

        Remembers their values, to report one that is inf or NaN when a step is skipped.

        Returns:
            The scaled losses in float32, in the same lists, tuples and dicts. And a list of these losses, without those
            inside transforms of `torch.func`.
        """
        result = scaled(loss, None if self.is_one else self.scale)
        losses = _losses_in(result)
        if not self.is_one:
            for each in losses:
                if each.grad_fn is not None:
                    each.grad_fn.metadata[_SCALED] = True  # type: ignore[index]  # stub: a method; it is a property
        if self.is_checked:
            # Sums without graph: a loss may be a view of a large tensor. Not scaled, which may make them inf.
            self._losses = [each.detach().float().sum() if each.dim() else each.detach() for each in _losses_in(loss)]
        return result, losses

    def reuse_scale_of(self, earlier: ScaleUse) -> None:
        """Takes the snapshot of an earlier use, although the scale may have changed since."""
        self.scale, self._age = earlier.scale, earlier._age

    def only_where(self, still: Tensor) -> ScaleUse:
        """Returns a copy whose overflow counts only if the gradients still exist.

        Args:
            still: 0-dimensional float32, 1 if they do, else 0; on any device.
        """
        assert self.found_inf is not None
        revised = self.confirmed()
        revised.found_inf = self.found_inf * on_device(still, self.found_inf.device)
        revised._overflowed = revised._sent = None
        return revised

    def confirmed(self, of_others: bool = False) -> ScaleUse:
        """Returns a copy whose overflow counts even after the gradients were cleared.

        Args:
            of_others: whether an optimizer without gradients remembers it.
        """
        copied = copy.copy(self)
        copied.is_confirmed, copied.is_of_others = True, of_others
        copied._original = self.original
        return copied

    def for_bystander(self) -> ScaleUse:
        """Returns a copy for the gradients of an optimizer that the block was not handed, with a verdict of its own."""
        copied = ScaleUse(self.scaler, self.scaler_id, self.is_checked)
        copied.scale, copied._age, copied._losses, copied.main = self.scale, self._age, self._losses, self
        return copied

    @property
    def is_droppable(self) -> bool:
        """True if a scale reacts to an overflow of this use even if its gradients are cleared."""
        return self.main is None and self.found_inf is not None and self.is_unheard

    @property
    def is_unheard(self) -> bool:
        """True if the scale has not reacted to this use, and no state was loaded into it since."""
        return not self.done.reacted and self._loads == loads_of(self.scaler)

    @property
    def original(self) -> ScaleUse:
        """The object that the block had; this one may be a copy."""
        return self._original or self

    @property
    def blocks(self) -> Sequence[ScaleUse]:
        """The uses by blocks that led to this verdict: itself, as the block had it."""
        return (self.original,)

    def is_same_scale(self, other: ScaleUse) -> bool:
        """Returns True if gradients of both may be summed; syncs with the device only if the scale may have changed."""
        if self.scaler is not other.scaler:
            return False
        return self._age == other._age or bool(self.scale == on_device(other.scale, self.scale.device))

    def send(self) -> None:
        """Starts to copy to the host what `overflowed`, `change` and the like read."""
        assert self.found_inf is not None
        # The scaler may have moved to the device of a later loss.
        self._sent = HostCopy(stacked([self.found_inf, self.scale, self.scaler.snapshot(), *self._losses]))

    @property
    def has_arrived(self) -> bool:
        """True if the values sent have reached the host."""
        return self._sent is not None and self._sent.has_arrived

    @property
    def is_at_hand(self) -> bool:
        """True if the host can read the verdict without a sync."""
        found_inf = self.found_inf
        return self._overflowed is not None or found_inf is None or found_inf.device.type in AT_HAND

    @property
    def overflowed(self) -> bool:
        """True after an overflow; syncs with the device."""
        if self._overflowed is None:
            if self._sent is not None or not self.is_at_hand:
                self._overflowed = self._values[0] != 0
            else:
                self._overflowed = self.found_inf is not None and bool(self.found_inf)
        return self._overflowed

    @property
    def ended_at_floor(self) -> bool:
        """True if the scale was at its floor when its value was sent; syncs with the device."""
        return self._values[2] <= self.floor

    @property
    def loss_that_is_not_finite(self) -> float | None:
        """Returns a loss, or the sum of its elements, that is inf or NaN; None if all are finite.

        Syncs with the device.
        """
        if self._sent is None and self.is_at_hand:
            return overflows.non_finite(map(float, self._losses))
        return overflows.non_finite(self._values[3:])

    @property
    def change(self) -> ScaleChange:
        """The reaction of the scale until its value was sent; syncs with the device."""
        _, before, now, *_ = self._values
        return ScaleChange(self.scaler_id, before, now)

    @property
    def _values(self) -> tuple[float, ...]:
        if self._sent is None:
            self.send()
        assert self._sent is not None
        return self._sent.values


def react(uses: Sequence[ScaleUse]) -> None:
    """Lets each scale react to its uses that led to a step: once for all of them, and once if several steps have them.

    Args:
        uses: the uses by blocks since the last step.
    """
    new = [use for use in uses if use.is_unheard]
    if not new:
        return
    for use in new:
        use.done.reacted = True
        use._sent = None
    if len(new) == 1 and new[0].main is None:  # as in most steps
        _react(new[0].scaler, new)
        return
    for use in new:
        if use.main is not None and use.found_inf is not None:  # the scale has reacted, or will, to the block itself
            main = use.main.found_inf
            back_off(use.scaler, use.found_inf if main is None else use.found_inf * (main == 0))
    for scaler, of_scaler in grouped((use.scaler, use) for use in new if use.main is None).items():
        _react(scaler, of_scaler)


def _react(scaler: LossScaler, uses: Sequence[ScaleUse]) -> None:
    found = [use.found_inf for use in uses if use.found_inf is not None]
    if scaler.dynamic and found:
        scaler.update_by(found[0] if len(found) == 1 else stacked(found).amax())
    elif not scaler.dynamic:
        scaler.update()


def drop(uses: Iterable[ScaleUse], kept: Collection[ScaleUse]) -> None:
    """Lets scales back off after overflows in gradients that were cleared, so that no step has them.

    Args:
        uses: the uses of scales by these gradients.
        kept: uses that the steps of other optimizers have.
    """
    originals = {use.original for use in kept}
    for use in uses:
        if use.is_droppable and use.original not in originals:
            use.done.reacted = True
            back_off(use.scaler, use.found_inf)  # type: ignore[arg-type]


def _newly_dropped(use: ScaleUse, condition: Tensor) -> Tensor:
    """Returns 1 where a use has overflowed, a condition is 1, and no other optimizer of the block has said so."""
    assert use.found_inf is not None
    dropped = use.found_inf * on_device(condition, use.found_inf.device)
    original = use.original
    if not original.is_shared:
        return dropped
    earlier = original._dropped
    original._dropped = dropped if earlier is None else earlier + dropped
    return dropped if earlier is None else dropped * (earlier == 0)


def drop_where(condition: Tensor, uses: Iterable[ScaleUse]) -> None:
    """Does what `drop` does where a condition is 1, and nothing where it is 0.

    Args:
        condition: 0-dimensional float32, on the device.
        uses: the uses of scales by gradients that may have been cleared.
    """
    for scaler, of_scaler in grouped((use.scaler, use) for use in uses if use.is_droppable).items():
        dropped = [_newly_dropped(use, condition) for use in of_scaler]
        back_off(scaler, dropped[0] if len(dropped) == 1 else stacked(dropped).amax())


class StepCheck(ScaleUse):
    """The verdict on the gradients of a step itself, of whatever backward passes; no scale reacts to it.

    Args:
        scaler: the scaler of the last loss before the step.
        scaler_id: its number, for messages.
        found_inf: 0-dimensional float32, not 0 if a gradient is inf or NaN.
        blocks: the blocks since the last step.
    """

    is_confirmed = True

    def __init__(self, scaler: LossScaler, scaler_id: int, found_inf: Tensor, blocks: Sequence[ScaleUse]) -> None:
        super().__init__(scaler, scaler_id)
        self.found_inf = found_inf
        self._blocks = tuple(block.original for block in blocks)
        self._losses = [loss for block in blocks for loss in block._losses]
        self.floor = 0.0  # a smaller scale is no question here

    @property
    def blocks(self) -> Sequence[ScaleUse]:
        """The blocks since the last step; empty if there was none."""
        return self._blocks
