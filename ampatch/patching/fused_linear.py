"""Runs a linear layer as one node of autograd's graph, whose backward pass gives the weight a float32 gradient.

Decides which calls of ``torch.nn.functional.linear`` with cast arguments may become that node, and has the node in
Python. csrc/calls/fused_linear.cpp does the same in C++, and must decide as this module does. All other calls run
torch's function, with the same casts. Users must not notice the node; docs/guide/fused_linear.md lists the
differences. Must not cast arguments: the function's adapter does.

Without the node, the weight's gradient is rounded to half, cast to float32 by a second kernel, and can overflow in
half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_compiling
from torch.nn import Parameter

from ampatch.casting.nested import Arguments
from ampatch.half_types import HALVES
from ampatch.native.selection import checked
from ampatch.torch_private import autograd, modes, tensors
from ampatch.torch_private.operators import LINEAR, UNSAFE_VIEW
from ampatch.tracing import is_traced

# Operators, because torch's functions of these names are patched, and would cast.
_mm: Callable[[Tensor, Tensor], Tensor] = torch.ops.aten.mm.default
_mm_to_float32: Callable[[Tensor, Tensor, torch.dtype], Tensor] = torch.ops.aten.mm.dtype
_sum = torch.ops.aten.sum.dim_IntList

#: Name of the node.
NODE = "FusedLinearBackward"

#: How weight gradients are computed. "auto": half operands and a float32 result where torch has such a product (on
#: CUDA); elsewhere like "half". "half": a half product that is cast to float32, bit for bit as without the node.
#: "float32": like "auto" on CUDA; elsewhere the operands are float32, to count overflows on a CPU.
PRODUCTS = ("auto", "half", "float32")


class LinearCalls:
    """Makes calls of ``torch.nn.functional.linear``, as one node where that is possible.

    Attributes:
        product: how weight gradients are computed: one of `PRODUCTS`.

    Raises:
        OptionError: the environment variable AMPATCH_FUSED_LINEAR has another value.
    """

    def __init__(self) -> None:
        asked = checked("AMPATCH_FUSED_LINEAR", PRODUCTS)
        # ROCm's GPUs are "cuda" as well, but the product with a float32 result was never tried on one.
        self.product = "half" if asked == "auto" and torch.version.hip is not None else asked

    def call(self, given: Arguments, adapted: Arguments) -> Tensor:
        """Returns the result of a call.

        Args:
            given: arguments of the call.
            adapted: arguments as the rule in force adapts them.
        """
        layer, casts = _layer(*given), _layer(*adapted)
        if layer is None or casts is None or not _may_be_one_node(layer, casts):
            return LINEAR(*adapted[0], **adapted[1])
        half = _Halves(casts.weight, casts.bias, self.product)
        result: Tensor = FusedLinear.apply(casts.input, layer.bias, layer.weight, half)  # type: ignore[no-untyped-call]
        return result


class _Layer(NamedTuple):
    """Arguments of a call."""

    input: Any
    weight: Any
    bias: Any = None


def _layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Layer | None:
    """Returns input, weight and bias; None if the call has other arguments, or lacks one."""
    try:
        return _Layer(*args, **kwargs)
    except TypeError:
        return None


def _may_be_one_node(layer: _Layer, casts: _Layer) -> bool:
    """Returns True for plain tensors and trained float32 parameters of fitting shapes, in plain eager code."""
    input, weight, bias = casts.input, layer.weight, layer.bias
    return (
        type(weight) is Parameter
        and weight.requires_grad
        and _is_plain_code()  # before shapes: tracers record reads of shapes
        and casts.weight.dtype in HALVES
        and type(input) in (Tensor, Parameter)
        and input.dtype is casts.weight.dtype
        and tensors.is_plain(input)
        and _is_weight(weight)
        and weight.dim() == 2
        and input.dim() >= 2
        and input.shape[-1] == weight.shape[1]
        and input.numel() > 0
        and weight.numel() > 0
        and input.device == weight.device
        and (bias is None or (_is_weight(bias) and (bias.shape, bias.device) == (weight.shape[:1], weight.device)))
    )


def _is_plain_code() -> bool:
    """Returns True if this thread records gradients, and no mode, tracer, transform or autocast is active."""
    return (
        is_grad_enabled()
        and not is_inference_mode_enabled()
        and not modes.len_function_stack()
        and not modes.is_any_autocast_enabled()
        and modes.peek_interpreter_stack() is None
        and not is_traced()
    )


def _is_weight(given: Any) -> bool:
    return type(given) is Parameter and given.dtype is torch.float32 and given.is_leaf and tensors.is_plain(given)


class _Halves(NamedTuple):
    """What the node computes with, beside its inputs. Autograd does not look for tensors in it.

    Attributes:
        weight: cast of the weight, with its graph, which a second backward pass follows.
        bias: cast of the bias; None if there is no bias.
        product: how weight gradients are computed.
    """

    weight: Tensor
    bias: Tensor | None
    product: str


class FusedLinear(torch.autograd.Function):
    """The node. Weight and bias are float32 leaves; it computes with their half casts.

    The bias comes before the weight, so that autograd finishes the bias's gradient first, as without the node. DDP, for
    example, orders its buckets by the order in which gradients arrive.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,  # noqa: ARG004 - an input of the node, so that the bias gets a gradient
        weight: Tensor,  # noqa: ARG004 - as for the bias
        half: _Halves,
    ) -> Tensor:
        """Returns the half result, of shape (..., out_features)."""
        ctx.set_materialize_grads(False)
        # As in torch: if the input needs no gradient, the backward pass does not need the cast.
        ctx.save_for_backward(input, half.weight if input.requires_grad else None)
        ctx.product = half.product
        ctx.has_usual_layout = half.weight.stride() == (half.weight.shape[1], 1)
        result = LINEAR(input, half.weight, half.bias)
        # autograd forbids writing to a view that a Function returns.
        return UNSAFE_VIEW(result, result.shape) if tensors.is_view(result) else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Returns the gradients that this pass asks for: half for the input, float32 for weight and bias."""
        if grad is None:
            return None, None, None, None
        input, weight = ctx.saved_tensors
        of_input, of_bias, of_weight = _asked_for(ctx)
        rows, inputs = _as_rows(grad), _as_rows(input)
        input_gradient = _input_gradient(rows, inputs, weight, input.shape) if of_input else None
        del weight
        if not is_compiling():
            ctx.maybe_clear_saved_tensors()  # frees the cast's memory for later work, unless the graph is retained
        return (
            input_gradient,
            _bias_gradient(rows, ctx.product) if of_bias else None,
            _weight_gradient(rows, inputs, ctx.has_usual_layout, ctx.product) if of_weight else None,
            None,
        )


def _asked_for(ctx: Any) -> list[bool]:
    """Returns which of input, bias and weight need a gradient in this pass: ``backward(inputs=...)`` needs only some.

    An input that needs a gradient has an edge of the graph. A layer without a bias has no edge for it.
    """
    needed: list[bool] = list(ctx.needs_input_grad[:3])
    if not is_compiling():
        edges = [0, 1, 2] if len(ctx.next_functions) > 2 else [0, 0, 1]
        for index, edge in enumerate(edges):
            needed[index] = needed[index] and _will_run(ctx.next_functions[edge][0])
    return needed


def _will_run(node: Any) -> bool:
    try:
        return autograd.will_engine_execute_node(node)
    except RuntimeError:  # torch cannot tell, for a leaf whose gradient `torch.autograd.grad` returns
        return True


def _as_rows(tensor: Tensor) -> Tensor:
    # As in torch, a matrix stays as it is, because a reshape changes strides of dimensions of size 1.
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _input_gradient(rows: Tensor, inputs: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    # As in torch's own backward pass, the layout of the other factor decides the order of operands. So bits are equal.
    is_column_major = inputs.stride() == (1, inputs.shape[0])
    found = _mm(weight.t(), rows.t()).t() if is_column_major else _mm(rows, weight)
    return found if len(shape) == 2 else found.reshape(shape)


def _weight_gradient(rows: Tensor, inputs: Tensor, has_usual_layout: bool, product: str) -> Tensor:
    left, right = (rows, inputs) if has_usual_layout else (inputs, rows)
    if _is_in_float32(rows, product):
        with modes.DisableAutocast():  # autocast would round the operands, in a backward pass inside its region
            # torch cannot differentiate the product with a float32 result.
            found = (
                _mm(left.t().float(), right.float())
                if is_grad_enabled() or not _is_on_gpu(rows)
                else _mm_to_float32(left.t(), right, torch.float32)
            )
    else:
        found = _mm(left.t(), right).float()
    return found if left is rows else found.t()


def _bias_gradient(rows: Tensor, product: str) -> Tensor:
    gradient: Tensor = _sum(rows, [0], False, dtype=torch.float32 if _is_in_float32(rows, product) else None)
    return gradient.float()


def _is_in_float32(rows: Tensor, product: str) -> bool:
    """Returns True to compute the gradients of weight and bias in float32, from half gradients of a layer."""
    return product == "float32" or (product == "auto" and _is_on_gpu(rows))


def _is_on_gpu(tensor: Tensor) -> bool:
    # `ampatch run --cpu` makes is_cuda True on the CPU, which has no kernel for products of halves into float32.
    return tensor.device.type == "cuda"
