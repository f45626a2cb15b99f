"""Turns amp on and off: `amp.initialize`, `amp.init` and `amp.deinitialize`; opens the session."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn

from ampatch import distributed, opt_levels
from ampatch.cast_lists.lists import Overlay
from ampatch.errors import OptionError, UsageError, warn
from ampatch.interfaces.inference_copy import check_no_copy
from ampatch.native import calls, kernels
from ampatch.opt_levels import as_flag
from ampatch.patching import adopted_model
from ampatch.public import arguments
from ampatch.public.arguments import checks_names
from ampatch.runtime import close_session, difference, disable, in_one_thread, open_session, runtime, turn_off
from ampatch.scaling.loss_scaler import make_policy
from ampatch.scaling.overflows import OnOverflow, check_on_overflow, name_of_choice, with_requested_trace
from ampatch.scaling.users_optimizer import check_optimizer
from ampatch.session import Session
from ampatch.settings import LiveSettings, Settings, kept_names
from ampatch.weights import conversion_plan
from ampatch.weights.ruled_parts import check_entries

logger = logging.getLogger("ampatch")

_P = ParamSpec("_P")
_Models = TypeVar("_Models", bound=nn.Module | Sequence[nn.Module])
_Optimizers = TypeVar("_Optimizers")


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
@checks_names
@in_one_thread
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
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
    optimizer_state: torch.dtype | str = "float32",
) -> Any:
    """Sets up mixed precision for models and their optimizers.

    Further calls with the same settings add models and optimizers. A dtype may be given by its name: "float16",
    "half" or "fp16"; "bfloat16" or "bf16"; "float32".

    Args:
        models: a module, or a list of modules. They must not be wrapped for several ranks or devices, nor compiled by
            TorchScript.
        optimizers: an optimizer, a list of optimizers, or None. An optimizer is any object with ``param_groups``,
            ``step`` and ``zero_grad``.
        enabled: False returns everything unchanged, and makes every other call a no-op.
        opt_level: "O0" (float32), "O1" (functions cast by the lists), "O2" (half weights, float32 masters), "O3" (half
            weights), "O4" and "O5" (O1 and O2 in bfloat16), "O6" (O5 with float8 products in linear layers).

    Values of the level:
        cast_model_type: dtype of the weights, at levels that convert them. False leaves all weights as they are; half
            weights then get masters at O2 and O5.
        patch_torch_functions: whether torch's functions cast by the lists; None: the level's default.
        keep_batchnorm_fp32: whether batch norm stays float32, at levels that convert weights.
        master_weights: whether the optimizer updates float32 masters, at levels that convert weights. With bfloat16
            weights, two more values save memory: masters exist only while the optimizer steps. With "split", a weight
            and an int16 remainder are the master. With "stochastic", nothing else of the master is kept, and updates
            are rounded at random.
        optimizer_state: type of the optimizer's float32 state between steps: ``torch.float32`` or ``torch.bfloat16``.
            The latter is rounded at random, and needs "split" or "stochastic" as ``master_weights``.
        cast_model_outputs: dtype of the model's outputs; None: float32 at levels that convert weights, else unchanged.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``. None: the half type that parameters have. If no parameter
            is half: float16 for parameters on a GPU, else bfloat16.
        patch_torch_functions_type: the name of ``half_dtype`` in ROCm's Apex.

    Cast lists and parts of a model:
        cast_lists: a YAML file, a list of files, or a mapping of the same form. Its entries override those of the
            shipped lists. Under ``modules``, submodules get lists of their own or compute in float32.
        keep_fp32: submodules that stay float32: a name, a pattern (``"*.norm"``) or a class, or a list of these. Their
            forward passes get half inputs as float32, and cast nothing inside. At levels that make weights half, their
            weights stay float32, and their outputs are cast to half.
        float32_outputs: submodules that stay float32 as with ``keep_fp32``, and whose outputs stay float32 too, at
            every level. An example is a head with float32 logits. A layer with half weights that follows casts its
            inputs to half.
        cast_buffers: buffers that become half with the weights, at levels that make these half. False: none. True: all
            floating-point buffers. Or names as in ``named_buffers()``, or patterns (``"*.inv_freq"``): one or a list.
        fused_linear: whether a linear layer is one node of autograd's graph. That node computes the gradient of a
            float32 weight in float32, without rounding it to half first. None: at O1 and O4, for layers that the lists
            cast to half. False: torch's own nodes, with the same bits as Apex and torch.autocast. True: like None, but
            raises an error if it has no effect. Only calls of ``torch.nn.functional.linear`` in eager code are
            affected, and only if their weight is a trained `torch.nn.Parameter`. torch multiplies half matrices with a
            float32 result on CUDA only. On other devices the product is rounded to half. The environment variable
            AMPATCH_FUSED_LINEAR chooses another product.

    Loss scale:
        loss_scale: a positive number, or "dynamic"; None: the level's default, and 1 for bfloat16.
        num_losses: number of losses, each with its own scale.
        init_scale: first value of a dynamic scale.
        scale_factor: factor by which it grows and backs off; sets both of the next two arguments.
        growth_factor: factor by which it grows; None: ``scale_factor``.
        backoff_factor: factor by which it backs off; None: 1 / ``scale_factor``.
        scale_window: number of steps without overflow before it grows.
        hysteresis: number of overflows before it backs off.
        min_loss_scale: minimum of a dynamic scale; None: 2**-24.
        max_loss_scale: maximum of a dynamic scale.
        scaler: bounds of a dynamic scale, if ``min_loss_scale`` is None and ``max_loss_scale`` is 2**24. "apex": a
            maximum of 2**24, and no minimum. "torch": neither, as in ``torch.amp.GradScaler``. None: 2**-24 and 2**24.
            The default initial scale, factors and window are the same in all three. A scale without a minimum raises
            `LossScaleError` at 2**-126, where Apex's and torch's scales would continue to fall to 0.

    Skipped steps:
        on_overflow: how a skipped step is reported. The step is skipped first, so weights, masters and optimizer state
            are unchanged. "log" writes a line to the log, at verbosity 1. "explain" also writes it, and traces skips
            that a too high loss scale does not explain. These are skips with a loss that is inf or NaN, skips under a
            static scale, and skips from the second in a row on (from the seventh, if no step has run yet). At the first
            such skip amp begins to note steps, and logs the trace of the next such skip: the third in a row, or the
            eighth. "raise" raises `GradientOverflowError` from ``optimizer.step()``. A function is called with the
            `Overflow`, once for each optimizer that skips. If the function raises an error, ``optimizer.step()`` raises
            it too. "trace" runs the forward passes of a skipped step again, and logs ``str(overflow)`` at any
            verbosity. The text names the function that first produced inf or NaN. If a second run cannot find it, amp
            watches the next steps, which take several times as long. ("trace", function) and ("trace", "raise") put the
            trace into the overflow. At the minimum scale the step raises `LossScaleError` instead, with the overflow as
            its attribute ``overflow``. All values except "log" and "explain" read the overflow flag before every step,
            as ``exact_hooks`` does. This syncs with the device, and prevents skipping in the optimizer's own kernel.
        check_finite: whether each step checks its gradients for inf and NaN, also under a static scale. A step with
            such gradients is skipped, and a static scale keeps its value. The check reads the gradients that the
            optimizer is about to read, after clipping and edits. They may come from any backward pass, in a block or
            not. With a closure it reads the gradients of each evaluation. It sees neither gradients that the
            optimizer's own step hooks write, nor values that the optimizer computes from finite gradients. Optimizers
            that amp has not adopted are not checked. The check costs one read of all gradients. An optimizer with
            ``fused=True`` skips in its own kernel. For others the host reads the flag, which syncs with the device.
            Under a dynamic scale the gradients of blocks are always checked.
        exact_hooks: whether a skipped step runs none of the optimizer's step hooks. True syncs with the device before
            every step. With False, optimizers with ``fused=True`` skip in their own kernel, and their hooks run.

    Logs:
        verbosity: 0 is silent; 1 logs skipped steps to the logger "ampatch".
        profile_casts: whether each cast has a label in ``torch.profiler``, such as "ampatch: cast weight of
            torch.nn.functional.linear to float16". Calls of patched functions then run in Python, not in C++.

    Returns:
        The objects that were passed, in the same form: a model, or a model and an optimizer; a list for a list.

    Raises:
        OptionError: an argument's name or value is invalid, or it contradicts another argument.
        CastListError: the cast lists have faults.
        UsageError: amp is set up with other settings, an optimizer was passed before, or two optimizers with float32
            masters share a parameter.
        KernelError: AMPATCH_KERNELS or AMPATCH_CALLS asks for a library that was not built.
    """
    if not as_flag("enabled", enabled):
        disable()
        return models if optimizers is None else (models, optimizers)

    kernels.prepare()
    calls.prepare()
    model_list = [adopted_model.check_model(model) for model in _as_list(models)]
    for model in model_list:
        check_no_copy(model)
    optimizer_list = [] if optimizers is None else [check_optimizer(optimizer) for optimizer in _as_list(optimizers)]
    half = arguments.half_dtype_of(
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
    lists = arguments.lists_of(cast_lists, opt_level)
    if cast_lists is not None and not properties.patch_torch_functions:
        arguments.check_have_effect(lists, properties)
    verbose = opt_levels.check_verbosity(verbosity)
    kept = arguments.kept_in_float32("keep_fp32", keep_fp32, properties)
    wide = arguments.kept_in_float32("float32_outputs", float32_outputs, properties)
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
        cast_buffers=arguments.cast_buffers_of(cast_buffers, properties),
        cast_model_outputs=opt_levels.check_output_type(cast_model_outputs),
        exact_hooks=as_flag("exact_hooks", exact_hooks),
        profile_casts=as_flag("profile_casts", profile_casts),
        on_overflow=with_requested_trace(check_on_overflow(on_overflow)),
        check_finite=as_flag("check_finite", check_finite),
        fused_linear=arguments.fuses_linear(fused_linear, properties),
        optimizer_state=opt_levels.state_type(optimizer_state, properties.master_weights),
    )
    live, outgoing = joined_and_replaced(settings)
    arguments.check_optimizers(optimizer_list, model_list, live, outgoing)
    if settings.has_half_weights or settings.steps_in_float32:
        arguments.check_whole(optimizer_list, model_list, properties)
    every_model = [*model_list, *(live.adopted.models if live is not None else ())]
    conversion_plan.check_matches(every_model, kept)
    conversion_plan.check_matches(every_model, wide, "float32_outputs")
    conversion_plan.check_matches_buffers(every_model, settings.cast_buffers)
    check_entries(every_model, lists.modules_of_user(opt_level), settings.keep_fp32)

    device_types = adopted_model.device_types_of(model_list)
    opened = open_for(settings, device_types, fused_linear) if live is None else live
    opened.losses.verbose = verbose
    try:
        opened.adopt(model_list, optimizer_list)
    except BaseException:
        if live is None:
            close_session(opened)
        raise
    runtime.disabled = False
    if verbose:
        announce(opened)
    return models if optimizers is None else (models, optimizers)


def deinitialize() -> None:
    """Undoes everything: restores torch, models and optimizers. A no-op if amp is not set up.

    Warns:
        AmpWarning: gradients that ``delay_unscale=True`` had left scaled were set to None; or another library has
            replaced a function that amp had patched, and its replacement stays.
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


@checks_names
@in_one_thread
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
    """Patches torch's functions without adopting a model, so that they cast for all callers in the process.

    The first `scale_loss` for an optimizer adopts it. A dtype may be given by its name, as for `initialize`.

    Args:
        enabled: False makes this a no-op.
        loss_scale: a positive number, or "dynamic". The default is Apex's, also for bfloat16, where `initialize`
            defaults to 1.
        enable_caching: whether cast weights are kept for the iteration.
        verbose: whether skipped steps are logged.
        allow_banned: whether banned functions run in float32 instead of raising.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 if there is a GPU, else bfloat16.
        cast_lists: as for `initialize`.
        patch_type: the name of ``half_dtype`` in ROCm's Apex.
        profile_casts: as for `initialize`.
        on_overflow: as for `initialize`.
        check_finite: as for `initialize`. An optimizer is checked from its first block, which adopts it.
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
        disable()
        return Handle(None)
    kernels.prepare()
    calls.prepare()
    is_verbose = as_flag("verbose", verbose)
    half = arguments.half_dtype_of(half_dtype, patch_type, "patch_type", "O1", [])
    properties = opt_levels.resolve("O1", half, loss_scale=loss_scale)
    lists = arguments.lists_of(cast_lists)
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
        fused_linear=arguments.fuses_linear(fused_linear, properties),
    )
    opened = open_for(settings, adopted_model.all_device_types(), fused_linear)
    opened.losses.verbose = is_verbose
    runtime.disabled = False
    return Handle(opened)


def is_on() -> bool:
    """Returns True if amp is set up: after `initialize` or `init`, until `deinitialize`.

    Returns:
        False otherwise, and if the last call had ``enabled=False``. True inside `disable_casts`, which turns off casts
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
        - "num_models" and "num_optimizers": the numbers of models and optimizers that still exist.
        - "casts_here": True if patched functions may cast in this thread; False inside `disable_casts`.
    """
    live = runtime.live
    return LiveSettings(is_on=False, disabled=runtime.disabled) if live is None else live.as_plain_data()


def announce(opened: Session) -> None:
    """Logs the opt level, and what users who keep a part in float32 may not expect."""
    settings = opened.settings
    logger.info("amp is on: %s", settings.properties)
    told = kept_names(settings.keep_fp32)
    if opened.settings.has_half_weights and told and not settings.float32_outputs:
        logger.info(
            "outputs of parts in keep_fp32 (%s) are cast to %s for the layers behind them. If the model returns one, "
            "name its part in float32_outputs",
            ", ".join(told),
            settings.properties.half_dtype,
        )


def open_for(settings: Settings, device_types: Iterable[str], fused_linear: object) -> Session:
    """Opens a session, which watches its steps if that was asked for."""
    opened = open_session(settings, device_types)
    try:
        if fused_linear is not None and settings.fused_linear:
            opened.casts.check_fuses_linear()
        if opened.losses.overflows.traces:
            from ampatch.diagnostics.overflow.tracer import OverflowTracer

            opened.trace_with(OverflowTracer(opened))
        elif opened.losses.overflows.explains:
            reference = weakref.ref(opened)
            opened.losses.overflows.trace_next = lambda: _trace_next(reference)
        never_fires = opened.losses.overflows.reports and not (settings.scale_policy.dynamic or settings.check_finite)
        if never_fires:
            warn(
                f"on_overflow={name_of_choice(settings.on_overflow)!r} has no effect with a static loss "
                f"scale ({settings.properties.loss_scale:g}), which skips no step. Type check_finite=True as well, or "
                "loss_scale='dynamic'."
            )
    except BaseException:  # such as the warning, where warnings are errors
        close_session(opened)
        raise
    return opened


def _trace_next(reference: weakref.ref[Session]) -> None:
    """Has a session's next steps noted after a skip that a too high loss scale does not explain."""
    session = reference()
    # Ranks that do not skip together would wait for one another in a second run.
    if session is None or distributed.has_other_ranks():
        return
    tracer = session.losses.overflows.tracer
    if tracer is not None:
        tracer.note_next()
        return
    from ampatch.diagnostics.overflow.tracer import OverflowTracer

    session.trace_with(OverflowTracer(session, is_asked=False))


def joined_and_replaced(settings: Settings) -> tuple[Session | None, Session | None]:
    """Returns the live session if these settings join it, and the live one if they replace it."""
    live = runtime.live
    other = "" if live is None else difference(live, settings)
    if other and not runtime.may_replace:
        raise UsageError(
            f"amp is set up already with other settings: {other}. Type amp.deinitialize() first, or give the same "
            "arguments."
        )
    return (None, live) if other else (live, None)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
