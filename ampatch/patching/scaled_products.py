"""Runs products in float8 on the device, by torch's public scaled_mm with scales that follow each tensor.

Decides which calls of a function with `products: device` the device can make. Has the node of autograd that makes them:
the product of the forward pass, and those of the two gradients. Each operand is cast once for both of its uses, in rows
and in columns, because the device sums products up along rows only. Calls that the device refuses run in half; amp says
so once for each reason. Must not round: torch's casts to float8 do. Must not keep a cast: the cache of weights does.

Float8 training with a scale for each tensor: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting
from torch.nn import Parameter
from torch.nn.functional import ScalingType, scaled_mm

from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Formats
from ampatch.casting.rounding import largest_of, scale_for
from ampatch.compilers import constant_while_traced
from ampatch.errors import UsageError, warn
from ampatch.formats import Format
from ampatch.half_types import HALVES
from ampatch.switch import Switch
from ampatch.torch_private import modes
from ampatch.torch_private.operators import UNSAFE_VIEW

#: Devices multiply matrices whose sizes are multiples of this.
MULTIPLE = 16

#: The first compute capability of GPUs with float8 products.
_CAPABILITY = (8, 9)


class ScaledProducts:
    """Makes the calls of one function that the device can make in float8.

    Args:
        path: path of the function, one of `MULTIPLYING`.
        formats: formats of arguments, and of gradients of results.
        type_of_call: function that returns the type that a call computes in by the lists; None: it is not cast.
        type_of: function that returns that type for one tensor, given the type of the call; None: it is not cast.
        kept: function that keeps what is made of a weight, as `WeightCache.kept`; None: nothing is kept.
    """

    def __init__(
        self,
        path: Path,
        formats: Formats,
        type_of_call: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype | None],
        type_of: Callable[[Tensor, torch.dtype], torch.dtype | None],
        kept: Callable[[Tensor, torch.dtype, Callable[[], Tensor]], Tensor] | None,
    ) -> None:
        self._path, self._formats, self._is_linear = str(path), formats, path.name == "linear"
        self._type_of_call, self._type_of, self._kept = type_of_call, type_of, kept
        self._read: Callable[..., _Given | None] = _READERS.get(path.name, _of_product)
        self._needs_matrices = path.name in ("mm", "addmm")
        self._devices = _devices()
        _told.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the result of a call, in the half type that it has by the lists; None if the device cannot make it.

        Warns:
            AmpWarning: says why it cannot, once for each reason.
        """
        given = self._read(*args, **kwargs)
        dtype = None if given is None else self._type_of_call(args, kwargs)
        if given is None or dtype is None:
            return None
        left, right, bias = given
        dtype = self._type_of(left, dtype)
        if dtype not in HALVES or any(self._type_of(each, dtype) is None for each in given if each is not None):
            return None
        refusal = self._refusal(*given)
        if refusal is not None:
            _tell_once(refusal[0], f"{self._path} does not compute in {self._formats.format.name}: {' '.join(refusal)}")
            return None
        if not self._is_right(*given):
            return None  # torch computes it, or says what is wrong
        has_gradient = torch.is_grad_enabled() and right.requires_grad
        with Switch.disabled():
            with torch.no_grad():
                first = _operand(left.reshape(-1, left.shape[-1]), self._formats.format, has_gradient)
            second = self._operand(right)
        if not self._is_linear:  # for the device, the second matrix has rows of the length that is summed up
            second = _Operand(second.columns, second.rows)
        result: Tensor = _ScaledProduct.apply(  # type: ignore[no-untyped-call]
            left, right, bias, _Product(first, second, self._formats.grad, dtype, self._is_linear)
        )
        return result

    def _refusal(self, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[str, str] | None:
        """Returns why the device cannot make a product, and what was found; None if it can."""
        is_fake = is_compiling() and not is_dynamo_compiling()  # compilers below Dynamo trace with a subclass of Tensor
        for each in (left, right):
            is_torchs = is_fake or type(each) in (Tensor, Parameter)
            if each.layout is not torch.strided or each.is_nested or not is_torchs:
                return "its arguments must be dense tensors,", "and one is sparse or nested, or of a subclass of Tensor"
        if right.dim() != 2:
            return "its second argument must be a matrix,", f"and has {right.dim()} dimensions"
        if left.device not in self._devices:
            return "the device must have such products,", f"and {left.device} has none"
        if any(size % MULTIPLE for size in right.shape):
            sizes = f"{right.shape[0]} by {right.shape[1]}"
            return f"the sizes of its second argument must be multiples of {MULTIPLE},", f"and are {sizes}"
        if bias is not None and (bias.dim() != 1 or bias.numel() == 1):
            return "the bias must be a vector with a number for each column,", f"and has the shape {[*bias.shape]}"
        if not is_compiling() and modes.peek_interpreter_stack() is not None:
            return "torch.func cannot transform its products,", "and this call is in such a transform"
        return None

    def _is_right(self, left: Tensor, right: Tensor, bias: Tensor | None) -> bool:
        """Returns False for shapes that do not fit each other, and for an empty batch."""
        if left.dim() < 1 or (self._needs_matrices and left.dim() != 2):
            return False
        results, summed = right.shape if self._is_linear else right.shape[::-1]
        fits = left.shape[-1] == summed and (bias is None or bias.shape[0] == results)
        return fits and results > 0 and left.numel() > 0

    def _operand(self, right: Tensor) -> _Operand:
        """Returns the casts of a second argument; those of a weight are kept."""
        format = self._formats.format

        def cast() -> _Operand:
            with torch.no_grad():
                return _operand(right, format)

        if self._kept is None or is_compiling() or type(right) is not Parameter:
            return cast()
        made = self._kept(right, _dtype(format), lambda: _packed(cast()))
        if made.numel() != _packed_size(right, format):  # kept for another format with this type
            return cast()
        return _unpacked(made.detach(), right.shape, format)


@functools.cache
def _devices() -> frozenset[torch.device]:
    """Returns the devices that multiply float8 matrices. On a CPU torch does, so that code can be tried there."""
    one = torch.eye(MULTIPLE, device="cpu").to(torch.float8_e4m3fn)
    scale, recipe = torch.ones((), dtype=torch.float32, device="cpu"), ScalingType.TensorWise
    cpu = {torch.device("cpu")}
    try:
        scaled_mm(one, one, scale, recipe, scale, recipe)
    except NotImplementedError:  # torch may lack the kernel
        cpu.clear()
    count = torch.cuda.device_count() if torch.version.hip is None else 0
    able = [index for index in range(count) if torch.cuda.get_device_capability(index) >= _CAPABILITY]
    return frozenset({*cpu, *(torch.device("cuda", index) for index in able)})


class _Given(NamedTuple):
    """The arguments of a product."""

    left: Tensor
    right: Tensor
    bias: Tensor | None = None


def _of_linear(input: Any = None, weight: Any = None, bias: Any = None, *more: Any, **others: Any) -> _Given | None:
    is_read = not more and not others and isinstance(input, Tensor) and isinstance(weight, Tensor)
    return _Given(input, weight, bias) if is_read and (bias is None or isinstance(bias, Tensor)) else None


def _of_product(*args: Any, second: str = "other", **kwargs: Any) -> _Given | None:
    named = [kwargs[name] for name in ("input", second)[len(args) :] if name in kwargs]
    given = (*args, *named)
    is_read = len(given) == 2 and len(named) == len(kwargs) and all(isinstance(each, Tensor) for each in given)
    return _Given(*given) if is_read else None


def _of_matrices(*args: Any, **kwargs: Any) -> _Given | None:
    return _of_product(*args, second="mat2", **kwargs)


def _of_reflected(*args: Any, **kwargs: Any) -> _Given | None:
    return None if kwargs else _of_product(*args[::-1])


def _of_sum(input: Any = None, mat1: Any = None, mat2: Any = None, *more: Any, **factors: Any) -> _Given | None:
    """Returns the arguments of ``addmm``; None with ``beta`` or ``alpha``, for which the device has no product."""
    is_read = not more and not factors and all(isinstance(each, Tensor) for each in (input, mat1, mat2))
    return _Given(mat1, mat2, input) if is_read else None


_READERS: dict[str, Callable[..., _Given | None]] = {
    "linear": _of_linear,
    "mm": _of_matrices,
    "__rmatmul__": _of_reflected,
    "addmm": _of_sum,
}


@constant_while_traced
def _tell_once(reason: str, message: str) -> None:
    if reason not in _told:
        _told.add(reason)
        cure = "Change the sizes, take such calls out of the cast list, or type products: emulated"
        warn(f"{message}. It computes as without the format. {cure}. This is said once.")


_told: set[str] = set()


class _Scaled(NamedTuple):
    """A matrix in float8.

    Attributes:
        numbers: its numbers.
        scales: what these are multiplied by to get the values: float32, one number, or one for each row. NaN if the
            values have inf or NaN, which not all devices keep in float8.
    """

    numbers: Tensor
    scales: Tensor


class _Operand(NamedTuple):
    """A matrix of shape (m, k) in float8.

    Attributes:
        rows: the matrix.
        columns: its transpose, of shape (k, m), with zeros so that m is a multiple of `MULTIPLE`; contiguous.
    """

    rows: _Scaled
    columns: _Scaled


def _dtype(format: Format) -> torch.dtype:
    dtype: Any = format.dtype  # those that devices multiply have one
    return dtype  # type: ignore[no-any-return]


def _operand(matrix: Tensor, format: Format, both: bool = True) -> _Operand:
    """Casts a matrix to a format, in rows and in columns; if each row has a scale, each column has one, too.

    Without ``both``, no columns are cast: those that it has must not be used.
    """
    exact = matrix.float()
    rows = _in_rows(exact, format)
    columns, scales = _in_rows(exact.t(), format) if both and format.scale == "row" else (rows.numbers.t(), rows.scales)
    return _Operand(rows, _Scaled(_filled_up(columns) if both else columns, scales))


def _in_rows(exact: Tensor, format: Format) -> _Scaled:
    """Casts a float32 matrix, with a scale for all of it or for each row."""
    largest = largest_of(exact, format)
    scale = scale_for(largest, format)
    # Some versions of torch cast inf to the largest number. The difference is 0, and NaN for inf and NaN: in place of a
    # scale it keeps an overflow visible, and a trace follows it to where the overflow came from.
    undone = scale.reciprocal() + (largest - largest)
    return _Scaled((exact * scale).to(_dtype(format)).contiguous(), undone)


def _filled_up(columns: Tensor) -> Tensor:
    """Returns a matrix with zeros at the end of its rows, up to a multiple of `MULTIPLE`."""
    missing = -columns.shape[1] % MULTIPLE
    if is_exporting() or missing:  # an exported graph is for all sizes
        # Torch pads no float8. All bits of a zero are 0.
        columns = torch.nn.functional.pad(columns.view(torch.uint8), (0, missing)).view(columns.dtype)
    return columns.contiguous()


def _packed(operand: _Operand) -> Tensor:
    """Returns the parts of an operand as one tensor of its type, so that the cache keeps it as it keeps a cast."""
    (rows, of_rows), (columns, of_columns) = operand
    parts = (rows, columns, of_rows, of_columns) if of_rows.dim() else (rows, columns, of_rows)
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]).view(rows.dtype)


def _packed_size(matrix: Tensor, format: Format) -> int:
    scales = 1 if format.scale == "tensor" else sum(matrix.shape)
    return 2 * matrix.numel() + 4 * scales


def _unpacked(packed: Tensor, shape: torch.Size, format: Format) -> _Operand:
    (rows, columns), count = shape, shape.numel()
    numbers, scales = packed[: 2 * count], packed[2 * count :].view(torch.float32)
    if format.scale == "tensor":
        of_rows = of_columns = scales[0]
    else:
        of_rows, of_columns = scales[:rows].unsqueeze(1), scales[rows:].unsqueeze(1)
    by_row, by_column = numbers[:count].view(rows, columns), numbers[count:].view(columns, rows)
    return _Operand(_Scaled(by_row, of_rows), _Scaled(by_column, of_columns))


def _multiplied(
    left: _Scaled, right: _Scaled, dtype: torch.dtype, bias: Tensor | None = None, is_fast: bool = False
) -> Tensor:
    """Returns the product of a matrix (m, k) and the transpose of another (n, k), in a type of torch.

    Args:
        left: the matrix (m, k).
        right: the matrix (n, k).
        dtype: type of the product.
        bias: half vector (n) that is added.
        is_fast: True if the GPU may sum up with fewer digits than float32 has, as for results, which become half.
    """
    recipe, of_right, made, is_cuda = ScalingType.TensorWise, right.scales, dtype, left.numbers.is_cuda
    if left.scales.dim():
        recipe, of_right = ScalingType.RowWise, of_right.t()
        made = torch.bfloat16 if is_cuda else dtype  # torch has no other kernel
    product = scaled_mm(
        left.numbers,
        right.numbers.t(),
        left.scales,
        recipe,
        of_right,
        recipe,
        bias=None if bias is None else bias.to(made),
        output_dtype=made,
        use_fast_accum=is_fast and is_cuda,
    )
    return product.to(dtype)


class _Product(NamedTuple):
    """What the node multiplies. Autograd does not look for tensors in it.

    Attributes:
        left: casts of the first factor as a matrix.
        right: casts of the second factor, of shape (n, k).
        grad: format of the gradient of the result.
        dtype: type of the result.
        is_linear: True in a linear layer.
    """

    left: _Operand
    right: _Operand
    grad: Format
    dtype: torch.dtype
    is_linear: bool


class _ScaledProduct(torch.autograd.Function):
    """The node. Its backward pass multiplies the gradient, cast to float8, by the casts of the forward pass."""

    @staticmethod
    def forward(
        left: Tensor,
        right: Tensor,  # noqa: ARG004 - an input of the node, so that it gets a gradient
        bias: Tensor | None,
        product: _Product,
    ) -> Tensor:
        """Returns the result.

        Args:
            left: tensor of shape (..., k).
            right: matrix of shape (n, k) in a linear layer, otherwise (k, n).
            bias: vector of length n, or None.
            product: the casts of both factors.
        """
        with Switch.disabled():
            result = _multiplied(product.left.rows, product.right.rows, product.dtype, bias, is_fast=True)
        return UNSAFE_VIEW(result, [*left.shape[:-1], result.shape[-1]])  # autograd forbids writing to a view

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - an interface
        """Keeps the casts that the backward pass multiplies by."""
        left, right, bias, (first, second, ctx.grad, _, ctx.is_linear) = inputs
        needs_left, needs_right, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            *(first.columns if needs_right else (None, None)), *(second.columns if needs_left else (None, None))
        )
        ctx.shape, ctx.left, ctx.right = left.shape, left.dtype, right.dtype
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of both factors and the bias, each in its own type.

        Raises:
            UsageError: the gradients are to have gradients.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "found create_graph=True for a product in float8; its gradients have no derivatives. Leave out "
                "products: device from the cast lists, and it is emulated, with all derivatives."
            )
        own, of_own, other, of_other = ctx.saved_tensors
        needs_left, needs_right, needs_bias = ctx.needs_input_grad[:3]
        of_left = of_right = of_bias = None
        with Switch.disabled():
            rows = grad.reshape(-1, grad.shape[-1])
            given = _operand(rows, ctx.grad)
            if needs_left:
                of_left = _multiplied(given.rows, _Scaled(other, of_other), ctx.left).reshape(ctx.shape)
            if needs_right:
                # The gradient comes first, as some kernels take e5m2 only there.
                of_right = _multiplied(given.columns, _Scaled(own, of_own), ctx.right)
                of_right = of_right if ctx.is_linear else of_right.t()
            if needs_bias:
                of_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias)
        return of_left, of_right, of_bias, None
