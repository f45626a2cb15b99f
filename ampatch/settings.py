"""The settings of a session as a value: compared with other settings, described in words, exported as plain data.

Owns only values. Must never read a device, nor know whether a session is live.
"""

from __future__ import annotations

import collections
import html
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import yaml

from ampatch import opt_levels
from ampatch.cast_lists import list_edits
from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.rules import FLOAT32, UNLISTED, ModuleRules
from ampatch.half_types import HALVES
from ampatch.opt_levels import Properties
from ampatch.scaling.loss_scaler import ScalePolicy
from ampatch.scaling.overflows import OnOverflow, name_of_choice
from ampatch.weights.conversion_plan import CastBuffers, KeepFloat32

#: The arguments of ``amp.initialize`` that are fields of a scale's policy. `dynamic` is ``loss_scale``.
SCALE_ARGUMENTS = [field.name for field in fields(ScalePolicy) if field.name != "dynamic"]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a session. Two calls of ``initialize`` may share a session if their settings are equal.

    Attributes:
        properties: properties of the opt level, with overrides applied.
        lists: cast lists.
        scale_policy: policy of the loss scales.
        num_losses: number of loss scales.
        allow_banned: True if banned functions run in float32 instead of raising.
        enable_caching: True if casts of weights are kept for reuse.
        adopts_on_use: True if an optimizer is adopted when the first loss is scaled for it.
        keep_fp32: submodules that stay in float32 if weights are converted, with those of `float32_outputs`.
        float32_outputs: those of them whose outputs stay in float32 as well.
        cast_buffers: buffers that become half with the weights: all, none, or those of these names and patterns.
        cast_model_outputs: dtype of the models' outputs; None: float32 if weights are converted, else unchanged.
        exact_hooks: True if a skipped step fires no hooks, at the cost of a sync with the device.
        profile_casts: True if casts have labels in ``torch.profiler``.
        on_overflow: what happens after a skipped step.
        check_finite: True if steps look for inf and NaN in their gradients, whatever the scale.
        fused_linear: True if linear layers that are cast to half are one node of the graph, with float32 gradients.
        optimizer_state: the type of an optimizer's float32 state between steps, if masters exist only while it steps.
    """

    properties: Properties
    lists: CastLists
    scale_policy: ScalePolicy
    num_losses: int = 1
    allow_banned: bool = False
    enable_caching: bool = True
    adopts_on_use: bool = False
    keep_fp32: KeepFloat32 = ()
    float32_outputs: KeepFloat32 = ()
    cast_buffers: CastBuffers = False
    cast_model_outputs: torch.dtype | None = None
    exact_hooks: bool = False
    profile_casts: bool = False
    on_overflow: OnOverflow = "explain"
    check_finite: bool = False
    fused_linear: bool = False
    optimizer_state: str = "float32"

    @property
    def patches_functions(self) -> bool:
        """True if torch's functions cast by the lists."""
        return self.properties.patch_torch_functions

    @property
    def has_half_weights(self) -> bool:
        """True if models are converted to a half type."""
        return self.properties.cast_model_type in HALVES

    @property
    def has_masters(self) -> bool:
        """True if half weights get float32 masters, also those that were half before, if no weight is converted."""
        return self.properties.master_weights is True and self.properties.cast_model_type is not torch.float32

    @property
    def temporary_masters(self) -> str | None:
        """How half weights are kept if they have float32 masters only while the optimizer steps; None: otherwise."""
        kind = self.properties.master_weights
        return kind if isinstance(kind, str) else None

    @property
    def steps_in_float32(self) -> bool:
        """True if half weights have masters, or get them for a step."""
        return self.has_masters or self.temporary_masters is not None

    @property
    def patches_any(self) -> bool:
        """True if some functions are patched: by the lists, or for models with half weights."""
        return self.patches_functions or self.has_half_weights

    @property
    def casts_for_models(self) -> bool:
        """True if the whitelist casts for the work of adopted models only, and not in the whole process."""
        return self.patches_functions and not self.adopts_on_use

    @property
    def casts_in_half(self) -> bool:
        """True if functions cast what meets a half weight, and nothing by the lists but what needs float32."""
        return self.has_half_weights and not self.patches_functions

    def difference(self, asked: Settings) -> str:
        """Returns text that names each argument in which ``asked`` differs, with both values; empty if none does."""
        told: list[str] = []
        if self.adopts_on_use != asked.adopts_on_use:
            told.append(f"it was set up by {_set_up_by(self)} (this call: {_set_up_by(asked)})")
        both = opt_levels.difference(self.properties, asked.properties)
        both |= {
            name: (getattr(self.scale_policy, name), getattr(asked.scale_policy, name)) for name in SCALE_ARGUMENTS
        }
        if not (self.scale_policy.dynamic and asked.scale_policy.dynamic):
            del both["init_scale"]  # a static scale starts at loss_scale, compared above
        both |= {name: (getattr(self, name), getattr(asked, name)) for name in _PLAIN_FIELDS}
        if self.properties.patch_torch_functions != asked.properties.patch_torch_functions:
            del both["fused_linear"]  # its default follows from that
        both["on_overflow"] = mine, other = name_of_choice(self.on_overflow), name_of_choice(asked.on_overflow)
        if mine == other and self.on_overflow != asked.on_overflow:
            both["on_overflow"] = mine, f"another {other}"
        both["keep_fp32"] = kept_names(self.keep_fp32), kept_names(asked.keep_fp32)
        both["float32_outputs"] = kept_names(self.float32_outputs), kept_names(asked.float32_outputs)
        told += [f"{name} is {live!r} (this call: {other!r})" for name, (live, other) in both.items() if live != other]
        if self.properties.patch_torch_functions == asked.properties.patch_torch_functions:
            entries = list_edits.difference(self.lists, asked.lists)
            told += [f"cast_lists: {', '.join(entries)}"] if entries else []
        return "; ".join(told)

    def as_plain_data(self) -> dict[str, Any]:
        """Returns the arguments that lead to these settings, and the function that took them, as plain data."""
        weights = self.properties.cast_model_type
        leaves_weights = weights is None and opt_levels.LEVELS[self.properties.opt_level].weights is not None
        return {
            "set_up_by": _set_up_by(self),
            **{name: _plain(getattr(self.properties, name)) for name in opt_levels.ARGUMENTS},
            "cast_model_type": False if leaves_weights else _plain(weights),
            "keep_fp32": kept_names(self.keep_fp32) or [],
            "float32_outputs": kept_names(self.float32_outputs) or [],
            "cast_buffers": self.cast_buffers if isinstance(self.cast_buffers, bool) else list(self.cast_buffers),
            "cast_model_outputs": _plain(self.cast_model_outputs),
            "cast_lists": list(self.lists.files),
            "modules": [_entry(entry) for entry in self.lists.modules],
            "num_losses": self.num_losses,
            **{name: getattr(self.scale_policy, name) for name in SCALE_ARGUMENTS},
            **{name: getattr(self, name) for name in _FLAGS},
            "on_overflow": name_of_choice(self.on_overflow),
        }

    @classmethod
    def of_plain_data(cls, plain: Mapping[str, Any], lists: CastLists) -> Settings:
        """Returns the settings that `as_plain_data` has described, with cast lists and the default ``on_overflow``."""

        def dtype(name: str) -> torch.dtype | None:
            return getattr(torch, plain[name]) if plain[name] else None

        typed = {name: dtype(name) for name in ("half_dtype", "cast_model_type")}
        buffers = plain["cast_buffers"]
        return cls(
            Properties(**{name: plain[name] for name in opt_levels.ARGUMENTS} | typed),
            lists,
            ScalePolicy(plain["loss_scale"] == "dynamic", **{name: plain[name] for name in SCALE_ARGUMENTS}),
            num_losses=plain["num_losses"],
            keep_fp32=tuple(plain["keep_fp32"]),
            float32_outputs=tuple(plain["float32_outputs"]),
            cast_buffers=buffers if isinstance(buffers, bool) else tuple(buffers),
            cast_model_outputs=dtype("cast_model_outputs"),
            **{name: plain[name] for name in _FLAGS if name in plain},  # older files lack some
        )


_FLAGS = (
    *("exact_hooks", "check_finite", "fused_linear", "allow_banned", "enable_caching", "profile_casts"),
    "optimizer_state",
)
_PLAIN_FIELDS = ("num_losses", "cast_buffers", "cast_model_outputs", *_FLAGS)


class LiveSettings(dict[str, Any]):
    """The dict that ``amp.settings`` returns: it prints as lines, and in a notebook as a table.

    Pickles and YAML files of it contain no class of ampatch.
    """

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {value!r}" for name, value in self.items()) or "{}"

    def _repr_html_(self) -> str:
        cells = ((html.escape(str(name)), html.escape(repr(value))) for name, value in self.items())
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
        return f"<table>{rows}</table>"

    def __reduce__(self) -> tuple[Any, ...]:
        # An OrderedDict: of the dict classes, torch.load(weights_only=True) calls only this one.
        return collections.OrderedDict, (), None, None, iter(self.items())


yaml.representer.SafeRepresenter.add_representer(LiveSettings, yaml.representer.SafeRepresenter.represent_dict)
yaml.representer.Representer.add_representer(LiveSettings, yaml.representer.SafeRepresenter.represent_dict)


def _set_up_by(settings: Settings) -> str:
    return "amp.init" if settings.adopts_on_use else "amp.initialize"


def kept_names(keep_fp32: KeepFloat32) -> list[str] | None:
    """Returns names, patterns and class names in the form that ``keep_fp32`` takes; None if there are none."""
    return [one if isinstance(one, str) else one.__name__ for one in keep_fp32] or None


def _entry(entry: ModuleRules) -> str:
    """Returns an entry for parts of a model as text: "head: float32", or its formats and the functions by list."""
    if entry.changes is None:
        return f"{entry.name}: {FLOAT32}"
    lists: dict[str, dict[str, None]] = {}
    for (path, _), rule in entry.changes:
        lists.setdefault(UNLISTED if rule is None else rule.treatment.value, {})[str(path)] = None
    formats = [] if entry.formats is None else [str(entry.formats)]
    told = "; ".join([*formats, *(f"{name} {', '.join(paths)}" for name, paths in lists.items())])
    return f"{entry.name}: {told or 'as the session'}"


def _plain(value: object) -> object:
    return opt_levels.dtype_name(value) if isinstance(value, torch.dtype) else value
