"""``torch.amp.GradScaler``'s interface over ampatch's loss scale, for loops that are written for torch.

Owns the stage of each optimizer since the last `update`: READY, UNSCALED, STEPPED. In a loop that torch's class
accepts, both classes give the same bits. Must not know the opt levels: the live session says whether the gradients are
its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampatch import distributed
from ampatch.casting.nested import cast_tensors
from ampatch.distributed import Ranks
from ampatch.errors import OptionError, ScalerOptionError, ScalerUsageError, warn
from ampatch.grouping import grouped
from ampatch.interfaces.mixed_precision import mixed_precision_within
from ampatch.native import kernels
from ampatch.native.host_copy import on_device
from ampatch.runtime import runtime
from ampatch.scaling import overflows, scale_use, step_observers
from ampatch.scaling.loss_scaler import NO_FLOOR, LossScaler, ScaleState, make_policy, next_state, read_states
from ampatch.scaling.overflows import (
    OnOverflow,
    Overflow,
    OverflowHandler,
    ScaleChange,
    SkippedSteps,
    check_on_overflow,
)
from ampatch.scaling.step_gate import ClosureGate, end_skipped, skipping_by_itself
from ampatch.scaling.users_optimizer import OptimizerLike, check_optimizer
from ampatch.switch import WithoutCasts
from ampatch.weights import optimizer_state

logger = logging.getLogger("ampatch")

# float16's smallest positive number. The scaler warns once if an overflow comes at this scale or below.
_SMALLEST_USEFUL_SCALE = 2.0**-24


def _ready() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _initial(name: str) -> property:
    """Returns a property that stands for a field of a scaler's first state."""

    def write(scaler: GradScaler, value: Any) -> None:
        scaler._first_state = replace(scaler._first_state, **{name: value})

    return property(lambda scaler: getattr(scaler._first_state, name), write)


def _on_device(which: int) -> property:
    """Returns a property that stands for a tensor of the loss scaler; None before the first `GradScaler.scale`."""

    def write(scaler: GradScaler, value: Tensor | None) -> None:
        if value is None:
            scaler._loss_scaler = None  # the next `scale` starts from the initial values
        else:
            scaler._scaler_or_raise("setting _scale or _growth_tracker").numbers[which].copy_(value)

    return property(lambda scaler: None if scaler._loss_scaler is None else scaler._loss_scaler.numbers[which], write)


def _setting(name: str) -> property:
    """Returns a property that stands for a setting of a scaler's policy; raises `OptionError` if it is out of range."""
    return property(lambda scaler: getattr(scaler._policy, name), lambda scaler, value: scaler._set(**{name: value}))


class GradScaler(torch.amp.GradScaler):
    """Scales losses and steps optimizers as ``torch.amp.GradScaler`` does; can replace it in any loop.

    ::

        scaler = ampatch.GradScaler()
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(input), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only if you clip gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Beyond torch's class: `step` accepts closures, half losses are scaled in float32, nested outputs can be dicts, and
    the scale can have a floor, a ceiling and hysteresis. The setters raise `OptionError` for values out of range. If
    ``set_growth_interval`` sets fewer updates than there were already, the scale grows at the next one; in torch's
    class it would not grow until after an overflow. It works without ``amp.initialize``. At O1 it also works together
    with it, for optimizers that do not use ``amp.scale_loss``.

    Args:
        device: type of the device that training runs on. If it is "cuda" and CUDA is not available, the scaler warns
            and is disabled, like torch's.
        init_scale: initial scale.
        growth_factor: factor for the scale after ``growth_interval`` updates in a row without overflow; above 1.
        backoff_factor: factor for the scale after an overflow; below 1.
        growth_interval: number of updates in a row without overflow before the scale grows.
        enabled: if False, `scale` returns its argument, `step` only steps, and the other methods are no-ops. Numbers
            out of range do not raise then.
        hysteresis: number of overflows before the scale backs off; the count starts again when the scale grows.
        min_loss_scale: floor of the scale. An overflow at the floor raises `LossScaleError`, which names the parameters
            whose gradients overflowed. Every step then syncs with the device. None: no floor, as in torch; the scale
            stays above 0.
        max_loss_scale: ceiling of the scale; None: no ceiling.
        on_overflow: how a skipped step is reported. The step is skipped first. Call `update` as after any other step.
            "log" writes a line to the log if the host reads the overflow flag anyway: on the CPU, and for optimizers
            that do not skip in their own kernel. "raise" raises `GradientOverflowError` from `step`. A function is
            called with the `Overflow`. "trace" logs ``str(overflow)``. It has the origin of the overflow if
            ``amp.initialize(on_overflow="trace")`` notes the steps. All values but "log" read the flag before every
            step, which syncs with the device.

    Raises:
        OptionError: a value is out of range.
    """

    _overflows = OverflowHandler("log")  # of a scaler that torch has pickled

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        on_overflow: OnOverflow = "log",
    ) -> None:
        try:
            self._overflows = OverflowHandler(check_on_overflow(on_overflow))
            policy = make_policy(
                "dynamic",
                init_scale=init_scale,
                scale_window=growth_interval,
                hysteresis=hysteresis,
                min_loss_scale=NO_FLOOR if min_loss_scale is None else min_loss_scale,
                max_loss_scale=torch.finfo(torch.float32).max if max_loss_scale is None else max_loss_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
            )
        except OptionError as error:
            if enabled:
                raise ScalerOptionError(str(error).replace("scale_window", "growth_interval")) from None
            policy = make_policy("dynamic")
        self._device = _checked_device(device)
        self._enabled = enabled
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warn(
                "ampatch.GradScaler is enabled, but CUDA is not available. Disabling. Type GradScaler('cpu') to scale "
                "losses on the CPU."
            )
            self._enabled = False
        self._policy = policy if max_loss_scale is not None else replace(policy, max_loss_scale=math.inf)
        self._has_floor = min_loss_scale is not None
        self._has_warned = False
        self._skips = SkippedSteps()
        self._first_state = ScaleState(policy.init_scale, 0, policy.hysteresis)
        self._loss_scaler: LossScaler | None = None  # made at the first `scale`, on the device of the loss
        self._per_optimizer_states = defaultdict(_ready)

    # The scale

    # torch's tests and some frameworks read and set a scaler's values by these names.
    _init_scale: Any = _initial("loss_scale")
    _init_growth_tracker: Any = _initial("unskipped")
    _scale: Any = _on_device(0)
    _growth_tracker: Any = _on_device(1)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._loss_scaler is not None:
            raise ScalerUsageError(
                "_growth_tracker initialized before _scale: there is a scale already, which would be reset. Call "
                "update(new_scale) to set it."
            )
        scaler = LossScaler.from_policy(self._policy)
        scaler.to(torch.device(dev))
        scaler.set_state(self._first_state)
        self._loss_scaler = scaler

    def _scaler_or_raise(self, what: str) -> LossScaler:
        if self._loss_scaler is None:
            raise ScalerUsageError(
                f"{what} comes before any scale(), so there is no scale yet. Type scaler.scale(loss).backward() "
                "earlier in the iteration."
            )
        return self._loss_scaler

    @WithoutCasts()
    def scale(self, outputs: Any) -> Any:
        """Multiplies losses by the scale.

        Args:
            outputs: floating or complex tensors of any shape and device; in lists, tuples and dicts, or an iterable.

        Returns:
            The tensors times the scale, each on its own device, in the same containers; an iterator for an iterable.
            float16 tensors become float32, because a scaled loss might exceed float16's range. Other tensors have the
            same type as with ``torch.amp.GradScaler``.

        Raises:
            OptionError: ``outputs`` has anything else.
        """
        if not self._enabled:
            return outputs
        scales: dict[torch.device, Tensor] = {}

        def scaled(output: Tensor) -> Tensor:
            if self._loss_scaler is None:
                self._lazy_init_scale_growth_tracker(output.device)
            scale = scales.get(output.device)
            if scale is None:
                # A copy: autograd saves it, and an update before the backward pass would change the scale in place.
                scale = scales[output.device] = on_device(self._scaler_or_raise("scale()").snapshot(), output.device)
            return (output.float() if output.dtype is torch.float16 else output) * scale

        if isinstance(outputs, Iterable) and not isinstance(outputs, (Tensor, list, tuple, dict)):
            return map(self.scale, outputs)
        _check_outputs(outputs)
        return cast_tensors(outputs, scaled)

    # Gradients

    @WithoutCasts()
    def unscale_(self, optimizer: OptimizerLike) -> None:
        """Divides an optimizer's gradients by the scale in place, and checks for overflow; does not sync.

        Call it before clipping, once for each optimizer and iteration, after the last backward pass. If you do not call
        it, `step` does.

        Raises:
            UsageError: it was already called in this iteration, or is called after `step` or before any `scale`; or
                amp unscales these gradients.
            OptionError: a gradient is float16; no gradient was changed.
        """
        if not self._enabled:
            return
        scaler = self._scaler_or_raise("unscale_()")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise ScalerUsageError(
                "unscale_() has already been called on this optimizer since the last update(): its gradients would be "
                "divided by the scale twice. Call it once, after the last backward before step()."
            )
        if state["stage"] is OptState.STEPPED:
            raise ScalerUsageError(
                "unscale_() is being called after step(), which has unscaled these gradients. Call it before step(), "
                "or type scaler.update() to begin another iteration."
            )
        scale = scaler.numbers[0]
        # Positional: a subclass that overrides the method may use other argument names.
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, scale.reciprocal(), scaler.no_overflow(), False)
        state["stage"] = OptState.UNSCALED

    def _state_of(self, optimizer: OptimizerLike) -> dict[str, Any]:
        state = self._per_optimizer_states[id(check_optimizer(optimizer))]
        state["optimizer"] = optimizer  # keeps it alive, so that no other one gets its id before the next update
        return state

    def _unscale_grads_(
        self, optimizer: OptimizerLike, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies gradients in place; returns an overflow flag for each device that holds gradients."""
        session = runtime.live
        if session is not None and session.switch.active:
            session.gradients.before_scaler_unscales(optimizer)
        precise = None if allow_fp16 else mixed_precision_within(optimizer)
        if precise is not None:
            precise.widen_gradients()
        parameters = list(optimizer_state.parameters_of(optimizer))
        for parameter in parameters:
            if not isinstance(parameter, Tensor):
                raise ScalerOptionError(
                    f"expected param to be torch.Tensor, got {type(parameter).__name__} in the param_groups of this "
                    f"{type(optimizer).__name__}."
                )
            if not allow_fp16 and parameter.grad is not None and parameter.grad.dtype is torch.float16:
                raise OptionError(
                    "Attempting to unscale FP16 gradients: most of what the scale has kept from underflow would be "
                    "lost. Keep the weights in float32 and cast in forward (torch.autocast, or opt_level='O1'); or, "
                    "for half weights, type optimizer = ampatch.MixedPrecision(optimizer)."
                )
        ranks = Ranks() if session is None else session.ranks
        found: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            gradients = optimizer_state.gradients_of(parameters)
            for device, grads in grouped((grad.device, grad) for grad in gradients).items():
                found[device] = found_inf.to(device, copy=True)
                kernels.unscale_(grads, inv_scale, found[device])
        if not found and ranks.are_sharded(parameters):
            # Other ranks may have pieces of gradients, and all-reduce their flags with this rank's.
            found[found_inf.device] = found_inf.clone()
        for flag in found.values():
            ranks.reduce_overflow_(flag, parameters)
        LossScaler.uses_by_hand += 1
        return found

    @WithoutCasts()
    def _check_inf_per_device(self, optimizer: OptimizerLike) -> dict[Any, Tensor]:
        """Checks gradients for overflow; they stay scaled."""
        one = torch.ones_like(self._scaler_or_raise("_check_inf_per_device()").no_overflow())
        found = self._unscale_grads_(optimizer, one, torch.zeros_like(one), True)
        self._state_of(optimizer)["found_inf_per_device"] = found
        return found

    # Steps

    def step(self, optimizer: OptimizerLike, *args: Any, **kwargs: Any) -> Any:
        """Runs ``optimizer.step(*args, **kwargs)`` with unscaled gradients; skips it after an overflow.

        An optimizer with ``_step_supports_amp_scaling`` is always called, and skips by itself. Torch's optimizers are
        an exception: the scaler does not call them if the host reads the overflow, as on the CPU and before they have
        state.

        With a closure, the scaler unscales and checks the gradients of each evaluation when the closure returns. To
        clip, the closure calls `unscale_` itself. If an evaluation overflows, the scaler restores the parameters and
        the optimizer's state from before the step. The closure must return the unscaled loss. Gradients that the
        optimizer reads before it calls the closure are scaled.

        Returns:
            The result of ``optimizer.step``; None if it was skipped. If a closure's evaluation overflowed, the result
            of the closure.

        Raises:
            UsageError: it was already called since the last `update`, the optimizer has no gradients, or `unscale_` was
                called before a step with a closure; or amp unscales these gradients.
            LossScaleError: an overflow although the scale is at ``min_loss_scale``.
            GradientOverflowError: the step was skipped, and ``on_overflow`` is "raise".
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure) or isinstance(closure, nn.Module):
            closure = None
        if closure is None:  # a closure may contain the first `scale`
            self._scaler_or_raise("step()")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise ScalerUsageError(
                "step() has already been called since the last update(). Type scaler.update() after the steps of all "
                "optimizers, once an iteration."
            )
        if closure is not None:
            result = self._step_with_closure(optimizer, state, closure, args, kwargs)
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_or_skip(optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            _check_found(optimizer, state)
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        overflow = state.pop("overflow", None)
        if overflow is not None:
            self._overflows.handle(overflow)
        return result

    def _maybe_opt_step(
        self, optimizer: OptimizerLike, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        scale, verdicts = self._scale, list(optimizer_state["found_inf_per_device"].values())
        with contextlib.nullcontext() if scale is None else step_observers.scaler_step(scale, optimizer, verdicts):
            if not _overflowed(optimizer_state):
                return optimizer.step(*args, **kwargs)
            self._skip(optimizer)
            return None

    def _step_or_skip(
        self, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Steps an optimizer that unscales and skips by itself; see docs/guide/optimizers.md."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn(
                f"the step of this {type(optimizer).__name__} takes grad_scaler, as torch's optimizers once did. "
                "Change it to read self.grad_scale and self.found_inf, which the scaler sets while it runs.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        scaler = self._scaler_or_raise("step()")
        is_unscaled = state["stage"] is OptState.UNSCALED
        if not is_unscaled:
            self._check_inf_per_device(optimizer)
        with WithoutCasts():
            found_inf = _maximum(state["found_inf_per_device"].values(), scaler.no_overflow())
        divisor = preset = getattr(optimizer, "grad_scale", None)
        if not is_unscaled:
            divisor = scaler.snapshot() if preset is None else scaler.snapshot() * preset
        parameters = list(optimizer_state.parameters_of(optimizer))
        with (
            skipping_by_itself(optimizer, parameters, divisor, found_inf) as found_inf,
            step_observers.scaler_step(scaler.snapshot(), optimizer, [found_inf], divisor),
        ):
            # A step that could skip by itself: the host reads the overflow if it costs nothing, or if amp must know it.
            host_reads = self._has_floor or self._overflows.reports or found_inf.device.type in scale_use.AT_HAND
            if not host_reads:
                is_looking = runtime.live is not None and runtime.live.losses.overflows.is_looking
                host_reads = is_looking or (_is_torchs(optimizer) and not optimizer_state.has_state(optimizer))
            if host_reads and bool(found_inf):
                self._skip(optimizer)
                if _is_torchs(optimizer):
                    return None
            return optimizer.step(*args, **kwargs)

    def _step_with_closure(
        self, optimizer: OptimizerLike, state: dict[str, Any], closure: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if state["stage"] is OptState.UNSCALED:
            raise ScalerUsageError(
                "unscale_() was called before a step with a closure, but the closure's backward makes new gradients. "
                "Call scaler.unscale_(optimizer) at the end of the closure; or leave it out."
            )
        gate = ClosureGate(optimizer, may_go_back=True)

        def evaluate(*closure_args: Any, **closure_kwargs: Any) -> Any:
            gate.evaluations += 1
            state.update(_ready())
            result = closure(*closure_args, **closure_kwargs)
            if self._state_of(optimizer) is not state:
                raise ScalerUsageError(
                    "update() was called in the closure of a step, before the end of that step. Call scaler.update() "
                    "after scaler.step(optimizer, closure)."
                )
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            _check_found(optimizer, state)
            if _overflowed(state):
                gate.leave(state, result)
            return result

        if args:
            args = (evaluate, *args[1:])
        else:
            kwargs = {**kwargs, "closure": evaluate}
        result = gate.run(lambda: optimizer.step(*args, **kwargs))
        if gate.overflowed is not None:
            self._skip(optimizer)
        elif not gate.evaluations:
            raise ScalerUsageError(
                f"the step of this {type(optimizer).__name__} did not call its closure, so it has updated parameters "
                "with gradients that are still scaled, if there were any. Run backward before scaler.step(optimizer), "
                "without a closure."
            )
        return result

    def _skip(self, optimizer: Any) -> None:
        """Handles a skipped step while its gradients exist; raises or warns if no smaller scale can help."""
        (state,) = read_states([self._scaler_or_raise("step()")])
        scale = state.loss_scale
        change = ScaleChange(0, scale, next_state(state, True, self._policy).loss_scale)
        describe = functools.cache(lambda: _overflow_of(optimizer, change))
        self._state_of(optimizer)["overflow"] = end_skipped(
            optimizer,
            [(change, self._policy.min_loss_scale if self._has_floor else 0)],
            describe,
            self._overflows,
            lambda: logger.warning("%s", change),
        )
        if state.unskipped:
            self._skips.note_ran()
        self._skips.note_skipped()
        if runtime.live is not None and not self._overflows.reports:
            runtime.live.losses.overflows.explain(self._skips, False, lambda: describe().trace)
        if scale <= _SMALLEST_USEFUL_SCALE and not self._has_warned:
            self._has_warned = True
            warn(
                f"the loss scale has come down to {scale:g} and the gradients still overflow, so no scale can help. "
                f"{overflows.ADVICE} To get an error instead, type GradScaler(..., min_loss_scale=1).\n"
                f"{overflows.findings(describe())}"
            )

    @WithoutCasts()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration: the scale backs off if any optimizer's gradients overflowed; else it grows or stays.

        Args:
            new_scale: new scale to set instead: a positive number, or a tensor with one element, whose value is copied
                but not checked.

        Raises:
            UsageError: no optimizer has unscaled or stepped since the last `update`.
            OptionError: ``new_scale`` is no such number or tensor.
        """
        if not self._enabled:
            return
        scaler = self._scaler_or_raise("update()")
        if new_scale is not None:
            try:
                scaler.set_scale(new_scale)
            except OptionError as error:
                raise ScalerOptionError(str(error)) from None
        else:
            found = [
                flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
            ]
            if not found:
                raise ScalerUsageError(
                    "No inf checks were recorded prior to update(). Call scaler.step(optimizer) or "
                    "scaler.unscale_(optimizer), with gradients in the optimizer, before it."
                )
            scaler.update_by(_maximum(found, scaler.no_overflow()))
        self._per_optimizer_states = defaultdict(_ready)

    # Settings: torch's getters and setters use these names, and some frameworks do.
    _growth_factor: Any = _setting("growth_factor")
    _backoff_factor: Any = _setting("backoff_factor")
    _growth_interval: Any = _setting("scale_window")

    def _set(self, **changes: Any) -> None:
        checked = make_policy("dynamic", **changes)
        self._policy = replace(self._policy, **{name: getattr(checked, name) for name in changes})
        if self._loss_scaler is not None:
            self._loss_scaler.policy = self._policy

    # Saving

    @property
    def _state(self) -> ScaleState:
        return self._first_state if self._loss_scaler is None else self._loss_scaler.state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain numbers, as ``torch.amp.GradScaler`` does; empty if the scaler is disabled.

        With hysteresis above 1 it also has ``hysteresis_left``, which torch's class ignores. Syncs with the device.
        """
        saved = super().state_dict()
        if self._enabled and self._policy.hysteresis > 1:
            saved["hysteresis_left"] = self._state.hysteresis_left
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of this class or of torch's: the scale, and the settings of its growth and backoff.

        Raises:
            UsageError: the state dict is empty; nothing was changed.
            OptionError: a key is missing or unknown, or a value is no valid number; nothing was changed.
        """
        if not self._enabled:
            return
        if isinstance(state_dict, Mapping) and not state_dict:
            raise ScalerUsageError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
                "Leave load_state_dict out, or give a state that was saved with enabled=True."
            )
        if isinstance(state_dict, Mapping) and state_dict.get("dynamic") is False:
            raise ScalerOptionError(
                "the state is of a static loss scale, from which a dynamic one must not start. Leave load_state_dict "
                "out."
            )
        state = LossScaler.from_policy(self._policy).read_state_dict(state_dict)
        self._set(
            growth_factor=state_dict.get("growth_factor", self._policy.growth_factor),
            backoff_factor=state_dict.get("backoff_factor", self._policy.backoff_factor),
            scale_window=state_dict.get("growth_interval", self._policy.scale_window),
        )
        self._first_state = state
        if self._loss_scaler is not None:
            self._loss_scaler.set_state(state)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise ScalerUsageError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update(). Copy or pickle it there."
            )
        # Numbers only: the process that unpickles the scaler may lack the device.
        return {**vars(self), "_first_state": self._state, "_loss_scaler": None}

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        policy = self._policy
        scale: object = self._first_state.loss_scale if self._scale is None else f"on {self._scale.device}"
        if self._scale is not None and self._scale.device.type in scale_use.AT_HAND:
            scale = float(self._scale)
        return (
            f"GradScaler(scale={scale}, growth_factor={policy.growth_factor}, backoff_factor={policy.backoff_factor}, "
            f"growth_interval={policy.scale_window})"
        )


@WithoutCasts()
def _overflow_of(optimizer: OptimizerLike, change: ScaleChange) -> Overflow:
    parameters = list(optimizer_state.parameters_of(optimizer))
    found = overflows.non_finite_gradients(parameters, optimizer_state.names_in(optimizer))
    traced: dict[str, Any] = {}
    if runtime.live is not None:
        traced = runtime.live.losses.overflows.traced(parameters, change.before)
        runtime.live.losses.overflows.end_step(parameters)
    remark = overflows.OF_ANOTHER_RANK if distributed.has_other_ranks() else overflows.CLEARED
    return Overflow(type(optimizer).__name__, (change,), found, remark="" if found else remark, **traced)


def _checked_device(device: object) -> Any:
    try:
        if isinstance(device, (str, torch.device)):
            torch.device(device)
            return device
    except RuntimeError:
        pass
    raise ScalerOptionError(
        f"device is {device!r}; expected the type of a device, such as 'cuda' or 'cpu'. If init_scale came first, "
        "as in torch.cuda.amp.GradScaler, type GradScaler(init_scale=...)."
    )


def _check_outputs(outputs: object) -> None:
    if isinstance(outputs, (list, tuple, dict)):
        for each in outputs.values() if isinstance(outputs, dict) else outputs:
            _check_outputs(each)
    elif not (isinstance(outputs, Tensor) and (outputs.is_floating_point() or outputs.is_complex())):
        kind = f"a tensor of {outputs.dtype}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise OptionError(
            "outputs must be a Tensor or an iterable of Tensors, floating ones in lists, tuples and dicts; found "
            f"{kind}."
        )


def _check_found(optimizer: OptimizerLike, state: dict[str, Any]) -> None:
    if not state["found_inf_per_device"]:
        raise ScalerUsageError(
            f"No inf checks were recorded for this optimizer: this {type(optimizer).__name__} has no gradients. Run "
            "scaler.scale(loss).backward() for its parameters first."
        )


@WithoutCasts()
def _overflowed(state: dict[str, Any]) -> bool:
    return any(bool(flag) for flag in state["found_inf_per_device"].values())


def _maximum(flags: Iterable[Tensor], none: Tensor) -> Tensor:
    for flag in flags:
        none = torch.maximum(none, on_device(flag, none.device).reshape(()))
    return none


def _is_torchs(optimizer: object) -> bool:
    """Returns True if an optimizer's step is defined in torch.optim; also for a subclass that inherits it."""
    return str(type(optimizer).step.__module__).startswith("torch.optim.")  # type: ignore[attr-defined]
