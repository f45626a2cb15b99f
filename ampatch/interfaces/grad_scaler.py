"""``torch.amp.GradScaler``'s interface over ampatch's loss scale, for loops that are written for torch.

Owns what each optimizer has been through since the last `update`: READY, UNSCALED, STEPPED. Where a loop does what
torch's class takes, both give the same bits. Must not know the opt levels: whether a live session has the gradients,
it asks the session.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampatch.casting.nested import cast_tensors
from ampatch.distributed import Ranks
from ampatch.errors import LossScaleError, OptionError, ScalerOptionError, ScalerUsageError, warn
from ampatch.interfaces.mixed_precision import precise_within
from ampatch.native import kernels
from ampatch.opt_levels import HALVES
from ampatch.runtime import runtime
from ampatch.scaling import scale_use
from ampatch.scaling.loss_scaler import LossScaler, ScaleState, make_policy
from ampatch.scaling.optimizer_step import OptimizerLike, check_optimizer
from ampatch.switch import WithoutCasts
from ampatch.weights import optimizer_state
from ampatch.weights.optimizer_state import Snapshot

# Where no floor is given. 1 / scale is still a number there, so that gradients of 0 do not become NaN; it takes over a
# hundred overflows in a row to come this far down.
_LEAST = 2.0**-126

# float16's smallest number. The scaler warns below it.
_OF_NO_USE = 2.0**-24


def _ready() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class GradScaler(torch.amp.GradScaler):
    """Scales losses and steps optimizers as ``torch.amp.GradScaler`` does, in whose place it may stand in any loop.

    ::

        scaler = ampatch.GradScaler()
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(input), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # where gradients are to be clipped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Beyond torch's class: `step` takes closures, losses in half are scaled in float32, nested outputs may be dicts, and
    the scale may have a floor, a ceiling and hysteresis. It works without ``amp.initialize``, and at O1 beside it for
    optimizers that go through no ``amp.scale_loss``.

    Args:
        device: the type of device that training runs on. With "cuda" where there is none the scaler warns, and is
            disabled, as torch's is.
        init_scale: where the scale starts.
        growth_factor: what it is multiplied by after ``growth_interval`` clean updates in a row; above 1.
        backoff_factor: what it is multiplied by after an overflow; below 1.
        growth_interval: how many clean updates it takes to grow.
        enabled: False: `scale` gives back what it was given, `step` steps, and all else does nothing. Numbers out of
            range are no matter then.
        hysteresis: overflows before the scale backs off; counted anew when it grows.
        min_loss_scale: the floor. An overflow there raises, with the parameters named whose gradients overflowed, and
            every step waits for the device then. None: there is none, as in torch; the scale stays above 0.
        max_loss_scale: the ceiling; None: there is none.

    Raises:
        OptionError: a value out of range.
    """

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
    ) -> None:
        try:
            policy = make_policy(
                "dynamic",
                init_scale=init_scale,
                scale_window=growth_interval,
                hysteresis=hysteresis,
                min_loss_scale=_LEAST if min_loss_scale is None else min_loss_scale,
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
        self._first_state = ScaleState(policy.init_scale, 0, policy.hysteresis)
        self._loss_scaler: LossScaler | None = None  # made at the first `scale`, on the device of what is scaled
        self._per_optimizer_states = defaultdict(_ready)

    # The scale

    # torch's tests and some frameworks read and set what a scaler begins with, by these names.
    @property
    def _init_scale(self) -> float:
        return self._first_state.loss_scale

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        self._first_state = replace(self._first_state, loss_scale=value)

    @property
    def _init_growth_tracker(self) -> int:
        return self._first_state.unskipped

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        self._first_state = replace(self._first_state, unskipped=value)

    @property
    def _scale(self) -> Tensor | None:
        """Returns the scale on the device; frameworks read and set it by this name. None before the first `scale`."""
        return None if self._loss_scaler is None else self._loss_scaler.on_device[0]

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._set_on_device(0, value)

    @property
    def _growth_tracker(self) -> Tensor | None:
        return None if self._loss_scaler is None else self._loss_scaler.on_device[1]

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        self._set_on_device(1, value)

    def _set_on_device(self, which: int, value: Tensor | None) -> None:
        if value is None:
            self._loss_scaler = None  # it begins anew
        else:
            self._begun("setting _scale or _growth_tracker").on_device[which].copy_(value)

    @property
    def _growth_factor(self) -> float:
        return self.get_growth_factor()

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self.set_growth_factor(value)

    @property
    def _backoff_factor(self) -> float:
        return self.get_backoff_factor()

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self.set_backoff_factor(value)

    @property
    def _growth_interval(self) -> int:
        return self.get_growth_interval()

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self.set_growth_interval(value)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._loss_scaler is not None:
            raise ScalerUsageError(
                "_growth_tracker initialized before _scale: there is a scale already, which would begin anew. Call "
                "update(new_scale) to set it."
            )
        scaler = LossScaler.from_policy(self._policy)
        scaler.to(torch.device(dev))
        scaler.set_state(self._first_state)
        self._loss_scaler = scaler

    def _begun(self, what: str) -> LossScaler:
        if self._loss_scaler is None:
            raise ScalerUsageError(
                f"{what} comes before any scale(), so that there is no scale yet. Type scaler.scale(loss).backward() "
                "earlier in the iteration."
            )
        return self._loss_scaler

    @WithoutCasts()
    def scale(self, outputs: Any) -> Any:
        """Multiplies losses by the scale.

        Args:
            outputs: floating or complex tensors of any shape and device; in lists, tuples and dicts, or an iterable.

        Returns:
            The same times the scale, each on its own device; of an iterable an iterator. What is half becomes float32,
            as a scaled loss may leave the range of float16.

        Raises:
            OptionError: there is something else among them.
        """
        if not self._enabled:
            return outputs
        scales: dict[torch.device, Tensor] = {}
        if isinstance(outputs, (Tensor, list, tuple, dict)):
            _check_outputs(outputs)
            return cast_tensors(outputs, lambda each: self._scaled(each, scales))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise _no_outputs(outputs)

    def _scaled(self, output: Tensor, scales: dict[torch.device, Tensor]) -> Tensor:
        if self._loss_scaler is None:
            self._lazy_init_scale_growth_tracker(output.device)
        scale = scales.get(output.device)
        if scale is None:
            # A copy, since an update before backward would change what autograd keeps.
            scale = self._begun("scale()").snapshot().to(output.device, non_blocking=True)
            scales[output.device] = scale
        return (output.float() if output.dtype in HALVES else output) * scale

    # Gradients

    @WithoutCasts()
    def unscale_(self, optimizer: OptimizerLike) -> None:
        """Divides an optimizer's gradients by the scale in place, and looks for overflow; does not wait for the device.

        Call it before clipping; otherwise `step` does. Once for each optimizer and iteration, after the last backward.

        Raises:
            UsageError: it was called already, or after `step`, or before any `scale`; or amp has these gradients.
            OptionError: a gradient is float16; nothing was changed.
        """
        if not self._enabled:
            return
        scaler = self._begun("unscale_()")
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
        scale = scaler.on_device[0]
        # By position: whoever overrides it may have other names for them.
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, scale.reciprocal(), scaler.no_overflow(), False)
        state["stage"] = OptState.UNSCALED

    def _state_of(self, optimizer: OptimizerLike) -> dict[str, Any]:
        state = self._per_optimizer_states[id(check_optimizer(optimizer))]
        state["optimizer"] = optimizer  # which keeps it, or another one might have its id before the next update
        return state

    def _unscale_grads_(
        self, optimizer: OptimizerLike, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies gradients in place; returns for each device among theirs whether one of its was not finite."""
        session = runtime.live
        if session is not None and session.switch.active:
            session.let_unscale(optimizer)
        precise = None if allow_fp16 else precise_within(optimizer)
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
            for device, grads in _by_device(optimizer_state.gradients_of(parameters)):
                found[device] = found_inf.to(device, copy=True)
                kernels.unscale_(grads, inv_scale, found[device])
        if not found and ranks.share(parameters):
            found[found_inf.device] = found_inf.clone()  # others may have pieces of gradients, and ask about this one's
        for flag in found.values():
            ranks.agree(flag, parameters)
        LossScaler.uses_by_hand += 1
        return found

    @WithoutCasts()
    def _check_inf_per_device(self, optimizer: OptimizerLike) -> dict[Any, Tensor]:
        """Looks for overflow in gradients, which stay scaled."""
        one = torch.ones_like(self._begun("_check_inf_per_device()").no_overflow())
        found = self._unscale_grads_(optimizer, one, torch.zeros_like(one), True)
        self._state_of(optimizer)["found_inf_per_device"] = found
        return found

    def _found_inf_per_device(self, optimizer: OptimizerLike) -> dict[Any, Tensor]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]  # type: ignore[no-any-return]

    # Steps

    def step(self, optimizer: OptimizerLike, *args: Any, **kwargs: Any) -> Any:
        """Runs ``optimizer.step(*args, **kwargs)`` with unscaled gradients; skips it if one of them is not finite.

        An optimizer that says ``_step_supports_amp_scaling`` is always called, and skips by itself; but torch's are not
        called where the host sees the overflow: on the CPU, and before they have state.

        With a closure, the gradients of each evaluation are unscaled and checked when the closure returns; to clip, it
        calls `unscale_` itself. If an evaluation overflows, the parameters and the optimizer's state become what they
        were before the step. The closure returns the loss, not the scaled one. If the optimizer reads gradients before
        it calls the closure, these are scaled.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped. If a closure's evaluation overflowed, what the
            closure returned.

        Raises:
            UsageError: it was called already since the last `update`, the optimizer has no gradients, or `unscale_` was
                called before a step with a closure; or amp has these gradients.
            LossScaleError: an overflow although the scale is at ``min_loss_scale``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure) or isinstance(closure, nn.Module):
            closure = None
        if closure is None:  # which may be what scales first
            self._begun("step()")
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
        return result

    def _maybe_opt_step(
        self, optimizer: OptimizerLike, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
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
                f"the step of this {type(optimizer).__name__} takes grad_scaler, as torch's optimizers once did. Have "
                "it read self.grad_scale and self.found_inf, which are there while it runs.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        scaler = self._begun("step()")
        is_unscaled = state["stage"] is OptState.UNSCALED
        if not is_unscaled:
            self._check_inf_per_device(optimizer)
        found_inf = _combined(state, scaler.no_overflow())
        preset = getattr(optimizer, "grad_scale", None)
        if is_unscaled:
            optimizer.grad_scale = preset
        else:
            scale = scaler.snapshot()
            optimizer.grad_scale = scale if preset is None else scale * preset
        optimizer.found_inf = found_inf
        try:
            if self._is_to_be_read(optimizer, found_inf) and bool(found_inf):
                self._skip(optimizer)
                if _is_torchs(optimizer):
                    return None
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _is_to_be_read(self, optimizer: Any, found_inf: Tensor) -> bool:
        """Returns whether the host reads the overflow before a step that would skip by itself."""
        if self._has_floor or found_inf.device.type in scale_use.AT_HAND:
            return True
        return _is_torchs(optimizer) and not optimizer_state.has_state(optimizer)

    def _step_with_closure(
        self,
        optimizer: OptimizerLike,
        state: dict[str, Any],
        closure: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if state["stage"] is OptState.UNSCALED:
            raise ScalerUsageError(
                "unscale_() was called before a step with a closure, whose backward makes gradients of its own. Call "
                "scaler.unscale_(optimizer) at the end of the closure; or leave it out."
            )
        evaluations = 0
        overflow: _ClosureOverflowedError | None = None

        def evaluate(*closure_args: Any, **closure_kwargs: Any) -> Any:
            nonlocal evaluations, overflow
            evaluations += 1
            state.update(_ready())
            result = closure(*closure_args, **closure_kwargs)
            if self._state_of(optimizer) is not state:
                raise ScalerUsageError(
                    "update() was called in the closure of a step, which is not over. Call scaler.update() after "
                    "scaler.step(optimizer, closure)."
                )
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            _check_found(optimizer, state)
            if _overflowed(state):
                overflow = _ClosureOverflowedError(result)
                raise overflow
            return result

        # An overflow in a later evaluation finds the parameters moved already.
        before = None if optimizer_state.evaluates_first(optimizer) else Snapshot(optimizer)
        if args:
            args = (evaluate, *args[1:])
        else:
            kwargs = {**kwargs, "closure": evaluate}
        result = None
        with contextlib.suppress(_ClosureOverflowedError):
            result = optimizer.step(*args, **kwargs)
        if overflow is not None:  # even if the optimizer has caught it, and gone on
            if before is not None:
                before.restore()
            self._skip(optimizer)
            return overflow.result
        if not evaluations:
            raise ScalerUsageError(
                f"the step of this {type(optimizer).__name__} did not call its closure, and has updated parameters "
                "with gradients that are still scaled, if there were any. Run backward before scaler.step(optimizer), "
                "without a closure."
            )
        return result

    def _skip(self, optimizer: Any) -> None:
        """Looks, while the gradients are there, whether a smaller scale can help."""
        if isinstance(optimizer, torch.optim.Optimizer):
            # An LR scheduler warns of a scheduler step before the first optimizer step unless this says there was one.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        scale = self.get_scale()
        at_floor = self._has_floor and scale <= self._policy.min_loss_scale
        if not at_floor and (scale > _OF_NO_USE or self._has_warned):
            return
        culprits = optimizer_state.not_finite_gradients(
            optimizer_state.parameters_of(optimizer), optimizer_state.names_in(optimizer)
        )
        advice = (
            "Look for inputs or a loss that are not finite, a learning rate that is too high, or values in the forward "
            "that leave float16's range: bfloat16 has that of float32."
        )
        if at_floor:
            raise LossScaleError(
                f"the loss scale is at its floor of {self._policy.min_loss_scale:g} and the gradients still overflow, "
                f"so no scale can help: {culprits}. {advice}"
            )
        self._has_warned = True
        warn(
            f"the loss scale has come down to {scale:g} and the gradients still overflow, so no scale can help: "
            f"{culprits}. {advice} Give min_loss_scale= to have this raise."
        )

    @WithoutCasts()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration: the scale backs off if an optimizer met overflow; else it grows or stays.

        Args:
            new_scale: what the scale is set to instead: a positive number, or a tensor of one, which is copied and not
                looked at.

        Raises:
            UsageError: no optimizer has unscaled or stepped since the last one.
            OptionError: ``new_scale`` is no such number or tensor.
        """
        if not self._enabled:
            return
        scaler = self._begun("update()")
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

    # Settings, under torch's names

    def is_enabled(self) -> bool:
        """Returns whether it scales at all."""
        return self._enabled

    def get_scale(self) -> float:
        """Returns the scale, 1.0 if scaling is off; waits for the device."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale)

    def get_growth_factor(self) -> float:
        """Returns what the scale is multiplied by when it grows."""
        return self._policy.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by when it grows.

        Raises:
            OptionError: it is no number above 1.
        """
        self._set(growth_factor=make_policy("dynamic", growth_factor=new_factor).growth_factor)

    def get_backoff_factor(self) -> float:
        """Returns what the scale is multiplied by when it backs off."""
        return self._policy.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by when it backs off.

        Raises:
            OptionError: it is no number between 0 and 1.
        """
        self._set(backoff_factor=make_policy("dynamic", backoff_factor=new_factor).backoff_factor)

    def get_growth_interval(self) -> int:
        """Returns how many clean updates in a row it takes to grow."""
        return self._policy.scale_window

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets how many clean updates it takes to grow.

        Where there were as many already, it grows at the next one; torch's would not before an overflow.

        Raises:
            OptionError: it is no whole number above 0.
        """
        self._set(scale_window=make_policy("dynamic", scale_window=new_interval).scale_window)

    def _set(self, **changes: Any) -> None:
        self._policy = replace(self._policy, **changes)
        if self._loss_scaler is not None:
            self._loss_scaler.policy = self._policy

    # Saving

    @property
    def _state(self) -> ScaleState:
        return self._first_state if self._loss_scaler is None else self._loss_scaler.state

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return self._state.unskipped if self._enabled else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain numbers, as ``torch.amp.GradScaler`` does; empty if scaling is off.

        With hysteresis it also holds ``hysteresis_left``, which torch's class ignores. Waits for the device.
        """
        if not self._enabled:
            return {}
        state = self._state
        saved = {
            "scale": state.loss_scale,
            "growth_factor": self._policy.growth_factor,
            "backoff_factor": self._policy.backoff_factor,
            "growth_interval": self._policy.scale_window,
            "_growth_tracker": state.unskipped,
        }
        if self._policy.hysteresis > 1:
            saved["hysteresis_left"] = state.hysteresis_left
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, here or in torch: the scale, and how it grows and backs off.

        Raises:
            OptionError: it is empty, a key is missing or unknown, or holds no such number; nothing was changed.
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
                "the state is of a static loss scale, which is no place for a dynamic one to start from. Leave "
                "load_state_dict out."
            )
        reader = LossScaler.from_policy(self._policy)
        state = reader.read_state_dict(state_dict)
        policy = make_policy(
            "dynamic",
            growth_factor=state_dict.get("growth_factor", self._policy.growth_factor),
            backoff_factor=state_dict.get("backoff_factor", self._policy.backoff_factor),
            scale_window=state_dict.get("growth_interval", self._policy.scale_window),
        )
        self._set(
            growth_factor=policy.growth_factor, backoff_factor=policy.backoff_factor, scale_window=policy.scale_window
        )
        self._load_state(state)

    def _load_state(self, state: ScaleState) -> None:
        self._first_state = state
        if self._loss_scaler is not None:
            self._loss_scaler.set_state(state)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise ScalerUsageError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update(). Copy or pickle it there."
            )
        # Numbers only: the process that unpickles them may lack the device.
        return {**vars(self), "_first_state": self._state, "_loss_scaler": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

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


class _ClosureOverflowedError(BaseException):
    """Leads out of an optimizer's step, past whatever it catches, when its closure overflowed."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _checked_device(device: object) -> Any:
    try:
        if isinstance(device, (str, torch.device)):
            torch.device(device)
            return device
    except RuntimeError:
        pass
    raise ScalerOptionError(
        f"device is {device!r}; expected the type of a device, such as 'cuda' or 'cpu'. Where init_scale came first, "
        "as in torch.cuda.amp.GradScaler, type GradScaler(init_scale=...)."
    )


def _check_outputs(outputs: object) -> None:
    if isinstance(outputs, Tensor):
        if not (outputs.is_floating_point() or outputs.is_complex()):
            raise _no_outputs(outputs)
    elif isinstance(outputs, (list, tuple, dict)):
        for each in outputs.values() if isinstance(outputs, dict) else outputs:
            _check_outputs(each)
    else:
        raise _no_outputs(outputs)


def _no_outputs(found: object) -> OptionError:
    kind = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    return OptionError(
        f"outputs must be a Tensor or an iterable of Tensors, floating ones in lists, tuples and dicts; found {kind}."
    )


def _by_device(grads: list[Tensor]) -> Iterator[tuple[torch.device, list[Tensor]]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return iter(groups.items())


def _check_found(optimizer: OptimizerLike, state: dict[str, Any]) -> None:
    if not state["found_inf_per_device"]:
        raise ScalerUsageError(
            f"No inf checks were recorded for this optimizer: this {type(optimizer).__name__} has no gradients. Run "
            "scaler.scale(loss).backward() for its parameters first."
        )


@WithoutCasts()
def _overflowed(state: dict[str, Any]) -> bool:
    return any(bool(flag) for flag in state["found_inf_per_device"].values())


@WithoutCasts()
def _combined(state: dict[str, Any], none: Tensor) -> Tensor:
    return _maximum(list(state["found_inf_per_device"].values()), none)


def _maximum(flags: list[Tensor], none: Tensor) -> Tensor:
    for flag in flags:
        none = torch.maximum(none, flag.to(none.device, non_blocking=True).reshape(()))
    return none


def _is_torchs(optimizer: object) -> bool:
    """Returns whether its step is one of torch's, as that of a subclass which only adds to it may be."""
    return str(type(optimizer).step.__module__).startswith("torch.optim.")  # type: ignore[attr-defined]
