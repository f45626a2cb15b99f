"""An adopted optimizer: whether its step runs, is skipped, or is refused.

Owns which gradients are scaled, and which uses of a scale the next step depends on. The user's optimizer stays the
object it was; only its methods are replaced on the instance, through the ledger. Knows nothing of casts but the switch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ampatch.casting.nested import tensors_in
from ampatch.distributed import Ranks
from ampatch.errors import LossScaleError, OptionError, UsageError, warn
from ampatch.ledger import PatchLedger
from ampatch.native import kernels
from ampatch.opt_levels import HALVES
from ampatch.scaling.deferred_unscaling import DeferredUnscaling
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.scale_use import ScaleUse
from ampatch.switch import Switch
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.master_weights import MasterWeights
from ampatch.weights.optimizer_state import Snapshot

logger = logging.getLogger("ampatch")

#: What to do about gradients that a postponed pass has left.
NOT_REDUCED = (
    "the backward in the last amp.scale_loss was under no_sync, or did not go through the wrapper (such as "
    "DistributedDataParallel), which is to reduce them together with those of a later one. Run the last forward and "
    "backward of a step through the wrapper, outside of no_sync; or, if you have reduced the gradients yourself, call "
    "amp.unscale_(optimizer)."
)

#: What to do about gradients that no scaler knows of; where they are is to be filled in.
NO_SCALE = (
    "{} that no amp.scale_loss was told of: small ones are lost in half precision, and nobody has looked whether "
    "others overflowed. Type: with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(), with every "
    "optimizer that gets gradients in it; or amp.initialize(..., loss_scale=1) if none is to be scaled."
)

#: The attribute by which amp's own hooks for all optimizers are known.
OWN_HOOK = "_is_of_ampatch"

_IS_AT_HAND = operator.attrgetter("is_at_hand")
_OVERFLOWED = operator.attrgetter("overflowed")


class OptimizerLike(Protocol):
    """What makes an optimizer: what it does, not its class."""

    @property
    def param_groups(self) -> Any:
        """Mappings with the parameters under "params"."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the parameters from their gradients."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Clears the gradients."""


def check_optimizer(optimizer: object) -> OptimizerLike:
    """``optimizer`` itself if it behaves like one.

    Raises:
        OptionError: it lacks ``param_groups``, ``step`` or ``zero_grad``.
    """
    missing = [name for name in ("param_groups", "step", "zero_grad") if not hasattr(optimizer, name)]
    if missing:
        raise OptionError(
            f"found {type(optimizer).__name__} as an optimizer, which lacks {', '.join(missing)}; expected an "
            "object with param_groups, step() and zero_grad(), such as torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    return optimizer  # type: ignore[return-value]


def check_not_stepping(optimizer: OptimizerLike) -> None:
    """Raises `UsageError` where an optimizer's step is under way in this thread: no overflow could skip it any more."""
    frame = sys._getframe().f_back
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is optimizer:
            kind = type(optimizer).__name__
            raise UsageError(
                f"the first amp.scale_loss for this {kind} stands in the closure of its step(), which has begun "
                "already, so that an overflow could not skip it. Hand it in before that: type model, optimizer = "
                "amp.initialize(model, optimizer) where amp.init() stands."
            )
        frame = frame.f_back


class AdoptedOptimizer:
    """What amp knows of one optimizer.

    Args:
        optimizer: the user's; referred to weakly.
        masters: its float32 masters; none where the level has none.
        switch: the session's; off while ``step`` runs, since an optimizer's own arithmetic is not to be cast.
        after_step: called at the end of every step, skipped or not, with what gives the model's parameters that it
            updates.
        name_of: a model's parameter's name, for messages.
        others: all optimizers of the session.
        ranks: those over which gradients may be spread.
        dynamic: whether a scale is dynamic, so that a step may have to be taken back.
        exact_hooks: whether to read the overflow before every step, so that a skipped one fires no hooks.
        announce: whether a skipped step is logged.

    Attributes:
        masters: as given.
        pending: what came through blocks with a dynamic scale since the last step, the latest last.
        scaled_by: what scale the gradients have at present; None: they are unscaled.
        is_at_work: whether its step runs.
    """

    # So many blocks without a step mean that there may never be one: they are not to pile up.
    _MANY_PENDING = 1000

    def __init__(
        self,
        optimizer: OptimizerLike,
        masters: MasterWeights,
        switch: Switch,
        after_step: Callable[[Callable[[], Iterable[Tensor]]], object],
        name_of: Callable[[Tensor], str],
        others: Callable[[], Iterable[AdoptedOptimizer]],
        ranks: Ranks,
        *,
        dynamic: bool = True,
        exact_hooks: bool = False,
        announce: bool = True,
    ) -> None:
        self.masters = masters
        self.pending: list[ScaleUse] = []
        self.scaled_by: ScaleUse | None = None
        self.is_at_work = False
        self._optimizer = weakref.ref(optimizer)
        self._switch = switch
        self._after_step = after_step
        self._name_of = name_of
        self._others = others
        self._ranks = ranks
        self._dynamic = dynamic
        self._exact_hooks = exact_hooks
        self._announce = announce
        self._warns_of_no_scale = dynamic  # once: who forgets amp.scale_loss forgets it in every step
        self._has_other_scale = False
        self._uses_by_hand = LossScaler.uses_by_hand
        self._stepped_with: tuple[TensorWeakRef, int] | None = None  # one gradient of the last step, and its version
        self._skipped_steps = 0
        self._last_was_skipped = False
        self._has_told_of_loss = False
        self._told_of_clipping: ScaleUse | None = None
        self._scaled_in_closure: list[TensorWeakRef] = []
        self._warns_of_scaled_result = True
        self._unsettled: deque[list[ScaleUse]] = deque()  # steps that the optimizer ran or skipped by itself
        self._near_floor = False
        self._widened: list[tuple[Tensor, torch.dtype, torch.dtype | None, torch.dtype]] = []
        self._left_scaled: list[TensorWeakRef] = []
        self._deferred: DeferredUnscaling | None = None

    def install(self, ledger: PatchLedger) -> None:
        """Replaces ``step`` on the optimizer, and its parameters by masters where there are to be some.

        Raises:
            TypeError: the optimizer does not keep its attributes itself.
            UsageError: a parameter is in two optimizers that would each have a master of it.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        original, switch = optimizer.step, self._switch
        if "step" not in vars(optimizer) and getattr(original, "__self__", optimizer) is not optimizer:
            raise TypeError("its step is that of another object")

        # wraps() carries over the mark of an LR scheduler that wrapped step before, which it looks for later.
        @functools.wraps(original)
        def step(me: OptimizerLike, *args: Any, **kwargs: Any) -> Any:
            if me is not self._optimizer():  # the deep copy of an optimizer whose class copies every attribute
                return type(me).step(me, *args, **kwargs)
            if not switch.active:
                return original(*args, **kwargs)
            was_at_work, self.is_at_work = self.is_at_work, True
            try:
                return self.step(original, args, kwargs)
            finally:
                self.is_at_work = was_at_work

        # A bound method, because an LR scheduler made later asks step for its __func__, and because it is pickled
        # as the optimizer and this name.
        step.__name__ = "step"
        ledger.set(optimizer, "step", types.MethodType(step, optimizer))
        self.masters.install(ledger)

    # What became of steps

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device."""
        self._settle(wait=True)
        return self._last_was_skipped

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far; waits for the device."""
        self._settle(wait=True)
        return self._skipped_steps

    # Gradients

    @property
    def optimizer(self) -> OptimizerLike | None:
        """The user's; None if it is gone."""
        return self._optimizer()

    def bring_up_to_date(self, weights_too: bool = False) -> None:
        """Has masters be there for all parameters that should have one, with the gradients that they should have.

        Args:
            weights_too: and the weights.
        """
        self.masters.complete()
        if weights_too:
            self.masters.synchronise(by_value=True)
        if self.scaled_by is None:
            self.masters.gradients.follow()

    def parameters(self) -> Iterator[Tensor]:
        """Returns the tensors that the optimizer updates."""
        optimizer = self._optimizer()
        return iter(()) if optimizer is None else optimizer_state.parameters_of(optimizer)

    def model_parameters(self) -> Iterator[Tensor]:
        """Returns those of the model that stand behind `parameters`: other tensors where these are masters."""
        return map(self.masters.parameter_of, self.parameters())

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that the optimizer updates its parameters with, each once."""
        return optimizer_state.gradients_of(self.parameters())

    def is_at_rest(self) -> bool:
        """Returns whether all is as after a step and `zero_grad`: no gradient here, none left scaled elsewhere."""
        for each in list(self._others()):
            if each.scaled_by is not None:
                return False
        wanted = self.masters.wanted
        return (
            not self.pending
            and (not wanted or self.masters.gradients.are_at_rest())
            and optimizer_state.are_bare(self.parameters(), may_be_half=not wanted)
        )

    def has_gradients(self) -> bool:
        """Returns whether there is any gradient where backward puts it, or where FSDP keeps it until it is reduced."""
        return optimizer_state.has_gradients(self.model_parameters()) or (
            self._ranks.has_unreduced(self.model_parameters())
        )

    def drop_gradients(self) -> None:
        """Sets all of them to None, and so takes them off the scale."""
        self._ranks.drop_unreduced(self.model_parameters())
        for parameter in self.parameters():
            parameter.grad = None
        self.masters.gradients.clear()
        self.leave_scale()

    def parameters_with_half_gradients(self) -> list[Tensor]:
        """Returns those whose gradients would be made float32 for as long as they are scaled."""
        return [
            parameter
            for parameter in self.parameters()
            if (grad := parameter.grad) is not None and grad.dtype in HALVES and not grad.is_sparse
        ]

    def widen_half_gradients(self, but: Collection[int]) -> None:
        """Makes half gradients float32 for as long as they are scaled, since at the scale they could overflow.

        Args:
            but: ids of parameters to leave out.
        """
        for parameter in self.parameters_with_half_gradients():
            grad = parameter.grad
            if id(parameter) not in but and grad is not None:
                self._widened.append((parameter, parameter.dtype, parameter.grad_dtype, grad.dtype))
                _set_gradient(parameter, grad.float(), torch.float32)

    def note_scaled(self) -> None:
        """Takes note of gradients that are left scaled: to find them should the optimizer be gone."""
        self.masters.gradients.leave_scaled()
        self._left_scaled = [TensorWeakRef(each) for each in self.model_parameters() if each.grad is not None]

    @property
    def is_deferred(self) -> bool:
        """Whether the gradients are left scaled for the optimizer's own kernel, which is to unscale and clip them."""
        return self._deferred is not None

    def check_not_scaled_when_clipped(self, grads: Iterable[Tensor]) -> None:
        """Checks gradients that torch is about to clip, or to take the norm of.

        Divides those that were left to the optimizer's own kernel.

        Args:
            grads: none where the masters were asked for theirs, which they get when those of the model are unscaled.

        Warns:
            AmpWarning: some of this optimizer's are among them, and still scaled; or there are none, and its masters
                wait for theirs.
        """
        if self.scaled_by is None or self.scaled_by.is_one or self.scaled_by is self._told_of_clipping:
            return
        clipped, shows = set(map(id, grads)), self.masters.gradients.shows
        scaled = [each for each in self.model_parameters() if each.grad is not None and not shows(each)]
        if any(id(each.grad) in clipped for each in scaled):
            if self.is_deferred:
                self.unfold()
                return
            what = "so that the norm is too large by the loss scale"
        elif not clipped and self.masters.wanted and scaled:
            what = "and the float32 masters have none yet, so that nothing is clipped"
        else:
            return
        self._told_of_clipping = self.scaled_by  # torch may come here several times in one call
        warn(
            f"gradients are clipped, or their norm is taken, where amp.scale_loss has them scaled still, {what}. Do it "
            "behind the block, without delay_unscale=True; or type amp.clip_grad_norm_(optimizer, max_norm) there."
        )

    def are_unscaled(self) -> bool:
        """Returns whether no gradient is scaled."""
        return self.scaled_by is None or self.scaled_by.is_one or not self.has_gradients()

    def may_defer(self) -> bool:
        """Returns whether the optimizer's own kernel could unscale and clip the gradients that are there."""
        # After an earlier pass that overflowed the kernel would leave them as they are.
        return not self.masters and not self._widened and not self.pending and self._divides_by_itself((), {})

    def defer(self, scale_use: ScaleUse, divisor: Tensor) -> None:
        """Leaves it to the optimizer's own kernel to divide the gradients.

        Args:
            scale_use: the scale that they have, and keep until the step.
            divisor: 0-dimensional float32: that scale, and what clips them.
        """
        self.scaled_by, self._deferred = scale_use, DeferredUnscaling(self.gradients(), divisor)
        self.note_scaled()

    def unfold(self) -> None:
        """Divides the gradients here and now, if that was left to the optimizer's own kernel."""
        if self._deferred is None:
            return
        try:
            self._deferred.divide(self.gradients())
        except BaseException:
            self.drop_gradients()
            raise
        self.leave_scale()

    def leave_scale(self) -> None:
        """Notes that the gradients are unscaled, or gone; makes those half again that were widened."""
        self.scaled_by = self._deferred = None
        self._left_scaled.clear()
        for parameter, own, allowed, dtype in self._widened:
            if parameter.dtype is not own:  # given back its type by deinitialize inside the block
                continue
            _set_gradient(parameter, None if parameter.grad is None else parameter.grad.to(dtype), allowed)
        self._widened.clear()

    def retype_state(self, dtype_before: Callable[[Tensor], torch.dtype | None]) -> None:
        """Has the optimizer's state follow parameters that were converted."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer_state.retype(optimizer, dtype_before)

    def let_go(self) -> bool:
        """Drops gradients that nobody would unscale any more, if there are any; masters give theirs back."""
        self._settle(wait=True)  # and says what there is to say of skipped steps
        self.masters.surrender()
        self.unfold()
        scaled_by = self.scaled_by
        is_open = scaled_by is not None and scaled_by.is_open
        lost = scaled_by is not None and not is_open and not scaled_by.is_one and self.has_gradients()
        if lost:
            self.drop_gradients()
        elif scaled_by is None:
            self.masters.gradients.follow()
        elif not is_open:
            self.leave_scale()
        self.masters.gradients.surrender(scaled_by.scale if is_open and scaled_by is not None else None)
        return lost

    def optimizer_died(self) -> None:
        """Takes away gradients that it left scaled: another optimizer would take them as they are."""
        left = [parameter for reference in self._left_scaled if (parameter := reference()) is not None]
        if left and self.scaled_by is not None and not self.scaled_by.is_one:
            for parameter in left:
                parameter.grad = None
            logger.warning("An optimizer was deleted whose gradients were still scaled: they are None now.")
        self._widened.clear()

    def check_shared(self, what: str, also: Collection[AdoptedOptimizer] = ()) -> None:
        """Raises `UsageError` where another optimizer left gradients scaled of parameters that this one has too.

        If they are deferred they are divided instead, and where they were cleared that optimizer's scale is left.

        Args:
            what: what would be done to these gradients.
            also: optimizers that it would be done to as well, and whose gradients therefore may be scaled.
        """
        for other in list(self._others()):
            if other.scaled_by is None or other is self or other in also:
                continue
            if other.scaled_by.is_one and not other.is_deferred:
                continue
            if not other.scaled_by.is_open and not other.has_gradients():
                other.leave_scale()
                continue
            shared = self._shared_gradient(other)
            if shared is not None and other.is_deferred:
                other.unfold()
            elif shared is not None:
                raise UsageError(
                    f"{what} the gradient of {self._name_of(shared)}, which another optimizer has as well, and which "
                    "is still scaled by a block of amp.scale_loss for that one. Hand both optimizers to amp.scale_loss."
                )

    def _shared_gradient(self, other: AdoptedOptimizer) -> Tensor | None:
        """Returns a model's parameter with a gradient that both optimizers update; None if there is none."""
        theirs = set(map(id, other.model_parameters()))
        return next((each for each in self.model_parameters() if each.grad is not None and id(each) in theirs), None)

    def note_other_scale(self) -> None:
        """Takes note that somebody else has scaled the gradients of the next step, and unscales them now."""
        self._has_other_scale = True

    def remember(self, scale_use: ScaleUse) -> None:
        """Takes note of a pass that the next step depends on."""
        # Without gradients here it can have overflowed in another's only: whether these are cleared nobody sees here.
        self.pending.append(scale_use if self.has_gradients() else scale_use.confirmed(of_others=True))
        if len(self.pending) >= self._MANY_PENDING:
            overflowed = {earlier.scaler_id: earlier for earlier in self.pending if earlier.overflowed}
            self.pending = list(overflowed.values())

    def forget_what_was_cleared(self) -> None:
        """Takes back the verdict of the last pass where the gradients that it was about are gone.

        What overflowed and is still there is zeroed, as the next pass is to be judged by itself.
        """
        self.bring_up_to_date()
        self._forget_if_bare()
        last = self.pending[-1] if self.pending else None
        if last is None or last.found_inf is None or last.is_judged_later or last.is_confirmed:
            return
        grads = self.gradients()
        self.pending[-1] = last = last.only_where(self._has_left(last, grads))
        assert last.found_inf is not None
        kernels.zero_after_overflow_(grads, last.found_inf)
        self.masters.gradients.note_masters()

    def _forget_if_bare(self) -> None:
        """Forgets the blocks whose gradients are all gone."""
        if optimizer_state.are_bare(self.parameters()) and not (
            self.has_gradients() or self._ranks.share(self.parameters())
        ):
            self.pending = [scale_use for scale_use in self.pending if scale_use.is_of_others]

    def _has_left(self, scale_use: ScaleUse, grads: list[Tensor]) -> Tensor:
        """Returns whether gradients of a pass that overflowed were not cleared, in whichever process: one is not zero.

        Whether they are finite does not matter: clipped by value, what overflowed is finite too.

        Returns:
            0-dimensional float32, 1 or 0.
        """
        assert scale_use.found_inf is not None
        found = torch.zeros_like(scale_use.found_inf)
        # Large, or small gradients would have no squares.
        factor, sum_of_squares = torch.full_like(found, 2.0**64), torch.zeros_like(found, dtype=torch.float64)
        kernels.found_inf_norm(grads, factor, found, sum_of_squares)
        found.masked_fill_(sum_of_squares != 0, 1)
        self._ranks.agree(found, self.model_parameters())
        return found

    # Steps

    def step(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Steps or skips.

        Args:
            original: the user's own ``step``.
            args: what it was called with.
            kwargs: the same by keyword. A closure sees casts on, and half weights that are the masters'.

        Returns:
            What the step returns; of a skipped one, None, or what its closure returned last.

        Raises:
            UsageError: the gradients are still scaled.
            LossScaleError: they overflowed with the loss scale at its floor.

        Warns:
            AmpWarning: they never came through a block of ``amp.scale_loss``, although the scale is dynamic.
        """
        deferred = self._deferred
        if deferred is None and self.scaled_by is not None:
            self._check_unscaled("optimizer.step() was called on gradients that are")
        self.check_shared("optimizer.step() would use")
        closures: list[object] = []
        if args or kwargs:
            args, kwargs = self._with_casts(args, closures), self._with_casts(kwargs, closures)
        if deferred is not None and not (deferred.are(self.gradients()) and self._divides_by_itself(args, kwargs)):
            self.unfold()
        self._prepare_step()
        if self._warns_of_no_scale:
            self._look_for_scale(before_closure=bool(closures))
        pending, self.pending = self.pending, []
        try:
            # A kernel that skips takes longer, and is for where somebody would have to wait.
            would_wait = not all(map(_IS_AT_HAND, pending))
            if (would_wait or self._deferred is not None) and self._skips_by_itself(args, kwargs):
                return self._step_or_skip(original, pending)
            if would_wait and is_capturing():
                raise UsageError(
                    "whether this step is to be skipped would have to be read from the device, which cannot be done "
                    "while a CUDA graph is captured. Use an optimizer with fused=True (and capturable=True, where it "
                    "has that), without exact_hooks, that has made a step before; or a static loss_scale."
                )
            overflowed = self._still_overflowed(pending)
            self._settle_before(pending)
            if overflowed:
                self._skip(overflowed)
                return None
            return self._step(original, args, kwargs, bool(closures))
        finally:
            if self.masters.wanted:
                self.masters.gradients.clear()
            self._after_step(self.model_parameters)

    def _prepare_step(self) -> None:
        if self._unsettled:
            self._settle(wait=False)
        if self.masters.wanted:
            self.bring_up_to_date(weights_too=True)
        if self.pending:
            self._forget_if_bare()

    def _still_overflowed(self, pending: Sequence[ScaleUse]) -> list[ScaleUse]:
        """Returns the uses that overflowed, but for a last one whose gradients are gone, or others by now."""
        overflowed = list(filter(_OVERFLOWED, pending))
        is_last = len(overflowed) == 1 and overflowed[0] is pending[-1] and not overflowed[0].is_confirmed
        return [] if is_last and not bool(self._has_left(overflowed[0], self.gradients())) else overflowed

    def _settle_before(self, pending: Sequence[ScaleUse]) -> None:
        """Prepares for a step that amp makes or skips, once it has read what came of these uses."""
        if self._unsettled:
            self._settle(wait=bool(pending))
        if self._unsettled:
            self._unsettled.append([])  # in its order behind steps that are not settled yet
        else:
            self._last_was_skipped = False
        if self._near_floor and pending:
            self._near_floor = any(scale_use.ended_at_floor for scale_use in pending)

    def _with_casts(self, given: Any, found: list[object]) -> Any:
        """Wraps the closures in a step's arguments, so that they see casts on.

        Args:
            given: anything.
            found: the closures are added to it.
        """
        if type(given) in (list, tuple):
            items = [self._with_casts(item, found) for item in given]
            return given if all(map(operator.is_, items, given)) else type(given)(items)
        if type(given) is dict:
            values = {key: self._with_casts(item, found) for key, item in given.items()}
            return given if all(map(operator.is_, values.values(), given.values())) else values
        if not callable(given) or isinstance(given, (type, Tensor, nn.Module)):
            return given
        found.append(given)
        return functools.partial(self._evaluate, given)

    def _step(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], has_closure: bool
    ) -> Any:
        # An overflow in a later evaluation of the closure finds the parameters moved already.
        may_go_back = has_closure and self._dynamic and not optimizer_state.evaluates_first(self._optimizer())
        before = Snapshot(self._optimizer()) if may_go_back else None
        try:
            if not (self.masters.wanted and self.masters):
                with self._switch.suspended():
                    return original(*args, **kwargs)
            with self._writing(), self._switch.suspended():
                return original(*args, **kwargs)
        except _ClosureOverflowedError as error:
            if before is not None:
                before.restore()
                self.masters.write()
            self._skip(error.overflowed)
            return error.result

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Has half weights written after a step, before the user's hooks see them, and what hooks write be followed."""
        written = False

        def write(*_: object) -> None:
            nonlocal written
            written, self.masters.is_stepping = True, False
            self.masters.check_that_masters_are_updated()
            self.masters.write()

        hooks = self._hook_step(write)
        self.masters.is_stepping = True
        try:
            yield
        except BaseException:
            if not written:
                self.masters.write()
            raise
        else:
            if written:
                self.masters.synchronise(by_value=True)
            else:  # a step that fires no hooks
                write()
        finally:
            self.masters.is_stepping = False
            for hook in hooks:
                hook.remove()

    def _hook_step(self, write: Callable[..., None]) -> list[RemovableHandle]:
        """Puts amp last of what runs before the step and first of what runs after it, where there are hooks at all."""
        optimizer: Any = self._optimizer()
        if not isinstance(optimizer, torch.optim.Optimizer):
            return []
        before: Any = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        after: Any = getattr(optimizer, "_optimizer_step_post_hooks", None)
        if before is None or after is None:  # its __init__ was not called
            return []
        if not (before or after or _has_hooks(_global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
            return []
        hooks = [optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(write)]
        after.move_to_end(hooks[-1].id, last=False)
        return hooks

    def _before_step(self, *_: object) -> None:
        """Takes over what the user's own hooks have written."""
        self.masters.gradients.follow()
        self.masters.synchronise(by_value=True)

    def note_scaled_losses(self, losses: Iterable[Tensor]) -> None:
        """Takes note of what a block gives for losses, to know them where a closure returns one of them."""
        if self.is_at_work and self._warns_of_scaled_result:
            self._scaled_in_closure = list(map(TensorWeakRef, losses))

    def _check_result(self, result: object) -> None:
        scaled, self._scaled_in_closure = [each() for each in self._scaled_in_closure], []
        if any(each is scaled_loss for each in tensors_in(result) for scaled_loss in scaled):
            self._warns_of_scaled_result = False
            warn(
                "the closure of optimizer.step(closure) returns the scaled loss, which the optimizer takes for the "
                "loss; LBFGS compares it with others, of other scales. End the closure with return loss: what "
                "amp.scale_loss(loss, optimizer) was given."
            )

    def _evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the closure as the code around the step would."""
        self.masters.write()
        with self._switch.resumed():
            result = closure(*args, **kwargs)
        if self._scaled_in_closure:
            self._check_result(result)
        self.unfold()
        self._check_unscaled("the closure of optimizer.step(closure) left gradients that are")
        if self._warns_of_no_scale:
            self._look_for_scale()
        self.masters.synchronise(by_value=True)
        self.masters.gradients.follow()
        pending, self.pending = self.pending, []
        overflowed = list(filter(_OVERFLOWED, pending))
        if overflowed:
            raise _ClosureOverflowedError(overflowed, result)
        return result

    def _step_or_skip(self, original: Callable[..., Any], pending: list[ScaleUse]) -> Any:
        """Makes a step of an optimizer that skips in its own kernel where ``found_inf`` is not 0: nobody waits."""
        optimizer: Any = self._optimizer()
        verdicts = [scale_use.found_inf for scale_use in pending if scale_use.found_inf is not None]
        # torch's own protocol between GradScaler and its optimizers. The gradients are unscaled already, or deferred.
        optimizer.grad_scale = None if self._deferred is None else self._deferred.divisor
        optimizer.found_inf = torch.stack(verdicts).amax() if verdicts else None
        try:
            with self._writing(), self._switch.suspended():
                result = original()
            if self.is_deferred:
                self.leave_scale()
            return result
        except BaseException:
            if self.is_deferred:
                self.drop_gradients()  # whether they were divided or not, nobody can tell
            raise
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            if not is_capturing():  # of replays nobody hears
                for scale_use in pending:
                    scale_use.send()
                self._unsettled.append(pending)

    def _skips_by_itself(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        optimizer = self._optimizer()
        return (
            not args
            and not kwargs
            and not self._exact_hooks
            and not self._near_floor
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and isinstance(optimizer, torch.optim.Optimizer)
            and all(group.get("fused", True) for group in optimizer.param_groups)  # any of them may say otherwise
            and optimizer_state.has_state(optimizer)
        )

    def _divides_by_itself(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether a step would be one of torch's own kernels, with nobody in between who looks at gradients."""
        optimizer: Any = self._optimizer()
        return (
            self._skips_by_itself(args, kwargs)
            and getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
            and not optimizer._optimizer_step_pre_hooks
            and not _has_hooks(_global_optimizer_pre_hooks)
        )

    def _settle(self, wait: bool) -> None:
        """Reads what became of steps that nobody waited for, in their order."""
        if is_capturing():  # then it may not even be asked whether it is there
            return
        while self._unsettled and (wait or all(scale_use.has_arrived for scale_use in self._unsettled[0])):
            overflowed = list(filter(_OVERFLOWED, self._unsettled.popleft()))
            self._last_was_skipped = bool(overflowed)
            if overflowed:
                self._skipped_steps += 1
                # The next overflow is to be an error that names parameters, while their gradients are there.
                self._near_floor = any(scale_use.ended_at_floor for scale_use in overflowed)
                self._announce_skip(overflowed)
                self._tell_of_loss(overflowed)

    def _look_for_scale(self, before_closure: bool = False) -> None:
        """Warns once if the next step is to use gradients that came through no block, and no scaler of anybody's.

        Args:
            before_closure: a closure is to run yet, which may clear the gradients: they are looked at after it.
        """
        optimizer = self._optimizer()
        # By a GradScaler, if only for a kernel that heeds it; or by a scaler of amp's, which is not told of optimizers.
        is_judged = (
            self._has_other_scale
            or getattr(optimizer, "found_inf", None) is not None
            or LossScaler.uses_by_hand > self._uses_by_hand
        )
        self._has_other_scale, self._uses_by_hand = False, LossScaler.uses_by_hand
        grad = next((each.grad for each in self.model_parameters() if each.grad is not None), None)
        last, self._stepped_with = self._stepped_with, None
        if grad is None:
            return
        is_same = last is not None and last[0]() is grad and last[1] == grad._version
        is_known = is_judged or is_same or bool(self.pending)
        if before_closure and not is_known:
            return
        if not is_known and any(bool(kernels.values_of(each).any()) for each in self._gradients_of_model()):
            self._warns_of_no_scale = False
            warn(NO_SCALE.format(f"this {type(optimizer).__name__} steps with gradients"))
        self._stepped_with = TensorWeakRef(grad), grad._version

    def _gradients_of_model(self) -> list[Tensor]:
        return optimizer_state.gradients_of(self.model_parameters())

    def _check_unscaled(self, what: str) -> None:
        if self.scaled_by is None:
            return
        if self.has_gradients():
            if self.scaled_by.is_open:
                why = "it stands inside the amp.scale_loss block. Move it behind the block."
            elif self.scaled_by.is_postponed:
                why = NOT_REDUCED
            else:
                why = (
                    "the last amp.scale_loss had delay_unscale=True. Leave it out in the last block before the "
                    "step, or call amp.clip_grad_norm_(optimizer, max_norm) after it; or, to drop the gradients, type "
                    "optimizer.zero_grad(), which has to set them to None."
                )
            raise UsageError(f"{what} still scaled: {why}")
        if not self.scaled_by.is_open:
            self.leave_scale()

    def _skip(self, overflowed: Sequence[ScaleUse]) -> None:
        self._settle(wait=True)
        self._last_was_skipped = True
        self._skipped_steps += 1
        optimizer = self._optimizer()
        if isinstance(optimizer, torch.optim.Optimizer):
            # An LR scheduler warns of a scheduler step before the first optimizer step unless this says that there was
            # one.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._tell_of_loss(overflowed)
        for scale_use in overflowed:
            if scale_use.began_at_floor:
                culprits = optimizer_state.not_finite_gradients(
                    self.parameters(), lambda each: self._name_of(self.masters.parameter_of(each))
                )
                raise LossScaleError(
                    f"loss scaler {scale_use.scaler_id} is at its floor of {scale_use.scaler.policy.floor:g} "
                    f"and the gradients still overflow, so no scale can help: {culprits}. Look for inputs "
                    "or a loss that are not finite, or a learning rate that is too high; with "
                    "half_dtype=torch.bfloat16 no loss scale is needed."
                )
        self._announce_skip(overflowed)

    def _tell_of_loss(self, overflowed: Sequence[ScaleUse]) -> None:
        """Warns once where it is not the scale that gradients overflow for."""
        if self._has_told_of_loss:
            return
        losses = [loss for each in overflowed if (loss := each.loss_that_is_not_finite) is not None]
        if losses:
            self._has_told_of_loss = True
            warn(
                f"the loss of a skipped step is {losses[0]} before it is scaled, so that no loss scale can help. Look "
                "for inputs that are not finite, weights that are not (a learning rate that is too high), or values in "
                "the forward that leave float16's range: half_dtype=torch.bfloat16 has that of float32."
            )

    def _announce_skip(self, overflowed: Sequence[ScaleUse]) -> None:
        if self._announce:
            for last in {scale_use.scaler_id: scale_use for scale_use in overflowed}.values():
                last.announce()


class _ClosureOverflowedError(BaseException):
    """Leads out of an optimizer's step, past whatever it catches, when its closure overflowed."""

    def __init__(self, overflowed: Sequence[ScaleUse], result: Any) -> None:
        super().__init__()
        self.overflowed = overflowed
        self.result = result


def _has_hooks(*hooks: Mapping[int, Callable[..., Any]]) -> bool:
    """Returns whether there are hooks beside amp's own."""
    return any(not hasattr(hook, OWN_HOOK) for table in hooks for hook in table.values())


def _set_gradient(parameter: Tensor, grad: Tensor | None, allowed: torch.dtype | None) -> None:
    """Puts a gradient of another type in place: torch refuses to change the type while there is one."""
    parameter.grad = None
    parameter.grad_dtype = allowed
    parameter.grad = grad
