"""Puts a recurrent layer's half weights into one buffer, laid out as cuDNN expects it.

If the weights of a call are spread over several buffers, cuDNN copies them into one in each forward pass, and warns.
Owns which calls and layers get such a buffer, and the place of each weight in it. Must neither choose dtypes nor keep
casts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.backends.cudnn.rnn
from torch import Tensor, nn
from torch.nn import Parameter

from ampatch.casting.nested import CASTABLE
from ampatch.torch_private.modules import FLAT_WEIGHTS
from ampatch.torch_private.operators import VF, cudnn_rnn_flatten_weight, use_cudnn_rnn_flatten_weight

# torch's name of each function's mode.
_MODES: dict[Callable[..., Any], str] = {
    VF.lstm: "LSTM",
    VF.gru: "GRU",
    VF.rnn_tanh: "RNN_TANH",
    VF.rnn_relu: "RNN_RELU",
}
# The number of gates whose matrices are stacked in one weight.
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

# The first version of cuDNN that runs torch's recurrent layers in bfloat16.
_WITH_BFLOAT16 = 91300


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of weights in one buffer.

    Attributes:
        numel: number of elements in the buffer.
        offsets: offset of each weight in it, in elements.
    """

    numel: int
    offsets: tuple[int, ...]

    def cast(self, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Returns casts of the weights in one new buffer, each linked to its weight in the graph."""
        # Zeros, because no weight lies in the gaps that cuDNN may leave.
        buffer = torch.zeros(self.numel, dtype=dtype, device=weights[0].device)
        casts = []
        for offset, weight in zip(self.offsets, weights, strict=True):
            # Not a view of the buffer: views share a version counter, so a write to one cast would count for all.
            cast = torch.empty(0, dtype=dtype, device=buffer.device)
            cast.set_(buffer.untyped_storage(), offset, weight.shape)  # type: ignore[call-overload]  # without strides
            casts.append(cast.copy_(weight))
        return casts

    def holds(self, casts: Sequence[Tensor]) -> bool:
        """Returns True if these tensors lie in one buffer, at the offsets of this layout."""
        start = casts[0].untyped_storage().data_ptr()
        return all(
            cast.untyped_storage().data_ptr() == start and cast.storage_offset() == offset
            for offset, cast in zip(self.offsets, casts, strict=True)
        )


def is_recurrent(function: object) -> bool:
    """Returns True if a function runs whole recurrent layers on a list of their weights."""
    return function in _MODES


def place_of_weights(args: tuple[Any, ...]) -> int | None:
    """Returns the position of the list of weights among a call's arguments; None if the call has another form.

    Hidden states, which precede the weights, may be a tuple too. Only the weights are followed by ``has_biases``.
    """
    for place in (2, 3):  # with a padded and with a packed sequence
        if len(args) > place + 5 and isinstance(args[place], (list, tuple)) and isinstance(args[place + 1], bool):
            return place
    return None


def can_share_memory(weights: Sequence[object], dtype: torch.dtype) -> TypeGuard[Sequence[Tensor]]:
    """Returns True if a cast to ``dtype`` changes any of the weights, and their casts can lie in one buffer."""
    dtypes, devices = set(), set()
    for weight in weights:
        if type(weight) is not Parameter and type(weight) is not Tensor:
            return False
        if weight.layout is not torch.strided:
            return False
        dtypes.add(weight.dtype)
        devices.add(weight.device)
    return dtypes <= CASTABLE and bool(dtypes - {dtype}) and len(devices) == 1


def layout_of(function: Callable[..., Any], args: tuple[Any, ...], place: int, dtype: torch.dtype) -> Layout:
    """Returns the layout for the cast weights of a call: cuDNN's if cuDNN runs it, otherwise one after the other.

    Args:
        function: one for which `is_recurrent` holds.
        args: positional arguments of the call.
        place: position of the weights among them.
        dtype: type of the casts.
    """
    weights, _, num_layers, _, _, bidirectional = args[place : place + 6]
    layout = _layout_if_cudnn_runs(_MODES[function], weights, num_layers, bool(bidirectional), dtype)
    return layout or _in_order(tuple(weight.shape for weight in weights))


def flatten(model: nn.Module) -> None:
    """Puts the weights of each recurrent layer in a model into one buffer, if cuDNN runs the layer.

    torch's own method leaves bfloat16 weights where they are.
    """
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()
            _flatten_bfloat16(layer)


def _flatten_bfloat16(layer: nn.RNNBase) -> None:
    weights: list[Any] = getattr(layer, FLAT_WEIGHTS)
    if {(type(weight), getattr(weight, "dtype", None)) for weight in weights} != {(Parameter, torch.bfloat16)}:
        return
    if len({weight.data_ptr() for weight in weights}) != len(weights):
        return  # weights that share memory keep it, as in torch's own method
    layout = _layout_if_cudnn_runs(layer.mode, weights, layer.num_layers, layer.bidirectional, torch.bfloat16)
    if layout is not None and not layout.holds(weights):
        with torch.inference_mode(False), torch.no_grad():
            laid = layout.cast(weights, torch.bfloat16)
        for weight, data in zip(weights, laid, strict=True):
            weight.data = data


def _layout_if_cudnn_runs(
    mode: str, weights: Sequence[Tensor], num_layers: int, bidirectional: bool, dtype: torch.dtype
) -> Layout | None:
    """Returns cuDNN's layout of weights in a type, under the conditions of `nn.RNNBase.flatten_parameters`."""
    device = weights[0].device
    layers = num_layers * (2 if bidirectional else 1)
    # If the number of weights is wrong, the function itself raises.
    if _cudnn_takes(dtype, device) and use_cudnn_rnn_flatten_weight() and layers and len(weights) % layers == 0:
        shapes = tuple(weight.shape for weight in weights)
        return _layout_of_cudnn(mode, shapes, num_layers, bidirectional, dtype, device)
    return None


def _cudnn_takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if cuDNN runs torch's recurrent layers in a type.

    `is_acceptable` returns False for bfloat16. torch's C++ accepts it if the version of cuDNN and the device do.
    """
    is_bfloat16 = dtype is torch.bfloat16
    asked = torch.empty(0, dtype=torch.float16 if is_bfloat16 else dtype, device=device)
    takes: bool = torch.backends.cudnn.is_acceptable(asked)
    if takes and is_bfloat16:
        takes = torch.backends.cudnn.version() >= _WITH_BFLOAT16 and torch.cuda.get_device_capability(device) >= (8, 0)
    return takes


@functools.cache
def _in_order(shapes: tuple[torch.Size, ...]) -> Layout:
    *offsets, numel = itertools.accumulate((shape.numel() for shape in shapes), initial=0)
    return Layout(numel, tuple(offsets))


@functools.cache
def _layout_of_cudnn(
    mode: str,
    shapes: tuple[torch.Size, ...],
    num_layers: int,
    bidirectional: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """Lets cuDNN move tensors without values into one buffer, and returns where it has put them."""
    per_layer = len(shapes) // (num_layers * (2 if bidirectional else 1))
    has_projection = per_layer % 2 == 1  # two matrices, two biases and the projection
    with torch.inference_mode(False), torch.no_grad():
        moved = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    with torch.cuda.device_of(moved[0]), torch.no_grad():
        buffer: Tensor = cudnn_rnn_flatten_weight(
            moved,
            per_layer,
            shapes[0][1],
            torch.backends.cudnn.rnn.get_cudnn_mode(mode),
            shapes[0][0] // _GATES[mode],
            shapes[per_layer - 1][0] if has_projection else 0,
            num_layers,
            False,  # whether the batch comes first, which does not affect the weights
            bidirectional,
        )
    return Layout(buffer.numel(), tuple(int(tensor.storage_offset()) for tensor in moved))
