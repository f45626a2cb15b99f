"""An adopted optimizer: whether its step runs, is skipped, or raises.

The user's optimizer stays the same object; the ledger replaces only methods of the instance. Must not scale or unscale
gradients: `OptimizerGradients` does.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.errors import UsageError, warn
from ampatch.ledger import PatchLedger
from ampatch.native.host_copy import on_device, stacked
from ampatch.patching.weight_cache import WeightCache
from ampatch.scaling import step_observers
from ampatch.scaling.kept_buffers import BuffersBefore, KeptBuffers
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.missing_scale import MissingScale
from ampatch.scaling.optimizer_gradients import OptimizerGradients
from ampatch.scaling.overflows import Overflow, OverflowHandler
from ampatch.scaling.scale_use import ScaleUse, StepCheck, is_scaled, react
from ampatch.scaling.step_gate import ClosureGate, skipping_by_itself
from ampatch.scaling.step_outcomes import OVERFLOWED, StepOutcomes
from ampatch.scaling.users_optimizer import OptimizerLike, OwnStep
from ampatch.switch import Switch
from ampatch.tracing import is_capturing
from ampatch.weights import optimizer_state
from ampatch.weights.exchange import ExchangedMasters
from ampatch.weights.master_weights import MasterWeights

_IS_AT_HAND = operator.attrgetter("is_at_hand")


class AdoptedOptimizer:
    """An optimizer that amp has adopted: runs, skips or refuses its steps.

    Args:
        gradients: its gradients.
        switch: the session's; off while ``step`` runs, so that the optimizer's own arithmetic is not cast.
        cache: the casts of weights, which a step makes invalid.
        scalers: one for each loss.
        exact_hooks: whether to read the verdict before every step, so that a skipped step fires no hooks.
        announce: whether to log skipped steps.
        on_overflow: what else happens after a skipped step. If it reports, every verdict is read before the step, while
            the gradients are there.
        checks_by: scaler to name in messages if no block made the gradients that are inf or NaN; None: steps do not
            look for inf and NaN.
        kept_buffers: the buffers of models, which a skipped step restores; None: steps are never skipped.
        prepare_masters: called before each step with the masters, at levels that have them.
        temporary: masters that exist only while it steps; None if there are none.

    Attributes:
        gradients: as given.
        masters: its float32 masters; empty at levels without masters.
        exchange: what its parameters stand for while it steps: the masters, or temporary ones.
        scalers: as given.
        is_at_work: True while its step runs.
        outcomes: what became of its steps.
        missing_scale: warns of gradients without a scale.
    """

    def __init__(
        self,
        gradients: OptimizerGradients,
        switch: Switch,
        cache: WeightCache,
        scalers: Sequence[LossScaler],
        *,
        exact_hooks: bool = False,
        announce: bool = True,
        on_overflow: OverflowHandler,
        checks_by: LossScaler | None = None,
        kept_buffers: KeptBuffers | None = None,
        prepare_masters: Callable[[MasterWeights], object] = lambda _: None,
        temporary: ExchangedMasters | None = None,
    ) -> None:
        self.gradients = gradients
        self.masters = gradients.masters
        self.exchange: ExchangedMasters = temporary or gradients.masters
        self.scalers = scalers
        self._optimizer = gradients.updated.optimizer
        self.is_at_work = False
        self._switch = switch
        self._cache = cache
        dynamic = scalers[0].dynamic
        self._may_go_back = dynamic or checks_by is not None  # steps may have to be undone
        self._exact_hooks = exact_hooks or on_overflow.reports
        self._on_overflow = on_overflow
        self.outcomes = StepOutcomes(gradients, on_overflow, announce)
        self.missing_scale = MissingScale(gradients, warns=dynamic)
        self._checks_by = checks_by
        self._kept_buffers = kept_buffers
        self._buffers: BuffersBefore | None = None  # of the buffers before the step that runs
        self._prepare_masters = prepare_masters
        self._overflow: Overflow | None = None  # of a step that was just skipped
        self._gate: ClosureGate | None = None  # of the step with a closure that runs
        self._skips_this_step = False
        self._uses: list[ScaleUse] = []  # that led to the step that runs
        self._warns_of_scaled_result = self._warns_of_cleared = True

    def install(self, ledger: PatchLedger) -> None:
        """Replaces ``step`` on the optimizer, and half parameters by masters at levels that have them.

        Raises:
            TypeError: the optimizer does not keep its attributes itself.
            UsageError: a parameter is in two optimizers that would each have a master of it.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        own_step = OwnStep(optimizer, self.exchange)
        original, switch, handler, reports = optimizer.step, self._switch, self._on_overflow, self._on_overflow.reports
        if "step" not in vars(optimizer) and getattr(original, "__self__", optimizer) is not optimizer:
            raise TypeError("its step is that of another object")

        # wraps() copies the mark that an LR scheduler left on the step it wrapped, and looks for later.
        @functools.wraps(original)
        def step(me: OptimizerLike, *args: Any, **kwargs: Any) -> Any:
            if me is not self._optimizer():  # a deep copy that took this attribute along
                return type(me).step(me, *args, **kwargs)
            if not switch.active:
                return original(*args, **kwargs)
            was_at_work, self.is_at_work = self.is_at_work, True
            try:
                with switch.suspended(), self.exchange.swapped_out():
                    result = self.step(own_step, args, kwargs)
            finally:
                self.is_at_work = was_at_work
                overflow, self._overflow = self._overflow, None
                if reports:
                    handler.end_step(self.gradients.updated.model_parameters())
            if overflow is not None:
                handler.handle(overflow)
            return result

        # A bound method: an LR scheduler reads its __func__, and it pickles as the optimizer and this name.
        step.__name__ = "step"
        ledger.set(optimizer, "step", types.MethodType(step, optimizer))
        self.exchange.install(ledger)
        self.missing_scale.note_existing()

    @property
    def optimizer(self) -> OptimizerLike | None:
        """The user's optimizer; None once it is deleted."""
        return self._optimizer()

    def release(self) -> bool:
        """Logs the skipped steps that were not logged yet, then calls `OptimizerGradients.release`."""
        self.outcomes.read()
        return self.gradients.release()

    # Steps

    def step(self, own_step: OwnStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Steps, or skips the step after an overflow.

        Args:
            own_step: the optimizer's own step.
            args: positional arguments of the optimizer's own step.
            kwargs: its keyword arguments. A closure runs with casts on, and sees half weights that equal the masters.

        Returns:
            The result of the optimizer's own step. Of a skipped step: None, or the last result of its closure.

        Raises:
            UsageError: the gradients are still scaled.
            LossScaleError: they overflowed although the loss scale is at its floor.

        Warns:
            AmpWarning: the scale is dynamic, and the gradients came from no ``amp.scale_loss`` block; or there are no
                gradients, because the last step has cleared them.
        """
        if self.outcomes.unread:  # first, as these decide whether the optimizer's kernel may skip
            self.outcomes.read(wait=False)
        if self.gradients.scaled_by is not None:
            self.gradients.check_unscaled("optimizer.step() was called on gradients that are")
        self.gradients.check_shared("optimizer.step() would use")
        closures: list[object] = []
        if args or kwargs:
            args, kwargs = self._with_casts(args, closures), self._with_casts(kwargs, closures)
        self._prepare_step(has_closure=bool(closures))
        if self.missing_scale.warns:
            self.missing_scale.look(before_closure=bool(closures))
        verdicts = self.gradients.verdicts
        pending, verdicts.pending = verdicts.pending, []
        self._uses = pending
        check: StepCheck | None = None
        judged = [each for each in pending if each.found_inf is not None]
        self._skips_this_step, is_left_to_kernel = False, False
        try:
            react(pending)
            self._buffers = self._buffers_before()
            checks_by = self._checks_by or self._scaler_of_unjudged(pending)
            if checks_by is not None:
                check = None if closures else self._check(pending, checks_by)
                judged += [check] if check is not None else []
            _check_not_captured(judged)
            # An optimizer's kernel that skips by itself is slower: it serves only where reading the verdict would sync.
            would_wait = not all(map(_IS_AT_HAND, judged))
            if would_wait and self._skips_by_itself(args, kwargs):
                is_left_to_kernel = True
                return self._step_or_skip(own_step, judged)
            if would_wait and is_capturing():
                raise UsageError(
                    "whether this step is to be skipped would have to be read from the device, which cannot be done "
                    "while a CUDA graph is captured. Use an optimizer with fused=True (and capturable=True, where it "
                    "has that), without exact_hooks and on_overflow, that has made a step before; or a static "
                    "loss_scale, without check_finite."
                )
            overflowed = self._still_overflowed(pending, check)
            self.outcomes.note_read(judged)
            if overflowed:
                self._skip(overflowed)
                return None
            self.outcomes.note_ran(judged)
            return self._step_with_closure(own_step, args, kwargs) if closures else own_step(args, kwargs)
        finally:
            react(self._uses[len(pending) :])  # those of a closure
            self._end_step()
            skipped = None if is_left_to_kernel else self._skips_this_step
            for observer in step_observers.observers:
                observer.stepped(self.gradients, judged, skipped)

    def _warn_if_cleared(self) -> None:
        """Warns once if a step uses the gradients of the last one, as torch allows, but amp has cleared them."""
        if self.gradients.updated.have_gradients():
            return
        self._warns_of_cleared = False
        warn(
            f"this {type(self.optimizer).__name__} steps without gradients, and so changes nothing. Those of the last "
            "step are gone: with half weights, a step clears gradients. Run a backward pass before each step; or, to "
            "step twice with the same gradients, use opt_level='O1' or 'O4'."
        )

    def _end_step(self) -> None:
        self._uses, self._buffers = [], None
        self.gradients.verdicts.dropped.clear()
        if self.masters.wanted:
            self.masters.gradients.clear()
        elif self.exchange.wanted:  # by temporary masters, which leave gradients where they are
            for parameter in self.exchange.parameters():
                parameter.grad = None
        self.exchange.have_cleared = self.exchange.wanted
        self._cache.end_iteration_of(self.gradients.updated.model_parameters)

    def _prepare_step(self, *, has_closure: bool) -> None:
        if self.exchange.wanted:
            if self.exchange.have_cleared and self._warns_of_cleared and not has_closure:
                self._warn_if_cleared()
            self._prepare_masters(self.masters)
            if self.exchange is not self.masters:  # whose missing ones the next line makes
                self.exchange.make_missing()
            self.gradients.synchronise(weights_too=True)
        if self.gradients.verdicts.pending:
            self.gradients.verdicts.forget_if_cleared()

    def _scaler_of_unjudged(self, pending: Sequence[ScaleUse]) -> LossScaler | None:
        """Returns a scaler if the gradients may be those of blocks that no longer judge them; else None.

        User code may have put them together from copies of gradients that it cleared, or step twice with the same.
        """
        steps_again = not pending and (self.outcomes.skips.in_a_row > 0 or bool(self.outcomes.unread))
        return self.scalers[0] if self._may_go_back and (steps_again or self.gradients.verdicts.dropped) else None

    def _check(self, pending: Sequence[ScaleUse], first: LossScaler) -> StepCheck | None:
        """Looks for inf and NaN in the gradients that the optimizer is about to read, without a sync.

        Args:
            pending: the blocks since the last step.
            first: scaler to name in messages if there are no such blocks.

        Returns:
            The verdict, of all ranks that share these gradients; None if there are no parameters.
        """
        last = pending[-1] if pending else None
        scaler = first if last is None else last.scaler
        if last is None:
            parameter = next(self.gradients.updated.parameters(), None)
            if parameter is None:
                return None
            scaler.to(parameter.device)
        found_inf = self.gradients.updated.found_inf(scaler.numbers[0].device)
        others = getattr(self.optimizer, "found_inf", None)
        if others is not None:  # a GradScaler has the optimizer skip, and counts that itself
            found_inf.masked_fill_(on_device(others, found_inf.device) != 0, 0)
        return StepCheck(scaler, 0 if last is None else last.scaler_id, found_inf, pending)

    def _still_overflowed(self, pending: Sequence[ScaleUse], check: StepCheck | None) -> list[ScaleUse]:
        """Returns the uses that overflowed; omits the last use if its gradients were cleared or replaced since.

        Args:
            pending: the blocks since the last step.
            check: check of the gradients themselves, which decides if no block overflowed; None if there is none.
        """
        overflowed = list(filter(OVERFLOWED, pending))
        is_last = len(overflowed) == 1 and overflowed[0] is pending[-1] and not overflowed[0].is_confirmed
        if is_last and not bool(
            self.gradients.verdicts.still_exist(
                overflowed[0], optimizer_state.gradients_of(self.gradients.updated.parameters())
            )
        ):
            overflowed = []
        if check is not None and not overflowed and check.overflowed:
            return [check]
        return overflowed

    def _buffers_before(self) -> BuffersBefore | None:
        if self._kept_buffers is None or not self._kept_buffers.are_there():
            return None
        waiting = [each for each in self.gradients.others() if each is not self.gradients and each.verdicts.pending]
        return self._kept_buffers.before_step(
            self.gradients.updated.are_in, lambda model: any(each.updated.are_in(model) for each in waiting)
        )

    def _with_casts(self, given: Any, found: list[object]) -> Any:
        """Returns a step's arguments with each closure wrapped, so that it runs with casts on.

        Args:
            given: an argument, or nested lists, tuples and dicts of them.
            found: list that receives the closures.
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

    def _step_with_closure(self, own_step: OwnStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._gate = gate = ClosureGate(self.optimizer, self._may_go_back, self.exchange.for_methods)
        # An optimizer may leave its closure alone, and use the gradients that are there.
        checks_by = self._checks_by if gate.can_restore else None
        unless_evaluated = None if checks_by is None else self._check((), checks_by)

        def step() -> Any:
            result = own_step(args, kwargs)
            if unless_evaluated is not None and not gate.evaluations and unless_evaluated.overflowed:
                gate.leave([unless_evaluated], None)
            return result

        try:
            result = gate.run(step)
            if gate.overflowed is not None:
                self._skip(gate.overflowed)
            return result
        finally:
            self._gate = None  # it has a copy of all parameters
            self._buffers_before()  # the forward passes of the closure were this step's

    def _check_result(self, result: object) -> None:
        if self._warns_of_scaled_result and is_scaled(result, searches=False):
            self._warns_of_scaled_result = False
            warn(
                "the closure of optimizer.step(closure) returns the scaled loss, which the optimizer takes for the "
                "loss; LBFGS compares it with others, of other scales. End the closure with return loss: what "
                "amp.scale_loss(loss, optimizer) was given."
            )

    def _evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the closure of a step with casts on and half weights up to date.

        Raises:
            BaseException: its gradients overflowed; see `ClosureGate.leave`.
        """
        gate = self._gate
        if gate is None:  # the optimizer has kept it, and the step is over
            return closure(*args, **kwargs)
        with self.exchange.swapped_out():
            with self._switch.resumed():
                result = closure(*args, **kwargs)
            self._check_result(result)
            self.gradients.check_unscaled("the closure of optimizer.step(closure) left gradients that are")
            if self.missing_scale.warns:
                self.missing_scale.look()
        verdicts = self.gradients.verdicts
        pending, verdicts.pending = verdicts.pending, []
        self._uses = [*self._uses, *pending]
        overflowed = list(filter(OVERFLOWED, pending))
        gate.evaluations += 1
        if self._checks_by is not None:
            check = None if overflowed else self._check(pending, self._checks_by)
            if check is not None and check.overflowed:
                overflowed = [check]
        if overflowed:
            gate.leave(overflowed, result)
        return result

    def _step_or_skip(self, own_step: OwnStep, judged: list[ScaleUse]) -> Any:
        """Calls a step that skips in its own kernel if ``found_inf`` is not 0, without syncing with the device."""
        verdicts = [scale_use.found_inf for scale_use in judged if scale_use.found_inf is not None]
        found_inf = stacked(verdicts).amax()
        try:
            with skipping_by_itself(self.optimizer, self.gradients.updated.parameters(), None, found_inf):
                return own_step()
        finally:
            if not is_capturing():  # replays do not run this code
                for scale_use in judged:
                    scale_use.send()
                self.outcomes.unread.append((judged, self._buffers))

    def _skips_by_itself(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        optimizer = self.optimizer
        return (
            not args
            and not kwargs
            and not self._exact_hooks
            and not (self.outcomes.is_near_floor or self._on_overflow.is_looking)
            and (self._checks_by is None or getattr(optimizer, "found_inf", None) is None)  # set by a GradScaler
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and isinstance(optimizer, torch.optim.Optimizer)
            and all(group.get("fused", True) for group in optimizer.param_groups)  # each group may override it
            and optimizer_state.has_state(optimizer)
        )

    def _skip(self, overflowed: Sequence[ScaleUse]) -> None:
        react(self._uses)
        self.outcomes.read()
        within = self._buffers_before()
        if self._buffers is not None and within is not None:
            self._buffers.complete(within)
            self._buffers.restore()
        self._skips_this_step = True
        self._overflow = self.outcomes.end_skipped(overflowed)


def _check_not_captured(judged: Sequence[ScaleUse]) -> None:
    """Raises if a CUDA graph has captured a block whose verdict decides on a step that runs outside of the graph."""
    if any(each.is_captured for each in judged) and not is_capturing():
        raise UsageError(
            "a CUDA graph has captured the amp.scale_loss block before this step, but not the step itself. It could "
            "skip after the first replay only, as replays tell Python nothing of overflows. Capture optimizer.step() "
            "as well; or capture the model alone (torch.cuda.make_graphed_callables); or use a static loss_scale."
        )
