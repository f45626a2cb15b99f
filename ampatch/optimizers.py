"""An adopted optimizer, and the pass of gradients through a ``scale_loss`` block.

Owns which gradients are scaled, which passes overflowed, and whether a step runs or is skipped. The user's optimizer
stays the object it was; only its ``step`` is replaced on the instance, through the ledger. Knows nothing of casts but
the switch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ampatch import kernels
from ampatch.errors import LossScaleError, OptionError, UsageError
from ampatch.loss_scaler import LossScaler
from ampatch.patching import PatchLedger
from ampatch.switch import Switch

logger = logging.getLogger("ampatch")


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


def parameters_of(optimizer: OptimizerLike) -> Iterator[Tensor]:
    """The tensors that an optimizer updates, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


class AdoptedOptimizer:
    """What amp knows of one optimizer.

    Args:
        optimizer: the user's; referred to weakly.
        switch: the session's; off while ``step`` runs, since an optimizer's own arithmetic is not to be cast.
        after_step: called at the end of every step, skipped or not.
        name_of: a parameter's name for messages.
        announce: whether a skipped step is logged.

    Attributes:
        skipped_steps: steps skipped so far.
        step_was_skipped: whether the last one was.
        passes: what came through blocks with a dynamic scale since the last step, the latest last.
        scaled_by: the pass whose scale the gradients have at present; None: they are unscaled.
    """

    # So many passes without a step mean that there may never be one: they are not to pile up.
    _MANY_PASSES = 1000

    def __init__(
        self,
        optimizer: OptimizerLike,
        switch: Switch,
        after_step: Callable[[], object],
        name_of: Callable[[Tensor], str],
        announce: bool = True,
    ) -> None:
        self.skipped_steps = 0
        self.step_was_skipped = False
        self.passes: list[ScaledPass] = []
        self.scaled_by: ScaledPass | None = None
        self._optimizer = weakref.ref(optimizer)
        self._switch = switch
        self._after_step = after_step
        self._name_of = name_of
        self._announce = announce
        self._widened: list[tuple[Tensor, torch.dtype | None, torch.dtype]] = []

    def parameters(self) -> Iterator[Tensor]:
        """The tensors that the optimizer updates."""
        optimizer = self._optimizer()
        return iter(()) if optimizer is None else parameters_of(optimizer)

    def has_gradients(self) -> bool:
        """Whether there is any gradient."""
        return any(parameter.grad is not None for parameter in self.parameters())

    def install(self, ledger: PatchLedger) -> None:
        """Replaces ``step`` on the optimizer.

        Raises:
            TypeError: the optimizer does not keep its attributes itself.
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
            return self.step(original, args, kwargs) if switch.active else original(*args, **kwargs)

        # A bound method, because an LR scheduler made later asks step for its __func__, and because it is pickled
        # as the optimizer and this name.
        step.__name__ = "step"
        ledger.set(optimizer, "step", types.MethodType(step, optimizer))

    def let_go(self) -> bool:
        """Takes gradients away that nobody would unscale any more; whether there were any."""
        scaled_by = self.scaled_by
        if scaled_by is None or scaled_by.is_open:
            return False
        lost = self.has_gradients() and not scaled_by.is_one
        if lost:
            self.drop_gradients()
        else:
            self.leave_scale()
        return lost

    def drop_gradients(self) -> None:
        """Sets all of them to None, and so takes them off the scale."""
        for parameter in self.parameters():
            parameter.grad = None
        self.leave_scale()

    def step(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Steps or skips.

        Raises:
            UsageError: the gradients are still scaled.
            LossScaleError: they overflowed with the loss scale at its floor.
        """
        self._check_unscaled("optimizer.step() was called on gradients that are")
        passes, self.passes = self.passes, []
        overflowed = [scaled_pass for scaled_pass in passes if scaled_pass.overflowed]
        try:
            self.step_was_skipped = bool(overflowed)
            if overflowed:
                self._skip(overflowed)
                return None
            args, kwargs = self._with_closure_cast(args, kwargs)
            with self._switch.disabled():
                return original(*args, **kwargs)
        finally:
            self._after_step()

    def widen_half_gradients(self) -> None:
        """Makes half gradients float32 for as long as they are scaled, since at the scale they could overflow."""
        for parameter in self.parameters():
            grad = parameter.grad
            if grad is not None and grad.dtype in (torch.float16, torch.bfloat16) and not grad.is_sparse:
                self._widened.append((parameter, parameter.grad_dtype, grad.dtype))
                _set_gradient(parameter, grad.float(), torch.float32)

    def leave_scale(self) -> None:
        """The gradients are unscaled now, or gone: those that were widened are half again."""
        self.scaled_by = None
        for parameter, allowed, dtype in self._widened:
            _set_gradient(parameter, None if parameter.grad is None else parameter.grad.to(dtype), allowed)
        self._widened.clear()

    def remember(self, scaled_pass: ScaledPass) -> None:
        """Takes note of a pass that the next step depends on."""
        self.passes.append(scaled_pass)
        if len(self.passes) >= self._MANY_PASSES:
            overflowed = {earlier.scaler_id: earlier for earlier in self.passes if earlier.overflowed}
            self.passes = list(overflowed.values())

    def _check_unscaled(self, what: str) -> None:
        if self.scaled_by is None:
            return
        if self.has_gradients():
            raise UsageError(
                f"{what} still scaled: "
                + (
                    "it stands inside the amp.scale_loss block. Move it behind the block."
                    if self.scaled_by.is_open
                    else "the last amp.scale_loss had delay_unscale=True. Leave it out in the last block before the "
                    "step; or, to drop the gradients, type optimizer.zero_grad(), which has to set them to None."
                )
            )
        if not self.scaled_by.is_open:
            self.leave_scale()

    def _skip(self, overflowed: Sequence[ScaledPass]) -> None:
        self.skipped_steps += 1
        optimizer = self._optimizer()
        if isinstance(optimizer, torch.optim.Optimizer):
            # An LR scheduler warns of a scheduler step before the first optimizer step unless this says that there was
            # one.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        for scaled_pass in overflowed:
            if scaled_pass.began_at_floor:
                raise LossScaleError(
                    f"loss scaler {scaled_pass.scaler_id} is at its floor of {scaled_pass.scaler.policy.floor:g} "
                    f"and the gradients still overflow, so no scale can help: {self._not_finite()}. Look for a loss "
                    "that is not finite, or a learning rate that is too high; with half_dtype=torch.bfloat16 no loss "
                    "scale is needed."
                )
        if self._announce:
            for last in {scaled_pass.scaler_id: scaled_pass for scaled_pass in overflowed}.values():
                last.announce()

    def _not_finite(self) -> str:
        lines = []
        for parameter in self.parameters():
            if parameter.grad is not None:
                values = kernels.values_of(parameter.grad)
                infs, nans = int(values.isinf().sum()), int(values.isnan().sum())
                if infs or nans:
                    lines.append(f"{self._name_of(parameter)} ({infs} inf, {nans} nan of {values.numel()})")
        if not lines:
            return "the gradients were cleared since, so that none can be named"
        more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
        return f"gradients that are not finite: {', '.join(lines[:10])}{more}"

    def _with_closure_cast(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a closure that sees casts on, as the code around the step does."""
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure):
            return args, kwargs

        def with_casts() -> Any:
            with self._switch.resumed():
                result = closure()
            self._check_unscaled("the closure of optimizer.step(closure) left gradients that are")
            if self.passes:
                self.passes.clear()
                raise UsageError(
                    "optimizer.step(closure) does not work with a dynamic loss scale yet: an overflow inside the "
                    "closure could not skip the step. Use half_dtype=torch.bfloat16 or loss_scale=1.0."
                )
            return result

        return ((with_casts, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": with_casts})


class ScaledPass:
    """One ``scale_loss`` block: brings the gradients to the scale, and back.

    Args:
        scaler: the scale of this loss.
        scaler_id: its number, for messages.
        optimizers: whose gradients the block works on; a parameter in two of them is handled once.

    Attributes:
        is_open: whether the block has begun and not ended.
        is_one: whether its scale is static and 1, so that the gradients are what they are without one.
    """

    def __init__(self, scaler: LossScaler, scaler_id: int, optimizers: Sequence[AdoptedOptimizer]) -> None:
        self.scaler = scaler
        self.scaler_id = scaler_id
        self.is_open = False
        self.is_one = scaler.is_one
        self._optimizers = optimizers
        self._found_inf: Tensor | None = None
        self._scale = scaler.snapshot()
        self._announced = False

    @functools.cached_property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite; waits for the device."""
        return self._found_inf is not None and bool(self._found_inf)

    @property
    def began_at_floor(self) -> bool:
        """Whether the scale could not have backed off further; waits for the device."""
        return float(self._scale) <= self.scaler.policy.floor

    def begin(self) -> None:
        """Brings what gradients there are to the scale, so that backward adds to them what is of their kind.

        Raises:
            UsageError: they are scaled already, by another scale or by a block around this one.
        """
        for optimizer in self._optimizers:
            self._check_may_follow(optimizer)
        unscaled = [optimizer for optimizer in self._optimizers if optimizer.scaled_by is None]
        with self._whole():
            for optimizer in unscaled:
                if optimizer.passes and optimizer.passes[-1]._found_inf is not None:
                    # What overflowed stays infinite, and this pass is to be judged by itself.
                    kernels.zero_after_overflow_(_gradients([optimizer]), optimizer.passes[-1]._found_inf)
                if not self.scaler.is_one:
                    optimizer.widen_half_gradients()
            self.scaler.scale_grads_(_gradients(unscaled))
            for optimizer in self._optimizers:
                optimizer.scaled_by = self
        self.is_open = True

    def end(self, delay_unscale: bool, delay_overflow_check: bool) -> None:
        """The block ended: unscales, looks for overflow, lets the scale react."""
        self.is_open = False
        if delay_unscale:
            return
        with self._whole():
            gradients = [] if self.is_one else _gradients(self._optimizers)
            found_inf = self.scaler.unscale_by_(gradients, self._scale)
            for optimizer in self._optimizers:
                optimizer.leave_scale()
        if self.scaler.dynamic:
            self._found_inf = found_inf
            for optimizer in self._optimizers:
                optimizer.remember(self)
        if not delay_overflow_check:
            self.scaler.update()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Work on the gradients that is done for all of them, or leaves none: memory may run out on the way."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The block raised: no gradient is left half done, and the next iteration starts clean."""
        self.is_open = False
        for optimizer in self._optimizers:
            optimizer.drop_gradients()
            optimizer.passes.clear()

    def announce(self) -> None:
        """Logs the skipped step, once however many optimizers skip for it."""
        if not self._announced:
            self._announced = True
            now = self.scaler.state.loss_scale
            change = "reducing loss scale to" if now < float(self._scale) else "keeping loss scale at"
            logger.warning("Gradient overflow. Skipping step, loss scaler %d %s %s", self.scaler_id, change, now)

    def _check_may_follow(self, optimizer: AdoptedOptimizer) -> None:
        earlier = optimizer.scaled_by
        if earlier is None:
            return
        if earlier.is_open:
            raise UsageError(
                "this amp.scale_loss stands inside another one for the same optimizer, so that its gradients would be "
                "unscaled twice. End the outer block first, or add the losses up and scale their sum."
            )
        if not optimizer.has_gradients():
            optimizer.leave_scale()
        elif earlier.scaler is not self.scaler or bool(earlier._scale != self._scale):
            raise UsageError(
                f"the gradients of an optimizer are scaled by loss scaler {earlier.scaler_id} at "
                f"{float(earlier._scale):g}, and this amp.scale_loss would add gradients scaled by loss scaler "
                f"{self.scaler_id} at {float(self._scale):g}. Leave out delay_unscale=True in the block before."
            )


def _gradients(optimizers: Iterable[AdoptedOptimizer]) -> list[Tensor]:
    """The gradients that are there, each once."""
    parameters = dict.fromkeys(parameter for optimizer in optimizers for parameter in optimizer.parameters())
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _set_gradient(parameter: Tensor, grad: Tensor | None, allowed: torch.dtype | None) -> None:
    """Puts a gradient of another type in place: torch refuses to change the type while there is one."""
    parameter.grad = None
    parameter.grad_dtype = allowed
    parameter.grad = grad
