"""The operators of a fused linear layer's backward pass: transforms and tangents go through them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from torch import Tensor, nn
from torch.autograd import forward_ad

from ampatch import amp

Found = Sequence[Tensor | None]


@pytest.fixture(params=["compiled", "python"])
def calls(request: pytest.FixtureRequest, select_calls: Callable[[str], None]) -> str:
    """Runs calls in C++ and in Python."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    select_calls(request.param)
    return request.param


@pytest.fixture(params=HALF_DTYPES, ids=dtype_name)
def half(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[(6, 8), (2, 3, 8)], ids=["matrix", "batch"])
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


@contextlib.contextmanager
def linear(half: torch.dtype, shape: tuple[int, ...], fused: bool) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yields the result of a linear layer, and the tensors that get gradients."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    input = torch.randn(shape, dtype=half).requires_grad_()
    amp.initialize(layer, optimizer, opt_level="O1", half_dtype=half, fused_linear=fused, verbosity=0)
    try:
        result = layer(input)
        assert ("FusedLinear" in result.grad_fn.name()) is fused
        yield result, [input, layer.weight, layer.bias]
    finally:
        amp.deinitialize()


def assert_same(half: torch.dtype, shape: tuple[int, ...], gradients: Callable[[Tensor, list[Tensor]], Found]) -> None:
    found = []
    for fused in (True, False):
        with linear(half, shape, fused) as (result, leaves):
            torch.manual_seed(1)
            found.append(gradients(result, leaves))
    assert all(one is not None for one in found[1])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert one.dtype is other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


def test_gradients_have_the_same_bits(calls: str, half: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_same(half, shape, lambda result, leaves: torch.autograd.grad(result, leaves, torch.randn_like(result)))


# torch scripts its formulas for tangents when they are first needed.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_tangent_of_the_gradient_goes_through(calls: str, half: torch.dtype, shape: tuple[int, ...]) -> None:
    def tangents(result: Tensor, leaves: list[Tensor]) -> Found:
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.randn_like(result).detach(), torch.randn_like(result).detach())
            found = torch.autograd.grad(result, leaves, grad)
            return [forward_ad.unpack_dual(each).tangent for each in found]

    assert_same(half, shape, tangents)


def test_batched_gradients(calls: str, half: torch.dtype, shape: tuple[int, ...]) -> None:
    def batched(result: Tensor, leaves: list[Tensor]) -> Found:
        grads = torch.randn(3, *result.shape).to(half)
        return torch.autograd.grad(result, leaves, grads, is_grads_batched=True)

    assert_same(half, shape, batched)
