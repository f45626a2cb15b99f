"""``prepare``: amp for a training loop with Hugging Face Accelerate, called in place of ``accelerator.prepare``.

Owns what the methods of one Accelerator do while amp is on for it, and when that ends. Must never change another
Accelerator. `ampatch.integrations.trainer_session` owns the set-up and the scaling of backward passes;
`ampatch.integrations.accelerate_optimizers` what Accelerate's classes know of amp.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.integrations import accelerate_optimizers, options
from ampatch.integrations.accelerate_optimizers import STATE_NAME, adopted_optimizers
from ampatch.integrations.shared_patches import put_around
from ampatch.integrations.trainer_session import TrainerSession, Wording, amp_log, uninterrupted
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import LEVELS, check_names
from ampatch.runtime import runtime

# isort: split
# Below `accelerate_optimizers`, which raises a clear error if accelerate is missing or too old.
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

__all__ = ["amp_log", "prepare"]

_OPTIONS = (*options.names(), "device_placement")
_OFF = "opt_level='O0'"
_WORDING = Wording(
    set_up="ampatch's prepare",
    optimizer="Hand one to ampatch's prepare together with the model: prepare(accelerator, model, optimizer).",
    backward="accelerator.backward(loss) in place of loss.backward()",
)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    opt_level: str = "O1",
    device_placement: Sequence[bool | None] | None = None,
    **given: Any,
) -> Any:
    """Prepares models, optimizers, data loaders and schedulers like ``accelerator.prepare``, and sets amp up for them.

    ::

        accelerator = Accelerator()
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, opt_level="O2")
        ...
        accelerator.backward(loss)
        optimizer.step()

    Call it once, with all models and optimizers. amp is on until ``accelerator.free_memory()``, ``clear()`` or
    ``end_training()``, or ``amp.deinitialize()``: then the weights are float32 at every level, and torch is unpatched.

    Args:
        accelerator: an Accelerator without ``mixed_precision``. Amp replaces a precision that ``accelerate launch``
            chose; its half type is the default of ``half_dtype``.
        objects: arguments of ``accelerator.prepare``, with at least one model. Without an optimizer the model is for
            evaluation.
        opt_level: "O0" to "O6"; "O0" leaves everything to ``accelerator.prepare``.
        device_placement: as for ``accelerator.prepare``: whether to move each of the objects to the device.
        given: arguments of ``amp.initialize`` by name, except ``models``, ``optimizers`` and ``num_losses``.
            ``cast_model_outputs`` defaults to float32, like the outputs of Accelerate's own mixed precision.

    Returns:
        The prepared objects in the same order, or the only one, as from ``accelerator.prepare``.

    Raises:
        OptionError: an argument has a name or value that is not allowed; or the Accelerator casts by itself, shards
            weights, or has settings for a ``GradScaler``.
        UsageError: amp is set up already, or ``accelerator.prepare`` got one of the objects before.

    Warns:
        AmpWarning: ``accelerate launch`` chose a precision, by its option or its config file.
    """
    if not isinstance(accelerator, Accelerator):
        raise OptionError(
            f"found {type(accelerator).__name__} as the first argument of prepare; expected an Accelerator. Type "
            "prepare(accelerator, model, optimizer)."
        )
    check_names(given, _OPTIONS, "prepare got")
    if device_placement is not None and not isinstance(device_placement, (list, tuple)):
        raise OptionError(
            f"device_placement is {device_placement!r}; expected a list of True, False and None, one for each object."
        )
    _check_positions(objects)
    settings = {"opt_level": opt_level, "cast_model_outputs": torch.float32, **given}
    if not options.turn_on(settings):
        return accelerator.prepare(*objects, device_placement=device_placement)
    options.check_level(settings)
    _check_settings(accelerator)
    _check_not_prepared(accelerator, objects)
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if _is_optimizer(each)]
    if not models:
        raise OptionError(
            "prepare got no model. Hand in all models and optimizers in one call; data loaders and schedulers may go "
            "to accelerator.prepare by themselves."
        )
    for optimizer in optimizers:
        if hasattr(optimizer, "fused_backward"):  # those of the LOMO kind have it
            raise OptionError(
                f"{type(optimizer).__name__} updates weights within the backward pass, from gradients that are still "
                "scaled. Choose an optimizer that steps after it."
            )
    updated = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    named = (pair for model in models for pair in model.named_parameters())
    accelerate_optimizers.check_weights((name, parameter) for name, parameter in named if id(parameter) in updated)
    placed = [None] * len(objects) if device_placement is None else device_placement
    for each, wanted in zip(objects, placed, strict=False):  # accelerate itself raises if lengths differ
        if isinstance(each, nn.Module):
            _place(accelerator, each, wanted)
    prepared = _Prepared(accelerator, models, optimizers, settings)
    try:
        prepared.open()
        result = accelerator.prepare(*objects, device_placement=device_placement)
        prepared.note_wrappers(result if isinstance(result, tuple) else (result,))
    except BaseException:
        prepared.end(is_for_good=True)
        raise
    return result


#: The Accelerator for which amp is on; empty: none. Torch's functions belong to the process.
_live: list[_Prepared] = []


class _Prepared:
    """amp for one Accelerator, between `open` and `end`.

    Args:
        accelerator: the Accelerator.
        models: models to adopt.
        optimizers: optimizers to adopt; empty for evaluation.
        settings: keyword arguments of ``amp.initialize``.
    """

    def __init__(
        self, accelerator: Accelerator, models: list[nn.Module], optimizers: list[Any], settings: dict[str, Any]
    ) -> None:
        self.accelerator = accelerator
        launched = accelerate_optimizers.launched_precision(accelerator)
        settings = accelerate_optimizers.with_launched_half(settings, launched)
        self._session = TrainerSession(models, optimizers or None, settings, _WORDING)
        self._wrappers: list[DistributedDataParallel] = []
        self._closing = contextlib.ExitStack()
        self._precision = PatchLedger()

    def open(self) -> None:
        """Sets amp up, patches the Accelerator, and turns its own precision off.

        Raises:
            UsageError: amp is set up already.
            OptionError: an option has a value that is not allowed.

        Warns:
            AmpWarning: ``accelerate launch`` chose a precision.
        """
        accelerator = self.accelerator
        with uninterrupted():
            self._session.open({})
            self._closing.callback(self._session.close)
            runtime.live.ledger.on_undo(self.end)  # type: ignore[union-attr]  # amp.deinitialize() ends all of it
            _live.append(self)
            self._closing.callback(_live.remove, self)
            self._closing.enter_context(adopted_optimizers.installed())
            if _are_pretrained(self._session.models):
                from ampatch.integrations.pretrained import honest_configs

                self._closing.enter_context(honest_configs.installed())
            ledger = PatchLedger()
            self._closing.callback(ledger.undo)
            for name, around in _AROUND.items():
                put_around(ledger, accelerator, name, functools.partial(_while_on, accelerator, around))
            self._closing.callback(accelerator.register_save_state_pre_hook(self._save_scale).remove)
            self._closing.callback(accelerator.register_load_state_pre_hook(self._load_scale).remove)
        accelerate_optimizers.replace_precision(accelerator, self._precision)

    def note_wrappers(self, objects: Sequence[Any]) -> None:
        """Notes the wrappers that Accelerate has put around models."""
        parts = (part for each in objects if isinstance(each, nn.Module) for part in each.modules())
        self._wrappers = [part for part in parts if isinstance(part, DistributedDataParallel)]

    def end(self, *, is_for_good: bool = False) -> None:
        """Takes amp down, and undoes the patches; a second call is a no-op.

        Args:
            is_for_good: True if the Accelerator keeps none of the prepared objects. Otherwise its own precision stays
                off: it would scale losses for optimizers that do not unscale.
        """
        with uninterrupted():
            self._closing.close()
            if is_for_good:
                self._precision.undo()

    # The methods of the Accelerator. Each gets the Accelerator's own method, and its arguments.

    def backward(self, original: Callable[..., None], loss: Any, *others: Any, **kwargs: Any) -> None:
        """Scales the loss, and unscales the gradients.

        Raises:
            OptionError: ``loss`` has no backward pass, or there is a second argument.
        """
        if others:
            raise OptionError(
                f"accelerator.backward got {type(others[0]).__name__} beside the loss; expected the loss only, which "
                "is scaled for each optimizer that it reaches. Type accelerator.backward(loss)."
            )
        if not hasattr(loss, "backward"):
            raise OptionError(
                f"accelerator.backward got {loss!r}; expected the loss as a tensor, before loss.item(). Type "
                "accelerator.backward(loss)."
            )
        with self._session.scaled_backward():
            original(loss, **kwargs)

    @contextlib.contextmanager
    def autocast(self, original: Any, autocast_handler: Any = None) -> Iterator[None]:
        """Turns casts off for ``AutocastKwargs(enabled=False)``; otherwise casts are on in the block and around it."""
        is_off = autocast_handler is not None and not autocast_handler.enabled
        with original(autocast_handler), amp.disable_casts() if is_off else contextlib.nullcontext():
            yield

    def prepare_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises for an optimizer that amp does not know, as ``accelerator.backward`` would not scale for it."""
        live = runtime.live
        if live is not None and not live.adopted.has(optimizer):
            raise UsageError(
                f"accelerator.prepare got a {type(optimizer).__name__} that amp does not know, and amp is on for "
                "this Accelerator. Hand all models and optimizers to one call of ampatch's prepare; call "
                "accelerator.free_memory() first to begin anew."
            )
        return original(optimizer, *args, **kwargs)

    def end_before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Takes amp down first, so that nothing here keeps models alive."""
        for wrapper in self._wrappers:  # no training goes on in them
            self._session.forget_wrapper(wrapper)
        self.end(is_for_good=True)
        return original(*args, **kwargs)

    # Checkpoints

    def _save_scale(self, _models: Any, _weights: Any, folder: str) -> None:
        state = self._session.state_dict()
        if state is not None:
            self.accelerator.save(state, Path(folder, STATE_NAME))

    def _load_scale(self, _models: Any, folder: str) -> None:
        if self._session.is_training:
            accelerate_optimizers.load_scale(folder)


#: What methods of an Accelerator do while amp is on for it, by their names.
_AROUND: dict[str, Callable[..., Any]] = {
    "backward": _Prepared.backward,
    "autocast": _Prepared.autocast,
    "prepare_optimizer": _Prepared.prepare_optimizer,
    "free_memory": _Prepared.end_before,  # clear() calls it
    "end_training": _Prepared.end_before,
}


def _while_on(
    accelerator: Accelerator, around: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a method with amp around it while amp is on for the Accelerator; otherwise calls the original.

    Users keep such a method (``backward = accelerator.backward``) after amp has ended, and after a later `prepare`.
    """
    live = next((each for each in _live if each.accelerator is accelerator), None)
    return original(*args, **kwargs) if live is None else around(live, original, *args, **kwargs)


# What excludes amp


def _check_positions(objects: Sequence[Any]) -> None:
    """Raises for arguments of amp without names, and for models in lists: Accelerate returns both unchanged."""
    for each in objects:
        meant = ""
        if isinstance(each, str) and each.upper() in LEVELS:
            meant = f"opt_level={each.upper()!r}"
        elif isinstance(each, torch.dtype) and each in HALVES:
            meant = f"half_dtype={each}"
        elif isinstance(each, Mapping) and each and all(name in _OPTIONS for name in each):
            meant = ", ".join(f"{name}={value!r}" for name, value in each.items())
        elif isinstance(each, (list, tuple, Mapping)):
            parts = each.values() if isinstance(each, Mapping) else each
            for part in parts:
                if isinstance(part, nn.Module) or _is_optimizer(part):
                    raise OptionError(
                        f"prepare got a {type(each).__name__} with {type(part).__name__} in it, which it would hand "
                        "back as it is. Hand in each by itself, such as prepare(accelerator, *models, *optimizers)."
                    )
        if meant:
            raise OptionError(
                f"prepare got {each!r} without a name, which would have no effect. Type prepare(accelerator, ..., "
                f"{meant})."
            )


def _check_settings(accelerator: Any) -> None:
    accelerate_optimizers.check_accelerator(accelerator, _OFF)
    if accelerator.scaler_handler is not None:
        raise OptionError(
            "the Accelerator has GradScalerKwargs, for a GradScaler that amp replaces. Leave them out, and hand "
            "init_scale, growth_factor, backoff_factor, and growth_interval as scale_window, to prepare."
        )
    handler = accelerator.autocast_handler
    if handler is not None and not handler.enabled:
        raise OptionError(
            f"the Accelerator has AutocastKwargs(enabled=False), which turns casts off. Leave them out, or type {_OFF}."
        )


def _check_not_prepared(accelerator: Any, objects: Sequence[Any]) -> None:
    """Raises if amp is on for an Accelerator, or this one has prepared models or optimizers without amp."""
    if _live:
        which = "this Accelerator" if _live[0].accelerator is accelerator else "another Accelerator"
        raise UsageError(
            f"prepare was called before for {which}, and amp is on. Hand all models and optimizers to one call; data "
            "loaders and schedulers may go to accelerator.prepare. To begin anew, call that Accelerator's "
            "free_memory() first, or amp.deinitialize()."
        )
    for each in objects:
        is_ours = isinstance(each, (AcceleratedOptimizer, AcceleratedScheduler))
        if is_ours or any(each is model for model in accelerator._models):
            raise UsageError(
                f"this {type(each).__name__} was prepared by accelerator.prepare before, without amp. Leave that call "
                "out; or call accelerator.free_memory(), and hand in the object that was prepared."
            )
        if isinstance(each, (DistributedDataParallel, nn.DataParallel)):
            raise UsageError(
                f"prepare got a model that is wrapped in {type(each).__name__} already. Hand in the model inside "
                "(its .module): prepare wraps it, after amp has been set up."
            )
    if accelerator._optimizers:
        raise UsageError(
            "accelerator.prepare got an optimizer before, without amp, and accelerator.backward would scale its "
            "gradients too. Hand all models and optimizers to one call of ampatch's prepare instead."
        )


def _is_optimizer(each: Any) -> bool:
    is_like_one = all(hasattr(each, name) for name in ("param_groups", "step", "zero_grad"))
    return is_like_one and not isinstance(each, nn.Module)


def _place(accelerator: Any, model: nn.Module, wanted: bool | None) -> None:
    """Moves a model to its device now, as Accelerate would later: amp's masters and half type depend on the device."""
    is_quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    if is_quantized and getattr(model, "hf_device_map", False):
        return
    if (accelerator.device_placement if wanted is None else wanted) and not accelerator.verify_device_map(model):
        model.to(accelerator.device)


def _are_pretrained(models: Sequence[nn.Module]) -> bool:
    """Returns True if a model, or a part of one, is of transformers."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    parts = (part for model in models for part in model.modules())
    return library is not None and any(isinstance(part, library.PreTrainedModel) for part in parts)
