"""Errors in calls with cast arguments: a note names the cast list only if a cast may be the cause."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import casts_on
from torch import nn, ones
from torch.nn import functional as F
from working_net import Net, initialized

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
def test_a_cast_may_be_the_cause_of_an_error(text: str, before: torch.dtype, after: torch.dtype) -> None:
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
def test_a_cast_cannot_be_the_cause_of_an_error(error: Exception, before: torch.dtype, after: torch.dtype) -> None:
    assert not may_be_caused_by_casts(error, {before}, {after})


def test_a_note_is_added_to_the_error_of_a_cast() -> None:
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
    def test_an_error_without_casts_has_no_note(self, call: Callable[[], object]) -> None:
        with pytest.raises(Exception) as plain:  # noqa: PT011 - whatever torch raises
            call()
        with casts_on(HALF), pytest.raises(type(plain.value)) as raised:
            call()
        assert not hasattr(raised.value, "__notes__")

    def test_an_error_about_types_names_a_decorated_function(self) -> None:
        @amp.half_function
        def fails(x: torch.Tensor, text: str) -> None:
            raise RuntimeError(text)

        with casts_on(HALF):
            with pytest.raises(RuntimeError) as raised:
                fails(ones(2), "index out of range")
            assert not hasattr(raised.value, "__notes__")
            with pytest.raises(RuntimeError) as raised:
                fails(ones(2), "not implemented for 'Half'")
            (note,) = raised.value.__notes__
            assert "fails is decorated" in note


MASK, PLACES = ones(4, 4, dtype=torch.bool), torch.tensor([0])
LARGE = {
    "masked_fill": lambda x: x.masked_fill(MASK, -1e9),
    "masked_fill_": lambda x: x.clone().masked_fill_(MASK, -1e9),
    "clamp": lambda x: x.clamp(min=-1e9),
    "clamp_": lambda x: x.clone().clamp_(max=1e9),
    "full_like": lambda x: torch.full_like(x, -1e9),
    "new_full": lambda x: x.new_full((2,), -1e9),
    "full": lambda x: torch.full((2,), -1e9, dtype=x.dtype),
    "index_fill": lambda x: x.index_fill(0, PLACES, -1e9),
    "pad": lambda x: F.pad(x, (1, 1), value=-1e9),
    "fill_diagonal_": lambda x: x.detach().fill_diagonal_(-1e9),
    "fill_": lambda x: x.detach().fill_(-1e9),
    "scatter": lambda x: x.scatter(0, torch.zeros(1, 4, dtype=torch.long), -1e9),
    "threshold": lambda x: F.threshold(x, 0.0, -1e9),
    "hardtanh": lambda x: F.hardtanh(x, -1e9, 1e9),
    "softshrink": lambda x: F.softshrink(x, 1e9),
    "add": lambda x: torch.add(x, x, alpha=1e9),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x, x[:1]], padding_value=-1e9),
}


def notes_of(function: Callable[[], object]) -> list[str]:
    with pytest.raises(RuntimeError) as raised:
        function()
    return getattr(raised.value, "__notes__", [])


@pytest.mark.usefixtures("_each_implementation")
class TestNumbers:
    """Numbers that are too large for half tensors of amp, in functions that amp does not wrap."""

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("work", LARGE.values(), ids=LARGE)
    def test_a_note_on_a_large_number_says_what_to_type(
        self, work: Callable[[torch.Tensor], object], level: str
    ) -> None:
        (note,) = notes_of(lambda: initialized(lambda layer, x: work(layer(x)), level, HALF)(ones(4, 4)))
        assert "made tensors torch.float16, which holds no number beyond 65504" in note
        assert "Type torch.finfo(x.dtype).min" in note

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize(
        "cure", [lambda x: x.masked_fill(MASK, torch.finfo(x.dtype).min), lambda x: x.float().masked_fill(MASK, -1e9)]
    )
    def test_the_advice_of_the_note_on_a_large_number_works(
        self, cure: Callable[[torch.Tensor], object], level: str
    ) -> None:
        initialized(lambda layer, x: cure(layer(x)), level, HALF)(ones(4, 4))

    @pytest.mark.parametrize("level", ["O4", "O5"])
    def test_a_note_on_a_number_too_large_for_bfloat16(self, level: str) -> None:
        least = torch.finfo(torch.float32).min
        (note,) = notes_of(lambda: initialized(lambda layer, x: layer(x).masked_fill(MASK, least), level)(ones(4, 4)))
        assert "torch.bfloat16, which holds no number beyond 3.38953e+38" in note

    def test_nested_models_add_one_note(self) -> None:
        inner = Net(lambda layer, x: LARGE["masked_fill"](layer(x)))
        outer = nn.Sequential(inner)
        amp.initialize([inner, outer], opt_level="O1", half_dtype=HALF, verbosity=0)
        assert len(notes_of(lambda: outer(ones(4, 4)))) == 1

    def test_a_note_on_a_large_number_in_compiled_code(self) -> None:
        model = torch.compile(
            initialized(lambda layer, x: layer(x).masked_fill(MASK, -1e9), "O1", HALF), backend="eager"
        )
        before = torch.get_autocast_dtype("cpu")
        (note,) = notes_of(lambda: model(ones(4, 4)))
        # Where a graph that runs as it was traced raises, torch turns autocast off again. It forgets its type, and that
        # the blocks have ended, so that autocast would never drop its casts.
        torch.set_autocast_dtype("cpu", before)
        while torch.autocast_increment_nesting() > 1:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        assert "torch.finfo(x.dtype).min" in note

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda _: LARGE["masked_fill"](ones(4, 4).half()), id="outside"),
            pytest.param(lambda model: model(ones(4, 4)), id="no cast"),
            pytest.param(lambda model: (torch.mm(MASK * 1.0, MASK * 1.0), model(ones(4, 4).half())), id="argument"),
            pytest.param(lambda model: (torch.mm(MASK * 1.0, MASK * 1.0), model(ones(4, 4), BFLOAT)), id="other type"),
        ],
    )
    def test_no_note_on_tensors_that_the_user_made_half(self, call: Callable[[nn.Module], object]) -> None:
        class Own(nn.Module):
            def forward(self, x: torch.Tensor, dtype: torch.dtype = HALF) -> object:
                return x.to(dtype).masked_fill(MASK, -1e39)

        model = amp.initialize(Own(), opt_level="O1", half_dtype=HALF, verbosity=0)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # it counts what earlier tests have compiled
        assert notes_of(lambda: call(model)) == []

    def test_no_note_on_other_errors_in_a_model(self) -> None:
        assert notes_of(lambda: initialized(lambda layer, x: layer(x).view(5), "O1", HALF)(ones(4, 4))) == []


class TestBackward:
    """A function of torch meets half and float32 in the backward pass, which amp does not wrap."""

    @staticmethod
    def gradients(level: str, transform: str, half: torch.dtype = HALF, **options: Any) -> object:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))
        net = initialized(net, level, half, **options)

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(net, weights, (x,))
            return result.float().square().mean()

        weights = dict(net.named_parameters())
        if transform == "jacrev":
            return torch.func.jacrev(loss)(weights, ones(5, 4))
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ones(3, 5, 4))

    @pytest.mark.parametrize("transform", ["grad", "jacrev"])
    @pytest.mark.parametrize("half", [HALF, BFLOAT])
    def test_a_note_on_a_backward_pass_says_what_to_type(self, transform: str, half: torch.dtype) -> None:
        (note,) = notes_of(lambda: self.gradients("O1", transform, half=half))
        assert f"made tensors {half}, and the backward pass of a function met float32" in note
        assert "type amp.initialize(..., keep_fp32=nn.BatchNorm1d)" in note
        amp.deinitialize()
        self.gradients("O1", transform, half=half, keep_fp32=nn.BatchNorm1d)

    def test_a_note_on_a_backward_pass_with_half_weights(self) -> None:
        (note,) = notes_of(lambda: self.gradients("O2", "jacrev"))
        assert "type amp.initialize(..., opt_level='O1', keep_fp32=nn.BatchNorm1d)" in note

    def test_no_note_on_a_backward_pass_without_casts(self) -> None:
        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("expected scalar type Half but found Float")

        leaf = ones(2, requires_grad=True)
        torch._dynamo.utils.counters.clear()
        with casts_on(HALF):
            assert notes_of(lambda: Raises.apply(leaf).sum().backward()) == []
            torch.mm(ones(2, 2), ones(2, 2))
            assert len(notes_of(lambda: Raises.apply(leaf).sum().backward())) == 1
