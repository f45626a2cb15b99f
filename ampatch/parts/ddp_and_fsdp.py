"""Wrappers around adopted models, DistributedDataParallel and FSDP: the ranks whose weights and scales must agree.

Owns the hooks on wrappers. Must not reduce a gradient: torch does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ampatch import distributed
from ampatch.errors import UsageError, warn
from ampatch.parts.losses import Losses
from ampatch.parts.masters import Masters
from ampatch.parts.part import Part, Shared, with_casts_off
from ampatch.parts.weights import Weights
from ampatch.torch_private.distributed import ACTIVE_DDP_MODULE, is_joining
from ampatch.torch_private.modules import FORWARD_HOOKS


class Wrappers(Part):
    """The wrappers of a session's models.

    Args:
        shared: what all parts share.
        weights: the half weights, which must be the same on all ranks.
        masters: their masters.
        losses: the loss scales.
    """

    def __init__(self, shared: Shared, weights: Weights, masters: Masters, losses: Losses) -> None:
        super().__init__(shared)
        self._weights, self._masters, self._losses = weights, masters, losses
        self.before_forward = self._note_around
        self._moving: list[Callable[[], None]] = []  # in the forward pass that runs

    def install(self) -> None:
        """Has `DistributedDataParallel` report new wrappers."""
        self.ledger.set(DistributedDataParallel, "__init__", self._seeing(DistributedDataParallel.__init__))

    def find(self) -> None:
        """Finds wrappers in all models: earlier ones may have been sharded since."""
        for model in self.shared.adopted.models:
            for wrapper in self.shared.ranks.find_wrappers(model):
                self._follow_forwards_of(wrapper)
        if self.shared.ranks.fsdp:
            self.shared.cache.disable()

    def _note_around(self, _: object) -> None:
        """Notes the wrapper around a forward: it may be older than the session, or a copy."""
        wrapper = getattr(DistributedDataParallel, ACTIVE_DDP_MODULE)
        if wrapper is not None:
            self.note_forward(wrapper)

    def release(self) -> None:
        """Warns of wrappers that no longer reduce the gradients of weights that get their types back."""
        if self.shared.ranks.reduced_among(self._weights.conversion.converted()):
            warn(
                "the weights of a model that is in a DistributedDataParallel have the types back that they had before "
                "amp.initialize, and it no longer reduces their gradients. Wrap the model anew before training goes on."
            )

    def _seeing(self, original: Callable[..., None]) -> Callable[..., None]:
        """Returns a `DistributedDataParallel.__init__` that reports new wrappers to this session."""
        signature = inspect.signature(original)
        synchronise, follow = self.while_active(self._masters.synchronise), self.while_active(self._follow)

        @functools.wraps(original)
        def __init__(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            synchronise()
            original(wrapper, *args, **kwargs)
            follow(wrapper, signature, args, kwargs)

        return __init__

    @with_casts_off
    def _follow(
        self,
        wrapper: DistributedDataParallel,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Notes that DDP has wrapped a model, and broadcasts masters and scales from rank 0: DDP knows none of them."""
        conversion = self._weights.conversion
        conversion.without_master.accept_writes()  # the wrapper has sent the weights of rank 0 as they are
        self.shared.ranks.add(wrapper)
        self._follow_forwards_of(wrapper)
        if not signature.bind(wrapper, *args, **kwargs).arguments.get("init_sync", True):  # nor has it sent weights
            return
        for tensor in distributed.broadcast_tensors(wrapper):
            full = conversion.kept_float32_values(tensor)
            if full is not None:
                distributed.broadcast_from_rank_0(full, wrapper)
                conversion.set(tensor, full)
        if self.settings.scale_policy.dynamic:  # rank 0 alone may have loaded a checkpoint
            device = next(wrapper.parameters()).device
            for tensor in [tensor for scaler in self._losses.scalers for tensor in scaler.tensors_on(device)]:
                distributed.broadcast_from_rank_0(tensor, wrapper)

    def _follow_forwards_of(self, wrapper: DistributedDataParallel) -> None:
        hook = self.shared.hooks.after_replicated_forward
        if hook not in getattr(wrapper, FORWARD_HOOKS).values():
            self.ledger.on_undo(wrapper.register_forward_hook(hook).remove, wrapper)
            if self.settings.has_masters and wrapper.gradient_as_bucket_view:
                before = wrapper.register_forward_pre_hook(self.shared.hooks.before_replicated_forward)
                self.ledger.on_undo(before.remove, wrapper)

    def expect_moved_gradients(self, wrapper: DistributedDataParallel) -> None:
        """Prepares for a forward pass in which DDP may replace gradients by equal ones: the user has not."""
        self._moving = []
        if distributed.is_about_to_move_gradients(wrapper):
            ids = frozenset(map(id, wrapper.parameters()))
            for record in self.shared.adopted.records:
                self._moving.append(record.masters.gradients.shown.moving(ids))

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """Notes a forward pass of a wrapper: its settings then decide whether the backward pass reduces gradients.

        Raises:
            UsageError: it runs inside ``join()``, where ranks without data skip the backward passes of the others.
        """
        if is_joining(wrapper) and (self.settings.steps_in_float32 or self.settings.scale_policy.dynamic):
            raise UsageError(
                "under DistributedDataParallel.join() processes that have run out of data do without the passes that "
                "the others still make, so that their loss scales and float32 masters would go apart. Give all of them "
                "the same number of batches (drop_last=True), or use opt_level='O1' with a static loss_scale."
            )
        self.shared.ranks.add(wrapper)
        moving, self._moving = self._moving, []
        for note_moved in moving:
            note_moved()
