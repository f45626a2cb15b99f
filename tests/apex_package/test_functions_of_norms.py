"""Of the functions below Apex's norms, that projects call in norms of their own: they compute what torch's norms do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICES
from torch import Tensor

from ampatch import amp
from ampatch.apex import fused_layer_norm_cuda
from ampatch.apex.normalization import fused_layer_norm as of_apex
from ampatch.errors import OptionError

EPS = 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def inputs(dtype: torch.dtype, device: str, weights: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((3, 4, 8), (8,), (8,))]
    dtypes = (dtype, weights or dtype, weights or dtype)
    x, weight, bias = (each.to(device, dtype).requires_grad_() for each, dtype in zip(drawn, dtypes, strict=True))
    return x, weight, bias


def expected(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, is_rms: bool) -> Tensor:
    """The result in float64."""
    x, weight, bias = (each if each is None else each.double() for each in (x, weight, bias))
    return F.rms_norm(x, [8], weight, EPS) if is_rms else F.layer_norm(x, [8], weight, bias, EPS)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    return list(torch.autograd.grad(output, leaves, grad))


def assert_close(actual: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(actual.double(), reference.double(), rtol=tolerance, atol=tolerance)


def assert_computed(output: Tensor, leaves: list[Tensor], dtype: torch.dtype, *, is_rms: bool) -> None:
    """The norm of the first leaf, by the others if there are any; with gradients."""
    reference = expected(*leaves, *[None] * (3 - len(leaves)), is_rms=is_rms)
    assert output.dtype is dtype
    assert_close(output, reference, dtype)
    for actual, wanted in zip(gradients(output, leaves), gradients(reference, leaves), strict=True):
        assert actual.dtype is wanted.dtype
        assert_close(actual, wanted, dtype)


FUNCTIONS: dict[str, tuple[Any, str, bool]] = {
    "layer norm": (of_apex.FusedLayerNormFunction, "x", False),
    "affine layer norm": (of_apex.FusedLayerNormAffineFunction, "xwb", False),
    "mixed layer norm": (of_apex.FusedLayerNormAffineMixedDtypesFunction, "xwb", False),
    "rms norm": (of_apex.FusedRMSNormFunction, "x", True),
    "affine rms norm": (of_apex.FusedRMSNormAffineFunction, "xw", True),
    "mixed rms norm": (of_apex.FusedRMSNormAffineMixedDtypesFunction, "xw", True),
}


@pytest.mark.parametrize("device", DEVICES)
class TestFunctions:
    @DTYPES
    @pytest.mark.parametrize("memory_efficient", [(), (False,), (True,)], ids=str)
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_compute_what_torch_does(
        self, name: str, memory_efficient: tuple[bool, ...], dtype: torch.dtype, device: str
    ) -> None:
        function, taken, is_rms = FUNCTIONS[name]
        leaves = list(inputs(dtype, device)[: len(taken)])
        output = function.apply(*leaves, torch.Size([8]), EPS, *memory_efficient)
        assert_computed(output, leaves, dtype, is_rms=is_rms)

    @pytest.mark.parametrize("name", [name for name in FUNCTIONS if "mixed" in name])
    def test_that_are_mixed_give_the_type_of_the_weight(self, name: str, device: str) -> None:
        function, taken, is_rms = FUNCTIONS[name]
        leaves = list(inputs(torch.float16, device, weights=torch.float32)[: len(taken)])
        assert_computed(function.apply(*leaves, (8,), EPS), leaves, torch.float32, is_rms=is_rms)


class OwnLayerNorm(torch.autograd.Function):
    """As projects write it that call Apex's kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output, mean, invvar = fused_layer_norm_cuda.forward_affine(x.contiguous(), (8,), weight, bias, EPS)
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, mean, invvar = ctx.saved_tensors
        return fused_layer_norm_cuda.backward_affine(grad, mean, invvar, x, (8,), weight, bias, EPS)


class OwnRMSNorm(torch.autograd.Function):
    """Likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        output, invvar = fused_layer_norm_cuda.rms_forward_affine(x.contiguous(), (8,), weight, EPS)
        ctx.save_for_backward(x, weight, invvar)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, invvar = ctx.saved_tensors
        return fused_layer_norm_cuda.rms_backward_affine(grad, invvar, x, (8,), weight, EPS, False)


@pytest.mark.parametrize("device", DEVICES)
class TestKernels:
    @DTYPES
    @pytest.mark.parametrize("function", [OwnLayerNorm, OwnRMSNorm])
    def test_serve_functions_of_projects(self, function: Any, dtype: torch.dtype, device: str) -> None:
        is_rms = function is OwnRMSNorm
        leaves = list(inputs(dtype, device)[: 2 if is_rms else 3])
        assert_computed(function.apply(*leaves), leaves, dtype, is_rms=is_rms)

    def test_take_half_inputs_with_float32_weights_under_casts(self, device: str) -> None:
        x, weight, bias = inputs(torch.float16, device, weights=torch.float32)
        with amp.init(half_dtype="float16"):
            output = OwnLayerNorm.apply(x, weight, bias)
            grads = gradients(output, [x, weight, bias])
        assert output.dtype is torch.float16
        assert [each.dtype for each in grads] == [torch.float16, torch.float32, torch.float32]

    def test_give_the_type_of_the_input_under_casts(self, device: str) -> None:
        x, _, _ = inputs(torch.float16, device)
        with amp.init(half_dtype="float16"):
            assert F.layer_norm(x, [8]).dtype is torch.float32
            assert fused_layer_norm_cuda.forward(x, 8, EPS)[0].dtype is torch.float16
            assert fused_layer_norm_cuda.rms_forward(x, 8, EPS)[0].dtype is torch.float16
            grad = fused_layer_norm_cuda.backward(x, *fused_layer_norm_cuda.forward(x, 8, EPS)[1:], x, 8, EPS)
        assert grad.dtype is torch.float16

    def test_compute_gradients_as_called_under_casts(self, device: str) -> None:
        x, weight, bias = inputs(torch.float32, device)
        grad, statistic = torch.randn_like(x), torch.empty(12, device=device)

        def computed() -> list[Tensor]:
            layer_norm = fused_layer_norm_cuda.backward_affine(grad, statistic, statistic, x, (8,), weight, bias, EPS)
            rms_norm = fused_layer_norm_cuda.rms_backward_affine(grad, statistic, x, (8,), weight, EPS)
            return [*layer_norm, *rms_norm]

        wanted = computed()
        with amp.init(half_dtype="bfloat16", cast_lists={"whitelist": {"*": ["layer_norm", "rms_norm"]}}):
            assert F.layer_norm(x, [8]).dtype is torch.bfloat16
            actual = computed()
        assert all(map(torch.equal, actual, wanted))

    def test_without_weights_give_outputs_and_gradients(self, device: str) -> None:
        x, _, _ = inputs(torch.float32, device)
        output, mean, invvar = fused_layer_norm_cuda.forward(x, 8, EPS)
        reference = expected(x, None, None, is_rms=False)
        assert_close(output, reference, torch.float32)
        assert not output.requires_grad
        grad = torch.ones_like(x) * torch.arange(8, device=device)
        (wanted,) = torch.autograd.grad(reference, x, grad.double())
        assert_close(fused_layer_norm_cuda.backward(grad, mean, invvar, x, 8, EPS), wanted, torch.float32)
        output, invvar = fused_layer_norm_cuda.rms_forward(x, 8, EPS)
        reference = expected(x, None, None, is_rms=True)
        assert_close(output, reference, torch.float32)
        (wanted,) = torch.autograd.grad(reference, x, grad.double())
        assert_close(fused_layer_norm_cuda.rms_backward(grad, invvar, x, 8, EPS), wanted, torch.float32)

    def test_give_statistics_of_each_row_in_float32(self, device: str) -> None:
        x, weight, bias = inputs(torch.float16, device)
        rows = x.detach().double().reshape(12, 8)
        _, mean, invvar = fused_layer_norm_cuda.forward_affine(x, (8,), weight, bias, EPS)
        assert (mean.shape, mean.dtype, invvar.dtype) == ((12,), torch.float32, torch.float32)
        assert_close(mean, rows.mean(1), torch.float32)
        assert_close(invvar, (rows.var(1, correction=0) + EPS).rsqrt(), torch.float32)
        _, invvar = fused_layer_norm_cuda.rms_forward_affine(x, (8,), weight, EPS)
        assert_close(invvar, (rows.square().mean(1) + EPS).rsqrt(), torch.float32)

    def test_that_are_mixed_give_the_type_of_the_weight(self, device: str) -> None:
        x, weight, bias = inputs(torch.float16, device, weights=torch.float32)
        assert fused_layer_norm_cuda.forward_affine_mixed_dtypes(x, (8,), weight, bias, EPS)[0].dtype is torch.float32
        assert fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes(x, (8,), weight, EPS)[0].dtype is torch.float32

    def test_raise_at_gradients_from_the_output(self, device: str) -> None:
        x, weight, bias = inputs(torch.float32, device)
        output, _, invvar = fused_layer_norm_cuda.forward_affine(x, (8,), weight, bias, EPS)
        with pytest.raises(OptionError, match=r"memory_efficient=True; expected False.*FusedLayerNorm of apex"):
            fused_layer_norm_cuda.backward_affine(x, None, invvar, output, (8,), weight, bias, EPS, True)
