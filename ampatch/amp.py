"""The public functions of ampatch: each checks its arguments, then hands over to the live session.

Must hold no state, and must check all arguments before it changes anything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ampatch import opt_levels, policy, set_up
from ampatch.cast_lists import rules
from ampatch.cast_lists.lists import Overlay, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Treatment
from ampatch.distributed import Ranks
from ampatch.errors import (
    AmpError,
    AmpWarning,
    BannedFunctionError,
    CastListError,
    GradientOverflowError,
    IntegrationError,
    KernelError,
    LossScaleError,
    OptionError,
    ScalerOptionError,
    ScalerUsageError,
    UnknownOptionError,
    UsageError,
    did_you_mean,
)
from ampatch.half_types import HALVES
from ampatch.interfaces.inference_copy import check_no_copy, convert
from ampatch.native import calls, kernels
from ampatch.native.host_copy import stacked
from ampatch.opt_levels import as_flag
from ampatch.patching import adopted_model
from ampatch.patching.function_patches import Registration
from ampatch.patching.weight_cache import CastCounts
from ampatch.runtime import (
    close_session,
    decorate,
    register,
    runtime,
    turn_off,
)
from ampatch.scaling.clipping import clip_unscaled
from ampatch.scaling.loss_scaler import LossScaler, load_states, make_policy
from ampatch.scaling.optimizer_step import OptimizerLike, check_optimizer
from ampatch.scaling.overflows import (
    NonFiniteGradient,
    OnOverflow,
    Overflow,
    ScaleChange,
    check_on_overflow,
    with_requested_trace,
)
from ampatch.session import Session
from ampatch.settings import LiveSettings, Settings
from ampatch.switch import OFF, WithoutCasts, in_graph
from ampatch.torch_private.modules import COMPILED_ORIGINAL
from ampatch.weights import conversion_plan
from ampatch.weights.optimizer_state import gradients_of, parameters_of
from ampatch.weights.ruled_parts import check_entries

if TYPE_CHECKING:
    from ampatch.diagnostics.compare.comparison import Side
    from ampatch.diagnostics.compare.result import Comparison
    from ampatch.diagnostics.explain.result import Explanation
    from ampatch.diagnostics.preflight.result import LevelVerdict, Preflight
    from ampatch.diagnostics.replay.result import Replay
    from ampatch.diagnostics.report.report import Report
    from ampatch.diagnostics.tune.result import Tuning

__all__ = [
    "AmpError",
    "AmpWarning",
    "BannedFunctionError",
    "CastCounts",
    "CastListError",
    "Comparison",
    "Explanation",
    "GradientOverflowError",
    "Handle",
    "IntegrationError",
    "KernelError",
    "LevelVerdict",
    "LossScaleError",
    "LossScaler",
    "NonFiniteGradient",
    "OptionError",
    "Overflow",
    "Preflight",
    "Replay",
    "Report",
    "ScaleChange",
    "ScalerOptionError",
    "ScalerUsageError",
    "Tuning",
    "UnknownOptionError",
    "UsageError",
    "bfloat16_function",
    "cast_counts",
    "clear_cache",
    "clip_grad_norm_",
    "compare",
    "convert_model",
    "deinitialize",
    "disable_casts",
    "explain",
    "float_function",
    "frozen_weights",
    "get_loss_scale",
    "gradients_are_finite",
    "grads_are_unscaled",
    "half_function",
    "init",
    "initialize",
    "is_on",
    "load_state_dict",
    "master_params",
    "preflight",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "replay",
    "report",
    "scale_loss",
    "settings",
    "skipped_steps",
    "state_dict",
    "stats",
    "step_was_skipped",
    "tune",
    "unscale_",
]

logger = logging.getLogger("ampatch")

_F = TypeVar("_F")
_P = ParamSpec("_P")
_Model = TypeVar("_Model", bound=nn.Module)
_L = TypeVar("_L")
_Models = TypeVar("_Models", bound=nn.Module | Sequence[nn.Module])
_Optimizers = TypeVar("_Optimizers")


def __dir__() -> list[str]:
    return __all__  # completion offers public names only


#: Classes of `ampatch.diagnostics`, which is imported only by those who use it.
_IMPORTED_ON_USE = {
    "Comparison": "compare.result",
    "Explanation": "explain.result",
    "LevelVerdict": "preflight.result",
    "Preflight": "preflight.result",
    "Replay": "replay.result",
    "Report": "report.report",
    "Tuning": "tune.result",
}


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_ON_USE:
        return getattr(importlib.import_module(f"ampatch.diagnostics.{_IMPORTED_ON_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _checks_names(function: _F) -> _F:
    """Decorates a function: a call with an unknown name raises `OptionError`, which says the name that was meant."""
    known: Any = inspect.signature(function).parameters  # type: ignore[arg-type]

    @functools.wraps(function)  # type: ignore[arg-type]
    def checked(*args: Any, **kwargs: Any) -> Any:
        opt_levels.check_names(kwargs, known, f"amp.{checked.__name__} got")
        return function(*args, **kwargs)  # type: ignore[operator]

    return checked  # type: ignore[return-value]


class _KeepsClasses(Protocol[_P]):
    """A type for `initialize`: type checkers see that the returned objects are of the classes that were passed in."""

    @overload
    def __call__(self, models: _Models, optimizers: None = ..., *args: _P.args, **kwargs: _P.kwargs) -> _Models: ...
    @overload
    def __call__(
        self, models: _Models, optimizers: _Optimizers, *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[_Models, _Optimizers]: ...


def _keeps_classes(function: Callable[Concatenate[Any, Any, _P], Any]) -> _KeepsClasses[_P]:
    return function  # type: ignore[return-value]


@_keeps_classes
@_checks_names
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
    float32_outputs: Any = None,
    cast_buffers: Any = False,
    patch_torch_functions_type: torch.dtype | str | None = None,
    profile_casts: bool = False,
    on_overflow: OnOverflow = "explain",
    check_finite: bool = False,
    scaler: str | None = None,
    fused_linear: bool | None = None,
) -> Any:
    """Sets up mixed precision for models and their optimizers.

    Further calls with the same settings add models and optimizers. A dtype may be given by its name: "float16",
    "half" or "fp16"; "bfloat16" or "bf16"; "float32".

    Args:
        models: a module, or a list of modules. Not wrapped for several ranks or devices, not compiled by TorchScript.
        optimizers: an optimizer, a list of optimizers, or None. An optimizer is any object with ``param_groups``,
            ``step`` and ``zero_grad``.
        enabled: False returns everything unchanged, and makes every other call a no-op.
        opt_level: "O0" (float32), "O1" (functions cast by the lists), "O2" (half weights, float32 masters), "O3" (half
            weights), "O4" and "O5" (O1 and O2 in bfloat16).
        cast_model_type: dtype of the weights, at levels that convert them.
        patch_torch_functions: whether torch's functions cast by the lists; None: the level's default.
        keep_batchnorm_fp32: whether batch norm stays float32, at levels that convert weights.
        master_weights: whether the optimizer updates float32 masters, at levels that convert weights.
        loss_scale: a positive number, or "dynamic"; None: the level's default, and 1 for bfloat16.
        cast_model_outputs: dtype of the model's outputs; None: float32 at levels that convert weights, else unchanged.
        num_losses: number of losses, each with its own scale.
        verbosity: 0 is silent; 1 logs skipped steps to the logger "ampatch".
        min_loss_scale: the least value of a dynamic scale; None: 2**-24.
        max_loss_scale: the greatest value of a dynamic scale.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: the half type that parameters have; if none has one,
            float16 if the parameters are on a GPU, else bfloat16.
        cast_lists: a YAML file, a list of files, or a mapping of the same form; overrides entries of the shipped lists.
            Under ``modules`` it gives submodules lists of their own, or has them compute in float32.
        init_scale: first value of a dynamic scale.
        scale_factor: factor by which it grows and backs off; sets the next two.
        growth_factor: factor by which it grows; None: ``scale_factor``.
        backoff_factor: factor by which it backs off; None: 1 / ``scale_factor``.
        scale_window: number of steps without overflow before it grows.
        hysteresis: number of overflows before it backs off.
        exact_hooks: whether a skipped step fires none of the optimizer's step hooks. True syncs with the device before
            every step. With False, optimizers with ``fused=True`` skip in their own kernel, and their hooks fire.
        keep_fp32: submodules that stay float32: a name, a pattern (``"*.norm"``) or a class, or a list of these. Their
            forward passes get half inputs in float32, and cast nothing inside. At levels that make weights half, theirs
            stay float32, and their outputs are cast to half.
        float32_outputs: submodules that stay float32, as those of ``keep_fp32`` do, and whose outputs stay float32 at
            every level: a head whose logits are to be float32. No layer with half weights may follow them.
        cast_buffers: buffers that become half with the weights, at levels that make these half. False: none. True: all
            of those that are floating-point. Or their names, as in ``named_buffers()``, or patterns
            (``"*.inv_freq"``), one or a list.
        patch_torch_functions_type: the name of ``half_dtype`` in ROCm's Apex.
        profile_casts: whether each cast has a label in ``torch.profiler``, such as "ampatch: cast weight of
            torch.nn.functional.linear to float16". Calls of patched functions then run in Python, not in C++.
        on_overflow: how a skipped step is reported. The step is skipped first: weights, masters and optimizer state are
            as they were. "log" writes a line to the log, at verbosity 1. "explain" does so too. After a skip for which
            the search of the loss scale does not account, it notes the next steps, and logs the trace of one that is
            skipped: the loss is inf or NaN, the scale is static, or it is the third in a row (at the start the eighth).
            "raise" raises `GradientOverflowError` from ``optimizer.step()``. A function is called with the `Overflow`,
            once for each optimizer that skips. If it raises, so does ``optimizer.step()``. "trace" runs the forward
            passes of a skipped step again, and logs ``str(overflow)`` at any verbosity. The text names the function
            that first produced inf or NaN. What a second run cannot tell is looked for in the next steps, which take
            several times as long. ("trace", function) and ("trace", "raise") put the trace into the overflow. At the
            floor of the scale `LossScaleError` is raised instead, with the overflow as its attribute ``overflow``. All
            values but "log" and "explain" read the overflow flag before every step, as ``exact_hooks`` does. That syncs
            with the device, and prevents skipping and unscaling in the optimizer's own kernel.
        check_finite: whether each step looks for inf and NaN in its gradients, and is skipped if there are any, under a
            static scale too. A static scale keeps its value. The check reads the gradients as the optimizer is about to
            read them: of any backward pass, in a block or not, after clipping and edits. With a closure it reads the
            gradients of each evaluation. It does not see gradients that the optimizer's own step hooks write, nor
            values that the optimizer computes from finite gradients. Optimizers that amp has not adopted are not
            checked. It costs one read of all gradients. An optimizer with ``fused=True`` skips in its own kernel. For
            others the host reads the flag, which syncs with the device. Under a dynamic scale the gradients of blocks
            are checked in any case.
        scaler: bounds of a dynamic scale, if ``min_loss_scale`` is None and ``max_loss_scale`` is 2**24. "apex": a
            ceiling of 2**24, and no floor. "torch": neither, as in ``torch.amp.GradScaler``. None: 2**-24 and 2**24.
            The default initial scale, factors and window are the same in all three. A scale without a floor raises
            `LossScaleError` at 2**-126. Apex's and torch's scales go on falling to 0.
        fused_linear: whether a linear layer is one node of autograd's graph, which gives its float32 weight a float32
            gradient without a half one before it. None: at O1 and O4, for layers that the lists cast to half. False: as
            torch's own nodes, with the bits of Apex and of torch.autocast. True: as None, and raises if it has no
            effect. It is for calls of ``torch.nn.functional.linear`` in eager code whose weight is a trained
            `torch.nn.Parameter`; all others are made as without it. Where torch has no product of half matrices with a
            float32 result (it has one on CUDA only), the product is rounded to half as without it. The environment
            variable AMPATCH_FUSED_LINEAR chooses another product.

    Returns:
        The same objects, as they were passed: a model, or a model and an optimizer; a list for a list.

    Raises:
        OptionError: an argument has a name or value that is not allowed, or contradicts another argument.
        CastListError: the cast lists have faults.
        UsageError: amp is set up with other settings, an optimizer was passed before, or two optimizers with float32
            masters share a parameter.
        KernelError: AMPATCH_KERNELS or AMPATCH_CALLS asks for a library that was not built.
    """
    if not as_flag("enabled", enabled):
        set_up.disable()
        return models if optimizers is None else (models, optimizers)

    kernels.prepare()
    calls.prepare()
    model_list = [adopted_model.check_model(model) for model in _as_list(models)]
    for model in model_list:
        check_no_copy(model)
    optimizer_list = [] if optimizers is None else [check_optimizer(optimizer) for optimizer in _as_list(optimizers)]
    half = set_up.half_dtype_of(
        half_dtype, patch_torch_functions_type, "patch_torch_functions_type", opt_level, model_list
    )
    properties = opt_levels.resolve(
        opt_level,
        half,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    lists = set_up.lists_of(cast_lists)
    if cast_lists is not None and not properties.patch_torch_functions:
        set_up.check_have_effect(lists, properties)
    verbose = opt_levels.check_verbosity(verbosity)
    kept = set_up.kept_in_float32("keep_fp32", keep_fp32, properties)
    wide = set_up.kept_in_float32("float32_outputs", float32_outputs, properties)
    settings = Settings(
        properties,
        lists,
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
            scaler=scaler,
        ),
        opt_levels.check_count("num_losses", num_losses),
        keep_fp32=(*kept, *(each for each in wide if each not in kept)),
        float32_outputs=wide,
        cast_buffers=set_up.cast_buffers_of(cast_buffers, properties),
        cast_model_outputs=opt_levels.check_output_type(cast_model_outputs),
        exact_hooks=as_flag("exact_hooks", exact_hooks),
        profile_casts=as_flag("profile_casts", profile_casts),
        on_overflow=with_requested_trace(check_on_overflow(on_overflow)),
        check_finite=as_flag("check_finite", check_finite),
        fused_linear=set_up.fuses_linear(fused_linear, properties),
    )
    live, outgoing = set_up.joined_and_replaced(settings)
    set_up.check_optimizers(optimizer_list, model_list, live, outgoing)
    if properties.cast_model_type in HALVES:
        set_up.check_whole(optimizer_list, model_list, properties)
    every_model = [*model_list, *(live.adopted.models if live is not None else ())]
    conversion_plan.check_matches(every_model, kept)
    conversion_plan.check_matches(every_model, wide, "float32_outputs")
    conversion_plan.check_matches_buffers(every_model, settings.cast_buffers)
    check_entries(every_model, lists.modules, settings.keep_fp32)

    device_types = adopted_model.device_types_of(model_list)
    opened = set_up.open_for(settings, device_types, fused_linear) if live is None else live
    opened.losses.verbose = verbose
    try:
        opened.adopt(model_list, optimizer_list)
    except BaseException:
        if live is None:
            close_session(opened)
        raise
    runtime.disabled = False
    if verbose:
        set_up.announce(opened)
    return models if optimizers is None else (models, optimizers)


def deinitialize() -> None:
    """Undoes everything: torch, models and optimizers become what they were. A no-op if amp is not set up.

    Warns:
        AmpWarning: gradients that ``delay_unscale=True`` had left scaled are None now; or another library has replaced
            a function that amp had patched, and its replacement stays.
    """
    turn_off()


class Handle:
    """Undoes `init`, by `deactivate` or at the end of a ``with`` block."""

    def __init__(self, opened: Session | None) -> None:
        self._session = opened

    def deactivate(self) -> None:
        """Undoes the patches; a second call is a no-op."""
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


@_checks_names
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
    on_overflow: OnOverflow = "explain",
    check_finite: bool = False,
    fused_linear: bool | None = None,
) -> Handle:
    """Patches torch's functions without adopting a model: they cast in the whole process, whoever calls them.

    The first `scale_loss` for an optimizer adopts it. A dtype may be given by its name, as to `initialize`.

    Args:
        enabled: False makes this a no-op.
        loss_scale: a positive number, or "dynamic". The default is Apex's, and holds in bfloat16 too, where
            `initialize` has 1.
        enable_caching: whether cast weights are kept for the iteration.
        verbose: whether skipped steps are logged.
        allow_banned: whether banned functions run in float32 instead of raising.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 if there is a GPU, else bfloat16.
        cast_lists: as for `initialize`.
        patch_type: the name of ``half_dtype`` in ROCm's Apex.
        profile_casts: as for `initialize`.
        on_overflow: as for `initialize`.
        check_finite: as for `initialize`. An optimizer is checked from its first block on, which adopts it.
        fused_linear: as for `initialize`.

    Returns:
        A handle that undoes the patches.

    Raises:
        OptionError: an argument has a value that is not allowed.
        CastListError: the cast lists have faults.
        UsageError: amp is set up already.
        KernelError: AMPATCH_KERNELS or AMPATCH_CALLS asks for a library that was not built.
    """
    if not as_flag("enabled", enabled):
        set_up.disable()
        return Handle(None)
    kernels.prepare()
    calls.prepare()
    is_verbose = as_flag("verbose", verbose)
    half = set_up.half_dtype_of(half_dtype, patch_type, "patch_type", "O1", [])
    properties = opt_levels.resolve("O1", half, loss_scale=loss_scale)
    lists = set_up.lists_of(cast_lists)
    if lists.modules:
        raise OptionError(
            f"{lists.modules[0].source}: modules has {lists.modules[0].name!r}, and amp.init knows no model. Leave "
            "modules out, or type amp.initialize(model, ...)."
        )
    settings = Settings(
        properties,
        lists,
        make_policy(properties.loss_scale),
        allow_banned=bool(allow_banned),
        enable_caching=bool(enable_caching),
        adopts_on_use=True,
        profile_casts=as_flag("profile_casts", profile_casts),
        on_overflow=with_requested_trace(check_on_overflow(on_overflow)),
        check_finite=as_flag("check_finite", check_finite),
        fused_linear=set_up.fuses_linear(fused_linear, properties),
    )
    opened = set_up.open_for(settings, adopted_model.all_device_types(), fused_linear)
    opened.losses.verbose = is_verbose
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
        loss: floating tensor of any shape, usually 0-dimensional; or nested lists, tuples and dicts of them.
        optimizers: an optimizer or a list of them, whose parameters receive gradients in the block.
        loss_id: number of the scale to use, below ``num_losses``.
        model: ignored; Apex had it.
        delay_unscale: leaves the gradients scaled, for a later block that adds to them and unscales.
        delay_overflow_check: leaves gradients that overflowed as they are, for code that judges them itself; a later
            block zeroes them otherwise. The scale reacts at the step in both cases.

    Returns:
        A context manager, to be entered once. It gives ``loss.float() * scale``, float32 of the same shape, in the same
        lists, tuples and dicts. With amp disabled it gives the loss unchanged.

    Raises:
        UsageError: amp is not set up; gradients of two scales would be summed; the loss was scaled before; or the block
            is entered a second time.
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
    return live.losses.scale_loss(
        loss, optimizer_list, loss_id, delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check
    )


@overload
def disable_casts(function: None = None) -> WithoutCasts: ...
@overload
def disable_casts(function: _F) -> _F: ...
def disable_casts(function: Any = None) -> Any:
    """Turns casts off in this thread: as a context manager, or as a decorator, with parentheses or without.

    It turns off `torch.autocast` as well. ``torch.autocast(device_type, enabled=False)`` does the same for one type of
    device.

    Blocks may be nested, and one object may be entered again. Casts come back when the block ends, also by an
    exception. In a decorated generator or coroutine casts are off while it runs, and not between its steps. The block
    also works if amp is set up inside it.

    Args:
        function: function, generator function or coroutine function to decorate.

    Raises:
        OptionError: it decorates something else, such as a class.
    """
    if function is not None:
        return WithoutCasts()(function)
    return in_graph(OFF) if is_dynamo_compiling() else WithoutCasts()


@_checks_names
def convert_model(
    model: _Model,
    half_dtype: torch.dtype | str | None = None,
    excluded: Any = (),
    cast_lists: Overlay | None = None,
    *,
    keep_float32: bool = True,
) -> _Model:
    """Makes a copy of a model for inference, with half weights and a forward pass that casts by the lists.

    It patches nothing else in the process, leaves the model unchanged, and does not need `initialize`. The copy is in
    evaluation mode, and its results equal those of the model at O1 bit for bit. Run it under
    ``torch.inference_mode()`` or ``torch.no_grad()``.

    A weight becomes half if only whitelisted functions read it. For torch's own layers the copy knows that at once, for
    other modules after the first forward pass. Other weights stay float32: those of embeddings and norms, and weights
    that are shared with them.

    Args:
        model: float32, and not wrapped or compiled.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``, or its name; None: float16 if the parameters are on a GPU,
            else bfloat16.
        excluded: parts that compute in float32, one or a list. A submodule, its name, a pattern (``"*.head"``) or a
            class: nothing in it is cast, and its inputs are cast to float32. Or a function: ``torch.softmax``,
            ``"softmax"`` for all its spellings, or ``"torch.nn.functional.softmax"`` for one.
        cast_lists: as for `initialize`.
        keep_float32: whether the copy keeps the float32 values of its half weights in main memory, 4 bytes per weight.
            Without them, its state dict holds rounded values in float32, and a half weight that a function needs in
            float32 raises `UsageError`.

    Returns:
        A model of the same class. Its state dict is float32 and equals the model's.

    Raises:
        OptionError: an argument has a value that is not allowed, or the model cannot be copied.
        CastListError: the cast lists have faults.
    """
    kept = as_flag("keep_float32", keep_float32)
    half = set_up.half_dtype_of(half_dtype, None, "", "O1", [adopted_model.check_module(model)])
    return convert(model, half, () if excluded is None else excluded, set_up.lists_of(cast_lists), kept)  # type: ignore[return-value]


@contextlib.contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Keeps the casts of a model's weights until the block ends, for calls that record no gradients.

    ::

        with torch.inference_mode(), amp.frozen_weights(model):
            for batch in loader:
                predictions = model(batch)

    Each weight is cast once, and not once per call. Calls that record gradients are unaffected. A weight that changes
    is cast again at its next use. Writes through a view of its memory (numpy, DLPack, a storage) are invisible to
    torch: call `clear_cache` after them. Blocks may be nested, for one model or for several. Threads share the casts.
    The end of the block drops them, and so does `deinitialize`.

    The block is a no-op if no functions are patched or amp is off. Code compiled by torch.compile makes its own casts,
    and keeps none. As a decorator it opens and closes a block with every call.

    Args:
        model: a model passed to ``amp.initialize``, a part of it, or a wrapper around it.

    Raises:
        OptionError: it is not a module.
        UsageError: it was never passed to ``amp.initialize``.
    """
    checked = adopted_model.check_module(model)
    live = runtime.live
    with contextlib.nullcontext() if live is None else live.casts.frozen_weights(checked):
        yield


def preflight(
    model: nn.Module,
    inputs: Any,
    loss_fn: Callable[[Any], Tensor],
    *,
    levels: Sequence[Any] = ("O1", "O2", "O3"),
    tolerance: float = 0.05,
    measure: bool = True,
) -> Preflight:
    """Finds the opt levels at which a model trains well, by running one step of copies of it at each.

    ::

        print(amp.preflight(model, batch, lambda output: F.cross_entropy(output, labels)))

    It first watches a float32 step. It notes values outside float16's range, and operators whose results change much in
    bfloat16. Then it runs a step at each level and compares the gradients. If a level fails, it searches the smallest
    change of the arguments of `initialize` that mends it, and verifies the change by a step.

    The model, its gradients, its buffers and the random numbers stay as they are; code that the model calls runs often.
    Compiled parts run uncompiled. The float32 step keeps the tensors of all its operators alive.

    Args:
        model: float32, on the CPU or a GPU, as it would be passed to `initialize`.
        inputs: one tensor; a tuple or list of the forward's arguments; or a mapping of its keyword arguments.
        loss_fn: returns the loss, a scalar tensor, for the model's output.
        levels: opt levels O1 to O5, each in float16 and bfloat16; or pairs of a level and a half type.
        tolerance: relative error above which an operator is reported as imprecise in bfloat16.
        measure: whether to measure time and peak memory of a step at each level.

    Returns:
        The verdicts and findings; it prints as a report.

    Raises:
        UsageError: amp is set up.
        OptionError: an argument has a value that is not allowed; the model cannot be copied; or ``loss_fn`` returns no
            scalar that depends on a parameter.
        Exception: what the model or ``loss_fn`` raises in float32, with a note that says so.
    """
    checked = adopted_model.check_model(model)
    _check_loss_fn(loss_fn)
    bound = tolerance if isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool) else math.nan
    if not 0 < bound < math.inf:
        raise OptionError(f"tolerance is {tolerance!r}; expected a positive number, such as 0.05.")
    from ampatch.diagnostics.preflight import preflight as preflights
    from ampatch.diagnostics.report.report import note_own_steps
    from ampatch.diagnostics.trial_steps.levels import checked_levels

    note_own_steps("amp.preflight")
    return preflights.preflight(checked, inputs, loss_fn, checked_levels(levels), bound, as_flag("measure", measure))


def compare(
    model: nn.Module | str | os.PathLike[str],
    inputs: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    a: Any = "O0",
    b: Any = "O1",
) -> Comparison:
    """Runs the same step twice, and says where the results differ first and most; or compares two saved reports.

    ::

        print(amp.compare(model, batch, lambda output: F.cross_entropy(output, labels), "O0", "O1"))
        print(amp.compare("monday.json", "tuesday.json"))

    Both steps run on copies of the model with the same random numbers, dropout included, and the same loss scale.
    Calls are matched by function, module and line, in forward and backward pass. Each operator of b also runs on a's
    inputs, to separate its own error from the error of its inputs. An error counts if it exceeds the rounding noise of
    the half type.

    The model, its gradients, its buffers and the random numbers stay as they are. Both steps keep the tensors of all
    their operators alive. Compiled parts run uncompiled.

    Args:
        model: float32, on the CPU or a GPU, as it would be passed to `initialize`; or the file of a saved report.
        inputs: one tensor; a tuple or list of the forward's arguments; or a mapping of its keyword arguments. After a
            file, the file to compare it with.
        loss_fn: returns the loss, a scalar tensor, for the model's output; left out for files.
        a: the step to compare with: an opt level; or a mapping with ``opt_level`` and, if they are not to be the
            defaults of `initialize`, ``half_dtype`` and ``cast_lists``.
        b: the step to judge, in the same form.

    Returns:
        The rows and a verdict; it prints as tables.

    Raises:
        UsageError: amp is set up.
        OptionError: an argument has a value that is not allowed; the model cannot be copied; ``loss_fn`` returns no
            scalar that depends on a parameter; or a file is no report.
        CastListError: cast lists have faults.
        Exception: what the model or ``loss_fn`` raises, with a note that says at which level.
    """
    if isinstance(model, (str, os.PathLike)):
        if loss_fn is not None or (a, b) != ("O0", "O1"):
            raise OptionError(
                "amp.compare takes a model, its inputs and loss_fn; or two files of reports and nothing else."
            )
        from ampatch.diagnostics.compare import files as comparison_files

        return comparison_files.compare(model, inputs)
    from ampatch.diagnostics.report.report import Report, note_own_steps

    if isinstance(model, (Report, Mapping)):
        raise OptionError(
            f"found {type(model).__name__} as the first argument; expected a model, or the file of a saved report. "
            "Type report.save('a.json') for each report, then amp.compare('a.json', 'b.json')."
        )
    checked = adopted_model.check_model(model)
    _check_loss_fn(loss_fn)
    from ampatch.diagnostics.compare import comparison

    note_own_steps("amp.compare")
    return comparison.compare(checked, inputs, loss_fn, _side("a", a, checked), _side("b", b, checked))


@_checks_names
def tune(
    train: Callable[[dict[str, Any]], Any],
    evaluate: Callable[[Any], Any],
    *,
    tolerance: float | str,
    higher_is_better: bool,
    budget: Any = None,
    seeds: int | Sequence[int] = 3,
    opt_level: str = "O1",
    half_dtype: torch.dtype | str | None = None,
    cast_lists: Overlay | None = None,
    journal: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Tuning:
    """Finds the smallest cast list that keeps a training's metric, and leaves the most FLOPs in half.

    ::

        def train(amp_options):
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = amp.initialize(model, optimizer, **amp_options)
            ...
            return model

        tuning = amp.tune(train, accuracy, tolerance=0.005, higher_is_better=True, budget="2h", journal="tune.json")
        print(tuning)
        tuning.save("casts.yaml")

    It trains in float32 first, then with the lists as they are. If the metric stays within the tolerance, that is the
    result. Otherwise it moves functions that got half tensors to float32: all whitelisted ones, then halves of these,
    then single functions. At the end it tries to move each one back. Every trial trains with all seeds, and its metrics
    are compared with float32's of the same seeds. A list passes if it is worse by no more than the tolerance, after two
    standard errors of noise are added. If the noise is too large to decide, the result says so.

    Before each run it sets torch's, Python's and numpy's seeds. Afterwards random numbers and torch's settings are as
    they were, and amp is off.

    Args:
        train: trains a new model, and returns it. Its argument is a dict for ``amp.initialize``: ``opt_level`` ("O0"
            for float32) and, in other runs, perhaps ``half_dtype`` and ``cast_lists``. A generator of its own is to be
            seeded with ``torch.initial_seed()``.
        evaluate: returns the metric of such a model, one number. Amp is still on, unless ``train`` has turned it off.
        tolerance: how much worse the metric may be: a number in its unit, or a share of float32's metric ("1%").
        higher_is_better: True for an accuracy, False for a loss.
        budget: a time ("2h", "90 min", "45 s", or a ``timedelta``) or a number of runs ("20 runs"), for this call. A
            run that would not fit is not begun; the result is then the best list so far. None: until the search ends.
        seeds: a number of seeds, or the seeds.
        opt_level: "O1" or "O4".
        half_dtype: as for `initialize`.
        cast_lists: lists to begin with, as for `initialize`; the result is to be laid over them.
        journal: a JSON file that keeps every finished run. If it exists, its runs are not run again.
        progress: whether to print a line for each run to standard error, with the time left.

    Returns:
        The list with its evidence: ``overlay`` is its YAML, ``save`` writes it. It prints as a report.

    Raises:
        UsageError: amp is set up, or the call is in a block of `report`.
        OptionError: an argument has a value that is not allowed; the metric is not finite in float32; or the journal
            is of another search. Also if ``train`` does not use its argument, sets the seed, or returns the same model
            twice.
        CastListError: the cast lists have faults.
        Exception: what ``train`` or ``evaluate`` raises in float32, with a note that says so.
    """
    from ampatch.diagnostics.tune import tuning
    from ampatch.diagnostics.tune.trainings import Training

    for name, given, does in (
        ("train", train, "trains a new model with a dict of options, and returns it"),
        ("evaluate", evaluate, "returns the metric of a model"),
    ):
        if not callable(given):
            raise OptionError(f"{name} is {type(given).__name__!r}; expected a function that {does}.")
    if not isinstance(higher_is_better, bool):
        raise OptionError(
            f"higher_is_better is {higher_is_better!r}; expected True, as for an accuracy, or False, as for a loss."
        )
    half = None if half_dtype is None else set_up.half_dtype_of(half_dtype, None, "", opt_level, [])
    if not opt_levels.LEVELS[opt_levels.check_opt_level(opt_level)].patched:
        raise OptionError(f"opt_level is {opt_level!r}, which casts no functions by lists; expected 'O1' or 'O4'.")
    options = {"opt_level": opt_level, **({} if half is None else {"half_dtype": opt_levels.dtype_name(half)})}
    several = isinstance(cast_lists, Sequence) and not isinstance(cast_lists, (str, bytes, os.PathLike))
    overlays: Any = cast_lists if several else () if cast_lists is None else (cast_lists,)
    lists = shipped().overlaid(overlays)
    return tuning.tune(
        Training(train, evaluate, options, tuple(overlays), lists, tuning.checked_seeds(seeds)),
        tolerance=tolerance,
        higher_is_better=higher_is_better,
        budget=budget,
        journal=journal,
        progress=as_flag("progress", progress),
    )


def replay(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    *,
    levels: Any = None,
    compiled: bool = False,
) -> Replay:
    """Runs a skipped step again, from the file that `Overflow.save` has written.

    ::

        print(amp.replay("step.pt", make_model()))

    It gives copies of the models the weights, buffers and modes of the step, sets amp up as the run had it, and runs
    the forward passes on the saved inputs and random numbers. Backward passes begin with the gradients that came into
    the outputs then, at the loss scale of the step. Then it does so at other opt levels, with the same cast lists. On
    another device than that of the run, random numbers may differ.

    Args:
        path: of the file.
        model: a model of the class that made the step, on the CPU or a GPU; its weights are not used. Several models,
            such as those of a GAN, in the order in which they ran.
        levels: opt levels to try after float32, as for `preflight`; None: O1 and O2 in both half types, and O3 in
            float16.
        compiled: whether to try it with models compiled by ``torch.compile`` as well.

    Returns:
        The trace, and a table of the levels at which all gradients are finite; it prints as both.

    Raises:
        UsageError: amp is set up.
        OptionError: the file holds no step, or the models are others; or a level does not exist.
    """
    from ampatch.diagnostics.replay import replay as replays
    from ampatch.diagnostics.trial_steps.levels import checked_levels

    given = model if isinstance(model, (list, tuple)) else [model]
    # The file has the models inside of wrappers.
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    bare = (each.module if isinstance(each, wrappers) else getattr(each, COMPILED_ORIGINAL, each) for each in given)
    models = [adopted_model.check_model(each) for each in bare]
    chosen = replays.LEVELS if levels is None else checked_levels(levels)
    return replays.replay(path, models, chosen, compiled=as_flag("compiled", compiled))


def report() -> Report:
    """Watches what runs in a block, and reports what amp does there.

    ::

        with amp.report() as report:
            train(model, loader)
        print(report)
        report.to_html("report.html")

    It counts calls and casts by function and by line of the user's code, with bytes, times and uses of the cache. It
    shows the types and the memory of each module, the scale of each step and the exponents of the gradients. It says
    what to do about its findings. Amp may be set up before the block, in it, or not at all.

    The report can be read in the block too. It tells what has happened so far. An exception in the block leaves a
    report of what ran until then. Results, random numbers, casts and the cache are as they are without a report. Steps
    take longer; the report says how much. It sees this thread, and the backward passes that it starts.

    Returns:
        The report, to be entered once.
    """
    from ampatch.diagnostics.report.report import Report

    return Report()


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


def clip_grad_norm_(optimizer: Any, max_norm: float) -> Tensor:
    """Clips the gradients of an optimizer's parameters by their total norm.

    Like ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)``, but with fewer reads::

        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        norm = amp.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()

    After a block with ``delay_unscale=True`` it first reads the gradients once, for overflows and for the norm, and the
    scale is updated. Then it unscales and clips them in one pass. Torch's optimizers with ``fused=True`` do this in
    their step, if they have state and update the model's own parameters. Until then the gradients stay scaled. If
    several optimizers share a block, the first call unscales the gradients of all. Gradients that overflowed are not
    clipped.

    Args:
        optimizer: whose gradients to clip.
        max_norm: the greatest 2-norm that they keep; ``math.inf`` only measures it.

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

    It looks for overflows, and updates the scale. Gradients of the block's other optimizers are unscaled too. A no-op
    if the gradients are unscaled already.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``; the call is inside a block; or another optimizer has left
            gradients of the same parameters scaled.
    """
    checked = check_optimizer(optimizer)
    if not runtime.disabled:
        _session_of(checked, "amp.unscale_").gradients.unscale(checked)


def grads_are_unscaled(optimizer: Any) -> bool:
    """Returns True if no gradient of an optimizer is scaled.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    checked = check_optimizer(optimizer)
    return (
        runtime.disabled
        or _session_of(checked, "amp.grads_are_unscaled").adopted.record_of(checked).gradients.are_unscaled()
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
    return _session_of(checked, "amp.gradients_are_finite").gradients.are_finite(checked)


def state_dict(*, include_policy: bool = False) -> dict[str, dict[str, Any]]:
    """Returns the loss scalers' states as plain numbers, under "loss_scaler0" and so on. Syncs with the device.

    Optimizers that are handed to a later `initialize`, after a first step, have scalers of their own. Then the first
    keys are of the optimizers that came last, and those of earlier ones that still exist follow.

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
    live = _require_session("amp.state_dict")
    states: dict[str, dict[str, Any]] = {
        f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(live.losses.all_scalers())
    }
    return {**states, policy.KEY: policy.effective(live)} if with_policy else states


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads a state dict of amp's, of Apex's, or of ``torch.amp.GradScaler``.

    The settings stay those of `initialize`: factors and interval of a ``GradScaler`` are not loaded. A static scale
    keeps its value, since a saved dynamic one could overflow, and a static scale looks for no overflow. A dynamic scale
    keeps its value if the saved one was static; else it is clamped to ``min_loss_scale`` and ``max_loss_scale``. A
    saved policy is compared with the live one, and not loaded.

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
    live = _require_session("amp.load_state_dict")
    warnings: list[str] = []
    if isinstance(state_dict, Mapping) and policy.KEY in state_dict:
        warnings = policy.warnings(state_dict[policy.KEY], policy.effective(live))
        state_dict = {key: value for key, value in state_dict.items() if key != policy.KEY}
    load_states(live.losses.all_scalers(), state_dict, logs=live.losses.verbose, warnings=warnings)


def get_loss_scale(loss_id: int = 0) -> float:
    """Returns the present scale of a loss; 1 with amp disabled. Syncs with the device.

    Raises:
        OptionError: ``loss_id`` is out of range.
    """
    if runtime.disabled:
        return 1.0
    return _require_session("amp.get_loss_scale").losses.scaler(loss_id).state.loss_scale


def step_was_skipped(optimizer: Any) -> bool:
    """Returns whether the last ``optimizer.step()`` was skipped because of an overflow.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    if runtime.disabled:
        return False
    checked = check_optimizer(optimizer)
    return _session_of(checked, "amp.step_was_skipped").adopted.record_of(checked).step_was_skipped


def skipped_steps(optimizer: Any) -> int:
    """Returns the number of an optimizer's steps skipped since it was passed to ``amp.initialize``.

    Raises:
        OptionError: it is not an optimizer.
        UsageError: it was never passed to ``amp.initialize``.
    """
    if runtime.disabled:
        return 0
    checked = check_optimizer(optimizer)
    return _session_of(checked, "amp.skipped_steps").adopted.record_of(checked).skipped_steps


def stats() -> dict[str, int | float]:
    """Returns the numbers of a run as one flat dict, for TensorBoard, W&B or a log.

    ::

        for name, value in amp.stats().items():
            writer.add_scalar(f"amp/{name}", value, step)

    It reads the device once, or each device that has a scaler once, so call it every few steps. A CUDA graph's replays
    count only in "loss_scale" and "clean_steps".

    Returns:
        int and float values; empty with amp off or disabled. The keys stay the same for the whole session, as long as
        amp is given no more optimizers:

        - "loss_scale": the present scale. With ``num_losses`` above 1 "loss_scale/0", "loss_scale/1" and so on; so with
          the next two.
          Of optimizers that were adopted later than others, as for `state_dict`: those of the last.
        - "clean_steps": steps without overflow since the scale last changed; for a static scale: all steps.
        - "overflows": overflows for which a step was skipped: one for each step, also with several optimizers.
        - "skipped_steps": skipped steps of all optimizers. With several optimizers also "skipped_steps/0" and so on, in
          the order in which amp got them; a deleted one keeps its number.
        - "casts", "cache_hits": as in `cast_counts`.
        - "cache_hit_rate": the share of cache hits in both; 0 before the first cast.
        - "cached_bytes": memory of the cast weights that are kept at this moment.
        - "patched_functions": number of functions that are patched.
    """
    live = runtime.live
    return {} if live is None else live.stats()


def is_on() -> bool:
    """Returns True if amp is set up: after `initialize` or `init`, until `deinitialize`.

    Returns:
        False otherwise, and if the last call had ``enabled=False``. True inside `disable_casts`: that turns casts off
        in one thread, but neither loss scales nor masters. ``amp.settings()["casts_here"]`` says whether casts are on.
    """
    return runtime.live is not None


def settings() -> dict[str, Any]:
    """Returns the present settings as plain data, for logs and checkpoints.

    Syncs with the device, to read the loss scales.

    Returns:
        A dict of text, numbers, True, False, None and lists of these. With amp off it has two keys: "is_on" (False) and
        "disabled" (whether ``enabled=False`` was given).

        With amp on it has the resolved arguments of `initialize` by their names. Dtypes are names ("float16").
        "cast_lists" are the files that override the shipped lists, or "a mapping". It also has these keys:

        - "is_on", "disabled" and "set_up_by".
        - "loss_scales": the present scales, by ``loss_id``.
        - "device_types": device types of the tensors that are cast.
        - "num_models" and "num_optimizers": numbers of those that are not deleted.
        - "casts_here": True if patched functions may cast in this thread; False inside `disable_casts`.
    """
    live = runtime.live
    return LiveSettings(is_on=False, disabled=runtime.disabled) if live is None else live.as_plain_data()


def explain(function_or_name: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """Explains what amp does to a function or to the functions that a module calls, and by which rule.

    ::

        print(amp.explain(torch.matmul, x, w))
        print(amp.explain(model.encoder))

    It says what happens to each spelling of the function, with the file and line of the rule and the comment there. It
    also says which listed functions it calls inside, and which other names, closures and containers hold it. It runs
    nothing and changes nothing. With amp on, the settings of the session count; with amp off, the shipped lists.

    Args:
        function_or_name: the function, bound or not, patched or not; its name ("softmax", "torch.softmax",
            "F.softmax") or an operator ("@"). Or a module, its class, or the name of one ("nn.LSTM"): the listed
            functions that the code of its forward names, and for a module those of all its submodules.
        args: arguments of a call. For each tensor among them it says which dtype the function would get. None for a
            module.
        kwargs: arguments of the call by keyword.

    Returns:
        The explanation, which prints as text; ``to_dict()`` returns it as plain data.

    Raises:
        OptionError: it is none of these, a module is given with arguments, or its forward is not written in Python.
    """
    from ampatch.diagnostics.explain import explanation

    return explanation.explain(function_or_name, args, kwargs)


def clear_cache() -> None:
    """Drops the cast weights.

    Call it after a write to a weight that torch does not count: one through a view of its memory (numpy, DLPack, a
    storage). It is needed only between two forward passes with gradients and no step, and inside `frozen_weights`.
    """
    live = runtime.live
    if live is not None:
        live.cache.clear()


def cast_counts() -> CastCounts:
    """Returns how many tensors were cast since amp was set up, and how often the cache saved the cast of a weight.

    Casts in compiled code are not counted.
    """
    live = runtime.live
    return CastCounts(0, 0) if live is None else live.cache.counts()


def register_half_function(module: Any, name: str) -> None:
    """Registers a function to cast its floating arguments to the half type, from the next ``initialize`` on.

    It casts wherever it is called, and not for the work of models only, as functions on the whitelist do.

    Args:
        module: the module or class that owns it, torch's or not.
        name: its name there.

    Raises:
        ValueError: the module has no function of that name.
        UsageError: amp is set up already.
    """
    _register(module, name, Treatment.WHITELIST)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Does the same as `register_half_function`, but casts to bfloat16 whatever the half type is."""
    _register(module, name, Treatment.WHITELIST, torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """Registers a function to run on float32 casts of its half arguments, without casts inside.

    See `register_half_function`.
    """
    _register(module, name, Treatment.BLACKLIST)


def register_promote_function(module: Any, name: str) -> None:
    """Registers a function to cast mixed floating arguments to the widest type; see `register_half_function`."""
    _register(module, name, Treatment.PROMOTE)


def half_function(function: _F) -> _F:
    """Decorates a function: casts its floating arguments to the half type while amp patches functions.

    If the function writes to an argument, the caller's tensor or container has the change afterwards.
    """
    return decorate(function, "whitelist")  # type: ignore[no-any-return]


def bfloat16_function(function: _F) -> _F:
    """Decorates a function: casts its floating arguments to bfloat16; see `half_function`."""
    return decorate(function, "bfloat16")  # type: ignore[no-any-return]


def float_function(function: _F) -> _F:
    """Decorates a function: casts its half arguments to float32, and casts nothing inside; see `half_function`."""
    return decorate(function, "blacklist")  # type: ignore[no-any-return]


def promote_function(function: _F) -> _F:
    """Decorates a function: casts mixed floating arguments to the widest type; see `half_function`."""
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


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


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


def _check_loss_fn(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise OptionError(
            f"loss_fn is {type(loss_fn).__name__!r}; expected a function that returns the loss for the model's output. "
            "Type for example loss_fn=lambda output: F.cross_entropy(output, labels); or, for a model that returns its "
            "loss, lambda output: output.loss."
        )


def _side(letter: str, given: object, model: nn.Module) -> Side:
    """Returns one of the two steps of `compare`."""
    from ampatch.diagnostics.compare.comparison import Side
    from ampatch.diagnostics.trial_steps.steps import Setup

    options = {"opt_level": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping):
        raise OptionError(f"{letter} is {given!r}; expected an opt level ('O1'), or a mapping with 'opt_level'.")
    known = ("opt_level", "half_dtype", "cast_lists")
    unknown = [key for key in options if key not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise OptionError(f"{letter} has the key {unknown[0]!r}; expected {', '.join(known)}.{hint}")
    level, overlay = options.get("opt_level", "O1"), options.get("cast_lists")
    try:
        half = set_up.half_dtype_of(options.get("half_dtype"), None, "", level, [model])
        properties = opt_levels.resolve(level, half)
    except OptionError as error:
        raise OptionError(f"in {letter}: {error}") from None
    if overlay is not None and not properties.patch_torch_functions:
        raise OptionError(f"{letter} has cast_lists, and {level} does not patch torch's functions; expected O1 or O4.")
    setup = Setup(level, properties.half_dtype, overlay=() if overlay is None else overlay)
    check_entries([model], setup.settings().lists.modules)  # raises also if the lists have faults
    half_name = "" if level == "O0" else f" {opt_levels.dtype_name(setup.half_dtype)}"
    lists = "" if overlay is None else f" with {overlay if isinstance(overlay, (str, os.PathLike)) else 'cast_lists'}"
    return Side(letter, f"{level}{half_name}{lists}", setup)
