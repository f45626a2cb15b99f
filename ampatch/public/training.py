"""What a training loop calls between `amp.initialize` and the end: blocks, gradients, scales and their states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ampatch import checkpoint_policy, opt_levels, saved_policy
from ampatch.distributed import Ranks
from ampatch.errors import OptionError
from ampatch.native.host_copy import stacked
from ampatch.opt_levels import as_flag
from ampatch.runtime import runtime
from ampatch.scaling.clipping import clip_unscaled
from ampatch.scaling.loss_scaler import load_states
from ampatch.scaling.users_optimizer import check_optimizer
from ampatch.weights.optimizer_state import gradients_of, parameters_of

_L = TypeVar("_L")


def scale_loss(
    loss: _L,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,  # noqa: ARG001 - Apex had it
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[_L]:
    """Scales a loss for the backward pass in the block, and unscales the gradients when the block ends.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Args:
        loss: floating tensor of any shape, usually 0-dimensional; or nested lists, tuples and dicts of them.
        optimizers: an optimizer or a list of them, whose parameters receive gradients in the block.
        loss_id: number of the scale to use, below ``num_losses``.
        model: ignored; Apex had it.
        delay_unscale: leaves the gradients scaled, for a later block that adds to them and unscales.
        delay_overflow_check: leaves gradients that overflowed as they are, for code that checks them itself; otherwise
            a later block zeroes them. In both cases the scale changes at the step.

    Returns:
        A context manager, to be entered once. It yields ``loss.float() * scale``, float32 of the same shape, in the
        same lists, tuples and dicts. With amp disabled it yields the loss unchanged.

    Raises:
        UsageError: amp is not set up; gradients of two scales would be summed; the loss was scaled before; or the block
            is entered a second time.
        OptionError: ``loss_id`` is out of range, or an argument is of the wrong kind.
    """
    if runtime.disabled:
        return contextlib.nullcontext(loss)
    live = runtime.live or runtime.required("amp.scale_loss")
    optimizer_list = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if runtime.replaced is not None:
        for optimizer in optimizer_list:
            runtime.replaced.check(optimizer, live)
    if not optimizer_list:
        raise OptionError("amp.scale_loss got no optimizer, so that gradients would stay scaled; expected one or more.")
    return live.losses.scale_loss(
        loss, optimizer_list, loss_id, delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check
    )


def clip_grad_norm_(optimizer: Any, max_norm: float) -> Tensor:
    """Clips the gradients of an optimizer's parameters by their total norm.

    Like ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)``, but with fewer reads::

        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        norm = amp.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()

    After a block with ``delay_unscale=True`` it first reads the gradients once, for overflows and for the norm, and the
    scale is updated. Then it unscales and clips them in one pass. If several optimizers share a block, the first call
    unscales the gradients of all. Gradients that overflowed are not clipped.

    Args:
        optimizer: the optimizer whose gradients are clipped.
        max_norm: maximum 2-norm of the clipped gradients; ``math.inf`` only measures the norm.

    Returns:
        The 2-norm of the unscaled gradients before clipping: 0-dimensional float32, on their device. It is inf or NaN
        after an overflow, and the next step is skipped.

    Raises:
        OptionError: ``optimizer`` is not an optimizer, or ``max_norm`` is not a number of at least 0.
        UsageError: the call is inside a block, or another optimizer has left gradients of the same parameters scaled.
            Also if ``max_norm`` is finite and DDP or FSDP has not reduced them yet; or if they belong to a
            ``FullyShardedDataParallel`` that amp does not know.
    """
    checked = check_optimizer(optimizer)
    most = opt_levels.check_limit("max_norm", max_norm)
    live = runtime.live
    if live is not None and live.adopted.has(optimizer):
        return live.gradients.clip(checked, most)
    return clip_unscaled(parameters_of(checked), most, Ranks())


def unscale_(optimizer: Any) -> None:
    """Unscales the gradients that ``amp.scale_loss(..., delay_unscale=True)`` has left scaled.

    For loops that read or change gradients between a block and the step::

        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        amp.unscale_(optimizer)
        optimizer.step()

    The call also checks for overflows, and updates the scale. It unscales the gradients of the block's other optimizers
    too. A no-op if the gradients are unscaled already.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``; the call is inside a block; or another optimizer has left
            gradients of the same parameters scaled.
    """
    checked = check_optimizer(optimizer)
    if not runtime.disabled:
        runtime.session_of(checked, "amp.unscale_").gradients.unscale(checked)


def grads_are_unscaled(optimizer: Any) -> bool:
    """Returns True if no gradient of an optimizer is scaled.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    checked = check_optimizer(optimizer)
    return (
        runtime.disabled
        or runtime.session_of(checked, "amp.grads_are_unscaled").adopted.record_of(checked).gradients.are_unscaled()
    )


def gradients_are_finite(optimizer: Any) -> Tensor:
    """Returns whether an optimizer's gradients are finite, so that its next step runs; does not sync with the device.

    ::

        if not amp.gradients_are_finite(optimizer):  # waits for the device
            optimizer.zero_grad()
            continue

    For code that uses gradients between the block and the step. It reads the gradients once.

    Returns:
        0-dimensional bool tensor, on the device of the gradients. True if there are no gradients. It is the same on all
        ranks that share them.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    checked = check_optimizer(optimizer)
    if runtime.disabled:
        flags = [each.isfinite().all() for each in gradients_of(parameters_of(checked))]
        return stacked(flags).all() if flags else torch.ones((), dtype=torch.bool, device="cpu")
    return runtime.session_of(checked, "amp.gradients_are_finite").gradients.are_finite(checked)


def step_was_skipped(optimizer: Any) -> bool:
    """Returns whether the last ``optimizer.step()`` was skipped because of an overflow.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    if runtime.disabled:
        return False
    checked = check_optimizer(optimizer)
    return runtime.session_of(checked, "amp.step_was_skipped").adopted.record_of(checked).outcomes.read().in_a_row > 0


def skipped_steps(optimizer: Any) -> int:
    """Returns the number of an optimizer's steps skipped since it was passed to ``amp.initialize``.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    if runtime.disabled:
        return 0
    checked = check_optimizer(optimizer)
    return runtime.session_of(checked, "amp.skipped_steps").adopted.record_of(checked).outcomes.read().total


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterates over the parameters that an optimizer updates: the masters, at levels that have them.

    Clip the gradients of these.

    Raises:
        OptionError: it is not an optimizer.
    """
    live = runtime.live
    checked = check_optimizer(optimizer)
    if live is None or not live.adopted.has(optimizer):
        return parameters_of(checked)
    return live.gradients.master_params(checked)


def get_loss_scale(loss_id: int = 0) -> float:
    """Returns the current scale of a loss; 1 with amp disabled. Syncs with the device.

    Raises:
        OptionError: ``loss_id`` is out of range.
    """
    if runtime.disabled:
        return 1.0
    return runtime.required("amp.get_loss_scale").losses.scaler(loss_id).state.loss_scale


def stats() -> dict[str, int | float]:
    """Returns the numbers of a run as one flat dict, for TensorBoard, W&B or a log.

    ::

        for name, value in amp.stats().items():
            writer.add_scalar(f"amp/{name}", value, step)

    Each call reads every device that has a scaler once, so call it only every few steps. Replays of a CUDA graph count
    only in "loss_scale" and "clean_steps".

    Returns:
        int and float values; empty with amp off or disabled. The keys stay the same for the whole session, unless amp
        gets more optimizers:

        - "loss_scale": the current scale. With ``num_losses`` above 1: "loss_scale/0", "loss_scale/1" and so on, also
          for the next two keys. If some optimizers were adopted later than others, as for `state_dict`: the scale of
          the last ones.
        - "clean_steps": steps without overflow since the scale last changed; for a static scale: all steps.
        - "overflows": overflows for which a step was skipped; one per step, even with several optimizers.
        - "skipped_steps": skipped steps of all optimizers. With several optimizers also "skipped_steps/0" and so on, in
          the order in which amp got them; a deleted one keeps its number.
        - "casts", "cache_hits": as in `cast_counts`.
        - "cache_hit_rate": the share of cache hits in the sum of both; 0 before the first cast.
        - "cached_bytes": memory of the currently cached casts of weights.
        - "patched_functions": number of patched functions.
    """
    live = runtime.live
    return {} if live is None else live.stats()


def state_dict(*, include_policy: bool = False) -> dict[str, dict[str, Any]]:
    """Returns the loss scalers' states as plain numbers, under "loss_scaler0" and so on. Syncs with the device.

    Optimizers that are passed to a later `initialize`, after a first step, have their own scalers. Then the first keys
    belong to the optimizers that were passed last, followed by those of earlier optimizers that still exist.

    Args:
        include_policy: True adds the effective policy under "policy": settings, the rule of each function, the text of
            the user's lists, versions, and a SHA-256 of settings and rules. It is plain data, for ``torch.load`` with
            ``weights_only=True`` and for JSON. Apex itself loads no dict with this key.

    Returns:
        The states; empty with ``enabled=False``.
    """
    with_policy = as_flag("include_policy", include_policy)
    if runtime.disabled:
        return {}
    live = runtime.required("amp.state_dict")
    states: dict[str, dict[str, Any]] = {
        f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(live.losses.all_scalers())
    }
    return {**states, checkpoint_policy.KEY: checkpoint_policy.effective(live)} if with_policy else states


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads a state dict of amp, of Apex, or of ``torch.amp.GradScaler``.

    The settings stay those of `initialize`: factors and interval of a ``GradScaler`` are not loaded. A static scale
    keeps its value: a saved dynamic scale could overflow, and a static scale does not check for overflows. A dynamic
    scale keeps its value if the saved one was static; else it is clamped to ``min_loss_scale`` and ``max_loss_scale``.
    A saved policy is compared with the live one, and not loaded.

    Args:
        state_dict: states of scalers under "loss_scaler0" and so on, with or without a policy; or the state of a
            ``GradScaler``, which is loaded into "loss_scaler0".

    Raises:
        OptionError: it has unexpected keys, values that no scaler can have, or a damaged policy; nothing was changed.

    Warns:
        AmpWarning: the names of the scalers differ, and only those in both are loaded; a ``GradScaler`` had other
            settings; or the saved policy differs from the live one.
    """
    if runtime.disabled:
        return
    live = runtime.required("amp.load_state_dict")
    warnings: list[str] = []
    if isinstance(state_dict, Mapping) and checkpoint_policy.KEY in state_dict:
        warnings = saved_policy.warnings(state_dict[checkpoint_policy.KEY], checkpoint_policy.effective(live))
        state_dict = {key: value for key, value in state_dict.items() if key != checkpoint_policy.KEY}
    load_states(live.losses.all_scalers(), state_dict, logs=live.losses.verbose, warnings=warnings)
