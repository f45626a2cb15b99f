"""The public names of ampatch. Must define nothing: functions are in `ampatch.public`, classes where they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# First, as `ampatch run --report` begins when torch is imported, and then imports modules of ampatch itself.
import torch  # noqa: F401

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
)
from ampatch.patching.weight_cache import CastCounts
from ampatch.public.casts import (
    bfloat16_function,
    cast_counts,
    clear_cache,
    convert_model,
    disable_casts,
    float_function,
    frozen_weights,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampatch.public.setting_up import Handle, deinitialize, init, initialize, is_on, settings
from ampatch.public.tools import compare, explain, preflight, replay, report, tune, what_if
from ampatch.public.training import (
    clip_grad_norm_,
    get_loss_scale,
    gradients_are_finite,
    grads_are_unscaled,
    load_state_dict,
    master_params,
    scale_loss,
    skipped_steps,
    state_dict,
    stats,
    step_was_skipped,
    unscale_,
)
from ampatch.scaling.loss_scaler import LossScaler
from ampatch.scaling.overflows import NonFiniteGradient, Overflow, ScaleChange

if TYPE_CHECKING:
    from ampatch.diagnostics.compare.result import Comparison
    from ampatch.diagnostics.explain.result import Explanation
    from ampatch.diagnostics.preflight.result import LevelVerdict, Preflight
    from ampatch.diagnostics.replay.result import Replay
    from ampatch.diagnostics.report.report import Report
    from ampatch.diagnostics.tune.result import Tuning
    from ampatch.diagnostics.what_if.result import FormatNoise, WhatIf

__all__ = [
    "AmpError",
    "AmpWarning",
    "BannedFunctionError",
    "CastCounts",
    "CastListError",
    "Comparison",
    "Explanation",
    "FormatNoise",
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
    "WhatIf",
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
    "what_if",
]


def __dir__() -> list[str]:
    return __all__  # completion offers public names only


#: Classes of `ampatch.diagnostics`, which is imported only by those who use it.
_IMPORTED_ON_USE = {
    "Comparison": "compare.result",
    "Explanation": "explain.result",
    "FormatNoise": "what_if.result",
    "LevelVerdict": "preflight.result",
    "Preflight": "preflight.result",
    "Replay": "replay.result",
    "Report": "report.report",
    "Tuning": "tune.result",
    "WhatIf": "what_if.result",
}


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_ON_USE:
        return getattr(importlib.import_module(f"ampatch.diagnostics.{_IMPORTED_ON_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
