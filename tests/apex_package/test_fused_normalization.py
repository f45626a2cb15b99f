"""Of Apex's normalisation layers: what the papers say, in torch's own layers under Apex's names and arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, casts_on, dtype_name
from torch import Tensor, nn

from ampatch.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
)
from ampatch.errors import OptionError

LAYER_NORMS = (FusedLayerNorm, MixedFusedLayerNorm)
RMS_NORMS = (FusedRMSNorm, MixedFusedRMSNorm)
MIXED = (MixedFusedLayerNorm, MixedFusedRMSNorm)
EACH = pytest.mark.parametrize("norm_class", LAYER_NORMS + RMS_NORMS, ids=lambda each: each.__name__)
EACH_MIXED = pytest.mark.parametrize("norm_class", MIXED, ids=lambda each: each.__name__)
EACH_HALF = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
SHAPES = pytest.mark.parametrize("shape", [4, (4,), [3, 4], torch.Size([3, 4])], ids=str)

# The error of one rounding, of numbers below 8.
CLOSE = {torch.float32: 1e-6, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


def some_input(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)


def drawn(norm: nn.Module) -> nn.Module:
    """A layer with other parameters than ones and zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return norm


def published(x: Tensor, norm: Any, eps: float = 1e-5) -> Tensor:
    """The formulas of the papers in float64, over the last dimensions."""
    x = x.detach().double()
    dims = tuple(range(-len(norm.normalized_shape), 0))
    if isinstance(norm, nn.LayerNorm):
        centred = x - x.mean(dims, keepdim=True)
        result = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
    else:
        result = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    if norm.weight is not None:
        result = result * norm.weight.detach().double()
    return result + norm.bias.detach().double() if getattr(norm, "bias", None) is not None else result


def assert_is(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.detach().double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@EACH
class TestLayers:
    @SHAPES
    def test_layers_compute_the_published_norms(self, norm_class, shape):
        norm = drawn(norm_class(shape))
        assert_is(norm(some_input()), published(some_input(), norm), torch.float32)

    def test_layers_take_apexs_arguments_in_its_order(self, norm_class):
        assert norm_class(4).eps == 1e-5
        assert norm_class(4, 0.5).eps == 0.5
        assert norm_class(4, eps=0.5, memory_efficient=True).memory_efficient is True
        norm = drawn(norm_class(4, 0.5))
        assert_is(norm(some_input()), published(some_input(), norm, eps=0.5), torch.float32)

    def test_layers_compile_into_one_graph(self, norm_class):
        norm = drawn(norm_class(4))
        compiled = torch.compile(norm, fullgraph=True, backend="eager")
        assert torch.equal(compiled(some_input()), norm(some_input()))

    def test_layers_are_torchs_own(self, norm_class):
        kind = nn.LayerNorm if norm_class in LAYER_NORMS else nn.RMSNorm
        norm, torchs = drawn(norm_class(4)), kind(4, eps=1e-5)
        torchs.load_state_dict(norm.state_dict())
        assert isinstance(norm, kind)
        assert_same_bits(norm(some_input()), torchs(some_input()))

    def test_layers_have_apexs_keys_and_shapes_in_their_state_dict(self, norm_class):
        names = ["weight", "bias"] if norm_class in LAYER_NORMS else ["weight"]
        shapes = {name: tuple(value.shape) for name, value in norm_class((3, 4)).state_dict().items()}
        assert shapes == dict.fromkeys(names, (3, 4))

    def test_layers_are_copied_and_pickled(self, norm_class):
        norm = drawn(norm_class(4, memory_efficient=True))
        for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            assert_same_bits(other(some_input()), norm(some_input()))
            assert other.memory_efficient is True

    @EACH_HALF
    def test_half_layers_compute_in_float32_and_round(self, norm_class, half):
        norm = drawn(norm_class(4)).to(half)
        assert_is(norm(some_input(half)), published(some_input(half), norm), half)

    @EACH_HALF
    def test_half_layers_do_not_overflow_in_their_squares(self, norm_class, half):
        large = torch.tensor([[-1000.0, 1000.0, 500.0, -500.0]], dtype=half)
        norm = norm_class(4).to(half)
        assert_is(norm(large), published(large, norm), half)

    @EACH_HALF
    @pytest.mark.covering(1)
    def test_layers_give_float32_under_o1(self, norm_class, half):
        norm = drawn(norm_class(4))
        with casts_on(half):
            assert_is(norm(some_input(half)), published(some_input(half), norm), torch.float32)
            assert_is(norm(some_input()), published(some_input(), norm), torch.float32)


class TestWithoutParameters:
    @pytest.mark.parametrize("norm_class", [FusedLayerNorm, FusedRMSNorm])
    def test_layers_without_parameters_normalise(self, norm_class):
        norm = norm_class(4, 1e-5, False)
        assert list(norm.state_dict()) == []
        assert_is(norm(some_input()), published(some_input(), norm), torch.float32)

    @EACH_MIXED
    def test_mixed_layers_without_parameters_are_refused(self, norm_class):
        assert norm_class(4, elementwise_affine=True).weight is not None
        with pytest.raises(OptionError, match=rf"{norm_class.__name__} found elementwise_affine=False.*Use Fused"):
            norm_class(4, elementwise_affine=False)


@EACH_MIXED
class TestMixedDtypes:
    @pytest.mark.parametrize("of_parameters", [*HALF_DTYPES, torch.float32], ids=dtype_name)
    @pytest.mark.parametrize("of_input", [*HALF_DTYPES, torch.float32], ids=dtype_name)
    def test_outputs_of_mixed_layers_have_the_dtype_of_the_parameters(self, norm_class, of_input, of_parameters):
        norm = drawn(norm_class(4)).to(of_parameters)
        x = some_input(of_input).requires_grad_()
        expected = published(x, norm)
        y = norm(x)
        assert_is(y, expected, of_parameters)
        y.sum().backward()
        assert x.grad.dtype is of_input
        assert norm.weight.grad.dtype is of_parameters

    def test_outputs_of_mixed_layers_have_that_dtype_under_o1_too(self, norm_class):
        norm = drawn(norm_class(4)).bfloat16()
        with casts_on(torch.bfloat16):
            assert_is(norm(some_input()), published(some_input(), norm), torch.bfloat16)
            assert_is(norm(some_input(torch.bfloat16)), published(some_input(torch.bfloat16), norm), torch.bfloat16)

    def test_gradients_of_mixed_layers_are_those_of_float32(self, norm_class):
        narrow, wide = drawn(norm_class(4)), drawn(norm_class(4))
        x = some_input(torch.bfloat16).requires_grad_()
        w = some_input(torch.bfloat16).float().requires_grad_()
        narrow(x).square().sum().backward()
        wide(w).square().sum().backward()
        assert_same_bits(x.grad, w.grad.bfloat16())
        assert_same_bits(narrow.weight.grad, wide.weight.grad)


class TestFunctions:
    """Their default eps is another than that of the layers."""

    @SHAPES
    @pytest.mark.parametrize(("norm_class", "name"), [(FusedLayerNorm, "layer_norm"), (FusedRMSNorm, "rms_norm")])
    def test_functions_compute_the_published_norms(self, norm_class, name, shape):
        function = getattr(fused_layer_norm, f"fused_{name}")
        affine = getattr(fused_layer_norm, f"fused_{name}_affine")
        mixed = getattr(fused_layer_norm, f"mixed_dtype_fused_{name}_affine")
        x, plain, norm = some_input(), norm_class(shape, 1e-6, False), drawn(norm_class(shape, 1e-6))
        assert_is(function(x, shape), published(x, plain, 1e-6), torch.float32)
        assert_is(function(x, shape, 0.5), published(x, plain, 0.5), torch.float32)
        assert_is(affine(x, *norm.parameters(), shape), published(x, norm, 1e-6), torch.float32)
        y = mixed(x.half(), *norm.parameters(), shape, 0.5)
        assert_is(y, published(x.half(), norm, 0.5), torch.float32)

    def test_eps_of_rms_norm_may_be_left_to_torch(self):
        eps = torch.finfo(torch.float32).eps
        small = torch.full((1, 4), 1e-4)
        for norm in (FusedRMSNorm(4, None), MixedFusedRMSNorm(4, None)):
            assert_is(norm(small), published(small, norm, eps), torch.float32)
        norm = FusedRMSNorm(4, None)
        assert_is(fused_layer_norm.fused_rms_norm(small, 4, None), published(small, norm, eps), torch.float32)
        mixed = fused_layer_norm.mixed_dtype_fused_rms_norm_affine(small.double(), norm.weight, 4, None)
        assert mixed.dtype is torch.float32
