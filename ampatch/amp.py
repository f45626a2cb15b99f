"""The public functions of ampatch: each checks its arguments, then hands over to the live session.

Owns no state. Everything is checked before anything is changed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ampatch import opt_levels
from ampatch.cast_lists import rules
from ampatch.cast_lists.lists import CastLists, Overlay, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Treatment
from ampatch.distributed import Ranks, is_sharded, replicating_wrappers
from ampatch.errors import (
    AmpError,
    AmpWarning,
    BannedFunctionError,
    CastListError,
    IntegrationError,
    KernelError,
    LossScaleError,
    OptionError,
    ScalerOptionError,
    ScalerUsageError,
    UsageError,
    did_you_mean,
)
from ampatch.interfaces.inference_copy import check_no_copy, convert
from ampatch.interfaces.mixed_precision import precise_within
from ampatch.native import calls, kernels
from ampatch.opt_levels import Properties
from ampatch.patching import adopted_model
from ampatch.patching.function_patches import Registration
from ampatch.patching.weight_cache import CastCounts
from ampatch.runtime import (
    close_session,
    decorate,
    difference,
    forget_replaced,
    open_session,
    register,
    replace_session,
    runtime,
)
from ampatch.scaling.clipping import clip_unscaled
from ampatch.scaling.loss_scaler import LossScaler, load_states, make_policy
from ampatch.scaling.optimizer_step import OptimizerLike, check_optimizer
from ampatch.session import Session
from ampatch.settings import LiveSettings, Settings
from ampatch.switch import WithoutCasts, off_in_graph
from ampatch.weights import conversion_plan
from ampatch.weights.optimizer_state import parameters_of

__all__ = [
    "AmpError",
    "AmpWarning",
    "BannedFunctionError",
    "CastCounts",
    "CastListError",
    "Handle",
    "IntegrationError",
    "KernelError",
    "LossScaleError",
    "LossScaler",
    "OptionError",
    "ScalerOptionError",
    "ScalerUsageError",
    "UsageError",
    "bfloat16_function",
    "cast_counts",
    "clear_cache",
    "clip_grad_norm_",
    "convert_model",
    "deinitialize",
    "disable_casts",
    "float_function",
    "frozen_weights",
    "get_loss_scale",
    "grads_are_unscaled",
    "half_function",
    "init",
    "initialize",
    "is_on",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "settings",
    "skipped_steps",
    "state_dict",
    "step_was_skipped",
    "unscale_",
]

logger = logging.getLogger("ampatch")

_F = TypeVar("_F")
_Model = TypeVar("_Model", bound=nn.Module)
_L = TypeVar("_L")
_Models = TypeVar("_Models", bound=nn.Module | Sequence[nn.Module])
_Optimizers = TypeVar("_Optimizers")


def __dir__() -> list[str]:
    return __all__  # what is imported for it is nothing to complete names with


# A type checker keeps the classes of what is handed in: what comes back are the very same objects.
@overload
def initialize(
    models: _Models,
    optimizers: None = ...,
    enabled: bool = ...,
    opt_level: str = ...,
    cast_model_type: torch.dtype | str | None = ...,
    patch_torch_functions: bool | None = ...,
    keep_batchnorm_fp32: bool | str | None = ...,
    master_weights: bool | None = ...,
    loss_scale: float | str | None = ...,
    cast_model_outputs: torch.dtype | str | None = ...,
    num_losses: int = ...,
    verbosity: int = ...,
    min_loss_scale: float | None = ...,
    max_loss_scale: float = ...,
    *,
    half_dtype: torch.dtype | str | None = ...,
    cast_lists: Overlay | None = ...,
    init_scale: float = ...,
    scale_factor: float = ...,
    growth_factor: float | None = ...,
    backoff_factor: float | None = ...,
    scale_window: int = ...,
    hysteresis: int = ...,
    exact_hooks: bool = ...,
    keep_fp32: Any = ...,
    patch_torch_functions_type: torch.dtype | str | None = ...,
    profile_casts: bool = ...,
) -> _Models: ...


@overload
def initialize(
    models: _Models,
    optimizers: _Optimizers,
    enabled: bool = ...,
    opt_level: str = ...,
    cast_model_type: torch.dtype | str | None = ...,
    patch_torch_functions: bool | None = ...,
    keep_batchnorm_fp32: bool | str | None = ...,
    master_weights: bool | None = ...,
    loss_scale: float | str | None = ...,
    cast_model_outputs: torch.dtype | str | None = ...,
    num_losses: int = ...,
    verbosity: int = ...,
    min_loss_scale: float | None = ...,
    max_loss_scale: float = ...,
    *,
    half_dtype: torch.dtype | str | None = ...,
    cast_lists: Overlay | None = ...,
    init_scale: float = ...,
    scale_factor: float = ...,
    growth_factor: float | None = ...,
    backoff_factor: float | None = ...,
    scale_window: int = ...,
    hysteresis: int = ...,
    exact_hooks: bool = ...,
    keep_fp32: Any = ...,
    patch_torch_functions_type: torch.dtype | str | None = ...,
    profile_casts: bool = ...,
) -> tuple[_Models, _Optimizers]: ...


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_dtype: torch.dtype | str | None = None,
    cast_lists: Overlay | None = None,
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    growth_factor: float | None = None,
    backoff_factor: float | None = None,
    scale_window: int = 2000,
    hysteresis: int = 1,
    exact_hooks: bool = False,
    keep_fp32: Any = None,
    patch_torch_functions_type: torch.dtype | str | None = None,
    profile_casts: bool = False,
) -> Any:
    """Sets up mixed precision for models and their optimizers.

    May be called again: further models join under the same settings. An argument that is a type takes the dtype or its
    name: "float16", "half" or "fp16"; "bfloat16" or "bf16"; "float32".

    Args:
        models: a module, or a list of modules, not wrapped for several processes or devices, nor compiled by
            TorchScript.
        optimizers: an optimizer, a list of them, or None. Anything with ``param_groups``, ``step`` and ``zero_grad``.
        enabled: False gives everything back untouched, and turns every other call into a no-op.
        opt_level: "O0" (float32), "O1" (functions cast by the lists), "O2" (half weights, float32 masters), "O3" (half
            weights), "O4" and "O5" (O1 and O2 in bfloat16).
        cast_model_type: the type of the weights, where the level converts them.
        patch_torch_functions: whether functions cast by the lists; None: as the level says.
        keep_batchnorm_fp32: whether batch norm stays in float32, where the level converts weights.
        master_weights: whether the optimizer updates float32 copies, where the level converts weights.
        loss_scale: a positive number, or "dynamic"; None: as the level says, and 1 for bfloat16.
        cast_model_outputs: the type of the model's outputs; None: float32 where the level converts weights, else as
            they are.
        num_losses: how many losses have a scale of their own.
        verbosity: 0 is silent; 1 logs skipped steps to the logger "ampatch".
        min_loss_scale: the floor of a dynamic scale; None: 2**-24.
        max_loss_scale: its ceiling.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 where the parameters are on a GPU, else
            bfloat16.
        cast_lists: a YAML file, a list of them, or a mapping of the same form, laid over the shipped lists.
        init_scale: where a dynamic scale starts.
        scale_factor: by which it grows and backs off; sets the next two.
        growth_factor: what it is multiplied by when it grows; None: ``scale_factor``.
        backoff_factor: what it is multiplied by when it backs off; None: 1 / ``scale_factor``.
        scale_window: clean steps before it grows.
        hysteresis: overflows before it backs off.
        exact_hooks: that a skipped step fires none of the optimizer's step hooks, at the price of waiting for the
            device: optimizers with ``fused=True`` skip in their own kernel otherwise.
        keep_fp32: submodules that stay in float32, where the level makes weights half: names, patterns (``"*.norm"``)
            or classes, one or a list.
        patch_torch_functions_type: the name that ROCm's Apex had for ``half_dtype``.
        profile_casts: whether each cast has a label in ``torch.profiler``, such as "ampatch: cast weight of
            torch.nn.functional.linear to float16". Calls of patched functions run in Python then, as labels need.

    Returns:
        The same objects in the shape they were given: a model; or a model and an optimizer; lists where lists were
        given.

    Raises:
        OptionError: an argument has a value that is not allowed, or that contradicts another.
        CastListError: the cast lists have faults.
        UsageError: other settings are live, an optimizer was handed in before, or a parameter is in two optimizers
            that would each have a float32 master of it.
        KernelError: AMPATCH_KERNELS or AMPATCH_CALLS asks for what was not built.
    """
    if not _flag("enabled", enabled):
        _disable()
        return models if optimizers is None else (models, optimizers)

    kernels.prepare()
    calls.prepare()
    model_list = [adopted_model.check_model(model) for model in _as_list(models)]
    for model in model_list:
        check_no_copy(model)
    optimizer_list = [] if optimizers is None else [check_optimizer(optimizer) for optimizer in _as_list(optimizers)]
    half = _half_dtype(half_dtype, patch_torch_functions_type, "patch_torch_functions_type", opt_level, model_list)
    overrides = opt_levels.Overrides(
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    )
    properties = opt_levels.resolve(opt_level, half, overrides)
    if cast_lists is not None and not properties.patch_torch_functions:
        raise OptionError(
            f"cast_lists contradicts opt_level={opt_level!r}, which does not patch torch's functions. Leave cast_lists "
            "out, or type patch_torch_functions=True as well."
        )
    kept = conversion_plan.check_keep_fp32(keep_fp32)
    if kept and properties.cast_model_type not in opt_levels.HALVES:
        raise OptionError(
            f"keep_fp32 contradicts opt_level={opt_level!r}, which does not convert the model's weights to half. Leave "
            "keep_fp32 out, or use opt_level='O2'."
        )
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise OptionError(f"num_losses is {num_losses!r}; expected a whole number of at least 1.")
    settings = Settings(
        properties,
        _lists(cast_lists),
        make_policy(
            properties.loss_scale,
            init_scale=init_scale,
            scale_factor=scale_factor,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            scale_window=scale_window,
            hysteresis=hysteresis,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        ),
        num_losses,
        keep_fp32=kept,
        cast_model_outputs=opt_levels.check_output_type(cast_model_outputs),
        exact_hooks=_flag("exact_hooks", exact_hooks),
        profile_casts=_flag("profile_casts", profile_casts),
    )
    live, outgoing = _joined_and_replaced(settings)
    _check_optimizers(optimizer_list, model_list, live, outgoing)
    if properties.cast_model_type in opt_levels.HALVES:
        _check_whole(optimizer_list, model_list, properties)
    conversion_plan.check_matches([*model_list, *(live.models if live is not None else ())], kept)

    device_types = set().union(*(adopted_model.device_types(model) for model in model_list)) or _all_device_types()
    opened = open_session(settings, device_types) if live is None else live
    opened.verbose = bool(verbosity)
    try:
        opened.adopt(model_list, optimizer_list)
    except BaseException:
        if live is None:
            close_session(opened)
        raise
    runtime.disabled = False
    if verbosity:
        logger.info("amp is on: %s", properties)
    return models if optimizers is None else (models, optimizers)


def deinitialize() -> None:
    """Undoes everything: torch, models and optimizers are as they were. Does nothing where amp is not set up.

    Warns:
        AmpWarning: gradients were still scaled, after ``delay_unscale=True``, and were set to None; or somebody else
            replaced what amp had patched, and was left in place.
    """
    runtime.disabled = False
    forget_replaced()
    live = runtime.live
    if live is not None:
        close_session(live)


class Handle:
    """What `init` returns: undoes what it did, by `deactivate` or at the end of a ``with`` block."""

    def __init__(self, opened: Session | None) -> None:
        self._session = opened

    def deactivate(self) -> None:
        """Takes the patches out; a second call does nothing."""
        if self._session is not None:
            close_session(self._session)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.deactivate()

    def __repr__(self) -> str:
        kind, session = type(self).__name__, getattr(self, "_session", None)
        if session is None:
            return f"{kind}(does nothing: enabled=False)"
        properties = session.settings.properties
        state = "on" if session is runtime.live else "deactivated"
        return f"{kind}({state}: opt_level={properties.opt_level!r}, half_dtype={properties.half_dtype})"


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    half_dtype: torch.dtype | str | None = None,
    cast_lists: Overlay | None = None,
    patch_type: torch.dtype | str | None = None,
    profile_casts: bool = False,
) -> Handle:
    """Patches torch's functions without adopting a model.

    An optimizer is adopted by the first `scale_loss` that it is given to. A type may be given by its name, as to
    `initialize`.

    Args:
        enabled: False does nothing.
        loss_scale: a positive number, or "dynamic".
        enable_caching: whether cast weights are kept for the iteration.
        verbose: whether skipped steps are logged.
        allow_banned: whether banned functions run in float32 instead of raising.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 where there is a GPU, else bfloat16.
        cast_lists: as for `initialize`.
        patch_type: the name that ROCm's Apex had for ``half_dtype``.
        profile_casts: as for `initialize`.

    Returns:
        A handle that undoes it.

    Raises:
        OptionError: an argument has a value that is not allowed.
        CastListError: the cast lists have faults.
        UsageError: amp is set up already.
        KernelError: AMPATCH_KERNELS or AMPATCH_CALLS asks for what was not built.
    """
    if not _flag("enabled", enabled):
        _disable()
        return Handle(None)
    kernels.prepare()
    calls.prepare()
    half = _half_dtype(half_dtype, patch_type, "patch_type", "O1", [])
    properties = opt_levels.resolve("O1", half, opt_levels.Overrides(loss_scale=loss_scale))
    settings = Settings(
        properties,
        _lists(cast_lists),
        make_policy(properties.loss_scale),
        allow_banned=bool(allow_banned),
        enable_caching=bool(enable_caching),
        adopts_on_use=True,
        profile_casts=_flag("profile_casts", profile_casts),
    )
    opened = open_session(settings, _all_device_types())
    opened.verbose = bool(verbose)
    runtime.disabled = False
    return Handle(opened)


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
        loss: floating, usually 0-dimensional; or several, in nested lists, tuples and dicts.
        optimizers: one, or a list: those whose parameters receive gradients in the block.
        loss_id: which of ``num_losses`` scales to use.
        model: accepted because Apex had it; not needed.
        delay_unscale: leaves the gradients scaled, for a later block that adds to them and unscales.
        delay_overflow_check: lets a later block decide about the scale.

    Returns:
        A context manager, to be entered once, that gives ``loss.float() * scale``, of the shape of ``loss``; of several
        the same lists, tuples and dicts. With amp disabled the loss itself.

    Raises:
        UsageError: before ``amp.initialize``; gradients of two scales would be added up; or what it returns is entered
            a second time.
        OptionError: ``loss_id`` is out of range, or an argument is of the wrong kind.
    """
    if runtime.disabled:
        return contextlib.nullcontext(loss)
    live = runtime.live or _require_session("amp.scale_loss")
    optimizer_list = _as_list(optimizers)
    if runtime.replaced is not None:
        for optimizer in optimizer_list:
            runtime.replaced.check(optimizer, live)
    if not optimizer_list:
        raise OptionError("amp.scale_loss got no optimizer, so that gradients would stay scaled; expected one or more.")
    return live.scale_loss(
        loss, optimizer_list, loss_id, delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check
    )


@overload
def disable_casts(function: None = None) -> WithoutCasts: ...
@overload
def disable_casts(function: _F) -> _F: ...
def disable_casts(function: Any = None) -> Any:
    """Turns casts off in this thread: as a context manager, or as a decorator, with parentheses or without.

    Nests; an exception restores. What it returns can be entered again. Of a generator or a coroutine that it decorates
    every step runs without casts, and what runs in between does not. It holds for amp that is set up later, too.

    Args:
        function: what to decorate.

    Raises:
        OptionError: it decorates something else, such as a class.
    """
    if function is not None:
        return WithoutCasts()(function)
    return off_in_graph() if is_dynamo_compiling() else WithoutCasts()


def convert_model(
    model: _Model,
    half_dtype: torch.dtype | str | None = None,
    excluded: Any = (),
    cast_lists: Overlay | None = None,
    *,
    keep_float32: bool = True,
) -> _Model:
    """Makes a copy of a model for inference: half weights, and casts where the lists say, while its forward runs.

    Nothing else in the process is patched, the model stays as it is, and `initialize` is not needed. The copy is in
    evaluation mode, and computes what the model does at O1, bit for bit. Run it where no gradients are recorded: in
    ``torch.inference_mode()`` or ``torch.no_grad()``.

    A weight becomes half if only whitelisted functions read it. Of torch's own layers that is known at once, of others
    after the first forward. The remaining weights (of embeddings, norms, or shared with one of these) stay float32.

    Args:
        model: float32, and not wrapped or compiled.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``, or its name; None: float16 where the parameters are on a
            GPU, else bfloat16.
        excluded: what is to compute in float32. Submodules, their names, patterns (``"*.head"``) or classes: everything
            in there is left uncast, and its inputs are cast to float32. Functions (``torch.softmax``, or ``"softmax"``
            for all its spellings, or ``"torch.nn.functional.softmax"`` for one). One of them, or a list.
        cast_lists: as for `initialize`.
        keep_float32: whether the copy keeps, in the memory of the CPU, the float32 values of its half weights: 4 bytes
            a weight. Without them its state dict is float32 too, of rounded values, and a half weight that turns out to
            be needed in float32 is a `UsageError`.

    Returns:
        The copy, of the same class. Its state dict is float32, and that of the model.

    Raises:
        OptionError: an argument has a value that is not allowed, or the model cannot be copied.
        CastListError: the cast lists have faults.
    """
    kept = _flag("keep_float32", keep_float32)
    half = _half_dtype(half_dtype, None, "", "O1", [adopted_model.check_module(model)])
    return convert(model, half, () if excluded is None else excluded, _lists(cast_lists), kept)  # type: ignore[return-value]


@contextlib.contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Keeps the casts of a model's weights from call to call until the block ends, for calls without gradients.

    ::

        with torch.inference_mode(), amp.frozen_weights(model):
            for batch in loader:
                predictions = model(batch)

    Each weight is then cast once, and not once a call. Calls that record gradients are not concerned. A weight that is
    changed all the same is cast anew at its next use, unless it was changed through a view of its memory (numpy,
    DLPack, a storage), which nothing can see: `clear_cache` after that. Blocks nest, for the same model and for
    several; threads share what is kept. All of it is dropped when the block ends, and by `deinitialize`.

    Where no functions are patched, or amp is off, there is nothing to keep. What torch.compile has compiled casts for
    itself, and keeps nothing either. As a decorator it opens and closes with every call.

    Args:
        model: one that amp has, a part of it, or a wrapper around it.

    Raises:
        OptionError: it is no module.
        UsageError: it was never handed to ``amp.initialize``.
    """
    checked = adopted_model.check_module(model)
    live = runtime.live
    with contextlib.nullcontext() if live is None else live.frozen_weights(checked):
        yield


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterates over the parameters that an optimizer updates: clip the gradients of these.

    Where a level has float32 masters, these are the masters.

    Raises:
        OptionError: it is no optimizer.
    """
    live = runtime.live
    checked = check_optimizer(optimizer)
    if live is None or not live.has_adopted(optimizer):
        return parameters_of(checked)
    return live.master_params(checked)


def clip_grad_norm_(optimizer: Any, max_norm: float) -> Tensor:
    """Clips the gradients of an optimizer's parameters by the norm of all of them taken together.

    As ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)``, in fewer passes over the gradients::

        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        norm = amp.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()

    After a block with ``delay_unscale=True`` this ends what the block left: it looks for overflow and takes the norm in
    one pass, lets the scale react, and unscales and clips in a second one. Where the optimizer is one of torch's with
    ``fused=True``, has its state, and updates the model's own parameters, its kernel does the latter in the step, and
    the gradients stay scaled until then. Gradients of several optimizers that share a block are all unscaled when the
    first of them is clipped, in passes of their own. Gradients that overflowed are left unclipped.

    Args:
        optimizer: one whose gradients are there.
        max_norm: the most that their 2-norm may be; ``math.inf`` only measures it.

    Returns:
        The 2-norm of the unscaled gradients before clipping: 0-dimensional float32, on their device. Not finite if they
        overflowed; the next step is skipped then.

    Raises:
        OptionError: ``optimizer`` is none, or ``max_norm`` is no number from 0 on.
        UsageError: inside a block; another optimizer has left gradients of the same parameters scaled; they are yet to
            be reduced over ranks, and ``max_norm`` is not infinite; or they are of a ``FullyShardedDataParallel``
            that amp does not know.
    """
    checked = check_optimizer(optimizer)
    most = _max_norm(max_norm)
    live = runtime.live
    if live is not None and live.has_adopted(optimizer):
        return live.clip_grad_norm_(checked, most)
    return clip_unscaled(parameters_of(checked), most, Ranks())


def unscale_(optimizer: Any) -> None:
    """Unscales the gradients that ``amp.scale_loss(..., delay_unscale=True)`` has left scaled, here and now.

    For loops of one's own that look at gradients, or change them, between a block and the step::

        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        amp.unscale_(optimizer)
        optimizer.step()

    It looks for overflow, and lets the scale react. Gradients of other optimizers of that block are unscaled too. Does
    nothing where gradients are unscaled already.

    Raises:
        OptionError: it is no optimizer.
        UsageError: it was never handed to ``amp.initialize``; inside a block; or another optimizer has left gradients
            of the same parameters scaled.
    """
    checked = check_optimizer(optimizer)
    if not runtime.disabled:
        _session_of(checked, "amp.unscale_").unscale_(checked)


def grads_are_unscaled(optimizer: Any) -> bool:
    """Returns whether no gradient of an optimizer is scaled, so that its norm is what it would be without amp.

    Raises:
        OptionError: it is no optimizer.
        UsageError: it was never handed to ``amp.initialize``.
    """
    checked = check_optimizer(optimizer)
    return runtime.disabled or _session_of(checked, "amp.grads_are_unscaled").adopted(checked).gradients.are_unscaled()


def state_dict() -> dict[str, dict[str, float | int]]:
    """Returns the states of the loss scalers as plain numbers, under "loss_scaler0" and on. Waits for the device."""
    if runtime.disabled:
        return {}
    scalers = _require_session("amp.state_dict").scalers
    return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(scalers)}


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Takes over what `state_dict` gave, here or in Apex, or what ``torch.amp.GradScaler.state_dict()`` did.

    Settings stay those of `initialize`: a ``GradScaler``'s factors and interval are not loaded, and a static scale
    keeps its value, since one that was dynamic would overflow unnoticed where nothing is checked. A dynamic scale stays
    where the saved one was static; else it comes within ``min_loss_scale`` and ``max_loss_scale``, as it would after
    the next step.

    Args:
        state_dict: states of scalers under "loss_scaler0" and on; or the state of a ``GradScaler``, which becomes that
            of "loss_scaler0".

    Raises:
        OptionError: unexpected keys, or values that no scaler can have; nothing was changed.

    Warns:
        AmpWarning: the names of the scalers differ; those that both have are loaded. Or a ``GradScaler`` had other
            settings.
    """
    if runtime.disabled:
        return
    live = _require_session("amp.load_state_dict")
    load_states(live.scalers, state_dict, logs=live.verbose)


def get_loss_scale(loss_id: int = 0) -> float:
    """Returns the present scale of a loss; 1 with amp disabled. Waits for the device.

    Raises:
        OptionError: ``loss_id`` is out of range.
    """
    if runtime.disabled:
        return 1.0
    return _require_session("amp.get_loss_scale").scaler(loss_id).state.loss_scale


def step_was_skipped(optimizer: Any) -> bool:
    """Returns whether the last ``optimizer.step()`` was skipped because of an overflow.

    Raises:
        OptionError: it is no optimizer.
        UsageError: it was never handed to ``amp.initialize``.
    """
    if runtime.disabled:
        return False
    checked = check_optimizer(optimizer)
    return _session_of(checked, "amp.step_was_skipped").adopted(checked).step_was_skipped


def skipped_steps(optimizer: Any) -> int:
    """Returns how many steps of an optimizer were skipped since it was handed to ``amp.initialize``.

    Raises:
        OptionError: it is no optimizer.
        UsageError: it was never handed to ``amp.initialize``.
    """
    if runtime.disabled:
        return 0
    checked = check_optimizer(optimizer)
    return _session_of(checked, "amp.skipped_steps").adopted(checked).skipped_steps


def is_on() -> bool:
    """Tells whether amp is set up: after `initialize` or `init`, and until `deinitialize`.

    Returns:
        False before that and after it, and where the last call had ``enabled=False`` and nothing was set up. True
        inside `disable_casts`, which turns casts off in one thread, and neither loss scales nor masters:
        ``amp.settings()["casts_here"]`` tells of those.
    """
    return runtime.live is not None


def settings() -> dict[str, Any]:
    """Returns what is live as plain data, for logs and checkpoints: text, numbers, True, False, None, lists of them.

    Waits for the device, to read the loss scales.

    Returns:
        A dict. With amp off it has two keys: "is_on", False, and "disabled", whether ``enabled=False`` was given. With
        amp on, the arguments of `initialize` by their names, as they were resolved: types by name ("float16"),
        "cast_lists" as the files laid over the shipped lists
        ("a mapping" for one). Beside them "is_on", "disabled", "set_up_by",
        "loss_scales" (the present ones, by ``loss_id``), "device_types" (of the tensors that are cast), "num_models"
        and "num_optimizers" (those still alive), and "casts_here" (whether patched functions cast in this thread, which
        they do not inside `disable_casts`).
    """
    live = runtime.live
    if live is None:
        return LiveSettings(is_on=False, disabled=runtime.disabled)
    return LiveSettings(
        is_on=True,
        disabled=False,
        **live.settings.as_plain_data(),
        loss_scales=[scaler.state.loss_scale for scaler in live.scalers],
        device_types=sorted(live.device_types),
        num_models=len(live.models),
        num_optimizers=len(live.optimizers),
        casts_here=live.patches_functions and not live.switch.is_off(),
    )


def clear_cache() -> None:
    """Drops the cast weights.

    Needed only after a change that no check can see: through a view of a weight's memory (numpy, DLPack, a storage),
    between two forwards with gradients and no step between them, or inside `frozen_weights`.
    """
    live = runtime.live
    if live is not None:
        live.cache.clear()


def cast_counts() -> CastCounts:
    """Returns how many tensors were cast since amp was set up, and how often a weight was found cast already.

    What compiled code casts is not counted.
    """
    live = runtime.live
    return CastCounts(0, 0) if live is None else live.cache.counts()


def register_half_function(module: Any, name: str) -> None:
    """Has a function cast its floating arguments to the half type, from the next ``initialize`` on.

    Args:
        module: the module or class that owns it, torch's or not.
        name: its name there.

    Raises:
        ValueError: there is no function of that name.
        UsageError: amp is set up already.
    """
    _register(module, name, Treatment.WHITELIST)


def register_bfloat16_function(module: Any, name: str) -> None:
    """As `register_half_function`, but to bfloat16 whatever the half type is."""
    _register(module, name, Treatment.WHITELIST, torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """Has a function cast its half arguments to float32; otherwise as `register_half_function`."""
    _register(module, name, Treatment.BLACKLIST)


def register_promote_function(module: Any, name: str) -> None:
    """Has a function cast mixed floating arguments to the widest type; otherwise as `register_half_function`."""
    _register(module, name, Treatment.PROMOTE)


def half_function(function: _F) -> _F:
    """Decorator: floating arguments are cast to the half type while amp patches functions; inert otherwise."""
    return decorate(function, "whitelist")  # type: ignore[no-any-return]


def bfloat16_function(function: _F) -> _F:
    """Decorator: floating arguments are cast to bfloat16, whatever the half type is; otherwise as `half_function`."""
    return decorate(function, "bfloat16")  # type: ignore[no-any-return]


def float_function(function: _F) -> _F:
    """Decorator: half arguments are cast to float32; otherwise as `half_function`."""
    return decorate(function, "blacklist")  # type: ignore[no-any-return]


def promote_function(function: _F) -> _F:
    """Decorator: mixed floating arguments are cast to the widest type; otherwise as `half_function`."""
    return decorate(function, "promote")  # type: ignore[no-any-return]


def _register(owner: Any, name: Any, treatment: Treatment, dtype: torch.dtype | None = None) -> None:
    if runtime.live is not None and not runtime.may_replace:
        raise UsageError("functions are registered before amp.initialize; type amp.deinitialize() first.")
    if isinstance(owner, str):
        raise OptionError(
            f"found the text {owner!r}; expected the module or class itself: import it, and leave the quotes out."
        )
    if not isinstance(name, str):
        given = getattr(name, "__name__", "name")
        raise OptionError(f"found {name!r}; expected the function's name, such as {given!r}.")
    found = getattr(owner, name, None)
    where = getattr(owner, "__name__", repr(owner))
    if found is None:
        raise OptionError(f"{where} has no {name!r} to register.{did_you_mean(name, dir(owner))}")
    if not callable(found):
        raise OptionError(f"{where}.{name} is {type(found).__name__!r}; expected a function.")
    unfit = rules.unlistable_reason(Path(where, name), owner, found)
    if unfit:
        raise OptionError(unfit)
    register(Registration(owner, name, treatment, dtype))


def _require_session(what: str) -> Session:
    live = runtime.live
    if live is None:
        raise UsageError(
            f"{what} was called before amp.initialize. Type model, optimizer = amp.initialize(model, optimizer) first."
        )
    return live


def _session_of(optimizer: OptimizerLike, what: str) -> Session:
    """Returns the live session; raises if it is not the one that has the optimizer."""
    live = _require_session(what)
    if runtime.replaced is not None:
        runtime.replaced.check(optimizer, live)
    return live


def _disable() -> None:
    """Turns amp off, as ``enabled=False`` asks, unless there is a session that is not to be replaced."""
    if runtime.may_replace:
        replace_session("enabled=False")
    runtime.disabled = runtime.live is None


def _joined_and_replaced(settings: Settings) -> tuple[Session | None, Session | None]:
    """Returns the live session if these settings join it, and the live one if they replace it."""
    live = runtime.live
    other = "" if live is None else difference(live, settings)
    if other and not runtime.may_replace:
        raise UsageError(
            f"amp is set up already with other settings: {other}. Type amp.deinitialize() first, or give the same "
            "arguments."
        )
    return (None, live) if other else (live, None)


def _max_norm(value: Any) -> float:
    try:
        most = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        most = math.nan
    if not most >= 0:
        raise OptionError(f"max_norm is {value!r}; expected a number from 0 on, such as 1.0.")
    return most


def _flag(name: str, value: object) -> bool:
    """Any truth value; but of strings only those that a script makes of one, since "no" counts as true in Python."""
    return bool(opt_levels.check_flag(name, value) if isinstance(value, str) else value)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _half_dtype(
    given: torch.dtype | str | None,
    alias: torch.dtype | str | None,
    alias_name: str,
    opt_level: str,
    models: Iterable[nn.Module],
) -> torch.dtype:
    """Returns the half type asked for; else the live session's; else what suits the device."""
    checked = None if given is None else opt_levels.check_half_dtype(given)
    if alias is not None:
        also = opt_levels.check_half_dtype(alias, alias_name)
        if checked is not None and checked is not also:
            raise OptionError(f"half_dtype={checked} and {alias_name}={also} say different things; give one of them.")
        checked = also
    if checked is not None:
        level = opt_levels.LEVELS[opt_levels.check_opt_level(opt_level)]
        if level.half_dtype not in (None, checked):
            raise OptionError(
                f"half_dtype={checked} contradicts opt_level={opt_level!r}, which is {level.half_dtype}. Leave "
                f"half_dtype out, or use opt_level={'O1' if opt_level == 'O4' else 'O2'!r}."
            )
        return checked
    live = runtime.live
    if live is not None and not runtime.may_replace:
        return live.settings.properties.half_dtype
    types = set().union(*(adopted_model.device_types(model) for model in models)) or _all_device_types()
    return torch.bfloat16 if types == {"cpu"} else torch.float16


def _all_device_types() -> set[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}


def _lists(overlay: Overlay | None) -> CastLists:
    return shipped() if overlay is None else shipped().overlaid(overlay)


def _check_whole(optimizers: list[Any], models: list[nn.Module], properties: Properties) -> None:
    """Refuses to convert weights of which a process has pieces only, and to give masters to what is in pieces."""
    instead = "Use opt_level='O1' (or 'O4')"
    parameters = {id(each): each for model in models for each in model.parameters()}
    if is_sharded(itertools.chain(parameters.values(), *map(parameters_of, optimizers))):
        raise OptionError(
            f"the model's parameters are sharded over ranks, and opt_level={properties.opt_level!r} would convert "
            f"them under the hands of FSDP or tensor parallelism. {instead}, and have FSDP itself gather them in half "
            "where memory is scarce (MixedPrecisionPolicy)."
        )
    if any(id(each) in parameters for wrapper in replicating_wrappers() for each in wrapper.parameters()):
        raise OptionError(
            f"the model is in a DistributedDataParallel already, which would no longer reduce the gradients of weights "
            f"that opt_level={properties.opt_level!r} converts. Call amp.initialize first, then wrap the model."
        )
    for optimizer in optimizers:
        if properties.master_weights and precise_within(optimizer) is not None:
            raise OptionError(
                f"the {type(optimizer).__name__} has masters of its own, by a MixedPrecision, and opt_level="
                f"{properties.opt_level!r} would give it others. Leave MixedPrecision out, or type "
                "master_weights=False."
            )
        if properties.master_weights and hasattr(optimizer, "consolidate_state_dict"):
            raise OptionError(
                f"the {type(optimizer).__name__} hands pieces of its parameters to an optimizer of its own, which "
                f"would not update float32 masters. {instead} with it."
            )


def _check_optimizers(
    optimizers: list[Any], models: list[nn.Module], live: Session | None, outgoing: Session | None
) -> None:
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for session in (live, outgoing):  # an optimizer of the outgoing one updates its masters, still
        known |= session.parameter_ids() if session is not None else set()
    for index, optimizer in enumerate(optimizers):
        if any(optimizer is other for other in optimizers[:index]) or (
            live is not None and live.has_adopted(optimizer)
        ):
            raise UsageError(
                f"this {type(optimizer).__name__} was handed to amp.initialize before. Hand it in once, or type "
                f"amp.deinitialize() first."
            )
        parameters = list(parameters_of(optimizer))
        if parameters and not any(id(parameter) in known for parameter in parameters):
            raise OptionError(
                f"the {type(optimizer).__name__} updates {len(parameters)} parameters, and none of them is the "
                f"model's. Was it made for another model, or before the model was rebuilt? Make it after: optimizer = "
                f"torch.optim.SGD(model.parameters(), lr=0.1)."
            )
