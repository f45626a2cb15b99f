"""Names the functions of torch that demand arguments of one type, and their treatment in models with half weights.

In these models a half weight may meet a float32 input, buffer or mask. The user's lists do not change the treatment,
because without the casts torch raises. Must not know how arguments are cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, find_or
from ampatch.cast_lists.rules import Treatment
from ampatch.cast_lists.spellings import spellings
from ampatch.casting.nested import Adapt
from ampatch.function_wrapper import unwrapped
from ampatch.half_types import HALVES
from ampatch.patching.adapters import Adapters, Function, InHalf
from ampatch.patching.emulation import Casts
from ampatch.switch import KINDS
from ampatch.torch_private.operators import WEIGHT_NORM

# In addition to the whitelist: layers with weights, whose results are half, like those of products. torch.rms_norm
# takes mixed types on the CPU, but gives a float32 result.
_WITH_WEIGHTS = [
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "native_group_norm",
    "rms_norm",
    "bilinear",
    "embedding_bag",
    "linear_cross_entropy",
]
# In addition to the promote list: positions, and losses with weights, where float32 loses nothing.
_PROMOTED = [
    "binary_cross_entropy",
    "cross_entropy",
    "grid_sample",
    "grid_sampler",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "histogramdd",
    "huber_loss",
    "nll_loss",
]
# Their masks may hold numbers beyond the half type's range.
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
# Kernels take half inputs with float32 weights and statistics. torch.nn calls them by these names.
_WITH_STATISTICS = (Path("torch.nn.functional", "batch_norm"), Path("torch.nn.functional", "instance_norm"))


def functions() -> Iterator[tuple[Path, InHalf]]:
    """Yields the functions that this torch has. If a function occurs twice, its first treatment counts."""
    yield from ((path, treatment) for path, treatment in _named() if find_or(path) is not None)


def _named() -> Iterator[tuple[Path, InHalf]]:
    yield Path("torch.Tensor", "__setitem__"), InHalf.PROMOTE
    for path in _WITH_STATISTICS:
        yield path, InHalf.NORMALISE
    for path in (Path("torch.sparse", "mm"), Path("torch.sparse", "addmm"), Path("torch", WEIGHT_NORM)):
        yield path, InHalf.BESIDE
    for names, treatment in ((_WITH_WEIGHTS, InHalf.BESIDE), (_PROMOTED, InHalf.PROMOTE)):
        for name in names:
            yield from ((path, treatment) for path in spellings(name))
    (half, _) = HALVES
    of = {Treatment.WHITELIST: InHalf.BESIDE, Treatment.PROMOTE: InHalf.PROMOTE}
    for path, rule in shipped().for_half(half).items():
        if rule.treatment in of:
            yield path, InHalf.ATTENTION if path.name in _ATTENTION else of[rule.treatment]


#: The forms of addition that are patched for models with `tables`. In-place forms keep the type that they write to.
ADDITION = (Path("torch", "add"), *(Path("torch.Tensor", name) for name in ("add", "__add__", "__radd__")))


def tables(model: nn.Module) -> Iterator[Tensor]:
    """Yields the tables of a model: float32 buffers of values that are added to activations, such as positions.

    A table has at least two dimensions and, like sines, no value beyond 1. Masks, biases of attention and positions
    have greater values, and sums begin with zeros. The adapter also checks what a table is added to.
    """
    for buffer in model.buffers():
        if (
            buffer.dtype is torch.float32
            and buffer.layout is torch.strided
            and not buffer.is_nested
            and buffer.device.type != "meta"
            and sum(size > 1 for size in buffer.shape) > 1
            and 0 < float(buffer.detach().abs().max()) <= 1
        ):
            yield buffer if buffer._base is None else buffer._base


class CastingBesideHalf(TorchFunctionMode):
    """Makes the casts of models with half weights in this thread, for copies that belong to no session."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch."""
        adapt = _adapts.get(func)
        args, kwargs = (args, kwargs or {}) if adapt is None else adapt(args, kwargs or {})
        return func(*args, **kwargs)


_adapts: dict[Function, Adapt] = {}


def prepare_mode() -> None:
    """Prepares `CastingBesideHalf`, once in a process. Must run before torch.compile traces the mode."""
    if _adapts:
        return
    adapters = Adapters(torch.float16, Casts(), {*KINDS, "meta"}, hears_regions=False)
    for path, treatment in functions():
        function: Any = unwrapped(find_or(path))
        _adapts.setdefault(function, adapters.in_half(treatment, path, function).adapt)
