"""Of errors that come out of calls with cast arguments: the list is named only where a cast may be the cause."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from helpers import casts_on
from torch import nn, ones
from torch.nn import functional as F

from ampatch import amp
from ampatch.casting.cast_errors import add_note, may_be_caused_by_casts

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("\"addmm_out_sparse_csr_impl_mkl\" not implemented for 'Half'", FLOAT, HALF),
        ("expected scalar type Float but found Half", FLOAT, HALF),
        ("Input type (float) and bias type (c10::Half) should be the same", FLOAT, HALF),
        ("Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same", FLOAT, HALF),
        ("got query.dtype: c10::BFloat16 and key.dtype: float instead", FLOAT, BFLOAT),
        ("Expected attn_mask dtype to be bool or float, but got float and query.dtype: c10::Half", FLOAT, HALF),
        ("mat1 and mat2 must have the same dtype, but got Half and Float", HALF, FLOAT),
        ("only float16 and bfloat16 are supported, and not torch.float32", BFLOAT, FLOAT),
        ("value cannot be converted to type at::Half without overflow", FLOAT, HALF),
        ("Got unsupported ScalarType BFloat16", FLOAT, BFLOAT),
        ("got (self) Float and (source) Half, with an index of Long", FLOAT, HALF),
        ("the kernel takes no half tensors", FLOAT, HALF),
        ("scatter(): Expected self.dtype to be equal to src.dtype", FLOAT, HALF),
        ("probability tensor contains either `inf`, `nan` or element < 0", FLOAT, HALF),
        ("The input matrix is singular.", FLOAT, BFLOAT),
        ("", FLOAT, HALF),
    ],
)
def test_a_cast_may_be_the_cause(text: str, before: torch.dtype, after: torch.dtype) -> None:
    assert may_be_caused_by_casts(RuntimeError(text) if text else AssertionError(), {before}, {after})


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        # Integers stay integers under every rule.
        (RuntimeError("expected target dtype to be Long or Byte, but got Float"), HALF, FLOAT),
        (RuntimeError("expected scalar type Long but found Float"), HALF, FLOAT),
        (RuntimeError("result type Float can't be cast to the desired output type Long"), HALF, FLOAT),
        (RuntimeError("expected m1 and m2 to have the same dtype, but got: c10::Half != long int"), FLOAT, HALF),
        (RuntimeError("scatter(): Expected dtype int32/int64 for index"), FLOAT, HALF),
        (RuntimeError("have one of the scalar types: Long, Int; but got torch.FloatTensor instead"), HALF, FLOAT),
        # A float64 tensor is float64 under every rule, and no half would have met it either.
        (RuntimeError("expected scalar type Double but found Half"), FLOAT, HALF),
        (RuntimeError("expected m1 and m2 to have the same dtype, but got: double != c10::Half"), FLOAT, HALF),
        # No tensor was cast to what is named.
        (RuntimeError("\"kernel\" not implemented for 'Half'"), HALF, FLOAT),
        # Neither sizes, nor indices, nor devices, nor memory.
        (IndexError("Target 7 is out of bounds."), HALF, FLOAT),
        (IndexError("Dimension out of range (expected to be in range of [-2, 1], but got 7)"), HALF, FLOAT),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"), FLOAT, HALF),
        (RuntimeError("Expected all tensors to be on the same device, but found cpu and cuda:0!"), FLOAT, HALF),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), FLOAT, HALF),
        # What is no tensor.
        (TypeError("layer_norm(): argument 'eps' (position 5) must be float, not str"), HALF, FLOAT),
        (TypeError("softmax(): argument 'dtype' (position 3) must be torch.dtype, not str"), HALF, FLOAT),
        (TypeError("linear() received an invalid combination of arguments - got (Tensor, Half)"), FLOAT, HALF),
        (ValueError("found a bad word"), FLOAT, HALF),
        # No value becomes infinite where it gets more room.
        (RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"), HALF, FLOAT),
        (RuntimeError("infants, nannies"), FLOAT, HALF),
    ],
)
def test_a_cast_cannot_be_the_cause(error: Exception, before: torch.dtype, after: torch.dtype) -> None:
    assert not may_be_caused_by_casts(error, {before}, {after})


def test_a_cast_that_raised_is_the_cause_whatever_it_says() -> None:
    error = RuntimeError("no memory")
    add_note("why", error, (ones(2),), None)
    assert error.__notes__ == ["why"]


@pytest.fixture(params=["python", "compiled"])
def _each_implementation(
    request: pytest.FixtureRequest, compiled_calls: ModuleType, select_calls: Callable[[str], None]
) -> None:
    select_calls(request.param)


@pytest.mark.usefixtures("_each_implementation")
class TestCalls:
    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda: F.cross_entropy(ones(2, 3).half(), ones(2)), id="float target"),
            pytest.param(lambda: F.cross_entropy(ones(2, 3).half(), torch.tensor([7, 7])), id="target out of range"),
            pytest.param(lambda: F.binary_cross_entropy_with_logits(ones(2).half(), ones(2).long()), id="int target"),
            pytest.param(lambda: torch.softmax(ones(2).half(), 7), id="dimension out of range"),
            pytest.param(lambda: torch.mm(ones(2, 3), ones(2, 3)), id="shapes"),
            pytest.param(lambda: torch.mm(ones(2, 2), ones(2, 2).long()), id="integers"),
            pytest.param(lambda: nn.Linear(2, 2)(ones(2, 2).double()), id="float64 data"),
            pytest.param(lambda: F.layer_norm(ones(2).half(), (2,), None, None, "eps"), id="no number"),
        ],
    )
    def test_what_fails_without_any_cast_names_none(self, call: Callable[[], object]) -> None:
        with pytest.raises(Exception) as plain:  # noqa: PT011 - whatever torch raises
            call()
        with casts_on(HALF), pytest.raises(type(plain.value)) as raised:
            call()
        assert not hasattr(raised.value, "__notes__")

    @pytest.mark.parametrize(
        ("text", "is_named"),
        [("kernel not implemented for 'Half'", True), ("", True), ("index out of range", False)],
    )
    def test_a_registered_function_is_named_where_types_are_the_matter(
        self, text: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(x: torch.Tensor) -> None:
            raise RuntimeError(*([text] if text else []))

        monkeypatch.setattr(F, "fails", fails, raising=False)
        amp.register_half_function(F, "fails")
        with casts_on(HALF), pytest.raises(RuntimeError) as raised:
            F.fails(ones(2))
        assert hasattr(raised.value, "__notes__") == is_named

    def test_nor_is_a_decorated_one(self) -> None:
        @amp.half_function
        def fails(x: torch.Tensor, text: str) -> None:
            raise RuntimeError(text)

        with casts_on(HALF):
            with pytest.raises(RuntimeError) as raised:
                fails(ones(2), "index out of range")
            assert not hasattr(raised.value, "__notes__")
            with pytest.raises(RuntimeError) as raised:
                fails(ones(2), "not implemented for 'Half'")
            assert "decorated" in raised.value.__notes__[0]
