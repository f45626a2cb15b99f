"""The public functions of ampatch: each checks its arguments, then hands over to the live session.

Owns no state. Everything is checked before anything is changed.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ampatch import cast_lists as lists_module
from ampatch import models as models_module
from ampatch import opt_levels, session
from ampatch.cast_lists import Overlay, Treatment
from ampatch.errors import (
    AmpError,
    AmpWarning,
    BannedFunctionError,
    CastListError,
    LossScaleError,
    OptionError,
    UsageError,
    did_you_mean,
)
from ampatch.function_patches import Registration
from ampatch.loss_scaler import LossScaler, make_policy
from ampatch.optimizers import check_optimizer, parameters_of
from ampatch.paths import Path
from ampatch.session import Session, Settings
from ampatch.weight_cache import CastCounts

__all__ = [
    "AmpError",
    "AmpWarning",
    "BannedFunctionError",
    "CastCounts",
    "CastListError",
    "Handle",
    "LossScaleError",
    "LossScaler",
    "OptionError",
    "UsageError",
    "bfloat16_function",
    "cast_counts",
    "clear_cache",
    "deinitialize",
    "disable_casts",
    "float_function",
    "get_loss_scale",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "skipped_steps",
    "state_dict",
    "step_was_skipped",
]

logger = logging.getLogger("ampatch")

_F = TypeVar("_F")

# What the levels need that convert weights. They are in the table, and refused by name until it is here.
_LEVELS_THAT_RUN = ("O0", "O1", "O4")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_dtype: torch.dtype | None = None,
    cast_lists: Overlay | None = None,
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    hysteresis: int = 1,
    exact_hooks: bool = False,  # noqa: ARG001 - nothing skips inside an optimizer's kernel yet, so that hooks are exact
    keep_fp32: Any = None,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Sets up mixed precision for models and their optimizers.

    May be called again: further models join under the same settings.

    Args:
        models: a module, or a list of modules, not wrapped for several processes or devices, nor compiled by
            TorchScript.
        optimizers: an optimizer, a list of them, or None. Anything with ``param_groups``, ``step`` and ``zero_grad``.
        enabled: False gives everything back untouched, and turns every other call into a no-op.
        opt_level: "O0" (float32), "O1" (functions cast by the lists), "O4" (O1 in bfloat16).
        cast_model_type: the type of the weights, where the level converts them.
        patch_torch_functions: whether functions cast by the lists; None: as the level says.
        keep_batchnorm_fp32: whether batch norm stays in float32, where the level converts weights.
        master_weights: whether the optimizer updates float32 copies, where the level converts weights.
        loss_scale: a positive number, or "dynamic"; None: as the level says, and 1 for bfloat16.
        cast_model_outputs: the type of the model's outputs, where the level converts weights.
        num_losses: how many losses have a scale of their own.
        verbosity: 0 is silent; 1 logs skipped steps to the logger "ampatch".
        min_loss_scale: the floor of a dynamic scale; None: 2**-24.
        max_loss_scale: its ceiling.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 where the parameters are on a GPU, else
            bfloat16.
        cast_lists: a YAML file, a list of them, or a mapping of the same form, laid over the shipped lists.
        init_scale: where a dynamic scale starts.
        scale_factor: by which it grows and backs off.
        scale_window: clean steps before it grows.
        hysteresis: overflows before it backs off.
        exact_hooks: that a skipped step fires none of the optimizer's step hooks. Always so today.
        keep_fp32: submodules that stay in float32, where the level converts weights.
        patch_torch_functions_type: the name that ROCm's Apex had for ``half_dtype``.

    Returns:
        The same objects in the shape they were given: a model; or a model and an optimizer; lists where lists were
        given.

    Raises:
        OptionError: an argument has a value that is not allowed, or that contradicts another.
        CastListError: the cast lists have faults.
        UsageError: other settings are live, or an optimizer was handed in before.
    """
    if not _flag("enabled", enabled):
        session.process.disabled = session.process.live is None
        return models if optimizers is None else (models, optimizers)

    model_list = [models_module.check_model(model) for model in _as_list(models)]
    optimizer_list = [] if optimizers is None else [check_optimizer(optimizer) for optimizer in _as_list(optimizers)]
    half = _half_dtype(half_dtype, patch_torch_functions_type, "patch_torch_functions_type", opt_level, model_list)
    overrides = opt_levels.Overrides(
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    )
    properties = opt_levels.resolve(opt_level, half, overrides)
    _check_available(properties, cast_model_outputs, keep_fp32, model_list)
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise OptionError(f"num_losses is {num_losses!r}; expected a whole number of at least 1.")
    settings = Settings(
        properties,
        _lists(cast_lists),
        make_policy(
            properties.loss_scale,
            init_scale=init_scale,
            scale_factor=scale_factor,
            scale_window=scale_window,
            hysteresis=hysteresis,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        ),
        num_losses,
    )
    live = session.process.live
    if live is not None and live.settings != settings:
        raise UsageError(
            f"amp is set up already with other settings ({live.settings.difference(settings)}). Type "
            f"amp.deinitialize() first, or give the same arguments."
        )
    _check_optimizers(optimizer_list, model_list, live)

    device_types = set().union(*(models_module.device_types(model) for model in model_list)) or _all_device_types()
    opened = session.open_session(settings, device_types) if live is None else live
    opened.verbose = bool(verbosity)
    try:
        opened.adopt(model_list, optimizer_list)
    except BaseException:
        if live is None:
            session.close_session(opened)
        raise
    session.process.disabled = False
    if verbosity:
        logger.info("amp is on: %s", properties)
    return models if optimizers is None else (models, optimizers)


def deinitialize() -> None:
    """Undoes everything: torch, models and optimizers are as they were. Does nothing where amp is not set up.

    Warns:
        AmpWarning: gradients were still scaled, after ``delay_unscale=True``, and were set to None; or somebody else
            replaced what amp had patched, and was left in place.
    """
    session.process.disabled = False
    live = session.process.live
    if live is not None:
        session.close_session(live)


class Handle:
    """What `init` returns: undoes what it did, by `deactivate` or at the end of a ``with`` block."""

    def __init__(self, opened: Session | None) -> None:
        self._session = opened

    def deactivate(self) -> None:
        """Takes the patches out; a second call does nothing."""
        if self._session is not None:
            session.close_session(self._session)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.deactivate()


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    half_dtype: torch.dtype | None = None,
    cast_lists: Overlay | None = None,
    patch_type: torch.dtype | None = None,
) -> Handle:
    """Patches torch's functions without adopting a model.

    An optimizer is adopted by the first `scale_loss` that it is given to.

    Args:
        enabled: False does nothing.
        loss_scale: a positive number, or "dynamic".
        enable_caching: whether cast weights are kept for the iteration.
        verbose: whether skipped steps are logged.
        allow_banned: whether banned functions run in float32 instead of raising.
        half_dtype: ``torch.float16`` or ``torch.bfloat16``; None: float16 where there is a GPU, else bfloat16.
        cast_lists: as for `initialize`.
        patch_type: the name that ROCm's Apex had for ``half_dtype``.

    Returns:
        A handle that undoes it.

    Raises:
        OptionError: an argument has a value that is not allowed.
        CastListError: the cast lists have faults.
        UsageError: amp is set up already.
    """
    if not _flag("enabled", enabled):
        session.process.disabled = session.process.live is None
        return Handle(None)
    half = _half_dtype(half_dtype, patch_type, "patch_type", "O1", [])
    properties = opt_levels.resolve("O1", half, opt_levels.Overrides(loss_scale=loss_scale))
    settings = Settings(
        properties,
        _lists(cast_lists),
        make_policy(properties.loss_scale),
        allow_banned=bool(allow_banned),
        enable_caching=bool(enable_caching),
        adopts_on_use=True,
    )
    opened = session.open_session(settings, _all_device_types())
    opened.verbose = bool(verbose)
    session.process.disabled = False
    return Handle(opened)


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,  # noqa: ARG001 - Apex had it
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scales a loss for the backward pass in the block, and unscales the gradients when the block ends.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Args:
        loss: floating, usually 0-dimensional.
        optimizers: one, or a list: those whose parameters receive gradients in the block.
        loss_id: which of ``num_losses`` scales to use.
        model: accepted because Apex had it; not needed.
        delay_unscale: leaves the gradients scaled, for a later block that adds to them and unscales.
        delay_overflow_check: lets a later block decide about the scale.

    Yields:
        ``loss.float() * scale``, of the shape of ``loss``. With amp disabled the loss itself.

    Raises:
        UsageError: before ``amp.initialize``; or gradients of two scales would be added up.
        OptionError: ``loss_id`` is out of range, or an argument is of the wrong kind.
    """
    if _is_disabled():
        yield loss
        return
    live = _require_session("amp.scale_loss")
    optimizer_list = [check_optimizer(optimizer) for optimizer in _as_list(optimizers)]
    if not optimizer_list:
        raise OptionError("amp.scale_loss got no optimizer, so that gradients would stay scaled; expected one or more.")
    with live.scale_loss(loss, optimizer_list, loss_id, delay_unscale, delay_overflow_check) as scaled_loss:
        yield scaled_loss


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Turns casts off in this thread: as a context manager, or as a decorator. Nests; an exception restores."""
    live = session.process.live
    if live is None:
        yield
        return
    with live.switch.disabled():
        yield


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterates over the parameters that an optimizer updates: clip the gradients of these.

    Raises:
        OptionError: it is no optimizer.
    """
    return parameters_of(check_optimizer(optimizer))


def state_dict() -> dict[str, dict[str, float | int]]:
    """The states of the loss scalers as plain numbers, under "loss_scaler0" and on. Waits for the device."""
    if _is_disabled():
        return {}
    scalers = _require_session("amp.state_dict").scalers
    return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(scalers)}


def load_state_dict(state_dict: Mapping[str, Mapping[str, object]]) -> None:
    """Takes over what `state_dict` gave, here or in Apex.

    Raises:
        OptionError: unexpected keys, or values that no scaler can have; nothing was changed.

    Warns:
        AmpWarning: the names of the scalers differ; those that both have are loaded.
    """
    if _is_disabled():
        return
    scalers = _require_session("amp.load_state_dict").scalers
    if not isinstance(state_dict, Mapping):
        raise OptionError(f"found {type(state_dict).__name__}; expected the dict that amp.state_dict() returned.")
    unexpected = [key for key in state_dict if not (str(key).startswith("loss_scaler") and str(key)[11:].isdigit())]
    if unexpected:
        raise OptionError(f"the state dict has unexpected keys {unexpected}; expected loss_scaler0, loss_scaler1, ...")
    known = {f"loss_scaler{index}": scaler for index, scaler in enumerate(scalers)}
    common = [name for name in known if name in state_dict]
    for name in common:
        known[name].read_state_dict(state_dict[name])  # all are checked before any is changed
    if state_dict.keys() != known.keys():
        warnings.warn(
            f"the state dict holds {', '.join(state_dict) or 'no loss scaler'}, and there "
            f"{'is' if len(known) == 1 else 'are'} {', '.join(known)}; loaded: {', '.join(common) or 'none'}. Others "
            "stay as they are.",
            AmpWarning,
            stacklevel=2,
        )
    for name in common:
        known[name].load_state_dict(state_dict[name])


def get_loss_scale(loss_id: int = 0) -> float:
    """The present scale of a loss; 1 with amp disabled. Waits for the device.

    Raises:
        OptionError: ``loss_id`` is out of range.
    """
    if _is_disabled():
        return 1.0
    return _require_session("amp.get_loss_scale").scaler(loss_id).state.loss_scale


def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last ``optimizer.step()`` was skipped because of an overflow.

    Raises:
        OptionError: it is no optimizer.
        UsageError: it was never handed to ``amp.initialize``.
    """
    if _is_disabled():
        return False
    return _require_session("amp.step_was_skipped").adopted(check_optimizer(optimizer)).step_was_skipped


def skipped_steps(optimizer: Any) -> int:
    """How many steps of an optimizer were skipped since it was handed to ``amp.initialize``.

    Raises:
        OptionError: it is no optimizer.
        UsageError: it was never handed to ``amp.initialize``.
    """
    if _is_disabled():
        return 0
    return _require_session("amp.skipped_steps").adopted(check_optimizer(optimizer)).skipped_steps


def clear_cache() -> None:
    """Drops the cast weights.

    Needed only after a change that no check can see: through ``.data``, between two forwards with gradients and no step
    between them.
    """
    live = session.process.live
    if live is not None:
        live.cache.clear()


def cast_counts() -> CastCounts:
    """How many tensors were cast since amp was set up, and how often a weight was found cast already.

    What compiled code casts is not counted.
    """
    live = session.process.live
    return CastCounts(0, 0) if live is None else CastCounts(live.cache.casts, live.cache.hits)


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
    return session.decorate(function, "whitelist")  # type: ignore[no-any-return]


def bfloat16_function(function: _F) -> _F:
    """Decorator: floating arguments are cast to bfloat16, whatever the half type is; otherwise as `half_function`."""
    return session.decorate(function, "bfloat16")  # type: ignore[no-any-return]


def float_function(function: _F) -> _F:
    """Decorator: half arguments are cast to float32; otherwise as `half_function`."""
    return session.decorate(function, "blacklist")  # type: ignore[no-any-return]


def promote_function(function: _F) -> _F:
    """Decorator: mixed floating arguments are cast to the widest type; otherwise as `half_function`."""
    return session.decorate(function, "promote")  # type: ignore[no-any-return]


def _register(owner: Any, name: str, treatment: Treatment, dtype: torch.dtype | None = None) -> None:
    if session.process.live is not None:
        raise UsageError("functions are registered before amp.initialize; type amp.deinitialize() first.")
    if isinstance(owner, str):
        raise OptionError(
            f"found the text {owner!r}; expected the module or class itself: import it, and leave the quotes out."
        )
    found = getattr(owner, name, None) if isinstance(name, str) else None
    where = getattr(owner, "__name__", repr(owner))
    if found is None:
        raise OptionError(f"{where} has no {name!r} to register.{did_you_mean(name, dir(owner))}")
    if not callable(found):
        raise OptionError(f"{where}.{name} is {type(found).__name__!r}; expected a function.")
    unfit = lists_module.why_unfit(Path(where, name), owner, found)
    if unfit:
        raise OptionError(unfit)
    session.register(Registration(owner, name, treatment, dtype))


def _is_disabled() -> bool:
    return session.process.disabled


def _require_session(what: str) -> Session:
    live = session.process.live
    if live is None:
        raise UsageError(
            f"{what} was called before amp.initialize. Type model, optimizer = amp.initialize(model, optimizer) first."
        )
    return live


def _flag(name: str, value: object) -> bool:
    """Any truth value; but of strings only those that a script makes of one, since "no" counts as true in Python."""
    return bool(opt_levels.check_flag(name, value) if isinstance(value, str) else value)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _half_dtype(
    given: torch.dtype | None, alias: torch.dtype | None, alias_name: str, opt_level: str, models: Iterable[nn.Module]
) -> torch.dtype:
    """The half type asked for; else the live session's, so that a second model joins; else what suits the device."""
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
    live = session.process.live
    if live is not None:
        return live.settings.properties.half_dtype
    types = set().union(*(models_module.device_types(model) for model in models)) or _all_device_types()
    return torch.bfloat16 if types == {"cpu"} else torch.float16


def _all_device_types() -> set[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}


def _lists(overlay: Overlay | None) -> lists_module.CastLists:
    shipped = lists_module.shipped()
    return shipped if overlay is None else shipped.overlaid(overlay)


def _check_available(
    properties: opt_levels.Properties, cast_model_outputs: object, keep_fp32: object, models: Iterable[nn.Module]
) -> None:
    converts = {
        "opt_level": None if properties.opt_level in _LEVELS_THAT_RUN else properties.opt_level,
        "cast_model_type": None if properties.cast_model_type in (None, torch.float32) else properties.cast_model_type,
        "cast_model_outputs": cast_model_outputs,
        "keep_fp32": keep_fp32,
    }
    for name, value in converts.items():
        if value is not None:
            raise OptionError(
                f"{name}={value!r} needs the conversion of weights, which this version does not have; "
                f"expected one of the levels {', '.join(_LEVELS_THAT_RUN)}."
            )
    if properties.cast_model_type is torch.float32:
        for name, parameter in (pair for model in models for pair in model.named_parameters()):
            if parameter.dtype in opt_levels.HALF_DTYPES.values():
                raise OptionError(
                    f"the model's parameter {name!r} is {parameter.dtype}, where opt_level={properties.opt_level!r} "
                    "has float32 weights, and this version does not convert any. Type model.float() before making the "
                    "optimizer."
                )


def _check_optimizers(optimizers: list[Any], models: list[nn.Module], live: Session | None) -> None:
    known = {id(parameter) for model in models for parameter in model.parameters()}
    known |= live.parameter_ids() if live is not None else set()
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
